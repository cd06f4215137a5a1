"""Numbers that every part of the emulator shares."""

import numpy as np

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
VCC, EXEC = 106, 126  # scalar register numbers of the two lane masks


def signed(value: int, bits: int = 32) -> int:
    """The low `bits` bits as a two's complement number."""
    return (value & (1 << bits) - 1) - ((value >> bits - 1 & 1) << bits)


def as_float(x: np.ndarray) -> np.ndarray:
    """uint32 bits as float32."""
    return x.view(np.float32)


def as_bits(x: np.ndarray) -> np.ndarray:
    """float32 values as uint32 bits."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def as_int(x: np.ndarray) -> np.ndarray:
    """uint32 bits as int32."""
    return x.view(np.int32)
