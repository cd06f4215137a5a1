"""The selectors behind one app, one for each GPU served, and the thread that keeps them on the model in force."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.data.records import shorten
from tilewise.dispatch.decision import Decision
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidShapeError, TilewiseError
from tilewise.kernels.arch import ARCHS, get_arch
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.service.catalogue import Catalogue, CatalogueError, rows_of
from tilewise.service.jobs import job_folder
from tilewise.service.messages import LaunchRequest, unserved
from tilewise.service.problems import FieldProblem
from tilewise.service.tables import jobs, shadow_picks

OP = "paged_mqa_logits"
LOOK_S = 0.25
MAX_NOTED = 4096  # requests noted for a candidate between two looks; beyond, some go unseen
_log = logging.getLogger("tilewise.service")


class Selectors:
    """Who answers for which GPU. `arch_names` None is every known one; the first is the default."""

    def __init__(self, home: str | os.PathLike[str] | None, arch_names: Iterable[str] | None) -> None:
        names = [name for name in ARCHS if name != "cpu"] if arch_names is None else list(arch_names)
        if not names:
            raise ValueError("arch_names must name at least one GPU, got none")
        self.home = home
        self.by_arch = {get_arch(name).name: Selector(get_arch(name), op=OP, home=home, mode="on") for name in names}
        self.default = next(iter(self.by_arch))
        self.shadows: dict[str, Shadow] = {}
        self.loads = 0  # models that came into force so far
        self._others: OrderedDict[Path, Selector] = OrderedDict()
        self._lock = threading.Lock()

    def selector(self, arch: str | None) -> Selector:
        """The selector of a GPU, also under the name of its ISA; a 422 that names the field where it is not served."""
        if message := self.refusal(arch):
            raise FieldProblem([("arch", message)])
        return self.by_arch[self.default if arch is None else get_arch(arch).name]

    def refusal(self, arch: object) -> str | None:
        """Why this service does not answer for `arch`, or None."""
        with contextlib.suppress(TilewiseError):
            if arch is None or (isinstance(arch, str) and get_arch(arch).name in self.by_arch):
                return None
        return f"must be one of {', '.join(self.by_arch)}, got {shorten(arch)}"

    def also_wrong(self, body: object) -> list[tuple[str, str]]:
        """(field, message) of a body's values that the request model does not judge."""
        message = self.refusal(body.get("arch")) if isinstance(body, dict) else None
        return [("arch", message)] if message else []

    def question(self, request: LaunchRequest) -> tuple[Selector, spec.Shape]:
        """Who answers, and the shape; a 422 that names every field at fault."""
        found = self.also_wrong({"arch": request.arch})
        try:
            shape = request.shape()
        except InvalidShapeError as error:
            field, _, message = str(error).partition(" ")
            raise FieldProblem([*found, (field, message)]) from error
        selector = self.selector(request.arch)
        if fields := unserved(shape, selector.arch):
            raise FieldProblem(fields)
        return selector, shape

    def model_id(self) -> str:
        """The model of the default GPU, for answers that concern no GPU in particular."""
        return self.by_arch[self.default].model_id or "none"

    def of_bundle(self, folder: Path, arch: str) -> Selector:
        """A selector of a stored bundle that is not in force; the latest few stay loaded."""
        with self._lock:
            if (found := self._others.get(folder)) is None:
                found = self._others[folder] = Selector(arch, op=OP, bundle_dir=folder, mode="on")
            self._others.move_to_end(folder)
            if len(self._others) > 8:
                self._others.popitem(last=False)
        return found

    def note(self, arch: str, shape: spec.Shape, decision: Decision) -> None:
        """Let a candidate under watch, if there is one, see this request too."""
        if self.shadows and (shadow := self.shadows.get(arch)) is not None:
            shadow.noted.append((shape, decision))


class Shadow:
    """A candidate under watch: it answers, in the background, what the model in force was asked."""

    def __init__(self, job_id: str, folder: Path, arch: str) -> None:
        self.job_id = job_id
        self.noted: deque[tuple[spec.Shape, Decision]] = deque(maxlen=MAX_NOTED)
        self._candidate = Selector(arch, op=OP, bundle_dir=folder, mode="on")

    def flush(self, catalogue: Catalogue) -> None:
        """Write down the requests noted since the last time."""
        counts: dict[str, tuple[spec.Shape, Decision, int]] = {}
        for _ in range(len(self.noted)):
            shape, decision = self.noted.popleft()
            key = json.dumps(shape.to_dict())
            counts[key] = (shape, decision, counts[key][2] + 1 if key in counts else 1)
        if not counts:
            return
        with catalogue.write() as connection:
            for key, (shape, decision, number) in counts.items():
                pick, current = self._pick(shape, decision), decision.to_dict()
                values = {
                    "job_id": self.job_id,
                    "shape": key,
                    "requests": number,
                    "current": current,
                    "candidate": pick,
                }
                insert = catalogue.insert(shadow_picks).values(values)
                changes = {"requests": shadow_picks.c.requests + number, "current": current, "candidate": pick}
                connection.execute(insert.on_conflict_do_update(index_elements=["job_id", "shape"], set_=changes))

    def _pick(self, shape: spec.Shape, current: Decision) -> dict[str, Any]:
        """The candidate's decision, and what it makes of the config that was answered."""
        decision = self._candidate.select(shape)
        pick = decision.to_dict()
        pick["of_current_us"] = next(
            (one.predicted_us for one in self._candidate.rank(shape) if one.config == current.config), None
        )
        if decision.model_id is None or "failed" in decision.reason:
            pick["error"] = decision.reason
        return pick


class Watcher:
    """A thread that looks, four times a second, for a newly published model and for candidates to watch."""

    def __init__(self, selectors: Selectors, catalogue: Catalogue, home: Path) -> None:
        self._selectors, self._catalogue, self._home = selectors, catalogue, home
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="models", daemon=True)
        self._catalogue_failed = False
        self.also: list[Any] = []  # called at every look

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what was noted for candidates is written down first."""
        self._stopping.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()
        self.look()

    def look(self) -> None:
        """One look. What cannot be loaded is logged, and the last one kept."""
        for name, selector in self._selectors.by_arch.items():
            try:
                if selector.reload():
                    self._selectors.loads += 1
            except Exception:
                _log.exception("the model of %s stays as it is", name)
        try:
            self._shadow()
            for one in self.also:
                one()
            self._catalogue_failed = False
        except CatalogueError as error:
            if not self._catalogue_failed:
                _log.warning("%s; selections go on", error)
            self._catalogue_failed = True
        except Exception:
            _log.exception("watching failed")

    def _shadow(self) -> None:
        """Take up candidates whose jobs wait for requests, and let go of the others."""
        query = sa.select(jobs.c.id, jobs.c.arch).where((jobs.c.state == "running") & (jobs.c.stage == "shadow"))
        with self._catalogue.read() as connection:
            wanted = {row["arch"]: row["id"] for row in rows_of(connection.execute(query))}
        shadows = self._selectors.shadows
        for arch, shadow in list(shadows.items()):
            if wanted.get(arch) != shadow.job_id:
                del shadows[arch]
        for arch, job_id in wanted.items():
            folder = job_folder(self._home, job_id) / "candidate"
            if arch in self._selectors.by_arch and arch not in shadows and folder.is_dir():
                shadows[arch] = Shadow(job_id, folder, arch)
        for shadow in list(shadows.values()):
            shadow.flush(self._catalogue)
