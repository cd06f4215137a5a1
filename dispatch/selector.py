"""select, rank and explain: the answers of the ladder, remembered.

A selector never raises for a valid shape that some kernel serves, whatever the state of its bundle: then it answers
with the default, counts that by reason, and says so in the decision. Selecting measures nothing, compiles nothing,
reads no device, and takes no lock once a shape is known.
"""

from __future__ import annotations

import itertools
import logging
import numbers
import operator
import os
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewise.dispatch.decision import Decision, Explanation, Ranked
from tilewise.dispatch.explaining import explain_assessment, ranked_configs
from tilewise.dispatch.ladder import Assessment, Knowledge, assess, fallback
from tilewise.errors import InvalidBundleError, InvalidConfigError, InvalidShapeError, UnsupportedError
from tilewise.kernels.arch import Arch, current_arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import Shape, default_config
from tilewise.kernels.registry import OPS
from tilewise.models import registry
from tilewise.models.bundle import Bundle

__all__ = ["Decision", "Explanation", "Ranked", "Selector", "explain", "rank", "select", "selector"]

MEMO_LIMIT = 65536  # shapes remembered; at the limit, the older half is forgotten

_log = logging.getLogger("tilewise")
_Path = str | os.PathLike[str]


@dataclass
class _State:
    """One loaded bundle and the decisions made with it, so that a reload replaces both at once."""

    known: Knowledge
    stamp: tuple[int, ...]
    refused: str  # why the bundle that should be in force could not be used; empty where it is
    by_shape: dict[Shape, Decision] = field(default_factory=dict)
    by_sizes: dict[tuple[Any, ...], Decision] = field(default_factory=dict)


