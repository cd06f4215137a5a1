"""Which rows count where several speak of the same launch. The rule is told in docs/retraining.md.

1. Of another compiler: what a launch takes depends on the compiler of its kernel. The newest one of each kernel is that
   of its row measured last. A row of another compiler counts only where the newest one has no time of that launch.
2. Of another run: rows of one launch in one pass, from runs whose times differ by more than CONTRADICTION, contradict
   each other, as clocks or co-tenants do not explain. Then the run measured last counts. Others are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CONTRADICTION = 0.10  # ratio less 1 of two runs' times

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def newest_compilers(columns: Mapping[str, Sequence[Any]], at: Ints) -> dict[str, str]:
    """The Triton version of each kernel's row that was measured last, among some rows."""
    found: dict[str, tuple[str, str]] = {}
    for i in at.tolist():
        moment = (str(columns["measured_at"][i])[:19], str(columns["triton_version"][i] or ""))
        kernel = str(columns["kernel"][i])
        if moment > found.get(kernel, ("", "")):
            found[kernel] = moment
    return {kernel: version for kernel, (_, version) in found.items()}


def of_another_compiler(columns: Mapping[str, Sequence[Any]], at: Ints, cell: Ints) -> Mask:
    """[rows] whether a row of `at` is of another compiler than its kernel's newest, which has that launch, too."""
    newest = newest_compilers(columns, at)
    current = np.array(
        [str(columns["triton_version"][i] or "") == newest[str(columns["kernel"][i])] for i in at.tolist()], dtype=bool
    )
    return np.asarray(~current & np.isin(cell, cell[current]))


def contradicted(
    columns: Mapping[str, Sequence[Any]], at: Ints, cell: Ints, latency_us: npt.NDArray[np.float64]
) -> Mask:
    """[rows] whether a later run contradicts a row of `at`; `latency_us` is NaN for rows without a time."""
    bad = np.zeros(len(at), bool)
    key = cell * 4 + np.asarray(columns["pass_index"])[at]
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(key[order]) > 0]))
    sizes = np.diff(np.concatenate([starts, [len(order)]]))
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        rows = order[start : start + size]
        runs: dict[str, list[int]] = defaultdict(list)
        for row in rows.tolist():
            if not np.isnan(latency_us[row]):
                runs[str(columns["run_id"][at[row]])].append(row)
        if len(runs) < 2:
            continue
        typical = [float(np.exp(np.log(latency_us[own]).mean())) for own in runs.values()]
        if max(typical) <= min(typical) * (1.0 + CONTRADICTION):
            continue
        last = max(runs, key=lambda run: (max(str(columns["measured_at"][at[row]])[:19] for row in runs[run]), run))
        bad[[row for run, own in runs.items() if run != last for row in own]] = True
    return bad
