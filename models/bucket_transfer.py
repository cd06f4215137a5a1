"""What it costs to launch with a config that was chosen for another context length.

Serving stacks tune a few lengths ("buckets") and run whatever comes with the config of a nearby one. The loss of that
is measured wherever the best config of one length was timed at another, everything else being equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.errors import InvalidBundleError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.expected import as_run
from tilewise.models.measurements import Measurements
from tilewise.models.regime import range_value

FIGURES = ("pairs", "untimed", "geomean", "p90", "worst")


def bucket_transfers(measured: Measurements) -> dict[str, dict[str, float]]:
    """Losses by way of transfer, as a compact table for the bundle.

    A key is `longer N` or `shorter N`: run at a context N doublings (rounded; 0 is less than a half) longer or shorter
    than the one that the config is the best of; and `nearest`: each context run with the best config of the nearest
    other one. `pairs` were timed, `untimed` were not, so that nothing is known of their loss; the rest are quantiles of
    time over the best time.
    """
    losses: dict[str, list[float]] = {}
    untimed: dict[str, int] = {}
    for ids in same_but_context(measured.shapes).values():
        times = {at: _times(measured, at) for at in ids}
        known = [at for at in ids if times[at]]
        for target in known:
            nearest = min(
                (at for at in known if at != target), key=lambda at: _distance(measured, at, target), default=None
            )
            for source in known:
                if source == target:
                    continue
                doublings = _doublings(measured.shapes[source], measured.shapes[target])
                way = f"{'longer' if doublings > 0 else 'shorter'} {round(abs(doublings))}"
                for key in (way, "nearest") if source == nearest else (way,):
                    loss = _loss(times[source], times[target], measured.shapes[target])
                    if loss is None:
                        untimed[key] = untimed.get(key, 0) + 1
                    else:
                        losses.setdefault(key, []).append(loss)
    found = {}
    for key in sorted({*losses, *untimed}):
        own = np.array(losses.get(key, []))
        table: dict[str, float] = {"pairs": len(own), "untimed": untimed.get(key, 0)}
        if len(own):
            table["geomean"] = round(float(np.exp(np.log(own).mean())), 6)
            table["p90"] = round(float(np.quantile(own, 0.9)), 6)
            table["worst"] = round(float(own.max()), 6)
        found[key] = table
    return found


def check_bucket_transfers(table: Any) -> None:
    """Raise InvalidBundleError unless this is a table of `bucket_transfers`."""
    good = isinstance(table, Mapping) and all(
        isinstance(key, str)
        and isinstance(row, Mapping)
        and set(row) <= set(FIGURES)
        and all(type(value) in (int, float) and 0 <= value < 1e12 for value in row.values())
        for key, row in table.items()
    )
    if not good:
        raise InvalidBundleError(
            f"bucket_transfers must be an object of figures by way of transfer, got {table!r:.200}"
        )


def same_but_context(shapes: Sequence[Shape]) -> dict[tuple[Any, ...], list[int]]:
    """Indices of the shapes that differ in their context alone, at least two of each kind, shortest context first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, shape in enumerate(shapes):
        kind = (
            shape.batch_size, shape.next_n, shape.heads, shape.head_dim, shape.block_kv, shape.cache_layout,
            round(range_value(shape, "raggedness"), 1),
        )  # fmt: skip
        groups.setdefault(kind, []).append(at)
    return {
        kind: sorted(ids, key=lambda at: shapes[at].max_context_len)
        for kind, ids in sorted(groups.items())
        if len({shapes[at].max_context_len for at in ids}) > 1
    }


def _times(measured: Measurements, shape_id: int) -> dict[Config, float]:
    cells = measured.cells(shape_id)
    pairs = zip(measured.config_id[cells].tolist(), measured.latency_us[cells].tolist(), strict=True)
    return {measured.configs[at]: us for at, us in pairs if us == us}


def _loss(source: Mapping[Config, float], target: Mapping[Config, float], shape: Shape) -> float | None:
    best = min(source, key=lambda config: (source[config], config))
    time = target.get(as_run(best, shape))
    return None if time is None else time / min(target.values())


def _doublings(source: Shape, target: Shape) -> float:
    return float(np.log2(max(1, target.max_context_len) / max(1, source.max_context_len)))


def _distance(measured: Measurements, at: int, target: int) -> float:
    return abs(_doublings(measured.shapes[at], measured.shapes[target]))
