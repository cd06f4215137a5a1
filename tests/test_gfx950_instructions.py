"""The emulator, instruction by instruction, against the ISA guide's pseudocode worked out by hand for edge values."""

from __future__ import annotations

import struct

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("triton")
pytest.importorskip("tinygrad")

from emulator.assemble import execute  # noqa: E402
from emulator.memory import Memory  # noqa: E402
from emulator.mfma import fp8_values  # noqa: E402

NAN, INF, ONE = 0x7FC00000, 0x7F800000, 0x3F800000
MINUS_ZERO, MINUS_ONE, DENORMAL = 0x80000000, 0xBF800000, 0x00000001
TOP = 0xFFFFFFFF


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


# Text, vector registers, scalar registers, expected v9 (lane 0).
VECTOR = [
    ("v_mov_b32 v9, v0", {0: TOP}, {}, TOP),
    ("v_mov_b32 v9, -16", {}, {}, TOP - 15),
    ("v_mov_b32 v9, 64", {}, {}, 64),
    ("v_mov_b32 v9, -4.0", {}, {}, bits(-4.0)),
    ("v_mov_b32 v9, 0.15915494", {}, {}, 0x3E22F983),
    ("v_mov_b32 v9, 0x12345678", {}, {}, 0x12345678),
    ("v_bfrev_b32 v9, v0", {0: 1}, {}, 0x80000000),
    ("v_bfrev_b32 v9, v0", {0: 0x0000F00D}, {}, 0xB00F0000),
    ("v_add_u32 v9, v0, v1", {0: TOP, 1: 2}, {}, 1),
    ("v_sub_u32 v9, v0, v1", {0: 1, 1: 2}, {}, TOP),
    ("v_subrev_u32 v9, v0, v1", {0: 1, 1: 2}, {}, 1),
    # Shift counts wrap at 32.
    ("v_lshlrev_b32 v9, v0, v1", {0: 33, 1: 0x80000001}, {}, 2),
    ("v_lshrrev_b32 v9, v0, v1", {0: 32, 1: 0x80000001}, {}, 0x80000001),
    ("v_ashrrev_i32 v9, v0, v1", {0: 31, 1: 0x80000000}, {}, TOP),
    ("v_ashrrev_i32 v9, v0, v1", {0: 32, 1: 0x80000000}, {}, 0x80000000),
    ("v_max_i32 v9, v0, v1", {0: 0, 1: MINUS_ZERO}, {}, 0),
    ("v_max_i32 v9, 0, v0", {0: bits(-1e-30)}, {}, 0),
    ("v_max_i32 v9, 0, v0", {0: DENORMAL}, {}, DENORMAL),
    ("v_max_i32 v9, 0, v0", {0: NAN}, {}, NAN),
    ("v_min_i32 v9, v0, v1", {0: 0x80000000, 1: 0x7FFFFFFF}, {}, 0x80000000),
    ("v_max_u32 v9, v0, v1", {0: 0x80000000, 1: 1}, {}, 0x80000000),
    ("v_mul_lo_u32 v9, v0, v1", {0: 0x10001, 1: 0x10001}, {}, 0x20001),
    ("v_mul_hi_u32 v9, v0, v1", {0: TOP, 1: TOP}, {}, TOP - 1),
    ("v_mul_hi_i32 v9, v0, v1", {0: TOP, 1: 5}, {}, TOP),
    ("v_mul_u32_u24 v9, v0, v1", {0: 0xFF000003, 1: 0xFF000005}, {}, 15),
    ("v_add3_u32 v9, v0, v1, v2", {0: TOP, 1: 1, 2: 7}, {}, 7),
    ("v_lshl_add_u32 v9, v0, v1, v2", {0: 1, 1: 36, 2: 3}, {}, 19),
    ("v_add_lshl_u32 v9, v0, v1, v2", {0: TOP, 1: 2, 2: 35}, {}, 8),
    ("v_lshl_or_b32 v9, v0, v1, v2", {0: 3, 1: 32, 2: 4}, {}, 7),
    ("v_and_or_b32 v9, v0, v1, v2", {0: 12, 1: 10, 2: 1}, {}, 9),
    ("v_or3_b32 v9, v0, v1, v2", {0: 1, 1: 2, 2: 4}, {}, 7),
    ("v_xad_u32 v9, v0, v1, v2", {0: 6, 1: 3, 2: TOP}, {}, 4),
    ("v_bfe_u32 v9, v0, v1, v2", {0: 0xABCD1234, 1: 8, 2: 8}, {}, 0x12),
    ("v_bfe_u32 v9, v0, v1, v2", {0: TOP, 1: 0, 2: 0}, {}, 0),
    ("v_bfe_u32 v9, v0, v1, v2", {0: TOP, 1: 28, 2: 31}, {}, 15),
    ("v_bfe_i32 v9, v0, v1, v2", {0: 0x00000800, 1: 8, 2: 4}, {}, TOP - 7),
    ("v_bfe_i32 v9, v0, v1, v2", {0: TOP, 1: 5, 2: 32}, {}, 0),
    ("v_bfi_b32 v9, v0, v1, v2", {0: 0xF0, 1: 0xAA, 2: 0x55}, {}, 0xA5),
    ("v_alignbit_b32 v9, v0, v1, v2", {0: 0x00000001, 1: 0x80000000, 2: 31}, {}, 3),
    ("v_alignbit_b32 v9, v0, v1, v2", {0: 5, 1: 6, 2: 32}, {}, 6),
    ("v_max3_i32 v9, v0, v1, v2", {0: TOP, 1: 0x80000000, 2: TOP - 1}, {}, TOP),
    ("v_mbcnt_lo_u32_b32 v9, v0, v1", {0: TOP, 1: 5}, {}, 5),
    # Truth tables: index = a << 2 | b << 1 | c.
    ("v_bitop3_b32 v9, v0, v1, v2 bitop3:0x96", {0: 0b1100, 1: 0b1010, 2: 0b0110}, {}, 0b0000),
    ("v_bitop3_b32 v9, v0, v1, v2 bitop3:0x80", {0: 0b1100, 1: 0b1010, 2: 0b1110}, {}, 0b1000),
    ("v_bitop3_b32 v9, v0, v1, v2 bitop3:0x01", {0: 0, 1: 0, 2: 1}, {}, TOP - 1),
    # Floats: signed zeros, NaN, infinities, denormals, rounding to even.
    ("v_add_f32 v9, v0, v1", {0: MINUS_ZERO, 1: MINUS_ZERO}, {}, MINUS_ZERO),
    ("v_add_f32 v9, v0, v1", {0: ONE, 1: MINUS_ONE}, {}, 0),
    ("v_add_f32 v9, v0, v1", {0: DENORMAL, 1: DENORMAL}, {}, 2),
    ("v_add_f32 v9, v0, v1", {0: bits(16777216.0), 1: ONE}, {}, bits(16777216.0)),
    ("v_mul_f32 v9, v0, v1", {0: MINUS_ZERO, 1: ONE}, {}, MINUS_ZERO),
    ("v_mul_f32 v9, v0, v1", {0: bits(2.0**-126), 1: bits(0.5)}, {}, 0x00400000),
    ("v_mul_f32 v9, v0, v1", {0: INF, 1: bits(-2.0)}, {}, INF | 0x80000000),
    ("v_max_f32 v9, v0, v1", {0: NAN, 1: MINUS_ONE}, {}, MINUS_ONE),
    ("v_max_f32 v9, v0, v1", {0: MINUS_ZERO, 1: 0}, {}, 0),
    ("v_min_f32 v9, v0, v1", {0: MINUS_ZERO, 1: 0}, {}, MINUS_ZERO),
    ("v_fma_f32 v9, v0, |v1|, v2", {0: bits(2.0), 1: bits(-3.0), 2: ONE}, {}, bits(7.0)),
    ("v_fma_f32 v9, -v0, v1, v2", {0: bits(2.0), 1: bits(-3.0), 2: ONE}, {}, bits(7.0)),
    ("v_fma_f32 v9, -|v0|, v1, v2", {0: bits(-2.0), 1: bits(3.0), 2: ONE}, {}, bits(-5.0)),
    # One rounding: (1 + 2**-23)**2 - (1 + 2**-22) is 2**-46; a product rounded first would give 0.
    ("v_fma_f32 v9, v0, v1, v2", {0: 0x3F800001, 1: 0x3F800001, 2: 0xBF800002}, {}, bits(2.0**-46)),
    # 1 + 2**-24 is a tie and goes to even; the least bit more goes up, however far down it is.
    ("v_fma_f32 v9, v0, v1, v2", {0: bits(2.0**-12), 1: bits(2.0**-12), 2: ONE}, {}, ONE),
    ("v_fma_f32 v9, v0, v1, v2", {0: 0x39800001, 1: 0x39800000, 2: ONE}, {}, ONE + 1),
    ("v_fma_f32 v9, v0, v1, v2", {0: bits(2.0**-75), 1: bits(2.0**-75), 2: DENORMAL}, {}, 2),  # 1.5 ulp: to even
    ("v_fmac_f32 v9, v0, v1", {0: bits(2.0), 1: bits(3.0), 9: ONE}, {}, bits(7.0)),
    ("v_cvt_f32_u32 v9, v0", {0: TOP}, {}, bits(4294967296.0)),
    ("v_cvt_f32_u32 v9, v0", {0: 16777217}, {}, bits(16777216.0)),
    ("v_cvt_f32_i32 v9, v0", {0: TOP}, {}, MINUS_ONE),
    ("v_cvt_u32_f32 v9, v0", {0: bits(-1.5)}, {}, 0),
    ("v_cvt_u32_f32 v9, v0", {0: NAN}, {}, 0),
    ("v_cvt_u32_f32 v9, v0", {0: INF}, {}, TOP),
    ("v_cvt_u32_f32 v9, v0", {0: bits(2.9)}, {}, 2),
    ("v_cvt_i32_f32 v9, v0", {0: bits(-2.9)}, {}, TOP - 1),
    ("v_rcp_f32 v9, v0", {0: bits(-4.0)}, {}, bits(-0.25)),
    ("v_rcp_f32 v9, v0", {0: MINUS_ZERO}, {}, INF | 0x80000000),
    ("v_mul_f32_e64 v9, v0, v1 clamp", {0: bits(2.0), 1: bits(3.0)}, {}, ONE),
    ("v_mul_f32_e64 v9, v0, v1 clamp", {0: bits(2.0), 1: bits(-3.0)}, {}, 0),
    ("v_mul_f32_e64 v9, v0, v1 clamp", {0: bits(0.25), 1: ONE}, {}, bits(0.25)),
    ("v_mul_f32_e64 v9, v0, v1 clamp", {0: NAN, 1: ONE}, {}, 0),
    ("v_cndmask_b32 v9, v0, v1, vcc", {0: 1, 1: 2}, {106: 1}, 2),
    ("v_cndmask_b32 v9, v0, v1, s[2:3]", {0: 1, 1: 2}, {2: 0, 3: 1}, 1),
    ("v_mov_b32 v9, s3", {}, {3: 77}, 77),
]  # fmt: skip


