"""The process that draws one plot of a bundle, as SVG on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import numpy as np

from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import report_plots
from tilewise.models.bundle import Bundle
from tilewise.models.report import m_points, pick
from tilewise.service.processes import be_nice

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NEXT_NS = (1, 2, 4, 6)
KINDS = ("heads", "next_n", "batch", "context")
MISSING = 3  # exit code: a package is not installed


def winners(bundle: Bundle) -> str:
    """What is picked over batch and context, for the head count that was measured most."""
    measured = [bundle.exact.shape(at).heads for at in range(len(bundle.exact))]
    heads = max(sorted(set(measured)), key=measured.count)
    kinds = {
        (n, b, c): report_plots.kind_of(pick(bundle, Shape(b, n, heads, max_context_len=c)))
        for n in NEXT_NS
        for b in BATCHES
        for c in CONTEXTS
    }
    return report_plots.winner_map(heads, NEXT_NS, BATCHES, CONTEXTS, kinds)


def m_efficiency(bundle: Bundle) -> str:
    """Measured rate over the query rows that share one read of K."""
    return report_plots.m_efficiency(m_points(bundle))


def regret(bundle: Bundle) -> str:
    """Time of the model's picks over the best measured one, by region: geometric mean, and worst."""
    losses: dict[str, list[float]] = {}
    for at in range(len(bundle.exact)):
        shape = bundle.exact.shape(at)
        times = bundle.exact.times(at)
        time = times.get(pick(bundle, shape))
        known = [us for us in times.values() if us == us]
        if time is None or time != time or not known:
            continue
        for region in _regions(shape):
            losses.setdefault(region, []).append(time / min(known))
    plt = report_plots.pyplot()
    names = sorted(losses, key=_place)[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.24 * max(1, len(names))))
    means = [100 * (float(np.exp(np.log(losses[name]).mean())) - 1) for name in names]
    worst = [100 * (max(losses[name]) - 1) for name in names]
    axes.hlines(range(len(names)), means, worst, color=report_plots.GREY, linewidth=1)
    axes.plot(worst, range(len(names)), "|", color=report_plots.COLOURS[4], markersize=9, label="worst")
    axes.plot(means, range(len(names)), "o", color=report_plots.COLOURS[0], markersize=4, label="geometric mean")
    axes.set_yticks(range(len(names)), [f"{name} ({len(losses[name])})" for name in names])
    axes.set(xlabel="time over the best, %", xlim=(0, None))
    axes.legend(frameon=False, loc="upper right")
    return report_plots.svg(figure)


def _place(region: str) -> tuple[int, int]:
    kind, value = region.split()[:2]
    return KINDS.index(kind), int(value)


def _regions(shape: Shape) -> Iterable[str]:
    yield f"heads {shape.heads}"
    yield f"next_n {shape.next_n}"
    yield f"batch {_band(shape.batch_size, (1, 4, 16, 64))}"
    yield f"context {_band(shape.max_context_len, (1, 4096, 16384, 65536))}"


def _band(value: int, edges: tuple[int, ...]) -> str:
    low = max((edge for edge in edges if edge <= value), default=0)
    high = min((edge for edge in edges if edge > value), default=None)
    return f"{low} and more" if high is None else f"{low} to {high - 1}"


PLOTS: dict[str, Callable[[Bundle], str]] = {"winners": winners, "m-efficiency": m_efficiency, "regret": regret}


def main() -> int:
    """Draw the plot that the first argument names, of the bundle in the folder that the second one names."""
    name, folder = sys.argv[1:]
    be_nice(10)
    try:
        sys.stdout.write(PLOTS[name](Bundle.load(folder)))
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return MISSING
    return 0
