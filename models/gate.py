"""Whether a newly trained model may take the place of the one in force."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tilewise.errors import InvalidBundleError
from tilewise.models.bundle import Bundle
from tilewise.models.choice import choose
from tilewise.models.golden import golden_configs, verify

HELD_OUT = ("geomean_regret", "p90_regret", "worst_regret", "worst_against_default")


@dataclass(frozen=True)
class Gate:
    """The verdict, in one sentence, and the figures behind it."""

    passed: bool
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def gate(candidate: Bundle, current: Bundle | None) -> Gate:
    """Whether the candidate is whole, no worse on golden shapes, and no worse on held-out ones; noise apart.

    Golden shapes are those of both models. On each, the picks of the two models alone (the exact rung off) are
    compared by the times that the candidate's own table has of them: its geometric mean over the shapes must not rise
    by more than noise, and no shape may lose more than noise beyond what the present model's worst shape loses against
    the best. Held-out figures are compared as they stand in the two bundles, where both have them.
    """
    try:
        verify(candidate)
    except InvalidBundleError as error:
        return Gate(False, f"the candidate fails its own check: {error}")
    if current is None:
        return Gate(True, "there is no model to compare with")
    if (candidate.op, candidate.arch.name) != (current.op, current.arch.name):
        return Gate(False, f"the candidate is for {candidate.op} on {candidate.arch.name}, not for what is in force")
    noise = max(candidate.noise_margin, current.noise_margin)
    figures = _golden(candidate, current)
    if figures["golden_shapes"]:
        if figures["golden_geomean"] > 1.0 + noise:
            why = f"on the golden shapes its picks take {figures['golden_geomean']:.4f} of the time of the present ones"
            return Gate(False, f"{why}, more than noise", figures)
        if figures["golden_worst"] > max(1.0, figures["golden_present_worst"]) * (1.0 + noise):
            why = f"its worst pick on a golden shape takes {figures['golden_worst']:.4f} of the best time there"
            return Gate(False, f"{why}, that of the present model {figures['golden_present_worst']:.4f}", figures)
    new, old = candidate.manifest["metrics"], current.manifest["metrics"]
    compared = [name for name in HELD_OUT if type(new.get(name)) is type(old.get(name)) is float]
    figures |= {name: {"candidate": new[name], "current": old[name]} for name in compared}
    for name in compared:
        if new[name] > old[name] * (1.0 + noise):
            why = f"{name} is {new[name]:.4f}, that of the model in force {old[name]:.4f}: more than noise above it"
            return Gate(False, why, figures)
    if not compared:
        return Gate(True, "no golden shape is worse; one of the two has no held-out figures", figures)
    return Gate(True, "no golden shape and no held-out figure is worse by more than noise", figures)


def _golden(candidate: Bundle, current: Bundle) -> dict[str, Any]:
    """How the two models' own picks compare on their golden shapes, by the candidate's table."""
    ratio, own, present = [], [], []
    for shape in dict.fromkeys([*golden_configs(candidate), *golden_configs(current)]):
        index = candidate.exact.find(shape)
        if index is None:
            continue
        times = {config: us for config, us in candidate.exact.times(index).items() if us == us}
        configs = list(times)
        configs = [config for config in configs if config.kernel in current.kernel_hashes]
        if not configs:
            continue
        best = min(times.values())
        new_us = times[_pick(candidate, shape, list(times))]
        old_us = times[_pick(current, shape, configs)]
        ratio.append(new_us / old_us)
        own.append(new_us / best)
        present.append(old_us / best)
    if not ratio:
        return {"golden_shapes": 0}
    return {
        "golden_shapes": len(ratio),
        "golden_geomean": round(float(np.exp(np.log(ratio).mean())), 6),
        "golden_worst": round(max(own), 6),
        "golden_present_worst": round(max(present), 6),
    }


def _pick(bundle: Bundle, shape: Any, configs: list[Any]) -> Any:
    return configs[choose(configs, bundle.predict_us(shape, configs), None, 0.0)[0]]
