"""Device memory: numpy arrays at addresses of their own."""

import numpy as np

_GAP = 1 << 36  # between arrays that choose no address: an overrun hits nothing


class Memory:
    """Arrays mapped at 64-bit addresses, far apart. An access outside of them, or across two, raises MemoryError.

    A buffer too large to allocate is mapped as the pieces of it that may be touched (`map_at`): tests of offsets past
    2**31 bytes need no gigabytes, and see it when any other piece is touched.
    """

    def __init__(self):
        self._starts = np.zeros(0, np.int64)
        self._arrays = []
        self._next = _GAP

    def map(self, array: np.ndarray) -> int:
        """Map an array where there is room; returns its address. Addresses are multiples of 256, as allocators give."""
        address = self._next
        self._next += -(-(array.nbytes + _GAP) // 256) * 256
        self.map_at(address, array)
        return address

    def reserve(self, nbytes: int) -> int:
        """An address with room for `nbytes`, of which nothing is mapped yet."""
        address = self._next
        self._next += -(-(nbytes + _GAP) // 256) * 256
        return address

    def map_at(self, address: int, array: np.ndarray) -> None:
        """Map a contiguous array at an address; reads and writes go to the array itself."""
        if not array.flags["C_CONTIGUOUS"]:
            raise ValueError("only contiguous arrays can be mapped")
        at = int(np.searchsorted(self._starts, address))
        self._starts = np.insert(self._starts, at, address)
        self._arrays.insert(at, array.reshape(-1).view(np.uint8))

    def load(self, addresses: np.ndarray, dwords: int) -> np.ndarray:
        """[dwords, lanes] uint32 from each lane's byte address."""
        out = np.zeros((dwords, len(addresses)), np.uint32)
        span = np.arange(4 * dwords)
        for lanes, offsets, array in self._pieces(addresses, 4 * dwords):
            out[:, lanes] = np.ascontiguousarray(array[offsets[:, None] + span]).view(np.uint32).T
        return out

    def load_bytes(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """[lanes] uint32 from 1 or 2 bytes at each lane's address, zero-extended."""
        out = np.zeros(len(addresses), np.uint32)
        for lanes, offsets, array in self._pieces(addresses, count):
            out[lanes] = sum(array[offsets + i].astype(np.uint32) << np.uint32(8 * i) for i in range(count))
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write [dwords, lanes] uint32 to each lane's byte address; of lanes with one address the last wins."""
        if not len(addresses):
            return
        span = np.arange(4 * len(values))
        data = np.ascontiguousarray(values.T).view(np.uint8).reshape(len(addresses), -1)
        for lanes, offsets, array in self._pieces(addresses, 4 * len(values)):
            array[offsets[:, None] + span] = data[lanes]

    def _pieces(self, addresses, size):
        # (lanes, offsets into the array, array) for each array that the lanes touch
        if not len(addresses):
            return
        addresses = addresses.astype(np.int64)
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        for i in np.unique(index):
            lanes = np.flatnonzero(index == i)
            offsets = addresses[lanes] - self._starts[i]
            if i < 0 or int(offsets.max()) + size > len(self._arrays[i]):
                bad = addresses[lanes][int(offsets.argmax())]
                raise MemoryError(f"access to {size} bytes at {bad:#x} is outside every mapped array")
            yield lanes, offsets, self._arrays[i]
