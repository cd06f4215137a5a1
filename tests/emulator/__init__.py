"""A functional emulator of gfx950 (CDNA4) waves in numpy, for running compiled kernels without the hardware.

    decode.py        machine code to instructions (the decoder is tinygrad's, from PyPI)
    code_object.py   the ELF file that a compiler makes: kernel descriptor, code, arguments
    memory.py        device memory: numpy arrays at addresses of their own; any access outside of them raises
    wave.py          one wave's registers, operands and execution loop
    scalar.py        SOP1, SOP2, SOPC, SOPK, SOPP, SMEM
    vector.py        VOP1, VOP2, VOP3, VOPC, VOP3P without matrix products
    mfma.py          matrix products
    vector_memory.py MUBUF, GLOBAL, SCRATCH
    lds.py           DS
    launch.py        a grid of workgroups

It gives what each instruction writes. What it can't show: s_waitcnt (loads are there at once), the wait states that
software owes the hardware after an MFMA or before a permlane swap, races in LDS or between workgroups (waves run one
after the other), the order in which an MFMA rounds its sums (float64 here, rounded once), and time. Anything that is
not modelled raises NotImplementedError with the instruction's name; nothing is guessed.
"""
