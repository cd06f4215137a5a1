"""Profiles in Kernel Tuner's and aiter's forms: what goes out comes in again, and foreign files get careful rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import synthetic

from tilewise import cli
from tilewise.data import exchange
from tilewise.data.convert import read_rows
from tilewise.data.records import check_row
from tilewise.data.store import import_file, load_profile, write_rows
from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, candidates

SHAPE = synthetic.SHAPES[3]
ROWS = [synthetic.synthetic_row(SHAPE, config, arch="h100") for config in candidates(SHAPE, get_arch("h100"))[:4]]
FAILED = {
    **ROWS[3], "status": "compile", "reason": "no", "latency_us": None, "latency_p20_us": None, "latency_p80_us": None,
}  # fmt: skip


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_t4_results_come_back_as_the_rows_that_they_were(tmp_path: Path) -> None:
    rows = [*ROWS[:3], {**FAILED, "run_id": "other"}]
    path = write(tmp_path / "t4.json", exchange.t4_document(rows))
    read = [row for _, row in read_rows(path)]
    assert all(isinstance(row, dict) and check_row(row) is None for row in read)
    for row, was in zip(read, rows, strict=True):
        assert {name: row.get(name) or "" for name in was} == pytest.approx({n: v or "" for n, v in was.items()})


def test_kernel_tuners_own_file_is_taken_with_defaults_and_not_believed_to_be_cold(tmp_path: Path) -> None:
    result = {
        "timestamp": "2026-02-03 04:05:06.789+00:00",
        "configuration": {**SHAPE.to_dict(), "split_kv": 4, "num_warps": 4, "not_ours": 7},
        "times": {"compilation": 10.0, "runtimes": [0.031, 0.030, 0.034]},
        "invalidity": "correct",
        "correctness": 1,
        "measurements": [{"name": "time", "value": 0.031, "unit": "ms"}],
        "objectives": ["time"],
    }
    bad = {**result, "invalidity": "runtime"}
    path = write(tmp_path / "kt.json", {"results": [result, bad, {"x": 1}], "schema_version": "1.0.0"})
    rows = [row for _, row in read_rows(path, {"arch": "h100"})]
    assert (rows[0]["latency_us"], rows[0]["measured_at"]) == (pytest.approx(31.0), "2026-02-03T04:05:06Z")
    assert (rows[0]["timing_method"], rows[0]["cache_state"], rows[0]["rounds"]) == ("eager", "warm", 3)
    assert check_row(rows[0]) is None
    assert (rows[1]["status"], check_row(rows[1])) == ("runtime", None)
    assert "not a T4 result" in rows[2]
    assert "arch" in str(check_row(next(row for _, row in read_rows(path))))  # nobody says which GPU it was
    report = import_file(path, tmp_path / "home", defaults={"arch": "h100"})
    assert (report.accepted, report.rejected) == (2, 1)


@pytest.mark.parametrize("text", ['{"results": [', '{"schema_version": "2.0.0", "results": []}', '{"results": [1]}'])
def test_a_document_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t4.json"
    path.write_text(text)
    with pytest.raises(InvalidProfileError, match="T4"):
        list(read_rows(path))


def test_aiters_form_has_the_best_config_of_each_shape_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(ROWS[:3], tmp_path / "rows.parquet")
    import_file(tmp_path / "rows.parquet", tmp_path / "home")
    out = tmp_path / "tuned.csv"
    words = ["export", "--arch", "h100", "--home", str(tmp_path / "home")]
    assert cli.main([*words, "--format", "aiter", "--out", str(out)]) == 0
    (row,) = csv.DictReader(out.read_text().splitlines())
    best = min(ROWS[:3], key=lambda row: row["latency_us"])
    assert tuple(row) == exchange.AITER_COLUMNS
    assert float(row["us"]) == pytest.approx(best["latency_us"])
    assert (row["gfx"], row["cu_num"], row["splitK"]) == ("sm90", "132", str(best["split_kv"]))
    assert exchange.parse_config(row["kernelName"]).to_dict() == {name: best[name] for name in Config().to_dict()}
    (back,) = [row for _, row in read_rows(out, {"arch": "h100"})]
    assert check_row(back) is None
    assert back["latency_us"] == pytest.approx(best["latency_us"])
    into = ["import", str(out), "--set", "arch=h100", "--home", str(tmp_path / "again")]
    assert cli.main(into) == 0
    assert "training passes over 1 of these timings" in capsys.readouterr().err
    assert cli.main([*into, "--set", "timing_method=graph", "--set", "cache_state=cold"]) == 0
    assert "passes over" not in capsys.readouterr().err
    for form, count in (("jsonl", 3), ("t4", 3)):
        assert cli.main([*words, "--format", form, "--out", str(out)]) == 0
        again = tmp_path / f"home-{form}"
        assert import_file(out, again).accepted == count
        assert (
            load_profile(synthetic.OP, "h100", home=again).digest
            == load_profile(synthetic.OP, "h100", home=tmp_path / "home").digest
        )


def test_a_t4_result_that_is_none_costs_no_other(tmp_path: Path) -> None:
    result = {"configuration": {**SHAPE.to_dict(), "arch": "h100"}, "times": {"runtimes": [0.031]}}
    unknown = {**result, "configuration": {**SHAPE.to_dict(), "arch": "h900"}}
    too_long = {**result, "times": {"runtimes": [10**400]}}
    path = write(tmp_path / "t4.json", {"schema_version": "1.0.0", "results": [result, unknown, too_long, result]})
    rows = [row for _, row in read_rows(path)]
    assert [isinstance(row, dict) and check_row(row) is None for row in rows] == [True, False, False, True]
    assert "arch must be" in rows[1]
    report = import_file(path, tmp_path / "home")
    assert (report.accepted, report.duplicates, [number for number, _ in report.reasons]) == (1, 1, [2, 3])


@pytest.mark.parametrize("name", [b"\xff", b"x" * 200_000, b'"a" b', b'"never closed', b'"' + b"x,\n" * (1 << 19)])
def test_a_tuned_table_that_is_no_csv_is_refused(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / "tuned.csv"
    row = f"sm90,132,{','.join(str(value) for value in SHAPE.to_dict().values())},portable,0,1,50,".encode()
    path.write_bytes(",".join(exchange.AITER_COLUMNS).encode() + b"\n" + row + name + b",1,1,0\n")
    with pytest.raises(InvalidProfileError, match=r"tuned\.csv"):
        import_file(path, tmp_path / "home", defaults={"arch": "h100"})


@pytest.mark.parametrize("word", ["arch", "nope=1", "rounds=many"])
def test_a_default_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(InvalidProfileError):
        exchange.parse_defaults([word])


@pytest.mark.parametrize("config", [Config(), *candidates(SHAPE, get_arch("h200"))[:20]], ids=str)
def test_a_printed_config_is_read_back(config: Config) -> None:
    assert exchange.parse_config(str(config)) == config
