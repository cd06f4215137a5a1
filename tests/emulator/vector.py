"""Vector ALU instructions. Each lane is an element of a [64] array; only active lanes are written."""

import numpy as np

from .bits import MASK32, VCC, as_bits, as_float, as_int

LANES = np.arange(64)
u32, u64 = np.uint32, np.uint64


def _fma(a, b, c):
    # One rounding. The product of two float32 is exact in float64, and adding c there rounds once to 53 bits before the
    # rounding to 24: it differs from a true fma only where the first rounding lands on a tie of the second, and then
    # the sticky bit decides.
    a, b, c = as_float(a).astype(np.float64), as_float(b).astype(np.float64), as_float(c).astype(np.float64)
    product = a * b
    total = product + c
    # Error of the sum (Knuth), to round to odd where it was inexact.
    t = total - product
    error = (product - (total - t)) + (c - t)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total)
    toward = np.where((error > 0) == (total > 0), 0, -1)  # magnitude was rounded down or up
    odd = np.where(inexact & (bits & 1 == 0), (bits + toward) | 1, bits)
    return as_bits(odd.view(np.float64).astype(np.float32))


def _max_f32(a, b):
    # IEEE mode off or on, a NaN loses to a number; of two zeros +0 is the larger.
    a, b = as_float(a), as_float(b)
    result = np.fmax(a, b)
    return as_bits(np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), result))


def _min_f32(a, b):
    a, b = as_float(a), as_float(b)
    result = np.fmin(a, b)
    return as_bits(np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), result))


def _float_to_int(x, low, high):
    # Truncates, saturates; NaN becomes 0.
    value = np.trunc(np.nan_to_num(as_float(x).astype(np.float64), nan=0.0, posinf=high, neginf=low))
    return np.clip(value, low, high).astype(np.int64).astype(u32)


def _bit_reverse(x):
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(u32).reshape(-1)


def _bit_field(x, offset, width, is_signed):
    offset, width = offset & u32(31), width & u32(31)
    if is_signed:
        field = (as_int(x) >> as_int(offset)).astype(np.int64)
        sign = np.int64(1) << (width.astype(np.int64) - 1).clip(0)
        field &= (np.int64(1) << width.astype(np.int64)) - 1
        return np.where(width == 0, 0, (field ^ sign) - sign).astype(u32)
    return (x >> offset) & ((u32(1) << width) - u32(1))


def _wide(x):
    return x.astype(u64)


