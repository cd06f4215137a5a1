"""The gfx950 kernel, compiled for it and run on the emulator, against the fp64 reference. No GPU anywhere."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("tinygrad")

from emulator.memory import Memory  # noqa: E402
from emulator.problem import as_bytes, emulate, map_tensor, preshuffled, run, shape_of  # noqa: E402
from paged_cache import Problem, make_problem  # noqa: E402

from tilewise.errors import InvalidTensorError  # noqa: E402
from tilewise.kernels.paged_mqa_logits.gfx950 import build, kernels  # noqa: E402
from tilewise.kernels.paged_mqa_logits.gfx950 import launch as launcher  # noqa: E402
from tilewise.kernels.paged_mqa_logits.gfx950.forms import Form, forms, paging  # noqa: E402
from tilewise.kernels.paged_mqa_logits.gfx950.space import config_of, holds_whole_tiles  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Config  # noqa: E402
from tilewise.kernels.paged_mqa_logits.traits import usual_traits  # noqa: E402

BASE = Form(128, 4, 2, "16x16x128", "packed")
RAGGED = (300, 77, 6, 0, 128, 1)


def config(fuse_n: int, form: Form = BASE, split_kv: int = 2, order: str = "xcd", **form_changes: object) -> Config:
    return config_of(fuse_n, dataclasses.replace(form, **form_changes), split_kv, order)


def check(problem: Problem, launched: Config, layout: str = "flat", **options: object) -> None:
    """Every element within 1e-6 of its own work, the exact -inf pattern, guards and padding rows untouched."""
    out, whole = problem.guarded_output()
    emulate(problem, launched, out, layout, **options)
    element, _ = worst_error(out, *reference_logits(*problem.arguments))
    assert element <= 1e-6
    assert whole[-1].isnan().all(), "the row after the last one was written"
    assert whole[:, problem.logits_width :].isnan().all(), "a column past the width was written"


FUSIONS = [(n, fuse) for n in range(1, 9) for fuse in sorted({-(-n // groups) for groups in range(1, n + 1)})]


@pytest.mark.parametrize(("next_n", "fuse_n"), FUSIONS)
def test_every_next_n_in_every_grouping(next_n, fuse_n):
    layout = ("flat", "preshuffled")[(next_n + fuse_n) % 2]
    problem = make_problem(RAGGED, next_n=next_n, heads=32, block_kv=128, seed=fuse_n)
    check(problem, config(fuse_n), layout)


FORM_CASES = [
    (head_dim, block_kv, form)
    for head_dim in (128, 64)
    for kind, block_kv in (("whole", 256), ("gather", 16), ("single", 1))
    for form in forms(32, head_dim, kind)
]


@pytest.mark.parametrize(("head_dim", "block_kv", "form"), FORM_CASES)
def test_every_form_that_is_offered(head_dim, block_kv, form):
    assert paging(block_kv, form.tile_kv) == ("single" if block_kv == 1 else "gather" if block_kv == 16 else "whole")
    fuse_n = 3 if form.waves_per_eu > 2 else 6
    layout = "flat" if block_kv == 1 else "preshuffled"
    problem = make_problem((290, 33, 7), next_n=fuse_n, heads=32, head_dim=head_dim, block_kv=block_kv)
    check(problem, config(fuse_n, form), layout)


HEAD_COUNTS = [
    (heads, fuse_n, mfma)
    for heads, fuse_n in ((16, 1), (16, 2), (16, 7), (64, 1), (64, 3), (128, 1), (128, 2))
    for mfma in ("16x16x128", "32x32x64", "16x16x32")
    if holds_whole_tiles(heads, fuse_n, mfma)
]


@pytest.mark.parametrize(("heads", "fuse_n", "mfma"), HEAD_COUNTS)
def test_head_counts(heads, fuse_n, mfma):
    layout = ("flat", "preshuffled")[fuse_n % 2]
    problem = make_problem((130, 0, 65), next_n=fuse_n, heads=heads, block_kv=128)
    check(problem, config(fuse_n, mfma=mfma), layout)


@pytest.mark.parametrize("block_kv", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("tile_kv", "num_warps"), [(32, 1), (64, 2), (128, 4), (256, 4)])
def test_page_seams(block_kv, tile_kv, num_warps):
    """Contexts at and around page ends; the table ends exactly with the context, and a read past it would raise."""
    layout = ("flat", "preshuffled")[(block_kv + tile_kv) // 16 % 2]
    lens = (300, block_kv, block_kv + 1, block_kv - 1)
    problem = make_problem(lens, next_n=3, heads=32, block_kv=block_kv, table_tail=0)
    check(problem, config(3, tile_kv=tile_kv, num_warps=num_warps, split_kv=3), layout)


@pytest.mark.parametrize("keys_per_wave", [16, 32, 64, 128])
@pytest.mark.parametrize("fuse_n", [1, 2, 3, 7])
def test_sub_tiles_of_a_wave(fuse_n, keys_per_wave):
    """Every way in which sums of sub-tiles meet across lanes, or stay alone and leave copies that are not stored."""
    problem = make_problem((300, 5, 129), next_n=fuse_n, heads=32, block_kv=256)
    check(problem, config(fuse_n, tile_kv=keys_per_wave * 2, num_warps=2))


CASES = {
    "more splits than tiles": (
        make_problem([64, 1, 128], next_n=2, heads=32), config(2, tile_kv=64, num_warps=2, split_kv=40)
    ),
    "width below the page's end": (make_problem([1150], next_n=2, heads=32, logits_width=1150), config(2, split_kv=3)),
    "width is the context": (make_problem([1152], next_n=6, heads=32, logits_width=1152), config(6, split_kv=5)),
    "width below the context": (make_problem([500, 100], next_n=3, heads=32, logits_width=333), config(3)),
    "width far above": (make_problem([100], next_n=2, heads=32, logits_width=5000), config(2)),
    "one row of an odd width": (make_problem([100], next_n=1, heads=32, logits_width=163), config(1)),
    "page stride": (make_problem([300, 77], next_n=3, heads=32, page_stride=65536), config(3)),
    "page stride of odd 16 bytes": (make_problem([300, 77], next_n=3, heads=32, page_stride=64 * 132 + 16), config(3)),
    "page stride, one token a page": (
        make_problem([300, 77], next_n=3, heads=32, block_kv=1, page_stride=140), config(3)
    ),
    "lengths per token": (
        make_problem([[7, 9], [5, 5], [0, 0], [64, 63], [0, 3]], next_n=2, heads=32), config(2, tile_kv=64, num_warps=2)
    ),
    "ragged lengths per token": (
        make_problem([[7, 300, 2], [5, 5, 65], [129, 128, 0]], next_n=3, heads=32), config(2, split_kv=3)
    ),
    "lengths per token, pages across": (
        make_problem([[7, 300, 2], [5, 5, 65]], next_n=3, heads=32, block_kv=16), config(3)
    ),
    "shorter than next_n": (make_problem([1, 2, 3, 4, 5], next_n=6, heads=32), config(6)),
    "all empty": (make_problem([0, 0, 0], next_n=4, heads=32), config(4)),
    "negative length": (make_problem([-1, 70], next_n=2, heads=32), config(2)),
    "as launched": (make_problem(RAGGED, next_n=5, heads=32), config(2, order="launched", split_kv=3)),
    "fewer programs than dies": (make_problem([77], next_n=3, heads=32), config(3, split_kv=1)),
    "programs no multiple of the dies": (make_problem([77, 130, 200], next_n=5, heads=32), config(2, split_kv=3)),
    "max": (make_problem(RAGGED, next_n=6, heads=32), config(6, epilogue="max")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    check(*CASES[name])


def test_strided_inputs_and_output():
    problem = make_problem([90, 33], next_n=2, heads=16)
    q = torch.zeros(2, 4, 16, 128).to(torch.float8_e4m3fn)
    q[:, 1:3] = problem.q
    weights = torch.zeros(4, 48)
    weights[:, 16:32] = problem.weights
    table = torch.full((2, 9), -1, dtype=torch.int32)
    table[:, : problem.block_tables.shape[1]] = problem.block_tables
    lens = torch.stack([problem.context_lens, problem.context_lens], 1)[:, 0]
    strided = dataclasses.replace(
        problem, q=q[:, 1:3], weights=weights[:, 16:32], context_lens=lens,
        block_tables=table[:, : problem.block_tables.shape[1]],
    )  # fmt: skip
    out = torch.full((4, 1001), float("nan"))[:, 3 : 3 + problem.logits_width]
    emulate(strided, config(2), out)
    assert worst_error(out, *reference_logits(*problem.arguments))[0] <= 1e-6


def test_order_and_split_do_not_change_a_bit():
    problem = make_problem(RAGGED, next_n=5, heads=32)
    results = []
    for launched in (config(2), config(2, order="launched"), config(2, split_kv=1), config(2, split_kv=5)):
        out, _ = problem.guarded_output()
        emulate(problem, launched, out)
        results.append(out)
    assert all(torch.equal(results[0].nan_to_num(1e9), other.nan_to_num(1e9)) for other in results[1:])


@pytest.mark.parametrize("epilogue", ["packed", "max"])
def test_nan_in_the_cache_reaches_its_column_and_no_other(epilogue):
    problem = make_problem([70], next_n=2, heads=32)
    page = problem.kv_cache[int(problem.block_tables[0, 0])].flatten()
    page[5 * 128 + 7] = 0x7F  # token 5
    last = problem.kv_cache[int(problem.block_tables[0, 1])].flatten()
    last[6 * 128 : 64 * 128] = 0xFF  # slots past the context
    out, _ = problem.guarded_output()
    emulate(problem, config(2, epilogue=epilogue), out)
    assert out[:, 5].isnan().all()
    expected, work = reference_logits(*problem.arguments)
    out[:, 5], expected[:, 5], work[:, 5] = 0.0, 0.0, 1.0
    assert worst_error(out, expected, work)[0] <= 1e-6


def test_products_that_nearly_cancel_and_largest_values():
    """All values at the ends of e4m3fn: sums reach 128 * 448**2, just under what the packed relu is exact for."""
    problem = make_problem([70], next_n=2, heads=32)
    problem.q.view(torch.uint8)[:] = torch.where(torch.rand(problem.q.shape) < 0.5, 0x7E, 0xFE).to(torch.uint8)
    problem.q[0, 0].view(torch.uint8)[:] = 0x7E
    values = problem.kv_cache.flatten(1)[:, : 64 * 128]
    values[:] = torch.where(torch.rand(values.shape) < 0.5, 0x01, 0x7E).to(torch.uint8)
    values[int(problem.block_tables[0, 0]), :256] = 0x7E
    values[int(problem.block_tables[0, 0]), 256:512] = 0xFE
    check(problem, config(2))


PAST_2_31 = [
    # Page ids on both sides of 2**31 bytes for values (2048 pages of 1 MiB) and, counted in fp32, for scales (8192).
    (256, 128, 4, 1 << 20),
    (16, 128, 4, 1 << 20),
    (1, 128, 4, 1 << 20),
    (64, 64, 2, (1 << 20) + 16),
]


@pytest.mark.parametrize(("block_kv", "tile_kv", "num_warps", "page_stride"), PAST_2_31)
def test_caches_past_2_31_bytes(block_kv, tile_kv, num_warps, page_stride):
    """The same pages far apart give the same bits; only these pages are mapped, so that any other address raises."""
    lens = [3 * block_kv, block_kv + 1] if block_kv > 1 else [9, 5]
    problem = make_problem(lens, next_n=3, heads=32, block_kv=block_kv, table_tail=1)
    launched = config(3, tile_kv=tile_kv, num_warps=num_warps)
    expected, _ = problem.guarded_output()
    emulate(problem, launched, expected)

    far_ids = [2047, 2048, 2143, 8571, 8572, 20000, 100000, 2046, 8191, 8192, 3000, 4096, 1 << 20, 9, 70000]
    ids = sorted({int(i) for i in problem.block_tables.flatten() if i >= 0})
    far = dict(zip(ids, far_ids, strict=False))
    table = problem.block_tables.clone().apply_(lambda i: far[i] if i >= 0 else i)
    memory = Memory()
    cache = memory.reserve(page_stride * (max(far_ids) + 1))
    for near, there in far.items():
        memory.map_at(cache + there * page_stride, problem.kv_cache[near].flatten().numpy().copy())
    out, _ = problem.guarded_output()
    shape = shape_of(problem)
    pages = (
        torch.as_strided(torch.zeros(1, dtype=torch.uint8), (2, block_kv, 1, 132), (page_stride, 132, 132, 1))
        if 0
        else None
    )
    assert pages is None
    numbers = launcher.launch_numbers(
        problem.q, problem.kv_cache, problem.weights, problem.context_lens, table, out, out.shape[1], shape, launched
    ) | {"page_units": page_stride // (16 if block_kv > 1 else 4)}
    addresses = {
        "q_ptr": map_tensor(memory, problem.q), "kv_ptr": cache, "scale_ptr": cache,
        "table_ptr": map_tensor(memory, table), "lens_ptr": map_tensor(memory, problem.context_lens),
        "weights_ptr": map_tensor(memory, problem.weights), "out_ptr": map_tensor(memory, out),
    }  # fmt: skip
    run(shape, launched, False, memory, addresses, numbers)
    assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))


def test_outputs_past_2_31_bytes():
    """129 requests of 4 tokens, rows of 2**20 columns: the last rows begin 2**31 bytes in. Only these are mapped."""
    batch, next_n, width = 129, 4, 1 << 20
    small = make_problem([150, 131], next_n=next_n, heads=32, block_kv=128)
    launched = config(4, split_kv=2)
    expected, _ = small.guarded_output()
    emulate(small, launched, expected)

    lens = torch.zeros(batch, dtype=torch.int32)
    lens[-2:] = small.context_lens
    table = torch.full((batch, small.block_tables.shape[1]), -1, dtype=torch.int32)
    table[-2:] = small.block_tables
    problem = dataclasses.replace(
        small, q=small.q.repeat(65, 1, 1, 1)[1:], weights=small.weights.repeat(65, 1)[next_n:], context_lens=lens,
        block_tables=table,
    )  # fmt: skip
    memory = Memory()
    start = memory.reserve(4 * batch * next_n * width)
    rows = torch.full((2 * next_n, 160), float("nan"))
    for i, row in enumerate(range((batch - 2) * next_n, batch * next_n)):
        memory.map_at(start + 4 * row * width, rows[i].numpy())
    shape = shape_of(problem)
    numbers = launcher.launch_numbers(
        problem.q, problem.kv_cache, problem.weights, lens, table, rows, 160, shape, launched
    ) | {"out_stride": width}
    addresses = {
        "q_ptr": map_tensor(memory, problem.q), "kv_ptr": (kv := map_tensor(memory, problem.kv_cache)), "scale_ptr": kv,
        "table_ptr": map_tensor(memory, table), "lens_ptr": map_tensor(memory, lens),
        "weights_ptr": map_tensor(memory, problem.weights), "out_ptr": start,
    }  # fmt: skip
    run(shape, launched, False, memory, addresses, numbers)
    assert torch.equal(rows[:, :150].nan_to_num(1e9), expected[:, :150].nan_to_num(1e9))


def test_reference_reads_either_layout():
    problem = make_problem([130, 7], next_n=2, heads=32, page_stride=64 * 132 + 64)
    flat = reference_logits(*problem.arguments)
    shuffled = dataclasses.replace(problem, kv_cache=preshuffled(problem.kv_cache))
    again = reference_logits(*shuffled.arguments, cache_layout="preshuffled")
    assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(flat, again, strict=True))
    assert not torch.equal(reference_logits(*shuffled.arguments)[1], flat[1])


def test_moving_a_token_between_pages_moves_its_logit():
    """In both layouts: the value bytes, and the scale after the page's values, belong to one slot."""
    for layout in ("flat", "preshuffled"):
        problem = make_problem([130], next_n=1, heads=32)
        first, _ = problem.guarded_output()
        emulate(problem, config(1), first, layout)
        a, b = (problem.kv_cache[int(problem.block_tables[0, page])].flatten() for page in (0, 1))
        slot_a, slot_b = 3, 17
        for start, size in ((0, 128), (64 * 128, 4)):
            one, other = (slice(start + slot * size, start + (slot + 1) * size) for slot in (slot_a, slot_b))
            a[one], b[other] = b[other].clone(), a[one].clone()
        second, _ = problem.guarded_output()
        emulate(problem, config(1), second, layout)
        assert second[0, slot_a] == first[0, 64 + slot_b]
        assert second[0, 64 + slot_b] == first[0, slot_a]


