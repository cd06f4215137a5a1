"""How one shape is weighed: exact, model, nearest, prior, default. No state and no memo; selector.py has those."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import numpy.typing as npt

from tilewise.dispatch.decision import Decision, RegimeName, Source
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, Verdicts, candidates, default_config, space
from tilewise.models.bundle import Bundle
from tilewise.models.choice import PREDICTED_TIE, TIE, choose
from tilewise.models.measurements import installed_hash
from tilewise.models.transfer import transfer

# An analytic prior is no measurement: the default gives way only to a gain beyond the prior's error.
PRIOR_MARGIN = 0.05
FAILED = "it failed when this shape was measured"


@dataclass(frozen=True)
class Knowledge:
    """What there is to choose by: a bundle or why there is none, and which of its kernels do not count."""

    bundle: Bundle | None
    problem: str  # why there is no bundle; empty where there is one
    stale: dict[str, str]  # kernel to why its timings do not count
    refused: str = ""  # a sentence where this is not the bundle that was published, since that one cannot be used
    verdicts: Verdicts = field(default_factory=dict, compare=False, repr=False)  # of `candidates`, to be fast
    other_compiler: str = ""  # set where the Triton at hand is none of those that the timings were taken with

    @classmethod
    def of(cls, bundle: Bundle | None, problem: str = "") -> Knowledge:
        """Compare a bundle's kernels with the installed ones."""
        stale = {}
        for kernel, measured in (bundle.kernel_hashes if bundle else {}).items():
            installed = installed_hash(kernel)
            if installed is None:
                stale[kernel] = f"kernel {kernel} of the bundle is not installed"
            elif installed != measured:
                stale[kernel] = f"kernel {kernel} was measured as source {measured}, but {installed} is installed"
        return cls(bundle, problem, stale, other_compiler=_other_compiler(bundle))

    @property
    def model_id(self) -> str | None:
        """Short name of the bundle in force."""
        return self.bundle.model_id if self.bundle else None


@dataclass
class Assessment:
    """The configs on offer for one shape, what is known of each, and the choice."""

    shape: Shape
    configs: list[Config]
    default: int
    times: npt.NDArray[np.float64]  # microseconds, NaN where unknown
    model_id: str | None
    chosen: int
    runner_up: int | None = None
    source: Source = "default"
    time_source: Source | None = None  # where the times are from
    regime: RegimeName = "inside"
    reason: str = ""
    notes: dict[int, str] = field(default_factory=dict)  # why a config could not be chosen
    misses: list[str] = field(default_factory=list)  # fallbacks to count, by name

    def decision(self) -> Decision:
        """The record of the choice."""
        predicted = self.time_of(self.chosen)
        second = None if self.runner_up is None else self.time_of(self.runner_up)
        return Decision(
            config=self.configs[self.chosen],
            predicted_us=predicted,
            margin=None if predicted is None or second is None else second / predicted - 1.0,
            runner_up=None if self.runner_up is None else self.configs[self.runner_up],
            source=self.source,
            regime=self.regime,
            reason=self.reason,
            model_id=self.model_id,
        )

    def time_of(self, at: int) -> float | None:
        """Microseconds of one config, None where unknown."""
        time = float(self.times[at])
        return time if time == time else None


def assess(shape: Shape, arch: Arch, known: Knowledge, *, use_exact: bool = True) -> Assessment:
    """Weigh a shape. Raises InvalidConfigError where no kernel serves it on this arch."""
    found = _weigh(shape, arch, known, use_exact)
    if known.refused:
        found.reason += f" {known.refused[0].upper()}{known.refused[1:]}"
    return found


