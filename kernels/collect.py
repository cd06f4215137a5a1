"""`tilewise collect`: measure launches on this machine's GPU and write profile rows.

The work is a list of steps, one per shape and pass. Each finished step is one Parquet file that appears whole, so a
killed run goes on where it stopped; a launch that takes the GPU context down is noted, and the run restarts itself
without it. The only module in kernels/ that knows the profile's schema.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tilewise.errors import TilewiseError, UnsupportedError
from tilewise.kernels.arch import Arch, current_arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, candidates, cdiv, default_config
from tilewise.kernels.paged_mqa_logits.traits import usual_traits
from tilewise.kernels.registry import kernel_source_hash
from tilewise.kernels.shape_sets import SETS, Target, named_set, read_targets

# What a row's pass_index says; see data.records.
FIRST_PASS, SECOND_PASS, DUEL_PASS = 0, 1, 2
DUEL_SIZE = 4  # best candidates of a shape that are timed again, against each other and the default


@dataclass(frozen=True, slots=True)
class Step:
    """One shape in one pass."""

    target: Target
    pass_index: int

    @property
    def key(self) -> str:
        """Name of the step's file: the same step of the same kernels, and only that, has it."""
        hashes = sorted(kernel_source_hash(kernel) for kernel in _kernels())
        text = f"{self.target.shape}/{self.target.contexts}/{self.pass_index}/{hashes}"
        if self.target.configs is not None:
            text += f"/{self.target.configs}"
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--shapes", default="profile", help=f"a set ({', '.join(SETS)}) or a file of JSON lines")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of this run; the same folder resumes it")
    parser.add_argument("--out", type=Path, help="the Parquet file to write (default: profile.parquet in the run dir)")
    parser.add_argument("--arch", help="refuse to run unless this machine's GPU is this one")
    parser.add_argument("--budget", type=_least(1), help="at most this many candidates per shape, drawn at random")
    parser.add_argument("--rounds", type=_least(1), default=7, help="timed replays per candidate (default 7)")
    parser.add_argument("--duel-rounds", type=_least(1), default=11, help="more replays for the best ones (default 11)")
    parser.add_argument("--time-limit", type=_least(0, float), help="stop after this many seconds, between two shapes")
    parser.add_argument("--done", type=Path, action="append", default=[], help="earlier profile: skip what it has")
    parser.add_argument("--jobs", type=_least(1), default=os.cpu_count() or 1, help="processes that compile ahead")
    parser.add_argument("--seed", type=_least(0), default=0, help="seed of all that is drawn (default 0)")
    parser.add_argument("--commit", default=None, help="commit to record, where the source tree has no git")


