"""Scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP and scalar loads."""

import operator

import numpy as np

from .bits import EXEC, MASK32, MASK64, VCC
from .bits import signed as _signed

_COMPARE = {
    "EQ": operator.eq, "LG": operator.ne, "NE": operator.ne, "GT": operator.gt, "GE": operator.ge, "LT": operator.lt,
    "LE": operator.le,
}  # fmt: skip
# Waits and hints change no value here.
_NOTHING = {"S_NOP", "S_WAITCNT", "S_SETPRIO", "S_SLEEP", "S_CLAUSE", "S_INST_PREFETCH", "S_ICACHE_INV"}


def _sopp(wave, inst):
    name = inst.name
    if name in _NOTHING:
        return
    vcc = wave.read_sgpr64(VCC)
    taken = {
        "S_BRANCH": True, "S_CBRANCH_SCC0": not wave.scc, "S_CBRANCH_SCC1": wave.scc, "S_CBRANCH_VCCZ": not vcc,
        "S_CBRANCH_VCCNZ": vcc, "S_CBRANCH_EXECZ": not wave.exec.any(), "S_CBRANCH_EXECNZ": wave.exec.any(),
    }.get(name)  # fmt: skip
    if taken is None:
        raise inst.unsupported()
    if taken:
        wave.pc += 4 * _signed(inst.fields["simm16"], 16)


def _sopk(wave, inst):
    name, to = inst.name, inst.fields["sdst"]
    constant = _signed(inst.fields["simm16"], 16)
    if name == "S_MOVK_I32":
        wave.write_sgpr(to, constant)
    elif name == "S_ADDK_I32":
        result = _signed(wave.sgprs[to]) + constant
        wave.scc = int(result != _signed(result))  # signed overflow
        wave.write_sgpr(to, result)
    elif name == "S_MULK_I32":
        wave.write_sgpr(to, _signed(wave.sgprs[to]) * constant)
    elif name.startswith("S_CMPK_"):
        _, _, relation, kind = name.split("_")
        value = wave.sgprs[to]
        if kind == "I32":
            wave.scc = int(_COMPARE[relation](_signed(value), constant))
        else:
            wave.scc = int(_COMPARE[relation](value, inst.fields["simm16"]))
    elif name == "S_SETREG_IMM32_B32":
        # simm16: size - 1, offset, register. Only MODE.DX10_CLAMP (register 1, bit 8).
        if inst.fields["simm16"] != (0 << 11 | 8 << 6 | 1):
            raise inst.unsupported("only the DX10_CLAMP bit of MODE can be set")
        wave.dx10_clamp = bool(inst.fields["literal"] & 1)
    else:
        raise inst.unsupported()


def _sop1(wave, inst):
    name, to, source = inst.name, inst.fields["sdst"], inst.fields["ssrc0"]
    if name == "S_MOV_B64":
        wave.write_sgpr64(to, wave.scalar64(source, inst))
    elif name in ("S_AND_SAVEEXEC_B64", "S_OR_SAVEEXEC_B64"):
        value, old = wave.scalar64(source, inst), wave.read_sgpr64(EXEC)
        new = value & old if name == "S_AND_SAVEEXEC_B64" else value | old
        wave.write_sgpr64(to, old)
        wave.set_exec(new)
        wave.scc = int(new != 0)
    elif name == "S_NOT_B64":
        result = ~wave.scalar64(source, inst) & MASK64
        wave.write_sgpr64(to, result)
        wave.scc = int(result != 0)
    elif name == "S_MOV_B32":
        wave.write_sgpr(to, wave.scalar(source, inst))
    elif name == "S_ABS_I32":
        result = abs(_signed(wave.scalar(source, inst))) & MASK32
        wave.write_sgpr(to, result)
        wave.scc = int(result != 0)
    elif name == "S_BREV_B32":
        wave.write_sgpr(to, int(f"{wave.scalar(source, inst):032b}"[::-1], 2))
    elif name == "S_SEXT_I32_I16":
        wave.write_sgpr(to, _signed(wave.scalar(source, inst), 16))
    elif name == "S_SEXT_I32_I8":
        wave.write_sgpr(to, _signed(wave.scalar(source, inst), 8))
    else:
        raise inst.unsupported()


def _bit_field(a, b, is_signed):
    # Offset in bits 0-4 of the second operand, width in bits 16-22; a field past bit 31 ends there.
    offset, width = b & 31, min(b >> 16 & 127, 32)
    if width == 0:
        return 0
    width = min(width, 32 - offset)
    field = a >> offset & (1 << width) - 1
    return _signed(field, width) if is_signed else field


