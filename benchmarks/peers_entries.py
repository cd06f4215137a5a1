"""The launches that benchmarks/peers.py measures: names, shapes and context lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tilewise.kernels.paged_mqa_logits.spec import Shape, cdiv
from tilewise.kernels.shape_sets import Target, draw_contexts

HEADS = (64, 32)
CONTEXTS = {"128k": 131072, "32k": 32768, "4k": 4096}
BATCH_SIZES = (64, 16, 1)
NEXT_NS = (6, 4, 2, 1)
# Distribution and its longest context. Log-uniform from 1k on belongs to the main table, the others do not.
RAGGED = {"log_uniform": 131072, "within_half": 49152, "half_empty": 65536}
GROUPS = ("main", "odd", "ragged", "even_pages")


@dataclass(frozen=True)
class Entry:
    """One launch to measure."""

    name: str  # heads/context/batch_size/next_n
    group: str  # one of GROUPS
    target: Target
    twin: str = ""  # of a ragged batch: the entry of a uniform batch with as many pages

    @property
    def shape(self) -> Shape:
        return self.target.shape


def base_row(entry: Entry, attempt: int) -> dict[str, Any]:
    """The columns that say which launch a row is of."""
    shape = entry.shape
    return {
        "name": entry.name,
        "group": entry.group,
        "attempt": attempt,
        "heads": shape.heads,
        "next_n": shape.next_n,
        "batch_size": shape.batch_size,
        "contexts": entry.target.contexts,
        "max_context_len": shape.max_context_len,
        "mean_context_len": shape.mean_context_len,
    }


def entries() -> list[Entry]:
    """All of them, in an order that keeps what is compared close together in time."""
    found: list[Entry] = []
    for heads in HEADS:
        for label, context in CONTEXTS.items():
            for batch_size in BATCH_SIZES:
                large = (label, batch_size) in (("32k", 64), ("128k", 16))
                for next_n in (8, 7, 6, 5, 4, 3, 2, 1) if large else NEXT_NS:
                    group = "main" if next_n in NEXT_NS else "odd"
                    found.append(_uniform(heads, label, batch_size, next_n, context, group))
        for distribution in RAGGED:
            for next_n in NEXT_NS:
                ragged = _ragged(heads, distribution, 64, next_n)
                pages = sum(cdiv(length, 64) for length in ragged.target.context_lens)
                context = cdiv(pages, 64) * 64
                twin = _uniform(heads, f"{context}", 64, next_n, context, "even_pages")
                found += [dataclasses.replace(ragged, twin=twin.name), twin]
    return found


def _uniform(heads: int, label: str, batch_size: int, next_n: int, context: int, group: str) -> Entry:
    shape = Shape(batch_size, next_n, heads, 128, 64, context)
    name = f"{heads}/{label}/{batch_size}/{next_n}"
    return Entry(name, group, Target(shape, (context,) * batch_size, "uniform"))


def _ragged(heads: int, distribution: str, batch_size: int, next_n: int) -> Entry:
    lens = draw_contexts(distribution, batch_size, RAGGED[distribution], 0)
    shape = Shape(batch_size, next_n, heads, 128, 64, max(lens), sum(lens) // batch_size)
    group = "main" if distribution == "log_uniform" else "ragged"
    return Entry(f"{heads}/{distribution}/{batch_size}/{next_n}", group, Target(shape, lens, distribution))
