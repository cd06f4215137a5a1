"""One self-contained HTML page about a model: how good its picks are, where, and what they rest on."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.output import write_output
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, default_config, flops
from tilewise.models import report_plots as plots
from tilewise.models.bundle import Bundle
from tilewise.models.choice import PREDICTED_TIE, choose
from tilewise.models.judging import geomean

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(512 << at for at in range(10))
ENOUGH_TOKENS = 1 << 20  # context tokens of a launch, from which on starting it hardly counts
FIGURES = (
    "geomean_regret", "p90_regret", "worst_regret", "within_2pct", "within_5pct", "worst_against_default", "failures",
)  # fmt: skip
MORE = ("abstentions", "predicted_time_median_error", "predicted_time_p90_error")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 0.9em; margin: 0.6em 0; }
th, td { padding: 0.15em 0.8em 0.15em 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
p.note { color: #666; font-size: 0.9em; } svg { max-width: 100%; height: auto; }
code { font-size: 0.92em; }
"""


def report(bundle: Bundle, evaluation: Mapping[str, Any], curve: Mapping[str, Any] | None = None) -> str:
    """The page. `evaluation` is what `evaluate` gave for the bundle's rows, `curve` a result of
    benchmarks/learning_curve.py; without it the page says how to make one."""
    by_shape = evaluation["by_shape"]
    asked = bundle.guard.needed.get("inside")
    parts = [
        f"<h1>{_text(bundle.op)} on {_text(bundle.arch.name)}</h1>",
        _facts(bundle, evaluation),
        "<h2>Regret of the picks on shapes that the model has not seen</h2>",
        _figures_table(evaluation),
        plots.regret(by_shape),
        _note(
            "Regret is the time of a pick over that of the best config; loss, in the plot, is regret less 1. The best "
            "config is named by a first pass over all candidates; the ratio is that of a duel, in which pick and best "
            "were replayed in turn, where there is one, and else of a second pass. The exact rung is off."
        ),
        "<h2>By region</h2>",
        _regions(by_shape),
        "<h2>A size held out</h2>",
        _left_out(evaluation),
        "<h2>What is picked</h2>",
        *(_winner_map(bundle, heads) for heads in _head_counts(bundle)),
        _note("Of the two head counts with most measured shapes; uniform contexts, pages of 64 tokens. The model's "
              "picks with the gain that is asked for; when serving, measured shapes are answered from the table."),
        "<h2>M-efficiency</h2>",
        plots.m_efficiency(m_points(bundle)),
        _note(f"The best measured config of each launch of at least {ENOUGH_TOKENS} context tokens."),
        "<h2>Predicted and measured times</h2>",
        plots.predicted(by_shape),
        "<h2>Calibration</h2>",
        plots.calibration(evaluation["trials"], bundle.noise_margin, None if asked is None else asked.gain),
        _note("Each point is a shape that was held out: the gain over the default that the model promised for its best "
              "config, and the one measured. The dashed line is the gain that is asked for before the default is "
              "replaced. On the right, what asking for more or less would do: how many shapes would get a pick that is "
              "slower than the default, and how many would keep the default although a gain above noise was promised."),
        _guard_table(bundle),
        "<h2>Learning curve</h2>",
        plots.learning_curve(curve)
        if curve
        else _note("None was given: <code>python benchmarks/learning_curve.py --out FILE</code>, then "
                   "<code>--learning-curve FILE</code>."),
    ]  # fmt: skip
    title = f"tilewise: {bundle.op} on {bundle.arch.name}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write_report(path: Path, text: str) -> None:
    """Write the page, whole or not at all."""
    write_output(path, [text])


def read_curve(path: Path) -> dict[str, Any]:
    """A learning curve that benchmarks/learning_curve.py wrote."""
    curve: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return curve


def m_points(bundle: Bundle) -> dict[str, list[tuple[int, float]]]:
    """(heads x fused tokens, TFLOP/s) of each kernel's best config, for the measured launches of enough work."""
    points: dict[str, list[tuple[int, float]]] = {}
    for index in range(len(bundle.exact)):
        shape = bundle.exact.shape(index)
        if shape.context_tokens < ENOUGH_TOKENS or shape.mean_context_len != shape.max_context_len:
            continue
        best: dict[tuple[str, int], float] = {}
        for config, us in bundle.exact.times(index).items():
            key = (config.kernel, config.fuse_n * shape.heads)
            best[key] = min(best.get(key, np.inf), us if us == us else np.inf)
        for (kernel, size), us in best.items():
            if us < np.inf:
                points.setdefault(kernel, []).append((size, flops(shape) / us / 1e6))
    return points


def pick(bundle: Bundle, shape: Shape) -> Config:
    """The model's pick with the gain that is asked for, the exact rung off."""
    configs = [config for config in candidates(shape, bundle.arch) if config.kernel in bundle.kernel_hashes]
    default = default_config(shape, bundle.arch)
    margin, _ = bundle.margin(shape)
    if default not in configs or margin is None:
        return default
    return configs[choose(configs, bundle.predict_us(shape, configs), configs.index(default), margin, PREDICTED_TIE)[0]]


