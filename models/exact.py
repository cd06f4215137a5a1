"""The measured timings inside a bundle: which shapes were measured, with which configs, and how long each took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidBundleError, InvalidShapeError
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SHAPE_FIELDS, Config, Shape

# Array name: dtype and dimensions, as stored.
ARRAYS: dict[str, tuple[str, int]] = {
    "shapes": ("<i8", 2),  # [shapes, shape fields]; texts as indices into the header's words
    "configs": ("<i8", 2),  # [configs, config fields]; likewise
    "starts": ("<i8", 1),  # [shapes + 1]: where each shape's cells begin
    "config_ids": ("<i4", 1),  # [cells]
    "latency_us": ("<f8", 1),  # [cells]; NaN where the config failed
}
_PAGES = [SHAPE_FIELDS.index(name) for name in ("head_dim", "block_kv", "cache_layout")]
_SHAPE_DISTANCE = ("batch_size", "next_n", "heads", "head_dim", "block_kv", "max_context_len", "mean_context_len")


@dataclass(frozen=True)
class Exact:
    """Timings by shape. Configs and shapes are made into objects when they are asked for: few ever are."""

    words: tuple[str, ...]
    shapes: npt.NDArray[np.int64]
    configs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    config_ids: npt.NDArray[np.int32]
    latency_us: npt.NDArray[np.float64]
    _index: dict[tuple[Any, ...], int] = field(init=False, repr=False, compare=False)
    _place: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.shapes.tolist()
        object.__setattr__(self, "_index", {self._row(row, SHAPE_FIELDS): at for at, row in enumerate(rows)})
        columns = [SHAPE_FIELDS.index(name) for name in _SHAPE_DISTANCE]
        place = np.log2(np.maximum(self.shapes[:, columns], 1).astype(np.float64))
        object.__setattr__(self, "_place", place)

    def __len__(self) -> int:
        return len(self.shapes)

    def find(self, shape: Shape) -> int | None:
        """Which measured shape this is, or None."""
        return self._index.get(tuple(getattr(shape, name) for name in SHAPE_FIELDS))

    def shape(self, index: int) -> Shape:
        """A measured shape."""
        return Shape(*self._row(self.shapes[index].tolist(), SHAPE_FIELDS))

    def times(self, index: int) -> dict[Config, float]:
        """Microseconds by config of one measured shape, in the fixed order of configs; NaN where it failed."""
        cells = slice(int(self.starts[index]), int(self.starts[index + 1]))
        rows = self.configs[self.config_ids[cells]].tolist()
        configs = [Config(*self._row(row, CONFIG_FIELDS)) for row in rows]
        return dict(zip(configs, self.latency_us[cells].tolist(), strict=True))

    def best(self, index: int) -> tuple[Config, float]:
        """The fastest config of one measured shape and its time; the first in order among equals."""
        cells = slice(int(self.starts[index]), int(self.starts[index + 1]))
        at = int(np.nanargmin(self.latency_us[cells]))
        row = self.configs[self.config_ids[cells][at]].tolist()
        return Config(*self._row(row, CONFIG_FIELDS)), float(self.latency_us[cells][at])

    def nearest(self, shape: Shape, count: int, *, same_pages: bool = False) -> list[tuple[int, float]]:
        """The closest measured shapes, nearest first: index, and distance in doublings summed over the sizes.

        `same_pages` leaves out shapes of another head_dim, page size or layout.
        """
        place = np.log2([max(getattr(shape, name), 1) for name in _SHAPE_DISTANCE])
        distance = np.abs(self._place - place).sum(axis=1)
        order = np.argsort(distance, kind="stable")
        if same_pages:
            layout = self.words.index(shape.cache_layout) if shape.cache_layout in self.words else -1
            same = (self.shapes[:, _PAGES] == (shape.head_dim, shape.block_kv, layout)).all(axis=1)
            order = order[same[order]]
        return [(int(at), float(distance[at])) for at in order[:count]]

    def _row(self, row: Sequence[int], fields: Sequence[str]) -> tuple[Any, ...]:
        texts = _TEXT_FIELDS
        return tuple(self.words[value] if name in texts else value for name, value in zip(fields, row, strict=True))

    def header(self) -> dict[str, Any]:
        """What the manifest says about the arrays."""
        return {"shape_fields": list(SHAPE_FIELDS), "config_fields": list(CONFIG_FIELDS), "words": list(self.words)}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, as stored."""
        return {name: getattr(self, name) for name in ARRAYS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> Exact:
        """The table of a stored bundle; InvalidBundleError where the arrays don't fit each other."""
        for name, fields in (("shape_fields", SHAPE_FIELDS), ("config_fields", CONFIG_FIELDS)):
            if header[name] != list(fields):
                raise InvalidBundleError(f"exact {name} must be {list(fields)}, got {header[name]!r}")
        words = header["words"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InvalidBundleError("exact words must be a list of texts")
        shapes, configs, starts = arrays["shapes"], arrays["configs"], arrays["starts"]
        ids, latency = arrays["config_ids"], arrays["latency_us"]
        fits = (
            shapes.shape[1] == len(SHAPE_FIELDS)
            and configs.shape[1] == len(CONFIG_FIELDS)
            and len(starts) == len(shapes) + 1
            and starts[0] == 0
            and starts[-1] == len(ids) == len(latency)
            and bool((np.diff(starts) > 0).all())
            and (len(ids) == 0 or (int(ids.min()) >= 0 and int(ids.max()) < len(configs)))
            and all(
                _known(table, fields, len(words))
                for table, fields in ((shapes, SHAPE_FIELDS), (configs, CONFIG_FIELDS))
            )
            and bool(((latency > 0) & np.isfinite(latency) | np.isnan(latency)).all())
        )
        if not fits:
            raise InvalidBundleError("the exact table's arrays do not fit each other")
        has_time = np.logical_or.reduceat(~np.isnan(latency), starts[:-1]) if len(shapes) else np.ones(0, bool)
        if not has_time.all():
            raise InvalidBundleError("every measured shape needs at least one time")
        table = cls(tuple(words), shapes, configs, starts, ids, latency)
        try:
            for index in range(len(shapes)):
                table.shape(index)
        except InvalidShapeError as error:
            raise InvalidBundleError(f"a measured shape of the exact table is none: {error}") from error
        return table

    @classmethod
    def build(cls, shapes: Sequence[Shape], configs: Sequence[Config], cells: Sequence[Mapping[int, float]]) -> Exact:
        """A table from, for each shape, times by index of config."""
        words = sorted(
            {str(s.cache_layout) for s in shapes}
            | {str(getattr(c, name)) for c in configs for name in _TEXT_FIELDS if name != "cache_layout"}
        )
        code = {word: at for at, word in enumerate(words)}

        def table(items: Sequence[Any], fields: Sequence[str]) -> npt.NDArray[np.int64]:
            rows = [[code[v] if isinstance(v := getattr(i, name), str) else v for name in fields] for i in items]
            return np.array(rows, dtype=np.int64).reshape(len(items), len(fields))

        return cls(
            tuple(words),
            table(shapes, SHAPE_FIELDS),
            table(configs, CONFIG_FIELDS),
            np.cumsum([0, *map(len, cells)]).astype(np.int64),
            np.array([at for times in cells for at in times], dtype=np.int32),
            np.array([us for times in cells for us in times.values()], dtype=np.float64),
        )


_TEXT_FIELDS = frozenset(
    ("cache_layout", *(name for name in CONFIG_FIELDS if isinstance(getattr(Config(), name), str)))
)


def _known(table: npt.NDArray[np.int64], fields: Sequence[str], words: int) -> bool:
    texts = table[:, [at for at, name in enumerate(fields) if name in _TEXT_FIELDS]]
    return bool(((texts >= 0) & (texts < words)).all())
