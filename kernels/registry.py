"""The ops and the kernels there are. A new op is one folder and one line here; a new kernel is one line here."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources

from tilewise.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op: its name in Config.kernel, and the files that decide what it computes and how fast."""

    op: str
    name: str
    sources: tuple[str, ...]  # relative to the package root


OPS: dict[str, str] = {"paged_mqa_logits": "tilewise.kernels.paged_mqa_logits.spec"}

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("paged_mqa_logits", "gfx950", ("kernels/paged_mqa_logits/gfx950/kernels.py",)),
        Kernel("paged_mqa_logits", "portable", ("kernels/paged_mqa_logits/triton_portable.py",)),
    )
}


@functools.cache
def kernel_source_hash(name: str) -> str:
    """Sixteen hex digits over the kernel's source files; blank lines and whole-line comments do not count.

    A timing or a test result names the hash of what ran, and is stale when it differs from this.
    Raises UnsupportedError for a name that is not registered.
    """
    if name not in KERNELS:
        raise UnsupportedError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    digest = hashlib.sha256()
    for source in KERNELS[name].sources:
        text = resources.files("tilewise").joinpath(source).read_text(encoding="utf-8")
        lines = [line.rstrip() for line in text.splitlines()]
        kept = [line for line in lines if line and not line.lstrip().startswith("#")]
        digest.update("\n".join([source, *kept, ""]).encode())
    return digest.hexdigest()[:16]