@pytest.mark.parametrize(("text", "v", "s", "expected"), VECTOR, ids=[f"{i}-{x[0]}" for i, x in enumerate(VECTOR)])
def test_vector(text, v, s, expected):
    assert f"{int(execute(text, v, s).vgprs[9][0]):#x}" == f"{expected:#x}"


# Text, vector registers, scalar registers, expected v[8:9] as one number.
WIDE = [
    ("v_lshl_add_u64 v[8:9], v[0:1], 4, v[2:3]", {0: TOP, 1: 0, 2: 1, 3: 0}, {}, 0xFFFFFFFF1),
    ("v_lshlrev_b64 v[8:9], v0, v[2:3]", {0: 65, 2: 0x80000000, 3: 0}, {}, 1 << 32),
    ("v_lshrrev_b64 v[8:9], v0, v[2:3]", {0: 32, 2: 0, 3: 5}, {}, 5),
    ("v_ashrrev_i64 v[8:9], v0, v[2:3]", {0: 63, 2: 0, 3: 0x80000000}, {}, (1 << 64) - 1),
    ("v_mov_b64 v[8:9], -1", {}, {}, (1 << 64) - 1),
    ("v_mov_b64 v[8:9], 1.0", {}, {}, 0x3FF0000000000000),
    ("v_mov_b64 v[8:9], s[2:3]", {}, {2: 1, 3: 2}, (2 << 32) + 1),
    ("v_mad_u64_u32 v[8:9], s[4:5], v0, v1, v[2:3]", {0: TOP, 1: TOP, 2: TOP, 3: 0}, {}, 0xFFFFFFFF00000000),
    ("v_mad_u64_u32 v[8:9], s[4:5], v0, v1, 0", {0: 1 << 31, 1: 6}, {}, 6 << 31),
    ("v_mad_i64_i32 v[8:9], s[4:5], v0, v1, v[2:3]", {0: TOP, 1: 7, 2: 0, 3: 0}, {}, (1 << 64) - 7),
]


