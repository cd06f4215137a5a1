"""How much time the picks lose, on shapes that the model has not seen.

The judging set and the figures are those of judging.py. The model and the gain that is asked of its picks (guard.py)
come from all passes over other shapes, as when it is trained. The exact rung is off. Shapes that are nearly the same
share a fold. A pick without a time counts as a failure. Where the profile has a duel of a pick and its shape's best,
that says how much the pick loses; the figures of the second pass alone stand beside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch, get_arch
from tilewise.models.baselines import best_configs, nearest_pick, rule_pick
from tilewise.models.choice import PREDICTED_TIE, choose, first_best
from tilewise.models.duels import LIMIT, beyond
from tilewise.models.fit import Examples, examples
from tilewise.models.guard import CONFIDENCE, INSIDE, Guard, Trial, beyond_confidence, needed_gain
from tilewise.models.holdout import (
    RANGED,
    Prediction,
    Progress,
    axis_splits,
    fold_splits,
    hold_out,
    reach_of,
    trials,
    value_splits,
)
from tilewise.models.judging import (
    Judged,
    Offer,
    figures,
    judging_set,
    noise_margin,
    noise_of,
    typical_noise,
)
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.regime import Regime

DEFAULT_FOLDS = 10
DEFAULT_SEEDS = 5
LEAVE_OUT = ("batch_size", "next_n", "max_context_len", "heads")
NAMES = {"max_context_len": "context"}  # of a field, in leave_one_<...>_out
# Of these figures the largest over the seeds is the result; of the others, the mean.
WORST = (
    "worst_regret", "worst_against_default", "failures", "predicted_time_worst_error", "second_pass_worst_regret",
    "second_pass_worst_against_default",
)  # fmt: skip
# Figures that are given by the second pass alone, too.
SECOND_PASS = ("geomean_regret", "p90_regret", "worst_regret", "worst_against_default")


@dataclasses.dataclass(frozen=True)
class Pick:
    """What the selector would answer for a judged shape, without having seen it."""

    chosen: int | None  # the answer, an index of the configs on offer
    alone: int | None  # the model's own pick, whatever the gain that is asked for; None without any time
    abstained: bool  # a gain beyond noise was predicted, and not surely enough
    predicted_us: float  # time of the answer
    outside: bool


@dataclasses.dataclass(frozen=True)
class Bench:
    """What an evaluation works on."""

    measured: Measurements
    arch: Arch
    data: Examples
    judged: Sequence[Judged]
    noise: float
    typical: float  # noise of half of the cells (judging.py)
    seed: int
    jobs: int
    progress: Progress | None

    def hold_out(self, splits: Sequence[Any], what: str, progress: Progress | None = None) -> list[Any]:
        """Predictions for each split."""
        return hold_out(
            self.measured,
            self.arch,
            self.data,
            splits,
            seed=self.seed,
            jobs=self.jobs,
            what=what,
            progress=progress or self.progress,
        )


def evaluate(
    columns: Mapping[str, Sequence[Any]],
    *,
    op: str,
    arch: str,
    seed: int = 0,
    seeds: int = 1,
    folds: int = DEFAULT_FOLDS,
    leave_out: Sequence[str] = (),
    offer: Offer | None = None,
    limit: float = LIMIT,
    jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Regret figures of the model and three baselines, by name.

    `seeds` of the folds and of training are tried, from `seed` on: figures are means over them, and those of WORST the
    worst of them. `leave_out` names shape fields of which each value is held out in turn, as `value_splits` does
    (LEAVE_OUT has the usual ones). `offer` gives the configs on offer for a shape; left out, it is the op's own
    `candidates`. Picks that lose more than `limit` with any seed are listed as `beyond` (duels.py).
    Raises InvalidProfileError where no shape can be judged.
    """
    measured = measurements(columns, op=op, arch=arch)
    return evaluate_measurements(
        measured,
        get_arch(arch),
        seed=seed,
        seeds=seeds,
        folds=folds,
        leave_out=leave_out,
        offer=offer,
        limit=limit,
        jobs=jobs,
        progress=progress,
    )[0]


