"""The REST service: the app, and what runs it. Everything else is in service/."""

from __future__ import annotations

import sys

from tilewise.service.app import create_app
from tilewise.service.asking import MODEL_HEADER
from tilewise.service.run import app_from_environment, serve

__all__ = ["MODEL_HEADER", "app_from_environment", "create_app", "main", "serve"]


def main() -> None:
    """`python -m tilewise.server` is `tilewise serve`."""
    from tilewise.cli import main as run

    sys.exit(run(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