@pytest.mark.parametrize(("text", "v", "s", "expected"), WIDE, ids=[x[0] for x in WIDE])
def test_vector_64_bit(text, v, s, expected):
    wave = execute(text, v, s)
    assert int(wave.vgprs[8][0]) | int(wave.vgprs[9][0]) << 32 == expected


def test_mad_u64_u32_carries_out():
    wave = execute("v_mad_u64_u32 v[8:9], s[4:5], v0, v1, v[2:3]", {0: TOP, 1: TOP, 2: TOP, 3: TOP})
    assert (wave.sgprs[4], wave.sgprs[5]) == (TOP, TOP)


def test_add_with_carry():
    wave = execute("v_add_co_u32 v8, vcc, v0, v1\nv_addc_co_u32 v9, vcc, v2, v3, vcc", {0: TOP, 1: 1, 2: 5, 3: 6})
    assert (wave.vgprs[8][0], wave.vgprs[9][0], wave.sgprs[106]) == (0, 12, 0)


COMPARES = [
    ("v_cmp_lt_i32 vcc, v0, v1", TOP, 0, True),
    ("v_cmp_gt_u32 vcc, v0, v1", TOP, 0, True),
    ("v_cmp_eq_u32 vcc, v0, v1", 4, 4, True),
    ("v_cmp_ge_i32 vcc, v0, v1", 0x80000000, 0x7FFFFFFF, False),
    ("v_cmp_lt_f32 vcc, v0, v1", NAN, ONE, False),
    ("v_cmp_nlt_f32 vcc, v0, v1", NAN, ONE, True),
    ("v_cmp_eq_f32 vcc, v0, v1", 0, MINUS_ZERO, True),
    ("v_cmp_lg_f32 vcc, v0, v1", NAN, NAN, False),
    ("v_cmp_neq_f32 vcc, v0, v1", NAN, NAN, True),
    ("v_cmp_u_f32 vcc, v0, v1", NAN, ONE, True),
]


