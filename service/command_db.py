"""`tilewise db`: bring the catalogue up to date, write a backup, put one back."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilewise.service.backup import backup, restore
from tilewise.service.catalogue import Catalogue, open_engine, upgrade
from tilewise.service.files import reconcile
from tilewise.service.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    up = actions.add_parser(
        "upgrade", help="bring the schema of the catalogue up to date, and its lists in line with the files"
    )
    write = actions.add_parser(
        "backup", help="write profiles, models and catalogue to one file, while the service runs"
    )
    read = actions.add_parser("restore", help="put a backup back, into an empty home and catalogue")
    for one in (write, read):
        one.add_argument("file", type=Path, metavar="FILE", help="a tar file")
    for one in (up, write, read):
        one.add_argument("--home", metavar="DIR", help="home of the service (default: $TILEWISE_HOME)")


def run(args: argparse.Namespace) -> int:
    settings = Settings.from_env(home=args.home)
    catalogue = Catalogue(settings.url)
    if args.action == "upgrade":
        engine = open_engine(settings.url)
        passed = upgrade(engine)
        engine.dispose()
        reconcile(catalogue, settings.home)
        print(f"revisions passed: {', '.join(passed)}" if passed else "the catalogue is up to date")
    elif args.action == "backup":
        print(f"{backup(catalogue, settings.home, args.file)} files and the catalogue are in {args.file}")
    else:
        print(f"{restore(catalogue, settings.home, args.file)} files and the catalogue are back in {settings.home}")
    return 0
