"""Every variant of the Hopper kernel under compute-sanitizer. Needs a Hopper GPU and CUDA's compute-sanitizer.

    python scripts/sanitize.py [--out FILE] [--logs FOLDER] [--tools memcheck racecheck initcheck synccheck]

Few workgroups walk many tiles, so that each ring of shared memory wraps many times; the outputs are compared with the
reference as well. Writes what each tool found as JSON.

Triton hands partitions and their arguments to waiting warps through shared memory, between barriers of its own that
racecheck does not follow: each launch has such hazards, in any kernel with `gl.warp_specialize`. They are told by their
lines, those of the kernel's head and of that call, and are counted apart (`handover`); any other one is a failure.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import checkout  # type: ignore[import-not-found]  # noqa: E402, F401

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNEL = "_paged_mqa_logits_kernel"
# initcheck has to see every kernel, since it must know what other kernels wrote.
OPTIONS = {
    "memcheck": ["--kernel-regex", f"kns={KERNEL}"],
    "racecheck": ["--kernel-regex", f"kns={KERNEL}", "--racecheck-report", "all", "--print-limit", "100000"],
    "initcheck": ["--print-limit", "100000"],
    "synccheck": ["--kernel-regex", f"kns={KERNEL}"],
}
# racecheck reports pairs of accesses to a word, and then groups of these by instruction; both count in its summary.
_RECORD = re.compile(r"hazard detected at __shared__|Race reported between")
_ACCESS = re.compile(r"(?:Thread \(.*\)|access) at \S+ in (\S+):(\d+)")
LENS = (1500, 0, 77, 2048, 64, 1)
WORKGROUPS = 3


def jobs() -> list[tuple[Any, Any]]:
    """A shape and a config of each structure: consumers, splits of tokens, groups, pieces, schedules, head counts."""
    from tilewise.kernels.paged_mqa_logits.spec import Shape, candidates

    found: dict[tuple[object, ...], tuple[Any, Any]] = {}
    from tilewise.kernels.arch import current_arch

    for heads in (64, 32, 16, 128):
        for next_n in (1, 2, 3, 4, 6, 7, 8) if heads == 64 else (5,) if heads < 64 else (3, 7, 8):
            for context in (2048, 131072) if heads == 64 else (131072,):  # short shapes have the even schedule
                shape = Shape(len(LENS), next_n, heads, 128, 64, context)
                for config in candidates(shape, current_arch()):
                    if config.kernel == "sm90":
                        key = (
                            heads, next_n if heads == 64 else 0, config.fuse_n == next_n, config.consumers,
                            config.token_split, config.ctas_per_sm, config.schedule,
                        )  # fmt: skip
                        found.setdefault(key, (shape, config))
    return list(found.values())


def compile_one(job: tuple[Any, Any]) -> None:
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.paged_mqa_logits.sm90 import build

    build.compile_kernel(*job, False, GPUTarget("cuda", 90, 32))


def child() -> None:
    """Launch them all once."""
    import torch
    from paged_cache import make_problem  # type: ignore[import-not-found]

    from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error
    from tilewise.kernels.paged_mqa_logits.sm90.launch import prepare

    listed = jobs()
    for number, (shape, config) in enumerate(listed):
        p = make_problem(LENS, next_n=shape.next_n, heads=shape.heads, device="cuda", logits_width=2048)
        out, whole = p.guarded_output()
        prepared = prepare(shape, config)
        if config.schedule == "balanced":
            prepared._workgroups = WORKGROUPS
        columns = min(p.logits_width, p.block_tables.shape[1] * 64)
        prepared(p.q, p.kv_cache, p.weights, p.context_lens, p.block_tables, out, columns)
        torch.cuda.synchronize()
        expected, work = reference_logits(*p.arguments)
        element, norm = worst_error(whole[: expected.shape[0], : p.logits_width], expected, work)
        if not (element <= 1e-3 and norm <= 2.5e-4):
            raise SystemExit(f"{shape} {config}: error per element {element:.2e}, norm-wise {norm:.2e}")
        print(f"@{number + 1} of {len(listed)} {config}", flush=True)


def handover_lines() -> set[int]:
    """Lines of the kernel's source to which Triton's own code for handing over partitions belongs: the kernel's head,
    and its end, which is nothing but the choice among calls of `gl.warp_specialize`."""
    path = ROOT / "kernels" / "paged_mqa_logits" / "sm90" / "kernels.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next(n for n, line in enumerate(lines, 1) if f"def {KERNEL}(" in line)
    end = next(n for n, line in enumerate(lines, 1) if n > head and line.strip() == "if CONSUMERS == 1:")
    return {head, *range(end, len(lines) + 1)}


def hazards(text: str) -> dict[str, int]:
    """Of what racecheck reported: how many records there are, and how many are of the handing over alone."""
    own = handover_lines()
    counts = {"records": 0, "handover": 0}
    for record in re.split(r"(?:^|\n)========= (?=Error|Warning)", text)[1:]:
        if not _RECORD.search(record):
            continue
        accesses = _ACCESS.findall(record.split("\n========= \n")[0])
        counts["records"] += 1
        counts["handover"] += len(accesses) >= 2 and all(
            name == "kernels.py" and int(line) in own for name, line in accesses
        )
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for all that the tools print, compressed")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--time-limit", type=float, default=600, help="seconds that one tool may take (default 600)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    import torch
    import triton

    from tilewise.kernels.registry import kernel_source_hash

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "kernel_hash": kernel_source_hash("sm90"),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tools": {},
    }
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs()))
    # All at once: each is mostly the host's work.
    begun = time.time()
    running = {
        tool: subprocess.Popen(
            ["compute-sanitizer", "--tool", tool, *OPTIONS[tool], sys.executable, str(Path(__file__).resolve()),
             "--child"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool in args.tools
    }  # fmt: skip
    bad = False
    for tool, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, args.time_limit - (time.time() - begun)))
            ended = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            ended = -1
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / f"{tool}.txt.gz").write_bytes(gzip.compress(text.encode()))
        launched = len(re.findall(r"^@\d+ of", text, re.M))
        planned = re.search(r"^@\d+ of (\d+)", text, re.M)
        summaries = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
        found = {
            "launches": launched,
            "planned": int(planned[1]) if planned else None,
            "exit": ended,
            "summary": summaries,
            "seconds": round(time.time() - begun, 1),
        }
        result["tools"][tool] = found
        clean = bool(summaries) and all(re.search(r"\b0 (errors|hazards)", line) for line in summaries)
        if tool == "racecheck":
            found |= hazards(text)
            said = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", text)
            clean = said is not None and int(said[1]) == found["records"] == found["handover"]
        bad |= not clean or ended != 0 or launched != found["planned"]
        print(tool, json.dumps(found), flush=True)
        if not clean or ended != 0:
            print("\n".join(text.splitlines()[-40:]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
