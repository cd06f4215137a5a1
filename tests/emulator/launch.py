"""A grid of workgroups, one after the other, wave by wave between barriers."""

import numpy as np

from .code_object import CodeObject
from .decode import decode
from .memory import Memory
from .wave import Wave


def launch(kernel: CodeObject, memory: Memory, programs, num_warps: int, arguments, lds_bytes: int = 0) -> int:
    """Run workgroups of `num_warps` waves; returns the number of wave-instructions.

    programs   how many along x, or a list of those to run
    arguments  (format, value) pairs, see CodeObject.pack; addresses are those of `memory`
    """
    program = decode(kernel.code)
    block = kernel.pack(arguments)
    address = memory.map(block)
    executed = 0
    with np.errstate(all="ignore"):  # overflow and NaN are values here
        for workgroup in range(programs) if isinstance(programs, int) else programs:
            lds = np.zeros(max(lds_bytes, kernel.lds_bytes), np.uint8)
            waves = []
            for index in range(num_warps):
                wave = Wave(program, memory, lds, scratch_bytes=kernel.scratch_bytes)
                wave.write_sgpr64(0, address)
                for i, axis in enumerate(kernel.workgroup_ids):
                    wave.sgprs[kernel.user_sgprs + i] = workgroup if axis == 0 else 0
                wave.vgprs[0] = np.arange(64) + 64 * index  # x of the work-item; y and z, packed above it, are 0
                waves.append(wave)
            while not all(wave.ended for wave in waves):
                for wave in waves:
                    if not wave.ended:
                        wave.run()
            executed += sum(wave.executed for wave in waves)
    return executed
