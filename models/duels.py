"""Which picks are to be timed again, against the best and the default of their shapes: a duel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads LIMIT whatever it is asked for
    from tilewise.models.judging import Judged

LIMIT = 0.05  # ratio less 1; a pick that loses more is duelled again


def beyond(judged: Sequence[Judged], picks: Sequence[Mapping[int, int | None]], limit: float) -> list[dict[str, Any]]:
    """The shapes of which some pick loses more than a limit, a ratio less 1; the one that loses most first.

    `picks` has one mapping of shape_id to index a seed. `configs` of an entry are those to duel: the picks that lose,
    the config that the first pass calls best, and the default. `duelled` says whether duels have judged the picks.
    """
    found = []
    for one in judged:
        lost: dict[int, float] = {}
        for of_seed in picks:
            at = of_seed[one.shape_id]
            if at is not None and (ratio := one.ratio(at, one.best)[0]) > 1.0 + limit:  # not where it is NaN
                lost[at] = ratio
        if lost:
            ids = dict.fromkeys((*lost, one.best, one.default))
            found.append(
                {
                    "shape": one.shape.to_dict(),
                    "regret": max(lost.values()),
                    "duelled": all(one.ratio(at, one.best)[1] for at in lost),
                    "picks": [one.configs[at].to_dict() for at in lost],
                    "best": one.configs[one.best].to_dict(),
                    "default": one.configs[one.default].to_dict(),
                    "configs": [one.configs[at].to_dict() for at in ids],
                }
            )
    return sorted(found, key=lambda entry: -float(entry["regret"]))
