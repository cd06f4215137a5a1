"""What a selection costs: warm (a shape that was asked before), cold (a new one, over all candidates), and loading.

    python benchmarks/select.py [--json] [--arch h200] [--bundle FOLDER]

Medians on one thread; cold_most_us is cold for a shape with the most candidates. Without a bundle for the arch, cold is
the cost of falling back to the default, and says so. rank_us is what of cold the trees take, for the candidates of one
launch, and scikit_learn_us the same by scikit-learn's own predict, of a model fitted to the shipped profile as the
bundle's is (a quarter of a minute; left out without scikit-learn or a profile).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.data.store import load_profile
from tilewise.dispatch.decision import Source
from tilewise.dispatch.selector import Selector
from tilewise.errors import TilewiseError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import HEADS, Shape, candidates
from tilewise.models.bundle import Bundle
from tilewise.models.fit import examples, rank_regressor
from tilewise.models.measurements import measurements
from tilewise.models.registry import current

OP = "paged_mqa_logits"
SHAPE = Shape(16, 6, 32, 128, 64, 131072)
CONTEXTS = (2048, 8192, 32768, 131072)  # among which the most candidates are looked for


def per_call_us(call: Callable[[], object], calls: int = 2000, repeats: int = 101) -> float:
    """Median over `repeats` of the mean of `calls` calls, less that of an empty call, microseconds."""

    def once(what: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            what()
        return (time.perf_counter() - start) / calls * 1e6

    return statistics.median(once(call) for _ in range(repeats)) - statistics.median(
        once(lambda: None) for _ in range(repeats)
    )


def measure(arch: str, bundle_dir: str | None = None) -> dict[str, Any]:
    """All figures, by name."""
    selector = Selector(arch, bundle_dir=bundle_dir)
    shape = Shape(16, 6, 32, 128, 64, 131072)
    selector.select(shape)
    again = Shape(16, 6, 32, 128, 64, 131072)
    warm = per_call_us(lambda: selector.select(shape))
    equal = per_call_us(lambda: selector.select(again))
    ints = per_call_us(
        lambda: selector.select(batch_size=16, next_n=6, heads=32, head_dim=128, block_kv=64, max_context_len=131072)
    )
    # Contexts that nobody measured, all of them new.
    cold, sources = _cold_us(selector, [Shape(16, 6, 32, 128, 64, 5001 + 7 * at) for at in range(1000)])
    most = max(
        (Shape(4, next_n, heads, 128, 64, length) for next_n in range(1, 9) for heads in HEADS for length in CONTEXTS),
        key=lambda shape: len(candidates(shape, selector.arch)),
    )
    longest, _ = _cold_us(
        selector,
        [replace(most, max_context_len=most.max_context_len + at, mean_context_len=None) for at in range(1000)],
    )
    result: dict[str, Any] = {
        "arch": selector.arch.name,
        "model_id": selector.model_id,
        "candidates": len(candidates(SHAPE, selector.arch)),
        "warm_us": warm,
        "warm_equal_shape_us": equal,
        "warm_from_ints_us": ints,
        "cold_us": statistics.median(cold),
        "cold_p99_us": statistics.quantiles(cold, n=100)[98],
        "cold_sources": sorted(sources),
        "most_candidates": len(candidates(most, selector.arch)),
        "cold_most_us": statistics.median(longest),
    }
    if selector.bundle is not None:
        folder = Path(bundle_dir) if bundle_dir else current(OP, selector.arch.name)
        result["load_ms"] = statistics.median(_load_ms(folder) for _ in range(21))
        result["bundle_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
        configs = candidates(SHAPE, selector.arch)
        bundle = selector.bundle
        rows = bundle.features(SHAPE, configs)
        result["rank_us"] = per_call_us(lambda: bundle.rank.predict(rows), calls=100)
        theirs = _scikit_learn_us(rows, selector.arch)
        if theirs is not None:
            result["scikit_learn_us"] = theirs
    return result


def _scikit_learn_us(rows: Any, arch: Arch) -> float | None:
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        columns: Any = load_profile(OP, arch.name).columns
        regressor, looked_at = rank_regressor(
            examples(measurements(columns, op=OP, arch=arch.name), arch), slice(None), 0
        )
    except (ImportError, TilewiseError):
        return None
    own = rows[:, looked_at]
    with threadpool_limits(limits=1):
        return per_call_us(lambda: regressor.predict(own), calls=10, repeats=21)


def _cold_us(selector: Selector, shapes: list[Shape]) -> tuple[list[float], set[Source]]:
    """Microseconds of each first selection, and the rungs that answered."""
    cold: list[float] = []
    sources: set[Source] = set()
    for shape in shapes:
        start = time.perf_counter()
        decision = selector.select(shape)
        cold.append((time.perf_counter() - start) * 1e6)
        sources.add(decision.source)
    return cold, sources


def _load_ms(folder: Path) -> float:
    start = time.perf_counter()
    Bundle.load(folder)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200", help="GPU whose bundle is used (default: h200)")
    parser.add_argument("--bundle", help="folder of a bundle (default: the one in force)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result = measure(args.arch, args.bundle)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:22} {value:.2f}" if isinstance(value, float) else f"{name:22} {value}")