def _facts(bundle: Bundle, evaluation: Mapping[str, Any]) -> str:
    data, noise = bundle.manifest["data"], evaluation["noise"]
    rows = {
        "model": f"{bundle.model_id}, digest <code>{bundle.digest}</code>",
        "trained on": f"{data['timings']} timings of {data['shapes']} shapes, from {data['rows']} rows",
        "toolchain": "; ".join(f"{name} {', '.join(found)}" for name, found in bundle.toolchain.items()),
        "kernels": ", ".join(f"{name} {source}" for name, source in bundle.kernel_hashes.items()),
        "noise": f"{noise['pairs']} launches timed twice agree within {100 * noise.get('p50', 0):.2f} % half of the "
        f"time, {100 * noise.get('p90', 0):.2f} % nine times in ten",
    }
    body = "".join(f"<tr><td>{name}</td><td style='text-align:left'>{text}</td></tr>" for name, text in rows.items())
    return f"<table>{body}</table>"


def _figures_table(evaluation: Mapping[str, Any]) -> str:
    columns = {"tilewise": evaluation, **evaluation["baselines"]}
    rows = [[name, *(f"{one[name]:.4g}" for one in columns.values())] for name in FIGURES]
    rows += [[name, f"{evaluation[name]:.4g}", *[""] * len(evaluation["baselines"])] for name in MORE]
    count = f"{evaluation['judged_shapes']} judged shapes, {evaluation['seeds']} seed{'s' * (evaluation['seeds'] > 1)}"
    return _table([count, *columns], rows)


def _regions(by_shape: Sequence[Mapping[str, Any]]) -> str:
    def band(value: int, edges: Sequence[int]) -> str:
        low = max((edge for edge in edges if edge <= value), default=0)
        high = min((edge for edge in edges if edge > value), default=None)
        return f"{low} and more" if high is None else f"{low} to {high - 1}"

    def order(label: str) -> int:
        return int(label.split()[0].strip(","))

    groups: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "heads": lambda shape: str(shape["heads"]),
        "next_n": lambda shape: str(shape["next_n"]),
        "batch_size": lambda shape: band(shape["batch_size"], (1, 4, 16, 64)),
        "context": lambda shape: band(shape["max_context_len"], (1, 4096, 16384, 65536)),
        "longest over mean context": lambda shape: (
            "1" if shape["max_context_len"] == shape["mean_context_len"] else "2, ragged"
        ),
    }
    rows = []
    for name, of in groups.items():
        labels = sorted({of(one["shape"]) for one in by_shape}, key=order)
        for label in labels:
            own = [one for one in by_shape if of(one["shape"]) == label and one["regret"] and one["against_default"]]
            if not own:
                continue
            loss = np.array([one["regret"] for one in own])
            against = np.array([one["against_default"] for one in own])
            kept = np.mean([one["abstained"] for one in own])
            shown = label.removeprefix("2, ")
            rows.append(
                [f"{name} {shown}", str(len(own)), f"{geomean(loss):.4f}", f"{loss.max():.3f}",
                 f"{geomean(against):.3f}",
                 f"{against.max():.3f}", f"{100 * kept:.0f} %"]
            )  # fmt: skip
    head = ["region", "shapes", "geomean regret", "worst", "against default", "worst against it", "abstained"]
    return _table(head, rows)


def _left_out(evaluation: Mapping[str, Any]) -> str:
    rows = []
    for name, one in evaluation.items():
        if name.startswith("leave_one_") and "geomean_regret" in one:
            alone = one["model_alone"]
            rows.append(
                [name, f"{one['geomean_regret']:.4f}", f"{one['worst_regret']:.3f}",
                 f"{one['worst_against_default']:.3f}", f"{100 * one['abstentions']:.0f} %",
                 f"{alone['geomean_regret']:.4f}", f"{alone['worst_against_default']:.3f}"]
            )  # fmt: skip
    if not rows:
        return _note("None was: <code>tilewise evaluate --json</code> does that; give its output as --evaluation.")
    head = ["", "geomean", "worst", "worst against default", "abstained", "model alone", "worst against default"]
    return _table(head, rows)


def _head_counts(bundle: Bundle) -> list[int]:
    """The head counts of which most shapes were measured, at most two."""
    counts: dict[int, int] = {}
    for index in range(len(bundle.exact)):
        heads = bundle.exact.shape(index).heads
        counts[heads] = counts.get(heads, 0) + 1
    return sorted(sorted(counts, key=lambda heads: (-counts[heads], heads))[:2])


def _winner_map(bundle: Bundle, heads: int) -> str:
    known = sorted({n for group, values in bundle.regime.values.items() if group[0] == heads for n in values})
    kinds = {
        (n, b, c): plots.kind_of(pick(bundle, Shape(b, n, heads, 128, 64, c)))
        for n in known
        for b in BATCHES
        for c in CONTEXTS
    }
    return plots.winner_map(heads, known, BATCHES, CONTEXTS, kinds)


def _guard_table(bundle: Bundle) -> str:
    rows = [
        [name, "none is sure" if one.gain is None else f"{100 * one.gain:.2f} %", str(one.shapes), str(one.losses),
         f"{one.reach:.2f}"]
        for name, one in bundle.guard.needed.items()
    ]  # fmt: skip
    if not rows:
        return _note("This bundle was trained without held-out trials: noise alone is asked for.")
    head = ["beyond", "gain asked for", "trials", "slower than the default all the same", "doublings tried"]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _text(value: str) -> str:
    return html.escape(str(value))
