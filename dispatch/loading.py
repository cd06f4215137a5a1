"""Which bundle a selector answers from, and what stands in where that one cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from tilewise.dispatch.context import Context
from tilewise.dispatch.decision import Decision
from tilewise.dispatch.ladder import Knowledge
from tilewise.dispatch.live import Tick
from tilewise.errors import InvalidBundleError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import registry
from tilewise.models.bundle import Bundle

Answer: TypeAlias = tuple[Decision, Tick]  # and what counts one more call for it


@dataclass
class State:
    """One loaded bundle and the decisions made with it, so that a reload replaces both at once."""

    known: Knowledge
    stamp: tuple[int, ...]
    refused: str  # why the bundle that should be in force could not be used; empty where it is
    by_shape: dict[Shape, Answer] = field(default_factory=dict)
    by_object: dict[int, tuple[Shape, Answer]] = field(default_factory=dict)  # by id, which is its own while it is held
    by_sizes: dict[tuple[Any, ...], Answer] = field(default_factory=dict)
    by_context: dict[tuple[Shape, Context, float], Answer] = field(default_factory=dict)


@dataclass(frozen=True)
class Loader:
    """Loads what is in force for one op and arch. Never raises for a bundle: `warn` takes a counter and a text."""

    op: str
    arch: Arch
    bundle_dir: str | os.PathLike[str] | None
    home: str | os.PathLike[str] | None
    warn: Callable[[str, str], None]
    log_once: Callable[[str], None]
    off: bool = False  # nothing is loaded

    def stamp(self) -> tuple[int, ...]:
        """Another one where another bundle was put in force. Costs two calls of stat."""
        if self.bundle_dir is None:
            return registry.stamp(self.op, self.arch.name, self.home)
        try:
            found = (Path(self.bundle_dir) / "manifest.json").stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def load(self) -> State:
        """The first usable one of: the bundle in force, the shipped one."""
        stamp = self.stamp()
        if self.off:
            return State(Knowledge.of(None, "selection is off"), stamp, "")
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
        except (InvalidBundleError, OSError) as error:  # OSError: a folder that may not be looked into
            name = "" if folder == shipped else f" {self.arch.name}-{folder.name[:12]}"
            why = str(error).removeprefix(f"bundle {folder}").removeprefix(":").strip()  # the log names the folder
            refused = f"the published bundle{name} cannot be used ({why})"
            self.warn("bundle_refused", refused if folder == shipped else f"{refused}: {folder}")
        try:
            if not shipped.is_dir():
                problem = refused or f"no model of {self.op} was trained for {self.arch.name}"
                if not refused:
                    self.log_once(f"{problem}: nothing measured to choose by")
                return State(Knowledge.of(None, problem), stamp, refused)
            return self._state_of(Bundle.load(shipped), shipped, stamp, refused)
        except (InvalidBundleError, OSError) as error:
            self.warn("bundle_refused", str(error))
            problem = f"{refused}; nor can the shipped one ({error})" if refused else str(error)
            return State(Knowledge.of(None, problem), stamp, refused or str(error))

    def _load_named(self, folder: Path, stamp: tuple[int, ...]) -> State:
        """The bundle that the caller named, or nothing."""
        try:
            return self._state_of(Bundle.load(folder), folder, stamp)
        except InvalidBundleError as error:
            self.warn("bundle_refused", str(error))
            return State(Knowledge.of(None, str(error)), stamp, str(error))

    def _state_of(self, bundle: Bundle, folder: Path, stamp: tuple[int, ...], refused: str = "") -> State:
        """The state that a bundle makes. `refused` says why it is not another one."""
        if (bundle.op, bundle.arch.name) != (self.op, self.arch.name):
            raise InvalidBundleError(
                f"bundle {folder} is for {bundle.op} on {bundle.arch.name}, not {self.op} on {self.arch.name}"
            )
        _ = bundle.masks or bundle.rank.masks  # made now, so that the first selection does not wait for it
        known = Knowledge.of(bundle)
        for reason in known.stale.values():
            self.warn("stale_kernel", reason)
        if refused:
            known = replace(known, refused=f"{refused}: the shipped one answers.")
        return State(known, stamp, refused)