def refused(problem: Problem, out: torch.Tensor, match: str) -> None:
    with pytest.raises(InvalidTensorError, match=match):
        launcher.launch_numbers(*problem.arguments[:5], out, 90, shape_of(problem), config(2))


def test_strides_that_the_loads_cannot_take_are_refused():
    problem = make_problem([90, 33], next_n=2, heads=32)
    out = torch.empty(4, 90)
    q = torch.as_strided(torch.zeros(20000).to(torch.float8_e4m3fn), (2, 2, 32, 128), (8200, 4100, 128, 1))
    refused(dataclasses.replace(problem, q=q), out, "strides of a multiple of 16")
    cache = torch.as_strided(torch.zeros(20000, dtype=torch.uint8), (2, 64, 1, 132), (8456, 132, 132, 1))
    refused(dataclasses.replace(problem, kv_cache=cache), out, "page stride of a multiple of 16")


def test_token_rows_past_32_bit_offsets_are_refused():
    wide = torch.empty(4, 1 << 26, device="meta")[:, :90]
    refused(make_problem([90, 33], next_n=2, heads=32), wide, "token rows of less than")


def test_launch_hands_over_what_the_kernel_takes_in_its_order():
    """The launch itself needs a GPU; what it passes by position and by name does not."""
    problem = make_problem([90, 33], next_n=2, heads=32)
    shape, launched = shape_of(problem), config(2)
    numbers = launcher.launch_numbers(*problem.arguments[:5], torch.empty(4, 90), 90, shape, launched)
    tensors = [name for name in build.SIGNATURE if name.endswith("_ptr")]
    assert list(build.SIGNATURE) == [*tensors, *numbers]
    names = kernels._paged_mqa_logits_kernel.arg_names
    assert names == [*build.SIGNATURE, *build.constexprs(shape, launched, False)]
    assert set(numbers) == set(kernels._UNSPECIALIZED)
    key = launcher.launch_key(shape, launched, usual_traits(shape))
    assert key != launcher.launch_key(shape, launched, usual_traits(shape, per_token_lens=True))


def test_as_bytes_shares_storage():
    tensor = torch.zeros(4)[1:]
    as_bytes(tensor)[4] = 1
    assert tensor.view(torch.int32)[0] == 1
