"""What each `tilewise` command does: call one function elsewhere with the arguments, and print what comes back."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import __version__, cli_duels
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
from tilewise.data.home import home_dir, require_writable
from tilewise.errors import InvalidBundleError, InvalidProfileError, UnsupportedError
from tilewise.kernels.arch import current_arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Shape

if TYPE_CHECKING:
    from tilewise.data.store import ImportReport

FALLBACK_ARCH = "h200"  # where no GPU is found

_SCHEMA_TEXT = """\
Written by `tilewise schema`; the source is `data/records.py`, where `check_row` is the whole rule of a good row. A
profile is a Parquet, JSON lines or CSV file with these columns; those that may be null may also be left out. An empty
CSV field is null where null is allowed.

Beyond types and ranges, a row whose status is `correct` must be possible: its config may launch its shape on its arch
(a kernel that is not registered is taken, and dropped by training); its time is at least {LEAST_US} us and
{LEAST_OF_FLOOR} of the floor, which is the larger of bytes over bandwidth and flops over rate (flops alone with a warm
cache; no floor for a GPU whose rates are not known), and at most {MOST_US:.0f} us; its error is at most {MAX_ERROR}.
In any row, `compute_units` is that of the arch, and `measured_at` is not in the future."""


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


def _evaluate_context(args: argparse.Namespace) -> int:
    from tilewise.models.bundle import Bundle
    from tilewise.models.evaluate_context import evaluate_context
    from tilewise.models.registry import current

    arch, profile = _profile(args)
    gain = None  # what picks are asked for is that of the model in force, where there is one
    with contextlib.suppress(InvalidBundleError):
        bundle = Bundle.load(current(args.op, arch, args.home))
        gain, _ = bundle.guard.margin({}, bundle.noise_margin)
    with progress_bar() as progress:
        result = evaluate_context(profile.columns, op=args.op, arch=arch, seed=args.seed, gain=gain, progress=progress)
    if args.json:
        print_json(result)
        return 0
    print_fields({name: value for name, value in result.items() if name != "kinds"}, width=32)
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    if args.context:
        return _evaluate_context(args)
    from tilewise.models.evaluate import LEAVE_OUT, evaluate

    arch, profile = _profile(args)
    with progress_bar() as progress:
        result = evaluate(
            profile.columns,
            op=args.op,
            arch=arch,
            seed=args.seed,
            seeds=1 if args.quick else args.seeds,
            leave_out=args.leave_out or (() if args.quick else LEAVE_OUT),
            limit=args.duels_limit,
            jobs=args.jobs,
            progress=progress,
        )
    if args.duels_out is not None:
        cli_duels.write(result["beyond"], arch, args)
    print_json(result) if args.json else print_evaluation(result)
    return 0


def _check_place(args: argparse.Namespace, arch: str) -> None:
    """Refuse, before minutes of training, a place that cannot take the bundle or holds something else."""
    from tilewise.models.bundle import MANIFEST

    if args.out is None:
        require_writable(home_dir(args.home) / "models" / args.op / arch)
        return
    out = Path(args.out).resolve()
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UnsupportedError(f"--out must be a new folder, an empty one or a bundle, which is replaced, got {out}")
    require_writable(out.parent)


def run_train(args: argparse.Namespace) -> int:
    from tilewise.data.traffic import read_traffic
    from tilewise.models import latency, registry

    arch, profile = _profile(args)
    _check_place(args, arch)
    note(f"training on {len(profile)} rows of {args.op} on {arch}")
    with progress_bar() as progress:
        bundle = latency.train(
            profile.columns,
            op=args.op,
            arch=arch,
            seed=args.seed,
            folds=args.folds,
            traffic=None if args.traffic is None else read_traffic(args.traffic),
            jobs=args.jobs,
            progress=progress,
        )
    place = registry.publish(bundle, args.home) if args.out is None else bundle.save(Path(args.out).resolve())
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


def _already(report: ImportReport) -> str:
    if report.new or not report.accepted:
        return f", {report.shipped} of them are shipped with tilewise" if report.shipped else ""
    where = "come with tilewise" if report.shipped == report.accepted else "were there"
    return f"; all of them {where} already, nothing changed"


def run_import(args: argparse.Namespace) -> int:
    from tilewise.data.exchange import parse_defaults
    from tilewise.data.store import import_file

    defaults = parse_defaults(args.set)
    reports = {}
    for path in args.files:
        report = import_file(path, args.home, defaults=defaults, on_reject=functools.partial(_note_row, path))
        reports[str(path)] = report
        if not args.json:
            counts = f"{report.accepted} rows accepted, {report.duplicates} repeated, {report.rejected} rejected"
            print(f"{path}: {counts}{_already(report)}")
        if report.left_out:
            note(
                f"{path}: training passes over {report.left_out} of these timings, which are not of graph replays with "
                f"a cold cache; if they are, say so with --set timing_method=graph --set cache_state=cold"
            )
    if args.json:
        print_json({path: report.to_dict() for path, report in reports.items()})
    return 1 if any(report.rejected for report in reports.values()) else 0


def run_serve(args: argparse.Namespace) -> int:
    from tilewise.server import serve

    try:
        serve(
            host=args.host,
            port=args.port,
            fd=args.fd,
            workers=args.workers,
            arch_names=args.arch or (),
            home=args.home,
            log_level=args.log_level,
            tls_certificate=args.tls_certificate,
            tls_key=args.tls_key,
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that is none
        where = f"{args.host}:{args.port}" if args.fd is None else f"file descriptor {args.fd}"
        note(f"tilewise: cannot serve on {where}: {getattr(error, 'strerror', None) or error}")
        return 1
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
    from tilewise.data import records
    from tilewise.data.records import SCHEMA_VERSION, schema_table

    if args.json:
        print_json([dict(zip(("column", "type", "meaning"), row, strict=True)) for row in schema_table()])
        return 0
    limits = {name: getattr(records, name) for name in ("LEAST_US", "LEAST_OF_FLOOR", "MOST_US", "MAX_ERROR")}
    print(f"# Profile schema, version {SCHEMA_VERSION}\n\n{_SCHEMA_TEXT.format(**limits)}\n")
    print("| column | type | meaning |\n|---|---|---|")
    for column, kind, meaning in schema_table():
        escaped = meaning.replace("|", "\\|").replace("<", "\\<")
        print(f"| `{column}` | {kind} | {escaped} |")
    return 0


def run_version(args: argparse.Namespace) -> int:
    print_json({"version": __version__}) if args.json else print(__version__)
    return 0