def _weigh(shape: Shape, arch: Arch, known: Knowledge, use_exact: bool) -> Assessment:
    if shape.batch_size == 0 or shape.max_context_len == 0:
        found = fallback(shape, default_config(shape, arch), known)
        found.reason = "empty batch: the default config." if shape.batch_size == 0 else "empty context: the default."
        return found
    configs = candidates(shape, arch, known.verdicts)
    at = 0  # the default is the first
    found = Assessment(shape, configs, at, np.full(len(configs), np.nan), known.model_id, at)
    bundle = known.bundle
    if bundle is None:
        return _prior(found, arch, "no_bundle", known.problem)

    note_kernels(configs, found.notes, found.misses, bundle, known)
    if at in found.notes:  # without a time for the default, nothing can be said to beat it
        return _prior(found, arch, "default_unknown", found.notes[at])
    index = bundle.exact.find(shape)
    measured = {} if index is None else bundle.exact.times(index)
    if measured:
        for i, config in enumerate(configs):
            time = measured.get(config)
            if time is not None and time != time:
                found.notes.setdefault(i, FAILED)
    usable = [i for i in range(len(configs)) if i not in found.notes]
    if not usable:
        return _prior(found, arch, "all_failed", "every config failed when this shape was measured")

    partly = ""
    if use_exact and index is not None:
        if all(configs[i] in measured for i in usable):
            found.times[usable] = [measured[configs[i]] for i in usable]
            return _choose(found, bundle, known, "exact", bundle.noise_margin)
        found.misses.append("partly_measured")
        partly = _partly_measured([configs[i] in measured for i in usable])
    found.times[usable] = bundle.predict_us(shape, [configs[i] for i in usable])
    outside = bundle.regime.outside(shape)
    margin, clause = bundle.margin(shape, outside)
    if margin is not None:
        found = _choose(found, bundle, known, "model", margin)
        if outside:
            found.regime = "extrapolated"
            found.misses.append("extrapolated")
            found.reason = f"beyond what was measured ({', '.join(one.text for one in outside)}): {found.reason}"
        found.reason += partly
        return found

    allowed, text = False, clause
    if outside:
        allowed, why = bundle.regime.transfer_allowed(outside)
        text = f"beyond what was measured ({', '.join(one.text for one in outside)}), where {why}"
    near = bundle.exact.nearest(shape, 1, same_pages=True) if allowed else []
    found.time_source = "model"
    if not near:
        found = _prior(found, arch, "extrapolated", text)
        found.reason += partly
        return found
    source = bundle.exact.shape(near[0][0])
    best, _ = bundle.exact.best(near[0][0])
    found.chosen = usable[transfer(best, source, shape, [configs[i] for i in usable])]
    found.source, found.regime = "nearest", "extrapolated"
    found.misses.append("extrapolated")
    found.reason = f"{text}: the best config of the nearest measured shape.{partly}"
    return found


def _partly_measured(measured: list[bool]) -> str:
    """A sentence for a shape that was measured, but not with all of its candidates."""
    count = "None" if not any(measured) else f"Only {sum(measured)}"
    return (
        f" {count} of its {len(measured)} candidates were measured at this shape, so the times are predicted; "
        "`tilewise collect` with this shape in its file of shapes measures the others."
    )


def _other_compiler(bundle: Bundle | None) -> str:
    """A sentence where another Triton is installed than the timings are of. Served all the same, but not silently.

    Another compiler moves times by some per cent and may move the best config; the kernel's source, which decides more,
    is held to exactly. Without Triton nothing is launched here, and there is nothing to say.
    """
    measured = bundle.toolchain.get("triton_version", []) if bundle else []
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return ""
    if not measured or installed in measured:
        return ""
    return f"The timings are of Triton {', '.join(measured)}; {installed} is installed."


def fallback(shape: Shape, default: Config, known: Knowledge) -> Assessment:
    """The default, with nothing weighed."""
    return Assessment(shape, [default], 0, np.full(1, np.nan), known.model_id, 0)