def evaluate_measurements(
    measured: Measurements,
    arch: Arch,
    *,
    seed: int = 0,
    seeds: int = 1,
    folds: int = DEFAULT_FOLDS,
    leave_out: Sequence[str] = (),
    offer: Offer | None = None,
    limit: float = LIMIT,
    jobs: int = 1,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Trial]]:
    """`evaluate`, from cells; and the trials of the first seed's folds, which a guard can be made of."""
    judged = judging_set(measured, arch, offer)
    if len(judged) < 2:
        raise InvalidProfileError(
            f"evaluation needs at least 2 shapes with every config on offer timed twice, got {len(judged)} "
            f"of {len(measured.shapes)}"
        )
    data = examples(measured, arch)  # of which the held-out shapes' rows never reach a fit
    noise, typical = noise_margin(measured), typical_noise(measured)
    by_seed: list[dict[str, Any]] = []
    inside: list[Trial] = []
    by_shape: list[dict[str, Any]] = []
    every: list[dict[int, Pick]] = []
    for number in range(seed, seed + seeds):
        bench = Bench(measured, arch, data, judged, noise, typical, number, jobs, progress)
        found, tried, picks = _folds(bench, folds, f"evaluate, seed {number}" if seeds > 1 else "evaluate")
        by_seed.append(found)
        every.append(picks)
        if number == seed:
            inside, by_shape = tried, _by_shape(judged, picks)
    result: dict[str, Any] = {
        "op": measured.op,
        "arch": measured.arch,
        "seed": seed,
        "seeds": seeds,
        "folds": folds,
        "rows": measured.rows,
        "measured_shapes": len(measured.shapes),
        "judged_shapes": len(judged),
        "noise": noise_of(measured),
        "noise_margin": noise,
        **over_seeds(by_seed),
        "by_seed": by_seed,
        "baselines": _baselines(Bench(measured, arch, data, judged, noise, typical, seed, jobs, None), folds),
    }
    bench = Bench(measured, arch, data, judged, noise, typical, seed, jobs, progress)
    for field in leave_out:
        result[f"leave_one_{NAMES.get(field, field)}_out"] = _leave_one_out(bench, field, inside)
    result["beyond"] = beyond(judged, [{at: found.chosen for at, found in picks.items()} for picks in every], limit)
    # Of the first seed: what was picked for each judged shape, and each trial's predicted and real gain.
    result["by_shape"] = by_shape
    result["trials"] = [[round(float(np.expm1(gain)), 6) for gain in (one.predicted, one.real)] for one in inside]
    return result, inside


def _by_shape(judged: Sequence[Judged], picks: Mapping[int, Pick]) -> list[dict[str, Any]]:
    found = []
    for one in judged:
        pick_ = picks[one.shape_id]
        at = pick_.chosen
        default = one.second_us[one.default]
        time = regret = against = None
        if at is not None and not np.isnan(one.second_us[at]):
            # The ratios are those of the figures: of duels where there are some, which times of a second pass are not.
            time, regret = float(one.second_us[at]), max(1.0, one.ratio(at, one.best)[0])
            against = None if np.isnan(default) else one.ratio(at, one.default)[0]
        found.append(
            {
                "shape": one.shape.to_dict(),
                "config": None if at is None else one.configs[at].to_dict(),
                "predicted_us": pick_.predicted_us if pick_.predicted_us == pick_.predicted_us else None,
                "measured_us": time,
                "best_us": one.reference_us,
                "default_us": None if np.isnan(default) else float(default),
                "regret": regret,
                "against_default": against,
                "abstained": pick_.abstained,
            }
        )
    return found