@pytest.mark.parametrize(("text", "a", "b", "expected"), COMPARES, ids=[f"{i}-{x[0]}" for i, x in enumerate(COMPARES)])
def test_compare_writes_active_lanes_only(text, a, b, expected):
    wave = execute(text, {0: a, 1: b}, exec_mask=0x8000000000000005)
    assert wave.sgprs[106] | wave.sgprs[107] << 32 == (0x8000000000000005 if expected else 0)


# Text, scalar registers, expected s20, expected SCC (None: as it was, 0).
SCALAR = [
    ("s_add_u32 s20, s0, s1", {0: TOP, 1: 1}, 0, 1),
    ("s_add_i32 s20, s0, s1", {0: 0x7FFFFFFF, 1: 1}, 0x80000000, 1),
    ("s_add_i32 s20, s0, s1", {0: TOP, 1: 1}, 0, 0),
    ("s_sub_u32 s20, s0, s1", {0: 0, 1: 1}, TOP, 1),
    ("s_sub_i32 s20, s0, s1", {0: 0x80000000, 1: 1}, 0x7FFFFFFF, 1),
    ("s_addc_u32 s20, s0, s1", {0: TOP, 1: 0}, TOP, 0),
    ("s_subb_u32 s20, s0, s1", {0: 0, 1: 1}, TOP, 1),
    ("s_mul_i32 s20, s0, s1", {0: TOP, 1: TOP}, 1, None),
    ("s_mul_hi_u32 s20, s0, s1", {0: TOP, 1: TOP}, TOP - 1, None),
    ("s_mul_hi_i32 s20, s0, s1", {0: TOP, 1: TOP}, 0, None),
    ("s_min_i32 s20, s0, s1", {0: TOP, 1: 0}, TOP, 1),
    ("s_max_i32 s20, s0, s1", {0: TOP, 1: 0}, 0, 0),
    ("s_and_b32 s20, s0, s1", {0: 12, 1: 10}, 8, 1),
    ("s_andn2_b32 s20, s0, s1", {0: 12, 1: 10}, 4, 1),
    ("s_xor_b32 s20, s0, s1", {0: 12, 1: 12}, 0, 0),
    ("s_lshl_b32 s20, s0, s1", {0: 1, 1: 33}, 2, 1),
    ("s_lshr_b32 s20, s0, s1", {0: 1, 1: 1}, 0, 0),
    ("s_ashr_i32 s20, s0, s1", {0: 0x80000000, 1: 31}, TOP, 1),
    ("s_bfe_u32 s20, s0, 0x80008", {0: 0xABCD1234}, 0x12, 1),
    ("s_bfe_i32 s20, s0, 0x40008", {0: 0x800}, TOP - 7, 1),
    ("s_bfe_i32 s20, s0, 0x10001f", {0: 0x80000000}, TOP, 1),
    ("s_bfm_b32 s20, s0, s1", {0: 4, 1: 8}, 0xF00, None),
    ("s_lshl2_add_u32 s20, s0, s1", {0: 0x40000000, 1: 3}, 3, 1),
    ("s_pack_ll_b32_b16 s20, s0, s1", {0: 0x10002, 1: 0x30004}, 0x40002, None),
    ("s_cselect_b32 s20, s0, s1", {0: 1, 1: 2}, 2, 0),
    ("s_movk_i32 s20, 0x8000", {}, 0xFFFF8000, None),
    ("s_addk_i32 s20, 0x7fff", {20: 0x7FFFFFFF}, 0x80007FFE, 1),
    ("s_mulk_i32 s20, -2", {20: 5}, TOP - 9, None),
    ("s_abs_i32 s20, s0", {0: 0x80000000}, 0x80000000, 1),
    ("s_brev_b32 s20, s0", {0: 1}, 0x80000000, None),
    ("s_sext_i32_i8 s20, s0", {0: 0x180}, 0xFFFFFF80, None),
    ("s_cmp_lt_i32 s0, s1", {0: TOP, 1: 0}, 0, 1),
    ("s_cmp_lt_u32 s0, s1", {0: TOP, 1: 0}, 0, 0),
    ("s_cmp_eq_u64 s[0:1], s[2:3]", {0: 1, 1: 2, 2: 1, 3: 2}, 0, 1),
    ("s_cmpk_eq_u32 s0, 0xffff", {0: 0xFFFF}, 0, 1),
    ("s_bitcmp1_b32 s0, 35", {0: 8}, 0, 1),
]


