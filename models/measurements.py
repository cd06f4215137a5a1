"""Profile rows as one compact table of cells: what each config took for each shape, in each pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError, UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SHAPE_FIELDS, Config, Shape
from tilewise.kernels.registry import kernel_source_hash
from tilewise.models.merging import contradicted, of_another_compiler

FIRST, SECOND, DUEL = 0, 1, 2  # pass_index; a duel is of a few configs, replayed in turn
TOOLCHAIN = ("triton_version", "torch_version", "runtime", "driver")  # columns: what else the timings depend on

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measurements:
    """One cell per shape and config that was tried, sorted by shape, then by config.

    A time is the geometric mean of the medians of its rows; NaN where no row has one. `first_us` and `second_us` are
    that over the rows of pass 0 and of pass 1. `latency_us` is it over all rows, duels too, after each later pass of a
    shape was scaled to agree with the first one on the configs that both have: clocks drift between passes, and a pass
    that has only some of the configs must not move those against the others.
    """

    op: str
    arch: str
    shapes: tuple[Shape, ...]
    configs: tuple[Config, ...]  # in their own order, which breaks ties
    shape_id: Ints  # [cells]
    config_id: Ints  # [cells]
    latency_us: Floats  # [cells]
    first_us: Floats
    second_us: Floats
    kernel_hashes: Mapping[str, str]  # kernel to the source hash of the rows that were kept
    rows: int  # kept
    dropped: Mapping[str, int]  # reason to rows that were not used
    toolchain: Mapping[str, list[str]]  # column of TOOLCHAIN to the versions in the rows that were kept, sorted
    # Of each shape that has duels, the microseconds of each config_id in it, one mapping a run.
    duels: Mapping[int, tuple[Mapping[int, float], ...]] = dataclasses.field(default_factory=dict)

    def cells(self, shape_id: int) -> slice:
        """The cells of one shape."""
        low, high = np.searchsorted(self.shape_id, [shape_id, shape_id + 1])
        return slice(int(low), int(high))

    def subset(self, shape_ids: Ints) -> Measurements:
        """The same with only the cells of some shapes; ids stay."""
        keep = np.isin(self.shape_id, shape_ids)
        cells = ("shape_id", "config_id", "latency_us", "first_us", "second_us")
        return dataclasses.replace(self, **{name: getattr(self, name)[keep] for name in cells})


def measurements(columns: Mapping[str, Sequence[Any]], *, op: str, arch: str) -> Measurements:
    """Cells from the columns of a profile (data/records.py).

    Rows of another op or arch, of an unknown kernel, of a stale kernel source, not timed cold in a graph, or overruled
    by others of the same launch (merging.py) are left out and counted. Where no row has the installed source of a
    kernel, the source with the most rows stands in: the selector will call that bundle stale, by name.
    Raises InvalidProfileError where no usable row is left.
    """
    total = len(columns["op"])
    table = {name: np.asarray(columns[name]) for name in ("op", "arch", "kernel", "kernel_hash", "status")}
    keep = np.ones(total, bool)
    dropped: Counter[str] = Counter()

    def drop(reason: str, bad: npt.NDArray[np.bool_]) -> None:
        if count := int((bad & keep).sum()):
            dropped[reason] += count
        keep[bad] = False

    drop(f"op is not {op}", table["op"] != op)
    drop(f"arch is not {arch}", table["arch"] != arch)
    timed = table["status"] == "correct"
    drop("not a cold graph replay", timed & ~_cold_graph(columns))
    hashes: dict[str, str] = {}
    for kernel in sorted(set(table["kernel"][keep].tolist())):
        of_kernel = table["kernel"] == kernel
        current = installed_hash(kernel)
        if current is None:
            drop(f"unknown kernel {kernel}", of_kernel)
            continue
        counts = Counter(table["kernel_hash"][of_kernel & keep].tolist())
        chosen = current if current in counts else max(counts, key=lambda h: (counts[h], h))
        hashes[kernel] = chosen
        drop(f"stale source of kernel {kernel}", of_kernel & (table["kernel_hash"] != chosen))
    if not (keep & timed).any():
        raise InvalidProfileError(
            f"no usable timing of {op} on {arch} among {total} rows; left out: {dict(dropped) or 'nothing'}"
        )
    at = np.flatnonzero(keep)
    cell = _cell_of(columns, at)
    other = of_another_compiler(columns, at, cell)
    times = np.array([columns["latency_us"][i] for i in at.tolist()], dtype=np.float64)
    times[~timed[at] | other] = np.nan
    for reason, bad in (
        ("of another compiler than later rows of the launch", other),
        ("contradicted by a later run", contradicted(columns, at, cell, times)),
    ):
        if bad.any():
            dropped[reason] += int(bad.sum())
            keep[at[bad]] = False
    at = np.flatnonzero(keep)
    toolchain = {name: sorted({str(columns[name][i] or "unknown") for i in at.tolist()}) for name in TOOLCHAIN}
    shapes, shape_id = _unique(columns, SHAPE_FIELDS, at, Shape)
    configs, config_id = _unique(columns, CONFIG_FIELDS, at, Config)
    latency = np.array([columns["latency_us"][i] for i in at.tolist()], dtype=np.float64)  # None becomes NaN
    latency[~timed[at]] = np.nan
    pass_index = np.asarray(columns["pass_index"])[at]
    run_id = np.array([str(columns["run_id"][i]) for i in at.tolist()])

    cell = shape_id * len(configs) + config_id
    cells, inverse = np.unique(cell, return_inverse=True)
    log = np.log(latency)

    def mean(use: npt.NDArray[np.bool_], values: Floats) -> Floats:
        use = use & ~np.isnan(values)
        total_log = np.bincount(inverse[use], weights=values[use], minlength=len(cells))
        count = np.bincount(inverse[use], minlength=len(cells))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.exp(total_log / count), dtype=np.float64)

    first = mean(pass_index == FIRST, log)
    second = mean(pass_index == SECOND, log)
    every = mean(np.ones(len(at), bool), _aligned(log, np.log(first)[inverse], shape_id, pass_index, run_id))
    return Measurements(
        op,
        arch,
        shapes,
        configs,
        cells // len(configs),
        cells % len(configs),
        every,
        first,
        second,
        hashes,
        len(at),
        dict(dropped),
        toolchain,
        _duels(columns, at, shape_id, config_id, latency),
    )


def _duels(
    columns: Mapping[str, Sequence[Any]], at: Ints, shape_id: Ints, config_id: Ints, latency_us: Floats
) -> dict[int, tuple[dict[int, float], ...]]:
    """Times of the same duel, which may be compared: of one shape in one run."""
    timed = (np.asarray(columns["pass_index"])[at] >= DUEL) & ~np.isnan(latency_us)
    times: dict[int, dict[str, dict[int, list[float]]]] = {}
    for row in np.flatnonzero(timed).tolist():
        run = times.setdefault(int(shape_id[row]), {}).setdefault(str(columns["run_id"][at[row]]), {})
        run.setdefault(int(config_id[row]), []).append(float(latency_us[row]))
    return {
        shape: tuple(
            {config: float(np.exp(np.log(us).mean())) for config, us in runs[run].items()} for run in sorted(runs)
        )
        for shape, runs in times.items()
    }


def _cell_of(columns: Mapping[str, Sequence[Any]], at: Ints) -> Ints:
    """[rows] a number for each launch, the same for rows of the same shape and config."""
    found: dict[tuple[Any, ...], int] = {}
    picked = [np.asarray(columns[name])[at].tolist() for name in (*SHAPE_FIELDS, *CONFIG_FIELDS)]
    return np.fromiter((found.setdefault(row, len(found)) for row in zip(*picked, strict=True)), np.int64, len(at))


def _aligned(log: Floats, first: Floats, shape_id: Ints, pass_index: Ints, run_id: npt.NDArray[np.str_]) -> Floats:
    """[rows] log times with each later pass of each shape, in each run, shifted to the first one."""
    shifted = log.copy()
    keys = sorted(set(zip(pass_index.tolist(), run_id.tolist(), strict=True)))
    for number, run in keys:
        if number == FIRST:
            continue
        of_pass = np.flatnonzero((pass_index == number) & (run_id == run))
        for shape in np.unique(shape_id[of_pass]):
            rows = of_pass[shape_id[of_pass] == shape]
            gap = log[rows] - first[rows]
            gap = gap[~np.isnan(gap)]
            if len(gap):
                shifted[rows] -= np.median(gap)
    return shifted


def installed_hash(kernel: str) -> str | None:
    """Source hash of a kernel as installed; None for one that this installation does not have."""
    try:
        return kernel_source_hash(kernel)
    except (UnsupportedError, OSError):
        return None


def _cold_graph(columns: Mapping[str, Sequence[Any]]) -> npt.NDArray[np.bool_]:
    graph = np.asarray(columns["timing_method"]) == "graph"
    return np.asarray(graph & (np.asarray(columns["cache_state"]) == "cold"), dtype=np.bool_)


def _unique(
    columns: Mapping[str, Sequence[Any]], fields: Sequence[str], at: Ints, make: type
) -> tuple[tuple[Any, ...], Ints]:
    """The distinct objects among some rows, in a fixed order, and which one each row has."""
    found: dict[tuple[Any, ...], int] = {}
    picked = [np.asarray(columns[name])[at].tolist() for name in fields]
    ids = np.fromiter((found.setdefault(row, len(found)) for row in zip(*picked, strict=True)), np.int64, len(at))
    order = sorted(found)
    place = {row: new for new, row in enumerate(order)}
    renumber = np.array([place[row] for row in found], dtype=np.int64)
    return tuple(make(**dict(zip(fields, row, strict=True))) for row in order), renumber[ids]
