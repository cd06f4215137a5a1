"""Ours beside DeepGEMM in every mode it can serve a launch, and beside plain Triton. Needs an H200 and DeepGEMM.

    python benchmarks/peers.py --choose                          1: fix a config for each launch, in a run of its own
                                                                 (or peers_from_profile.py, for what a profile holds)
    python benchmarks/peers.py --duel --select --duel-again      2: duel the fixed configs, and what select picks
    python benchmarks/peers.py --host                            3: what a call costs the host
    python benchmarks/peers.py --check                           the drop-in over the real DeepGEMM, on the GPU
    python benchmarks/peers.py --summary [--json] [--role select]   figures and tables from the committed rows

--deep-gemm FOLDER names the folder that contains the package `deep_gemm`, such as vllm/third_party of an unpacked vllm
wheel; none of it is part of this project. Each run goes on where it stopped: a file of rows or choices that is there
already is added to, so name new files (--out, --choices) for a new measurement.

All launches of one entry are checked on poisoned outputs, captured in graphs that walk distinct cache pages, and
replayed in turn in random order (tilewise.kernels.timing). DeepGEMM's schedule is made beforehand, as in serving, where
a step's layers share one; its compiler runs ahead, in parallel. The measuring child process is watched: a launch that
hangs or takes the GPU context down becomes a row with its reason, and the next child leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "tests"))
import checkout  # type: ignore[import-not-found]  # noqa: E402, F401
import peers_rows as rows_file  # noqa: E402
import peers_summary as summary  # noqa: E402
from peers_entries import GROUPS, Entry, base_row, entries  # noqa: E402

MOST_CHILDREN = 12
DONE = (0, 4)  # a child's exit codes: all done, or the time limit came first


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--choose", action="store_true", help="fix a config for each entry")
    what.add_argument("--duel", action="store_true", help="time the fixed configs beside DeepGEMM")
    what.add_argument("--host", action="store_true", help="time the host's part of a call")
    what.add_argument("--check", action="store_true", help="check the drop-in over the real DeepGEMM")
    what.add_argument("--summary", action="store_true", help="figures from the rows")
    parser.add_argument(
        "--out", type=Path, help="rows of the duel, or the host's figures (default: the committed file)"
    )
    parser.add_argument("--choices", type=Path, default=rows_file.CHOICES, help="file of the fixed configs")
    parser.add_argument("--select", action="store_true", help="duel: also time what tilewise.select picks")
    parser.add_argument("--no-choices", action="store_true", help="duel: only what --select says")
    parser.add_argument("--deep-gemm", type=Path, help="folder that contains the package deep_gemm")
    parser.add_argument("--no-deep-gemm", action="store_true", help="leave it out")
    parser.add_argument("--pdl", action="store_true", help="let DeepGEMM's launches overlap, as vLLM does")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=list(GROUPS), help="of entries (default: all)")
    parser.add_argument("--names", nargs="*", help="only these entries")
    parser.add_argument("--shortlist", type=Path, help="choose: JSON lines of configs, in place of all candidates")
    parser.add_argument("--first-rounds", type=int, default=3, help="choose: replays of every candidate (default 3)")
    parser.add_argument("--rounds", type=int, default=11, help="replays of the duel and of finalists (default 11)")
    parser.add_argument(
        "--duel-again", action="store_true", help="duel entries beyond a limit once more, twice as long"
    )
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no further entry is begun")
    parser.add_argument("--silence", type=float, default=90, help="seconds after which a step hangs (default 90)")
    parser.add_argument(
        "--compile-limit", type=float, default=420, help="seconds that compiling may take (default 420)"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--jit-cache", type=Path, help="folder of DeepGEMM's compiled kernels (default: a new one)")
    parser.add_argument("--commit", help="commit to record, where the source tree has no git")
    parser.add_argument("--role", default="ours", choices=("ours", "sm90", "portable", "select"), help="summary: whose")
    parser.add_argument("--json", action="store_true", help="summary: JSON only")
    parser.add_argument("--table", action="store_true", help="summary: the table of all entries, too")
    parser.add_argument("--peer-times", type=Path, help="summary: also write what the drop-in prefers by, here")
    parser.add_argument("--marker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = rows_file.HOST if args.host else rows_file.ROWS
    if args.no_choices:
        args.choices = None
        if args.duel and not args.select:
            parser.error("--no-choices leaves nothing of ours without --select")
    if args.duel and args.choices is not None and not args.choices.exists():
        parser.error(f"{args.choices} is not there: run --choose first, or pass --no-choices --select")
    if args.choose and args.no_choices:
        parser.error("--choose writes --choices")
    # Launches that took a child down: beside the rows of a duel, in a file of their own when choosing.
    args.rows = args.choices.with_suffix(".failures.csv") if args.choose else args.out
    return args


def wanted(args: argparse.Namespace) -> list[Entry]:
    """The entries that the arguments name. SystemExit for a name that there is not."""
    every = entries()
    if args.names:
        unknown = set(args.names) - {entry.name for entry in every}
        if unknown:
            raise SystemExit(f"no entry is called {', '.join(sorted(unknown))}; they are called like {every[0].name}")
        return [entry for entry in every if entry.name in args.names]
    return [entry for entry in every if entry.group in args.groups]


def supervise(args: argparse.Namespace, script: list[str]) -> int:
    """Run `script` as a child until the work is done. 0: it is; 4: the time limit came first; 1: it does not go."""
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    marker = folder / "now.json"
    deadline = time.time() + args.time_limit
    environment = dict(os.environ)
    cache = args.jit_cache or folder / "deep_gemm"
    cache.mkdir(parents=True, exist_ok=True)
    environment.setdefault("DG_JIT_CACHE_DIR", str(cache.resolve()))
    command = [*script, "--child", "--marker", str(marker), "--deadline", str(deadline)]
    for _ in range(MOST_CHILDREN):
        marker.write_text(json.dumps({"limit_s": args.compile_limit, "entry": "", "label": ""}), encoding="utf-8")
        # A session of its own, so that its compiling processes end with it.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = watch(process, marker)
        finally:
            if process.poll() not in DONE:
                kill_group(process)
        if code in DONE:
            return code
        if not note_failure(args, marker, code):
            print(f"the child ended with {code} outside any launch: giving up", flush=True)
            return 1
        if "--compiled" not in command:
            command.append("--compiled")  # it got as far as the launches
    print(f"{MOST_CHILDREN} children broke down: giving up", flush=True)
    return 1


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End the child and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(process: subprocess.Popen[Any], marker: Path) -> int:
    """The child's exit code, or -9 when it was silent for longer than it said."""
    while True:
        code = process.poll()
        if code is not None:
            return code
        time.sleep(0.2)
        try:
            said = json.loads(marker.read_text(encoding="utf-8"))
            silent = time.time() - marker.stat().st_mtime
        except (OSError, ValueError):
            continue  # it is being replaced, or the child is about to end
        if said["limit_s"] and silent > said["limit_s"]:
            print(f"silent for {silent:.0f} s at {said['entry']} {said['label']}: ended", flush=True)
            return -9