@pytest.mark.parametrize(("text", "s", "expected", "scc"), SCALAR, ids=[f"{i}-{x[0]}" for i, x in enumerate(SCALAR)])
def test_scalar(text, s, expected, scc):
    wave = execute(text, s=s)
    assert f"{wave.sgprs[20]:#x}" == f"{expected:#x}"
    assert wave.scc == (scc or 0)


SCALAR_64 = [
    ("s_lshl_b64 s[20:21], s[0:1], s2", {0: 0x80000000, 1: 0, 2: 65}, 1 << 32, 1),
    ("s_lshr_b64 s[20:21], s[0:1], s2", {0: 0, 1: 1, 2: 32}, 1, 1),
    ("s_ashr_i64 s[20:21], s[0:1], s2", {0: 0, 1: 0x80000000, 2: 63}, (1 << 64) - 1, 1),
    ("s_and_b64 s[20:21], s[0:1], -1", {0: 0, 1: 7}, 7 << 32, 1),
    ("s_andn2_b64 s[20:21], s[0:1], s[0:1]", {0: 1, 1: 7}, 0, 0),
    ("s_mov_b64 s[20:21], -2", {}, (1 << 64) - 2, 0),
    ("s_not_b64 s[20:21], s[0:1]", {0: TOP, 1: TOP}, 0, 0),
    ("s_cselect_b64 s[20:21], s[0:1], 5", {0: 1, 1: 7}, 5, 0),
]


