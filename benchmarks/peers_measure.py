"""The measuring part of benchmarks/peers.py: runs in a child process, on the GPU."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peers_rows as rows_file
import peers_summary as summary
from peers_entries import Entry, base_row
from peers_variants import (
    Variant,
    check_peer,
    choice_candidates,
    compile_ahead,
    deep_gemm_jobs,
    fixed_configs,
    peer_tokens,
    peer_variant,
    shortlist,
    triton_jobs,
)

from tilewise.kernels.arch import current_arch
from tilewise.kernels.collect import _clock_mhz, _environment
from tilewise.kernels.paged_mqa_logits import peers
from tilewise.kernels.paged_mqa_logits.spec import Config
from tilewise.kernels.registry import kernel_source_hash
from tilewise.kernels.timing import PagePool, Problem, Timing, check, make_problem, time_interleaved

POOL_PAGES = 131072  # of 64 tokens: the largest entries need them all
FINALISTS = 5  # configs of a kernel that a choice is made among in a second, longer pass


class Marker:
    """Says in a file what is going on, for the parent that ends a child which hangs or dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parent = os.getppid()

    def say(self, limit_s: float, entry: str = "", label: str = "", **more: Any) -> None:
        """What happens now, and how long it may take. Ends the process when the parent is gone."""
        if os.getppid() != self._parent:
            os._exit(5)
        text = json.dumps({"limit_s": limit_s, "entry": entry, "label": label, **more})
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._path)


# -- the runs


class Run:
    """What all entries of one run share."""

    def __init__(self, args: Any, deadline: float) -> None:
        self.args = args
        self.deadline = deadline
        self.arch = current_arch()
        self.marker = Marker(args.marker)
        self.module: Any = None
        if not args.no_deep_gemm and not args.choose:
            self.module = peers.deep_gemm()
            if args.pdl:
                self.module.set_pdl(True)
        self.environment = _environment(self.arch, args.commit)
        self.environment["deep_gemm_version"] = getattr(self.module, "__version__", None)
        self.environment["deep_gemm_pdl"] = int(bool(args.pdl))
        self.ceilings: dict[str, Any] = {}
        self._pool: PagePool | None = None

    def measure_ceilings(self, entry: Entry) -> None:
        """Before each entry: what a card can do depends on how warm it is, and it warms up in the course of a run."""
        import ceilings

        self.marker.say(120, entry.name)
        self.ceilings = ceilings.measure()

    def problem(self, entry: Entry, seed: int) -> Problem:
        if self._pool is None:
            self._pool = PagePool(POOL_PAGES, 64, 128)
        lens = entry.target.context_lens
        return make_problem(entry.shape, lens, self._pool, self.arch, logits_width=max(256, *lens), seed=seed)

    def ours(self, problem: Problem, config: Config, roles: str) -> Variant:
        return Variant(str(config), roles, Timing(config), lambda turn: problem.launch(config, turn))

    def check(self, entry: Entry, problem: Problem, variant: Variant) -> None:
        self._say_launch(self.args.silence, entry, variant)
        if variant.tokens_per_row is not None:
            check_peer(problem, variant)
        else:
            checked = check(problem, variant.timing.config, self.arch)
            variant.timing.status, variant.timing.reason = checked.status, checked.reason
            variant.timing.max_error = checked.max_error
        self._give_up_on_a_broken_context(entry, variant)

    def _give_up_on_a_broken_context(self, entry: Entry, variant: Variant) -> None:
        # The parent notes what the marker says, and starts another child that leaves this launch out.
        if variant.timing.status == "runtime":
            self._say_launch(0, entry, variant, variant.timing.reason)
            print(f"{entry.name} {variant.label}: {variant.timing.reason}", flush=True)
            os._exit(3)

    def _say_launch(self, limit_s: float, entry: Entry, variant: Variant, reason: str | None = None) -> None:
        config = variant.timing.config
        self.marker.say(
            limit_s, entry.name, variant.label, roles=variant.roles, kernel=config.kernel, reason=reason,
            tokens_per_row=variant.tokens_per_row, config=variant.config_text,
        )  # fmt: skip

    def time(self, entry: Entry, problem: Problem, variants: Sequence[Variant], rounds: int, seed: int) -> None:
        good = [variant for variant in variants if variant.timing.status == "correct"]
        self.marker.say(self.args.silence, entry.name)
        time_interleaved(
            [(variant.timing, variant.go) for variant in good], problem.launches, rounds,
            flush=problem.needs_flush(self.arch), seed=seed,
        )  # fmt: skip
        for variant in good:  # a capture that failed takes the later ones with it: the first is to blame
            self._give_up_on_a_broken_context(entry, variant)

    def rows(
        self, entry: Entry, problem: Problem, variants: Sequence[Variant], attempt: int, clocks: Any
    ) -> Iterator[dict[str, Any]]:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        environment = {name: self.environment.get(name) for name in rows_file.COLUMNS if name in self.environment}
        for variant in variants:
            timing = variant.timing
            ours = variant.tokens_per_row is None
            yield {
                **base_row(entry, attempt),
                **environment,
                "read_tbps": self.ceilings.get("read_tbps"),
                "fp8_tflops": self.ceilings.get("fp8_tflops"),
                "roles": variant.roles,
                "kernel": timing.config.kernel,
                "tokens_per_row": variant.tokens_per_row,
                "config": variant.config_text,
                **rows_file.timing_columns(timing),
                "launches_per_replay": problem.launches,
                "footprint_bytes": problem.footprint_bytes,
                "clock_before_mhz": clocks[0],
                "clock_after_mhz": clocks[1],
                "measured_at": now,
                "kernel_hash": kernel_source_hash(timing.config.kernel) if ours else None,
            }


