"""One wave: registers, how operands are read and written, and the loop over instructions."""

import struct

import numpy as np

from . import lds, mfma, scalar, vector, vector_memory
from .bits import EXEC, MASK32, MASK64, signed

LITERAL = 255  # operand code: a 32-bit constant in the instruction
FIRST_VGPR = 256  # operand codes from here on are vector registers
# Inline constants: 128..192 are 0..64, 193..208 are -1..-16, and these floats. 248 is 1 / (2 pi).
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
FLOAT_BITS = {code: struct.unpack("<I", struct.pack("<f", value))[0] for code, value in _FLOATS.items()}
FLOAT_BITS[248] = 0x3E22F983
DOUBLE_BITS = {code: struct.unpack("<Q", struct.pack("<d", value))[0] for code, value in _FLOATS.items()}
LANES = np.arange(64)

_ENCODINGS = {**scalar.ENCODINGS, **vector.ENCODINGS, **mfma.ENCODINGS, **vector_memory.ENCODINGS, **lds.ENCODINGS}


class Wave:
    """64 lanes in lockstep.

    vgprs, agprs  [512, 64] uint32; sgprs: 128 ints, VCC at 106, EXEC at 126 (`exec` is the same as a bool array)
    lds           uint8 array that the workgroup shares
    scratch       [64, bytes] uint8, private to each lane
    dx10_clamp    MODE bit 8: whether a clamp turns NaN into 0 (set at launch; kernels may clear it)
    """

    def __init__(self, program, memory, lds_bytes, lanes=64, scratch_bytes=0):
        self.program, self.memory, self.lds = program, memory, lds_bytes
        self.vgprs = np.zeros((512, 64), np.uint32)
        self.agprs = np.zeros((512, 64), np.uint32)
        self.sgprs = [0] * 128
        self.scratch = np.zeros((64, scratch_bytes), np.uint8)
        self.scc = 0
        self.dx10_clamp = True
        self.pc = 0
        self.executed = 0
        self.ended = False
        self.set_exec((1 << lanes) - 1)

    def run(self) -> bool:
        """Go on to the next barrier or the end; True at the end."""
        while True:
            inst = self.program[self.pc]
            self.executed += 1
            self.pc = inst.next_pc
            if inst.name == "S_ENDPGM":
                self.ended = True
                return True
            if inst.name == "S_BARRIER":
                return False
            try:
                execute = _ENCODINGS[inst.encoding]
            except KeyError:
                raise inst.unsupported("this encoding is not modelled") from None
            execute(self, inst)

    # Scalar registers and operands

    def set_exec(self, mask: int) -> None:
        self.sgprs[EXEC], self.sgprs[EXEC + 1] = mask & MASK32, mask >> 32
        self.exec = (mask >> LANES.astype(object) & 1).astype(bool)

    def write_sgpr(self, register: int, value: int) -> None:
        self.sgprs[register] = value & MASK32
        if register in (EXEC, EXEC + 1):
            self.set_exec(self.sgprs[EXEC] | self.sgprs[EXEC + 1] << 32)

    def write_sgpr64(self, register: int, value: int) -> None:
        self.write_sgpr(register, value)
        self.write_sgpr(register + 1, value >> 32)

    def read_sgpr64(self, register: int) -> int:
        return self.sgprs[register] | self.sgprs[register + 1] << 32

    def scalar(self, code: int, inst) -> int:
        """A 32-bit scalar operand, as an unsigned number."""
        if code < 128:
            return self.sgprs[code]
        if code <= 192:
            return code - 128
        if code <= 208:
            return (192 - code) & MASK32
        if code in FLOAT_BITS:
            return FLOAT_BITS[code]
        if code == LITERAL:
            return inst.fields["literal"]
        raise inst.unsupported(f"scalar operand {code}")

    def scalar64(self, code: int, inst) -> int:
        """A 64-bit integer scalar operand, as an unsigned number. Literals are zero-extended, -1..-16 sign-extended."""
        if code < 128:
            return self.read_sgpr64(code)
        if code <= 208:
            return signed(self.scalar(code, inst)) & MASK64
        if code == LITERAL:
            return inst.fields["literal"]
        if code in DOUBLE_BITS:
            return DOUBLE_BITS[code]
        raise inst.unsupported(f"64-bit scalar operand {code}")

    # Vector registers and operands

    def vector(self, code: int, inst) -> np.ndarray:
        """A 32-bit operand of a vector instruction, [64] uint32."""
        if code >= FIRST_VGPR:
            return self.vgprs[code - FIRST_VGPR].copy()
        return np.full(64, self.scalar(code, inst), np.uint32)

    def vector64(self, code: int, inst) -> np.ndarray:
        """A 64-bit operand of a vector instruction, [64] uint64."""
        if code >= FIRST_VGPR:
            low, high = self.vgprs[code - FIRST_VGPR], self.vgprs[code - FIRST_VGPR + 1]
            return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        return np.full(64, self.scalar64(code, inst), np.uint64)

    def write_vgpr(self, register: int, value: np.ndarray) -> None:
        """Write [64] uint32 in the active lanes."""
        self.vgprs[register][self.exec] = value[self.exec]

    def write_vgpr64(self, register: int, value: np.ndarray) -> None:
        self.write_vgpr(register, value.astype(np.uint32))
        self.write_vgpr(register + 1, (value >> np.uint64(32)).astype(np.uint32))

    def registers(self, accumulators) -> np.ndarray:
        """The register file that an instruction's acc bit names."""
        return self.agprs if accumulators else self.vgprs

    def mask_of(self, lanes: np.ndarray) -> int:
        """The active ones of [64] bools as a mask; inactive lanes give 0."""
        return int.from_bytes(np.packbits(lanes & self.exec, bitorder="little").tobytes(), "little")

    @staticmethod
    def lanes_of(mask: int) -> np.ndarray:
        """A mask as [64] bools."""
        return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)
