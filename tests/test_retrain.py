"""The loop of improvement: timings are imported, a model is trained on them, a running service takes it up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import synthetic
from service_process import serving, tilewise

from tilewise.data.store import profile_files, write_rows
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates

ARCH = "h100"  # nothing is shipped for it, so that all rows are the test's own
NEW = Shape(4, 2, 32, 128, 64, 8192)
SWITCH_S = 1.0


def test_imported_timings_change_the_pick_of_a_running_service(tmp_path: Path) -> None:
    assert profile_files(synthetic.OP, ARCH, home=tmp_path) == []
    home = tmp_path / "home"
    home.mkdir()
    write_rows(synthetic.synthetic_rows(synthetic.SHAPES[::5], arch=ARCH), tmp_path / "first.parquet")
    assert tilewise("import", tmp_path / "first.parquet", home=home).returncode == 0
    first = json.loads(tilewise("train", "--arch", ARCH, "--folds", "0", "--json", home=home).stdout)
    question = {"arch": ARCH, **NEW.to_dict()}

    with serving(home, "--arch", ARCH) as service:
        before = service.get("/v1/select", question)
        assert before["model_id"] == first["model_id"]
        assert before["source"] != "exact"

        # Rows of the new shape, on which a config that was not picked is by far the fastest. One row is bad.
        fastest = next(c for c in candidates(NEW, get_arch(ARCH)) if c != Config.from_dict(before["config"]))
        rows = [
            synthetic.synthetic_row(NEW, config, arch=ARCH, pass_index=index, run_id="second", latency_us=us)
            | {"latency_p20_us": us, "latency_p80_us": us}
            for config in candidates(NEW, get_arch(ARCH))
            for index in (0, 1)
            for us in [5.0 if config == fastest else 50.0]
        ]
        lines = [json.dumps(row) for row in rows] + [json.dumps({**rows[0], "latency_us": -1.0})]
        (tmp_path / "second.jsonl").write_text("\n".join(lines))
        imported = tilewise("import", tmp_path / "second.jsonl", home=home)
        assert imported.returncode == 1
        assert f"row {len(lines)}: latency_us must be a positive number" in imported.stderr
        assert f"{len(rows)} rows accepted, 0 repeated, 1 rejected" in imported.stdout

        second = json.loads(tilewise("train", "--arch", ARCH, "--folds", "0", "--json", home=home).stdout)
        assert second["rows"] == first["rows"] + len(rows)
        time.sleep(SWITCH_S)
        after = service.get("/v1/select", question)
        assert after["model_id"] == second["model_id"] != first["model_id"]
        assert after["source"] == "exact"
        assert Config.from_dict(after["config"]) == fastest

        # Import in a process of its own, and the way back.
        picked = json.loads(tilewise("select", "--arch", ARCH, *flags(NEW), "--json", home=home).stdout)
        assert {name: after[name] for name in picked} == picked
        assert tilewise("models", "--arch", ARCH, "--rollback", home=home).returncode == 0
        time.sleep(SWITCH_S)
        assert service.get("/v1/select", question) == before


def test_training_again_on_the_same_rows_gives_the_same_bundle(tmp_path: Path) -> None:
    rows = synthetic.synthetic_rows(synthetic.SHAPES[:6], arch=ARCH)
    digests = set()
    for name, parts in (("one", [rows]), ("two", [rows[::-2], rows[::2], rows[1::2]])):
        for number, part in enumerate(parts):
            write_rows(part, tmp_path / f"{name}{number}.parquet")
            assert tilewise("import", tmp_path / f"{name}{number}.parquet", home=tmp_path / name).returncode == 0
        trained = tilewise(
            "train", "--arch", ARCH, "--json", "--out", tmp_path / f"bundle-{name}", home=tmp_path / name
        )
        assert trained.returncode == 0, trained.stderr
        digests.add((json.loads(trained.stdout)["digest"], json.loads(trained.stdout)["profile_digest"]))
        assert (tmp_path / f"bundle-{name}" / "manifest.json").is_file()
        assert not (tmp_path / name / "models").exists()  # --out publishes nothing
    assert len(digests) == 1


def flags(shape: Shape) -> list[str]:
    return [word for name, value in shape.to_dict().items() for word in ("--" + name.replace("_", "-"), str(value))]
