"""Buffer, global and scratch loads and stores of vector registers."""

import numpy as np

from .bits import MASK64, signed

_DWORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX3": 3, "DWORDX4": 4}
_NARROW = {"UBYTE": 1, "USHORT": 2}  # zero-extending loads


def _size(inst):
    """(dwords, bytes of a narrow load) of an access; one of them is 0."""
    suffix = inst.name.split("_")[-1]
    if suffix in _DWORDS:
        return _DWORDS[suffix], 0
    if suffix in _NARROW and "_LOAD_" in inst.name:
        return 0, _NARROW[suffix]
    raise inst.unsupported()


def _access(wave, inst, addresses, active, register):
    """Move registers from or to each active lane's address."""
    dwords, narrow = _size(inst)
    registers = wave.registers(inst.fields.get("acc"))
    if "_STORE_" in inst.name:
        wave.memory.store(addresses[active], registers[register : register + dwords, active])
    elif narrow:
        registers[register, active] = wave.memory.load_bytes(addresses[active], narrow)
    else:
        registers[register : register + dwords, active] = wave.memory.load(addresses[active], dwords)


def _mubuf(wave, inst):
    f = inst.fields
    inst.require_zero("idxen", "lds")
    if not inst.name.startswith(("BUFFER_LOAD_", "BUFFER_STORE_")):
        raise inst.unsupported()
    dwords, narrow = _size(inst)
    descriptor = f["srsrc"] * 4
    base = wave.read_sgpr64(descriptor) & (1 << 48) - 1
    stride = wave.sgprs[descriptor + 1] >> 16 & 0x3FFF
    if stride or wave.sgprs[descriptor + 1] >> 31:
        raise inst.unsupported("a descriptor with a stride or swizzle")
    records = wave.sgprs[descriptor + 2]
    offset = np.full(64, f["offset"], np.int64)
    if f["offen"]:
        offset = offset + wave.vgprs[f["vaddr"]].astype(np.int64)
    size = 4 * dwords or narrow
    inside = offset + size <= records
    if (wave.exec & ~inside & (offset < records)).any():
        raise inst.unsupported("an access that straddles the end of the buffer")
    active = wave.exec & inside
    # Outside of the buffer, loads give 0 and stores do nothing.
    if "_LOAD_" in inst.name:
        wave.registers(f["acc"])[f["vdata"] : f["vdata"] + max(dwords, 1), wave.exec & ~inside] = 0
    addresses = offset + base + wave.scalar(f["soffset"], inst)
    _access(wave, inst, addresses, active, f["vdata"])


def _global(wave, inst):
    f = inst.fields
    if not inst.name.startswith(("GLOBAL_LOAD_", "GLOBAL_STORE_")):
        raise inst.unsupported()
    offset = np.uint64(signed(f["offset"], 13) & MASK64)
    if f["saddr"] < 106:
        addresses = wave.vgprs[f["addr"]].astype(np.uint64) + np.uint64(wave.read_sgpr64(f["saddr"]))
    elif f["saddr"] == 127:  # off
        addresses = wave.vector64(f["addr"] + 256, inst)
    else:
        raise inst.unsupported(f"scalar address {f['saddr']}")
    _access(wave, inst, addresses + offset, wave.exec, f["data"] if "_STORE_" in inst.name else f["vdst"])


def _scratch(wave, inst):
    # Private memory of a lane: offset + an address from one register, scalar or vector.
    f = inst.fields
    dwords, narrow = _size(inst)
    if narrow:
        raise inst.unsupported()
    offset = np.full(64, signed(f["offset"], 13), np.int64)
    if f["sve"]:
        offset += wave.vgprs[f["addr"]].astype(np.int64)
    if f["saddr"] < 106:
        offset += wave.sgprs[f["saddr"]]
    elif f["saddr"] != 127:
        raise inst.unsupported(f"scalar address {f['saddr']}")
    lanes = np.flatnonzero(wave.exec)
    if len(lanes) and (offset[lanes].min() < 0 or offset[lanes].max() + 4 * dwords > wave.scratch.shape[1]):
        raise MemoryError(f"scratch access at {offset[lanes]} is outside of {wave.scratch.shape[1]} bytes")
    where = (lanes[:, None], offset[lanes][:, None] + np.arange(4 * dwords))
    registers = wave.registers(f["acc"])
    if "_STORE_" in inst.name:
        data = registers[f["data"] : f["data"] + dwords, lanes]
        wave.scratch[where] = np.ascontiguousarray(data.T).view(np.uint8).reshape(len(lanes), -1)
    else:
        data = np.ascontiguousarray(wave.scratch[where]).view(np.uint32).T
        registers[f["vdst"] : f["vdst"] + dwords, lanes] = data


ENCODINGS = {"MUBUF": _mubuf, "GLOBAL": _global, "SCRATCH": _scratch}
