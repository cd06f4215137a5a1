"""benchmarks/prototypes.py and scripts/sanitize.py without a GPU: what they compare, and what they make of reports."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import prototypes  # noqa: E402
import sanitize  # noqa: E402
from peers_entries import entries  # noqa: E402

ENTRIES = [entry for entry in entries() if entry.group in prototypes.GROUPS]


def row(entry: str, role: str, us: float | None, attempt: int = 1) -> dict[str, Any]:
    status = "correct" if us else "compile"
    return {"entry": entry, "role": role, "latency_us": us, "attempt": attempt, "status": status}


def test_every_launch_has_configs_of_both_prototypes() -> None:
    assert len(ENTRIES) == 96
    for prototype in prototypes.PROTOTYPES:
        configs = prototypes.read_configs(prototype)
        assert {entry.name for entry in ENTRIES} == set(configs)
        for entry in ENTRIES:
            for config in configs[entry.name]:
                tokens = config.get("fuse_n", entry.shape.next_n)
                assert entry.shape.next_n % tokens == 0
                assert tokens % config["dot_n"] == 0


def test_one_job_for_each_binary_of_a_prototype() -> None:
    theirs = {prototype: prototypes.read_configs(prototype) for prototype in prototypes.PROTOTYPES}
    jobs = prototypes.compile_jobs(ENTRIES, {entry.name: {} for entry in ENTRIES}, theirs)
    assert len(jobs) == len({(job[0], job[1].name, str(job[2])) for job in jobs})
    listed = sum(len(configs) for one in theirs.values() for configs in one.values())
    assert 0 < len(jobs) < listed


def test_the_faster_prototype_counts_and_the_last_attempt() -> None:
    rows = [
        row("a", "gluon_hopper", 10.0), row("a", "plain_triton", 8.0), row("a", "ours+select", 8.1),
        row("b", "gluon_hopper", 5.0), row("b", "plain_triton", None), row("b", "ours", 5.2), row("b", "select", 5.0),
    ]  # fmt: skip
    assert prototypes.ratios(rows, "ours") == pytest.approx({"a": 8.0 / 8.1, "b": 5.0 / 5.2})
    assert prototypes.beyond(rows)
    rows += [row("b", role, us, 2) for role, us in (("gluon_hopper", 5.0), ("ours", 5.05), ("select", 5.0))]
    assert prototypes.ratios(rows, "ours")["b"] == pytest.approx(5.0 / 5.05)
    assert not prototypes.beyond(rows)
    found = prototypes.figures(rows)
    assert found["ours"]["min_entry"] == "a"
    assert found["ours"]["beyond_2pct"] == []
    assert found["failed_launches"] == 1
    assert "| 2 |" in prototypes.table(rows)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    prototypes.append(path, [{**row("a", "ours", 1.5), "ignored": 1}])
    prototypes.append(path, [row("b", "ours", None)])
    back = prototypes.read(path)
    assert [(one["entry"], one["latency_us"]) for one in back] == [("a", 1.5), ("b", None)]
    with path.open() as file:
        assert next(csv.reader(file)) == list(prototypes.COLUMNS)


HAZARD = """========= Error: Potential RAW hazard detected at __shared__ 0xcf66 in block (2,0,0) :
=========     Write Thread (31,0,0) at _paged_mqa_logits_kernel+0x3360 in kernels.py:{first}
=========     Read Thread (320,0,0) at _paged_mqa_logits_kernel+0x180 in {name}:{second}
=========     Current Value : 1
"""


def test_hazards_of_the_handing_over_are_told_from_others() -> None:
    lines = sorted(sanitize.handover_lines())
    source = (ROOT / "kernels/paged_mqa_logits/sm90/kernels.py").read_text().splitlines()
    assert "def _paged_mqa_logits_kernel(" in source[lines[0] - 1]
    assert all("buf" not in source[n - 1] or "share" in source[n - 1] for n in lines)  # calls alone: no work
    own, other = lines[0], lines[0] - 1
    for first, name, second, handover in (
        (own, "kernels.py", lines[1], 1),
        (own, "kernels.py", other, 0),
        (other, "kernels.py", own, 0),
        (own, "epilogue.py", own, 0),
    ):
        text = HAZARD.format(first=first, name=name, second=second)
        assert sanitize.hazards(text) == {"records": 1, "handover": handover}
    group = "========= Error: Race reported between Read access at k+0x180 in kernels.py:{}\n"
    group += "=========     and Write access at k+0x3360 in kernels.py:{} [11 hazards]\n========= \n"
    both = HAZARD.format(first=own, name="kernels.py", second=own) + "========= \n" + group.format(own, own)
    assert sanitize.hazards(both) == {"records": 2, "handover": 2}
    assert sanitize.hazards(both + group.format(own, other)) == {"records": 3, "handover": 2}
    assert sanitize.hazards("========= Error: Race reported between what nobody knows\n") == {
        "records": 1,
        "handover": 0,
    }
