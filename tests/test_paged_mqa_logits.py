"""The portable kernel against the reference: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_cache import Problem, make_problem  # noqa: E402
from paged_mqa_cases import CASES, Case  # noqa: E402

from tilewise.errors import CaptureError, InvalidConfigError, InvalidShapeError, InvalidTensorError  # noqa: E402
from tilewise.kernels.paged_mqa_logits import portable_launch  # noqa: E402
from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits, warm_up  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape  # noqa: E402

# fp32 sums of exact products; a GPU's matrix unit keeps fewer bits while it accumulates fp8 products.
EXACT = (1e-6, 1e-6)
ON_GPU = (1e-3, 2.5e-4)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]


def run_and_compare(problem: Problem, config: Config) -> None:
    """Run before the reference, on NaN, with guard columns and a guard row; compare every element."""
    out, whole = problem.guarded_output()
    result = paged_mqa_logits(*problem.arguments, config=config, out=out)
    assert result is out
    expected, work = reference_logits(*problem.arguments)
    element, norm = worst_error(out, expected, work)
    limits = ON_GPU if out.is_cuda else EXACT
    if out.is_cuda and problem.q.shape[2] == 8:
        limits = (2e-3, 2.5e-4)  # the errors of so few heads hardly average out
    assert element <= limits[0], f"worst element {element}"
    assert norm <= limits[1], f"norm-wise {norm}"
    assert whole[-1].isnan().all(), "the row after the last one was written"
    assert whole[:, problem.logits_width :].isnan().all(), "a column past the width was written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case: Case, device: str) -> None:
    run_and_compare(case.problem(device), case.config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_token", [False, True])
def test_more_programs_than_one_launch_takes(per_token: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_launch, "MOST_PROGRAMS", 6)
    lens = [(70, 64), (0, 0), (5, 3), (200, 199), (1, 130)] if per_token else [70, 0, 5, 200, 130]
    run_and_compare(make_problem(lens, next_n=2, heads=32, device=device), Config(fuse_n=2, dot_n=2, split_kv=3))


@pytest.mark.parametrize("device", DEVICES)
def test_untouched_or_clean(device: str) -> None:
    problem = make_problem([70, 0, 5], next_n=2, heads=32, logits_width=200, device=device)
    out = torch.full((6, 200), 7.0, device=device)
    paged_mqa_logits(*problem.arguments, config=Config(fuse_n=2, dot_n=2), out=out)
    assert (out[0:2, 70:] == 7).all()
    assert (out[2:4] == 7).all(), "a padding row was written"
    assert (out[4:6, 5:] == 7).all()
    paged_mqa_logits(*problem.arguments, config=Config(fuse_n=2, dot_n=2), out=out, clean_logits=True)
    assert (out[0:2, 70:] == float("-inf")).all()
    assert (out[2:4] == float("-inf")).all()
    assert (out[0, :69] != float("-inf")).all()


@pytest.mark.parametrize("device", DEVICES)
def test_own_output_keeps_an_aligned_row_stride(device: str) -> None:
    problem = make_problem([100], next_n=1, heads=32, logits_width=163, device=device)
    out = paged_mqa_logits(*problem.arguments, config=Config())
    assert out.shape == (1, 163)
    assert out.stride(0) % 4 == 0
    assert out.stride(0) >= 163
    expected, work = reference_logits(*problem.arguments, untouched=0.0)
    assert worst_error(out[:, :100], expected[:, :100], work[:, :100])[1] < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_any_row_stride_and_strided_inputs(device: str) -> None:
    problem = make_problem([90, 33], next_n=2, heads=16, device=device)
    wide_q = torch.zeros(2, 4, 16, 128, device=device).to(torch.float8_e4m3fn)
    wide_q[:, 1:3] = problem.q
    wide_w = torch.zeros(4, 48, device=device)
    wide_w[:, 16:32] = problem.weights
    wide_table = torch.full((2, 9), -1, dtype=torch.int32, device=device)
    wide_table[:, : problem.block_tables.shape[1]] = problem.block_tables
    out = torch.full((4, 1001), float("nan"), device=device)[:, 3 : 3 + problem.logits_width]
    paged_mqa_logits(
        wide_q[:, 1:3],
        problem.kv_cache,
        wide_w[:, 16:32],
        torch.stack([problem.context_lens, problem.context_lens], 1)[:, 0],
        wide_table[:, : problem.block_tables.shape[1]],
        problem.logits_width,
        config=Config(fuse_n=2, dot_n=2),
        out=out,
    )
    expected, work = reference_logits(*problem.arguments)
    assert worst_error(out, expected, work)[0] <= (ON_GPU if device == "cuda" else EXACT)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch_size", "next_n"), [(0, 4), (3, 0), (0, 0)])
def test_empty_batch_returns_at_once(batch_size: int, next_n: int, device: str) -> None:
    q = torch.zeros(batch_size, next_n, 32, 128, device=device).to(torch.float8_e4m3fn)
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8, device=device)
    lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
    table = torch.zeros(batch_size, 1, dtype=torch.int32, device=device)
    out = paged_mqa_logits(q, cache, torch.zeros(0, 32, device=device), lens, table, 100)
    assert out.shape == (0, 100)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_unused_cache_bytes_does_not_leak(device: str) -> None:
    """Slots past the context hold whatever was there: 0x7f and 0xff are NaN in e4m3fn."""
    problem = make_problem([65], next_n=2, heads=32, device=device)
    last = int(problem.block_tables[0, 1])
    problem.kv_cache.view(-1, 64 * 132)[last, 128 : 64 * 128] = 0x7F
    problem.kv_cache.view(-1, 64 * 132)[last, 64 * 128 + 4 :] = 0xFF
    run_and_compare(problem, Config(fuse_n=2, dot_n=2))


@pytest.mark.parametrize("device", DEVICES)
def test_page_ids_are_followed_not_assumed(device: str) -> None:
    """Two requests that share a page, and one page listed twice."""
    problem = make_problem([128, 128], next_n=2, heads=32, device=device)
    problem.block_tables[1, 0] = problem.block_tables[0, 1]
    problem.block_tables[1, 1] = problem.block_tables[0, 1]
    run_and_compare(problem, Config(fuse_n=2, dot_n=2, split_kv=2))


BAD = {
    "q dtype": (dict(q=lambda p: p.q.float()), "q must be float8_e4m3fn"),
    "q fnuz": (dict(q=lambda p: p.q.view(torch.uint8).view(torch.float8_e4m3fnuz)), "q must be float8_e4m3fn"),
    "q rank": (dict(q=lambda p: p.q[0]), "q must have 4 dimensions"),
    "q head_dim": (dict(q=lambda p: p.q[..., :32].contiguous()), "head_dim"),
    "q strided heads": (dict(q=lambda p: p.q.transpose(1, 2)), "contiguous within a request"),
    "weights rows": (dict(weights=lambda p: p.weights[:1]), "weights must be [4, 32]"),
    "weights dtype": (dict(weights=lambda p: p.weights.half()), "weights must be float32"),
    "weights columns": (dict(weights=lambda p: p.weights.t().contiguous().t()), "contiguous rows"),
    "lens dtype": (dict(context_lens=lambda p: p.context_lens.long()), "context_lens must be int32"),
    "lens shape": (dict(context_lens=lambda p: p.context_lens[:1]), "context_lens must be [2] or [2, 2]"),
    "table rows": (dict(block_tables=lambda p: p.block_tables[:1]), "block_tables must be [2, max_blocks]"),
    "table dtype": (dict(block_tables=lambda p: p.block_tables.long()), "block_tables must be int32"),
    "cache width": (dict(kv_cache=lambda p: p.kv_cache[..., :128]), "kv_cache must be [num_blocks, block_kv, 1, 132]"),
    "cache dtype": (dict(kv_cache=lambda p: p.kv_cache.view(torch.int8)), "kv_cache must be uint8"),
    "cache pages": (dict(kv_cache=lambda p: p.kv_cache[:, ::2]), "contiguous pages"),
    "width": (dict(max_model_len=lambda p: -1), "max_model_len must be"),
    "width type": (dict(max_model_len=lambda p: 10.0), "max_model_len must be"),
}


@pytest.mark.interpret
@pytest.mark.parametrize("name", BAD)
def test_bad_tensor_says_what_was_given_and_what_is_allowed(name: str) -> None:
    changes, message = BAD[name]
    problem = make_problem([100, 30], next_n=2, heads=32)
    names = ("q", "kv_cache", "weights", "context_lens", "block_tables", "max_model_len")
    arguments = dict(zip(names, problem.arguments, strict=True))
    arguments.update({key: change(problem) for key, change in changes.items()})
    with pytest.raises(InvalidTensorError) as error:
        paged_mqa_logits(**arguments, config=Config())
    assert message in str(error.value)
    assert "got" in str(error.value)


@pytest.mark.interpret
def test_bad_output_is_refused() -> None:
    problem = make_problem([100, 30], next_n=2, heads=32)
    for out in (torch.empty(3, 100), torch.empty(4, 99), torch.empty(4, 100).half(), torch.empty(100, 4).t()):
        with pytest.raises(InvalidTensorError, match="out must"):
            paged_mqa_logits(*problem.arguments, config=Config(), out=out)
    with pytest.raises(InvalidTensorError, match="do not overlap"):
        paged_mqa_logits(*problem.arguments, config=Config(), out=torch.empty(1, 100).expand(4, 100))


@pytest.mark.interpret
def test_bad_config_and_shape_are_refused() -> None:
    problem = make_problem([100], next_n=2, heads=32)
    with pytest.raises(InvalidConfigError, match="fuse_n must be 1 to next_n"):
        paged_mqa_logits(*problem.arguments, config=Config(fuse_n=3))
    with pytest.raises(InvalidConfigError, match="kernel must be one of"):
        paged_mqa_logits(*problem.arguments, config=Config(kernel="v999"))
    odd_page = make_problem([100], next_n=1, heads=32, block_kv=48)
    with pytest.raises(InvalidShapeError, match="block_kv must be one of"):
        paged_mqa_logits(*odd_page.arguments, config=Config())
    with pytest.raises(InvalidConfigError, match="flat pages only"):
        paged_mqa_logits(*problem.arguments, config=Config(), cache_layout="preshuffled")


@pytest.mark.interpret
def test_cache_stride_rules() -> None:
    problem = make_problem([100], next_n=1, heads=32, page_stride=64 * 132 + 4)
    with pytest.raises(InvalidTensorError, match="multiple of 16"):
        paged_mqa_logits(*problem.arguments, config=Config())
    overlapping = torch.as_strided(
        make_problem([100], next_n=1, heads=32).kv_cache, (4, 64, 1, 132), (1024, 132, 132, 1)
    )
    plain = make_problem([100], next_n=1, heads=32)
    with pytest.raises(InvalidTensorError, match="page stride of at least"):
        paged_mqa_logits(plain.q, overlapping, *plain.arguments[2:], config=Config())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [Config(fuse_n=4, dot_n=4), Config(), Config(fuse_n=4, dot_n=2, mma_m="heads")], ids=str
)
def test_rows_past_2_gib_of_output(config: Config) -> None:
    """Row 512 of a million columns starts at 2 GiB: every row written, and equal to a compact-width run."""
    lens = [3000] * 129
    wide = make_problem(lens, next_n=4, heads=32, block_kv=256, logits_width=1 << 20, device="cuda")
    out = torch.full((516, 1 << 20), float("nan"), device="cuda")
    paged_mqa_logits(*wide.arguments, config=config, out=out)
    narrow = torch.full((516, 3000), float("nan"), device="cuda")
    paged_mqa_logits(*wide.arguments[:5], 3000, config=config, out=narrow)
    assert not narrow.isnan().any()
    assert torch.equal(out[:, :3000], narrow)
    assert out[:, 3000:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("block_kv", [16, 64, 256])
@pytest.mark.parametrize("tile_kv", [64, 128])
def test_pages_past_2_gib_of_cache(block_kv: int, tile_kv: int) -> None:
    """A page stride of 1 MiB puts pages 2047, 2048 and 8571 around and past 2^31 and 2^33 bytes."""
    stride = 1 << 20
    near = make_problem([4 * block_kv], next_n=2, heads=32, block_kv=block_kv, page_stride=stride, device="cuda")
    pool = torch.empty(8572 * stride, dtype=torch.uint8, device="cuda")
    far_cache = torch.as_strided(pool, (8572, *near.kv_cache.shape[1:]), near.kv_cache.stride())
    ids = [2047, 2048, 2143, 8571]
    for slot, page in enumerate(ids):
        far_cache[page] = near.kv_cache[int(near.block_tables[0, slot])]
    far = torch.tensor([ids], dtype=torch.int32, device="cuda")
    config = Config(fuse_n=2, dot_n=2, tile_kv=tile_kv)
    expected = paged_mqa_logits(*near.arguments, config=config)
    got = paged_mqa_logits(near.q, far_cache, near.weights, near.context_lens, far, near.logits_width, config=config)
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mma_m", ["kv", "heads"])
@pytest.mark.parametrize(("heads", "fuse_n", "dot_n"), [(32, 6, 2), (64, 2, 2), (64, 1, 1)])
def test_twenty_runs_are_bitwise_equal(heads: int, fuse_n: int, dot_n: int, mma_m: str) -> None:
    problem = make_problem([30000, 7, 0, 131072], next_n=6, heads=heads, device="cuda")
    config = Config(fuse_n=fuse_n, dot_n=dot_n, mma_m=mma_m, split_kv=33)  # type: ignore[arg-type]
    first, _ = problem.guarded_output()
    paged_mqa_logits(*problem.arguments, config=config, out=first)
    for _ in range(19):
        again, _ = problem.guarded_output()
        paged_mqa_logits(*problem.arguments, config=config, out=again)
        assert torch.equal(again.nan_to_num(nan=-1.0), first.nan_to_num(nan=-1.0))


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    problem = make_problem([5000, 0, 77], next_n=6, heads=32, device="cuda")
    shape = Shape(3, 6, 32, max_context_len=5000)
    config = Config(fuse_n=6, dot_n=2, split_kv=8)
    warm_up([shape], [config])
    out, _ = problem.guarded_output()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        paged_mqa_logits(*problem.arguments, config=config, out=out)
    expected, work = reference_logits(*problem.arguments)
    for _ in range(100):
        out.fill_(float("nan"))
        churn = torch.randn(1 << 20, device="cuda")  # memory that a stale address would land in
        graph.replay()
        del churn
    assert worst_error(out, expected, work)[0] <= ON_GPU[0]
    # New lengths and pages in the same buffers are honoured: nothing was read on the host.
    problem.context_lens.copy_(torch.tensor([64, 0, 5], dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    expected, work = reference_logits(*problem.arguments)
    assert worst_error(out, expected, work)[0] <= ON_GPU[0]


@pytest.mark.gpu
def test_capture_refuses_what_would_allocate_or_compile() -> None:
    problem = make_problem([500], next_n=3, heads=16, head_dim=64, device="cuda")
    out, _ = problem.guarded_output()
    unseen = Config(fuse_n=3, dot_n=2, num_stages=7)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device="cuda")
        with pytest.raises(CaptureError, match="warm_up"):
            paged_mqa_logits(*problem.arguments, config=unseen, out=out)
    paged_mqa_logits(*problem.arguments, config=unseen, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device="cuda")
        with pytest.raises(CaptureError, match="out must be given"):
            paged_mqa_logits(*problem.arguments, config=unseen)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [4096, 16384])
def test_large_batches(batch_size: int) -> None:
    lens = [(37 * b) % 200 for b in range(batch_size)]
    problem = make_problem(lens, next_n=1, heads=32, device="cuda")
    run_and_compare(problem, Config(split_kv=2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lens", "next_n"), [([300, 0, 77], 6), ([64], 1), ([5, 700], 5)])
def test_without_a_config_the_selector_picks_one(lens: list[int], next_n: int, device: str) -> None:
    problem = make_problem(lens, next_n=next_n, heads=32, device=device)
    out, _ = problem.guarded_output()
    paged_mqa_logits(*problem.arguments, out=out, max_context_len=max(lens))
    expected, work = reference_logits(*problem.arguments)
    assert worst_error(out, expected, work)[0] <= (ON_GPU if device == "cuda" else EXACT)[0]


@pytest.mark.interpret
def test_choice_does_not_depend_on_the_width_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million columns of output say nothing about how long the contexts are."""
    from tilewise.kernels.paged_mqa_logits import launch

    asked: list[Shape] = []

    def choose(shape: Shape, arch: object) -> Config:
        asked.append(shape)
        return Config()

    monkeypatch.setattr(launch, "_choose", choose)
    problem = make_problem([2000, 70], next_n=4, heads=32, table_tail=2000)
    for width in (40_000, 120_000):
        out = torch.empty(8, width)
        paged_mqa_logits(*problem.arguments[:5], width, out=out)
    assert asked[0] == asked[1]
    assert asked[0].max_context_len == launch.USUAL_CONTEXT_LEN
