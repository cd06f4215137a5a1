"""Matrix products of fp8: V_MFMA_F32_*_FP8_FP8 and V_MFMA_SCALE_F32_*_F8F6F4."""

import functools

import numpy as np

from .bits import as_bits, as_float

LANES = np.arange(64)


@functools.cache
def fp8_values() -> np.ndarray:
    """The 256 values of OCP e4m3fn as float64: bias 7, no infinities, 0x7F and 0xFF NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[code & 0x7F == 0x7F] = np.nan
    return np.where(code >> 7, -value, value)


@functools.cache
def _accumulator_layout(size):
    """(row, column) of each register and lane of a size x size result, [registers, 64] each.

    A lane holds four consecutive rows of one column; lane groups follow each other, then blocks of rows.
    """
    register = np.arange(size * size // 64)[:, None]
    groups = 64 // size
    row = register // 4 * (4 * groups) + LANES // size * 4 + register % 4
    return row, np.broadcast_to(LANES % size, row.shape)


def _operand(wave, register, accumulators, size, depth):
    """[size, depth] float64 of an fp8 operand: a lane holds depth / (64 / size) consecutive elements of one row."""
    groups = 64 // size
    held = depth // groups
    data = wave.registers(accumulators)[register : register + held // 4]
    codes = np.ascontiguousarray(data.T).view(np.uint8).reshape(groups, size, held)
    return fp8_values()[codes.transpose(1, 0, 2).reshape(size, depth)]


def _matrix_product(wave, inst, size, depth, scale):
    f = inst.fields
    if not wave.exec.all():
        raise inst.unsupported("a matrix product with lanes switched off")
    # The columns of B are stored as A's rows are.
    a = _operand(wave, f["src0"] - 256, f["acc"] & 1, size, depth)
    b = _operand(wave, f["src1"] - 256, f["acc"] >> 1 & 1, size, depth)
    row, column = _accumulator_layout(size)
    registers = wave.registers(f["acc_cd"])
    if f["src2"] >= 256:
        start = f["src2"] - 256
        accumulator = as_float(registers[start : start + len(row)].copy())
    else:
        accumulator = as_float(np.array([wave.scalar(f["src2"], inst)], np.uint32))
    with np.errstate(invalid="ignore"):
        product = (a @ b.T)[row, column] * scale + accumulator
    registers[f["vdst"] : f["vdst"] + len(row)] = as_bits(product.astype(np.float32))


def _shape(inst, part):
    size, other, depth = (int(x) for x in inst.name.split("_")[part].split("X"))
    if size != other:
        raise inst.unsupported()
    return size, depth


def _mfma(wave, inst):
    if not inst.name.endswith("_FP8_FP8"):
        raise inst.unsupported()
    inst.require_zero("cbsz", "abid", "blgp", "clmp", "neg", "neg_hi")
    _matrix_product(wave, inst, *_shape(inst, -3), 1.0)


def _mfma_scale(wave, inst):
    f = inst.fields
    if not inst.name.endswith("_F8F6F4"):
        raise inst.unsupported()
    inst.require_zero("cbsz", "blgp", "neg", "neg_hi")  # cbsz and blgp 0: both operands are e4m3
    if f["abid"] != 1:  # the encoding's mark that the scales of its first half are used
        raise inst.unsupported("without scales")
    exponents = []
    for source, select in (("scale_src0", "opsel"), ("scale_src1", "opsel_hi")):
        # E8M0: 2**(byte - 127), one byte of a register for each row and 32 elements.
        byte = wave.vector(f[source], inst) >> np.uint32(8 * f[select]) & np.uint32(255)
        if (byte != byte[0]).any() or byte[0] == 255:
            raise inst.unsupported("scales that differ between rows or blocks, or NaN")
        exponents.append(int(byte[0]) - 127)
    _matrix_product(wave, inst, *_shape(inst, -2), 2.0 ** sum(exponents))


ENCODINGS = {"VOP3P_MFMA": _mfma, "VOP3PX2": _mfma_scale}
