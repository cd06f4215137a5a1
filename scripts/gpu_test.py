"""Run the tests that need a GPU, and keep the result; or check that the kept results are of today's kernels.

    python scripts/gpu_test.py [--out FOLDER]     on a GPU machine; writes FOLDER/<arch>.json
    python scripts/gpu_test.py --check            anywhere

The GPU machine may be offline and needs Python 3.10 or newer, torch, Triton, numpy and pytest. tilewise need not be
installed there: a temporary folder in which `tilewise` is a link to this checkout goes on the path. Only test files
that have a test marked `gpu` are collected, so only they have to do with those packages.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "gpu_results"
# Like `python -m pytest`, but without the working folder on the path: there, `data` and `kernels` at the root would
# hide other packages of these names.
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result goes (default: tests/gpu_results)")
    parser.add_argument("--check", action="store_true", help="run nothing; fail when a kept result is stale or missing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tilewise").symlink_to(ROOT)
        sys.path.insert(0, folder)
        if arguments.check:
            return report_problems(find_problems(RESULTS))
        return run(arguments.out, Path(folder))


def run(out: Path, folder: Path) -> int:
    """Run the tests marked `gpu` and write the result file; 0 when something passed and nothing failed."""
    try:
        import torch
    except ModuleNotFoundError:
        print(f"{sys.executable} has no torch, which these tests need; PYTHON=... names another", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("torch sees no GPU on this machine: nothing was tested", file=sys.stderr)
        return 1
    from tilewise.kernels.arch import current_arch

    arch = current_arch()
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    junit = folder / "junit.xml"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    hashes = kernel_hashes(arch.isa)  # before the run: what is tested, should a file change meanwhile
    command = [sys.executable, "-c", PYTEST, "-m", "gpu", f"--junitxml={junit}", *files]
    code = subprocess.call(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    if not junit.exists():
        return code or 1
    tests = count_tests(junit)
    result = {
        "arch": arch.name,
        "isa": arch.isa,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "kernels": hashes,
        "totals": dict(sum((collections.Counter(counts) for counts in tests.values()), collections.Counter())),
        "tests": tests,
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{arch.name}.json"
    target.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {target}: {result['totals']}")
    return code or int(not any("passed" in counts for counts in tests.values()))


def count_tests(junit: Path) -> dict[str, dict[str, int]]:
    """How many cases of each test function passed, failed and were skipped, from pytest's JUnit report."""
    tests: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{str(case.get('name')).split('[')[0]}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        tests[name][outcome] += 1
    return {name: dict(counts) for name, counts in sorted(tests.items())}


def environment() -> dict[str, str]:
    """The GPU and the versions that a result holds for."""
    import numpy
    import torch
    import triton

    return {
        "device_name": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "runtime": f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }


def driver_version() -> str:
    """The kernel driver's version as NVIDIA's tool or AMD's module states it, or "unknown"."""
    module = Path("/sys/module/amdgpu/version")
    if module.exists():
        return module.read_text().strip()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def kernel_hashes(isa: str) -> dict[str, str]:
    """The source hash of every registered kernel that GPUs of this ISA can run.

    A kernel whose source lies in a folder named after an ISA is for that one alone; any other runs everywhere.
    """
    from tilewise.kernels.arch import ARCHS
    from tilewise.kernels.registry import KERNELS, kernel_source_hash

    isas = {arch.isa for arch in ARCHS.values()}
    homes = {
        name: {part for source in kernel.sources for part in Path(source).parts} for name, kernel in KERNELS.items()
    }
    return {name: kernel_source_hash(name) for name in KERNELS if not homes[name] & isas or isa in homes[name]}


def find_problems(results: Path, profiles: Path = ROOT / "data" / "profiles") -> list[str]:
    """Why the kept results say nothing about today's kernels; empty when they do.

    A GPU that has a shipped profile or a result file must have a passing result for every kernel it can run.
    """
    from tilewise.kernels.arch import get_arch

    problems = []
    names = {path.stem for path in results.glob("*.json")} | {path.stem for path in profiles.glob("*/*.parquet")}
    for name in sorted(names):
        file = results / f"{name}.json"
        if not file.exists():
            problems.append(f"{name} has a shipped profile, but no result of the GPU tests")
            continue
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if result["arch"] != name:
            problems.append(f"{name}: the file holds a result of {result['arch']}")
        if result["totals"].get("failed", 0) or not result["totals"].get("passed", 0):
            problems.append(f"{name}: not a green run: {result['totals']}")
        for kernel, current in kernel_hashes(get_arch(name).isa).items():
            kept = result["kernels"].get(kernel)
            if kept is None:
                problems.append(f"{name}: kernel {kernel} was not tested")
            elif kept != current:
                problems.append(f"{name}: kernel {kernel} has changed since {result['date']} ({kept}, now {current})")
    return problems


def report_problems(problems: list[str]) -> int:
    for problem in problems:
        print(f"stale GPU result: {problem}", file=sys.stderr)
    if problems:
        print("Run `make gpu-test` on that GPU and commit what it writes.", file=sys.stderr)
    else:
        kept = ", ".join(sorted(path.stem for path in RESULTS.glob("*.json")))
        print(f"GPU results are of today's kernels: {kept or 'none kept, and no profile shipped'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