# (a, b, a signed, b signed) -> (result, scc); scc None leaves it as it was.
_SOP2 = {
    "S_ADD_I32": lambda a, b, sa, sb: (a + b, int(sa + sb != _signed(sa + sb))),
    "S_SUB_I32": lambda a, b, sa, sb: (a - b, int(sa - sb != _signed(sa - sb))),
    "S_ADD_U32": lambda a, b, sa, sb: (a + b, a + b >> 32),
    "S_SUB_U32": lambda a, b, sa, sb: (a - b, int(b > a)),
    "S_MUL_I32": lambda a, b, sa, sb: (sa * sb, None),
    "S_MUL_HI_U32": lambda a, b, sa, sb: (a * b >> 32, None),
    "S_MUL_HI_I32": lambda a, b, sa, sb: (sa * sb >> 32, None),
    "S_MIN_I32": lambda a, b, sa, sb: (min(sa, sb), int(sa < sb)),
    "S_MAX_I32": lambda a, b, sa, sb: (max(sa, sb), int(sa > sb)),
    "S_MIN_U32": lambda a, b, sa, sb: (min(a, b), int(a < b)),
    "S_MAX_U32": lambda a, b, sa, sb: (max(a, b), int(a > b)),
    "S_PACK_LL_B32_B16": lambda a, b, sa, sb: ((a & 0xFFFF) | (b & 0xFFFF) << 16, None),
    **{
        f"S_LSHL{n}_ADD_U32": lambda a, b, sa, sb, n=n: ((a << n) + b, int((a << n) + b > MASK32)) for n in (1, 2, 3, 4)
    },
}
# (a, b) -> result; scc is whether it is not 0.
_SOP2_BITS = {
    "S_AND_B32": lambda a, b: a & b,
    "S_OR_B32": lambda a, b: a | b,
    "S_XOR_B32": lambda a, b: a ^ b,
    "S_ANDN2_B32": lambda a, b: a & ~b,
    "S_LSHL_B32": lambda a, b: a << (b & 31),
    "S_LSHR_B32": lambda a, b: a >> (b & 31),
    "S_ASHR_I32": lambda a, b: _signed(a) >> (b & 31),
    "S_BFE_U32": lambda a, b: _bit_field(a, b, False),
    "S_BFE_I32": lambda a, b: _bit_field(a, b, True),
    "S_BFM_B32": lambda a, b: (1 << (a & 31)) - 1 << (b & 31),
}
_SOP2_BITS64 = {
    "S_AND_B64": lambda a, b: a & b, "S_OR_B64": lambda a, b: a | b, "S_XOR_B64": lambda a, b: a ^ b,
    "S_ANDN2_B64": lambda a, b: a & ~b, "S_ORN2_B64": lambda a, b: a | ~b & MASK64,
}  # fmt: skip
_SOP2_SHIFT64 = {
    "S_LSHL_B64": lambda a, b: a << (b & 63), "S_LSHR_B64": lambda a, b: a >> (b & 63),
    "S_ASHR_I64": lambda a, b: _signed(a, 64) >> (b & 63),
}  # fmt: skip


def _sop2(wave, inst):
    name, to = inst.name, inst.fields["sdst"]
    first, second = inst.fields["ssrc0"], inst.fields["ssrc1"]
    if name in _SOP2_BITS64 or name in _SOP2_SHIFT64:
        if name in _SOP2_BITS64:
            result = _SOP2_BITS64[name](wave.scalar64(first, inst), wave.scalar64(second, inst)) & MASK64
        else:
            result = _SOP2_SHIFT64[name](wave.scalar64(first, inst), wave.scalar(second, inst)) & MASK64
        wave.write_sgpr64(to, result)
        wave.scc = int(result != 0)
        return
    if name == "S_CSELECT_B64":
        wave.write_sgpr64(to, wave.scalar64(first if wave.scc else second, inst))
        return
    if name == "S_CSELECT_B32":
        wave.write_sgpr(to, wave.scalar(first if wave.scc else second, inst))
        return
    a, b = wave.scalar(first, inst), wave.scalar(second, inst)
    if name in _SOP2_BITS:
        result = _SOP2_BITS[name](a, b) & MASK32
        scc = None if name == "S_BFM_B32" else int(result != 0)
    elif name in ("S_ADDC_U32", "S_SUBB_U32"):
        total = a + b + wave.scc if name == "S_ADDC_U32" else a - b - wave.scc
        result, scc = total, int(not 0 <= total <= MASK32)  # carry or borrow
    elif name in _SOP2:
        result, scc = _SOP2[name](a, b, _signed(a), _signed(b))
    else:
        raise inst.unsupported()
    wave.write_sgpr(to, result)
    if scc is not None:
        wave.scc = scc


def _sopc(wave, inst):
    name = inst.name
    parts = name.split("_")
    if parts[1] == "CMP" and parts[2] in _COMPARE and parts[3] in ("I32", "U32", "U64"):
        read = wave.scalar64 if parts[3] == "U64" else wave.scalar
        a, b = read(inst.fields["ssrc0"], inst), read(inst.fields["ssrc1"], inst)
        if parts[3] == "I32":
            a, b = _signed(a), _signed(b)
        wave.scc = int(_COMPARE[parts[2]](a, b))
    elif name in ("S_BITCMP0_B32", "S_BITCMP1_B32"):
        bit = wave.scalar(inst.fields["ssrc0"], inst) >> (wave.scalar(inst.fields["ssrc1"], inst) & 31) & 1
        wave.scc = int(bit == (name == "S_BITCMP1_B32"))
    else:
        raise inst.unsupported()


def _smem(wave, inst):
    if not inst.name.startswith("S_LOAD_DWORD"):
        raise inst.unsupported()
    count = int(inst.name.removeprefix("S_LOAD_DWORD").removeprefix("X") or 1)
    f = inst.fields
    address = wave.read_sgpr64(f["sbase"] * 2)
    if f["imm"]:
        address += _signed(f["offset"], 21)
    if f["soffset_en"]:
        address += wave.sgprs[f["soffset"]]
    if not f["imm"] and not f["soffset_en"]:
        raise inst.unsupported("an offset in a register by the older form")
    address &= MASK64 & ~3  # the two lowest bits are ignored
    for i, value in enumerate(wave.memory.load(np.array([address]), count)[:, 0].tolist()):
        wave.write_sgpr(f["sdata"] + i, value)


ENCODINGS = {"SOPP": _sopp, "SOPK": _sopk, "SOP1": _sop1, "SOP2": _sop2, "SOPC": _sopc, "SMEM": _smem}
