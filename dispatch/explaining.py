"""Putting an assessment into words: what was ranked, what was rejected and why, and what was measured nearby."""

from __future__ import annotations

from tilewise.dispatch.attribution import what_moved
from tilewise.dispatch.decision import Explanation, Moved, Neighbour, Ranked, Rejected
from tilewise.dispatch.ladder import Assessment
from tilewise.errors import InvalidConfigError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import SPACES, Config, Shape, default_config, floor_us, is_valid, space
from tilewise.models.bundle import Bundle
from tilewise.models.expected import as_run
from tilewise.models.features import FEATURES

NEIGHBOURS = 5


def ranked_configs(found: Assessment) -> list[Ranked]:
    """The chosen config, then the others by time, then those without one; equals in their fixed order."""
    ranked = []
    for at in _order(found):
        time = found.time_of(at)
        ranked.append(Ranked(found.configs[at], time, None if time is None else found.time_source))
    return ranked


def explain_assessment(found: Assessment, arch: Arch, bundle: Bundle | None) -> Explanation:
    """The decision with everything that it was weighed against."""
    features: dict[str, float] = {}
    near: list[Neighbour] = []
    moved: tuple[Moved, ...] = ()
    against: Config | None = None
    if bundle is not None:
        other = found.runner_up if found.chosen == found.default else found.default
        if other is not None and found.time_of(found.chosen) is not None and found.time_source in ("model", "exact"):
            against = found.configs[other]
            moved = what_moved(bundle, found.shape, found.configs[found.chosen], against)
        row = bundle.features(found.shape, [found.configs[found.chosen]])[0]
        features = dict(zip(FEATURES, row.tolist(), strict=True))
        for index, distance in bundle.exact.nearest(found.shape, NEIGHBOURS):
            shape = bundle.exact.shape(index)
            config, latency_us = bundle.exact.best(index)
            times = bundle.exact.times(index)
            chosen_us = times.get(as_run(found.configs[found.chosen], shape))
            near.append(
                Neighbour(
                    shape, distance, config, latency_us, _known(chosen_us), _known(_default_us(shape, arch, times))
                )
            )
    return Explanation(
        arch=arch.name,
        shape=found.shape,
        decision=found.decision(),
        rejected=tuple(_rejected(found, arch)),
        nearest=tuple(near),
        features=features,
        floor_us=floor_us(found.shape, arch),
        moved=moved,
        moved_against=against,
    )


def _default_us(shape: Shape, arch: Arch, times: dict[Config, float]) -> float | None:
    try:
        return times.get(default_config(shape, arch))
    except InvalidConfigError:
        return None


def _known(time: float | None) -> float | None:
    return None if time is None or time != time else time


def _rejected(found: Assessment, arch: Arch) -> list[Rejected]:
    rejected = [
        Rejected(found.configs[at], _why_rejected(found, at), found.time_of(at))
        for at in _order(found)
        if at != found.chosen
    ]
    offered = set(found.configs)
    for kernel in SPACES:
        if space(kernel).runs_on(arch):
            for config in dict.fromkeys(space(kernel).candidates(found.shape, arch)):
                if config not in offered and (why := is_valid(found.shape, config, arch)) is not None:
                    rejected.append(Rejected(config, why, None))
    return rejected


def _why_rejected(found: Assessment, at: int) -> str:
    if at in found.notes:
        return found.notes[at]
    time, chosen_us = found.time_of(at), found.time_of(found.chosen)
    if time is None or chosen_us is None:
        return "no time is known for it"
    verb = "measured" if found.time_source == "exact" else "predicted"
    if time >= chosen_us:
        return f"{verb} {100 * (time / chosen_us - 1):.1f} % slower"
    gain = f"{verb} {100 * (1 - time / chosen_us):.1f} % faster"
    if found.source in ("exact", "model", "prior"):
        return f"{gain}, which is not sure enough to leave the default"
    return f"{gain}, but beyond what was measured"


def _order(found: Assessment) -> list[int]:
    rest = [at for at in range(len(found.configs)) if at != found.chosen]

    def key(at: int) -> tuple[bool, float, Config]:
        time = found.time_of(at)
        return time is None, time or 0.0, found.configs[at]

    return [found.chosen, *sorted(rest, key=key)]
