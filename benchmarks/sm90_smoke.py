"""Every variant of the Hopper kernel against the fp64 reference, and a short list of timings. Needs a Hopper GPU.

    python benchmarks/sm90_smoke.py [--out FOLDER] [--only check|time|host] [--minutes N]

Checks and timings run in child processes that report line by line: one that hangs or faults is ended, its case is
marked, and the next child goes on behind it. Timings are of graph replays with a cold cache (each launch reads other
pages than the last few), interleaved in random order; every config's logits are compared with the portable kernel's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import checkout  # type: ignore[import-not-found]  # noqa: E402, F401

from tilewise.kernels.arch import ARCHS, current_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits.sm90 import space  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import SPACES, Config, Shape, floor_us  # noqa: E402

# Before the kernel is registered, this script registers it for itself.
SPACES.setdefault("sm90", "tilewise.kernels.paged_mqa_logits.sm90.space")

RAGGED = (300, 77, 6, 0, 64, 1, 63, 65, 513, 5000, 2048)
SILENCE_S = 45  # a child that says nothing for this long hangs
PAGES, WIDTH, ROWS = 131072, 131072, 512
COLD_BYTES = 192e6


@dataclass(frozen=True)
class Case:
    """A problem to check one config on."""

    name: str
    config: Config
    next_n: int
    lens: tuple[Any, ...] = RAGGED
    heads: int = 64
    head_dim: int = 128
    block_kv: int = 64
    more: dict[str, Any] = field(default_factory=dict)
    q_gap: int = 0  # unused bytes between one query token and the next
    weights_gap: int = 0  # unused weights between rows
    weights_at: int = 0  # and before the first
    runs: int = 3

    @property
    def shape(self) -> Shape:
        lens_2d = bool(self.lens) and isinstance(self.lens[0], tuple)
        longest = max((max(x) if lens_2d else x for x in self.lens), default=0)
        return Shape(len(self.lens), self.next_n, self.heads, self.head_dim, self.block_kv, max(longest, 0))


def cfg(fuse_n: int, dot_n: int, consumers: int = 2, token_split: int = 1, num_stages: int = 0, **more: Any) -> Config:
    if not num_stages:
        num_stages = {1: 4, 2: 8, 3: 9, 4: 8}[consumers] if token_split == 1 else 8
    given: dict[str, Any] = {"schedule": "balanced", "ctas_per_sm": 1} | more
    return Config(
        kernel="sm90", fuse_n=fuse_n, dot_n=dot_n, num_warps=4, consumers=consumers, token_split=token_split,
        num_stages=num_stages, **given,
    )  # fmt: skip


def cases() -> list[Case]:
    found = []
    arch = ARCHS["h200"]
    rng = random.Random(1)
    for heads in (64, 32, 128, 16):
        for next_n in range(1, 9):
            default = space.default_config(Shape(64, next_n, heads, max_context_len=4096), arch)
            assert default is not None
            found.append(Case(f"default h{heads} n{next_n}", default, next_n, heads=heads))
    # Each way of cutting tokens and dealing them to consumers.
    for next_n, config in (
        (1, cfg(1, 1)), (1, cfg(1, 1, 1)), (1, cfg(1, 1, 4)), (2, cfg(2, 1)), (2, cfg(2, 2)), (2, cfg(2, 2, 3)),
        (2, cfg(2, 1, 2, 2)), (3, cfg(3, 1, 3, 3)), (3, cfg(3, 2)), (3, cfg(2, 2)), (3, cfg(1, 1, 3)), (4, cfg(4, 2)),
        (4, cfg(4, 1, 4, 4)), (4, cfg(4, 2, 4, 2)), (4, cfg(2, 2)), (5, cfg(5, 2)), (5, cfg(5, 2, 3, 3)),
        (5, cfg(3, 2)), (5, cfg(2, 2)), (6, cfg(6, 2, 3, 3)), (6, cfg(6, 2)), (6, cfg(3, 1, 3, 3)), (7, cfg(7, 2)),
        (7, cfg(4, 2)), (7, cfg(7, 2, 2, 2)), (8, cfg(8, 2)), (8, cfg(8, 2, 4, 4)), (8, cfg(8, 2, 2, 2)),
        (8, cfg(3, 2)), (8, cfg(1, 1, 1, num_stages=4, ctas_per_sm=3)),
    ):  # fmt: skip
        name = f"n{next_n} f{config.fuse_n} g{config.dot_n} c{config.consumers}/{config.token_split}"
        found.append(Case(name, config, next_n))
    found += [Case(f"h32 dot4 n{n}", cfg(n, 4, 2), n, heads=32) for n in (4, 5, 6, 7, 8)]
    found += [Case(f"h16 dot4 n{n}", cfg(n, 4, 3), n, heads=16) for n in (5, 7)]
    found += [Case(f"d64 n{n}", cfg(n, min(n, 2)), n, head_dim=64) for n in (1, 2, 4, 7)]
    found += [Case(f"h{h} n{n} dot1", cfg(n, 1), n, heads=h) for h in (16, 32, 128) for n in (2, 3, 6)]
    found += [Case(f"h64 dot4 n{n}", cfg(n, 4), n) for n in (4, 5)]
    found += [
        Case(f"page {p} d{d} n{n}", cfg(n, 2), n, (300, p, p + 1, p - 1, 4000), 32, d, p, {"table_tail": 0})
        for p in (32, 64, 128, 256) for d in (64, 128) for n in (2, 3)
    ]  # fmt: skip
    found += [
        Case(f"even split {s} n{n} f{f}", cfg(f, min(f, 2), schedule="even", split_kv=s), n)
        for s in (1, 3, 40) for n, f in ((1, 1), (4, 4), (5, 2))
    ]  # fmt: skip
    per_token = (((7, 9, 3), (5, 5, 65), (0, 0, 0), (64, 63, 300), (0, 3, 0), (4000, 1, 2047)), 3)
    found += [
        Case("per-token lens", cfg(3, 2), per_token[1], per_token[0]),
        Case("per-token lens, groups", cfg(2, 2), per_token[1], per_token[0]),
        Case("per-token lens, even", cfg(3, 1, 3, 3, schedule="even", split_kv=3), per_token[1], per_token[0]),
        Case("width below page end", cfg(2, 2), 2, (2300,), more={"logits_width": 2300}),
        Case("width below context", cfg(3, 2), 3, (500, 100), more={"logits_width": 333}),
        Case("width far above", cfg(2, 2), 2, (100,), more={"logits_width": 5001}),
        Case("page stride", cfg(3, 2), 3, more={"page_stride": 65536}),
        Case("page stride, odd 16", cfg(3, 2), 3, more={"page_stride": 64 * 132 + 16}),
        Case("shorter than next_n", cfg(6, 2), 6, (1, 2, 3, 4, 5)),
        Case("negative length", cfg(2, 2), 2, (-1, 70)),
        Case("q with gaps", cfg(3, 2), 3, q_gap=256),
        Case("weights with gaps", cfg(3, 2), 3, weights_gap=4),
        Case("weights with unaligned rows", cfg(3, 2), 3, weights_gap=3),
        Case("weights from an unaligned address", cfg(3, 2), 3, weights_gap=4, weights_at=3),
    ]
    found += [Case(f"all empty {b}", cfg(4, 2), 4, (0,) * b) for b in (1, 31, 32, 33, 64, 256, 257, 1024, 1025)]
    for batch, high in ((63, 400), (65, 400), (255, 300), (300, 300), (1024, 200), (1025, 99), (5000, 66)):
        lens = tuple(rng.choice((0, rng.randint(1, high))) for _ in range(batch))
        found.append(Case(f"batch {batch}", cfg(2, 2, 3), 2, lens, heads=32))
    found += [
        Case("one long", cfg(4, 2), 4, (130000,), heads=32, runs=5),
        Case("long", cfg(6, 2, 3, 3), 6, (32768, 20000, 0, 31, 32767), runs=20),
        Case("long x3", cfg(1, 1, 1, num_stages=4, ctas_per_sm=3), 1, (70000, 20000, 0, 31, 32767), runs=20),
    ]
    return found


def check(start: int) -> None:
    import torch
    from paged_cache import make_problem  # type: ignore[import-not-found]

    from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error
    from tilewise.kernels.paged_mqa_logits.sm90.launch import launch
    from tilewise.kernels.paged_mqa_logits.traits import traits_of

    for index, case in enumerate(cases()[start:], start):
        say({"index": index, "name": case.name})
        why = space.why_invalid(case.shape, case.config, current_arch())
        if why is not None:
            say({"index": index, "skip": why})
            continue
        p = make_problem(
            case.lens, next_n=case.next_n, heads=case.heads, head_dim=case.head_dim, block_kv=case.block_kv,
            device="cuda", **case.more,
        )  # fmt: skip
        if case.q_gap:
            size = case.heads * case.head_dim
            wide = torch.zeros(*p.q.shape[:2], size + case.q_gap, dtype=torch.uint8, device="cuda")
            kept = wide.view(torch.float8_e4m3fn)[:, :, :size].unflatten(2, (case.heads, case.head_dim))
            kept.copy_(p.q)
            p.q = kept
        if case.weights_gap:
            pitch = case.heads + case.weights_gap
            wide = torch.zeros((p.weights.shape[0] + 1) * pitch, device="cuda")
            rows = wide.as_strided(p.weights.shape, (pitch, 1), case.weights_at)
            rows.copy_(p.weights)
            p.weights = rows
        traits = traits_of(p.kv_cache, p.weights, p.context_lens)
        columns = min(p.logits_width, p.block_tables.shape[1] * case.block_kv)
        first: Any = None
        same = True
        for _ in range(case.runs):
            out, whole = p.guarded_output()
            launch(
                p.q,
                p.kv_cache,
                p.weights,
                p.context_lens,
                p.block_tables,
                out,
                columns,
                case.shape,
                case.config,
                traits,
            )
            torch.cuda.synchronize()
            if first is None:
                first = whole
            same &= torch.equal(first.view(torch.int32), whole.view(torch.int32))
        expected, work = reference_logits(*p.arguments)
        logits = first[: expected.shape[0], : p.logits_width]
        element, norm = worst_error(logits, expected, work)
        guards = first[expected.shape[0] :].isnan().all() and first[:, p.logits_width :].isnan().all()
        good = same and bool(guards) and element <= 1e-3 and norm <= 2.5e-4
        say({"index": index, "ok": good, "element": element, "norm": norm, "same": same, "guards": bool(guards)})


def timed_shapes() -> list[tuple[str, Shape, tuple[int, ...]]]:
    rng = random.Random(7)
    ragged = tuple(int(math.exp(rng.uniform(math.log(1024), math.log(131072)))) for _ in range(64))
    mean = sum(ragged) // 64
    found = []
    for heads, next_n, batch, ctx in (
        (64, 4, 64, 32768), (64, 6, 64, 32768), (32, 6, 64, 32768), (64, 2, 64, 32768), (64, 4, 1, 4096),
        (64, 4, 64, 0), (32, 4, 64, 32768), (64, 1, 64, 32768), (64, 3, 64, 32768), (64, 5, 64, 32768),
        (64, 8, 64, 32768), (64, 4, 16, 4096), (64, 1, 1, 4096), (64, 4, 1, 131072), (32, 6, 64, 0),
        (64, 7, 64, 32768), (32, 5, 64, 32768),
    ):  # fmt: skip
        if ctx:
            name = f"h{heads} n{next_n} b{batch} {ctx // 1024}k"
            found.append((name, Shape(batch, next_n, heads, 128, 64, ctx), (ctx,) * batch))
        else:
            shape = Shape(batch, next_n, heads, 128, 64, max(ragged), mean)
            found.append((f"h{heads} n{next_n} b{batch} ragged", shape, ragged))
    return found


def to_time(shape: Shape) -> list[Config]:
    """Portable configs, and each structure of the Hopper kernel."""
    from tilewise.kernels.paged_mqa_logits import portable_space
    from tilewise.kernels.paged_mqa_logits.spec import is_valid

    arch = current_arch()
    structures: dict[tuple[int, ...], Config] = {}
    for c in space.candidates(shape, arch):
        even = c.schedule == "even"
        if even and shape.context_tokens > 65536:
            continue
        key = (c.fuse_n, c.dot_n, c.consumers, c.token_split, c.ctas_per_sm, c.split_kv if even else 0)
        structures.setdefault(key, c)
    if shape.heads == 64 and shape.next_n >= 4:  # products wider than the space offers
        for consumers, token_split, num_stages in ((2, 1, 8), (2, 2, 8), (3, 1, 9)):
            wide = cfg(shape.next_n, 4, consumers, token_split, num_stages)
            structures.setdefault((shape.next_n, 4, consumers, token_split, 1, 0), wide)
    whole = [c for c in structures.values() if c.fuse_n == shape.next_n and c.schedule == "balanced"]
    others = [c for c in structures.values() if c not in whole]
    own = []
    for c in whole + others[:8]:
        own.append(c)
    own = [c for c in dict.fromkeys(own) if space.why_invalid(shape, c, arch) is None]
    listed = dict.fromkeys(portable_space.candidates(shape, arch))
    plain = [c for c in listed if is_valid(shape, c, arch) is None and c.mma_m == "kv"]
    return [c for c in plain if c.num_warps == 4 and c.tile_kv == 64 and c.num_stages == 5][:8] + own


def timings(start: int, rounds: int = 7) -> None:
    import torch

    from tilewise.kernels.paged_mqa_logits import portable_launch
    from tilewise.kernels.paged_mqa_logits.sm90 import launch as own_launch
    from tilewise.kernels.paged_mqa_logits.traits import usual_traits

    device = "cuda"
    arch = current_arch()
    torch.manual_seed(0)
    pool = torch.empty(PAGES, 64 * 132, dtype=torch.uint8, device=device)
    for first in range(0, PAGES, 16384):
        part = pool[first : first + 16384]
        values = (torch.randn(16384, 8192, device=device) * 60).clamp(-440, 440).to(torch.float8_e4m3fn)
        part[:, :8192] = values.view(torch.uint8)
        part[:, 8192:] = ((torch.rand(16384, 64, device=device) + 0.5) / 60).view(torch.uint8)
    cache = pool.view(PAGES, 64, 1, 132)
    out_all = torch.empty(ROWS, WIDTH, device=device)
    stream = torch.cuda.Stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for index, (name, shape, lens) in enumerate(timed_shapes()[start:], start):
        say({"index": index, "name": name})
        pages = [-(-n // 64) for n in lens]
        size = sum(pages) * 8448
        sets = min(256, max(2 if size < 5e8 else 1, math.ceil(COLD_BYTES / size)), max(1, PAGES // sum(pages)))
        launches = sets * max(1, math.ceil(24 / sets)) if size < 1e8 else max(sets, 3)
        order = torch.randperm(PAGES, device=device).int()
        tables = torch.zeros(sets, shape.batch_size, WIDTH // 64, dtype=torch.int32, device=device)
        at = 0
        for s in range(sets):
            for b, n in enumerate(pages):
                tables[s, b, :n] = order[at : at + n]
                at += n
        context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        q = torch.randn(shape.batch_size, shape.next_n, shape.heads, 128, device=device).to(torch.float8_e4m3fn)
        weights = torch.randn(shape.batch_size * shape.next_n, shape.heads, device=device)
        out = out_all[: shape.batch_size * shape.next_n]
        usual = usual_traits(shape)
        expected: Any = None
        graphs: list[tuple[Config, Any, list[float]]] = []
        for config in to_time(shape):
            module: Any = portable_launch if config.kernel == "portable" else own_launch
            inputs = [
                (q, cache, weights, context_lens, tables[s], out, WIDTH, shape, config, usual) for s in range(sets)
            ]
            try:
                with torch.cuda.stream(stream):
                    out.fill_(float("nan"))
                    module.launch(*inputs[0])
                    got = torch.stack([out[r, : min(lens)].double() for r in (0, len(out) // 2, len(out) - 1)])
                    got = torch.nan_to_num(got, nan=1e30, neginf=0.0)
                    if expected is None:
                        expected = got
                    off = float((got - expected).norm() / expected.norm())
                    if off > 1e-3:
                        say({"index": index, "config": str(config), "wrong": off})
                        continue
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin()
                    for i in range(launches):
                        module.launch(*inputs[i % sets])
                    graph.capture_end()
            except Exception as error:
                say({"index": index, "config": str(config), "failed": repr(error)[-300:]})
                continue
            graphs.append((config, graph, []))
        with torch.cuda.stream(stream):
            for _ in range(rounds):
                random.shuffle(graphs)
                for _, graph, times in graphs:
                    if size < 6e7:
                        graph.replay()
                    events[0].record()
                    graph.replay()
                    events[1].record()
                    events[1].synchronize()
                    times.append(events[0].elapsed_time(events[1]) * 1e3 / launches)
        floor = floor_us(shape, arch)
        rows = sorted((sorted(times)[len(times) // 2], str(config), config.to_dict()) for config, _, times in graphs)
        say({"index": index, "shape": shape.to_dict(), "floor_us": floor, "rows": rows})


def host() -> None:
    """Host time of a call, microseconds, with q, weights and out at other addresses each time."""
    import torch

    from tilewise.kernels.paged_mqa_logits import portable_launch
    from tilewise.kernels.paged_mqa_logits.sm90.launch import launch, prepare
    from tilewise.kernels.paged_mqa_logits.traits import usual_traits

    shape = Shape(16, 4, 64, 128, 64, 256)
    config = cfg(4, 2)
    cache = torch.zeros(64, 64, 1, 132, dtype=torch.uint8, device="cuda")
    table = torch.zeros(16, 4, dtype=torch.int32, device="cuda")
    lens = torch.full((16,), 256, dtype=torch.int32, device="cuda")
    moving = [
        (
            torch.zeros(16, 4, 64, 128, device="cuda").to(torch.float8_e4m3fn),
            torch.zeros(64, 64, device="cuda"),
            torch.empty(64, 256, device="cuda"),
        )
        for _ in range(4000)
    ]
    prepared = prepare(shape, config)
    plain = Config(fuse_n=4, dot_n=2, num_stages=5)
    usual = usual_traits(shape)

    def cost(call: Callable[[Any, Any, Any], object], sets: list[Any]) -> float:
        for s in sets[:50]:
            call(*s)
        torch.cuda.synchronize()
        times = []
        for first in range(0, len(sets), 50):  # short bursts, so that the launch queue never fills
            begun = time.perf_counter()
            for s in sets[first : first + 50]:
                call(*s)
            times.append((time.perf_counter() - begun) / 50 * 1e6)
            torch.cuda.synchronize()
        return sorted(times)[len(times) // 2]

    calls: dict[str, Callable[[Any, Any, Any], object]] = {
        "prepared": lambda q, w, out: prepared(q, cache, w, lens, table, out, 256),
        "launch": lambda q, w, out: launch(q, cache, w, lens, table, out, 256, shape, config, usual),
        "portable launch": lambda q, w, out: portable_launch.launch(
            q, cache, w, lens, table, out, 256, shape, plain, usual
        ),
    }
    for name, call in calls.items():
        say({"host": name, "moving_us": cost(call, moving), "still_us": cost(call, moving[:1] * 4000)})


def say(line: dict[str, Any]) -> None:
    print("@" + json.dumps(line), flush=True)


def children(what: str, count: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Lines of child processes, each going on behind the case at which the last one hung or died."""
    start = troubles = 0
    while start < count and time.time() < deadline and troubles < 8:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", what, "--start", str(start)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def pump(child: Any = child, lines: Any = lines) -> None:
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        at, trouble = start, ""
        tail: list[str] = []
        while True:
            try:
                line = lines.get(timeout=min(SILENCE_S, max(1.0, deadline - time.time())))
            except queue.Empty:
                trouble = "hang" if time.time() < deadline else "out of time"
                child.kill()
                break
            if line is None:
                trouble = "" if child.wait() == 0 else "died: " + " | ".join(tail[-4:])[-500:]
                break
            if line.startswith("@"):
                said = json.loads(line[1:])
                at = said.get("index", at)
                yield said
            else:
                tail.append(line.strip())
        if not trouble:
            return
        troubles += 1
        yield {"index": at, "trouble": trouble}
        start = at + 1


