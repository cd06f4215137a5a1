"""What the compiler makes of the gfx950 kernel: registers, instructions, waits; and the committed audits."""

from __future__ import annotations

import argparse
import json

import pytest

pytest.importorskip("triton")

from tilewise.errors import InvalidConfigError, UnsupportedError
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.gfx950 import assembly, audit, resources, space
from tilewise.kernels.paged_mqa_logits.gfx950.forms import Form
from tilewise.kernels.paged_mqa_logits.spec import (
    Config,
    Shape,
    candidates,
    default_config,
    is_valid,
)
from tilewise.kernels.registry import kernel_source_hash

MI355X = get_arch("mi355x")
REPORTED = Shape(16, 6, 32, 128, 128, 131072, None, "preshuffled")

DEFAULTS = [
    REPORTED,
    Shape(16, 6, 32, 128, 64, 131072, None, "preshuffled"),
    Shape(16, 6, 32, 128, 64, 131072, None, "flat"),
    Shape(16, 6, 32, 128, 16, 131072, None, "preshuffled"),
    Shape(16, 6, 32, 128, 1, 131072, None, "flat"),
    Shape(16, 1, 32, 128, 64, 131072, None, "preshuffled"),
    Shape(16, 8, 32, 128, 256, 131072, None, "preshuffled"),
    Shape(16, 6, 64, 128, 64, 131072, None, "preshuffled"),
    Shape(16, 2, 128, 128, 64, 131072, None, "preshuffled"),
    Shape(16, 7, 16, 128, 64, 131072, None, "preshuffled"),
    Shape(16, 6, 32, 64, 64, 131072, None, "preshuffled"),
]


@pytest.mark.parametrize("shape", DEFAULTS, ids=str)
def test_no_default_spills(shape):
    """On the installed Triton, whichever it is: the widest fusion, with room for two waves a SIMD."""
    config = default_config(shape, MI355X)
    assert config.kernel == "gfx950"
    assert config.fuse_n == space.fuse_choices(shape)[0]
    row = audit.inspect(shape, config)
    assert row.problem == ""
    assert (row.spills, row.scratch_bytes, row.lds_bytes) == (0, 0, 0)
    assert row.waves_per_simd >= 2


def per_token(shape: Shape, config: Config) -> dict[str, float]:
    return audit.summary(shape, config, audit.inspect(shape, config, lens_2d=False))


def test_instructions_of_the_reported_shape():
    """The whole workgroup's, for each query token and 128 keys; aiter's kernel takes 312 vector instructions."""
    config = default_config(REPORTED, MI355X)
    fused = per_token(REPORTED, config)
    assert fused["valu_per_token_128_keys"] <= 128
    narrow = space.config_of(6, Form(128, 4, 2, "16x16x32", "packed"), config.split_kv, "xcd")
    assert fused["mfma_cycles_per_token_128_keys"] <= per_token(REPORTED, narrow)["mfma_cycles_per_token_128_keys"] / 2
    alone = space.config_of(1, Form(128, 4, 2, "16x16x128", "packed"), config.split_kv, "xcd")
    assert per_token(REPORTED, alone)["valu_per_token_128_keys"] <= 160


@pytest.mark.parametrize("fuse_n", [1, 6])
def test_no_turn_of_the_loop_waits_for_all_loads(fuse_n):
    for form in space.offered(REPORTED, fuse_n)[:2]:
        compiled = audit.build.compile_for(REPORTED, space.config_of(fuse_n, form, 1, "xcd"))
        code = assembly.parse(compiled.asm["amdgcn"])
        first, last = assembly.main_loop(code)
        assert assembly.waits_for_all_loads(code[first : last + 1]) == 0, form


