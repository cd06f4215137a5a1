"""Machine code to instructions."""

import functools
from dataclasses import dataclass

from tinygrad.renderer.amd import decode_inst


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction: encoding ("VOP3P"), name without _E32 or _E64, bit fields, and where the next is."""

    encoding: str
    name: str
    fields: dict
    next_pc: int

    def unsupported(self, what=""):
        """The error for anything about this instruction that is not modelled."""
        return NotImplementedError(f"{self.encoding} {self.name}{': ' if what else ''}{what}, fields {self.fields}")

    def require_zero(self, *names):
        """Refuse an instruction that uses a modifier which is not modelled for it."""
        for name in names:
            if self.fields.get(name):
                raise self.unsupported(f"{name} is not modelled here")


@functools.lru_cache(maxsize=256)
def decode(code: bytes) -> dict[int, Instruction]:
    """Instructions by their offset in `code`, decoded once a program."""
    program, pc = {}, 0
    while pc < len(code):
        decoded = decode_inst(code[pc : pc + 16].ljust(16, b"\0"), "cdna")
        size = decoded.size()
        raw = int.from_bytes(code[pc : pc + size], "little")
        fields = {name: raw >> f.lo & ((1 << (f.hi - f.lo + 1)) - 1) for name, f in decoded._fields}
        name = decoded.op.name.removesuffix("_E32").removesuffix("_E64")
        encoding = type(decoded).__name__.replace("_LIT", "")
        program[pc] = Instruction(encoding, name, fields, pc + size)
        pc += size
    return program
