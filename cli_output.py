"""What `tilewise` prints: JSON, decisions, tables and progress."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tilewise.dispatch.decision import Decision, Explanation
from tilewise.kernels.paged_mqa_logits.spec import Shape

Progress = Callable[[str, int, int], None]  # what, done, of how many
GUARDED = ("worst_against_default", "abstentions", "predicted_time_p90_error")
FIGURES = ("geomean_regret", "p90_regret", "worst_regret", "within_2pct", "within_5pct")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_fields(fields: dict[str, Any], width: int = 16) -> None:
    for name, value in fields.items():
        if value is not None:
            print(f"{name:<{width}}{value}")


def us(value: float | None) -> str:
    return "not predicted" if value is None else f"{value:.2f} us"


def print_decision(arch: str, shape: Shape, decision: Decision) -> None:
    """A decision, one line a field."""
    print_fields(
        {
            "shape": " ".join(f"{name}={value}" for name, value in shape.to_dict().items()),
            "arch": arch,
            "config": decision.config,
            "predicted": us(decision.predicted_us),
            "runner-up": decision.runner_up or "none",
            "margin": "none" if decision.margin is None else f"{100 * decision.margin:.2f} %",
            "source": decision.source,
            "regime": decision.regime,
            "reason": decision.reason,
            "model": decision.model_id or "none",
        }
    )


def print_explanation(explained: Explanation) -> None:
    """The decision, the nearest measured shapes, and every other candidate with its reason."""
    print_decision(explained.arch, explained.shape, explained.decision)
    print(f"{'floor':<16}{us(explained.floor_us)}")
    print("\nnearest measured shapes" if explained.nearest else "\nno measured shape to compare with")
    for near in explained.nearest:
        print(f"  {near.shape}: {near.config} took {us(near.latency_us)}")
        own = "was not measured there" if near.chosen_us is None else f"took {us(near.chosen_us)}"
        default = "was not" if near.default_us is None else f"took {us(near.default_us)}"
        print(f"    the chosen config {own}, the default {default}")
    if explained.moved:
        print(f"\nwhat moved the prediction, against {explained.moved_against}")
        for moved in explained.moved:
            word = "slower" if moved.factor > 1 else "faster"
            change = 100 * (max(moved.factor, 1 / moved.factor) - 1)
            print(f"  {moved.group:<10}{change:>7.1f} % {word:<8}{', '.join(moved.features)}")
    print("\nrejected")
    for one in explained.rejected:
        print(f"  {one.config}: {one.reason}")


def print_evaluation(result: dict[str, Any]) -> None:
    print(f"{result['op']} on {result['arch']}: {result['judged_shapes']} held-out shapes judged, of", end=" ")
    print(f"{result['measured_shapes']} measured\n")
    print(f"{'':<10}" + "".join(f"{name:>16}" for name in FIGURES))
    for name, figures in {"model": result, **result["baselines"]}.items():
        print(f"{name:<10}" + "".join(f"{figures[figure]:>16.4f}" for figure in FIGURES))
    print()
    print_fields({name: f"{result[name]:.4f}" for name in GUARDED}, width=28)
    print(f"\n{result['duelled']:g} picks a seed were judged by a duel; by the second pass alone:")
    print_fields({name: f"{result[f'second_pass_{name}']:.4f}" for name in FIGURES[:3]}, width=28)
    for name, left_out in result.items():
        if not name.startswith("leave_one_"):
            continue
        field = name.removeprefix("leave_one_").removesuffix("_out")
        print(f"\neach of {left_out['values']} values of {field} held out in turn", end="")
        if FIGURES[0] not in left_out:
            print(": nothing is left to train on")
            continue
        print(f", {100 * left_out['extrapolated']:.0f} % of the shapes beyond what is left")
        for label, figures in {"model": left_out, "alone": left_out["model_alone"]}.items():
            print(f"{label:<10}" + "".join(f"{figures[figure]:>16.4f}" for figure in FIGURES))
        print_fields({name: f"{left_out[name]:.4f}" for name in GUARDED}, width=28)


def print_metrics(metrics: dict[str, Any]) -> None:
    """The figures of held-out shapes, or why there are none."""
    if "geomean_regret" not in metrics:
        print(f"not evaluated: {metrics.get('none', 'training took no figures')}")
        return
    print(f"{metrics['judged_shapes']} held-out shapes judged:")
    print_fields({name: f"{metrics[name]:.4f}" for name in FIGURES})


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on a terminal, one line a stage elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                note(f"{what} ...")

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    with Bars(console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update
