"""The command line: what it prints, what it refuses, and that docs/cli.md describes all of it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import synthetic
from threadpoolctl import threadpool_limits

from tilewise import __version__, cli, cli_output
from tilewise.data import store
from tilewise.data.convert import read_rows
from tilewise.data.records import COLUMN_NAMES
from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Config, Shape
from tilewise.kernels.shape_sets import read_targets, target, target_line
from tilewise.models.bundle import Bundle

BAD_SEEDS = ("-1", str(1 << 32), "1.5", "x", "")
DOCS = Path(__file__).parent.parent / "docs"
ARCH = "h100"  # nothing is shipped for it
SHAPE = Shape(16, 6, 32, 128, 64, 32768)
FLAGS = ["--batch-size", "16", "--next-n", "6", "--heads", "32", "--max-context-len", "32768"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with synthetic timings of ARCH and a model of them."""
    folder = tmp_path_factory.mktemp("home")
    synthetic.publish_synthetic(folder, arch=ARCH)
    rows = synthetic.synthetic_rows(synthetic.SHAPES[::5], arch=ARCH)
    store.write_rows(rows, folder / "rows.parquet")
    store.import_file(folder / "rows.parquet", folder)
    return folder


@pytest.fixture
def tilewise(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with that home, gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("TILEWISE_HOME", str(home))

    def run(*words: str | Path) -> tuple[int, str, str]:
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    (action,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


# --- documentation


def test_every_command_is_documented_and_every_documented_one_exists() -> None:
    headings = [line for line in (DOCS / "cli.md").read_text().splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted(f"## tilewise {name}" for name in commands())


def test_every_flag_is_documented() -> None:
    sections = (DOCS / "cli.md").read_text().split("\n## tilewise ")
    shared = sections[0]
    bodies = dict(section.split("\n", 1) for section in sections[1:])
    for name, parser in commands().items():
        for action in parser._actions:
            for flag in action.option_strings:
                if flag not in ("-h", "--help"):
                    assert f"`{flag}" in shared + bodies[name], f"tilewise {name} {flag}"
                    assert action.help, f"tilewise {name} {flag}"


def test_the_profile_schema_page_is_current(tilewise: Any) -> None:
    """Write it with: tilewise schema > docs/profile-schema.md"""
    assert tilewise("schema") == (0, (DOCS / "profile-schema.md").read_text(), "")


def test_schema_as_json_has_every_column(tilewise: Any) -> None:
    _, out, _ = tilewise("schema", "--json")
    assert [row["column"] for row in json.loads(out)] == list(COLUMN_NAMES)


# --- answers


def test_select_prints_the_decision(tilewise: Any, home: Path) -> None:
    decision = Selector(ARCH, home=home).select(SHAPE)
    code, out, err = tilewise("select", "--arch", ARCH, *FLAGS)
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["config"] == str(decision.config)
    assert lines["runner-up"] == str(decision.runner_up)
    assert lines["predicted"] == f"{decision.predicted_us:.2f} us"
    assert lines["source"] == decision.source
    assert lines["regime"] == decision.regime
    assert lines["reason"] == decision.reason
    assert lines["model"] == decision.model_id
    code, out, _ = tilewise("select", "--arch", ARCH, *FLAGS, "--json")
    assert json.loads(out) == {"arch": ARCH, "shape": SHAPE.to_dict(), **decision.to_dict()}


def test_select_takes_every_field_of_a_shape(tilewise: Any) -> None:
    values = [2, 3, 64, 128, 128, 4096, 1000, "preshuffled"]
    words = [w for n, v in zip(SHAPE_FIELDS, values, strict=True) for w in ("--" + n.replace("_", "-"), str(v))]
    words[-1] = "flat"
    _, out, _ = tilewise("select", "--arch", ARCH, *words, "--json")
    assert list(json.loads(out)["shape"].values()) == [*values[:-1], "flat"]


def test_rank_prints_the_best_first(tilewise: Any, home: Path) -> None:
    ranked = Selector(ARCH, home=home).rank(SHAPE)
    code, out, _ = tilewise("rank", "--arch", ARCH, *FLAGS)
    assert code == 0
    assert [line.split(" us  ")[1] for line in out.splitlines()] == [str(one.config) for one in ranked]
    _, out, _ = tilewise("rank", "--arch", ARCH, *FLAGS, "--json", "--top", "3")
    assert json.loads(out) == [one.to_dict() for one in ranked[:3]]


def test_explain_names_every_other_candidate(tilewise: Any, home: Path) -> None:
    explained = Selector(ARCH, home=home).explain(SHAPE)
    code, out, _ = tilewise("explain", "--arch", ARCH, *FLAGS)
    assert code == 0
    rejected = out.split("\nrejected\n")[1].splitlines()
    assert rejected == [f"  {one.config}: {one.reason}" for one in explained.rejected]
    _, out, _ = tilewise("explain", "--arch", ARCH, *FLAGS, "--json")
    assert json.loads(out) == explained.to_dict()


def test_evaluate_prints_the_figures_beside_the_baselines(tilewise: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tilewise("evaluate", "--arch", ARCH, "--quick", "--json")
    assert code == 0
    result = json.loads(out)
    keys = {"geomean_regret", "p90_regret", "worst_regret", "within_2pct", "within_5pct"}
    assert keys <= set(result)
    assert set(result["baselines"]) == {"default", "rule", "nearest"}
    assert all(keys <= set(figures) for figures in result["baselines"].values())
    cli_output.print_evaluation(result)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:7]]
    assert [line[0] for line in lines] == ["model", "default", "rule", "nearest"]
    assert lines[0][1:] == [f"{result[key]:.4f}" for key in cli_output.FIGURES]


def test_evaluate_writes_the_picks_that_lose_too_much_for_the_collector(tilewise: Any, tmp_path: Path) -> None:
    plan, shapes = tmp_path / "plan.jsonl", tmp_path / "shapes.jsonl"
    targets = [
        target(one.batch_size, one.next_n, one.heads, one.max_context_len, judged=True) for one in synthetic.SHAPES
    ]
    shapes.write_text("".join(json.dumps(target_line(one)) + "\n" for one in targets[::2]))
    words = ("evaluate", "--arch", ARCH, "--quick", "--json", "--duels-out", plan, "--duels-limit")
    code, out, err = tilewise(*words, "0", "--shapes", shapes)
    assert code == 0
    result = json.loads(out)
    assert result["duelled"] == 0
    assert result["second_pass_worst_regret"] == result["worst_regret"] > 1.0
    assert result["beyond"][0]["regret"] == result["worst_regret"]
    known = {one.shape for one in targets[::2]}
    listed = {Shape(**entry["shape"]): entry for entry in result["beyond"]}
    assert 0 < len(listed) < len(targets)
    lines = read_targets(plan)
    assert {one.shape for one in lines} == known & set(listed)
    for one in lines:
        entry = listed[one.shape]
        assert one.duel
        assert not one.judged
        named = [Config.from_dict(config) for config in (*entry["picks"], entry["best"], entry["default"])]
        assert one.configs == tuple(dict.fromkeys(named))
    left = len(set(listed) - known)
    assert (f"{left} more are not in {shapes}" in err) == (left > 0)
    code, out, _ = tilewise(*words, "10")
    assert (code, json.loads(out)["beyond"], plan.read_text()) == (0, [], "")


def test_suggest_says_when_nothing_is_left_to_time(tilewise: Any, tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    timed = synthetic.SHAPES[0]
    one = target(timed.batch_size, timed.next_n, timed.heads, timed.max_context_len)
    path.write_text(json.dumps(target_line(one)) + "\n")
    file = tmp_path / "next.jsonl"
    code, out, err = tilewise("suggest", "--arch", ARCH, "--budget", "5", "--shapes", path, "--out", file)
    assert (code, out, file.exists()) == (1, "", False)
    assert err.splitlines()[1:] == ["every launch of these 1 shapes has a timing already: name others with --shapes"]
    other = target(timed.batch_size, timed.next_n, timed.heads, timed.max_context_len + 64)
    path.write_text(json.dumps(target_line(other)) + "\n")
    code, out, err = tilewise("suggest", "--arch", ARCH, "--budget", "5", "--shapes", path)
    assert (code, len(err.splitlines())) == (0, 1)
    assert len(json.loads(out)["configs"]) == 5


def test_train_prints_the_metrics_of_held_out_shapes(tilewise: Any, home: Path, tmp_path: Path) -> None:
    with threadpool_limits(1):
        code, out, err = tilewise("train", "--arch", ARCH, "--folds", "2", "--out", tmp_path / "bundle")
    assert code == 0
    bundle = Bundle.load(tmp_path / "bundle")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["digest"] == bundle.digest
    assert lines["dropped"] == "none"
    assert lines["worst_regret"] == f"{bundle.manifest['metrics']['worst_regret']:.4f}"
    rows = len(store.load_profile(synthetic.OP, ARCH, home=home))
    assert err.splitlines()[:3] == [f"training on {rows} rows of {synthetic.OP} on {ARCH}", "fit ...", "evaluate ..."]
    assert set(bundle.guard.needed) == {"inside", "batch_size", "next_n", "max_context_len", "heads"}
    with threadpool_limits(1):
        code, out, _ = tilewise("train", "--arch", ARCH, "--folds", "0", "--out", tmp_path / "bundle")
    assert "not evaluated" in out


def test_models_shows_promotes_and_rolls_back(tilewise: Any, tmp_path: Path) -> None:
    digests = [synthetic.publish_synthetic(tmp_path, shapes=synthetic.SHAPES[:3], seed=s).digest for s in (0, 1)]
    show = ["models", "--arch", "h200", "--home", tmp_path, "--json"]
    assert json.loads(tilewise(*show)[1])["digest"] == digests[1]
    assert json.loads(tilewise(*show, "--rollback")[1])["digest"] == digests[0]
    shown = json.loads(tilewise(*show, "--promote", digests[1][:12])[1])
    assert shown["digest"] == digests[1]
    assert shown["history"] == [digests[1], digests[0]]
    code, _, err = tilewise(*show, "--promote", "abcdef")
    assert code == 2
    assert digests[0][:12] in err


def test_import_says_what_became_of_each_row(tilewise: Any, tmp_path: Path) -> None:
    rows = synthetic.synthetic_rows(synthetic.SHAPES[:1])
    bad = [{**rows[0], "latency_us": float("nan")}, {**rows[0], "heads": 33}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad, rows[0]]))
    code, out, err = tilewise("import", path, "--home", tmp_path)
    assert code == 1
    assert out == f"{path}: {len(rows)} rows accepted, 1 repeated, 2 rejected\n"
    lines = err.splitlines()
    assert [line.startswith(f"{path} row {len(rows) + n}: ") for n, line in enumerate(lines, start=1)] == [True, True]
    assert "latency_us" in lines[0]
    assert "heads" in lines[1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = tilewise("import", path, "--home", tmp_path)
    assert code == 0
    assert "nothing changed" in out
    code, out, _ = tilewise("import", path, "--home", tmp_path, "--json")
    assert json.loads(out)[str(path)]["files"][0]["new"] is False


def test_version(tilewise: Any) -> None:
    assert tilewise("version") == tilewise("--version") == (0, f"{__version__}\n", "")
    assert json.loads(tilewise("version", "--json")[1]) == {"version": __version__}


# --- refusals


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["select", "--arch", "h900", *FLAGS], "arch must be one of"),
        (["select", "--arch", ARCH, *FLAGS, "--heads", "33"], "heads must be one of"),
        (["select", "--arch", ARCH, *FLAGS, "--block-kv", "1"], "no kernel serves"),
        (["select", "--arch", ARCH, *FLAGS, "--mean-context-len", "32769"], "mean_context_len must be"),
        (["rank", "--arch", ARCH, *FLAGS, "--batch-size", "-1"], "batch_size must be"),
        (["train", "--arch", "mi350x"], "no timings"),
        (["evaluate", "--arch", "mi350x"], "no timings"),
        (["models", "--arch", "mi350x"], "no model"),
        (["models", "--arch", ARCH, "--promote", "123456"], "version must name one of"),
        (["train", "--arch", ARCH, "--home", "/proc/none", "--out", "/proc/none/bundle"], "no timings"),
        (["import", "/nowhere/rows.parquet"], "cannot be read"),
    ],
)
def test_a_refusal_is_one_plain_line_and_exit_code_2(tilewise: Any, words: list[str], named: str) -> None:
    code, out, err = tilewise(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("tilewise: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_home_that_cannot_be_written_is_one_plain_line(tilewise: Any, home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = tilewise("import", home / "rows.parquet", "--home", tmp_path / "file")
    assert (code, out) == (2, "")
    assert err.startswith("tilewise: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["select"],
        ["select", *FLAGS, "--heads", "x"],
        ["select", "--nope"],
        *(["rank", *FLAGS, "--top", text] for text in ("0", "-1", "x", "")),
        *(["train", "--arch", ARCH, "--folds", text] for text in ("1", "-1", "1001", "x", "", "9" * 5000)),
        *([command, "--arch", ARCH, "--seed", text] for command in ("train", "evaluate") for text in BAD_SEEDS),
        ["train", "--arch", ARCH, "--out", ""],
        ["train", "--arch", ARCH, "--home", ""],
        *(["evaluate", "--arch", ARCH, "--leave-out", text] for text in ("nope", "", "mean_context", "config")),
        *(["models", "--arch", ARCH, "--promote", text] for text in ("", "123", "../../x", "*", "ABCDEF")),
        ["models", "--promote", "123456", "--rollback"],
        *(["serve", "--port", text] for text in ("65536", "-1", "x", "")),
        *(["serve", "--workers", text] for text in ("0", "-1", "x")),
        *(["serve", "--fd", text] for text in ("-1", "x")),
        ["serve", "--log-level", "loud"],
        ["import"],
        *(
            ["collect", "--run-dir", "/nowhere", flag, text]
            for flag in ("--budget", "--rounds", "--duel-rounds", "--jobs")
            for text in ("0", "-1", "x")
        ),
        *(["collect", "--run-dir", "/nowhere", flag, "-1"] for flag in ("--seed", "--time-limit")),
        ["collect", "--run-dir", "/nowhere", "--time-limit", "nan"],
    ],
    ids=lambda words: " ".join(words)[:60] or "nothing",
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(tilewise: Any, words: list[str]) -> None:
    code, out, err = tilewise(*words)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert "error: " in err.splitlines()[-1]


@pytest.mark.parametrize("place", ["under a file", "a file", "a folder of something else", "/proc"])
def test_a_place_that_takes_no_bundle_is_refused_before_the_fit(tilewise: Any, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    out = {"under a file": "file/bundle", "a file": "file", "a folder of something else": "folder"}.get(
        place, "/proc/x/y"
    )
    code, printed, err = tilewise("train", "--arch", ARCH, "--out", tmp_path / out)
    assert (code, printed) == (2, "")
    assert err.count("\n") == 1
    assert "training on" not in err
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "folder" / "kept").exists()


def test_a_home_that_takes_no_model_is_refused_before_the_fit(tilewise: Any, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "profiles", tmp_path / "profiles")
    (tmp_path / "models").touch()
    code, _, err = tilewise("train", "--arch", ARCH, "--home", tmp_path)
    assert code == 2
    assert err.startswith(f"tilewise: {tmp_path}/models/{synthetic.OP}/{ARCH} must be a folder that can be written")
    assert err.count("\n") == 1


HIDING = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from tilewise.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("hidden", "words", "extra"),
    [
        ("pyarrow", ["train", "--arch", ARCH], "train"),
        ("pyarrow", ["import", "ROWS"], "train"),
        ("sklearn", ["train", "--arch", ARCH], "train"),
        ("fastapi", ["serve"], "server"),
        ("uvicorn", ["serve"], "server"),
        ("torch,triton", ["collect", "--run-dir", "/nowhere"], "gpu,collect"),
        ("torch", ["collect", "--run-dir", "/nowhere", "--arch", "h200"], "gpu,collect"),
        ("tqdm", ["collect", "--run-dir", "/nowhere"], "gpu,collect"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    hidden: str, words: list[str], extra: str, home: Path
) -> None:
    words = [str(home / "rows.parquet") if word == "ROWS" else word for word in words]
    run = subprocess.run(
        [sys.executable, "-c", HIDING, hidden, *words],
        env={"TILEWISE_HOME": str(home), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("tilewise: ")
    assert hidden.partition(",")[0].replace("sklearn", "scikit-learn") in last
    assert f"pip install -e '.[{extra}]'" in last


def test_answers_need_numpy_alone(home: Path) -> None:
    """Selecting imports neither torch, triton, pyarrow, scikit-learn nor the server's packages."""
    hidden = "torch,triton,pyarrow,sklearn,fastapi,uvicorn,pydantic,starlette,rich,pandas"
    for command in ("select", "rank", "explain"):
        run = subprocess.run(
            [sys.executable, "-c", HIDING, hidden, command, "--arch", ARCH, *FLAGS],
            env={"TILEWISE_HOME": str(home), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode, run.stderr) == (0, ""), run.stderr


def test_a_reader_that_stops_early_is_no_error(home: Path) -> None:
    command = [sys.executable, "-c", HIDING, "torch", "explain", "--arch", ARCH, *FLAGS, "--json"]
    environment = {"TILEWISE_HOME": str(home), "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_shapes_too_alike_to_hold_one_out_are_trained_on_without_metrics(tilewise: Any, tmp_path: Path) -> None:
    """Near duplicates share a fold, so that nothing would be left to train on."""
    shapes = [Shape(4, 2, 32, 128, 64, context) for context in (8192, 8200)]
    store.write_rows(synthetic.synthetic_rows(shapes, arch=ARCH), tmp_path / "rows.parquet")
    assert tilewise("import", tmp_path / "rows.parquet", "--home", tmp_path)[0] == 0
    code, _, err = tilewise("evaluate", "--arch", ARCH, "--home", tmp_path)
    assert code == 2
    assert (
        err == "tilewise: evaluation needs shapes that differ in more than nearly the same context, got 2 that do not\n"
    )
    code, out, _ = tilewise("train", "--arch", ARCH, "--home", tmp_path)
    assert code == 0
    assert "not evaluated: evaluation needs shapes that differ" in out


def test_leaving_values_out_is_printed(tilewise: Any, tmp_path: Path) -> None:
    code, out, _ = tilewise("evaluate", "--arch", ARCH, "--seeds", 1, "--leave-out", "heads", "--leave-out", "block_kv")
    assert code == 0
    assert "each of 2 values of heads held out in turn, 100 % of the shapes beyond what is left\nmodel " in out
    assert "each of 1 values of block_kv held out in turn: nothing is left to train on\n" in out


def test_import_says_that_rows_are_shipped(tilewise: Any, tmp_path: Path) -> None:
    (shipped,) = store.profile_files(synthetic.OP, "h200", home=tmp_path)
    rows = [row for _, row in itertools.islice(read_rows(shipped), 5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = f"{path}: 5 rows accepted, 0 repeated, 0 rejected; all of them come with tilewise already, nothing changed\n"
    assert tilewise("import", path, "--home", tmp_path / "home") == (0, said, "")


# --- outputs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of a process are of Unix")
@pytest.mark.parametrize(
    "words",
    [
        ["export", "--arch", ARCH],
        ["suggest", "--arch", ARCH, "--budget", "200"],
        ["capture-plan", "--arch", "h200", "--batch-sizes", "1,2,3,4", "--next-n", "1,2", "--heads", "32",
         "--max-model-len", "8192"],
        ["dump", "--arch", ARCH],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_an_output_that_does_not_fit_leaves_the_old_file(words: list[str], home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); from tilewise.cli import main; sys.exit(main())"
    )
    run = subprocess.run(
        [sys.executable, "-B", "-c", script, *words, "--out", str(out)],
        env={"TILEWISE_HOME": str(home), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1] == "tilewise: [Errno 27] File too large"
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_goes_through_a_link_and_to_a_pipe_but_not_to_a_folder(tilewise: Any, tmp_path: Path) -> None:
    words = ["export", "--arch", ARCH, "--format", "aiter"]
    _, printed, _ = tilewise(*words)
    (tmp_path / "link").symlink_to("file")
    assert tilewise(*words, "--out", tmp_path / "link") == (0, "", "")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == printed
    assert tilewise(*words, "--out", "/dev/null") == (0, "", "")
    assert not Path("/dev/null").is_file()
    for folder in (".", "/", str(tmp_path)):
        code, _, err = tilewise("dump", "--arch", ARCH, "--out", folder)
        assert (code, err) == (2, f"tilewise: [Errno 21] Is a directory: {folder!r}\n")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(closed: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_HOME", str(home))
    monkeypatch.setattr(sys, closed, None)
    with contextlib.ExitStack() as opened:
        for words in (["version"], ["select", "--arch", ARCH, *FLAGS], ["export", "--arch", ARCH]):
            setattr(sys, closed, None)
            assert cli.main(words) == 0
            opened.enter_context(getattr(sys, closed))
        setattr(sys, closed, None)
        assert cli.main(["select", "--arch", "none such", *FLAGS]) == 2
        opened.enter_context(getattr(sys, closed))


def test_a_name_that_is_not_unicode_is_printed_with_escapes(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/bad\xff.jsonl"
    row = synthetic.synthetic_rows(synthetic.SHAPES[:1], arch=ARCH)[0]
    Path(os.fsdecode(name)).write_text(json.dumps(row) + "\n")
    run = subprocess.run(
        [sys.executable, "-c", HIDING, "torch", "import", name],
        env={"TILEWISE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert rb"/bad\udcff.jsonl: 1 rows accepted" in run.stdout