def compile_one(job: tuple[Shape, Config, bool]) -> str | None:
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.paged_mqa_logits.sm90 import build

    try:
        build.compile_kernel(*job, GPUTarget("cuda", 90, 32))
    except Exception as error:
        return f"{job[1]}: {repr(error)[-200:]}"
    return None


def compile_ahead(kind: str) -> None:
    """Fill Triton's cache on all cores, without touching the GPU here."""
    jobs: dict[tuple[Any, ...], tuple[Shape, Config, bool]] = {}
    from tilewise.kernels.paged_mqa_logits.sm90 import build

    todo: list[tuple[Shape, Config, bool]] = []
    if kind == "check":
        todo = [(c.shape, c.config, bool(c.lens) and isinstance(c.lens[0], tuple)) for c in cases()]
    else:
        todo = [(s, c, False) for _, s, _ in timed_shapes() for c in to_time(s) if c.kernel == "sm90"]
    for job in todo:
        if space.why_invalid(job[0], job[1], ARCHS["h200"]) is None:
            jobs[(*build.constants(*job).values(), *build.options(job[1]).values())] = job
    begun = time.time()
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 1))) as pool:
        failed = [f for f in pool.map(compile_one, jobs.values(), chunksize=2) if f]
    summary = f"{kind}: {len(jobs)} kernels compiled in {time.time() - begun:.0f} s, {len(failed)} failed"
    print(summary, *failed, sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for smoke.json")
    parser.add_argument("--only", choices=("check", "time", "host"))
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long")
    parser.add_argument("--child", choices=("check", "time", "host"))
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    if args.child:
        runs: dict[str, Callable[[int], None]] = {"check": check, "time": timings, "host": lambda _: host()}
        runs[args.child](args.start)
        return 0
    deadline = time.time() + args.minutes * 60
    said: list[dict[str, Any]] = []
    bad = 0
    if args.only in (None, "host"):
        for line in children("host", 1, deadline):
            said.append(line)
            print("host", line)
    if args.only in (None, "check"):
        compile_ahead("check")
        listed = cases()
        passed = skipped = 0
        worst = [0.0, 0.0]
        for line in children("check", len(listed), deadline):
            said.append(line)
            case = listed[line["index"]]
            if "skip" in line:
                skipped += 1
                print(f"skip  {case.name}: {line['skip']}")
            elif line.get("ok"):
                passed += 1
                worst = [max(worst[0], line["element"]), max(worst[1], line["norm"])]
            elif "ok" in line or "trouble" in line:
                bad += 1
                print(f"BAD   {line['index']} {case.name} [{case.config}]: {line}")
        print(f"checks: {passed} passed, {bad} bad, {skipped} skipped of {len(listed)}")
        print(f"  worst error: element {worst[0]:.2e}, norm {worst[1]:.2e}")
    if args.only in (None, "time"):
        compile_ahead("time")
        names = timed_shapes()
        for line in children("time", len(names), deadline):
            said.append(line)
            if any(k in line for k in ("wrong", "failed", "trouble")):
                bad += 1
                print("BAD  ", names[line["index"]][0], line)
            if "rows" in line:
                table(names[line["index"]][0], line)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "smoke.json").write_text(json.dumps(said))
    return 1 if bad else 0


def table(name: str, line: dict[str, Any]) -> None:
    rows = line["rows"]
    plain = [row for row in rows if row[2]["kernel"] == "portable"]
    own = [row for row in rows if row[2]["kernel"] == "sm90"]
    if not plain or not own:
        print(f"{name}: nothing to compare ({len(plain)} portable, {len(own)} sm90)")
        return
    print(
        f"{name}: floor {line['floor_us']:.1f}, portable {plain[0][0]:.1f}, sm90 {own[0][0]:.1f} "
        f"({plain[0][0] / own[0][0]:.3f}x, {100 * line['floor_us'] / own[0][0]:.0f} % of floor)"
    )
    for row in own[:8]:
        print(f"    {row[0]:8.2f}  {row[1].removeprefix('sm90 ')}")


if __name__ == "__main__":
    sys.exit(main())
