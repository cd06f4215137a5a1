"""What each form of the kernel costs in registers and instructions, by audit, for each release of Triton.

The audits are committed (data/audit/); `tilewise audit --arch gfx950` makes them. Static: from the compiler, no timing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from tilewise.kernels.paged_mqa_logits.gfx950.forms import Form, Paging, paging
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

# Releases of Triton ship under these names; AMD's images have the later ones.
_DISTRIBUTIONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "amd-triton")


@dataclass(frozen=True, slots=True)
class Key:
    """What decides a binary's resources."""

    heads: int
    head_dim: int
    paging: Paging
    fuse_n: int
    form: Form


@dataclass(frozen=True, slots=True)
class Row:
    """One audited binary. Counts are of one run of one wave through the main loop: tile_kv keys, fuse_n tokens."""

    problem: str  # why it may not launch; empty where it may
    vgpr: int
    agpr: int
    sgpr: int
    lds_bytes: int
    scratch_bytes: int
    spills: int  # vector registers
    sgpr_spills: int
    waves_per_simd: int
    mfma: int
    mfma_cycles: int
    valu: int
    memory: int
    instructions: int


ROW_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Row))


def key_of(shape: Shape, config: Config) -> Key:
    """The audit key of a launch."""
    return _key_of(shape.heads, shape.head_dim, shape.block_kv, config)


@functools.lru_cache(maxsize=16384)
def _key_of(heads: int, head_dim: int, block_kv: int, config: Config) -> Key:
    form = Form(config.tile_kv, config.num_warps, config.waves_per_eu, config.mfma, config.epilogue)
    return Key(heads, head_dim, paging(block_kv, config.tile_kv), config.fuse_n, form)


def per_token_128_keys(count: int, fuse_n: int, form: Form) -> float:
    """A main loop's count of one wave, as that of the whole workgroup for each query token and 128 keys."""
    return count * form.num_warps * 128 / form.tile_kv / fuse_n


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    folder = resources.files("tilewise").joinpath("data", "audit")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    texts = [
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in names
        if name.startswith("gfx950_triton-") and name.endswith(".json")
    ]
    found = {str(audit["triton"]): audit for audit in map(json.loads, texts)}
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


@functools.cache
def audits() -> dict[str, dict[Key, Row]]:
    """The committed audits by Triton version, oldest first."""
    return {version: dict(_decode(row) for row in audit["rows"]) for version, audit in _files().items()}


def kernel_hash(version: str) -> str:
    """The source hash of the kernel that was audited on this version of Triton."""
    return str(_files()[version]["kernel_hash"])


def encode(key: Key, row: Row) -> list[Any]:
    """One line of an audit file."""
    form = key.form
    return [
        key.heads, key.head_dim, key.paging, key.fuse_n,
        form.tile_kv, form.num_warps, form.waves_per_eu, form.mfma, form.epilogue,
        *(getattr(row, name) for name in ROW_FIELDS),
    ]  # fmt: skip


def _decode(values: list[Any]) -> tuple[Key, Row]:
    return Key(values[0], values[1], values[2], values[3], Form(*values[4:9])), Row(*values[9:])


@functools.cache
def installed_triton() -> str | None:
    """The release of Triton in this environment, without importing it; None where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return ".".join(version.split("+")[0].split(".")[:3])
    return None


@functools.cache
def relevant_audits() -> tuple[str, ...]:
    """The audits that a launch here has to pass: the installed Triton's, or else all of them."""
    installed = installed_triton()
    return (installed,) if installed in audits() else tuple(audits())


@functools.lru_cache(maxsize=4096)
def row_of(key: Key) -> Row | None:
    """The audit of this binary: the first with a problem among the relevant ones, else the newest; None if none."""
    rows = [(version, audits()[version].get(key)) for version in relevant_audits()]
    found = [row for _, row in rows if row is not None]
    return next((row for row in found if row.problem), found[-1] if found else None)


def why_refused(key: Key) -> str | None:
    """Why the audit keeps this binary from launching, or None."""
    for version in relevant_audits():
        row = audits()[version].get(key)
        if row is None:
            return f"this form was not audited on Triton {version}: {key.paging} pages, {key.form}, fuse_n {key.fuse_n}"
        if row.problem:
            return f"on Triton {version} it {row.problem}"
    return None if relevant_audits() else "there is no audit of the gfx950 kernel"
