"""Profile files: what is accepted, what is refused and why, and that the store is never torn."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("hypothesis")

import synthetic  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tilewise.data import convert, records, store  # noqa: E402
from tilewise.data.home import home_dir, require_writable  # noqa: E402
from tilewise.errors import InvalidProfileError  # noqa: E402
from tilewise.kernels.arch import ARCHS  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Shape, default_config, floor_us, flops  # noqa: E402
from tilewise.kernels.registry import OPS  # noqa: E402

# An arch that no shipped profile describes, so that what is loaded is what the test imported.
ARCH = "sm90-7cu"
ROWS = [dict(row, arch=ARCH, compute_units=7) for row in synthetic.synthetic_rows(synthetic.SHAPES[:3])]
GOOD = ROWS[0]


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(records.COLUMN_NAMES)
        writer.writerows([["" if row.get(n) is None else row[n] for n in records.COLUMN_NAMES] for row in rows])
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {"parquet": write_parquet, "json_lines": write_json_lines, "csv": write_csv}


def stored(home: Path) -> list[Path]:
    return sorted(p for p in home.rglob("*") if p.is_file())


@pytest.mark.parametrize("form", WRITERS)
def test_import_takes_every_format_and_load_gives_the_rows_back(form: str, tmp_path: Path) -> None:
    report = store.import_file(WRITERS[form](tmp_path / "rows.txt", ROWS), tmp_path / "home")
    assert (report.accepted, report.duplicates, report.rejected) == (len(ROWS), 0, 0)
    assert report.new
    profile = store.load_profile(synthetic.OP, ARCH, home=tmp_path / "home")
    assert len(profile) == len(ROWS)
    back = sorted(zip(*(profile.columns[n].tolist() for n in ("batch_size", "split_kv", "latency_us")), strict=True))
    assert back == sorted((row["batch_size"], row["split_kv"], row["latency_us"]) for row in ROWS)
    assert profile.columns["latency_us"].dtype == float
    assert profile.columns["batch_size"].dtype == int
    assert profile.columns["kernel"].dtype == object


def test_the_digest_is_of_the_rows_alone(tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    digests = set()
    for name, rows in (("a", ROWS), ("b", shuffled), ("c", [*shuffled, *ROWS[:5]])):
        for form, write in WRITERS.items():
            home = tmp_path / f"{name}-{form}"
            store.import_file(write(tmp_path / "rows", rows), home)
            digests.add(store.load_profile(synthetic.OP, ARCH, home=home).digest)
    # In two files instead of one, with an overlap.
    for part in (ROWS[:20], ROWS[15:]):
        store.import_file(write_json_lines(tmp_path / "rows", part), tmp_path / "two")
    two = store.load_profile(synthetic.OP, ARCH, home=tmp_path / "two")
    assert len(two) == len(ROWS)
    assert digests == {two.digest}
    changed = [dict(ROWS[0], latency_us=ROWS[0]["latency_us"] * 1.0001), *ROWS[1:]]
    store.import_file(write_json_lines(tmp_path / "rows", changed), tmp_path / "changed")
    assert store.load_profile(synthetic.OP, ARCH, home=tmp_path / "changed").digest != two.digest


def test_columns_come_in_one_order_whatever_the_order_of_the_files(tmp_path: Path) -> None:
    profiles = []
    for name, rows in (("a", ROWS), ("b", ROWS[::-1])):
        store.import_file(write_json_lines(tmp_path / "rows", rows), tmp_path / name)
        profiles.append(store.load_profile(synthetic.OP, ARCH, home=tmp_path / name))
    for name in records.COLUMN_NAMES:
        assert profiles[0].columns[name].tolist() == pytest.approx(profiles[1].columns[name].tolist(), nan_ok=True)


def test_importing_the_same_rows_again_changes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = store.import_file(write_json_lines(tmp_path / "a", ROWS), home)
    before = [(p, p.stat().st_mtime_ns) for p in stored(home)]
    second = store.import_file(write_parquet(tmp_path / "b", ROWS[::-1]), home)
    assert first.new
    assert not second.new
    assert second.files[0].path == first.files[0].path
    assert [(p, p.stat().st_mtime_ns) for p in stored(home)] == before


def test_duplicate_rows_in_a_file_count_once(tmp_path: Path) -> None:
    report = store.import_file(write_json_lines(tmp_path / "a", [GOOD, GOOD, ROWS[1]]), tmp_path / "home")
    assert (report.accepted, report.duplicates) == (2, 1)


def test_rows_of_several_archs_are_filed_apart(tmp_path: Path) -> None:
    rows = [GOOD, dict(GOOD, arch="sm90-8cu", compute_units=8)]
    report = store.import_file(write_json_lines(tmp_path / "a", rows), tmp_path)
    assert [file.arch for file in report.files] == [ARCH, "sm90-8cu"]
    assert len(store.load_profile(synthetic.OP, "sm90-8cu", home=tmp_path)) == 1


def test_a_home_without_profiles_gives_an_empty_profile(tmp_path: Path) -> None:
    profile = store.load_profile(synthetic.OP, ARCH, home=tmp_path)
    assert len(profile) == 0
    assert set(profile.columns) == set(records.COLUMN_NAMES)


# A5, A11, F1: every form of a time that is none. The text is what stands in the JSON.
BAD_TIMES = ["NaN", "Infinity", "-Infinity", "1e400", "-1.0", "0", "0.0", '"12.5"', "[1.0, 2.0]", "null", "true", "{}"]


@pytest.mark.parametrize("text", BAD_TIMES)
def test_a_time_that_is_no_time_is_refused_by_name(text: str, tmp_path: Path) -> None:
    good = json.dumps(dict(GOOD, latency_us="HERE"))
    (tmp_path / "a").write_text(good.replace('"HERE"', text) + "\n" + json.dumps(ROWS[1]) + "\n")
    report = store.import_file(tmp_path / "a", tmp_path / "home")
    assert (report.accepted, report.rejected) == (1, 1)
    ((number, reason),) = report.reasons
    assert number == 1
    assert "latency_us" in reason


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"op": "paged"}, "op"),
        ({"arch": "../../h200"}, "arch"),
        ({"arch": ""}, "arch"),
        # Names under which no device would look for its timings.
        ({"arch": "sm90"}, "arch must be one of h200"),
        ({"arch": "h2000"}, "arch must be one of h200"),
        ({"arch": "sm90-007cu"}, "arch must be one of h200"),
        ({"arch": "gfx950-256cu", "compute_units": 256}, "arch must be one of h200"),
        ({"arch": "sm90-0cu", "compute_units": 0}, "arch must be one of h200"),
        ({"arch": "sm90-8cu"}, "compute_units must be 8"),
        ({"arch": "h100"}, "compute_units must be 132"),
        ({"contexts": "Drawn by hand, see below"}, "contexts"),
        ({"contexts": ""}, "contexts"),
        ({"logits_width": GOOD["max_context_len"] - 1}, "logits_width"),
        ({"pass_index": 3}, "pass_index"),
        ({"measured_at": "yesterday"}, "measured_at"),
        ({"measured_at": "2026-02-31T00:00:00Z"}, "measured_at"),
        ({"measured_at": "2026-01-31T00:00:00+02:00"}, "measured_at"),
        ({"measured_at": "9026-01-31T00:00:00Z"}, "measured_at must not lie in the future"),
        ({"max_error": -1e-6}, "max_error"),
        ({"max_error": 0.011}, "max_error"),
        ({"latency_p20_us": 0.3, "latency_us": 0.4}, "latency_us must be at least 0.5"),
        ({"latency_us": 61e6, "latency_p80_us": 61e6}, "at most 60000000"),
        ({"latency_p80_us": 61e6}, "at most 60000000"),
        ({"num_warps": 3}, "config cannot launch"),
        ({"fuse_n": 2}, "config cannot launch"),
        ({"epilogue": "max"}, "config cannot launch"),
        ({"arch": "sm75-7cu"}, "config cannot launch"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 10**30}, "batch_size"),
        ({"heads": 7}, "heads"),
        ({"cache_layout": "tiled"}, "cache_layout"),
        ({"status": "ok"}, "status"),
        ({"status": "compile", "reason": "", "latency_us": None}, "reason"),
        ({"status": "timeout", "reason": "slow"}, "latency_us"),
        ({"latency_p20_us": 1e9}, "percentiles"),
        ({"rounds": 0}, "rounds"),
        ({"timing_method": "wall"}, "timing_method"),
        ({"cache_state": "lukewarm"}, "cache_state"),
        ({"footprint_bytes": None}, "footprint_bytes"),
        ({"max_error": float("nan")}, "max_error"),
        ({"device_name": "\ud800"}, "device_name"),
        ({"device_name": "x" * (records.MAX_TEXT + 1)}, "device_name"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    path = write_json_lines(tmp_path / "a", [ROWS[1], dict(GOOD, **changes)])
    report = store.import_file(path, tmp_path / "home", on_reject=lambda *bad: seen.append(bad))
    assert (report.accepted, report.rejected) == (1, 1)
    assert report.reasons == seen
    assert seen[0][0] == 2
    assert named in seen[0][1]
    assert "\n" not in seen[0][1]


LARGE = Shape(64, 6, 64, 128, 64, 32768)


@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "cpu"])
@pytest.mark.parametrize("cache_state", ["cold", "warm"])
def test_a_time_under_the_floor_is_refused_and_one_near_it_taken(arch: str, cache_state: str) -> None:
    """What moves and multiplies this much takes this long; a warm cache saves the moving alone."""
    facts = ARCHS[arch]
    floor = floor_us(LARGE, facts) if cache_state == "cold" else flops(LARGE) / (facts.fp8_tflops * 1e6)
    assert floor > records.LEAST_US
    row = synthetic.synthetic_row(LARGE, default_config(LARGE, facts), arch=arch, cache_state=cache_state)
    for factor, accepted in ((0.79, False), (0.81, True)):
        time = factor * floor
        reason = records.check_row({**row, "latency_us": time, "latency_p20_us": time, "latency_p80_us": time})
        assert (reason is None) == accepted, reason
        assert accepted or "latency_us must be at least" in str(reason)


def test_what_cannot_be_judged_is_taken() -> None:
    """A kernel that is not registered, rates of a GPU that nobody measured, and a launch that failed."""
    assert records.check_row(dict(GOOD, kernel="other", num_warps=3)) is None
    times = dict.fromkeys(("latency_us", "latency_p20_us", "latency_p80_us"), 0.6)
    fast = synthetic.synthetic_row(LARGE, default_config(LARGE, ARCHS["h200"]), **times)
    assert records.check_row(fast) is not None
    assert records.check_row(dict(fast, arch=ARCH, compute_units=7)) is None
    failed = dict(GOOD, status="constraints", reason="num_warps", num_warps=3, latency_us=None, max_error=9.0)
    assert records.check_row(failed) is None
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00.123456Z", "2026-11-29T19:16:28+00:00"):
        assert records.check_row(dict(GOOD, measured_at=text)) is None


def test_checking_a_row_stays_cheap() -> None:
    start = time.perf_counter()
    for _ in range(5):
        assert all(records.check_row(row) is None for row in ROWS)
    assert (time.perf_counter() - start) / (5 * len(ROWS)) < 1e-3  # measured: 3e-5 s


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b"1",
        b"null",
        b'{"a":1',
        b'{"op":1,"op":2}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
    ],
    ids=lambda line: repr(line[:12]),
)
def test_a_line_that_is_no_row_is_refused_and_the_rest_taken(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n" + json.dumps(ROWS[1]).encode())
    report = store.import_file(tmp_path / "a", tmp_path / "home")
    assert (report.accepted, [number for number, _ in report.reasons]) == (2, [3])


def test_an_endless_line_is_refused_without_holding_it(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file:
        file.write(json.dumps(GOOD) + '\n{"reason": "')
        for _ in range(8):
            file.write("x" * convert.MAX_ROW_BYTES)
        file.write('"}\n' + json.dumps(ROWS[1]) + "\n")
    report = store.import_file(tmp_path / "a", tmp_path / "home")
    assert (report.accepted, [number for number, _ in report.reasons]) == (2, [2])


def test_csv_numbers_are_read_strictly(tmp_path: Path) -> None:
    texts = ["1_6", " 16", "16.0", "0x10", "1e1", "", "16"]
    write_csv(tmp_path / "a", [dict(GOOD, rounds=text) for text in texts])
    report = store.import_file(tmp_path / "a", tmp_path / "home")
    assert [number for number, _ in report.reasons] == [1, 2, 3, 4, 5, 6]
    assert all("rounds" in reason for _, reason in report.reasons)


def test_whole_numbers_are_good_times(tmp_path: Path) -> None:
    row = dict(GOOD, latency_p20_us=11, latency_us=12, latency_p80_us=13)
    for form, write in WRITERS.items():
        assert store.import_file(write(tmp_path / form, [row]), tmp_path / "home").accepted == 1


def not_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1" + b"\0" * 100)


def truncated(path: Path) -> None:
    write_parquet(path, ROWS)
    path.write_bytes(path.read_bytes()[:-200])


def without_a_column(path: Path) -> None:
    write_parquet(path, [{k: v for k, v in row.items() if k != "latency_us" and k != "rounds"} for row in ROWS])


def with_another_column(path: Path) -> None:
    write_parquet(path, [dict(row, surprise=1) for row in ROWS])


BAD_FILES = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "named pipe": lambda path: os.mkfifo(path),
    "empty": lambda path: path.write_bytes(b""),
    "blank": lambda path: path.write_bytes(b" \n\n"),
    "null": lambda path: path.write_bytes(b"null"),
    "list": lambda path: path.write_bytes(b"[]"),
    "header alone": lambda path: write_csv(path, []),
    "no rows": lambda path: pq.write_table(pa.Table.from_pylist(ROWS[:1]).slice(0, 0), path),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "not UTF-8": lambda path: path.write_bytes(b"op,arch\n\xff\xfe,\n"),
    "prose": lambda path: path.write_text("Dear reader,\nthis is no profile.\n"),
    "repeated column": lambda path: path.write_text(",".join([*records.COLUMN_NAMES, "op"]) + "\n"),
    "open quote": lambda path: path.write_text(",".join(records.COLUMN_NAMES) + '\n"never closed\n'),
    "not Parquet": not_parquet,
    "truncated": truncated,
    "without a column": without_a_column,
    "with another column": with_another_column,
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_cannot_be_read_is_refused_whole(kind: str, tmp_path: Path) -> None:
    """A1: truncated, empty, not UTF-8, null and the like are one typed error, and leave nothing behind."""
    BAD_FILES[kind](tmp_path / "bad")
    with pytest.raises(InvalidProfileError, match="bad"):
        store.import_file(tmp_path / "bad", tmp_path / "home")
    assert stored(tmp_path / "home") == []


def test_a_pipe_is_refused_and_not_read_without_its_beginning(tmp_path: Path) -> None:
    rows = write_json_lines(tmp_path / "rows", ROWS[:20]).read_bytes()
    command = [sys.executable, "-c", KILLED, "/dev/stdin", str(tmp_path / "home")]
    run = subprocess.run(command, input=rows, capture_output=True, check=False)
    assert "/dev/stdin must be a regular file" in run.stderr.decode()
    assert stored(tmp_path / "home") == []


def test_a_small_file_that_stands_for_too_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.Table.from_pylist(ROWS[:20])
    long = pa.array(["x" * (5 * records.MAX_TEXT)] * 20)
    pq.write_table(table.set_column(table.schema.get_field_index("reason"), "reason", long), tmp_path / "text")
    with pytest.raises(InvalidProfileError, match="reason must be at most"):
        store.import_file(tmp_path / "text", tmp_path / "home")
    pq.write_table(table, tmp_path / "good")
    for limit, named in (("MAX_ROWS", "rows"), ("MAX_ROW_GROUP_BYTES", "row group")):
        with monkeypatch.context() as patched:
            patched.setattr(convert, limit, 19)
            with pytest.raises(InvalidProfileError, match=f"{named}.* got [0-9]+"):
                store.import_file(tmp_path / "good", tmp_path / "home")
    assert stored(tmp_path / "home") == []
    assert store.import_file(tmp_path / "good", tmp_path / "home").accepted == 20


@given(at=st.integers(0, 1 << 16), patch=st.binary(min_size=1, max_size=8), cut=st.integers(0, 1 << 16))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_parquet_file_is_a_typed_error_or_bad_rows(at: int, patch: bytes, cut: int, tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    if not good.exists():
        write_parquet(good, ROWS[:20])
    data = bytearray(good.read_bytes())
    at %= len(data)
    data[at : at + len(patch)] = patch
    if cut % 3 == 0:
        del data[cut % len(data) :]
    (tmp_path / "bad").write_bytes(data)
    try:
        report = store.import_file(tmp_path / "bad", tmp_path / "home")
    except InvalidProfileError:
        return
    assert report.accepted + report.duplicates + report.rejected <= 20


def test_a_stored_file_that_was_altered_is_refused_and_a_new_import_mends_it(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a", ROWS)
    report = store.import_file(source, tmp_path / "home")
    path = Path(report.files[0].path)
    assert path.stat().st_mode & 0o222 == 0
    path.unlink()
    store.write_rows([dict(row, latency_us=row["latency_p20_us"]) for row in ROWS], path)
    with pytest.raises(InvalidProfileError, match="damaged"):
        store.load_profile(synthetic.OP, ARCH, home=tmp_path / "home")
    assert store.import_file(source, tmp_path / "home").new
    assert len(store.load_profile(synthetic.OP, ARCH, home=tmp_path / "home")) == len(ROWS)


def test_write_rows_refuses_the_first_bad_row_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfileError, match="row 2: latency_us"):
        store.write_rows([GOOD, dict(GOOD, latency_us=-1.0)], tmp_path / "out" / "h200.parquet")
    assert stored(tmp_path) == []


KILLED = """
import sys
from tilewise.data import store
print("ready", flush=True)
store.import_file(sys.argv[1], sys.argv[2])
"""


def test_a_killed_import_leaves_all_rows_or_none(tmp_path: Path) -> None:
    """A2, F6: SIGKILL at any moment; then the store loads, and the same import completes."""
    source = write_parquet(tmp_path / "rows", ROWS)
    home = tmp_path / "home"
    outcomes = set()
    for delay in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2):
        process = subprocess.Popen([sys.executable, "-c", KILLED, source, home], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        outcomes.add(len(store.load_profile(synthetic.OP, ARCH, home=home)))
    assert outcomes <= {0, len(ROWS)}
    store.import_file(source, home)
    assert len(store.load_profile(synthetic.OP, ARCH, home=home)) == len(ROWS)


def test_what_killed_imports_left_is_cleared_after_an_hour(tmp_path: Path) -> None:
    """By the next import, whatever arch it is of."""
    now = time.time()
    for arch in (ARCH, "sm90-8cu"):
        folder = tmp_path / "profiles" / synthetic.OP / arch
        folder.mkdir(parents=True)
        for name, age_s in (("old", 3700), ("fresh", 3500)):
            (folder / f".incoming-{name}").touch()
            os.utime(folder / f".incoming-{name}", (now - age_s, now - age_s))
    store.import_file(write_json_lines(tmp_path / "a", ROWS), tmp_path)
    left = [path.name for path in tmp_path.rglob(".incoming-*")]
    assert left == [".incoming-fresh"] * 2  # another process may be writing it


def test_an_array_and_a_file_without_rows_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "array").write_text(json.dumps(ROWS, indent=1))
    with pytest.raises(InvalidProfileError, match="must be JSON lines, one object a line, got a JSON array"):
        store.import_file(tmp_path / "array", tmp_path / "home")
    with pytest.raises(InvalidProfileError, match="has no rows"):
        store.import_file(write_csv(tmp_path / "header", []), tmp_path / "home")


def test_rows_that_are_shipped_are_not_stored_again(tmp_path: Path) -> None:
    """A file of shipped rows adds nothing and says so; with one row that is new, it is kept whole."""
    (shipped,) = store.profile_files(synthetic.OP, "h200", home=tmp_path)
    rows = [row for _, row in zip(range(20), (row for _, row in convert.read_rows(shipped)), strict=False)]
    report = store.import_file(write_parquet(tmp_path / "a", rows), tmp_path / "home")
    assert (report.accepted, report.shipped, report.new) == (20, 20, False)
    assert report.files[0].path == str(shipped)
    assert stored(tmp_path / "home") == []
    report = store.import_file(write_parquet(tmp_path / "a", [*rows, synthetic_h200()]), tmp_path / "home")
    assert (report.accepted, report.shipped, report.new) == (21, 20, True)
    assert len(stored(tmp_path / "home")) == 1


def synthetic_h200() -> dict[str, Any]:
    return synthetic.synthetic_rows(synthetic.SHAPES[:1])[0]


def test_a_tilde_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_HOME", "~/kept")
    assert home_dir() == tmp_path / "kept"
    assert home_dir("~/other") == tmp_path / "other"
    monkeypatch.setenv("TILEWISE_HOME", "")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert home_dir() == tmp_path / ".local" / "share" / "tilewise"
    assert home_dir("~nobody-of-this-name/x") == Path("/nonexistent/x")


def test_a_folder_that_takes_no_files_is_found_at_once(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "under", Path("/proc/none")):
        with pytest.raises(OSError, match=f"{bad} must be a folder that can be written: "):
            require_writable(bad)


def test_imports_at_once_lose_nothing(tmp_path: Path) -> None:
    """F6: two processes add files to one store; both files are there."""
    sources = [write_json_lines(tmp_path / name, rows) for name, rows in (("a", ROWS[::2]), ("b", ROWS[1::2]))]
    command = [sys.executable, "-c", KILLED]
    runs = [subprocess.Popen([*command, s, tmp_path / "home"], stdout=subprocess.DEVNULL) for s in sources * 2]
    assert [run.wait() for run in runs] == [0] * 4
    assert len(store.load_profile(synthetic.OP, ARCH, home=tmp_path / "home")) == len(ROWS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_row_is_good(op: str, arch: str, tmp_path: Path) -> None:
    for path in store.profile_files(op, arch, home=tmp_path):
        for number, row in convert.read_rows(path):
            assert isinstance(row, dict), (path, number, row)
            assert records.check_row(row) is None, (path, number)
            assert (row["op"], row["arch"]) == (op, arch)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size", pa.array([[0] * 1000] * 2, pa.list_(pa.int8()))),
        ("reason", pa.array([b"x" * (8 << 20)] * 2, pa.binary(8 << 20))),
        ("reason", pa.array([b"x"] * 2)),
        ("measured_at", pa.array([0, 0], pa.timestamp("s"))),
        ("latency_us", pa.array([None, None], pa.decimal128(30, 3))),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.type),
)
def test_a_column_of_a_type_that_no_row_has_is_refused_before_it_is_unpacked(
    name: str, values: Any, tmp_path: Path
) -> None:
    """Lists of zeros, or one long value repeated, pack to nothing and unpack to gigabytes."""
    table = pa.Table.from_pylist(ROWS[:2])
    table = table.set_column(table.schema.get_field_index(name), name, values)
    path = tmp_path / "packed.parquet"
    pq.write_table(table, path)
    with pytest.raises(InvalidProfileError, match=f"{name} must hold plain values"):
        store.import_file(path, tmp_path / "home")
    assert stored(tmp_path / "home") == []


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_of_any_arrow_type_and_columns_of_nulls_are_taken(kind: Any, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS[:20])
    text = [pa.field(f.name, kind) if pa.types.is_string(f.type) else f for f in table.schema]
    table = table.cast(pa.schema(text)).drop_columns("driver").append_column("driver", pa.nulls(20))
    pq.write_table(table, tmp_path / "rows")
    assert store.import_file(tmp_path / "rows", tmp_path / "home").accepted == 20


def test_long_text_in_a_column_of_numbers_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS[:20])
    long = pa.array(["x" * (5 * records.MAX_TEXT)] * 20)
    pq.write_table(table.set_column(table.schema.get_field_index("rounds"), "rounds", long), tmp_path / "text")
    read = pq.ParquetFile.iter_batches
    with pytest.MonkeyPatch.context() as patched:
        seen: list[Any] = []
        patched.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: (seen.append(b) or b for b in read(*a, **k)))
        with pytest.raises(InvalidProfileError, match="rounds must be at most"):
            store.import_file(tmp_path / "text", tmp_path / "home")
    assert seen[0].nbytes < 2 * 5 * records.MAX_TEXT  # the text once, and not in every row