class Selector:
    """Decisions for one op on one GPU.

    `bundle_dir` names the bundle to use; left out, it is the one that is published under `home` (TILEWISE_HOME), else
    the shipped one. `use_exact=False` judges the model alone, as evaluation does.
    Raises UnsupportedError for an unknown op or arch name; never for a bundle, whatever is wrong with it.
    """

    def __init__(
        self,
        arch: Arch | str,
        *,
        op: str = "paged_mqa_logits",
        bundle_dir: _Path | None = None,
        home: _Path | None = None,
        use_exact: bool = True,
    ) -> None:
        if op not in OPS:
            raise UnsupportedError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        self.op = op
        self.arch = arch if isinstance(arch, Arch) else get_arch(arch)
        self.bundle_dir = bundle_dir
        self.home = home
        self.use_exact = use_exact
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._state = self._load()

    # -- answers

    def select(
        self,
        shape: Shape | None = None,
        *,
        batch_size: int | None = None,
        next_n: int | None = None,
        heads: int | None = None,
        head_dim: int | None = None,
        block_kv: int | None = None,
        max_context_len: int | None = None,
        mean_context_len: int | None = None,
        cache_layout: str | None = None,
    ) -> Decision:
        """The decision for a shape, or for its sizes; sizes left out are Shape's own defaults. numpy's integers do.

        Raises InvalidShapeError for an invalid shape, InvalidConfigError where no kernel serves it on this GPU.
        """
        if shape is not None:
            try:
                decision = self._state.by_shape.get(shape)
            except TypeError:  # not hashable, so no Shape
                decision = None
            if decision is not None and (
                batch_size is next_n is heads is head_dim is block_kv is max_context_len is mean_context_len is None
                and cache_layout is None
            ):
                return decision
            given = _given(
                batch_size, next_n, heads, head_dim, block_kv, max_context_len, mean_context_len, cache_layout
            )
            return self._remember(_as_shape(shape, given), None)
        # The types are part of the key, because True and 1.0 equal 1 and are no sizes.
        key = (
            batch_size, next_n, heads, head_dim, block_kv, max_context_len, mean_context_len, cache_layout,
            type(batch_size), type(next_n), type(heads), type(head_dim), type(block_kv), type(max_context_len),
            type(mean_context_len),
        )  # fmt: skip
        try:
            decision = self._state.by_sizes.get(key)
        except TypeError:
            decision = None
        if decision is not None:
            return decision
        return self._remember(_as_shape(None, _given(*key[:8])), key)

    def rank(self, shape: Shape | None = None, limit: int | None = None, **sizes: Any) -> list[Ranked]:
        """The configs on offer: the chosen one, then the others by time, then those without a time."""
        ranked = ranked_configs(self._assess(self._state, _as_shape(shape, sizes)))
        return ranked if limit is None else ranked[: max(0, limit)]

    def explain(self, shape: Shape | None = None, **sizes: Any) -> Explanation:
        """The decision, every rejected config with its reason or its loss, and the nearest measured shapes."""
        state = self._state
        shape = _as_shape(shape, sizes)
        return explain_assessment(self._assess(state, shape), self.arch, state.known.bundle)

    # -- state

    @property
    def model_id(self) -> str | None:
        """Short name of the bundle in force, None where there is none."""
        return self._state.known.model_id

    @property
    def bundle(self) -> Bundle | None:
        """The bundle in force."""
        return self._state.known.bundle

    @property
    def problem(self) -> str:
        """Why there is no bundle, or not the one that was published, and what is stale; empty where all is well."""
        known = self._state.known
        return "; ".join(text for text in (known.problem, known.refused, *known.stale.values()) if text)

    @property
    def counters(self) -> dict[str, int]:
        """Fallbacks by reason. A shape counts when it is weighed, not when its remembered decision is given again."""
        with self._lock:
            return dict(self._counters)

    def reload(self, *, force: bool = False) -> bool:
        """Take up another bundle if one was put in force, and forget the decisions; whether that was so.

        A bundle that is refused changes nothing: the present one stays. Selecting goes on meanwhile. Costs two calls of
        stat where nothing changed; meant for a server's timer, not for launches.
        """
        before = self._state
        if not force and self._stamp() == before.stamp:
            return False
        state = self._load()
        kept = bool(state.refused) and before.known.bundle is not None and state.known.model_id != before.known.model_id
        if kept:
            refused = f"{state.refused}: {before.known.model_id} goes on answering."
            state = _State(replace(before.known, refused=refused), state.stamp, state.refused)
        with self._lock:
            self._state = state
        return not kept

    def _stamp(self) -> tuple[int, ...]:
        if self.bundle_dir is None:
            return registry.stamp(self.op, self.arch.name, self.home)
        try:
            found = (Path(self.bundle_dir) / "manifest.json").stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def _load(self) -> _State:
        """The first usable one of: the bundle in force, the shipped one."""
        stamp = self._stamp()
        if self.bundle_dir is not None:
            return self._load_named(Path(self.bundle_dir), stamp)
        refused = ""
        folder = shipped = registry.shipped(self.op, self.arch.name)
        try:
            folder = registry.published(self.op, self.arch.name, self.home) or shipped
            if folder != shipped:
                if not folder.is_dir():
                    raise InvalidBundleError("its folder is missing")
                bundle = Bundle.load(folder)
                if bundle.digest != folder.name:
                    raise InvalidBundleError(f"its folder holds another one, {bundle.model_id}")
                return self._state_of(bundle, folder, stamp)
        except InvalidBundleError as error:
            name = "" if folder == shipped else f" {self.arch.name}-{folder.name[:12]}"
            why = str(error).removeprefix(f"bundle {folder}").removeprefix(":").strip()  # the log names the folder
            refused = f"the published bundle{name} cannot be used ({why})"
            self._warn("bundle_refused", refused if folder == shipped else f"{refused}: {folder}")
        try:
            if not shipped.is_dir():
                problem = refused or f"no model of {self.op} was trained for {self.arch.name}"
                if not refused:
                    self._log_once(f"{problem}: nothing measured to choose by")
                return _State(Knowledge.of(None, problem), stamp, refused)
            return self._state_of(Bundle.load(shipped), shipped, stamp, refused)
        except InvalidBundleError as error:
            self._warn("bundle_refused", str(error))
            problem = f"{refused}; nor can the shipped one ({error})" if refused else str(error)
            return _State(Knowledge.of(None, problem), stamp, refused or str(error))

    def _load_named(self, folder: Path, stamp: tuple[int, ...]) -> _State:
        """The bundle that the caller named, or nothing."""
        try:
            return self._state_of(Bundle.load(folder), folder, stamp)
        except InvalidBundleError as error:
            self._warn("bundle_refused", str(error))
            return _State(Knowledge.of(None, str(error)), stamp, str(error))

    def _state_of(self, bundle: Bundle, folder: Path, stamp: tuple[int, ...], refused: str = "") -> _State:
        """The state that a bundle makes. `refused` says why it is not another one."""
        if (bundle.op, bundle.arch.name) != (self.op, self.arch.name):
            raise InvalidBundleError(
                f"bundle {folder} is for {bundle.op} on {bundle.arch.name}, not {self.op} on {self.arch.name}"
            )
        _ = bundle.rank.masks  # made now, so that the first selection does not wait for it
        known = Knowledge.of(bundle)
        for reason in known.stale.values():
            self._warn("stale_kernel", reason)
        if refused:
            known = replace(known, refused=f"{refused}: the shipped one answers.")
        return _State(known, stamp, refused)

    def _warn(self, name: str, text: str) -> None:
        """Count, and log once."""
        with self._lock:
            self._counters[name] += 1
        self._log_once(text)

    def _log_once(self, text: str) -> None:
        with self._lock:
            first = text not in self._warned and len(self._warned) < 1000
            if first:
                self._warned.add(text)
        if first:
            _log.warning("%s", text)

    def _assess(self, state: _State, shape: Shape) -> Assessment:
        try:
            found = assess(shape, self.arch, state.known, use_exact=self.use_exact)
        except InvalidConfigError:
            raise
        except Exception as error:  # a launch must not die of a model
            self._warn("error", f"selecting for {shape} failed, the default stands in: {type(error).__name__}: {error}")
            found = fallback(shape, default_config(shape, self.arch), state.known)
            found.regime = "extrapolated"
            found.reason = f"selecting failed ({type(error).__name__}: {error}): the default config."
        return found

    def _remember(self, shape: Shape, key: tuple[Any, ...] | None) -> Decision:
        state = self._state
        decision = state.by_shape.get(shape)
        if decision is None:
            found = self._assess(state, shape)
            decision = found.decision()
            with self._lock:
                self._counters.update(found.misses)
                state.by_shape = _bounded(state.by_shape)
                state.by_shape[shape] = decision
        if key is not None:
            with self._lock:
                state.by_sizes = _bounded(state.by_sizes)
                state.by_sizes[key] = decision
        return decision


