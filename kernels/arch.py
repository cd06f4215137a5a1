"""GPUs that tilewise knows: facts about each, and which one the current device is."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

from tilewise.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU product, as the launch rules and the model see it.

    ``name`` is the key of profiles and models; two products of one ISA are two entries, since neither the
    compute unit count nor the bandwidth can be read off the ISA.
    """

    name: str
    isa: str  # "sm90", "gfx950", ...
    vendor: str  # "nvidia", "amd", or "cpu" for Triton's interpreter
    compute_units: int  # streaming multiprocessors (NVIDIA) or compute units (AMD)
    xcds: int  # accelerator dies, each with its own L2; 1 on NVIDIA
    clock_mhz: int  # peak engine clock
    bandwidth_tbps: float  # device memory, read
    fp8_tflops: float  # dense fp8 matrix products
    l2_bytes: int  # of one die
    last_level_cache_bytes: int  # what a benchmark must exceed for a cold cache
    shared_memory_bytes: int  # LDS or shared memory that one workgroup may use
    warp_size: int
    source: str  # where the rates come from: "measured" or "published", with the reference


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(
            name="h200",
            isa="sm90",
            vendor="nvidia",
            compute_units=132,
            xcds=1,
            clock_mhz=1980,
            bandwidth_tbps=4.58,
            fp8_tflops=1493.0,
            l2_bytes=60 << 20,
            last_level_cache_bytes=60 << 20,
            shared_memory_bytes=227 << 10,
            warp_size=32,
            source="measured: 4 GiB read and an 8192^3 fp8 product on an H200, 2026-11-29",
        ),
        Arch(
            name="h100",
            isa="sm90",
            vendor="nvidia",
            compute_units=132,
            xcds=1,
            clock_mhz=1980,
            bandwidth_tbps=3.35,
            fp8_tflops=1979.0,
            l2_bytes=50 << 20,
            last_level_cache_bytes=50 << 20,
            shared_memory_bytes=227 << 10,
            warp_size=32,
            source="published: NVIDIA H100 SXM data sheet, dense rates",
        ),
        Arch(
            name="mi355x",
            isa="gfx950",
            vendor="amd",
            compute_units=256,
            xcds=8,
            clock_mhz=2400,
            bandwidth_tbps=8.0,
            fp8_tflops=5033.0,
            l2_bytes=4 << 20,
            last_level_cache_bytes=256 << 20,
            shared_memory_bytes=160 << 10,
            warp_size=64,
            source="published: AMD Instinct MI355X data sheet, dense rates",
        ),
        Arch(
            name="mi350x",
            isa="gfx950",
            vendor="amd",
            compute_units=256,
            xcds=8,
            clock_mhz=2200,
            bandwidth_tbps=8.0,
            fp8_tflops=4614.0,
            l2_bytes=4 << 20,
            last_level_cache_bytes=256 << 20,
            shared_memory_bytes=160 << 10,
            warp_size=64,
            source="published: AMD Instinct MI350X data sheet, dense rates",
        ),
        Arch(
            name="cpu",
            isa="cpu",
            vendor="cpu",
            compute_units=4,
            xcds=1,
            clock_mhz=1000,
            bandwidth_tbps=0.01,
            fp8_tflops=0.01,
            l2_bytes=1 << 20,
            last_level_cache_bytes=32 << 20,
            shared_memory_bytes=227 << 10,
            warp_size=32,
            source="nominal: Triton's interpreter, for correctness only",
        ),
    )
}

# A part without an entry, by ISA and compute unit count.
_PART = re.compile(r"(sm\d{2,3}|gfx[0-9a-f]{3,4})-([1-9]\d{0,3})cu")

# What an ISA name alone stands for on the command line.
_ISA_DEFAULT = {"sm90": "h200", "gfx950": "mi355x"}


def get_arch(name: str) -> Arch:
    """The entry called `name`, the usual product of an ISA name such as "gfx950", or a part that no entry describes.

    Such a part is called "<isa>-<n>cu", as `match_arch` names it. Raises UnsupportedError for any other name.
    """
    arch = ARCHS.get(_ISA_DEFAULT.get(name, name)) if isinstance(name, str) else None
    if arch is not None:
        return arch
    part = _PART.fullmatch(name) if isinstance(name, str) else None
    if part is None:
        raise UnsupportedError(
            f"arch must be one of {', '.join([*ARCHS, *_ISA_DEFAULT])}, or <isa>-<n>cu like sm100-148cu, got {name!r}"
        )
    return _part(part[1], int(part[2]))


def match_arch(
    isa: str, compute_units: int, device_name: object, *, l2_bytes: int = 0, shared_memory_bytes: int = 0
) -> Arch:
    """The entry for a live device; its compute unit count always wins over any table.

    Market names vary by driver and image ("NVIDIA H200", "NVIDIA_H200", "AMD Radeon Graphics", ""), so the name only
    decides between products of one ISA and one compute unit count. A part that no entry describes gets a name of its
    own, "<isa>-<n>cu": it matches no profile, so the selector says so instead of serving another part's timings.
    """
    words = device_name.lower().replace("_", " ").replace("-", " ").split() if isinstance(device_name, str) else []
    same = [a for a in ARCHS.values() if a.isa == isa and a.compute_units == compute_units]
    named = [a for a in same if a.name in words]
    if named:
        return named[0]
    # AMD reports generic names: there the ISA and the count are all there is. NVIDIA names are reliable, and an H20
    # or an H100 with an H200's count is another product.
    if same and (same[0].vendor == "amd" or not words):
        return same[0]
    return _part(isa, compute_units, l2_bytes, shared_memory_bytes)


def _part(isa: str, compute_units: int, l2_bytes: int = 0, shared_memory_bytes: int = 0) -> Arch:
    """A part that no entry describes, after the first entry of its ISA, or of its vendor's."""
    base = next((a for a in ARCHS.values() if a.isa == isa), ARCHS["h100" if isa.startswith("sm") else "mi355x"])
    return dataclasses.replace(
        base,
        name=f"{isa}-{compute_units}cu",
        isa=isa,
        compute_units=compute_units,
        xcds=base.xcds if base.isa == isa else 1,
        fp8_tflops=base.fp8_tflops * compute_units / base.compute_units,
        l2_bytes=l2_bytes or base.l2_bytes,
        last_level_cache_bytes=max(l2_bytes, base.last_level_cache_bytes),
        shared_memory_bytes=shared_memory_bytes or base.shared_memory_bytes,
        source=f"derived from {base.name} by compute unit count",
    )


@functools.cache
def current_arch(device_index: int = 0) -> Arch:
    """The arch of a visible GPU, or the interpreter's when there is none. Reads device properties, so not on import."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("reading the current GPU needs torch; name an arch instead") from error
    if not torch.cuda.is_available():
        return ARCHS["cpu"]
    props: Any = torch.cuda.get_device_properties(device_index)
    isa = props.gcnArchName.split(":")[0] if torch.version.hip else f"sm{props.major}{props.minor}"
    return match_arch(
        isa,
        props.multi_processor_count,
        props.name,
        l2_bytes=getattr(props, "L2_cache_size", 0),
        shared_memory_bytes=getattr(props, "shared_memory_per_block_optin", 0),
    )
