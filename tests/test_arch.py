"""Which entry a live device is: by ISA and compute unit count, names only where they can be trusted."""

from __future__ import annotations

import pytest

from tilewise.errors import UnsupportedError
from tilewise.kernels.arch import ARCHS, get_arch, match_arch


@pytest.mark.parametrize(
    ("isa", "units", "name", "expected"),
    [
        ("sm90", 132, "NVIDIA H200", "h200"),
        ("sm90", 132, "NVIDIA_H200", "h200"),
        ("sm90", 132, "nvidia h200 nvl", "h200"),
        ("sm90", 132, "NVIDIA H100 80GB HBM3", "h100"),
        ("sm90", 114, "NVIDIA H100 PCIe", "sm90-114cu"),
        ("sm90", 78, "NVIDIA H20-3e", "sm90-78cu"),
        ("sm90", 132, "NVIDIA GH200 480GB", "sm90-132cu"),
        ("gfx950", 256, "AMD Instinct MI355X", "mi355x"),
        ("gfx950", 256, "AMD Instinct MI350X", "mi350x"),
        ("gfx950", 256, "AMD Radeon Graphics", "mi355x"),
        ("gfx950", 256, "", "mi355x"),
        ("gfx950", 256, None, "mi355x"),
        ("gfx950", 128, "AMD Instinct MI355X", "gfx950-128cu"),
        ("gfx942", 304, "AMD Instinct MI300X", "gfx942-304cu"),
        ("sm100", 148, "NVIDIA B200", "sm100-148cu"),
    ],
)
def test_match(isa: str, units: int, name: object, expected: str) -> None:
    arch = match_arch(isa, units, name)
    assert arch.name == expected
    assert arch.isa == isa
    assert arch.compute_units == units


def test_a_derived_arch_says_so_and_scales_its_rate() -> None:
    arch = match_arch("sm90", 66, "half a card")
    assert arch.source == "derived from h200 by compute unit count"
    assert arch.fp8_tflops == ARCHS["h200"].fp8_tflops / 2


def test_lookup_by_name_and_isa() -> None:
    assert get_arch("gfx950").name == "mi355x"
    assert get_arch("sm90").name == "h200"
    for name in ("sm89-142cu", "sm100-148cu", "gfx950-128cu"):
        assert get_arch(name).name == name
        assert get_arch(name) == match_arch(name.split("-")[0], get_arch(name).compute_units, "a part")
    for bad in ("", "h300", None, 5, "sm89-0cu", "sm89-142", "cpu-4cu", "../sm89-1cu", "sm89-142cu\n"):
        with pytest.raises(UnsupportedError, match="arch must be one of"):
            get_arch(bad)  # type: ignore[arg-type]


def test_every_entry_states_its_source() -> None:
    for arch in ARCHS.values():
        assert arch.source.split(":")[0] in ("measured", "published", "nominal")
