"""How good one config for every context is: chosen without knowing the context, against the best in hindsight.

Judged are kinds of shapes (everything but the context equal) with at least three contexts of which every candidate was
tried. The model has seen no shape of the kind. Every context counts the same. A config counts as timed at a context
where what it runs there was (`expected.as_run`): with more splits than tiles, that is the config with fewer splits;
`assumed` says for which share of the cells that is so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates
from tilewise.models.bucket_transfer import same_but_context
from tilewise.models.bundle import unsquash
from tilewise.models.choice import first_best
from tilewise.models.columns import shape_columns
from tilewise.models.expected import WORST_CASE, as_run, choose_expected, configs_over
from tilewise.models.features import features_of, floors_us, shape_features
from tilewise.models.fit import examples, fit
from tilewise.models.forest import Forest
from tilewise.models.judging import geomean, noise_margin
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.smooth import Smooth

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]  # what, done, of how many

FEWEST_CONTEXTS = 3
DEFAULT_FOLDS = 5


@dataclass(frozen=True)
class Kind:
    """Shapes that differ in their context alone, and the times of every config that is on offer at all of them."""

    shape_ids: list[int]
    shapes: list[Shape]
    configs: list[Config]  # the default of the longest context first
    first_us: Floats  # [contexts, configs], what is chosen by; NaN where it was not timed or failed
    second_us: Floats  # what is judged by: the second pass where all of it was taken, else the first
    independent: bool  # whether that is a second pass
    assumed: Floats  # [contexts, configs], 1 where the time is that of fewer splits


def evaluate_context(
    columns: Mapping[str, Sequence[Any]],
    *,
    op: str,
    arch: str,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    worst_case: float = WORST_CASE,
    gain: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Figures by name. `gain` is what a pick has to be predicted better than the default by, a ratio less 1: that of a
    bundle's guard, or the noise where it is left out.

    Raises InvalidProfileError where no kind of shape can be judged.
    """
    facts = get_arch(arch)
    measured = measurements(columns, op=op, arch=facts.name)
    kinds = judged_kinds(measured, facts)
    if not kinds:
        raise InvalidProfileError(
            f"one config for several contexts can be judged only where at least {FEWEST_CONTEXTS} contexts of one kind "
            f"of shape have all their candidates timed: there is none among {len(measured.shapes)} shapes"
        )
    margin = noise_margin(measured) if gain is None else gain
    data = examples(measured, facts)
    fold = np.random.default_rng(seed).permutation(len(kinds)) % folds
    picks: dict[int, int] = {}
    for number in range(folds):
        held = np.flatnonzero(fold == number).tolist()
        if progress:
            progress("evaluate contexts", number, folds)
        if not held:
            continue
        unseen = {at for kind in held for at in kinds[kind].shape_ids}
        train = np.array([at for at in range(len(measured.shapes)) if at not in unseen], dtype=np.int64)
        if not len(train):
            raise InvalidProfileError("nothing is left to train on where one kind of shape is held out")
        rows = np.flatnonzero(np.isin(measured.shape_id[data.cell], train))
        rank, level = fit(data, rows, train, seed)
        for kind in held:
            one = kinds[kind]
            times = np.stack([predicted(rank, level, shape, one.configs, facts) for shape in one.shapes])
            weights = [1.0 / len(one.shapes)] * len(one.shapes)
            picks[kind] = choose_expected(one.configs, times, weights, 0, margin, worst_case).chosen
    if progress:
        progress("evaluate contexts", folds, folds)
    return {
        "op": op,
        "arch": facts.name,
        "seed": seed,
        "worst_case": worst_case,
        **context_figures(kinds, picks, worst_case),
    }