def duel(args: Any, todo: Sequence[Entry], deadline: float) -> int:
    """Time the fixed configs and DeepGEMM's modes, entry by entry; how many entries the deadline left."""
    run = Run(args, deadline)
    choices = rows_file.read_choices(args.choices) if args.choices else {}
    configs = {entry.name: fixed_configs(entry, choices, args.select, run.arch) for entry in todo}
    done = {row["name"] for row in rows_file.read(args.out) if row["status"] == "correct"}
    done |= hopeless(args.rows)
    left = [entry for entry in todo if entry.name not in done]
    print(f"{run.arch.name}: {len(todo)} entries, {len(left)} to do", flush=True)
    run.marker.say(args.compile_limit)
    jobs = deep_gemm_jobs([entry.shape for entry in todo], run.arch) if run.module is not None else []
    jobs += triton_jobs([(entry.shape, config) for entry in todo for config in configs[entry.name]])
    compile_ahead([] if args.compiled else jobs, args.jobs)
    missed = _duel_entries(run, left, configs, 1, args.rounds)
    if not missed and args.duel_again:
        kept = rows_file.read(args.out)
        roles = ["ours"] * bool(choices) + ["select"] * args.select
        again = set().union(*(summary.beyond_limits(kept, role) for role in roles)) - hopeless(args.rows)
        again -= {row["name"] for row in kept if row["attempt"] > 1 and row["status"] == "correct"}
        print(f"{len(again)} entries are beyond a limit and duelled again: {', '.join(sorted(again))}", flush=True)
        missed += _duel_entries(run, [e for e in todo if e.name in again], configs, 2, 2 * args.rounds)
    return missed


def _duel_entries(
    run: Run, todo: Sequence[Entry], configs: dict[str, dict[Config, str]], attempt: int, rounds: int
) -> int:
    for index, entry in enumerate(todo):
        if time.time() > run.deadline:
            return len(todo) - index
        begun = time.time()
        bad = failed(run.args.rows)
        run.measure_ceilings(entry)
        run.marker.say(run.args.silence, entry.name)
        problem = run.problem(entry, attempt - 1)
        variants = [
            run.ours(problem, config, roles)
            for config, roles in configs[entry.name].items()
            if (entry.name, json.dumps(config.to_dict()), None) not in bad
        ]
        if run.module is not None:
            variants += [
                peer_variant(run.module, problem, tokens)
                for tokens in peer_tokens(entry.shape, run.arch)
                if (entry.name, None, tokens) not in bad
            ]
        for variant in variants:
            run.check(entry, problem, variant)
        before = _clock_mhz()
        run.time(entry, problem, variants, rounds, seed=attempt)
        rows_file.append(run.args.out, run.rows(entry, problem, variants, attempt, (before, _clock_mhz())))
        times = ", ".join(
            f"{v.roles if v.tokens_per_row is None else v.label} "
            + (f"{v.timing.median_us:.2f}" if v.timing.samples_us else v.timing.status)
            for v in variants
        )
        ceiling = f"{run.ceilings['read_tbps']} TB/s, {run.ceilings['fp8_tflops']} TFLOP/s"
        print(f"{entry.name}: {times} ({ceiling}, {time.time() - begun:.1f} s)", flush=True)
        del problem, variants
    return 0


