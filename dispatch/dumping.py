"""Every decision over a grid of shapes, with a digest that tells whether two ranks or machines answer alike."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tilewise.data.output import write_output
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidConfigError
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, HEADS, MAX_NEXT_N, SHAPE_FIELDS, Shape

DIGITS = 6  # significant digits of times: sums and exponentials differ in the last bits from machine to machine
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CONTEXTS = tuple(round(512 * 2 ** (step / 2)) for step in range(21))  # 512 to 524288


@dataclass(frozen=True, slots=True)
class Dump:
    """What a dump came to."""

    op: str
    arch: str
    model_id: str | None
    shapes: int
    digest: str  # 64 hex digits over the decisions
    sources: dict[str, int]  # rung to shapes that it answered
    unserved: int  # shapes for which there is no kernel

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def shape_grid(
    *,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    next_n: Iterable[int] = range(1, MAX_NEXT_N + 1),
    heads: Iterable[int] = HEADS,
    contexts: Iterable[int] = CONTEXTS,
    head_dim: int = 128,
    block_kv: int = 64,
) -> Iterator[Shape]:
    """The grid that is dumped by default: 24 batch sizes, 8 of next_n, 5 head counts, 21 contexts; 20,160 shapes."""
    contexts, heads, next_n = tuple(contexts), tuple(heads), tuple(next_n)
    for batch_size in batch_sizes:
        for tokens in next_n:
            for count in heads:
                for length in contexts:
                    yield Shape(batch_size, tokens, count, head_dim, block_kv, length)


def decisions(chooser: Selector, shapes: Iterable[Shape]) -> Iterator[dict[str, Any]]:
    """One row a shape, in the order given: its fields, `config`, `source`, `regime`, and `predicted_us`, rounded.

    `config` is null where no kernel serves the shape. Reasons are left out: they name what is installed on a machine.
    """
    for shape in shapes:
        row = {name: getattr(shape, name) for name in SHAPE_FIELDS}
        try:
            found = chooser.weigh(shape)
        except InvalidConfigError:
            yield {**row, "config": None, "source": None, "regime": None, "predicted_us": None}
            continue
        config, time = found.configs[found.chosen], found.time_of(found.chosen)
        yield {
            **row,
            "config": {name: getattr(config, name) for name in CONFIG_FIELDS},
            "source": found.source,
            "regime": found.regime,
            "predicted_us": None if time is None else float(f"{time:.{DIGITS}g}"),
        }


def dump(chooser: Selector, shapes: Iterable[Shape] | None = None, path: str | os.PathLike[str] | None = None) -> Dump:
    """Decide for every shape, in a fixed order, and write the rows to `path` as JSON lines if there is one.

    The digest covers op, GPU, model and rows; it does not depend on the order or the repetitions of the shapes given.
    """
    ordered = sorted(set(shape_grid() if shapes is None else shapes), key=_order)
    digest = hashlib.sha256(json.dumps([chooser.op, chooser.arch.name, chooser.model_id]).encode())
    sources: dict[str, int] = {}
    unserved = 0

    def lines() -> Iterator[str]:
        nonlocal unserved
        for row in decisions(chooser, ordered):
            line = json.dumps(row, separators=(",", ":")) + "\n"
            digest.update(line.encode())
            unserved += row["config"] is None
            if row["source"] is not None:
                sources[row["source"]] = sources.get(row["source"], 0) + 1
            yield line

    if path is None:
        for _ in lines():
            pass
    else:
        write_output(path, lines())
    model = (chooser.op, chooser.arch.name, chooser.model_id)
    return Dump(*model, len(ordered), digest.hexdigest(), dict(sorted(sources.items())), unserved)


def _order(shape: Shape) -> tuple[Any, ...]:
    return tuple(getattr(shape, name) for name in SHAPE_FIELDS)
