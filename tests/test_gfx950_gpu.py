"""The gfx950 kernel on a card, where there is one: against the reference, repeatably, and under graph capture."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_cache import Problem, make_problem  # noqa: E402

from tilewise.kernels.arch import current_arch, get_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits.gfx950 import space  # noqa: E402
from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits, warm_up  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, is_valid  # noqa: E402

pytestmark = pytest.mark.gpu
MI355X = get_arch("mi355x")
RAGGED = (300, 77, 6, 0, 128, 1, 2049)

SHAPES = [
    Shape(len(RAGGED), next_n, heads, head_dim, block_kv, 4096, None, layout)
    for heads, head_dim, next_n in (
        (32, 128, 1), (32, 128, 5), (32, 128, 6), (64, 128, 6), (16, 128, 7), (128, 128, 2), (32, 64, 6),
    )
    for block_kv, layout in ((1, "flat"), (16, "preshuffled"), (64, "preshuffled"), (64, "flat"), (256, "preshuffled"))
]  # fmt: skip


def one_of_each_form(shape: Shape) -> list[Config]:
    """The candidates without their different splits: any will do to see whether a form is right."""
    kept = {dataclasses.replace(config, split_kv=1): config for config in space.candidates(shape, MI355X)}
    return list(kept.values())


CASES = {f"{shape} {config}": (shape, config) for shape in SHAPES for config in one_of_each_form(shape)}


@pytest.fixture(autouse=True)
def on_a_card():
    if current_arch().isa != "gfx950":
        pytest.skip("needs a gfx950 GPU")


def launch(problem: Problem, config: Config, layout: str, out: torch.Tensor) -> None:
    paged_mqa_logits(*problem.arguments, config=config, cache_layout=layout, out=out)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    """Random bytes are as good a cache in one layout as in the other, so the reference reads the same pages."""
    shape, config = CASES[name]
    layout = shape.cache_layout
    problem = make_problem(
        RAGGED, next_n=shape.next_n, heads=shape.heads, head_dim=shape.head_dim, block_kv=shape.block_kv, device="cuda"
    )
    reason = is_valid(shape, config, current_arch())
    if reason is not None:
        pytest.skip(reason)
    out, whole = problem.guarded_output()
    launch(problem, config, layout, out)
    element, norm = worst_error(out, *reference_logits(*problem.arguments, cache_layout=layout))
    assert element <= 1e-3
    assert norm <= 2.5e-4
    assert whole[-1].isnan().all()
    assert whole[:, problem.logits_width :].isnan().all()


@pytest.mark.parametrize("next_n", [1, 6])
def test_twenty_runs_are_equal_bit_by_bit(next_n: int) -> None:
    problem = make_problem(RAGGED, next_n=next_n, heads=32, device="cuda")
    config = space.preferred(Shape(len(RAGGED), next_n, 32, 128, 64, 4096, None, "preshuffled"), MI355X)
    runs = []
    for _ in range(20):
        out, _ = problem.guarded_output()
        launch(problem, config, "preshuffled", out)
        runs.append(out.nan_to_num(1e9))
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def test_a_captured_graph_follows_the_lengths() -> None:
    problem = make_problem(RAGGED, next_n=6, heads=32, device="cuda")
    shape = Shape(len(RAGGED), 6, 32, 128, 64, 4096, None, "preshuffled")
    config = space.preferred(shape, MI355X)
    warm_up([shape], [config])
    out, _ = problem.guarded_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(problem, config, "preshuffled", out)
    for shorter in (0, 5, 1):
        problem.context_lens.sub_(shorter).clamp_(min=0)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        element, _ = worst_error(out, *reference_logits(*problem.arguments, cache_layout="preshuffled"))
        assert element <= 1e-3
