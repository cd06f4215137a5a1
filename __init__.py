"""tilewise: picks how to launch GPU attention-indexer kernels, from measured timings.

Importing this package touches no GPU and needs numpy at most: torch, triton, scikit-learn and the server
are imported by what uses them, when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewise.dispatch.capture_plan import CapturePlan, capture_plan
    from tilewise.dispatch.selector import Context, Decision, Selector, explain, rank, select, write_shapes
    from tilewise.errors import TilewiseError
    from tilewise.kernels.arch import Arch
    from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits, prepare, warm_up
    from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

_HOME = {
    "Arch": "tilewise.kernels.arch",
    "CapturePlan": "tilewise.dispatch.capture_plan",
    "Config": "tilewise.kernels.paged_mqa_logits.spec",
    "Context": "tilewise.dispatch.context",
    "Decision": "tilewise.dispatch.selector",
    "Selector": "tilewise.dispatch.selector",
    "Shape": "tilewise.kernels.paged_mqa_logits.spec",
    "TilewiseError": "tilewise.errors",
    "capture_plan": "tilewise.dispatch.capture_plan",
    "explain": "tilewise.dispatch.selector",
    "paged_mqa_logits": "tilewise.kernels.paged_mqa_logits.launch",
    "prepare": "tilewise.kernels.paged_mqa_logits.launch",
    "rank": "tilewise.dispatch.selector",
    "select": "tilewise.dispatch.selector",
    "warm_up": "tilewise.kernels.paged_mqa_logits.launch",
    "write_shapes": "tilewise.dispatch.selector",
}

__all__ = [
    "Arch",
    "CapturePlan",
    "Config",
    "Context",
    "Decision",
    "Selector",
    "Shape",
    "TilewiseError",
    "__version__",
    "capture_plan",
    "explain",
    "paged_mqa_logits",
    "prepare",
    "rank",
    "select",
    "warm_up",
    "write_shapes",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module on first use, and keep it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        from tilewise.errors import UnsupportedError

        raise UnsupportedError(f"tilewise.{name} needs {error.name}: install the extra [gpu]") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
