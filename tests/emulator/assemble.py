"""Assembly text to the emulator, by the assembler inside Triton: for tests of single instructions."""

import functools

import numpy as np

from .code_object import text_section
from .decode import decode
from .memory import Memory
from .wave import Wave


@functools.cache
def assemble(text: str) -> bytes:
    """The machine code of some gfx950 instructions."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    source = f".text\n{text}\ns_endpgm\n"
    try:
        blob = amd.assemble_amdgcn(source, "gfx950", "")
    except TypeError:  # Triton 3.9 wants the target triple, too
        blob = amd.assemble_amdgcn(source, "amdgcn-amd-amdhsa", "gfx950", "")
    return text_section(bytes(blob))


def execute(
    text, v=None, s=None, *, a=None, exec_mask=(1 << 64) - 1, scc=0, memory=None, lds_bytes=256, **state
) -> Wave:
    """Run instructions from given registers: numbers (a lane's value in all lanes) or 64 of them."""
    wave = Wave(decode(assemble(text)), memory or Memory(), np.zeros(lds_bytes, np.uint8), scratch_bytes=64)
    for registers, file in ((v or {}, wave.vgprs), (a or {}, wave.agprs)):
        for register, value in registers.items():
            file[register] = np.asarray(value).astype(np.int64).astype(np.uint32)
    for register, value in (s or {}).items():
        wave.write_sgpr(register, value)
    wave.scc = scc
    for name, value in state.items():
        setattr(wave, name, value)
    wave.set_exec(exec_mask)
    with np.errstate(all="ignore"):
        wave.run()
    return wave