@pytest.mark.parametrize(("text", "s", "expected", "scc"), SCALAR_64, ids=[x[0] for x in SCALAR_64])
def test_scalar_64_bit(text, s, expected, scc):
    wave = execute(text, s=s)
    assert wave.sgprs[20] | wave.sgprs[21] << 32 == expected
    assert wave.scc == scc


def test_saveexec_narrows_the_lanes_that_are_written():
    wave = execute("s_and_saveexec_b64 s[20:21], s[0:1]\nv_mov_b32 v9, 1", s={0: 5, 1: 0})
    assert (wave.sgprs[20], wave.sgprs[21], wave.scc) == (TOP, TOP, 1)
    assert wave.vgprs[9].tolist() == [1, 0, 1] + [0] * 61


def test_branches_count_from_the_next_instruction():
    wave = execute("s_cmp_eq_u32 s0, s0\ns_cbranch_scc1 over\ns_movk_i32 s20, 1\nover: s_movk_i32 s21, 2")
    assert (wave.sgprs[20], wave.sgprs[21]) == (0, 2)


def test_readfirstlane_takes_the_first_active_lane():
    lanes = np.arange(64) * 10
    assert execute("v_readfirstlane_b32 s20, v0", {0: lanes}, exec_mask=0x50).sgprs[20] == 40
    assert execute("v_readlane_b32 s20, v0, 63", {0: lanes}).sgprs[20] == 630


def test_permlane_swaps():
    a, b = np.arange(64), np.arange(64) + 100
    wave = execute("v_permlane32_swap_b32 v0, v1", {0: a, 1: b})
    assert wave.vgprs[0].tolist() == [*range(32), *range(100, 132)]
    assert wave.vgprs[1].tolist() == [*range(32, 64), *range(132, 164)]
    wave = execute("v_permlane16_swap_b32 v0, v1", {0: a, 1: b})
    assert wave.vgprs[0].tolist() == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert wave.vgprs[1].tolist() == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]


def test_packed_fp32():
    v = {0: bits(2.0), 1: bits(3.0), 2: bits(5.0), 3: bits(7.0), 4: ONE, 5: MINUS_ONE}
    low_high = lambda text: [int(x) for x in execute(text, v, {2: bits(10.0), 3: bits(20.0)}).vgprs[8:10, 0]]  # noqa: E731
    assert low_high("v_pk_mul_f32 v[8:9], v[0:1], v[2:3]") == [bits(10.0), bits(21.0)]
    assert low_high("v_pk_mul_f32 v[8:9], v[0:1], s[2:3]") == [bits(20.0), bits(60.0)]
    assert low_high("v_pk_mul_f32 v[8:9], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]") == [bits(15.0), bits(14.0)]
    assert low_high("v_pk_fma_f32 v[8:9], v[0:1], v[2:3], v[4:5]") == [bits(11.0), bits(20.0)]
    assert low_high("v_pk_fma_f32 v[8:9], v[0:1], v[2:3], v[4:5] neg_lo:[1,0,0] neg_hi:[0,0,1]") == [
        bits(-9.0), bits(22.0)
    ]  # fmt: skip
    assert low_high("v_pk_add_f32 v[8:9], v[0:1], v[4:5]") == [bits(3.0), bits(2.0)]
    assert low_high("v_pk_mul_f32 v[8:9], v[4:5], v[2:3] clamp") == [ONE, 0]


