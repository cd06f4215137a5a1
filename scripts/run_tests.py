"""Run the test suite: the tests that interpret Triton kernels in one process, all others in another.

    python scripts/run_tests.py [PYTEST ARGUMENT...]

Triton decides when it is imported whether kernels are compiled or interpreted, so one process cannot do both. Each is
dealt to as many workers as there are processors, whole files to each; `-n 0` is for one process, as a debugger needs.
The last line sums the two up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Like `python -m pytest`, but without the working folder on the path: there, `data` and `kernels` at the root would
# hide other packages of these names.
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"
NO_TESTS = 5  # pytest's exit code when nothing was selected
MOST_WORKERS = 8  # each may hold a gigabyte
SUITES = {"not interpret": {}, "interpret": {"TRITON_INTERPRET": "1"}}


def workers() -> list[str]:
    """Arguments that deal test files to one worker for each processor that this process may use."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ["-n", str(min(processors, MOST_WORKERS)), "--dist", "loadfile"] if processors > 1 else []


def run_suite(marker: str, variables: dict[str, str], arguments: list[str], report: Path) -> tuple[int, dict[str, int]]:
    """One pytest process: its exit code, and how many tests passed, failed and were skipped."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-c", PYTEST, "-m", marker, f"--junitxml={report}", *workers(), *arguments]
    print(f"\n{''.join(f'{name}={value} ' for name, value in variables.items())}pytest -m '{marker}'", flush=True)
    code = subprocess.call(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - failed - skipped
    if code == NO_TESTS and arguments:
        code = 0  # a selection by the caller may well lie in one suite alone
    elif code and not counts["failed"]:
        counts["failed"] = 1  # pytest itself broke, or found no test at all
    return code, counts


def main() -> int:
    total = {"passed": 0, "failed": 0, "skipped": 0}
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (marker, variables) in enumerate(SUITES.items()):
            code, counts = run_suite(marker, variables, sys.argv[1:], Path(folder) / f"{number}.xml")
            worst = worst or code
            total = {name: total[name] + counts[name] for name in total}
    print(", ".join(f"{number} {name}" for name, number in total.items()), flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
