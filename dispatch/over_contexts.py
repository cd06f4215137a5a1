"""One config for every context that a launch may meet, as under a captured graph: how it is weighed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.dispatch.context import Context
from tilewise.dispatch.decision import Source
from tilewise.dispatch.ladder import FAILED, PRIOR_MARGIN, Assessment, Knowledge, assess, note_kernels
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, at_context_len, space
from tilewise.models.expected import ExpectedChoice, as_run, choose_expected, configs_over
from tilewise.models.regime import Outside

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ContextTimes:
    """What each config on offer takes at each context."""

    shapes: tuple[Shape, ...]  # one for each length of the context
    configs: list[Config]
    default: int
    times: Floats  # [contexts, configs], microseconds; NaN where unknown
    source: Source  # of the times: exact, model, prior, or default where there are none
    margin: float  # a gain within it does not replace the default
    noise: float  # a gain within it is none
    outside: str  # why some contexts lie beyond what was measured; empty where none does
    undecided: str  # why no predicted gain is sure enough, so that the default stays; empty where it is
    notes: dict[int, str]  # configs that could not be chosen
    misses: list[str]  # fallbacks to count
    why: str  # why there are no times to choose by


def context_times(shape: Shape, context: Context, arch: Arch, known: Knowledge, *, use_exact: bool) -> ContextTimes:
    """The times to choose by. Raises InvalidConfigError where no kernel serves the shape on this arch."""
    shapes = tuple(at_context_len(shape, length) for length in context.lengths)
    configs = configs_over(shapes, arch, known.verdicts)
    times = np.full((len(shapes), len(configs)), np.nan)
    notes: dict[int, str] = {}
    misses: list[str] = []

    def answer(
        source: Source, margin: float, noise: float, outside: str = "", undecided: str = "", why: str = ""
    ) -> ContextTimes:
        return ContextTimes(shapes, configs, 0, times, source, margin, noise, outside, undecided, notes, misses, why)

    bundle = known.bundle
    if bundle is None:
        misses.append("no_bundle")
    else:
        note_kernels(configs, notes, misses, bundle, known)
        if 0 in notes:
            misses.append("default_unknown")
    if bundle is None or 0 in notes:
        for row, one in zip(times, shapes, strict=True):
            row[:] = [_prior_us(one, as_run(config, one), arch) for config in configs]
        why = known.problem if bundle is None else notes[0]
        known_prior = not np.isnan(times[:, 0]).any()
        return answer("prior" if known_prior else "default", PRIOR_MARGIN, PRIOR_MARGIN, "", "", why)

    usable = [at for at in range(len(configs)) if at not in notes]
    exact, margin, undecided = True, bundle.noise_margin, ""
    outside: dict[tuple[str, str], Outside] = {}  # the farthest of each kind
    for row, one in zip(times, shapes, strict=True):
        run = [as_run(configs[at], one) for at in usable]
        index = bundle.exact.find(one)
        measured = {} if index is None else bundle.exact.times(index)
        for at, config in zip(usable, run, strict=True):
            if measured.get(config, 0.0) != measured.get(config, 0.0):
                notes.setdefault(at, FAILED)
        if use_exact and index is not None and all(config in measured for config in run):
            row[usable] = [measured[config] for config in run]
            continue
        exact = False
        if one.batch_size and one.max_context_len:
            row[usable] = bundle.predict_us(one, run)
            needed, clause = bundle.margin(one)
            margin = max(margin, needed or 0.0)
            undecided = undecided or (clause if needed is None else "")
            for far in bundle.regime.outside(one):
                kind = (far.dimension, far.side)
                outside[kind] = max(outside.get(kind, far), far, key=lambda at: at.reach)
        else:
            row[usable] = bundle.least_us(one)  # no context: all are as fast
    times[:, list(notes)] = np.nan
    if outside:
        misses.append("extrapolated")
    beyond_text = ", ".join(far.text for far in outside.values())
    return answer("exact" if exact else "model", margin, bundle.noise_margin, beyond_text, undecided)


def assess_contexts(
    shape: Shape, context: Context, arch: Arch, known: Knowledge, worst_case: float, *, use_exact: bool = True
) -> Assessment:
    """Weigh a shape over contexts. Times of the assessment are expected times."""
    if len(context.lengths) == 1:
        return assess(at_context_len(shape, context.longest), arch, known, use_exact=use_exact)
    found = context_times(shape, context, arch, known, use_exact=use_exact)
    weighed = Assessment(
        found.shapes[-1], found.configs, found.default, np.full(len(found.configs), np.nan), known.model_id, 0,
        notes=found.notes, misses=found.misses,
    )  # fmt: skip
    weighed.regime = "extrapolated" if found.outside or found.source in ("prior", "default") else "inside"
    if np.isnan(found.times).any(axis=0).all():
        weighed.reason = f"{found.why or 'no config has a time at every context'}: the default config for {context}."
        return _refused(weighed, known)
    choice = choose_expected(found.configs, found.times, context.weights, found.default, found.margin, worst_case)
    weighed.times = choice.expected_us
    weighed.time_source = found.source
    if found.undecided:
        beyond = f"beyond what was measured ({found.outside}), " if found.outside else ""
        weighed.reason = f"{beyond}{found.undecided}: the default config for {context}."
        return _refused(weighed, known)
    weighed.chosen, weighed.runner_up, weighed.source = choice.chosen, choice.runner_up, found.source
    weighed.reason = _reason(found, context, worst_case, choice)
    within = choice.worst_case <= worst_case
    if choice.bounded and choice.chosen == found.default and within.any():
        gap = float(choice.expected_us[found.default] / choice.expected_us[within].min()) - 1.0
        if gap > found.noise:
            weighed.misses.append("abstained")
            weighed.reason += (
                f" A gain of {100 * gap:.1f} % is predicted; {100 * found.margin:.1f} % would make it sure."
            )
    if found.outside:
        weighed.reason += f" Beyond what was measured: {found.outside}."
    for text in (*known.stale.values(), known.other_compiler):
        weighed.reason += f" {text}" if text else ""
    return _refused(weighed, known)


def _reason(found: ContextTimes, context: Context, worst_case: float, choice: ExpectedChoice) -> str:
    verb, default = _verb(found.source), found.default
    rule = f"over {context}, weighed by their shares"
    if found.source == "prior":
        rule = f"{found.why}: by the analytic prior, which is not measured, {rule}"
    own = f"its worst is {verb} as {choice.worst_case[choice.chosen]:.3f}x the best config of a context"
    if not choice.bounded:
        return f"{rule}: no config stays within {worst_case:.2f}x of the best at each; of this one, {own}."
    if choice.chosen == default:
        return f"{rule}: the default is {verb} best, or behind by less than is asked for; {own}."
    text = f"{rule}: {verb} the least expected time within {worst_case:.2f}x of the best at each context; {own}"
    if default in found.notes:
        return f"{text}; the default cannot be used: {found.notes[default]}."
    if choice.worst_case[default] > worst_case:
        return f"{text}, the default's {choice.worst_case[default]:.3f}x."
    gain = float(choice.expected_us[default] / choice.expected_us[choice.chosen]) - 1.0
    return f"{text}; {100 * gain:.1f} % ahead of the default."


def _verb(source: Source) -> str:
    return "measured" if source == "exact" else "predicted"


def _refused(weighed: Assessment, known: Knowledge) -> Assessment:
    if known.refused:
        weighed.reason += f" {known.refused[0].upper()}{known.refused[1:]}"
    return weighed


def _prior_us(shape: Shape, config: Config, arch: Arch) -> float:
    prior_us = getattr(space(config.kernel), "prior_us", None)
    return float("nan") if prior_us is None else float(prior_us(shape, config, arch))
