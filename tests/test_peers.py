"""benchmarks/peers.py without a GPU: what it times, how it calls DeepGEMM, what becomes of rows and breakdowns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import peers as command  # noqa: E402
import peers_from_profile  # noqa: E402
import peers_rows as rows_file  # noqa: E402
import peers_summary as summary  # noqa: E402
from paged_cache import make_problem  # noqa: E402
from peers_entries import base_row, entries  # noqa: E402
from peers_variants import Variant, check_peer, choice_candidates, peer_variant, plain_candidates, shortlist  # noqa: E402

from tilewise.errors import UnsupportedError  # noqa: E402
from tilewise.kernels.arch import get_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits import peers  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, is_valid  # noqa: E402
from tilewise.kernels.timing import Problem  # noqa: E402

H200 = get_arch("h200")


class LikeDeepGEMM:
    """DeepGEMM's calls and their conditions on Hopper, scored by the reference; other columns hold rubbish."""

    __version__ = "2.8.1"

    def get_num_sms(self):
        return 132

    def get_paged_mqa_logits_metadata(self, context_lens, block_kv, num_sms, indices=None):
        assert context_lens.dim() == 2
        assert context_lens.is_contiguous()
        assert context_lens.dtype == torch.int32
        assert block_kv in (32, 64)
        return torch.zeros(num_sms + 1, 2, dtype=torch.int32)

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None
    ):
        values, scales = q
        assert scales is None
        assert values.is_contiguous()
        rows, tokens = values.shape[:2]
        assert tokens in (1, 2, 4)
        assert context_lens.shape == (rows, tokens)
        assert block_table.shape[0] == rows
        assert schedule_meta.shape == (133 if tokens != 4 else 67, 2)
        logits = torch.full((rows * tokens, -(-max_context_len // 256) * 256), 77.0)[:, :max_context_len]
        scored, _ = reference_logits(
            values, kv_cache, weights, context_lens, block_table, max_context_len, dtype=torch.float32
        )
        return logits.copy_(torch.where(scored.isfinite(), scored, logits))


def problem_of(lens, next_n, heads=32):
    made = make_problem(lens, next_n=next_n, heads=heads, logits_width=200)
    expected, work = reference_logits(*made.arguments, dtype=torch.float32)
    shape = Shape(len(lens), next_n, heads, 128, 64, max(lens))
    return Problem(
        shape, made.q, made.kv_cache, made.weights, made.context_lens, [made.block_tables], torch.empty_like(expected),
        expected, work, 0, 1,
    )  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **more: full(*args, **{**more, "device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("next_n", range(1, 9))
def test_every_mode_of_deepgemm_scores_every_token(next_n, on_cpu):
    problem = problem_of([130, 0, 3, 65], next_n)  # shorter than next_n, too
    modes = peers.tokens_per_row(next_n)
    assert modes == [tokens for tokens in (4, 2, 1) if next_n % tokens == 0]
    for tokens in modes:
        variant = peer_variant(LikeDeepGEMM(), problem, tokens)
        check_peer(problem, variant)
        assert variant.timing.status == "correct", variant.timing.reason


def test_a_wrong_answer_of_deepgemm_is_no_timing(on_cpu):
    problem = problem_of([130, 65], 4)
    variant = peer_variant(LikeDeepGEMM(), problem, 2)
    right = variant.go
    wrong = Variant(variant.label, variant.roles, variant.timing, lambda turn: right(turn) * 1.01, 2)
    check_peer(problem, wrong)
    assert wrong.timing.status == "correctness"


@pytest.mark.parametrize(
    ("shape", "tokens", "arch", "match"),
    [
        (Shape(1, 4, 64), 4, "mi355x", "sm90"),
        (Shape(1, 6, 64), 4, "h200", "divide"),
        (Shape(1, 4, 128), 2, "h200", "heads"),
        (Shape(1, 4, 64, block_kv=16), 2, "h200", "block_kv"),
    ],
)
def test_what_deepgemm_does_not_take(shape, tokens, arch, match):
    assert match in (peers.why_not(shape, tokens, get_arch(arch)) or "")


def test_without_deepgemm_the_error_says_so():
    if peers.installed():
        pytest.skip("DeepGEMM is installed here")
    with pytest.raises(UnsupportedError, match="deep_gemm"):
        peers.deep_gemm()


def test_entries_are_the_ones_that_were_asked_for():
    listed = entries()
    assert len({entry.name for entry in listed}) == len(listed)
    main = [entry for entry in listed if entry.group == "main"]
    assert len(main) == 80
    assert sum(entry.target.contexts == "log_uniform" for entry in main) == 8
    assert {entry.shape.next_n for entry in listed if entry.group == "odd"} == {3, 5, 7, 8}
    by_name = {entry.name: entry for entry in listed}
    for entry in listed:
        if entry.twin:
            pages = [sum(-(-c // 64) for c in by_name[name].target.context_lens) for name in (entry.name, entry.twin)]
            assert 0 <= pages[1] - pages[0] < entry.shape.batch_size
            assert by_name[entry.twin].shape.next_n == entry.shape.next_n


def test_candidates_of_a_choice_are_valid_and_a_shortlist_narrows_them(tmp_path):
    shape = Shape(16, 6, 64, 128, 64, 131072)
    every = choice_candidates(shape, H200, [])
    assert {config.kernel for config in every} >= {"sm90", "portable"}
    assert all(is_valid(shape, config, H200) is None for config in every)
    plain = plain_candidates(shape, H200)
    assert {config.kernel for config in plain} == {"portable"}
    config = next(config for config in every if config.kernel == "sm90")
    lines = [{"config": config.to_dict(), "heads": 64}, {"config": config.to_dict(), "next_n": 5}]
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert choice_candidates(shape, H200, shortlist(path)) == [config, *plain]
    other = Shape(16, 6, 32)
    assert choice_candidates(other, H200, shortlist(path)) == plain_candidates(other, H200)


def row(name, roles, us, *, attempt=1, tokens=None, status="correct"):
    entry = next(entry for entry in entries() if entry.name == name)
    config = None if tokens else json.dumps(Config().to_dict())
    return {
        **base_row(entry, attempt), "roles": roles, "tokens_per_row": tokens, "kernel": "deep_gemm" if tokens else "x",
        "config": config, "status": status, "latency_us": us, "read_tbps": 4.5, "fp8_tflops": 1430.0, "run_id": "r",
    }  # fmt: skip


def test_choices_from_a_profile_are_the_fastest_of_both_passes():
    entry = next(entry for entry in entries() if entry.name == "64/32k/1/4")
    a, b = [config for config in choice_candidates(entry.shape, H200, None) if config.kernel == "sm90"][:2]

    def row(config, latency_us, pass_index, **more):
        return {
            **entry.shape.to_dict(), **config.to_dict(), "contexts": "uniform", "status": "correct",
            "latency_us": latency_us, "pass_index": pass_index, **more,
        }  # fmt: skip

    rows = [row(a, 10.0, 0), row(b, 11.0, 0), row(a, 10.0, 1), row(b, 9.0, 1), row(a, 1.0, 2)]
    rows += [row(a, 1.0, 0, contexts="log_uniform"), row(a, None, 0, status="runtime")]
    found = peers_from_profile.fixed(rows)
    assert list(found) == [entry.name]
    assert found[entry.name]["ours"] == found[entry.name]["sm90"] == b.to_dict()
    assert Config.from_dict(found[entry.name]["portable"]).kernel == "portable"


def test_a_file_of_choices_says_where_they_are_from(tmp_path):
    path = tmp_path / "choices.json"
    assert rows_file.read_about(path) is None
    assert rows_file.read_choices(path) == {}
    rows_file.write_choices(path, {"source": "a profile"}, {"64/32k/64/4": {"ours": None}})
    assert rows_file.read_about(path) == {"source": "a profile"}
    assert rows_file.read_choices(path) == {"64/32k/64/4": {"ours": None}}


def test_figures_come_from_the_last_attempt_and_the_best_mode(tmp_path):
    path = tmp_path / "rows.csv"
    rows_file.append(path, [row("64/32k/64/4", "ours+select", 200.0), row("64/32k/64/4", "deep_gemm", 150.0, tokens=2)])
    found = summary.figures(rows_file.read(path))
    assert found["min_vs_deepgemm"] == 0.75
    assert "64/32k/64/4" in found["beyond_limits"]
    again = [
        row("64/32k/64/4", "ours+select", 100.0, attempt=2),
        row("64/32k/64/4", "deep_gemm", 130.0, attempt=2, tokens=2),
        row("64/32k/64/4", "deep_gemm", 120.0, attempt=2, tokens=4),
        row("64/32k/64/4", "portable", 150.0, attempt=2),
        row("32/32k/64/6", "ours", 50.0),
        row("32/32k/64/6", "deep_gemm", 90.0, tokens=2),
        row("32/4k/1/1", "ours", 4.0, status="correctness"),
    ]
    rows_file.append(path, again)
    rows = rows_file.read(path)
    found = summary.figures(rows)
    assert found["shapes"] == 2
    assert len(found["shapes_missing"]) == 78
    assert found["min_vs_deepgemm"] == 1.2
    assert found["geomean_vs_deepgemm_n4_n6"] == pytest.approx((1.2 * 1.8) ** 0.5, abs=1e-4)
    assert found["geomean_vs_deepgemm_n4_n6_heads_64"] == 1.2
    assert found["duelled_again_first"] == {"64/32k/64/4": 0.75}
    assert found["failures"] == 1
    # 64 requests of 32768 tokens, 4 query tokens, 64 heads of 128: operations are the floor.
    floor = 2 * 4 * 64 * 128 * 64 * 32768 / 1430e6
    assert found["floor_share_min"] == pytest.approx(floor / 100, abs=1e-3)
    assert summary.figures(rows, "select")["shapes"] == 1
    assert "| 64/32k/64/4 | 100.0 | 100.0 | 120.0 (4) | 150.0 | 1.200 |" in summary.table(rows)
    assert "| all | all | 2 | " in summary.overview(rows)


def test_per_token_and_ragged_figures():
    rows = [row(f"64/32k/64/{n}", "ours", us) for n, us in ((2, 80.0), (3, 120.0), (4, 120.0), (6, 180.0), (8, 252.0))]
    rows += [row("64/log_uniform/64/6", "ours", 110.0), row("64/27712/64/6", "ours", 100.0)]
    rows += [row("64/log_uniform/64/6", "deep_gemm", 121.0, tokens=2)]
    found = summary.figures(rows)
    assert found["per_token"] == {"64/32k/64/8": 1.05, "64/32k/64/3": pytest.approx(40 / 35, abs=1e-4)}
    assert found["per_token_odd_max"] == pytest.approx(40 / 35, abs=1e-4)
    assert found["per_token_8_over_6_max"] == 1.05
    assert found["ragged_over_uniform_max"] == 1.1
    assert found["ragged_vs_deepgemm_n4_n6_min"] == 1.1
    beyond = {"64/32k/64/2", "64/32k/64/3", "64/32k/64/4", "64/log_uniform/64/6", "64/27712/64/6"}
    assert beyond <= set(found["beyond_limits"])
    assert "64/32k/64/8" not in found["beyond_limits"]


def test_no_rows_are_no_figures(tmp_path):
    found = summary.figures(rows_file.read(tmp_path / "none.csv"))
    assert found["shapes"] == 0
    assert found["geomean_vs_deepgemm"] is None


def test_a_half_written_last_line_is_no_row(tmp_path):
    path = tmp_path / "rows.csv"
    rows_file.append(path, [row("64/32k/64/4", "ours", 200.0), row("64/32k/64/6", "ours", 300.0)])
    text = path.read_text()
    path.write_text(text[: text.rindex("64/32k/64/6") + 40])
    assert [kept["name"] for kept in rows_file.read(path)] == ["64/32k/64/4"]


CHILD = """
import json, os, sys, time
from pathlib import Path
state, marker = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--marker") + 1])
turn = len(state.read_text()) if state.exists() else 0
state.write_text("x" * (turn + 1))
launch = {"entry": "64/32k/64/6", "label": "l", "roles": "ours", "kernel": "sm90", "config": "{}"}
if turn == 0:
    marker.write_text(json.dumps({"limit_s": 0, "reason": "an illegal access", **launch}))
    os._exit(3)
assert "--compiled" in sys.argv
if turn == 1:
    marker.write_text(json.dumps({"limit_s": 0.5, **launch, "config": '{"a": 1}'}))
    time.sleep(60)
if turn == 2:
    marker.write_text(json.dumps({"limit_s": 9, **launch, "config": '{"a": 2}'}))
    os.kill(os.getpid(), 11)
marker.unlink()
sys.exit(4)
"""


def test_a_child_that_dies_or_hangs_is_noted_and_followed_by_another(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    choices = tmp_path / "choices.json"
    rows_file.write_choices(choices, {}, {})
    out = tmp_path / "rows.csv"
    args = command.arguments(["--duel", "--out", str(out), "--choices", str(choices)])
    assert command.supervise(args, [sys.executable, str(script), str(tmp_path / "state")]) == 4
    noted = [(kept["name"], kept["status"], kept["reason"], kept["config"]) for kept in rows_file.read(out)]
    assert noted == [
        ("64/32k/64/6", "runtime", "an illegal access", "{}"),
        ("64/32k/64/6", "runtime", "hung", '{"a": 1}'),
        ("64/32k/64/6", "runtime", "the process ended with -11", '{"a": 2}'),
    ]


def test_a_child_that_gets_nowhere_ends_the_run(tmp_path):
    choices = tmp_path / "choices.json"
    rows_file.write_choices(choices, {}, {})
    args = command.arguments(["--duel", "--out", str(tmp_path / "rows.csv"), "--choices", str(choices)])
    assert command.supervise(args, [sys.executable, "-c", "raise SystemExit(1)"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--duel", "--choices", "/nowhere.json"], ["--duel", "--no-choices"], [], ["--choose", "--no-choices"]],
)
def test_arguments_that_make_no_run_are_refused(arguments):
    with pytest.raises(SystemExit):
        command.arguments(arguments)


def test_summary_as_a_command(tmp_path):
    path = tmp_path / "rows.csv"
    rows_file.append(path, [row("64/32k/64/4", "ours", 100.0), row("64/32k/64/4", "deep_gemm", 130.0, tokens=4)])
    script = str(ROOT / "benchmarks" / "peers.py")
    done = subprocess.run(
        [sys.executable, script, "--summary", "--json", "--out", str(path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["geomean_vs_deepgemm"] == 1.3
    done = subprocess.run([sys.executable, script, "--summary", "--table", "--out", str(path)], capture_output=True)
    assert done.returncode == 0
    assert b"| 64/32k/64/4 | 100.0 |" in done.stdout
