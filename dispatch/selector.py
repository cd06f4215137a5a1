"""select, rank and explain: the answers of the ladder, remembered.

A selector never raises for a valid shape that some kernel serves, whatever the state of its bundle: then it answers
with the default, counts that by reason, and says so in the decision (except in strict mode).
Selecting measures nothing, compiles nothing, reads no device, and takes no lock once a shape is known.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tilewise.dispatch.context import Context, ContextLike, check_worst_case
from tilewise.dispatch.decision import Decision, Explanation, Ranked
from tilewise.dispatch.explaining import explain_assessment, ranked_configs
from tilewise.dispatch.ladder import Assessment, Knowledge, assess, fallback
from tilewise.dispatch.live import LiveShapes
from tilewise.dispatch.loading import Answer, Loader, State
from tilewise.dispatch.modes import missed, mode_of, shadowed
from tilewise.dispatch.over_contexts import assess_contexts
from tilewise.dispatch.sizes import SIZES, as_shape, given_sizes
from tilewise.errors import InvalidConfigError, SelectionMissError, UnsupportedError
from tilewise.kernels.arch import Arch, current_arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import SPACES, Shape, at_context_len, default_config, space
from tilewise.kernels.registry import OPS
from tilewise.models.bundle import Bundle, renew_property_locks
from tilewise.models.expected import WORST_CASE

if TYPE_CHECKING:
    from tilewise.dispatch.follow import Follower

__all__ = [
    "Context",
    "Decision",
    "Explanation",
    "Ranked",
    "Selector",
    "explain",
    "rank",
    "select",
    "selector",
    "write_shapes",
]

MEMO_LIMIT = 65536  # shapes remembered; at the limit, the older half is forgotten
OBJECT_MEMO_LIMIT = 4096  # of the Shape objects that were asked with first, likewise
CONTEXT_MEMO_LIMIT = 4096  # shapes with contexts, likewise

_log = logging.getLogger("tilewise")
_Path = str | os.PathLike[str]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Selector:
    """Decisions for one op on one GPU.

    `bundle_dir` names the bundle to use; left out, it is the one that is published under `home` (TILEWISE_HOME), else
    the shipped one. `use_exact=False` judges the model alone, as evaluation does. `mode` is off, shadow, on or strict
    (dispatch/modes.py); left out, it is that of TILEWISE_MODE.
    Raises UnsupportedError for an unknown op, arch name or mode; never for a bundle, whatever is wrong with it.
    """

    def __init__(
        self,
        arch: Arch | str,
        *,
        op: str = "paged_mqa_logits",
        bundle_dir: _Path | None = None,
        home: _Path | None = None,
        use_exact: bool = True,
        mode: str | None = None,
    ) -> None:
        if op not in OPS:
            raise UnsupportedError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        self.op = op
        self.arch = arch if isinstance(arch, Arch) else get_arch(arch)
        self.mode = mode_of(mode)
        self.bundle_dir = bundle_dir
        self.home = home
        self.use_exact = use_exact
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._live = LiveShapes()
        self.follower: Follower | None = None  # what keeps it on a service's model; see `from_url`
        self._loader = Loader(op, self.arch, bundle_dir, home, self._warn, self._log_once, off=self.mode == "off")
        self._state = self._loader.load()
        _living.add(self)

    @classmethod
    def from_url(
        cls,
        url: str,
        arch: Arch | str,
        *,
        op: str = "paged_mqa_logits",
        token: str | None = None,
        interval_s: float = 2.0,
        cache: _Path | None = None,
        mode: str | None = None,
    ) -> Selector:
        """A selector that follows the models of a service, fetched by a thread of its own; see dispatch/follow.py.

        Nothing is waited for: until the first model has come, and whenever the service is away, it answers from the
        last one that came, or from the shipped one. `cache` is the folder where they are kept, one under TILEWISE_HOME
        when left out. Raises FollowError for a URL that is none.
        """
        from tilewise.dispatch.follow import Follower, follow_home

        selector = cls(arch, op=op, home=follow_home(url, cache), mode=mode)
        selector.follower = Follower(selector, url, token=token, interval_s=interval_s)
        return selector

    # -- answers

    def select(
        self,
        shape: Shape | None = None,
        *,
        context: ContextLike | None = None,
        worst_case: float = WORST_CASE,
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

        With `context`, the one decision for every context that a launch may have, as under a captured graph: an exact
        length, a range (low, high), a histogram {length: weight}, or a Context. It takes the place of the shape's
        max_context_len; mean over longest context stays. The config has the least expected time, among those that take
        at no context more than `worst_case` times as long as the best one there; `predicted_us` is the expected time.

        Raises InvalidShapeError for an invalid shape, InvalidContextError for an invalid context, InvalidConfigError
        where no kernel serves the shape on this GPU, SelectionMissError in strict mode for a miss.
        """
        if context is not None:
            given = given_sizes(
                batch_size, next_n, heads, head_dim, block_kv, max_context_len, mean_context_len, cache_layout
            )
            return self._over_contexts(as_shape(shape, given), context, worst_case)
        if shape is not None:
            state = self._state
            found = state.by_object.get(id(shape))  # hashing a shape takes half of a warm call
            if found is not None and found[0] is shape:
                answer: Answer | None = found[1]
            else:
                try:
                    answer = state.by_shape.get(shape)
                except TypeError:  # not hashable, so no Shape
                    answer = None
            if answer is not None and (
                batch_size is next_n is heads is head_dim is block_kv is max_context_len is mean_context_len is None
                and cache_layout is None
            ):
                answer[1]()
                return answer[0]
            given = given_sizes(
                batch_size, next_n, heads, head_dim, block_kv, max_context_len, mean_context_len, cache_layout
            )
            return self._remember(as_shape(shape, given), None)
        # The types are part of the key, because True and 1.0 equal 1 and are no sizes.
        key = (
            batch_size, next_n, heads, head_dim, block_kv, max_context_len, mean_context_len, cache_layout,
            type(batch_size), type(next_n), type(heads), type(head_dim), type(block_kv), type(max_context_len),
            type(mean_context_len),
        )  # fmt: skip
        try:
            answer = self._state.by_sizes.get(key)
        except TypeError:
            answer = None
        if answer is not None:
            answer[1]()
            return answer[0]
        return self._remember(as_shape(None, given_sizes(*key[:8])), key)

    def rank(self, shape: Shape | None = None, limit: int | None = None, **sizes: Any) -> list[Ranked]:
        """The configs on offer: the chosen one, then the others by time, then those without a time."""
        ranked = ranked_configs(self._assess(self._state, as_shape(shape, sizes)))
        return ranked if limit is None else ranked[: max(0, limit)]

    def explain(self, shape: Shape | None = None, **sizes: Any) -> Explanation:
        """The decision, every rejected config with its reason or its loss, and the nearest measured shapes."""
        state = self._state
        shape = as_shape(shape, sizes)
        return explain_assessment(self._assess(state, shape), self.arch, state.known.bundle)

    def weigh(self, shape: Shape) -> Assessment:
        """What `select` decides by: every config on offer with its time. Neither remembered nor counted."""
        return self._assess(self._state, as_shape(shape, {}))

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
    def knowledge(self) -> Knowledge:
        """What there is to choose by, for those who weigh many shapes at once."""
        return self._state.known

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

    def shapes_seen(self) -> list[dict[str, Any]]:
        """The shapes that `select` was asked for, the most frequent first; one row each, as docs/selection.md says."""
        rows = [{"op": self.op, "arch": self.arch.name, **row} for row in self._live.rows()]
        if self._live.overflow:
            rows.append({"op": self.op, "arch": self.arch.name, "overflow": True, "count": self._live.overflow})
        return rows

    def reload(self, *, force: bool = False) -> bool:
        """Take up another bundle if one was put in force, and forget the decisions; whether that was so.

        A bundle that is refused changes nothing: the present one stays. Selecting goes on meanwhile. Costs two calls of
        stat where nothing changed; meant for a server's timer, not for launches.
        """
        before = self._state
        if not force and self._loader.stamp() == before.stamp:
            return False
        state = self._loader.load()
        kept = bool(state.refused) and before.known.bundle is not None and state.known.model_id != before.known.model_id
        if kept:
            refused = f"{state.refused}: {before.known.model_id} goes on answering."
            state = State(replace(before.known, refused=refused), state.stamp, state.refused)
        with self._lock:
            self._state = state
        return not kept

    def _warn(self, name: str, text: str) -> None:
        """Count, and log once."""
        with self._lock:
            self._counters[name] += 1
        self._log_once(text)

    def _log_once(self, text: str, level: int = logging.WARNING) -> None:
        with self._lock:
            first = text not in self._warned and len(self._warned) < 1000
            if first:
                self._warned.add(text)
        if first:
            # A hostile bundle may name itself at any length.
            _log.log(level, "%s", text if len(text) <= 1000 else f"{text[:1000]}...")

    def _assess(
        self, state: State, shape: Shape, context: Context | None = None, worst_case: float = 1.0
    ) -> Assessment:
        """Weigh a shape, over contexts if there are any. The default stands in where that fails unexpectedly."""
        if self.mode == "off":
            found = self._default(state, shape, context)
            found.misses, found.reason = ["off"], "selection is off: the default config."
            return found
        try:
            if context is None:
                found = assess(shape, self.arch, state.known, use_exact=self.use_exact)
            else:
                found = assess_contexts(shape, context, self.arch, state.known, worst_case, use_exact=self.use_exact)
        except InvalidConfigError:
            raise
        except Exception as error:  # a launch must not die of a model
            self._warn("error", f"selecting for {shape} failed, the default stands in: {type(error).__name__}: {error}")
            found = self._default(state, shape, context)
            found.regime = "extrapolated"
            found.reason = f"selecting failed ({type(error).__name__}: {error}): the default config."
        return shadowed(found) if self.mode == "shadow" else found

    def _default(self, state: State, shape: Shape, context: Context | None) -> Assessment:
        """The default config, with nothing weighed."""
        shape = shape if context is None else at_context_len(shape, context.longest)
        return fallback(shape, default_config(shape, self.arch), state.known)

    def _remember(self, shape: Shape, key: tuple[Any, ...] | None) -> Decision:
        state = self._state
        answer = state.by_shape.get(shape)
        if answer is None:
            answer = self._answer(self._assess(state, shape), shape)
            with self._lock:
                state.by_shape = _bounded(state.by_shape, MEMO_LIMIT)
                state.by_shape[shape] = answer
                if key is None:  # the caller's own object
                    state.by_object = _bounded(state.by_object, OBJECT_MEMO_LIMIT)
                    state.by_object[id(shape)] = shape, answer
        if key is not None:
            with self._lock:
                state.by_sizes = _bounded(state.by_sizes, MEMO_LIMIT)
                state.by_sizes[key] = answer
        answer[1]()
        return answer[0]

    def _over_contexts(self, shape: Shape, given: ContextLike, worst_case: float) -> Decision:
        context = Context.of(given)
        check_worst_case(worst_case)
        state, key = self._state, (shape, context, float(worst_case))
        answer = state.by_context.get(key)
        if answer is None:
            answer = self._answer(self._assess(state, shape, context, worst_case), (shape, context))
            with self._lock:
                state.by_context = _bounded(state.by_context, CONTEXT_MEMO_LIMIT)
                state.by_context[key] = answer
        answer[1]()
        return answer[0]

    def _answer(self, found: Assessment, asked: Shape | tuple[Shape, Context]) -> Answer:
        """Count what was weighed. Raises SelectionMissError in strict mode for a miss, which is counted, too."""
        miss = self.mode == "strict" and missed(found)
        with self._lock:
            self._counters.update(found.misses)
            self._counters.update(["strict_miss"] if miss else [])
        decision = found.decision()
        tick = self._live.add(asked, decision.source, tuple(dict.fromkeys(found.misses)))
        if miss:
            tick()
            raise SelectionMissError(f"strict mode, and neither a measurement nor the model answers: {decision.reason}")
        if "shadow_differs" in found.misses:
            self._log_once(f"{found.shape}: {decision.reason}", logging.INFO)
        return decision, tick


