"""The report is one page that needs nothing else, and says what the evaluation says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import trained

from tilewise import cli
from tilewise.models.evaluate import evaluate
from tilewise.models.report import m_points, report
from tilewise.models.report_plots import learning_curve

CURVE = {
    "final_regret": 1.01,
    **{n: [{"timings": t, "geomean_regret": 1.1} for t in (100, 900)] for n in ("active", "random")},
}


@pytest.fixture(scope="module")
def evaluation() -> dict:
    return evaluate(trained.columns(trained.rows()), op=trained.OP, arch="h200", folds=3, leave_out=("heads",))


def test_the_page_is_whole_and_asks_no_other_host(evaluation: dict) -> None:
    page = report(trained.bundle(), evaluation, CURVE)

    class Checker(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.seen: list[str] = []

        def handle_starttag(self, tag: str, attrs: list) -> None:
            self.seen.append(tag)
            for name, value in attrs:
                if name in ("src", "href", "xlink:href", "action"):
                    assert str(value).startswith("#"), (tag, name, value)
            if tag not in ("meta", "br", "path", "use", "rect"):
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attrs: list) -> None:
            self.seen.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in self.open:
                assert self.open.pop() == tag

    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert "script" not in checker.seen
    assert "link" not in checker.seen
    assert checker.seen.count("svg") == 7  # losses, two maps, M-efficiency, times, calibration, learning curve
    assert "url(" not in re.sub(r"url\(#", "", page)
    assert f"{evaluation['geomean_regret']:.4g}" in page
    assert "leave_one_heads_out" in page
    assert report(trained.bundle(), evaluation, CURVE) == page


def test_without_a_curve_the_page_says_how_to_make_one(evaluation: dict) -> None:
    page = report(trained.bundle(), evaluation)
    assert page.count("<svg") == 6
    assert "benchmarks/learning_curve.py" in page
    assert learning_curve(CURVE).startswith("<svg")


def test_rates_are_of_the_best_config_of_a_kernel(evaluation: dict) -> None:
    points = m_points(trained.bundle())
    assert all(0 < rate < 1500 for own in points.values() for _, rate in own)


def test_the_command_takes_an_evaluation_and_refuses_another_file(
    tmp_path: Path, evaluation: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.bundle().save(tmp_path / "models")
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(evaluation))
    out = tmp_path / "report.html"
    words = ["report", "--arch", "h200", "--home", str(tmp_path), "--out", str(out), "--evaluation", str(file)]
    assert cli.main(words) == 0
    assert out.read_text().startswith("<!doctype html>")
    out.unlink()
    for text in ("{}", "[]", "x", "[" * 100_000):
        file.write_text(text)
        assert cli.main(words) == 2
        assert "evaluate --json" in capsys.readouterr().err
    for text in ('{"by_shape": 1, "trials": 2, "baselines": 3}', json.dumps({**evaluation, "by_shape": [{}]})):
        file.write_text(text)
        assert cli.main(words) == 2
        assert f"{file} has another form than the report needs: " in capsys.readouterr().err
    file.write_text(json.dumps(evaluation))
    for text in ("{}", "x", "[" * 100_000):
        (tmp_path / "curve.json").write_text(text)
        assert cli.main([*words, "--learning-curve", str(tmp_path / "curve.json")]) == (0 if text == "{}" else 2)


def test_a_gpu_without_a_model_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", "--arch", "h100", "--home", str(tmp_path), "--out", str(tmp_path / "page.html")]
    assert cli.main(words) == 2
    assert "there is no model of paged_mqa_logits for h100 to report on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