def _least(low: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """An argparse type: a number of at least `low`."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value < 1 << 31:  # nor nan
            raise argparse.ArgumentTypeError(f"must be {low} to {(1 << 31) - 1}, got {text!r}")
        return value

    return number


def run(args: argparse.Namespace) -> int:
    """Measure, and write the profile. Returns 0 when every step is done, 3 when the time limit came first."""
    for package in ("torch", "triton", "tqdm", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(f"collect needs a GPU and {package}: pip install -e '.[gpu,collect]'")
    deadline = float(os.environ.get("TILEWISE_COLLECT_DEADLINE", 0)) or time.time() + (args.time_limit or 1e9)
    os.environ["TILEWISE_COLLECT_DEADLINE"] = str(deadline)  # a restart keeps it
    arch = current_arch()
    if arch.name == "cpu":
        raise UnsupportedError("collect needs a GPU that torch can see, and there is none")
    if args.arch and get_arch(args.arch).name != arch.name:
        raise UnsupportedError(f"this machine's GPU is {arch.name}, not {get_arch(args.arch).name}")
    targets = named_set(args.shapes, arch) if args.shapes in SETS else read_targets(Path(args.shapes))
    parts = args.run_dir / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    done = {path.stem for path in parts.glob("*.parquet")} | _done_elsewhere(args.done, targets)
    steps = [step for step in _steps(targets) if step.key not in done]
    print(f"{arch.name}: {len(targets)} shapes, {len(steps)} steps to do, {len(done)} done before", flush=True)
    _compile_ahead(steps, arch, args)
    out = args.out or args.run_dir / "profile.parquet"
    try:
        left = _measure(steps, arch, args, parts, deadline)
    finally:  # what was measured is kept, whatever ended the run
        print(f"{_merge(parts, out)} rows in {out}", flush=True)
    print(f"{left} steps left", flush=True)
    return 3 if left else 0


def _steps(targets: Sequence[Target]) -> list[Step]:
    # The second pass of a shape runs as long after the first as the run allows.
    first = [Step(target, FIRST_PASS) for target in targets if not target.duel]
    second = [Step(target, SECOND_PASS) for target in targets if target.judged and not target.duel]
    return first + second + [Step(target, DUEL_PASS) for target in targets if target.duel]


def _candidates(step: Step, arch: Arch, args: argparse.Namespace) -> list[Config]:
    every = candidates(step.target.shape, arch) if step.target.configs is None else list(step.target.configs)
    if args.budget is None or step.target.judged or step.target.duel or len(every) <= args.budget:
        return every
    drawn = random.Random(f"{args.seed}/{step.target.shape}").sample(every[1:], args.budget - 1)
    return [every[0], *drawn]


def _measure(steps: Sequence[Step], arch: Arch, args: argparse.Namespace, parts: Path, deadline: float) -> int:
    """Do the steps in groups that share one page pool; returns how many the deadline left."""
    from tqdm import tqdm

    from tilewise.kernels.timing import PagePool

    environment = _environment(arch, args.commit)
    left = len(steps)
    with tqdm(total=left, unit="shape", smoothing=0.05, mininterval=5, dynamic_ncols=True) as bar:
        for pass_index in (FIRST_PASS, SECOND_PASS, DUEL_PASS):
            layouts = dict.fromkeys(_layout(step) for step in steps)
            for layout in layouts:
                group = [step for step in steps if _layout(step) == layout and step.pass_index == pass_index]
                if not group or time.time() > deadline:
                    continue
                block_kv, head_dim = layout
                pages = max(sum(cdiv(c, block_kv) for c in step.target.context_lens) for step in group)
                # Small launches walk many disjoint sets of pages; three cachefuls serve them all.
                least = cdiv(4 * arch.last_level_cache_bytes, block_kv * (head_dim + 4))
                pool = PagePool(max(pages, least), block_kv, head_dim, args.seed)
                for step in group:
                    if time.time() > deadline:
                        break
                    _write(parts, step, _do_step(step, pool, arch, args, environment, parts.parent))
                    left -= 1
                    bar.update()
                del pool
    return left


def _layout(step: Step) -> tuple[int, int]:
    return step.target.shape.block_kv, step.target.shape.head_dim


def _do_step(
    step: Step, pool: Any, arch: Arch, args: argparse.Namespace, environment: dict[str, Any], run_dir: Path
) -> list[dict[str, Any]]:
    """Time every candidate of one shape, then duel the best; returns the rows."""
    from tilewise.kernels.timing import Timing, make_problem, time_again, time_candidates

    target = step.target
    known_bad = _failures(run_dir, step)
    configs = [config for config in _candidates(step, arch, args) if config not in known_bad]
    random.Random(f"{args.seed}/{step.key}").shuffle(configs)
    width = max(256, max(target.context_lens, default=1))
    seed = args.seed + step.pass_index
    problem = make_problem(target.shape, target.context_lens, pool, arch, logits_width=width, seed=seed)
    before = _clock_mhz()
    rounds = args.duel_rounds if step.pass_index == DUEL_PASS else args.rounds
    timings = time_candidates(problem, configs, arch, rounds=rounds, seed=seed)
    for timing in timings:
        if timing.status == "runtime" and "error" in (timing.reason or "").lower():
            _note_failure(run_dir, step, timing)  # the context may be gone: start over without this candidate
            os.execv(sys.executable, sys.orig_argv)
    timings += [Timing(config, "runtime", reason) for config, reason in known_bad.items()]
    rows = [(timing, step.pass_index) for timing in timings]
    if step.pass_index == FIRST_PASS:
        correct = sorted((t for t in timings if t.status == "correct"), key=lambda t: t.median_us)
        default = default_config(target.shape, arch)
        duel = [
            Timing(timing.config, max_error=timing.max_error)
            for rank, timing in enumerate(correct)
            if rank < DUEL_SIZE or timing.config == default
        ]
        time_again(problem, duel, arch, rounds=args.duel_rounds, seed=seed)
        rows += [(timing, DUEL_PASS) for timing in duel if timing.samples_us]
    after = _clock_mhz()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return [
        {
            **environment,
            **target.shape.to_dict(),
            **timing.config.to_dict(),
            "contexts": target.contexts,
            "logits_width": width,
            "status": timing.status,
            "reason": timing.reason,
            "latency_us": timing.median_us if timing.samples_us else None,
            "latency_p20_us": timing.percentile(0.2) if timing.samples_us else None,
            "latency_p80_us": timing.percentile(0.8) if timing.samples_us else None,
            "rounds": len(timing.samples_us),
            "launches_per_replay": problem.launches,
            "footprint_bytes": problem.footprint_bytes,
            "max_error": timing.max_error,
            "pass_index": pass_index,
            "kernel_hash": kernel_source_hash(timing.config.kernel),
            "clock_before_mhz": before,
            "clock_after_mhz": after,
            "measured_at": now,
        }
        for timing, pass_index in rows
    ]


def _compile_ahead(steps: Sequence[Step], arch: Arch, args: argparse.Namespace) -> None:
    """Fill Triton's disk cache with every kernel of the run, in parallel: a compilation in a timed run costs more."""
    from tqdm import tqdm

    from tilewise.kernels.paged_mqa_logits.launch import launcher

    wanted: dict[tuple[object, ...], tuple[Target, Config]] = {}
    for step in steps:
        for config in _candidates(step, arch, args):
            key = launcher(config.kernel).launch_key(step.target.shape, config, usual_traits(step.target.shape))
            wanted.setdefault(key, (step.target, config))
    if not wanted or args.jobs < 2:
        return
    # Largest first, so that no slow one is left alone at the end.
    ordered = sorted(wanted.values(), key=lambda pair: -pair[1].fuse_n * pair[0].shape.heads)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_compile_one, target.shape, config) for target, config in ordered]
        for future in tqdm(as_completed(futures), total=len(futures), unit="kernel", desc="compiling", mininterval=5):
            future.result()