def context_figures(kinds: Sequence[Kind], picks: Mapping[int, int], worst_case: float = WORST_CASE) -> dict[str, Any]:
    """Losses of the picks against the best single config in hindsight, and that one's against each context's best.

    Hindsight is held to the same bound on the worst case; `unbounded` is against the best one without it. A pick that
    was not timed at some context counts as a failure, with the loss of the worst config that was.
    """
    regret, free, own, own_worst, default = [], [], [], [], []
    failures, rows = 0, []
    for at, kind in enumerate(kinds):
        timed = ~np.isnan(kind.first_us).any(axis=0) & ~np.isnan(kind.second_us).any(axis=0)
        known = np.where(timed, kind.first_us, np.nan)
        weights = [1.0 / len(kind.shapes)] * len(kind.shapes)
        hindsight = choose_expected(kind.configs, known, weights, None, 0.0, worst_case).chosen
        unbounded = choose_expected(kind.configs, known, weights, None, 0.0, np.inf).chosen
        total = kind.second_us.mean(axis=0)
        best = [first_best(kind.configs, times) for times in kind.first_us]
        each = np.array([times[b] for times, b in zip(kind.second_us, best, strict=True) if b is not None])
        time = float(total[picks[at]])
        if np.isnan(time):
            failures += 1
            time = float(np.nanmax(total[timed]))
        regret.append(max(1.0, time / float(total[hindsight])))
        free.append(max(1.0, time / float(total[unbounded])))
        own.append(max(1.0, float(total[hindsight]) / float(each.mean())))
        own_worst.append(float((kind.second_us[:, hindsight] / each).max()))
        default.append(float(total[0] / total[hindsight]))
        rows.append(
            {
                **{name: getattr(kind.shapes[0], name) for name in ("batch_size", "next_n", "heads", "block_kv")},
                "contexts": [shape.max_context_len for shape in kind.shapes],
                "pick": str(kind.configs[picks[at]]),
                "hindsight": str(kind.configs[hindsight]),
                "regret": regret[-1],
                "unbounded_regret": free[-1],
                "hindsight_loss": own[-1],
                "hindsight_worst_context": own_worst[-1],
                "default_loss": default[-1],
            }
        )
    return {
        "context_kinds": len(kinds),
        "context_kinds_timed_twice": sum(kind.independent for kind in kinds),
        "context_geomean_regret": geomean(np.array(regret)),
        "context_worst_regret": max(regret),
        "context_failures": failures,
        "unbounded_geomean_regret": geomean(np.array(free)),
        "unbounded_worst_regret": max(free),
        "hindsight_geomean_loss": geomean(np.array(own)),
        "hindsight_worst_loss": max(own),
        "hindsight_worst_at_a_context": max(own_worst),
        "default_geomean_regret": geomean(np.array(default)),
        "default_worst_regret": max(default),
        "assumed": float(np.mean([kind.assumed.mean() for kind in kinds])),
        "kinds": rows,
    }


def judged_kinds(measured: Measurements, arch: Arch) -> list[Kind]:
    """The kinds of shapes with enough contexts whose candidates were all tried."""
    place = {config: at for at, config in enumerate(measured.configs)}
    found = []
    for ids in same_but_context(measured.shapes).values():
        full = [at for at in ids if _all_tried(measured, at, place, arch)]
        if len({measured.shapes[at].max_context_len for at in full}) >= FEWEST_CONTEXTS:
            kind = _kind(measured, full, place, arch)
            if not np.isnan(kind.first_us[:, 0]).any():  # without a time for the default there is no reference
                found.append(kind)
    return found


def _all_tried(measured: Measurements, shape_id: int, place: Mapping[Config, int], arch: Arch) -> bool:
    tried = set(measured.config_id[measured.cells(shape_id)].tolist())
    return all(place.get(config, -1) in tried for config in candidates(measured.shapes[shape_id], arch))


def _kind(measured: Measurements, ids: list[int], place: Mapping[Config, int], arch: Arch) -> Kind:
    shapes = [measured.shapes[at] for at in ids]
    configs = configs_over(shapes, arch)
    first, second, every = (np.full((len(ids), len(configs)), np.nan) for _ in range(3))
    assumed = np.zeros((len(ids), len(configs)))
    for row, (shape_id, shape) in enumerate(zip(ids, shapes, strict=True)):
        cells = measured.cells(shape_id)
        cell_of = {int(config): cells.start + at for at, config in enumerate(measured.config_id[cells])}
        for column, config in enumerate(configs):
            run = as_run(config, shape)
            assumed[row, column] = run is not config and run != config
            cell = cell_of.get(place.get(run, -1))
            if cell is not None:
                first[row, column] = measured.first_us[cell]
                second[row, column] = measured.second_us[cell]
                every[row, column] = measured.latency_us[cell]
    twice = bool((np.isnan(second) == np.isnan(every)).all())
    return Kind(ids, shapes, configs, first if twice else every, second if twice else every, twice, assumed)


def predicted(rank: Forest, level: Smooth, shape: Shape, configs: Sequence[Config], arch: Arch) -> Floats:
    """[configs] predicted microseconds of what each runs at this shape."""
    ratio = unsquash(rank.predict(features_of(shape, [as_run(config, shape) for config in configs], arch)))
    numbers = shape_columns(shape)
    lift = float(level.predict(shape_features(numbers, arch)[None])[0])
    return np.asarray(float(floors_us(numbers, arch)) * np.exp(lift + ratio))
