"""Whether answers are used: TILEWISE_MODE, read when a selector is made.

off     every answer is the default config; no model is loaded
shadow  every answer is the default config; what would have been picked is said, logged and counted
on      the answers are used; this is so without the variable
strict  they are used, and `select` raises SelectionMissError where neither a measurement nor the model answers
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, get_args

from tilewise.dispatch.ladder import Assessment
from tilewise.errors import UnsupportedError

Mode = Literal["off", "shadow", "on", "strict"]
VARIABLE = "TILEWISE_MODE"


def mode_of(given: str | None) -> Mode:
    """The mode asked for, else that of the environment, else "on". Raises UnsupportedError for another word."""
    word = os.environ.get(VARIABLE, "") if given is None else given
    for mode in get_args(Mode):
        if word == mode:
            return mode  # type: ignore[no-any-return]
    if not word and given is None:
        return "on"
    where = VARIABLE if given is None else "mode"
    raise UnsupportedError(f"{where} must be one of {', '.join(get_args(Mode))}, got {word!r:.80}")


def shadowed(found: Assessment) -> Assessment:
    """The same with the default as the answer. The config that would have been picked is its runner-up."""
    kept = dataclasses.replace(found, notes=dict(found.notes), misses=[*found.misses, "shadow"])
    if found.chosen == found.default:
        kept.reason = f"shadow mode, and the same without it: {found.reason}"
        return kept
    kept.misses.append("shadow_differs")
    kept.chosen, kept.runner_up, kept.source = found.default, found.chosen, "default"
    kept.reason = (
        f"shadow mode: the default config. Otherwise {found.configs[found.chosen]} ({found.source}): {found.reason}"
    )
    return kept


def missed(found: Assessment) -> bool:
    """Whether strict mode refuses this: nothing measured or modelled answered for a launch that does something."""
    empty = not found.shape.batch_size or not found.shape.max_context_len
    return not empty and found.source not in ("exact", "model")
