"""The plots of `tilewise report`, as SVG text. The same bytes from the same numbers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import Config

GREY = "#8a8a8a"
COLOURS = ("#1f6fb4", "#e07b39", "#2f9e5b", "#8a63b8", "#c94b5d", "#7a6a55", "#d7a928", "#4fb0b8")


def pyplot() -> Any:
    """matplotlib's pyplot, set to draw the same SVG every time; UnsupportedError with the way to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("a report needs matplotlib: pip install -e '.[plot]'") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "tilewise",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    return plt


def svg(figure: Any) -> str:
    """The figure as an <svg> element, and the figure closed."""
    out = io.StringIO()
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot().close(figure)
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def regret(by_shape: Sequence[Mapping[str, Any]]) -> str:
    """How many of the judged shapes lose no more than so much, for the picks and for the default."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3))
    found = {
        "default": [one["default_us"] / one["best_us"] for one in by_shape if one["default_us"]],
        "tilewise": [one["regret"] for one in by_shape if one["regret"]],
    }
    for (name, ratios), colour in zip(found.items(), (GREY, COLOURS[0]), strict=True):
        loss = sorted(100 * max(0.0, ratio - 1.0) for ratio in ratios)
        axes.step(loss, np.arange(1, len(loss) + 1) / len(by_shape), where="post", color=colour, label=name)
    axes.axvline(2, color=GREY, linewidth=0.6, linestyle=":")
    axes.axvline(5, color=GREY, linewidth=0.6, linestyle=":")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([0, 1, 2, 5, 10, 20, 50, 100], ["0", "1", "2", "5", "10", "20", "50", "100"])
    axes.set(xlabel="loss against the best config, %", ylabel="share of shapes", ylim=(0, 1.02), xlim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    return svg(figure)


def predicted(by_shape: Sequence[Mapping[str, Any]]) -> str:
    """Predicted against measured time of the picks."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    known = [
        (one["measured_us"], one["predicted_us"]) for one in by_shape if one["measured_us"] and one["predicted_us"]
    ]
    measured_us, predicted_us = np.array(known).T
    span = np.array([measured_us.min() * 0.8, measured_us.max() * 1.25])
    left.fill_between(span, span * 0.9, span * 1.1, color=COLOURS[0], alpha=0.15, linewidth=0, label="within 10 %")
    left.plot(span, span, color=GREY, linewidth=0.8)
    left.plot(measured_us, predicted_us, ".", color=COLOURS[0])
    left.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us")
    left.legend(frameon=False)
    error = 100 * np.abs(predicted_us / measured_us - 1)
    right.step(np.sort(error), np.arange(1, len(error) + 1) / len(error), where="post", color=COLOURS[0])
    right.axvline(10, color=GREY, linewidth=0.6, linestyle=":")
    right.axhline(0.9, color=GREY, linewidth=0.6, linestyle=":")
    right.set(xlabel="error of the predicted time, %", ylabel="share of shapes", ylim=(0, 1.02), xlim=(0, None))
    return svg(figure)


