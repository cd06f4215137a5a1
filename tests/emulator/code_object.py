"""The code object (ELF64) of a kernel: what to run, and how its arguments are laid out."""

import struct

import numpy as np


class CodeObject:
    """The first kernel of an ELF file with its descriptor.

    Layout of the descriptor: LLVM's AMDGPU usage guide, "Kernel Descriptor", 64 bytes.
    """

    def __init__(self, blob: bytes):
        sections = _sections(blob)
        symbols = _symbols(blob, sections)
        name = next(name for name in symbols if name.endswith(".kd"))
        self.name = name.removesuffix(".kd")
        descriptor, _ = symbols[name]
        at = _file_offset(blob, descriptor)
        self.lds_bytes, self.scratch_bytes, self.argument_bytes = struct.unpack_from("<III", blob, at)
        (entry,) = struct.unpack_from("<q", blob, at + 16)
        _, rsrc2 = struct.unpack_from("<II", blob, at + 48)
        (properties,) = struct.unpack_from("<H", blob, at + 56)
        self.user_sgprs = rsrc2 >> 1 & 31
        self.workgroup_ids = [axis for axis in range(3) if rsrc2 >> (7 + axis) & 1]
        # Bit 3: the argument address is in the first two user SGPRs; bits 0-2 and 4-6 would put others there.
        if properties & 0x7F != 0x8:
            raise NotImplementedError(f"kernel code properties {properties:#x}: only the argument pointer is modelled")
        code = symbols[self.name]
        start = _file_offset(blob, descriptor + entry)
        # The entry at offset 0 loads its arguments itself; another, 256 bytes on, has them preloaded.
        self.code = blob[start : start + code[1]]

    def pack(self, arguments) -> np.ndarray:
        """The argument block: each argument a (format, value), naturally aligned, zeros after the last.

        Formats are struct's: "Q" address, "q" and "i" integers, "f" float. Triton appends two scratch pointers.
        """
        block = b""
        for form, value in arguments:
            size = struct.calcsize(form)
            block += bytes(-len(block) % size) + struct.pack("<" + form, value)
        if len(block) > self.argument_bytes:
            raise ValueError(f"{len(block)} bytes of arguments for a kernel that takes {self.argument_bytes}")
        return np.frombuffer(block.ljust(self.argument_bytes, b"\0"), np.uint8).copy()


def text_section(blob: bytes) -> bytes:
    """The machine code of an object file, as an assembler makes it."""
    sections = _sections(blob)
    names = sections[struct.unpack_from("<H", blob, 62)[0]]
    for section in sections:
        at = names[4] + section[0]
        if blob[at : blob.index(b"\0", at)] == b".text":
            return blob[section[4] : section[4] + section[5]]
    raise ValueError("the object file has no .text")


def _sections(blob):
    # (name, type, flags, address, offset, size, link, info, alignment, entry size)
    (offset,) = struct.unpack_from("<Q", blob, 40)
    size, count = struct.unpack_from("<HH", blob, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", blob, offset + i * size) for i in range(count)]


def _symbols(blob, sections):
    # name -> (address, size)
    found = {}
    for section in sections:
        if section[1] in (2, 11):  # SYMTAB, DYNSYM
            strings = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", blob, at)
                start = strings + name
                found[blob[start : blob.index(b"\0", start)].decode()] = (value, size)
    return found


def _file_offset(blob, address):
    (offset,) = struct.unpack_from("<Q", blob, 32)
    size, count = struct.unpack_from("<HH", blob, 54)
    for i in range(count):
        kind, _, start, virtual, _, length, _, _ = struct.unpack_from("<IIQQQQQQ", blob, offset + i * size)
        if kind == 1 and virtual <= address < virtual + length:  # PT_LOAD
            return start + address - virtual
    raise ValueError(f"address {address:#x} is in no segment of the file")