def note_kernels(
    configs: list[Config], notes: dict[int, str], misses: list[str], bundle: Bundle, known: Knowledge
) -> None:
    """Note the configs of kernels whose timings are stale or missing, and what is to be counted."""
    unknown = {config.kernel for config in configs} - bundle.kernel_hashes.keys()
    if known.stale:
        misses.append("stale_kernel")
    if unknown:
        misses.append("unmeasured_kernel")
    if known.stale or unknown:
        for i, config in enumerate(configs):
            if config.kernel in known.stale:
                notes[i] = known.stale[config.kernel]
            elif config.kernel in unknown:
                notes[i] = f"kernel {config.kernel} is not in the bundle"


def _choose(found: Assessment, bundle: Bundle, known: Knowledge, source: Source, margin: float) -> Assessment:
    """Take the best by the times, unless the default is as good within the margin."""
    tie = PREDICTED_TIE if source == "model" else 0.0
    found.chosen, found.runner_up = choose(found.configs, found.times, found.default, margin, tie)
    found.source = found.time_source = source
    verb = "measured" if source == "exact" else "predicted"
    timed = int(np.count_nonzero(found.times == found.times))
    least = float(np.fmin.reduce(found.times))
    behind = float(found.times[found.chosen]) / least - 1.0
    fastest = "fastest" if behind < TIE else f"within {100 * behind:.1f} % of the fastest, a tie,"
    default_us = float(found.times[found.default])
    if found.chosen == found.default:
        gap = default_us / least - 1.0
        found.reason = f"the default is {verb} fastest of {timed} configs."
        if gap > 0.0:
            found.reason = (
                f"the default is {verb} {100 * gap:.1f} % behind the fastest of {timed} configs, within the noise "
                f"margin of {100 * bundle.noise_margin:.1f} %."
            )
        if gap > bundle.noise_margin:
            found.misses.append("abstained")
            found.reason = (
                f"a gain of {100 * gap:.1f} % over the default is predicted, and {100 * margin:.1f} % would be needed "
                f"for it to be sure: the default config."
            )
    elif default_us != default_us:
        found.reason = f"{verb} {fastest} of {timed} configs; the default cannot be used: {found.notes[found.default]}."
    else:
        gain = default_us / float(found.times[found.chosen]) - 1.0
        found.reason = f"{verb} {fastest} of {timed} configs, {100 * gain:.1f} % ahead of the default."
    if known.stale:
        found.reason += f" Left out: {'; '.join(known.stale.values())}."
    if known.other_compiler:
        found.reason += f" {known.other_compiler}"
    return found


def _prior(found: Assessment, arch: Arch, miss: str, why: str) -> Assessment:
    """Choose by the kernels' analytic priors, where they have one; else the default."""
    found.misses.append(miss)
    found.regime = "extrapolated"
    found.reason = f"{why}: the default config."
    priors = {kernel: getattr(space(kernel), "prior_us", None) for kernel in {one.kernel for one in found.configs}}
    if priors[found.configs[found.default].kernel] is None:
        return found
    times = np.full(len(found.configs), np.nan)
    for i, config in enumerate(found.configs):
        prior_us = priors[config.kernel]
        if prior_us is not None and found.notes.get(i) != FAILED:
            times[i] = prior_us(found.shape, config, arch)
    if np.isnan(times[found.default]):
        return found
    found.times = times
    found.chosen, found.runner_up = choose(found.configs, times, found.default, PRIOR_MARGIN)
    found.source = found.time_source = "prior"
    basis = getattr(space(found.configs[found.chosen].kernel), "PRIOR_BASIS", "published figures")
    what = "the best by the analytic prior, which is predicted, not measured"
    gain = float(times[found.default] / np.nanmin(times)) - 1.0
    if found.chosen == found.default and gain >= 0.0005:
        what = (
            f"the default config. The analytic prior, which is predicted, not measured, has another {100 * gain:.1f} % "
            f"ahead, and asks for {100 * PRIOR_MARGIN:.0f} %"
        )
    found.reason = f"{why}: {what}. It rests on {basis}."
    return found