def calibration(trials: Sequence[Sequence[float]], noise: float, asked: float | None) -> str:
    """Predicted and real gain over the default of shapes that were held out, and how often a gain was none."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    promised, real = 100 * np.array(trials).T
    left.axhline(0, color=GREY, linewidth=0.8)
    most = max(float(promised.max()), 1.0)
    left.plot([0, most], [0, most], color=GREY, linewidth=0.8)
    left.plot(promised, real, ".", color=COLOURS[0], alpha=0.6)
    left.set(xlabel="predicted gain over the default, %", ylabel="measured gain, %")
    left.set_xscale("symlog", linthresh=2)
    left.set_yscale("symlog", linthresh=2)
    levels = np.linspace(0, min(most, 15.0), 60)
    lost = [100 * float(((promised > level) & (real < -100 * noise)).mean()) for level in levels]
    kept = [100 * float(((promised > 100 * noise) & (promised <= level)).mean()) for level in levels]
    right.plot(levels, lost, color=COLOURS[4], label="slower than the default")
    right.plot(levels, kept, color=COLOURS[0], label="default kept unsurely")
    for axes in (left, right):
        if asked is not None:
            axes.axvline(100 * asked, color=COLOURS[1], linewidth=0.8, linestyle="--")
    right.set(xlabel="gain asked for, %", ylabel="% of shapes", ylim=(0, None))
    right.legend(frameon=False)
    return svg(figure)


def learning_curve(curve: Mapping[str, Any]) -> str:
    """Regret over timings, for launches that were chosen and for launches drawn at random."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3))
    for name, label, colour in (("random", "drawn at random", GREY), ("active", "tilewise suggest", COLOURS[0])):
        points = curve[name]
        axes.plot(
            [one["timings"] for one in points],
            [100 * (one["geomean_regret"] - 1) for one in points],
            marker="o",
            markersize=3,
            color=colour,
            label=label,
        )
    axes.axhline(100 * (curve["final_regret"] - 1), color=GREY, linewidth=0.6, linestyle=":")
    axes.set(xscale="log", xlabel="timings", ylabel="geometric mean loss, %", ylim=(0, None))
    most = max(one["timings"] for one in curve["random"])
    ticks = [size * 10**power for power in range(1, 8) for size in (1, 2, 5) if size * 10**power <= most]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(one["timings"] for one in curve["active"]) * 0.9, most * 1.1)
    axes.legend(frameon=False)
    return svg(figure)


def kind_of(config: Config) -> str:
    """The kind of launch that the maps tell apart."""
    return f"{config.kernel}, {'one token' if config.fuse_n == 1 else 'fused'}"


def winner_map(
    heads: int, next_ns: Sequence[int], batches: Sequence[int], contexts: Sequence[int], kinds: Mapping[Any, str]
) -> str:
    """What is picked over batch and context, one field for each next_n; `kinds` by (next_n, batch, context)."""
    plt = pyplot()
    names = sorted(set(kinds.values()))
    code = {name: at for at, name in enumerate(names)}
    columns = min(4, len(next_ns))
    rows = math.ceil(len(next_ns) / columns)
    figure, fields = plt.subplots(rows, columns, figsize=(2.4 * columns, 1.9 * rows + 0.5), squeeze=False)
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(list(COLOURS[: len(names)]))
    for at, axes in enumerate(fields.flat):
        if at >= len(next_ns):
            axes.axis("off")
            continue
        grid = np.array([[code[kinds[next_ns[at], b, c]] for c in contexts] for b in batches])
        axes.imshow(grid, origin="lower", cmap=colours, vmin=-0.5, vmax=len(names) - 0.5, aspect="auto")
        axes.set_title(f"next_n {next_ns[at]}", fontsize=9)
        axes.set_xticks(range(0, len(contexts), 3), [_short(contexts[i]) for i in range(0, len(contexts), 3)])
        axes.set_yticks(range(0, len(batches), 2), [str(batches[i]) for i in range(0, len(batches), 2)])
    fields[-1][0].set(xlabel="context", ylabel="batch")
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[code[name]]) for name in names]
    figure.legend(patches, names, loc="lower right", frameon=False, ncols=min(4, len(names)), fontsize=8)
    figure.suptitle(f"{heads} heads", fontsize=9, x=0.03, ha="left")
    return svg(figure)


def m_efficiency(points: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Product rate over the columns that share one read of K, by kernel: the best of each launch of enough work."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3))
    for at, (name, own) in enumerate(sorted(points.items())):
        sizes = sorted({size for size, _ in own})
        typical = [float(np.median([rate for size, rate in own if size == one])) for one in sizes]
        axes.plot([size for size, _ in own], [rate for _, rate in own], ".", color=COLOURS[at], alpha=0.25)
        axes.plot(sizes, typical, marker="o", markersize=3, color=COLOURS[at], label=f"{name}, median")
    axes.set(xscale="log", xlabel="heads x fused query tokens", ylabel="TFLOP/s", ylim=(0, None))
    ticks = sorted({size for own in points.values() for size, _ in own})
    axes.set_xticks([size for size in ticks if size & (size - 1) == 0], [str(s) for s in ticks if s & (s - 1) == 0])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return svg(figure)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
