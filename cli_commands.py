"""What each `tilewise` command does: call one function elsewhere with the arguments, and print what comes back."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise.cli_output import (
    note,
    print_decision,
    print_evaluation,
    print_explanation,
    print_fields,
    print_json,
    print_metrics,
    progress_bar,
    us,
)
from tilewise.errors import InvalidProfileError, UnsupportedError
from tilewise.kernels.arch import current_arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Shape

FALLBACK_ARCH = "h200"  # where no GPU is found

_SCHEMA_TEXT = """\
Written by `tilewise schema`; the source is `data/records.py`, where `check_row` is the whole rule of a good row. A
profile is a Parquet, JSON lines or CSV file with these columns; those that may be null may also be left out. An empty
CSV field is null where null is allowed."""


def _shape_of(args: argparse.Namespace) -> Shape:
    given = {name: getattr(args, name) for name in SHAPE_FIELDS}
    return Shape(**{name: value for name, value in given.items() if value is not None})


def arch_name(args: argparse.Namespace) -> str:
    """The GPU asked for; else the one that torch sees here; else FALLBACK_ARCH."""
    if args.arch is not None:
        return get_arch(args.arch).name
    if importlib.util.find_spec("torch") is None:
        return FALLBACK_ARCH
    found = current_arch().name
    return FALLBACK_ARCH if found == "cpu" else found


def _selector(args: argparse.Namespace) -> Any:
    from tilewise.dispatch.selector import Selector

    return Selector(get_arch(arch_name(args)), op=args.op, home=args.home)


def run_select(args: argparse.Namespace) -> int:
    selector, shape = _selector(args), _shape_of(args)
    decision = selector.select(shape)
    if args.json:
        print_json({"arch": selector.arch.name, "shape": shape.to_dict(), **decision.to_dict()})
    else:
        print_decision(selector.arch.name, shape, decision)
    return 0


def run_rank(args: argparse.Namespace) -> int:
    ranked = _selector(args).rank(_shape_of(args))[: args.top]
    if args.json:
        print_json([one.to_dict() for one in ranked])
        return 0
    for place, one in enumerate(ranked, start=1):
        print(f"{place:4}  {us(one.predicted_us):>14}  {one.config}")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    explained = _selector(args).explain(_shape_of(args))
    if args.json:
        print_json(explained.to_dict())
    else:
        print_explanation(explained)
    return 0


def _profile(args: argparse.Namespace) -> tuple[str, Any]:
    from tilewise.data.store import load_profile

    arch = arch_name(args)
    profile = load_profile(args.op, arch, home=args.home)
    if not len(profile):
        raise InvalidProfileError(f"there are no timings of {args.op} on {arch}: add some with `tilewise import`")
    return arch, profile


def run_evaluate(args: argparse.Namespace) -> int:
    from tilewise.models.evaluate import evaluate

    arch, profile = _profile(args)
    with progress_bar() as progress:
        result = evaluate(
            profile.columns, op=args.op, arch=arch, seed=args.seed, leave_out=args.leave_out, progress=progress
        )
    print_json(result) if args.json else print_evaluation(result)
    return 0


def run_train(args: argparse.Namespace) -> int:
    from tilewise.models import latency, registry

    arch, profile = _profile(args)
    note(f"training on {len(profile)} rows of {args.op} on {arch}")
    with progress_bar() as progress:
        bundle = latency.train(
            profile.columns, op=args.op, arch=arch, seed=args.seed, folds=args.folds, progress=progress
        )
    place = registry.publish(bundle, args.home) if args.out is None else bundle.save(args.out)
    result = {
        "model_id": bundle.model_id,
        "digest": bundle.digest,
        "profile_digest": profile.digest,
        "rows": len(profile),
        "dropped": bundle.manifest["data"]["dropped"],
        "path": str(place),
        "metrics": bundle.manifest["metrics"],
    }
    if args.json:
        print_json(result)
        return 0
    dropped = [f"{count} ({reason})" for reason, count in result["dropped"].items()]
    print_fields({**result, "metrics": None, "dropped": "; ".join(dropped) or "none"})
    print_metrics(bundle.manifest["metrics"])
    return 0


def _note_row(path: Path, number: int, reason: str) -> None:
    note(f"{path} row {number}: {reason}")


def run_import(args: argparse.Namespace) -> int:
    from tilewise.data.store import import_file

    reports = {}
    for path in args.files:
        report = import_file(path, args.home, on_reject=functools.partial(_note_row, path))
        reports[str(path)] = report
        if not args.json:
            counts = f"{report.accepted} rows accepted, {report.duplicates} repeated, {report.rejected} rejected"
            known = "" if report.new or not report.accepted else "; all of them were there already, nothing changed"
            print(f"{path}: {counts}{known}")
    if args.json:
        print_json({path: report.to_dict() for path, report in reports.items()})
    return 1 if any(report.rejected for report in reports.values()) else 0


def run_serve(args: argparse.Namespace) -> int:
    from tilewise.server import serve

    serve(
        host=args.host,
        port=args.port,
        workers=args.workers,
        arch_names=args.arch or (),
        home=args.home,
        log_level=args.log_level,
    )
    return 0


def run_models(args: argparse.Namespace) -> int:
    from tilewise.models import registry
    from tilewise.models.bundle import Bundle

    arch = arch_name(args)
    if args.promote is not None:
        registry.promote(args.op, arch, args.promote, args.home)
    elif args.rollback:
        registry.rollback(args.op, arch, args.home)
    folder = registry.current(args.op, arch, args.home)
    if not folder.is_dir():
        raise UnsupportedError(f"there is no model of {args.op} on {arch}: make one with `tilewise train`")
    bundle = Bundle.load(folder)
    history = registry.history(args.op, arch, args.home)
    metrics = bundle.manifest["metrics"]
    result = {"model_id": bundle.model_id, "digest": bundle.digest, "path": str(folder), "history": history}
    if args.json:
        print_json({**result, "data": bundle.manifest["data"], "metrics": metrics})
        return 0
    print_fields({**result, "history": " ".join(digest[:12] for digest in history) or "nothing published"})
    print_metrics(metrics)
    return 0


def run_schema(args: argparse.Namespace) -> int:
    from tilewise.data.records import SCHEMA_VERSION, schema_table

    if args.json:
        print_json([dict(zip(("column", "type", "meaning"), row, strict=True)) for row in schema_table()])
        return 0
    print(f"# Profile schema, version {SCHEMA_VERSION}\n\n{_SCHEMA_TEXT}\n\n| column | type | meaning |\n|---|---|---|")
    for column, kind, meaning in schema_table():
        escaped = meaning.replace("|", "\\|").replace("<", "\\<")
        print(f"| `{column}` | {kind} | {escaped} |")
    return 0


def run_version(args: argparse.Namespace) -> int:
    print_json({"version": __version__}) if args.json else print(__version__)
    return 0