def note_failure(args: argparse.Namespace, marker: Path, code: int) -> bool:
    """Turn what the marker says into a row; whether it names an entry at all."""
    try:
        said = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    entry = next((entry for entry in entries() if entry.name == said["entry"]), None)
    if entry is None:
        return False
    reason = said.get("reason") or ("hung" if code == -9 else f"the process ended with {code}")
    row = {
        **base_row(entry, 1),
        "roles": said.get("roles"),
        "kernel": said.get("kernel"),
        "tokens_per_row": said.get("tokens_per_row"),
        "config": said.get("config"),
        "status": "runtime",
        "reason": reason,
        "run_id": "supervisor",
    }
    rows_file.append(args.rows, [row])
    return True


def summarise(args: argparse.Namespace) -> int:
    """Print what the rows come to."""
    rows = rows_file.read(args.out)
    found = summary.figures(rows, args.role)
    if args.peer_times:
        from tilewise.dispatch.integrations.deep_gemm_times import COLUMNS

        rows_file.write_table(args.peer_times, summary.peer_times(rows, args.role), COLUMNS)
    host = json.loads(rows_file.HOST.read_text(encoding="utf-8")) if rows_file.HOST.exists() else None
    if args.json:
        print(json.dumps(found | {"host": host}, indent=1))
        return 0
    print(summary.overview(rows, args.role))
    if args.table:
        print("\n" + summary.table(rows, args.role))
    print()
    for name, value in found.items():
        print(f"{name}: {json.dumps(value)}")
    for measured in host["measured"] if host else ():
        print(json.dumps(measured))
    return 0


def main() -> int:
    argv = sys.argv[1:]
    args = arguments(argv)
    if args.summary:
        return summarise(args)
    if args.deep_gemm:
        if not (args.deep_gemm / "deep_gemm").is_dir():
            raise SystemExit(f"{args.deep_gemm} has no folder deep_gemm")
        sys.path.insert(0, str(args.deep_gemm.resolve()))
    if args.host or args.check:
        os.environ.setdefault("DG_JIT_CACHE_DIR", str(args.jit_cache or tempfile.mkdtemp(prefix="peers-deep_gemm-")))
        if args.check:
            import peers_check

            held: int = peers_check.run(args.jobs)
            return held
        import peers_host

        code: int = peers_host.run(args.out, not args.no_deep_gemm, 20 * args.rounds, args.commit)
        return code
    todo = wanted(args)
    if not args.child:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child does not stay
        return supervise(args, [sys.executable, str(Path(__file__).resolve()), *argv])
    from peers_measure import child

    ended: int = child(args, todo, args.deadline)
    return ended


if __name__ == "__main__":
    sys.exit(main())