def test_clamp_of_nan_follows_the_mode():
    text = "v_pk_mul_f32 v[8:9], v[0:1], v[2:3] clamp"
    v = {0: NAN, 1: ONE, 2: ONE, 3: ONE}
    assert execute(text, v).vgprs[8][0] == 0
    wave = execute("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 8, 1), 0\n" + text, v)
    assert np.isnan(wave.vgprs[8:9].view(np.float32)[0, 0])
    assert wave.vgprs[9][0] == ONE


def test_accumulator_moves():
    wave = execute("v_accvgpr_write_b32 a3, v0\nv_accvgpr_read_b32 v9, a3", {0: np.arange(64)}, exec_mask=0xF)
    assert wave.agprs[3].tolist() == [0, 1, 2, 3] + [0] * 60 == wave.vgprs[9].tolist()


def test_fp8_values_are_e4m3fn():
    values = fp8_values()
    assert (values[0], values[1], values[0x38], values[0x7E], values[0xFE]) == (0, 2**-9, 1.0, 448.0, -448.0)
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(values, [0x7F, 0xFF])).all()
    assert np.signbit(values[0x80])


@pytest.mark.parametrize(
    ("name", "size", "depth"),
    [("16x16x32", 16, 32), ("32x32x16", 32, 16), ("16x16x128", 16, 128), ("32x32x64", 32, 64)],
)
def test_matrix_product_layout(name, size, depth):
    """Each element of A, B and C where the ISA guide's tables put it, on numbers that make every place distinct."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 0x70, (size, depth), dtype=np.uint8) for _ in range(2))
    c = rng.standard_normal((size, size)).astype(np.float32)
    groups = 64 // size
    held = depth // groups
    wide = depth * size >= 2048

    def operand(matrix):  # lane (g, row): elements g * held .. of the row, four to a register
        lanes = np.concatenate([matrix[:, g * held : (g + 1) * held] for g in range(groups)])
        return np.ascontiguousarray(lanes).view(np.uint32).T

    registers = size * size // 64
    place = [
        (r // 4 * 4 * groups + lane // size * 4 + r % 4, lane % size) for r in range(registers) for lane in range(64)
    ]
    rows, columns = (np.array(x).reshape(registers, 64) for x in zip(*place, strict=True))
    last = held // 4 - 1
    v = {0 + i: x for i, x in enumerate(operand(a))} | {16 + i: x for i, x in enumerate(operand(b))}
    v |= {32 + i: x for i, x in enumerate(c[rows, columns].view(np.uint32))}
    to = f"v[64:{63 + registers}]"
    sources = f"v[0:{last}], v[16:{16 + last}], v[32:{31 + registers}]"
    text = f"v_mfma_f32_{name}_fp8_fp8 {to}, {sources}"
    scale = 1.0
    if wide:
        text = f"v_mfma_scale_f32_{name}_f8f6f4 {to}, {sources}, v100, v101"
        v |= {100: 0x00007F00 | 126, 101: 129}  # 2**-1 and 2**2 in the byte that is selected
        scale = 2.0
    wave = execute(text, v)
    values = fp8_values()
    expected = values[a] @ values[b].T * scale + c
    got = wave.vgprs[64 : 64 + registers].view(np.float32)
    np.testing.assert_allclose(got, expected[rows, columns], rtol=2e-7, atol=1e-5)


def test_nan_and_signed_zero_in_a_matrix_product():
    v = dict.fromkeys(range(32), 0x38383838)  # all ones
    v[0] = np.where(np.arange(64) == 0, 0x3838387F, 0x38383838)  # row 0, element 0 of A is NaN
    wave = execute("v_mfma_scale_f32_16x16x128_f8f6f4 v[64:67], v[0:7], v[16:23], 0, v100, v100", v | {100: 127})
    got = wave.vgprs[64:68].view(np.float32)
    assert np.isnan(got[0, :16]).all()
    assert (got[1:, :16] == 128).all()
    assert (got[:, 16:] == 128).all()


def test_buffer_accesses_check_their_range():
    memory = Memory()
    data = np.arange(64, dtype=np.uint32)
    base = memory.map(data)
    s = {4: base & TOP, 5: base >> 32, 6: 40, 7: 0}
    offsets = np.arange(64) * 4
    wave = execute("buffer_load_dword v9, v0, s[4:7], 0 offen offset:4", {0: offsets, 9: TOP}, s, memory=memory)
    assert wave.vgprs[9].tolist() == [*range(1, 10)] + [0] * 55  # offsets from 40 on are outside: they read 0
    execute("buffer_store_dword v1, v0, s[4:7], 0 offen", {0: offsets, 1: 1000}, s, memory=memory)
    assert data.tolist() == [1000] * 10 + [*range(10, 64)]


def test_buffer_offsets_past_the_sign_bit_are_unsigned():
    memory = Memory()
    base = memory.reserve(1 << 32)
    data = np.arange(4, dtype=np.uint32)
    memory.map_at(base + 0x90000000, data)
    s = {4: base & TOP, 5: base >> 32, 6: TOP, 7: 0}
    wave = execute("buffer_load_dwordx4 v[8:11], v0, s[4:7], 0 offen", {0: 0x90000000}, s, memory=memory)
    assert wave.vgprs[8:12, 5].tolist() == [0, 1, 2, 3]


def test_global_accesses():
    memory = Memory()
    data = np.arange(80, dtype=np.uint32)
    base = memory.map(data)
    lanes = np.arange(64)
    wave = execute("global_load_dwordx2 v[8:9], v0, s[2:3] offset:8", {0: lanes * 4}, {2: base & TOP, 3: base >> 32},
                   memory=memory)  # fmt: skip
    assert wave.vgprs[8].tolist() == [*range(2, 66)]
    assert wave.vgprs[9].tolist() == [*range(3, 67)]
    address = base + lanes * 4 + 16
    execute("global_store_dword v[0:1], v2, off offset:-16", {0: address & TOP, 1: address >> 32, 2: lanes + 500},
            memory=memory, exec_mask=3)  # fmt: skip
    assert data[:3].tolist() == [500, 501, 2]
    wave = execute(
        "global_load_ubyte v9, v[0:1], off", {0: address & TOP, 1: address >> 32}, memory=memory, exec_mask=1
    )
    assert wave.vgprs[9][0] == 4


def test_scratch_is_private_to_a_lane():
    wave = execute(
        "scratch_store_dword off, v0, off offset:8\nscratch_load_dword v9, off, off offset:8", {0: np.arange(64)}
    )
    assert wave.vgprs[9].tolist() == [*range(64)]


def test_lds():
    text = "ds_write_b64 v0, v[2:3] offset:8\nds_read_b32 v9, v0 offset:12"
    wave = execute(text, {0: np.arange(64) * 8, 2: 7, 3: np.arange(64)}, lds_bytes=1024)
    assert wave.vgprs[9].tolist() == [*range(64)]


def test_scalar_loads():
    memory = Memory()
    base = memory.map(np.arange(16, dtype=np.uint32))
    wave = execute("s_load_dwordx4 s[20:23], s[2:3], 0x8", s={2: base & TOP, 3: base >> 32}, memory=memory)
    assert wave.sgprs[20:24] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "v"),
    [("global_load_dword v9, v[0:1], off", {0: 64, 1: 0}), ("global_load_dwordx4 v[8:11], v[0:1], off", {0: 0, 1: 16})],
)
def test_accesses_outside_of_memory_raise(text, v):
    memory = Memory()
    memory.map(np.zeros(3, np.uint32))
    with pytest.raises(MemoryError, match="outside every mapped array"):
        execute(text, v, memory=memory)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("v_sin_f32 v9, v0", "V_SIN_F32"),
        ("v_pk_mul_f32 v[8:9], v[0:1], 2.0", "constant as a packed operand"),
        ("v_add_f32_e64 v9, v0, v1 mul:2", "omod"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", "DX10_CLAMP"),
        ("buffer_load_dword v9, v0, s[4:7], 0 idxen", "idxen"),
        ("v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], 0", "MFMA"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[8:11], v[0:7], v[16:23], 0, v30, v31 cbsz:1", "cbsz"),
        ("ds_add_u32 v0, v1", "DS_ADD_U32"),
        ("s_ff1_i32_b32 s0, s1", "S_FF1"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(text, why):
    with pytest.raises(NotImplementedError, match=why):
        execute(text, {30: 127, 31: 127})