def _bounded(memo: dict[_Key, _Value], limit: int) -> dict[_Key, _Value]:
    """The memo, or its newer half where it is full. Readers keep the dict that they have."""
    if len(memo) < limit:
        return memo
    return dict(itertools.islice(memo.items(), len(memo) // 2, None))


_selectors: dict[str | None, Selector] = {}
_selectors_lock = threading.Lock()
_living: weakref.WeakSet[Selector] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread of the parent held is held there for good."""
    global _selectors_lock
    _selectors_lock = threading.Lock()
    for one in _living:
        one._lock = threading.Lock()
        one._live.renew_lock()
    renew_property_locks()


for _kernel in SPACES:  # imported now, for the lock of an import cannot be renewed
    space(_kernel)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


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


def select(
    shape: Shape | None = None,
    *,
    arch: Arch | str | None = None,
    context: ContextLike | None = None,
    worst_case: float = WORST_CASE,
    **sizes: Any,
) -> Decision:
    """The decision for a shape, or for its sizes, on `arch` (default: the current GPU); see Selector.select."""
    try:
        if context is None:
            return selector(arch).select(shape, **sizes)
        return selector(arch).select(shape, context=context, worst_case=worst_case, **sizes)
    except TypeError:
        for name in sizes:
            if name not in SIZES:
                raise TypeError(
                    f"tilewise.select() got an unexpected keyword argument {name!r}; it takes a shape, arch, "
                    f"context, worst_case, or sizes: {', '.join(SIZES)}"
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


def write_shapes(path: _Path) -> int:
    """Write what `select` was asked for in this process as JSON lines, whole or not at all; the number of lines.

    The form is in docs/selection.md; `tilewise.data.traffic.read_traffic` reads it, and so does training.
    """
    from tilewise.data.traffic import write_rows

    with _selectors_lock:
        distinct = list({id(one): one for one in _selectors.values()}.values())
    return write_rows(path, [row for one in distinct for row in one.shapes_seen()])
