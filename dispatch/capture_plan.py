"""What to compile and load before graphs are captured: few kernels that serve every batch size well.

`split_kv` is an argument of a launch, not of a kernel: configs that differ in nothing else are one binary, which is
what takes seconds to compile and load. So the plan is a small set of binaries, and for each batch size the one to
launch and its split. The defaults' binaries are loaded in any case, since a launch falls back to them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.output import write_output
from tilewise.dispatch.context import Context, ContextLike, check_worst_case
from tilewise.dispatch.over_contexts import ContextTimes, context_times
from tilewise.dispatch.selector import Selector, selector
from tilewise.errors import InvalidContextError, InvalidPlanError, InvalidShapeError, TilewiseError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import MAX_CONTEXT_LEN, Config, Shape, default_config
from tilewise.models.choice import first_best
from tilewise.models.expected import WORST_CASE, choose_expected

FORMAT, FORMAT_VERSION = "tilewise-capture-plan", 1
MAX_LOSS = 0.02  # of expected time, against the best config for the batch size alone
SHORTEST_CONTEXT = 1024  # where a plan is asked for without contexts
MOST_COMBINATIONS = 200_000  # tried to find a smaller set than the greedy one


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """What one batch size launches, at every context."""

    shape: Shape  # at the longest context
    config: Config
    default: Config
    expected_us: float | None  # over the contexts; None where nothing is known
    loss: float | None  # expected time over that of the best config for this batch size alone, less 1
    worst_case: float | None  # of the contexts, time over that of the best config there


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Launches to capture, and the binaries that they need. `tilewise.warm_up` takes it."""

    op: str
    arch: str
    model_id: str | None
    context: Context
    max_loss: float
    planned: tuple[PlannedLaunch, ...]
    binaries: tuple[Config, ...]  # beside the defaults' own; split_kv is that of the first launch that uses one
    optimal: bool  # whether no smaller set is within the loss; False where too many sets were left to try

    def launches(self) -> Iterator[tuple[Shape, Config]]:
        """Everything to prepare: each launch, and its default."""
        for one in self.planned:
            yield one.shape, one.config
            yield one.shape, one.default

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "op": self.op,
            "arch": self.arch,
            "model_id": self.model_id,
            "context": self.context.to_dict(),
            "max_loss": self.max_loss,
            "planned": [
                {
                    "shape": one.shape.to_dict(),
                    "config": one.config.to_dict(),
                    "default": one.default.to_dict(),
                    "expected_us": one.expected_us,
                    "loss": one.loss,
                    "worst_case": one.worst_case,
                }
                for one in self.planned
            ],
            "binaries": [config.to_dict() for config in self.binaries],
            "optimal": self.optimal,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CapturePlan:
        """What `to_dict` wrote. Raises InvalidPlanError for anything else."""
        try:
            if (values["format"], values["format_version"]) != (FORMAT, FORMAT_VERSION):
                raise InvalidPlanError(
                    f"a plan must be of format {FORMAT} {FORMAT_VERSION}, got {values['format']!r:.50} "
                    f"{values['format_version']!r:.20}"
                )
            planned = tuple(
                PlannedLaunch(
                    Shape(**one["shape"]),
                    Config.from_dict(one["config"]),
                    Config.from_dict(one["default"]),
                    *(
                        None if one[name] is None else float(one[name])
                        for name in ("expected_us", "loss", "worst_case")
                    ),
                )
                for one in values["planned"]
            )
            return cls(
                str(values["op"]),
                str(values["arch"]),
                None if values["model_id"] is None else str(values["model_id"]),
                Context.from_dict(values["context"]),
                float(values["max_loss"]),
                planned,
                tuple(Config.from_dict(config) for config in values["binaries"]),
                bool(values["optimal"]),
            )
        except InvalidPlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, TilewiseError) as error:
            raise InvalidPlanError(f"this is no capture plan: {type(error).__name__}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, which `load` reads, whole or not at all."""
        write_output(path, [json.dumps(self.to_dict(), indent=1) + "\n"])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CapturePlan:
        """The plan in a file. Raises InvalidPlanError for a file that is none."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidPlanError(f"{path} cannot be read as a capture plan: {error}") from error
        if not isinstance(values, dict):
            raise InvalidPlanError(f"{path} must hold an object, got {type(values).__name__}")
        return cls.from_dict(values)


def capture_plan(
    batch_sizes: Sequence[int],
    *,
    next_n: int | Sequence[int],
    heads: int,
    max_model_len: int,
    context: ContextLike | None = None,
    head_dim: int = 128,
    block_kv: int = 64,
    cache_layout: str = "flat",
    max_loss: float = MAX_LOSS,
    worst_case: float = WORST_CASE,
    arch: Arch | str | None = None,
    chooser: Selector | None = None,
) -> CapturePlan:
    """The fewest binaries with which every batch size stays within `max_loss` of its own best config.

    `context` says which lengths come, as for `select`; left out, they are from SHORTEST_CONTEXT to max_model_len. A
    batch size for which nothing is known, or which lies beyond what was measured, gets its default.
    Raises InvalidShapeError, InvalidContextError or InvalidConfigError for a setup that cannot be.
    """
    chooser = chooser or selector(arch)
    known = chooser.knowledge
    lengths = _contexts(context, max_model_len)
    if isinstance(max_loss, bool) or not isinstance(max_loss, int | float) or not 0.0 <= max_loss < math.inf:
        raise InvalidContextError(f"max_loss must be a number of at least 0, got {max_loss!r:.50}")
    check_worst_case(worst_case)
    tokens = [next_n] if isinstance(next_n, int) else list(next_n)
    if not batch_sizes or not tokens:
        raise InvalidShapeError("a plan needs at least one batch size and one next_n")
    shapes = [
        Shape(batch_size, n, heads, head_dim, block_kv, lengths.longest, None, cache_layout)  # type: ignore[arg-type]
        for n in dict.fromkeys(tokens)
        for batch_size in dict.fromkeys(batch_sizes)
    ]
    found = [context_times(shape, lengths, chooser.arch, known, use_exact=chooser.use_exact) for shape in shapes]
    options = [_options(one, lengths, max_loss, worst_case) for one in found]
    free = {_binary(default_config(shape, chooser.arch)) for shape in shapes}
    chosen, optimal = _cover([set(own) for own in options], free)
    planned = tuple(_planned(one, own, chosen | free, lengths) for one, own in zip(found, options, strict=True))
    binaries: dict[Config, Config] = {}
    for launch in planned:
        if _binary(launch.config) not in free:
            binaries.setdefault(_binary(launch.config), launch.config)
    return CapturePlan(
        chooser.op, chooser.arch.name, chooser.model_id, lengths, float(max_loss), planned,
        tuple(binaries.values()), optimal,
    )  # fmt: skip


def _contexts(context: ContextLike | None, max_model_len: int) -> Context:
    if type(max_model_len) is not int or not 1 <= max_model_len <= MAX_CONTEXT_LEN:
        raise InvalidContextError(f"max_model_len must be 1 to {MAX_CONTEXT_LEN}, got {max_model_len!r:.50}")
    if context is None:
        return Context.range(min(SHORTEST_CONTEXT, max_model_len), max_model_len)
    lengths = Context.of(context)
    if lengths.longest > max_model_len:
        raise InvalidContextError(f"contexts must be at most max_model_len ({max_model_len}), got {lengths.longest}")
    return lengths


def _binary(config: Config) -> Config:
    """What configs that share a binary have in common."""
    return config if config.split_kv == 1 else dataclasses.replace(config, split_kv=1)


# Of one shape, by binary: index of the config to launch with it.
_Options = dict[Config, int]


def _options(found: ContextTimes, context: Context, max_loss: float, worst_case: float) -> _Options:
    """The binaries that serve a shape within the loss and the bound, each with its best split."""
    if found.undecided or np.isnan(found.times).any(axis=0).all():
        return {_binary(found.configs[found.default]): found.default}
    choice = choose_expected(found.configs, found.times, context.weights, found.default, found.margin, worst_case)
    bound = max(worst_case, float(choice.worst_case[choice.chosen])) * (1.0 + 1e-9)
    good = choice.expected_us <= choice.expected_us[choice.chosen] * (1.0 + max_loss)
    good &= choice.worst_case <= bound
    good[choice.chosen] = True
    splits: dict[Config, list[int]] = {}
    for at in np.flatnonzero(good).tolist():
        splits.setdefault(_binary(found.configs[at]), []).append(at)
    options = {}
    for binary, own in splits.items():
        best = first_best([found.configs[at] for at in own], choice.expected_us[own])
        assert best is not None  # each has a time
        options[binary] = own[best]
    return options


def _planned(found: ContextTimes, options: _Options, chosen: set[Config], context: Context) -> PlannedLaunch:
    shape, default = found.shapes[-1], found.configs[found.default]
    expected = (np.asarray(context.weights)[:, None] * found.times).sum(axis=0)
    usable = [at for binary, at in options.items() if binary in chosen]
    best = first_best([found.configs[at] for at in usable], expected[usable]) if usable else None
    at = found.default if best is None else usable[best]
    if found.default in usable and expected[found.default] <= expected[at] * (1.0 + found.margin):
        at = found.default
    if np.isnan(expected[at]):
        return PlannedLaunch(shape, found.configs[at], default, None, None, None)
    least = min(float(expected[own]) for own in options.values())
    worst = float((found.times[:, at] / np.nanmin(found.times, axis=1)).max())
    return PlannedLaunch(
        shape, found.configs[at], default, float(expected[at]), max(0.0, float(expected[at]) / least - 1.0), worst
    )


def _cover(options: Sequence[set[Config]], free: set[Config]) -> tuple[set[Config], bool]:
    """A small set of binaries beside the free ones that leaves no shape without one; and whether none is smaller."""
    open_shapes = [own for own in options if not own & free]
    covers: dict[frozenset[int], Config] = {}
    for binary in sorted({binary for own in open_shapes for binary in own}):
        covers.setdefault(frozenset(at for at, own in enumerate(open_shapes) if binary in own), binary)
    useful = [one for one in covers if not any(one < other for other in covers)]
    every = frozenset(range(len(open_shapes)))
    chosen: list[frozenset[int]] = []
    while missing := every.difference(*chosen):
        chosen.append(max(useful, key=lambda one: len(one & missing)))
    optimal = True
    while len(chosen) > 1:
        if math.comb(len(useful), len(chosen) - 1) > MOST_COMBINATIONS:
            optimal = False
            break
        smaller = next(
            (some for some in itertools.combinations(useful, len(chosen) - 1) if every == frozenset().union(*some)),
            None,
        )
        if smaller is None:
            break
        chosen = list(smaller)
    return {covers[one] for one in chosen}, optimal
