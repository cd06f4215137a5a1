"""The process of one job: the stages, each of which leaves behind what the next one needs.

`python -c 'from tilewise.service.work import main' JOB OWNER` runs a job that OWNER has claimed. Killed at any point,
the job goes on in the stage that was cut off, in another process.
"""

from __future__ import annotations

import logging
import logging.config
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tilewise.data.home import require_writable
from tilewise.errors import InvalidBundleError, TilewiseError
from tilewise.models import registry
from tilewise.models.bundle import Bundle
from tilewise.service import policy
from tilewise.service.catalogue import Catalogue, CatalogueError
from tilewise.service.jobs import STAGES, Lease, LostJobError, end, get, job_folder, report, shadow_of
from tilewise.service.logs import log_config
from tilewise.service.models import record_event, store_model
from tilewise.service.processes import be_nice, die_with_parent
from tilewise.service.settings import Settings
from tilewise.service.traffic import traffic_of

PROGRESS_S = 0.5
SHADOW_LOOK_S = 0.5
_log = logging.getLogger("tilewise.service")


class Stop(Exception):
    """The job ends here, and not with a failure."""


class Work:
    """One job under way."""

    def __init__(self, settings: Settings, catalogue: Catalogue, job: dict[str, Any], lease: Lease) -> None:
        self.settings, self.catalogue, self.lease = settings, catalogue, lease
        self.op, self.arch = str(job["op"]), str(job["arch"])
        self.parameters: dict[str, Any] = job["parameters"]
        self.result: dict[str, Any] = dict(job["result"])
        self.by = job["created_by"]
        self.stage = job["stage"]
        self.folder = job_folder(settings.home, lease.job_id)
        self._reported = 0.0
        self._columns: Any = None

    def run(self) -> None:
        """Every stage from the present one on. Raises Stop, LostJobError, or what went wrong."""
        require_writable(self.folder)
        stages: dict[str, Callable[[], None]] = {
            "import": self._import, "train": self._train, "evaluate": self._evaluate, "gate": self._gate,
            "shadow": self._shadow, "promote": self._promote,
        }  # fmt: skip
        if self.stage in ("train", "evaluate") and self.result.get("profile") != self._profile():
            self._report("other rows than before: from the beginning")
            self.stage = STAGES[0]
        for stage in STAGES[STAGES.index(self.stage) :]:
            self.stage = stage
            self._report(stage, stage=stage, done=0, total=0)
            stages[stage]()

    def _report(self, text: str = "", **changes: Any) -> None:
        report(self.catalogue, self.lease, text, result=self.result, **changes)

    def _progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._reported > PROGRESS_S:
            self._reported = now
            report(self.catalogue, self.lease, done=done, total=total)

    def _profile(self) -> dict[str, Any]:
        """Read the rows, and say which they are."""
        from tilewise.data.store import load_profile

        profile = load_profile(self.op, self.arch, home=self.settings.home)
        self._columns = profile.columns
        return {"digest": profile.digest, "rows": len(profile)}

    def _rows(self) -> Any:
        if self._columns is None:
            self._profile()
        return self._columns

    def _import(self) -> None:
        self.result["profile"] = self._profile()
        if not self.result["profile"]["rows"]:
            raise Stop(f"there are no timings of {self.op} on {self.arch}: upload some first")
        self._report(f"{self.result['profile']['rows']} rows of {self.op} on {self.arch}")

    def _train(self) -> None:
        with self.catalogue.read() as connection:
            traffic = traffic_of(connection, self.op, self.arch)
        bundle = policy.train(
            self._rows(), op=self.op, arch=self.arch, seed=self.parameters["seed"], traffic=traffic,
            progress=self._progress,
        )  # fmt: skip
        bundle.save(self.folder / "fitted")
        self._report(
            f"fitted to {bundle.manifest['data']['timings']} timings of {bundle.manifest['data']['shapes']} shapes"
        )

    def _evaluate(self) -> None:
        bundle = self._load("fitted")
        if folds := self.parameters["folds"]:
            columns, seed = self._rows(), self.parameters["seed"]
            bundle = policy.with_figures(bundle, columns, seed=seed, folds=folds, progress=self._progress)
        bundle.save(self.folder / "candidate")
        store_model(self.catalogue, bundle, self.settings.home, self.lease.job_id)
        self.result |= {"model_id": bundle.model_id, "digest": bundle.digest, "metrics": bundle.manifest["metrics"]}
        self._report(f"candidate {bundle.model_id}")

    def _gate(self) -> None:
        candidate, current = self._load("candidate"), self._current()
        self.result["replaces"] = self._in_force()
        if current is not None and current.digest == candidate.digest:
            raise Stop(f"the candidate is the model in force, {current.model_id}: nothing to promote")
        verdict = policy.gate(candidate, current)
        self.result["gate"] = verdict.to_dict()
        if not verdict.passed:
            raise Stop(f"the gate holds it back: {verdict.reason}")
        self._report(f"gate: {verdict.reason}")

    def _shadow(self) -> None:
        """Wait until the workers, which see that this job is here, have put the candidate to enough live requests."""
        wanted = self.parameters["shadow_requests"]
        if not wanted:
            self._report("no requests are awaited")
            return
        deadline = time.time() + self.parameters["shadow_timeout_s"]
        while True:
            with self.catalogue.read() as connection:
                picks = shadow_of(connection, self.lease.job_id)
            seen = sum(one["requests"] for one in picks)
            report(self.catalogue, self.lease, done=min(seen, wanted), total=wanted)
            if seen >= wanted:
                break
            if time.time() > deadline:
                raise Stop(f"{seen} of {wanted} requests came in {self.parameters['shadow_timeout_s']:.0f} s")
            time.sleep(SHADOW_LOOK_S)
        verdict = policy.judge_shadow(picks, self._load("candidate").noise_margin)
        self.result["shadow"] = verdict.to_dict()
        if not verdict.passed:
            raise Stop(f"live requests speak against it: {verdict.reason}")
        self._report(f"shadow: {verdict.reason}")

    def _promote(self) -> None:
        candidate = self._load("candidate")
        if not self.parameters["promote"]:
            raise Stop("it was to stop before the promotion: the candidate is stored")
        began = self.result.get("promotion_began", False)
        if began and candidate.digest in registry.history(self.op, self.arch, self.settings.home)[:2]:
            return  # this process's forerunner did it, and was killed before it could say so
        if self._in_force() != self.result.get("replaces"):  # somebody put another one in force meanwhile
            self._gate()
        self.result["promotion_began"] = True
        self._report()  # the lease is held: nobody else runs this
        registry.publish(candidate, self.settings.home)
        record_event(self.catalogue, "promote", self.op, self.arch, candidate.model_id, f"job {self.lease.job_id}"[:64])

    def _in_force(self) -> str:
        """The folder name of the model in force: its digest, or the arch for the shipped one."""
        return registry.current(self.op, self.arch, self.settings.home).name

    def _current(self) -> Bundle | None:
        folder = registry.current(self.op, self.arch, self.settings.home)
        try:
            return Bundle.load(folder) if folder.is_dir() else None
        except InvalidBundleError as error:
            self._report(f"the model in force cannot be used: {error}")
            return None

    def _load(self, name: str) -> Bundle:
        return Bundle.load(self.folder / name)


