"""Named sets of launch shapes to measure, and how the contexts of a batch are drawn."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidProfileError, InvalidShapeError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import MAX_CONTEXT_LEN, Config, Shape, floor_us

# How the contexts of a batch are drawn around the longest one, `top`.
DISTRIBUTIONS = ("uniform", "within_half", "log_uniform", "half_empty")

BATCH_SIZES = (1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 48, 64, 100, 128, 256)
CONTEXTS = (512, 1000, 2048, 3000, 4096, 8192, 12000, 16384, 24000, 32768, 50000, 65536, 100000, 131072, 200000, 262144)


@dataclass(frozen=True, slots=True)
class Target:
    """A shape to measure, its real context lengths, and whether it belongs to the judging set (timed twice)."""

    shape: Shape
    context_lens: tuple[int, ...]
    contexts: str  # name of the distribution
    judged: bool = False
    configs: tuple[Config, ...] | None = None  # to time; None: every candidate
    duel: bool = False  # timed as a duel alone: its configs in turn, in one pass that names no best one


def draw_contexts(distribution: str, batch_size: int, top: int, seed: int) -> tuple[int, ...]:
    """Context length of each request, at most `top`; the same for the same arguments on every machine."""
    pick = random.Random(f"{distribution}/{batch_size}/{top}/{seed}")
    if distribution == "uniform":
        return (top,) * batch_size
    if distribution == "within_half":  # mean +- 50 %
        return tuple(max(1, round(top / 1.5 * pick.uniform(0.5, 1.5))) for _ in range(batch_size))
    if distribution == "log_uniform":
        low = min(1024, top)
        return tuple(round(low * (top / low) ** pick.random()) for _ in range(batch_size))
    if distribution == "half_empty":  # every other row is padding
        return tuple(0 if b % 2 else top for b in range(batch_size))
    raise InvalidShapeError(f"contexts must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")


def target(
    batch_size: int, next_n: int, heads: int, top: int, *, block_kv: int = 64, head_dim: int = 128,
    contexts: str = "uniform", judged: bool = False, seed: int = 0,
) -> Target:  # fmt: skip
    """A target whose shape carries the longest and the mean of the contexts that were drawn."""
    lens = draw_contexts(contexts, batch_size, top, seed)
    shape = Shape(batch_size, next_n, heads, head_dim, block_kv, max(lens), sum(lens) // len(lens))
    return Target(shape, lens, contexts, judged)


def grid_72() -> Iterator[Target]:
    """32 and 64 heads x contexts of 4k, 32k, 128k x batches of 1, 16, 64 x next_n 1, 2, 4, 6."""
    for heads in (32, 64):
        for top in (4096, 32768, 131072):
            for batch_size in (1, 16, 64):
                for next_n in (1, 2, 4, 6):
                    yield target(batch_size, next_n, heads, top)


def sampled(arch: Arch, count: int, *, seed: int, judged: bool, most_us: float = 320.0) -> Iterator[Target]:
    """Random shapes over the whole served region, none with a floor above `most_us` microseconds."""
    pick = random.Random(seed)
    seen: set[Shape] = set()
    while len(seen) < count:
        heads = pick.choices((32, 64, 16, 128), (40, 40, 10, 10))[0]
        next_n = pick.randint(1, 8)
        contexts = pick.choices(DISTRIBUTIONS, (70, 12, 12, 6))[0]
        # Other page sizes only where the head counts of today's models meet them, to keep compile times down.
        block_kv = 64
        if heads in (32, 64) and next_n in (1, 4, 6):
            block_kv = pick.choices((64, 16, 128, 256), (85, 5, 5, 5))[0]
        batch_size = pick.choice(BATCH_SIZES)
        if batch_size < 4:
            contexts = "uniform"
        one = target(
            batch_size, next_n, heads, pick.choice(CONTEXTS), block_kv=block_kv, contexts=contexts, judged=judged,
            seed=len(seen),
        )  # fmt: skip
        if one.shape not in seen and floor_us(one.shape, arch) <= most_us and one.shape.context_tokens <= 40_000_000:
            seen.add(one.shape)
            yield one


def large_and_ragged() -> Iterator[Target]:
    """32 and 64 heads: next_n 3, 5, 7 and 8 on large launches, and 64 requests of 1k to 128k tokens."""
    for heads in (32, 64):
        for next_n in (3, 5, 7, 8):
            yield target(64, next_n, heads, 32768)
            yield target(16, next_n, heads, 131072)
        for next_n in (1, 2, 4, 6):
            yield target(64, next_n, heads, 131072, contexts="log_uniform")


def m_curve() -> Iterator[Target]:
    """Equal K traffic at 32, 64 and 128 heads, next_n 6: the question of the original report, on any GPU."""
    for heads in (32, 64, 128):
        yield target(16, 6, heads, 131072)
        yield target(16, 1, heads, 131072)


def _preshuffled(t: Target) -> Target:
    """The target with the page layout that serving uses on AMD."""
    return dataclasses.replace(t, shape=dataclasses.replace(t.shape, cache_layout="preshuffled"))


SETS = ("profile", "judging", "grid-72", "m-curve", "smoke")


def named_set(name: str, arch: Arch) -> list[Target]:
    """The targets of one of SETS, without repeats."""
    if name == "profile":
        targets = [
            *sampled(arch, 100, seed=20261129, judged=True),
            *grid_72(),
            *large_and_ragged(),
            *m_curve(),
            *sampled(arch, 130, seed=7, judged=False),
        ]
    elif name == "judging":
        targets = list(sampled(arch, 100, seed=20261129, judged=True))
    elif name == "grid-72":
        targets = list(grid_72())
    elif name == "m-curve":
        targets = list(m_curve())
    elif name == "smoke":
        targets = [target(1, 1, 32, 4096, judged=True), target(16, 6, 32, 32768), target(7, 5, 64, 3000)]
    else:
        raise InvalidShapeError(f"the shape set must be one of {', '.join(SETS)}, or a file, got {name!r}")
    if arch.isa == "gfx950":
        targets = [_preshuffled(t) for t in targets]
    # A judged target comes first, so it wins over the same shape elsewhere.
    return list({(t.shape, t.contexts): t for t in reversed(targets)}.values())[::-1]


def read_targets(path: Path) -> list[Target]:
    """Targets from JSON lines: the fields of Shape, and `contexts` with the name of a distribution if not uniform.

    A line may also have the lengths that were drawn (`context_lens`) and the `configs` to time, as `tilewise suggest`
    writes it, and `"duel": true` where they are to be timed as a duel alone, as `tilewise evaluate --duels-out` writes
    it; `expected_loss` and `reasons` are for the reader. Raises InvalidProfileError for a file that is not
    UTF-8, and with the line number for a line that is not such an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidProfileError(f"{path} is not UTF-8: {error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values: dict[str, Any] = json.loads(line)
            contexts = values.pop("contexts", "uniform")
            judged = values.pop("judged", False)
            given = values.pop("context_lens", None)
            configs = values.pop("configs", None)
            duel = bool(values.pop("duel", False))
            if duel and not configs:
                raise ValueError("a duel must name its configs")
            for name in ("expected_loss", "reasons"):
                values.pop(name, None)
            chosen = None if configs is None else tuple(Config.from_dict(config) for config in configs)
            shape = Shape(**values)
            lens = draw_contexts(contexts, shape.batch_size, min(shape.max_context_len, MAX_CONTEXT_LEN), 0)
            if given is not None:
                if len(given) != shape.batch_size or not all(
                    type(n) is int and 0 <= n <= MAX_CONTEXT_LEN for n in given
                ):
                    raise ValueError(f"context_lens must be {shape.batch_size} lengths, got {str(given)[:80]}")
                lens = tuple(given)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidProfileError(f"{path}, line {number}: {error}") from error
        mean = sum(lens) // max(1, len(lens))
        real = Shape(**{**values, "max_context_len": max(lens, default=0), "mean_context_len": mean})
        found.append(Target(real, lens, contexts, bool(judged), chosen, duel))
    return found


def target_line(one: Target, configs: Sequence[Config] | None = None, *, duel: bool = False) -> dict[str, object]:
    """What `read_targets` reads as this target, with `configs` to time instead of its own."""
    chosen = one.configs if configs is None else configs
    line: dict[str, object] = {
        **one.shape.to_dict(),
        "contexts": one.contexts,
        "context_lens": list(one.context_lens),
    }
    if one.judged and not duel:
        line["judged"] = True
    if duel or one.duel:
        line["duel"] = True
    if chosen is not None:
        line["configs"] = [config.to_dict() for config in chosen]
    return line