# Name -> function of 32-bit operands (uint32 arrays). *_FLOAT_* also take abs, neg and clamp modifiers.
_UNARY = {
    "V_MOV_B32": lambda a: a,
    "V_NOT_B32": lambda a: ~a,
    "V_BFREV_B32": _bit_reverse,
}
_FLOAT_UNARY = {
    "V_CVT_F32_U32": lambda a: as_bits(a.astype(np.float32)),
    "V_CVT_F32_I32": lambda a: as_bits(as_int(a).astype(np.float32)),
    "V_CVT_U32_F32": lambda a: _float_to_int(a, 0, MASK32),
    "V_CVT_I32_F32": lambda a: _float_to_int(a, -(1 << 31), (1 << 31) - 1),
    # The hardware's reciprocal is within 1 ulp; here it is rounded to nearest. Code that needs the last bit would
    # depend on the part.
    "V_RCP_F32": lambda a: as_bits(np.float32(1) / as_float(a)),
    "V_RCP_IFLAG_F32": lambda a: as_bits(np.float32(1) / as_float(a)),
}
_BINARY = {
    "V_ADD_U32": lambda a, b: a + b,
    "V_SUB_U32": lambda a, b: a - b,
    "V_SUBREV_U32": lambda a, b: b - a,
    "V_AND_B32": lambda a, b: a & b,
    "V_OR_B32": lambda a, b: a | b,
    "V_XOR_B32": lambda a, b: a ^ b,
    "V_LSHLREV_B32": lambda a, b: b << (a & u32(31)),
    "V_LSHRREV_B32": lambda a, b: b >> (a & u32(31)),
    "V_ASHRREV_I32": lambda a, b: (as_int(b) >> as_int(a & u32(31))).view(u32),
    "V_MIN_I32": lambda a, b: np.minimum(as_int(a), as_int(b)).view(u32),
    "V_MAX_I32": lambda a, b: np.maximum(as_int(a), as_int(b)).view(u32),
    "V_MIN_U32": np.minimum,
    "V_MAX_U32": np.maximum,
    "V_MUL_LO_U32": lambda a, b: a * b,
    "V_MUL_HI_U32": lambda a, b: (_wide(a) * _wide(b) >> u64(32)).astype(u32),
    "V_MUL_HI_I32": lambda a, b: (as_int(a).astype(np.int64) * as_int(b) >> 32).astype(u32),
    "V_MUL_U32_U24": lambda a, b: (a & u32(0xFFFFFF)) * (b & u32(0xFFFFFF)),
    "V_MBCNT_LO_U32_B32": lambda a, b: _count_below(a, LANES.clip(0, 32)) + b,
    "V_MBCNT_HI_U32_B32": lambda a, b: _count_below(a, (LANES - 32).clip(0, 32)) + b,
}
_FLOAT_BINARY = {
    "V_ADD_F32": lambda a, b: as_bits(as_float(a) + as_float(b)),
    "V_SUB_F32": lambda a, b: as_bits(as_float(a) - as_float(b)),
    "V_SUBREV_F32": lambda a, b: as_bits(as_float(b) - as_float(a)),
    "V_MUL_F32": lambda a, b: as_bits(as_float(a) * as_float(b)),
    "V_MAX_F32": _max_f32,
    "V_MIN_F32": _min_f32,
}
_TERNARY = {
    "V_ADD3_U32": lambda a, b, c: a + b + c,
    "V_LSHL_ADD_U32": lambda a, b, c: (a << (b & u32(31))) + c,
    "V_ADD_LSHL_U32": lambda a, b, c: (a + b) << (c & u32(31)),
    "V_LSHL_OR_B32": lambda a, b, c: (a << (b & u32(31))) | c,
    "V_AND_OR_B32": lambda a, b, c: (a & b) | c,
    "V_OR3_B32": lambda a, b, c: a | b | c,
    "V_XAD_U32": lambda a, b, c: (a ^ b) + c,
    "V_BFE_U32": lambda a, b, c: _bit_field(a, b, c, False),
    "V_BFE_I32": lambda a, b, c: _bit_field(a, b, c, True),
    "V_BFI_B32": lambda a, b, c: (a & b) | (~a & c),
    "V_ALIGNBIT_B32": lambda a, b, c: ((_wide(a) << u64(32) | _wide(b)) >> _wide(c & u32(31))).astype(u32),
    "V_MAX3_I32": lambda a, b, c: np.maximum(np.maximum(as_int(a), as_int(b)), as_int(c)).view(u32),
    "V_MIN3_I32": lambda a, b, c: np.minimum(np.minimum(as_int(a), as_int(b)), as_int(c)).view(u32),
    "V_MAD_U32_U24": lambda a, b, c: (a & u32(0xFFFFFF)) * (b & u32(0xFFFFFF)) + c,
}
_FLOAT_TERNARY = {"V_FMA_F32": _fma}
# (operand widths, function)
_WIDE = {
    "V_LSHL_ADD_U64": ((64, 32, 64), lambda a, b, c: (a << _wide(b & u32(7))) + c),
    "V_LSHLREV_B64": ((32, 64), lambda a, b: b << _wide(a & u32(63))),
    "V_LSHRREV_B64": ((32, 64), lambda a, b: b >> _wide(a & u32(63))),
    "V_ASHRREV_I64": ((32, 64), lambda a, b: (b.view(np.int64) >> _wide(a & u32(63)).view(np.int64)).view(u64)),
}
_COMPARE = {
    "EQ": np.equal, "NE": np.not_equal, "GT": np.greater, "GE": np.greater_equal, "LT": np.less, "LE": np.less_equal,
}  # fmt: skip
# Float relations: LG and the N* forms treat unordered operands as their names say.
_COMPARE_FLOAT = {
    **{name: _COMPARE[name] for name in ("EQ", "GT", "GE", "LT", "LE")},
    "LG": lambda a, b: (a < b) | (a > b),
    "NEQ": np.not_equal,
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "NGT": lambda a, b: ~(a > b),
    "NGE": lambda a, b: ~(a >= b),
    "NLT": lambda a, b: ~(a < b),
    "NLE": lambda a, b: ~(a <= b),
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMPARE_TYPES = {"I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64}


def _count_below(mask, bits):
    # Set bits of each lane's `mask` below bit `bits`.
    below = (np.uint64(1) << bits.astype(u64)) - u64(1)
    masked = _wide(mask) & below
    return np.unpackbits(masked.view(np.uint8).reshape(-1, 8), axis=1).sum(1).astype(u32)


def _clamp(wave, bits):
    x = as_float(bits)
    clamped = np.where(x > 1, np.float32(1), np.where(x > 0, x, np.float32(0)))
    if not wave.dx10_clamp:
        clamped = np.where(np.isnan(x), x, clamped)
    return as_bits(clamped)


def _source_modifiers(x, k, fields):
    if fields.get("abs", 0) >> k & 1:
        x = x & u32(0x7FFFFFFF)
    if fields.get("neg", 0) >> k & 1:
        x = x ^ u32(0x80000000)
    return x


def _vop1(wave, inst):
    f = inst.fields
    if inst.name == "V_READFIRSTLANE_B32":
        lane = int(np.argmax(wave.exec))  # lane 0 when none is active
        wave.write_sgpr(f["vdst"], int(wave.vector(f["src0"], inst)[lane]))
    elif inst.name == "V_MOV_B64":
        wave.write_vgpr64(f["vdst"], wave.vector64(f["src0"], inst))
    elif inst.name in ("V_PERMLANE16_SWAP_B32", "V_PERMLANE32_SWAP_B32"):
        _permlane_swap(wave, inst, 32 if "32_SWAP" in inst.name else 16)
    elif inst.name == "V_NOP":
        pass
    else:
        function = _UNARY.get(inst.name) or _FLOAT_UNARY.get(inst.name)
        if function is None:
            raise inst.unsupported()
        wave.write_vgpr(f["vdst"], function(wave.vector(f["src0"], inst)))


def _permlane_swap(wave, inst, half):
    # Rows of `half` lanes: the odd rows of vdst change places with the even rows of src0.
    if not wave.exec.all():
        raise inst.unsupported("a swap with lanes switched off")
    a, b = wave.vgprs[inst.fields["vdst"]], wave.vgprs[inst.fields["src0"] - 256]
    even = LANES[LANES % (2 * half) < half]
    a[even + half], b[even] = b[even].copy(), a[even + half].copy()


def _vop2(wave, inst):
    f, name = inst.fields, inst.name
    a, b = wave.vector(f["src0"], inst), wave.vgprs[f["vsrc1"]].copy()
    if name == "V_CNDMASK_B32":
        result = np.where(wave.lanes_of(wave.read_sgpr64(VCC)), b, a)
    elif name == "V_FMAC_F32":
        result = _fma(a, b, wave.vgprs[f["vdst"]])
    elif name in ("V_ADD_CO_U32", "V_SUB_CO_U32", "V_ADDC_CO_U32", "V_SUBB_CO_U32"):
        result, carry = _carry(wave, name, a, b, wave.read_sgpr64(VCC))
        wave.write_sgpr64(VCC, wave.mask_of(carry))
    else:
        function = _BINARY.get(name) or _FLOAT_BINARY.get(name)
        if function is None:
            raise inst.unsupported()
        result = function(a, b)
    wave.write_vgpr(f["vdst"], result)


def _carry(wave, name, a, b, carry_in):
    carried = wave.lanes_of(carry_in).astype(np.int64) if "ADDC" in name or "SUBB" in name else 0
    sign = 1 if "ADD" in name else -1
    total = a.astype(np.int64) + sign * (b.astype(np.int64) + carried)
    return total.astype(u32), (total < 0) | (total > MASK32)


def _compare(wave, inst, a, b):
    _, cmp, relation, kind = inst.name.split("_")
    if cmp != "CMP":
        raise inst.unsupported()
    if kind == "F32" and relation in _COMPARE_FLOAT:
        return wave.mask_of(_COMPARE_FLOAT[relation](as_float(a), as_float(b)))
    if kind in _COMPARE_TYPES and relation in _COMPARE:
        return wave.mask_of(_COMPARE[relation](a.view(_COMPARE_TYPES[kind]), b.view(_COMPARE_TYPES[kind])))
    raise inst.unsupported()


def _vopc(wave, inst):
    f = inst.fields
    if inst.name.endswith("64"):
        a, b = wave.vector64(f["src0"], inst), wave.vector64(f["vsrc1"] + 256, inst)
    else:
        a, b = wave.vector(f["src0"], inst), wave.vgprs[f["vsrc1"]].copy()
    wave.write_sgpr64(VCC, _compare(wave, inst, a, b))


def _vop3_sdst(wave, inst):
    f = inst.fields
    inst.require_zero("clmp", "opsel")
    read = wave.vector64 if inst.name.endswith("64") else wave.vector
    a, b = read(f["src0"], inst), read(f["src1"], inst)
    if inst.name.endswith("_F32"):
        a, b = _source_modifiers(a, 0, f), _source_modifiers(b, 1, f)
    else:
        inst.require_zero("abs", "neg")
    wave.write_sgpr64(f["vdst"], _compare(wave, inst, a, b))


def _vop3(wave, inst):
    f, name = inst.fields, inst.name
    if name.startswith("V_CMP"):
        _vop3_sdst(wave, inst)
        return
    if name == "V_BITOP3_B32":
        _bitop3(wave, inst)
        return
    if name == "V_CNDMASK_B32":
        inst.require_zero("clmp", "omod", "opsel", "abs", "neg")
        mask = wave.lanes_of(wave.scalar64(f["src2"], inst))
        wave.write_vgpr(f["vdst"], np.where(mask, wave.vector(f["src1"], inst), wave.vector(f["src0"], inst)))
        return
    if name == "V_READLANE_B32":
        lane = wave.scalar(f["src1"], inst) & 63
        wave.write_sgpr(f["vdst"], int(wave.vector(f["src0"], inst)[lane]))
        return
    if name == "V_MOV_B64":
        inst.require_zero("clmp", "omod", "opsel", "abs", "neg")
        wave.write_vgpr64(f["vdst"], wave.vector64(f["src0"], inst))
        return
    if name in _WIDE:
        inst.require_zero("clmp", "omod", "opsel", "abs", "neg")
        widths, function = _WIDE[name]
        operands = [
            (wave.vector64 if width == 64 else wave.vector)(f[f"src{k}"], inst) for k, width in enumerate(widths)
        ]
        wave.write_vgpr64(f["vdst"], function(*operands))
        return
    inst.require_zero("omod", "opsel")
    for table, count in ((_FLOAT_UNARY, 1), (_FLOAT_BINARY, 2), (_FLOAT_TERNARY, 3)):
        if name in table:
            operands = [_source_modifiers(wave.vector(f[f"src{k}"], inst), k, f) for k in range(count)]
            result = table[name](*operands)
            if f["clmp"]:
                if name.startswith(("V_CVT_U32", "V_CVT_I32")):
                    raise inst.unsupported("clamp of an integer")
                result = _clamp(wave, result)
            wave.write_vgpr(f["vdst"], result)
            return
    inst.require_zero("clmp", "abs", "neg")
    for table, count in ((_UNARY, 1), (_BINARY, 2), (_TERNARY, 3)):
        if name in table:
            wave.write_vgpr(f["vdst"], table[name](*(wave.vector(f[f"src{k}"], inst) for k in range(count))))
            return
    raise inst.unsupported()


def _bitop3(wave, inst):
    # The truth table's eight bits are spread over omod (2), abs (3) and neg (3); index = a << 2 | b << 1 | c.
    f = inst.fields
    inst.require_zero("clmp", "opsel")
    table = f["omod"] << 6 | f["abs"] << 3 | f["neg"]
    a, b, c = (wave.vector(f[f"src{k}"], inst) for k in range(3))
    result = np.zeros(64, u32)
    for index in range(8):
        if table >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    wave.write_vgpr(f["vdst"], result)


def _vop3_sd(wave, inst):
    f, name = inst.fields, inst.name
    inst.require_zero("clmp", "omod", "neg")
    if name in ("V_MAD_U64_U32", "V_MAD_I64_I32"):
        a, b, c = wave.vector(f["src0"], inst), wave.vector(f["src1"], inst), wave.vector64(f["src2"], inst)
        if name == "V_MAD_U64_U32":
            product = _wide(a) * _wide(b)
            total = product + c
            carry = total < product
        else:
            product = as_int(a).astype(np.int64) * as_int(b)
            total = product.view(u64) + c
            # The 65th bit of the exact sum: its sign, which is the wrapped one's unless that overflowed.
            wrapped, addend = total.view(np.int64), c.view(np.int64)
            overflow = ((product ^ wrapped) & (addend ^ wrapped)) < 0
            carry = (wrapped < 0) ^ overflow
        wave.write_vgpr64(f["vdst"], total)
        wave.write_sgpr64(f["sdst"], wave.mask_of(carry))
    elif name in ("V_ADD_CO_U32", "V_SUB_CO_U32", "V_ADDC_CO_U32", "V_SUBB_CO_U32"):
        carry_in = wave.scalar64(f["src2"], inst) if name in ("V_ADDC_CO_U32", "V_SUBB_CO_U32") else 0
        a, b = wave.vector(f["src0"], inst), wave.vector(f["src1"], inst)
        result, carry = _carry(wave, name, a, b, carry_in)
        wave.write_vgpr(f["vdst"], result)
        wave.write_sgpr64(f["sdst"], wave.mask_of(carry))
    else:
        raise inst.unsupported()


_PACKED = {
    "V_PK_MUL_F32": (2, _FLOAT_BINARY["V_MUL_F32"]),
    "V_PK_ADD_F32": (2, _FLOAT_BINARY["V_ADD_F32"]),
    "V_PK_FMA_F32": (3, _fma),
}


def _vop3p(wave, inst):
    f, name = inst.fields, inst.name
    if name == "V_ACCVGPR_READ":
        wave.write_vgpr(f["vdst"], wave.agprs[f["src0"] - 256])
        return
    if name == "V_ACCVGPR_WRITE":
        wave.agprs[f["vdst"]][wave.exec] = wave.vector(f["src0"], inst)[wave.exec]
        return
    if name == "V_PK_MOV_B32":
        inst.require_zero("clmp", "neg", "neg_hi")
        halves = [_half(wave, inst, 0, f["opsel"] & 1), _half(wave, inst, 1, f["opsel"] >> 1 & 1)]
    elif name in _PACKED:
        count, function = _PACKED[name]
        halves = []
        # op_sel and neg are of the low result, op_sel_hi and neg_hi of the high one.
        for select, negate in ((f["opsel"], f["neg"]), (f["opsel_hi"] | f["opsel_hi2"] << 2, f["neg_hi"])):
            operands = [_half(wave, inst, k, select >> k & 1) for k in range(count)]
            operands = [x ^ u32(0x80000000) if negate >> k & 1 else x for k, x in enumerate(operands)]
            result = function(*operands)
            halves.append(_clamp(wave, result) if f["clmp"] else result)
    else:
        raise inst.unsupported()
    wave.write_vgpr(f["vdst"], halves[0])
    wave.write_vgpr(f["vdst"] + 1, halves[1])


def _half(wave, inst, k, high):
    # The low or high register of a 64-bit operand. A constant other than 0 would need a rule for its high half.
    code = inst.fields[f"src{k}"]
    if code >= 256 or code < 128:
        return wave.vector(code + high, inst)
    if wave.scalar(code, inst) == 0:
        return np.zeros(64, u32)
    raise inst.unsupported("a constant as a packed operand")


ENCODINGS = {
    "VOP1": _vop1, "VOP2": _vop2, "VOP3": _vop3, "VOPC": _vopc, "VOP3_SDST": _vop3_sdst, "VOP3SD": _vop3_sd,
    "VOP3P": _vop3p,
}  # fmt: skip