def perform(settings: Settings, catalogue: Catalogue, lease: Lease) -> int:
    """Run a job that is ours to its end, and write down how it ended."""
    with catalogue.read() as connection:
        job = get(connection, lease.job_id)
    if job is None:
        return 1
    work = Work(settings, catalogue, job, lease)
    try:
        work.run()
        end(catalogue, lease, "promoted", f"{work.result['model_id']} is in force", result=work.result)
    except Stop as stop:
        end(catalogue, lease, "stopped", str(stop), result=work.result)
    except LostJobError as error:
        _log.warning("%s", error)
        return 0
    except CatalogueError:
        raise  # the job is taken up again when the catalogue is back
    except Exception as error:
        if not isinstance(error, TilewiseError):
            _log.exception("job %s failed", lease.job_id)
        end(catalogue, lease, "failed", f"{work.stage}: {type(error).__name__}: {error}", result=work.result)
    shutil.rmtree(work.folder, ignore_errors=True)
    return 0


def main() -> int:
    """Run the job that the arguments name, for the owner that they name."""
    job_id, owner, parent = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to deal with
    settings = Settings.from_env()
    be_nice(settings.job_nice)
    logging.config.dictConfig(log_config(settings.log_format, "info"))
    try:
        return perform(settings, Catalogue(settings.url), Lease(job_id, owner))
    except CatalogueError as error:
        _log.error("%s", error)
        return 75  # to be tried again
