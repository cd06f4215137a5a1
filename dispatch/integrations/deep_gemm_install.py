"""Where DeepGEMM's functions are replaced and put back: in DeepGEMM itself, and in vLLM's modules that name them."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits import peers

Function = Callable[..., Any]

# vLLM's own wrappers, and the modules that bind them by name. The first is loaded where vLLM is, so that modules which
# are loaded later bind the drop-in; of the others only what is loaded already is touched.
VLLM_HOME = "vllm.utils.deep_gemm"
VLLM_MODULES = (VLLM_HOME, "vllm.model_executor.layers.sparse_attn_indexer", "vllm.v1.attention.backends.mla.indexer")
# Where vLLM's wrappers keep DeepGEMM's functions from their first call on: ours, when that came after the install.
VLLM_KEPT = {peers.FUNCTION: "_fp8_fp4_paged_mqa_logits_impl", peers.METADATA: "_get_paged_mqa_logits_metadata_impl"}

_lock = threading.RLock()
# Module name and function name to what stood there, and to what was put there.
_replaced: dict[tuple[str, str], tuple[Function, Function]] = {}
_originals: dict[str, Function] = {}  # DeepGEMM's functions by name
_vllm_originals: dict[str, Function] = {}  # vLLM's


def install(functions: Mapping[str, Function], vllm_functions: Mapping[str, Function]) -> None:
    """Replace what is found of DeepGEMM's functions and of vLLM's. UnsupportedError where nothing is."""
    with _lock:
        _untouched.cache_clear()
        package = _package()
        for module in (package,) if package else ():
            for name, function in functions.items():
                _replace(module, name, function, _originals)
        for module in _vllm_modules():
            for name, function in vllm_functions.items():
                _replace(module, name, function, _vllm_originals)
        if not _replaced:
            raise UnsupportedError(
                f"neither DeepGEMM ({' or '.join(peers.PACKAGES)}) with {peers.FUNCTION} nor a loaded vLLM is here: "
                "there is nothing to replace"
            )


def uninstall() -> None:
    """Put back what was replaced, also in modules that were loaded since."""
    with _lock:
        ours = {id(new): (name, module) for (module, name), (_, new) in _replaced.items()}
        for (module_name, name), (old, new) in _replaced.items():
            module = sys.modules.get(module_name)
            if module is not None and getattr(module, name, None) is new:
                setattr(module, name, old)
        for module_name in VLLM_MODULES:
            module = sys.modules.get(module_name)
            for name, old in _vllm_originals.items() if module else ():
                if id(getattr(module, name, None)) in ours:
                    setattr(module, name, old)
            for name, kept in VLLM_KEPT.items() if module else ():
                if id(getattr(module, kept, None)) in ours and name in _originals:
                    setattr(module, kept, _originals[name])
        _replaced.clear()
        _originals.clear()
        _vllm_originals.clear()
        _untouched.cache_clear()


def original(name: str) -> Function | None:
    """DeepGEMM's own function, or vLLM's in front of it; None where neither is there."""
    return _originals.get(name) or _vllm_originals.get(name) or _untouched(name)


def vllm_original(name: str) -> Function | None:
    """vLLM's own function while the drop-in is installed, else None."""
    return _vllm_originals.get(name)


def originals() -> Any:
    """DeepGEMM's own functions, in the form of its module. UnsupportedError where there is no DeepGEMM."""
    package = peers.deep_gemm()
    return SimpleNamespace(
        **{name: _originals.get(name) or getattr(package, name) for name in (peers.FUNCTION, peers.METADATA)},
        get_num_sms=getattr(package, "get_num_sms", None),
    )


@functools.cache
def _untouched(name: str) -> Function | None:
    """DeepGEMM's function where nothing is installed over it."""
    try:
        found = getattr(peers.deep_gemm(), name, None)
    except UnsupportedError:
        return None
    return found if callable(found) else None


def _replace(module: ModuleType, name: str, function: Function, kept: dict[str, Function]) -> None:
    found = getattr(module, name, None)
    if (
        not callable(found)
        or (module.__name__, name) in _replaced
        or any(found is new for _, new in _replaced.values())
    ):
        return
    kept.setdefault(name, found)
    _replaced[module.__name__, name] = (found, function)
    setattr(module, name, function)


def _package() -> ModuleType | None:
    """DeepGEMM, but vLLM's copy only where vLLM has loaded it: before that, vLLM has its settings to make."""
    for name in peers.PACKAGES:
        if name in sys.modules:
            return sys.modules[name]
    if "vllm" in sys.modules:
        return None
    try:
        return peers.deep_gemm()
    except UnsupportedError:
        return None


def _vllm_modules() -> list[ModuleType]:
    if "vllm" not in sys.modules:
        return []
    try:
        importlib.import_module(VLLM_HOME)
    except ImportError:
        return []
    return [sys.modules[name] for name in VLLM_MODULES if name in sys.modules]
