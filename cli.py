"""The `tilewise` command: the parser, and errors as one plain line. What commands do is in cli_commands.py."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise import cli_commands as commands
from tilewise import cli_duels as duels
from tilewise.cli_commands import FALLBACK_ARCH
from tilewise.data.records import COLUMNS, shorten
from tilewise.errors import TilewiseError
from tilewise.kernels.arch import ARCHS
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.kernels.registry import OPS

# Subcommands whose modules need more than numpy: name to module and help. A module has
# `add_arguments(parser)` and `run(args) -> int`, and is imported when its command is given.
LAZY = {
    "collect": ("tilewise.kernels.collect", "time launches on this GPU and write profile rows"),
    "compare": ("tilewise.dispatch.command_compare", "list the shapes whose pick another model changes"),
    "dump": ("tilewise.dispatch.command_dump", "decide for a whole grid of shapes, and print the digest of that"),
    "capture-plan": ("tilewise.dispatch.command_capture_plan", "say what to compile and load before graph capture"),
    "export": ("tilewise.cli_export", "write the timings as profile rows, T4 results or aiter's tuned table"),
    "retrain": ("tilewise.cli_retrain", "import, train, judge, and put the model in force if it is no worse"),
    "report": ("tilewise.cli_report", "write one HTML page about the model in force"),
    "suggest": ("tilewise.cli_suggest", "name the launches that are worth timing next"),
    "token": ("tilewise.service.command_token", "make, list or revoke tokens of the REST service"),
    "db": ("tilewise.service.command_db", "upgrade, back up or restore the catalogue of the REST service"),
    "audit": ("tilewise.kernels.paged_mqa_logits.gfx950.audit", "compile the gfx950 kernels and check their code"),
}

# What brings each optional package.
EXTRAS = {
    "alembic": "server",
    "fastapi": "server",
    "httptools": "server",
    "prometheus_client": "server",
    "psycopg": "postgresql",
    "matplotlib": "plot",
    "pyarrow": "train",
    "pydantic": "server",
    "rich": "train",
    "sklearn": "train",
    "sqlalchemy": "server",
    "starlette": "server",
    "torch": "gpu",
    "tqdm": "collect",
    "triton": "gpu",
    "uvicorn": "server",
}

OP = "paged_mqa_logits"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as in docs/cli.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    _ready_streams()
    try:
        args = build_parser(words[0] if words else None).parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except TilewiseError as error:
        print(f"tilewise: {error}", file=sys.stderr)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"tilewise: this needs {missing}: pip install -e '.[{EXTRAS[missing]}]'", file=sys.stderr)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that may not be written, a full disk, ...
        print(f"tilewise: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def _ready_streams() -> None:
    """Where a stream is closed, what goes there is dropped; what its encoding lacks is written as an escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser. Of the commands in LAZY only `command` gets its arguments, since they take imports."""
    parser = argparse.ArgumentParser(
        prog="tilewise", description="Pick how to launch GPU attention-indexer kernels, from measured timings."
    )
    parser.add_argument("--version", action="version", version=__version__, help="print the version and stop")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (text, add_arguments, run) in COMMANDS.items():
        own = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_arguments(own)
        own.set_defaults(run=run)
    for name, (module, text) in LAZY.items():
        if _exists(module):
            own = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
            if name == command:
                loaded: Any = importlib.import_module(module)
                loaded.add_arguments(own)
                own.set_defaults(run=loaded.run)
    return parser


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--home",
        type=_folder,
        metavar="DIR",
        help="folder of imported profiles and published models (default: $TILEWISE_HOME)",
    )


def _arch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        help=f"GPU: {', '.join(ARCHS)}, an ISA, or <isa>-<n>cu (default: this machine's GPU, or {FALLBACK_ARCH})",
    )
    parser.add_argument("--op", choices=list(OPS), default=OP, help=f"op (default: {OP})")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _shape(parser: argparse.ArgumentParser) -> None:
    meaning = {column.name: column.doc for column in COLUMNS}
    for field in dataclasses.fields(Shape):
        required = field.default is dataclasses.MISSING
        note = "" if required else f" (default: {field.default or 'max_context_len'})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=str if isinstance(field.default, str) else int,
            required=required,
            metavar="N",
            help=meaning[field.name] + note,
        )
    _arch(parser)
    _home(parser)
    _json(parser)


def add_rank(parser: argparse.ArgumentParser) -> None:
    _shape(parser)
    parser.add_argument("--top", type=_between(1, 1 << 20), metavar="N", help="print the best N only")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    _arch(parser)
    _home(parser)
    _json(parser)
    parser.add_argument("--seed", type=_SEED, default=0, help="first seed of folds and training (default: 0)")
    parser.add_argument(
        "--seeds", type=_between(1, 100), default=5, metavar="N", help="seeds to try, figures are of all (default: 5)"
    )
    parser.add_argument(
        "--leave-out",
        action="append",
        choices=LEAVE_OUT,
        help="hold out each value of this field in turn, too; repeatable (default: batch_size, next_n, max_context_len "
        "and heads)",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, and no field held out")
    _jobs(parser)
    parser.add_argument(
        "--context",
        action="store_true",
        help="judge the one config for every context instead, as under a captured graph",
    )
    duels.add_arguments(parser)


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}, got {shorten(text)}")
        return value

    return number


def _folds(text: str) -> int:
    return 0 if text == "0" else _between(2, MAX_FOLDS)(text)


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{6,64}", text):
        raise argparse.ArgumentTypeError(f"must be the first 6 to 64 digits of a digest, got {shorten(text)}")
    return text


def _folder(text: str) -> str:
    if not text:  # an unset variable, more often than the present folder
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return text


_SEED = _between(0, 2**32 - 1)  # what numpy's generators take
MAX_FOLDS = 1000
# Fields of which the shipped profile has several values, and which the model must carry over.
LEAVE_OUT = ("batch_size", "next_n", "heads", "block_kv", "max_context_len")


def _traffic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traffic", type=Path, metavar="FILE", help="shapes that are asked for, with counts: they weigh more"
    )


def _jobs(parser: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=_between(1, 1024), default=cores, metavar="N", help="processes (default: one for each core)"
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    _arch(parser)
    _home(parser)
    _json(parser)
    parser.add_argument("--seed", type=_SEED, default=0, help="seed of training (default: 0)")
    parser.add_argument(
        "--folds",
        type=_folds,
        default=10,
        metavar="N",
        help=f"held-out folds for the metrics, 2 to {MAX_FOLDS}, or 0 for none (default: 10)",
    )
    parser.add_argument("--out", type=_folder, metavar="DIR", help="write the bundle to DIR and publish nothing")
    _traffic(parser)
    _jobs(parser)


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Parquet, JSON lines, CSV, Kernel Tuner's T4 results or aiter's tuned table, by content",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="a column that a T4 file or a tuned table lacks, such as arch=h200; repeatable",
    )
    _home(parser)
    _json(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--fd", type=_between(0, 1 << 20), metavar="N", help="serve on this open socket, not on --host and --port"
    )
    parser.add_argument("--port", type=_between(0, 65535), default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--tls-certificate", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")
    parser.add_argument("--workers", type=_between(1, 1024), default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--arch", action="append", help="GPU to serve, repeatable; the first is the default (default: all)"
    )
    levels = ("critical", "error", "warning", "info", "debug")
    parser.add_argument("--log-level", default="info", choices=levels, help="how much is logged (default: info)")
    _home(parser)


def add_models(parser: argparse.ArgumentParser) -> None:
    _arch(parser)
    _home(parser)
    _json(parser)
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--promote", type=_digest, metavar="DIGEST", help="put a published version in force, by its first digits"
    )
    change.add_argument("--rollback", action="store_true", help="put the version before the present one in force")


# Name to help, arguments and action, in the order of `tilewise --help`.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "select": ("print the config to launch for a shape", _shape, commands.run_select),
    "rank": ("print every candidate for a shape, best first", add_rank, commands.run_rank),
    "explain": ("print the decision for a shape and why each other candidate lost", _shape, commands.run_explain),
    "evaluate": (
        "print the regret of the model on held-out shapes, beside three baselines",
        add_evaluate,
        commands.run_evaluate,
    ),
    "train": ("train a model on shipped and imported timings and publish it", add_train, commands.run_train),
    "import": ("check profile files and add their good rows to the store", add_import, commands.run_import),
    "models": ("list the published models, promote one or go back", add_models, commands.run_models),
    "serve": ("run the REST service", add_serve, commands.run_serve),
    "schema": ("print the columns of a profile", _json, commands.run_schema),
    "version": ("print the version", _json, commands.run_version),
}
