"""LDS loads and stores."""

import numpy as np

_DWORDS = {"B32": 1, "B64": 2, "B96": 3, "B128": 4}


def _ds(wave, inst):
    f = inst.fields
    inst.require_zero("gds")
    operation, _, size = inst.name.removeprefix("DS_").partition("_")
    if operation not in ("READ", "WRITE") or size not in _DWORDS:
        raise inst.unsupported()
    dwords = _DWORDS[size]
    start = wave.vgprs[f["addr"]].astype(np.int64)[wave.exec] + (f["offset1"] << 8 | f["offset0"])
    if len(start) and (start.min() < 0 or start.max() + 4 * dwords > len(wave.lds)):
        raise MemoryError(f"LDS access at {start} is outside of {len(wave.lds)} bytes")
    where = start[:, None] + np.arange(4 * dwords)
    if operation == "WRITE":
        data = wave.registers(f.get("acc"))[f["data0"] : f["data0"] + dwords, wave.exec]
        wave.lds[where] = np.ascontiguousarray(data.T).view(np.uint8).reshape(len(start), -1)
    else:
        data = np.ascontiguousarray(wave.lds[where]).view(np.uint32).reshape(len(start), dwords).T
        wave.registers(f.get("acc"))[f["vdst"] : f["vdst"] + dwords, wave.exec] = data


ENCODINGS = {"DS": _ds}
