"""A part of what `make soak` does, on every run: damaged profiles and bundles, and the API under schemathesis."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sqlalchemy")
pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")

import fuzzing
from service_process import serving

INPUTS = 2000


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of absurd numbers that a bundle may hold
def test_damaged_profiles_and_bundles_are_refused_by_name() -> None:
    outcomes = fuzzing.fuzz(INPUTS, seed=1)
    assert sum(outcomes.values()) == INPUTS
    # The inputs are near enough to good ones that some are, and far enough that some are not.
    assert set(outcomes) == {
        "profile taken", "profile without a good row", "profile refused", "bundle taken", "bundle refused",
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")
def test_the_api_answers_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_RATE_LIMIT", "0")
    monkeypatch.setenv("TILEWISE_JOBS", "0")
    with serving(tmp_path, "--arch", "h200") as service:
        done = schemathesis(service.url, tmp_path, examples=5)
        assert service.get("/healthz") == {"status": "ok"}
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 200  # type: ignore[index]


def schemathesis(url: str, folder: Path, examples: int) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--max-examples", str(examples),
        "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "unsupported_method",
        "--suppress-health-check", "all", "--generation-deterministic", "--exclude-path-regex", "plots",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "30",
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