def failed(path: Path) -> set[tuple[Any, ...]]:
    """Launches that hung or took the GPU context down, as (entry, config, tokens_per_row): not tried again."""
    rows = [row for row in rows_file.read(path) if row["status"] == "runtime"]
    return {(row["name"], row["config"], row["tokens_per_row"]) for row in rows}


def hopeless(path: Path) -> set[str]:
    """Entries that went wrong as a whole, no launch being to blame."""
    return {name for name, config, tokens in failed(path) if config is None and tokens is None}


def choose(args: Any, todo: Sequence[Entry], deadline: float) -> int:
    """Fix a config for each entry: all candidates briefly, then the best of each kernel at length."""
    run = Run(args, deadline)
    listed = shortlist(args.shortlist)
    choices = rows_file.read_choices(args.choices)
    left = [entry for entry in todo if entry.name not in choices and entry.name not in hopeless(args.rows)]
    configs = {e.name: choice_candidates(e.shape, run.arch, listed) for e in left}
    total = sum(map(len, configs.values()))
    print(f"{run.arch.name}: {len(left)} of {len(todo)} entries to choose for, {total} candidates", flush=True)
    run.marker.say(args.compile_limit)
    jobs = triton_jobs([(e.shape, c) for e in left for c in configs[e.name]])
    compile_ahead([] if args.compiled else jobs, args.jobs)
    about: dict[str, Any] = {
        name: run.environment.get(name) for name in ("device_name", "driver", "torch_version", "triton_version")
    }
    about["git_commit"] = run.environment.get("git_commit")
    earlier = rows_file.read_about(args.choices)  # of the choices that are there already
    if earlier is not None:
        about["earlier"] = earlier
    hashes: dict[str, str] = {}
    for index, entry in enumerate(left):
        if time.time() > deadline:
            return len(left) - index
        begun = time.time()
        bad = failed(args.rows)
        run.marker.say(args.silence, entry.name)
        problem = run.problem(entry, 1)
        variants = [
            run.ours(problem, config, config.kernel)
            for config in configs[entry.name]
            if (entry.name, json.dumps(config.to_dict()), None) not in bad
        ]
        for variant in variants:
            run.check(entry, problem, variant)
        run.time(entry, problem, variants, args.first_rounds, seed=1)
        finalists = best_of_each(variants, FINALISTS)
        for variant in finalists:
            variant.timing.samples_us = []
        run.time(entry, problem, finalists, args.rounds, seed=2)
        choices[entry.name] = made = make_choice(entry, finalists)
        hashes |= {kernel: kernel_source_hash(kernel) for kernel in {v.timing.config.kernel for v in finalists}}
        about["kernel_hash"] = hashes
        about["measured_at"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        rows_file.write_choices(args.choices, about, choices)
        wrong = [v for v in variants if v.timing.status not in ("correct", "constraints")]
        for variant in wrong[:3]:
            print(f"  {entry.name} {variant.label}: {variant.timing.status}: {variant.timing.reason}", flush=True)
        text = ", ".join(f"{key} {value:.2f}" for key, value in made["latency_us"].items())
        print(f"{entry.name}: {text} of {len(variants)}, {len(wrong)} failed ({time.time() - begun:.1f} s)", flush=True)
        del problem, variants, finalists
    return 0


def best_of_each(variants: Sequence[Variant], count: int) -> list[Variant]:
    """The `count` fastest of each kernel, in order of time."""
    found: list[Variant] = []
    taken: dict[str, int] = {}
    for variant in sorted((v for v in variants if v.timing.samples_us), key=lambda v: v.timing.median_us):
        kernel = variant.timing.config.kernel
        taken[kernel] = taken.get(kernel, 0) + 1
        if taken[kernel] <= count:
            found.append(variant)
    return found


def make_choice(entry: Entry, finalists: Sequence[Variant]) -> dict[str, Any]:
    """The fastest finalist of all, and of each kernel, with their times."""
    choice: dict[str, Any] = {"contexts": entry.target.contexts}
    times: dict[str, float] = {}
    for variant in sorted((v for v in finalists if v.timing.samples_us), key=lambda v: v.timing.median_us):
        for role in ("ours", variant.timing.config.kernel):
            if role not in times:
                choice[role] = variant.timing.config.to_dict()
                times[role] = round(variant.timing.median_us, 4)
    return {**choice, "latency_us": times}


def child(args: Any, todo: Sequence[Entry], deadline: float) -> int:
    """What the child process does: 0 done, 4 the deadline came first."""
    missed = choose(args, todo, deadline) if args.choose else duel(args, todo, deadline)
    args.marker.unlink(missing_ok=True)
    print(f"{missed} entries left", flush=True)
    return 4 if missed else 0