def test_command_prints_the_default_of_a_shape(capsys):
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    assert audit.run(parser.parse_args(["--heads", "32", "--next-n", "6", "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("vgpr", "agpr", "spills", "waves_per_simd", "valu_per_token_128_keys"):
        assert isinstance(found[name], int | float)
    assert found["mfma_cycles_per_token_128_keys"] == 512
    assert found["triton"] == resources.installed_triton()
    assert found["kind"] == "compiled (static)"


def test_command_is_for_gfx950():
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    with pytest.raises(UnsupportedError, match="gfx950"):
        audit.run(parser.parse_args(["--arch", "h200"]))


def test_audits_are_of_this_kernel_and_of_the_releases_that_serve():
    """`tilewise audit --arch gfx950 --out data/audit` makes one for the installed Triton."""
    assert {version.rsplit(".", 1)[0] for version in resources.audits()} >= {"3.6", "3.7", "3.8", "3.9"}
    wanted = set(audit.keys())
    for version, rows in resources.audits().items():
        assert set(rows) == wanted, version
        assert resources.kernel_hash(version) == kernel_source_hash("gfx950"), version


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9"])
def test_defaults_pass_on_every_audited_release(version):
    rows = next(rows for name, rows in resources.audits().items() if name.startswith(version + "."))
    for shape in DEFAULTS:
        row = rows[resources.key_of(shape, space.preferred(shape, MI355X))]
        assert (row.problem, row.spills) == ("", 0), shape
        assert row.waves_per_simd >= 2


def test_what_spills_is_no_candidate_and_says_why():
    version = resources.relevant_audits()[-1]
    bad = [(key, row) for key, row in resources.audits()[version].items() if row.problem]
    assert bad, "no form spills any more: try larger ones"
    for key, row in bad:
        shape, config = audit.launch_of(key)
        reason = is_valid(shape, config, MI355X)
        assert reason is not None
        assert row.problem in reason
        assert version in reason
        assert config not in candidates(shape, MI355X)


def test_a_form_that_was_not_audited_is_refused():
    config = space.config_of(6, Form(512, 8, 2, "16x16x128", "packed"), 1, "xcd")
    assert "not audited" in is_valid(REPORTED, config, MI355X)


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ({"heads": 8}, {}, "at least 16 heads"),
        ({"block_kv": 1, "cache_layout": "preshuffled"}, {}, "multiple of 16"),
        ({}, {"mma_m": "kv"}, "mma_m must be 'heads'"),
        ({}, {"mfma": "4x4x4"}, "mfma must be one of"),
        ({"head_dim": 64}, {"mfma": "16x16x128"}, "more than head_dim"),
        ({}, {"epilogue": "add"}, "epilogue must be one of"),
        ({}, {"program_order": ""}, "program_order must be one of"),
        ({}, {"tile_kv": 32, "num_warps": 4}, "multiple of 16 x num_warps"),
        ({}, {"waves_per_eu": 0}, "waves_per_eu must be"),
        ({"heads": 16, "next_n": 5}, {"fuse_n": 5, "mfma": "32x32x64"}, "even fuse_n"),
        ({"heads": 64}, {}, "registers hold"),
        ({}, {"num_stages": 2}, "does not read num_stages"),
    ],
)
def test_every_reason_to_refuse(shape, changes, reason):
    sizes = {"batch_size": 16, "next_n": 6, "heads": 32, "block_kv": 128, "cache_layout": "preshuffled"} | shape
    config = Config.from_dict(space.preferred(REPORTED, MI355X).to_dict() | changes)
    assert reason in is_valid(Shape(**sizes), config, MI355X)


def test_shapes_without_a_form_have_a_typed_error_and_no_candidate():
    shape = Shape(4, 3, 16, 64, 64, 8192, None, "flat")
    with pytest.raises(InvalidConfigError, match="no form"):
        space.preferred(shape, MI355X)
    assert default_config(shape, MI355X).kernel == "portable"


def test_only_on_gfx950():
    assert "does not run on h200" in is_valid(REPORTED, space.preferred(REPORTED, MI355X), get_arch("h200"))


LISTING = """
start:
\ts_mov_b32 s0, 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tbuffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen
.Ltmp3:
\tv_mfma_f32_16x16x32_fp8_fp8 v[10:13], v[0:1], v[2:3], 0
\ts_nop 5
;;#ASMSTART
v_pk_mul_f32 v[20:21], v[10:11], v[30:31]
;;#ASMEND
\tv_max_i32_e32 v12, 0, v12
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_counting_a_loop():
    code = assembly.parse(LISTING)
    first, last = assembly.main_loop(code)
    counts = assembly.count(code[first : last + 1])
    assert (counts.instructions, counts.mfma, counts.mfma_cycles, counts.valu, counts.memory) == (6, 1, 16, 2, 1)
    assert counts.scalar == 2


def test_a_reader_that_comes_too_soon_is_found():
    code = assembly.parse(LISTING)
    assert assembly.short_waits(code) == [
        f"v_pk_mul_f32 reads {register} 6 wait states after v_mfma_f32_16x16x32_fp8_fp8, which needs 8"
        for register in ("v10", "v11")
    ] + ["v_max_i32 reads v12 7 wait states after v_mfma_f32_16x16x32_fp8_fp8, which needs 8"]
    assert assembly.short_waits(assembly.parse(LISTING.replace("s_nop 5", "s_nop 7"))) == []


def test_a_reader_around_the_loop_is_found():
    text = "a:\n\tv_add_f32 v1, v10, v10\n" + "\ts_nop 3\n" + LISTING.splitlines()[6] + "\n\ts_cbranch_scc1 a\n"
    assert any("v_add_f32 reads v10 1 wait states" in problem for problem in assembly.short_waits(assembly.parse(text)))


def test_swaps_and_scalar_addresses_have_waits_of_their_own():
    swap = assembly.parse("\tv_add_f32 v1, v2, v3\n\ts_nop 0\n\tv_permlane32_swap_b32 v1, v4\n")
    assert assembly.short_waits(swap) == ["v_permlane32_swap_b32 reads v1 1 wait states after v_add_f32, which needs 2"]
    address = "\tv_readfirstlane_b32 s4, v1\n{}\tbuffer_load_dword v2, v3, s[4:7], 0 offen\n"
    assert assembly.short_waits(assembly.parse(address.format("\ts_nop 3\n"))) == [
        "buffer_load_dword reads s4 4 wait states after v_readfirstlane_b32, which needs 5"
    ]
    assert assembly.short_waits(assembly.parse(address.format("\ts_mul_i32 s4, s4, s8\n"))) == []


def test_the_compilers_own_waits_are_those_that_are_asked_for():
    """Where every reader is an instruction that the compiler knows, its waits are the least: ours are no shorter."""
    for mfma, name in (
        ("16x16x128", "v_mfma_scale_f32_16x16x128_f8f6f4"),
        ("32x32x64", "v_mfma_scale_f32_32x32x64_f8f6f4"),
    ):
        config = space.config_of(2, Form(128, 4, 2, mfma, "max"), 1, "xcd")
        shape = Shape(16, 2, 32, 128, 256, 131072, None, "preshuffled")
        text = audit.build.compile_for(shape, config).asm["amdgcn"]
        code = assembly.parse(text)
        assert assembly.short_waits(code) == []
        passes = dict(assembly.MFMA_PASSES)
        assembly.MFMA_PASSES[name] += 1
        try:
            assert assembly.short_waits(code) != [], "the compiler waits longer: the table is out of date"
        finally:
            assembly.MFMA_PASSES.update(passes)