def over_seeds(by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One figure for all seeds."""
    return {
        name: max(one[name] for one in by_seed) if name in WORST else float(np.mean([one[name] for one in by_seed]))
        for name in by_seed[0]
    }


def pick(bench: Bench, one: Judged, predicted: Prediction, margin: float | None, outside: bool) -> Pick:
    """The selector's answer by a prediction, where `margin` is the gain that is asked for; None: no gain is sure."""
    start = bench.measured.cells(one.shape_id).start
    ratio = np.exp(predicted.ratio[one.cells - start])
    alone = first_best(one.configs, ratio)
    if alone is None:
        return Pick(None, None, False, float("nan"), outside)
    chosen = one.default if margin is None else choose(one.configs, ratio, one.default, margin, PREDICTED_TIE)[0]
    gain = float(ratio[one.default] / ratio[alone])
    abstained = chosen == one.default and gain > 1.0 + bench.noise
    alone = choose(one.configs, ratio, one.default, bench.noise)[0]
    return Pick(chosen, alone, abstained, predicted.best_us * float(ratio[chosen]), outside)


def _folds(bench: Bench, folds: int, what: str) -> tuple[dict[str, Any], list[Trial], dict[int, Pick]]:
    """Every shape held out once. The gain asked of a fold's picks comes from the other folds' shapes."""
    measured = bench.measured
    splits = fold_splits(measured.shapes, folds, bench.seed)
    if len(splits) < 2:
        raise InvalidProfileError(
            f"evaluation needs shapes that differ in more than nearly the same context, got {len(bench.judged)} "
            "that do not"
        )
    predictions = bench.hold_out(splits, what)
    tried = trials(measured, bench.arch, splits, predictions)
    picks: dict[int, Pick] = {}
    for split, predicted in zip(splits, predictions, strict=True):
        held = set(split.held.tolist())
        margin = _inside_margin(bench, tried, held)
        for one in bench.judged:
            if one.shape_id in held:
                picks[one.shape_id] = pick(bench, one, predicted[one.shape_id], margin, False)
    return _figures(bench, picks), tried, picks


def _inside_margin(bench: Bench, tried: Sequence[Trial], held: set[int]) -> float:
    needed = needed_gain([trial for trial in tried if trial.shape_id not in held], bench.noise, bench.typical)
    return bench.noise if needed.gain is None else needed.gain


def _figures(bench: Bench, picks: Mapping[int, Pick]) -> dict[str, Any]:
    judged = [one for one in bench.judged if one.shape_id in picks]
    error = [
        abs(picks[one.shape_id].predicted_us / one.second_us[at] - 1.0)
        for one in judged
        if (at := picks[one.shape_id].chosen) is not None and not np.isnan(one.second_us[at])
    ]
    chosen = {at: found.chosen for at, found in picks.items()}
    second = figures(judged, chosen, duels=False)
    return {
        **figures(judged, chosen),
        # How many are judged by a duel, and what the second pass alone says of all.
        "duelled": sum(
            at is not None and one.ratio(at, one.best)[1] for one in judged for at in [chosen[one.shape_id]]
        ),
        **{f"second_pass_{name}": second[name] for name in SECOND_PASS},
        "abstentions": float(np.mean([picks[one.shape_id].abstained for one in judged])),
        "changed": float(np.mean([picks[one.shape_id].chosen != one.default for one in judged])),
        "predicted_time_median_error": float(np.median(error)),
        "predicted_time_p90_error": float(np.quantile(error, 0.9)),
        "predicted_time_worst_error": float(np.max(error)),
    }


def _baselines(bench: Bench, folds: int) -> dict[str, Any]:
    rule: dict[int, int | None] = {one.shape_id: rule_pick(one, bench.arch) for one in bench.judged}
    near: dict[int, int | None] = {}
    for split in fold_splits(bench.measured.shapes, folds, bench.seed):
        best = best_configs(bench.measured.subset(split.train))
        held = set(split.held.tolist())
        near |= {one.shape_id: nearest_pick(one, bench.measured, best) for one in bench.judged if one.shape_id in held}
    default: dict[int, int | None] = {one.shape_id: one.default for one in bench.judged}
    named: dict[str, Mapping[int, int | None]] = {"default": default, "rule": rule, "nearest": near}
    return {name: figures(bench.judged, picks) for name, picks in named.items()}


def _leave_one_out(bench: Bench, field: str, inside: Sequence[Trial]) -> dict[str, Any]:
    """Each value of one field held out in turn, and picked for as the selector would.

    The gain asked for beyond the size comes from trials without the shapes that are judged: of a ranged size, from
    holding out the ends of what is left; of another, from the other values' own trials.
    """
    measured, judged = bench.measured, bench.judged
    ids = {one.shape_id for one in judged}
    splits = [split for split in value_splits(measured.shapes, field) if len(split.train) and ids & {*split.held}]
    values = len({getattr(one.shape, field) for one in judged})
    if not splits:
        return {"values": values}
    predictions = bench.hold_out(splits, f"leave one {field} out")
    tried = trials(measured, bench.arch, splits, predictions, field)
    picks: dict[int, Pick] = {}
    alone: dict[int, int | None] = {}
    for split, predicted in zip(splits, predictions, strict=True):
        held = set(split.held.tolist())
        left = sorted({getattr(measured.shapes[at], field) for at in split.train.tolist()})
        regime = Regime.of([measured.shapes[at] for at in split.train.tolist()], {})
        guard: Guard | None = None
        for one in judged:
            if one.shape_id not in held:
                continue
            beyond = regime.beyond(one.shape)
            margin: float | None = _inside_margin(bench, inside, held)
            if beyond:
                if guard is None:
                    guard = _guard_without(bench, field, inside, tried, split)
                reach = {field: reach_of(getattr(one.shape, field), left)} if field in beyond else {}
                margin, _ = guard.margin({**beyond, **reach}, bench.noise)
            picks[one.shape_id] = pick(bench, one, predicted[one.shape_id], margin, bool(beyond))
            alone[one.shape_id] = picks[one.shape_id].alone
    return {
        "values": values,
        "extrapolated": float(np.mean([found.outside for found in picks.values()])),
        **_figures(bench, picks),
        "model_alone": figures([one for one in judged if one.shape_id in alone], alone),
    }


def _guard_without(bench: Bench, field: str, inside: Sequence[Trial], tried: Sequence[Trial], split: Any) -> Guard:
    held = set(split.held.tolist())
    own = [trial for trial in tried if trial.shape_id not in held]
    if field in RANGED:
        ends = axis_splits(bench.measured.shapes, field, split.train.tolist())
        predictions = bench.hold_out(ends, f"ends of {field}", lambda *_: None)
        own = trials(bench.measured, bench.arch, ends, predictions, field)
    return Guard(
        CONFIDENCE,
        {
            INSIDE: needed_gain([trial for trial in inside if trial.shape_id not in held], bench.noise, bench.typical),
            field: needed_gain(own, bench.noise, bench.noise, beyond_confidence(field)),
        },
    )