def _compile_one(shape: Any, config: Config) -> None:
    """Runs in a worker: compile one kernel into the disk cache. A failure is left for the timed run to report."""
    import contextlib

    from tilewise.kernels.paged_mqa_logits.launch import compile_config

    with contextlib.suppress(Exception):
        compile_config(shape, config, usual_traits(shape))


def _write(parts: Path, step: Step, rows: Sequence[dict[str, Any]]) -> None:
    from tilewise.data.records import check_row
    from tilewise.data.table import IncomingFile

    with IncomingFile(parts) as file:
        for row in rows:
            reason = check_row(row)
            if reason is not None:
                raise TilewiseError(f"the collector made a bad row, which is a bug: {reason}")
            file.add(row)
        file.publish(parts / f"{step.key}.parquet", mode=0o644)


def _merge(parts: Path, out: Path) -> int:
    """One file of all finished steps, sorted by time; returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tilewise.data.table import read_table, schema

    tables = [read_table(path) for path in sorted(parts.glob("*.parquet"))]
    table = pa.concat_tables(tables) if tables else schema().empty_table()
    order = ["measured_at", "batch_size", "next_n", "heads", "max_context_len", "pass_index"]
    table = table.sort_by([(name, "ascending") for name in order])
    temporary = out.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd", compression_level=9)
    temporary.rename(out)
    return int(table.num_rows)


def _done_elsewhere(files: Iterable[Path], targets: Sequence[Target]) -> set[str]:
    """Keys of the steps that earlier profiles hold already, with today's kernels."""
    from tilewise.data.records import shape_of
    from tilewise.data.table import read_table

    by_name = {(target.shape, target.contexts): target for target in targets}
    done = set()
    for path in files:
        for row in read_table(path).to_pylist():
            target = by_name.get((shape_of(row), row["contexts"]))
            current = row["kernel"] in _kernels() and row["kernel_hash"] == kernel_source_hash(row["kernel"])
            if target is not None and current and row["pass_index"] != DUEL_PASS:
                done.add(Step(target, row["pass_index"]).key)
    return done


def _kernels() -> list[str]:
    from tilewise.kernels.paged_mqa_logits.spec import SPACES

    return list(SPACES)


def _failures(run_dir: Path, step: Step) -> dict[Config, str]:
    path = run_dir / "failures.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {Config.from_dict(e["config"]): e["reason"] for e in entries if e["step"] == step.key}


def _note_failure(run_dir: Path, step: Step, timing: Any) -> None:
    entry = {"step": step.key, "config": timing.config.to_dict(), "reason": timing.reason}
    with (run_dir / "failures.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _environment(arch: Arch, commit: str | None) -> dict[str, Any]:
    """The columns that are the same for every row of a run."""
    import torch
    import triton

    from tilewise.data.records import SCHEMA_VERSION

    properties = torch.cuda.get_device_properties(0)
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "schema_version": SCHEMA_VERSION,
        "op": "paged_mqa_logits",
        "arch": arch.name,
        "timing_method": "graph",
        "cache_state": "cold",
        "device_name": str(properties.name),
        "compute_units": properties.multi_processor_count,
        "driver": _driver(),
        "runtime": torch.version.hip or torch.version.cuda,
        "torch_version": str(torch.__version__),
        "triton_version": str(triton.__version__),
        "git_commit": commit or git.stdout.strip() or None,
        "run_id": uuid.uuid4().hex[:12],
    }


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no NVML here: the column is null
        return None


def _clock_mhz() -> int | None:
    try:
        import torch

        return int(torch.cuda.clock_rate())
    except Exception:  # neither NVML nor ROCm SMI here: the column is null
        return None
