"""The drop-in for aiter: where it goes in and comes out, and that its answers are the reference's."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_cache import make_problem  # noqa: E402

from tilewise.dispatch.integrations import aiter as dropin  # noqa: E402
from tilewise.errors import InvalidTensorError, UnsupportedError  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402

FUNCTION = dropin.FUNCTION


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes packages called aiter importable, and forgets them again."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    yield make
    dropin.uninstall()
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]


LIKE_AMDS = {
    "aiter/__init__.py": "",
    "aiter/ops/__init__.py": "",
    "aiter/ops/triton/__init__.py": "",
    "aiter/ops/triton/attention/__init__.py": "",
    "aiter/ops/triton/attention/pa_mqa_logits.py": f"def {FUNCTION}(*args):\n    return ('own kernel', len(args))\n",
    "aiter/ops/triton/pa_mqa_logits.py": f"from aiter.ops.triton.attention.pa_mqa_logits import {FUNCTION}\n",
}


def test_the_project_called_aiter_on_pypi_is_not_taken_for_amds(package):
    package({"aiter/__init__.py": "def aiter(x): return x\n"})
    assert not dropin.available()
    with pytest.raises(UnsupportedError, match=r"aiter\.ops\.triton"):
        dropin.install()


def test_without_aiter_there_is_nothing_to_replace(package):
    if dropin.available():
        pytest.skip("AMD's aiter is installed here")
    with pytest.raises(UnsupportedError, match="not installed"):
        dropin.install()
    dropin.uninstall()


def test_installed_over_the_function_and_its_alias_and_taken_out_again(package):
    package(LIKE_AMDS)
    assert dropin.available()
    dropin.install()
    dropin.install()
    import aiter.ops.triton.attention.pa_mqa_logits as home
    import aiter.ops.triton.pa_mqa_logits as alias

    assert getattr(home, FUNCTION) is getattr(alias, FUNCTION) is dropin.deepgemm_fp8_paged_mqa_logits
    dropin.uninstall()
    dropin.uninstall()
    assert getattr(home, FUNCTION) is getattr(alias, FUNCTION)
    assert getattr(home, FUNCTION)(1, 2) == ("own kernel", 2)


def test_a_launch_that_we_do_not_take_goes_to_aiters_kernel_with_all_its_arguments(package):
    package(LIKE_AMDS)
    dropin.install()
    problem = make_problem([70], next_n=2, heads=32)
    q = torch.zeros(1, 2, 24, 128).to(torch.float8_e4m3fn)  # no kernel of ours has 24 heads
    out = torch.zeros(2, 70)
    ran = dropin.deepgemm_fp8_paged_mqa_logits(
        q, problem.kv_cache, problem.weights, out, problem.context_lens, problem.block_tables, 70, KVBlockSize=64
    )
    assert ran == "('own kernel', 13)"


def test_an_aiter_without_the_function_is_said_to_be_so(package):
    package(LIKE_AMDS | {path: "" for path in LIKE_AMDS if path.endswith("pa_mqa_logits.py")})
    with pytest.raises(UnsupportedError, match=FUNCTION):
        dropin.install()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"KVBlockSize": 1}, "KVBlockSize 1"), ({"KVBlockSize": 64, "Preshuffle": True, "cut": 1}, "multiple of 16")],
)
def test_the_page_size_has_to_be_that_of_the_cache(options, match):
    problem = make_problem([70], next_n=2, heads=32)
    cache = problem.kv_cache[:, :40] if options.pop("cut", 0) else problem.kv_cache
    options["KVBlockSize"] = cache.shape[1] if cache.shape[1] == 40 else options["KVBlockSize"]
    with pytest.raises(InvalidTensorError, match=match):
        dropin.deepgemm_fp8_paged_mqa_logits(
            problem.q,
            cache,
            problem.weights,
            torch.zeros(2, 70),
            problem.context_lens,
            problem.block_tables,
            70,
            **options,
        )


@pytest.mark.interpret
def test_scores_in_place_and_leaves_the_rest_alone():
    problem = make_problem([70, 0, 5], next_n=2, heads=32, logits_width=80)
    whole = torch.full((7, 100), float("nan"))
    out = whole[:6]
    ran = dropin.deepgemm_fp8_paged_mqa_logits(
        problem.q, problem.kv_cache, problem.weights, out, problem.context_lens, problem.block_tables, 80,
        KVBlockSize=64, ChunkK=128, WavePerEU=5,
    )  # fmt: skip
    assert ran.startswith("tilewise ")
    assert worst_error(out[:, :80], *reference_logits(*problem.arguments))[0] <= 1e-6
    assert whole[:, 80:].isnan().all()
    assert whole[6].isnan().all()