def _bounded(memo: dict[Any, Decision]) -> dict[Any, Decision]:
    """The memo, or its newer half where it is full. Readers keep the dict that they have."""
    if len(memo) < MEMO_LIMIT:
        return memo
    return dict(itertools.islice(memo.items(), len(memo) // 2, None))


_SIZES = (
    "batch_size", "next_n", "heads", "head_dim", "block_kv", "max_context_len", "mean_context_len", "cache_layout",
)  # fmt: skip


def _given(*values: Any) -> dict[str, Any]:
    return {name: value for name, value in zip(_SIZES, values, strict=True) if value is not None}


def _as_shape(shape: Any, sizes: dict[str, Any]) -> Shape:
    """The shape asked for. Raises InvalidShapeError for neither, both, or a size that Shape does not have."""
    if shape is not None:
        if type(shape) is not Shape:
            raise InvalidShapeError(f"shape must be a Shape, got {shape!r:.200}")
        if sizes:
            raise InvalidShapeError(f"give a shape or sizes, not both: got a shape and {', '.join(sizes)}")
        return shape
    for name in sizes:
        if name not in _SIZES:
            raise InvalidShapeError(f"sizes must be among {', '.join(_SIZES)}, got {name!r}")
    for name in ("batch_size", "next_n", "heads"):
        if sizes.get(name) is None:
            raise InvalidShapeError(f"{name} must be given, as must batch_size, next_n and heads, or a Shape")
    return Shape(**{name: _plain_int(value) for name, value in sizes.items()})


def _plain_int(value: Any) -> Any:
    """numpy's integers and their like as int; anything else as it is, for Shape to judge. No tensor is read."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else operator.index(value)


_selectors: dict[str | None, Selector] = {}
_selectors_lock = threading.Lock()


def selector(arch: Arch | str | None = None) -> Selector:
    """The process-wide selector of an arch; None is the current GPU's, which needs torch to be read."""
    name = arch.name if isinstance(arch, Arch) else arch
    try:
        return _selectors[name]
    except (KeyError, TypeError):
        pass
    facts = current_arch() if arch is None else arch if isinstance(arch, Arch) else get_arch(arch)
    with _selectors_lock:
        found = _selectors.get(facts.name) or Selector(facts)
        _selectors[facts.name] = found
        _selectors[name] = found
    return found


def select(shape: Shape | None = None, *, arch: Arch | str | None = None, **sizes: Any) -> Decision:
    """The decision for a shape, or for its sizes, on `arch` (default: the current GPU); see Selector.select."""
    try:
        return selector(arch).select(shape, **sizes)
    except TypeError:
        for name in sizes:
            if name not in _SIZES:
                raise TypeError(
                    f"tilewise.select() got an unexpected keyword argument {name!r}; it takes a shape, arch, or "
                    f"sizes: {', '.join(_SIZES)}"
                ) from None
        raise


def rank(
    shape: Shape | None = None, *, arch: Arch | str | None = None, limit: int | None = None, **sizes: Any
) -> list[Ranked]:
    """The configs on offer, the chosen one first; see Selector.rank."""
    return selector(arch).rank(shape, limit, **sizes)


def explain(shape: Shape | None = None, *, arch: Arch | str | None = None, **sizes: Any) -> Explanation:
    """The decision and everything it was weighed against; see Selector.explain."""
    return selector(arch).explain(shape, **sizes)
