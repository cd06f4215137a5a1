"""`tilewise token`: make, list and revoke the tokens of the REST service."""

from __future__ import annotations

import argparse

from tilewise.cli_output import print_json
from tilewise.service.access import SCOPES, add_token, list_tokens, revoke_token
from tilewise.service.catalogue import Catalogue
from tilewise.service.settings import Settings
from tilewise.service.times import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    add = actions.add_parser("add", help="make a token and print it, once")
    add.add_argument("name", help="what to call it")
    add.add_argument("--scope", choices=SCOPES, default="read", help="what it may do (default: read)")
    listing = actions.add_parser("list", help="print names, scopes and ages")
    listing.add_argument("--json", action="store_true", help="print JSON")
    revoke = actions.add_parser("revoke", help="refuse a token from now on")
    revoke.add_argument("name", help="of the token")
    for one in (add, listing, revoke):
        one.add_argument("--home", metavar="DIR", help="home of the service (default: $TILEWISE_HOME)")


def run(args: argparse.Namespace) -> int:
    catalogue = Catalogue(Settings.from_env(home=args.home).url)
    if args.action == "add":
        print(add_token(catalogue, args.name, args.scope))
    elif args.action == "revoke":
        revoke_token(catalogue, args.name)
    else:
        found = [{**one, "created_at": shown(one["created_at"])} for one in list_tokens(catalogue)]
        if args.json:
            print_json(found)
        else:
            for one in found:
                print(f"{one['name']:<24}{one['scope']:<8}{one['created_at']}")
    return 0
