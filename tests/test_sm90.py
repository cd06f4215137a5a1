"""The Hopper kernel: how it cuts work up, what it accepts, what the compiler makes of it, and its source on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import gluon_on_cpu  # noqa: E402
from paged_cache import Problem, make_problem  # noqa: E402

from tilewise.kernels.arch import ARCHS, current_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits import (  # noqa: E402
    portable_launch,
    portable_space,
    spec,
)
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.sm90 import build, launch, pieces, resources, space  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, low_reciprocal  # noqa: E402
from tilewise.kernels.paged_mqa_logits.traits import traits_of  # noqa: E402

H200 = ARCHS["h200"]
RAGGED = (300, 77, 6, 0, 64, 1, 63, 65, 513, 2048)


def config(fuse_n: int, dot_n: int, consumers: int = 2, token_split: int = 1, **more: object) -> Config:
    given: dict[str, object] = {"num_stages": 6, "schedule": "balanced", "ctas_per_sm": 1} | more
    return Config(
        kernel="sm90", fuse_n=fuse_n, dot_n=dot_n, consumers=consumers, token_split=token_split,
        **given,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("tokens", range(1, 9))
def test_pieces_cover_every_token_once_and_none_is_idle(tokens: int) -> None:
    sizes = [pieces.piece_tokens(tokens, i) for i in range(pieces.piece_count(tokens))]
    assert sum(sizes) == tokens
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= {1, 2, 4}
    assert [pieces.piece_start(tokens, i) for i in range(len(sizes))] == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("dot_n", [1, 2, 4])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_products_take_each_head_of_a_piece_once(tokens: int, dot_n: int) -> None:
    seen = [
        (pieces.product_piece(tokens, dot_n, i), pieces.product_part(tokens, dot_n, i))
        for i in range(pieces.product_count(tokens, dot_n))
    ]
    sizes = [pieces.piece_tokens(tokens, i) for i in range(pieces.piece_count(tokens))]
    assert seen == [(piece, part) for piece, size in enumerate(sizes) for part in range(max(1, size // dot_n))]


@pytest.mark.parametrize("dot_n", [1, 2, 4])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_pieces_lie_apart_and_aligned_in_shared_memory(tokens: int, dot_n: int) -> None:
    for split in range(1, min(4, -(-tokens // dot_n)) + 1):
        taken: set[int] = set()
        for part in range(split):
            starts = [pieces.first_token(tokens, dot_n, split, p) for p in (part, part + 1)]
            own = starts[1] - starts[0]
            assert pieces.part_pieces(tokens, dot_n, split, part) == pieces.piece_count(own)
            for index in range(pieces.piece_count(own)):
                size = pieces.piece_tokens(own, index)
                assert size in pieces.group_sizes(tokens, tokens, dot_n, split)
                at = pieces.q_position(tokens, dot_n, split, part, index)
                assert at % size == 0
                assert taken.isdisjoint(range(at, at + size))
                taken |= set(range(at, at + size))
        given = config(tokens, min(dot_n, tokens), 12 // (12 // split) if 12 % split else split, split)
        assert taken == set(range(tokens))
        assert resources.q_tokens(Shape(1, tokens, 64), given) >= tokens


@pytest.mark.parametrize("dot_n", [1, 2, 4])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_consumers_share_tokens_in_whole_products(tokens: int, dot_n: int) -> None:
    for split in range(1, -(-tokens // dot_n) + 1):
        starts = [pieces.first_token(tokens, dot_n, split, part) for part in range(split + 1)]
        assert starts[0] == 0
        assert starts[-1] == tokens
        sizes = [b - a for a, b in itertools.pairwise(starts)]
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) < 2 * dot_n
        assert all(start % dot_n == 0 for start in starts[:-1])


@pytest.mark.parametrize("block_kv", [32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_every_served_shape_has_a_valid_default_and_candidates(heads: int, head_dim: int, block_kv: int) -> None:
    for next_n in range(1, 9):
        shape = Shape(4, next_n, heads, head_dim, block_kv, 4096)
        assert space.default_config(shape, H200) is None, "short launches are the portable kernel's"
        default = space.default_config(dataclasses.replace(shape, batch_size=64, mean_context_len=4096), H200)
        assert default is not None
        assert space.why_invalid(shape, default, H200) is None
        valid = [c for c in space.candidates(shape, H200) if space.why_invalid(shape, c, H200) is None]
        assert {c.fuse_n for c in valid} >= {1}
        assert {c.schedule for c in valid} == {"balanced", "even"}


@pytest.mark.parametrize("next_n", range(5, 9))
@pytest.mark.parametrize("context", [2048, 131072])
def test_where_no_group_holds_all_tokens_halves_are_split_and_quarters_offered(next_n: int, context: int) -> None:
    shape = Shape(16, next_n, 128, 128, 64, context)
    valid = [c for c in space.candidates(shape, H200) if space.why_invalid(shape, c, H200) is None]
    half, quarter = -(-next_n // 2), 2
    assert max(c.fuse_n for c in valid) == half
    balanced = {(c.fuse_n, c.consumers, c.token_split) for c in valid if c.schedule == "balanced"}
    assert balanced >= {(half, 2, 1), (half, 2, 2), (quarter, 2, 1), (quarter, 3, 1)}
    if context == 131072:
        default = space.default_config(shape, H200)
        assert default in valid
        # The registers of two consumers hold the sums and weights of two tokens of 128 heads each.
        assert default.fuse_n // default.token_split == 2


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("next_n", range(1, 9))
def test_a_config_for_long_contexts_has_a_stand_in_on_offer_at_shorter_ones(next_n: int, heads: int) -> None:
    longest = Shape(16, next_n, heads, 128, 64, 131072)
    for config in space.candidates(longest, H200):
        for context in (131072, 16384, 8192, 4096, 512):
            shape = dataclasses.replace(longest, max_context_len=context, mean_context_len=context)
            other = space.as_offered(shape, config)
            assert other in space.candidates(shape, H200)
            assert dataclasses.replace(other, num_stages=config.num_stages) == config
            assert other.num_stages <= config.num_stages
            assert space.as_offered(longest, other) == other, "a short ring is not called a long one"


@pytest.mark.parametrize(
    ("change", "shape_change", "words"),
    [
        ({}, {"block_kv": 16}, "block_kv 16"),
        ({}, {"cache_layout": "preshuffled"}, "flat pages"),
        ({}, {"heads": 8}, "16 heads"),
        ({"consumers": 5}, {}, "consumers must be 1 to 4"),
        ({"consumers": 3, "token_split": 2}, {}, "token_split must divide"),
        ({"consumers": 4, "token_split": 4}, {}, "token_split must be at most 2"),
        ({"consumers": 3, "num_stages": 8}, {}, "num_stages must be a multiple"),
        ({"dot_n": 4, "fuse_n": 4}, {"heads": 128}, "dot_n x heads"),
        ({"split_kv": 2}, {}, "split_kv must be 1"),
        ({"num_stages": 30}, {}, "shared memory"),
        ({"ctas_per_sm": 3, "consumers": 2, "fuse_n": 4, "dot_n": 2}, {}, "registers"),
        ({"tile_kv": 128}, {}, "tile_kv must be 64"),
    ],
)
def test_what_may_not_launch_says_why(change: dict, shape_change: dict, words: str) -> None:
    shape = dataclasses.replace(Shape(64, 4, 64), **shape_change)
    given = dataclasses.replace(config(4, 2), **change)
    reason = space.why_invalid(shape, given, H200)
    assert reason is not None
    assert words in reason


def sass(shape: Shape, given: Config, lens_2d: bool = False) -> str:
    """Machine code for Hopper; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = build.compile_kernel(shape, given, lens_2d, GPUTarget("cuda", 90, 32))
    assert kernel.metadata.shared <= space.shared_memory_bytes(shape, given)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = Path(kernel.metadata_group[f"{kernel.name}.cubin"])
    return subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout


COMPILED = {
    "n1 three a multiprocessor": (Shape(64, 1, 64), config(1, 1, 1, num_stages=4, ctas_per_sm=3), False),
    "n3 even": (Shape(64, 3, 64), config(3, 2, schedule="even", split_kv=2), False),
    "n5 groups of 2": (Shape(64, 5, 32, 64, 32), config(2, 2), True),
    "n7 halves split": (Shape(64, 7, 128), config(4, 1, 2, 2), False),
    "n6 tokens split": (Shape(64, 6, 64), config(6, 2, 3, 3), False),
    "n7 of 4, 2 and 1, any batch": (Shape(3000, 7, 16, 128, 128), config(7, 4), False),
    "n6 of 4 and 2": (Shape(64, 6, 32), config(6, 4, 2), False),
    "n8 tokens split": (Shape(64, 8, 64), config(8, 2, 2, 2), False),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills_and_with_as_many_products_as_planned(name: str) -> None:
    shape, given, lens_2d = COMPILED[name]
    assert space.why_invalid(shape, given, H200) is None
    code = sass(shape, given, lens_2d)
    assert not re.findall(r"\b(?:LDL|STL)\b", code), "registers were spilled"
    # Every consumer has its own code; a group of query tokens with fewer of them has another copy.
    planned = 0
    for tokens in {given.fuse_n, shape.next_n % given.fuse_n or given.fuse_n}:
        for consumer in range(given.consumers):
            part = consumer % given.token_split
            first, last = (
                pieces.first_token(tokens, given.dot_n, given.token_split, p) for p in (part, part + 1)
            )  # fmt: skip
            planned += pieces.product_count(last - first, given.dot_n)
    assert len(re.findall(r"\bQGMMA\b", code)) == planned * shape.head_dim // 32


CASES = {
    **{f"n{n}": (RAGGED, n, config(n, 2 if n > 1 else 1), {}) for n in range(1, 9)},
    **{
        f"n{n} tokens split {split}": (RAGGED, n, config(n, dot, split, split), {})
        for n, dot, split in ((4, 1, 4), (5, 2, 2), (5, 2, 3), (6, 2, 3), (6, 1, 2), (6, 2, 2), (7, 2, 2), (8, 2, 2))
    },
    **{f"n{n} dot 1": (RAGGED, n, config(n, 1), {}) for n in (2, 4, 7)},
    "groups with a rest": (RAGGED, 5, config(2, 2), {}),
    "per-next_n": (RAGGED, 6, config(1, 1, 1, ctas_per_sm=3, num_stages=4), {}),
    "even": (RAGGED, 4, config(4, 2, schedule="even", split_kv=3), {}),
    "per-token lens": (((7, 9, 3), (5, 5, 65), (0, 0, 0), (64, 63, 300), (4000, 1, 2047)), 3, config(3, 2), {}),
    "page stride": (RAGGED, 3, config(3, 2), {"page_stride": 65536}),
    "page stride, odd 16": (RAGGED, 3, config(3, 2), {"page_stride": 64 * 132 + 16}),
    "width below context": ((500, 100), 3, config(3, 2), {"logits_width": 333}),
    **{
        f"page {p} d{d}": ((300, p, p + 1, p - 1), 2, config(2, 2), {"block_kv": p, "head_dim": d, "table_tail": 0})
        for p in (32, 64, 128, 256)
        for d in (64, 128)
    },
    **{f"heads {h}": (RAGGED, 3, config(3, 1 if h > 64 else 2), {"heads": h}) for h in (16, 32, 128)},
    **{f"heads 128 n{n} halves split": (RAGGED, n, config(4, 1, 2, 2), {"heads": 128}) for n in (7, 8)},
    **{f"heads 16 n{n} dot {d}": (RAGGED, n, config(n, d), {"heads": 16}) for n, d in ((4, 4), (7, 4), (8, 2))},
    "heads 32 dot 4": (RAGGED, 6, config(6, 4), {"heads": 32}),
    **{f"batch {b}": (tuple(i * 7 % 150 for i in range(b)), 2, config(2, 2), {"heads": 32}) for b in (65, 257, 1500)},
    "all empty": ((0,) * 33, 4, config(4, 2), {}),
}


@pytest.fixture(scope="module")
def kernel_on_cpu() -> Callable[..., None]:
    torch.set_num_threads(1)  # the tensors are small
    return gluon_on_cpu.load_kernel()


def emulate(kernel: Callable[..., None], p: Problem, given: Config, workgroups: int = 3) -> tuple[float, float]:
    """Errors of the kernel's source, run on the CPU; the buffer's guards must stay."""
    batch_size, next_n, heads, head_dim = p.q.shape
    block_kv = p.kv_cache.shape[1]
    shape = Shape(batch_size, next_n, heads, head_dim, block_kv)
    assert space.why_invalid(shape, given, H200) is None
    columns = min(p.logits_width, p.block_tables.shape[1] * block_kv)
    _, whole = p.guarded_output()
    sizes = pieces.group_sizes(next_n, given.fuse_n, given.dot_n, given.token_split)
    dtypes = {"fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32}
    k = (p.kv_cache.data_ptr(), p.kv_cache.shape[0], p.kv_cache.stride(0))
    q = (p.q.data_ptr(), batch_size, p.q.stride(0), p.q.stride(1))
    described = {
        **dict(zip(("k_desc", "scale_desc"), ((p.kv_cache, *g) for g in launch.k_geometry(shape, *k)), strict=True)),
        **{f"q{size}_desc": (p.q, *launch.q_geometry(shape, size, *q)) for size in sizes},
        "weights_desc": (
            p.weights, *launch.weights_geometry(shape, p.weights.data_ptr(), batch_size, p.weights.stride(0))
        ),
    }  # fmt: skip
    given_boxes = build.boxes(shape, given)
    assert list(described) == list(given_boxes), "encoded in the order of the boxes"
    descriptors = [
        gluon_on_cpu.Descriptor(
            described[name][0], described[name][1], dtypes[given_boxes[name][0]], *described[name][2:],
            given_boxes[name][1],
        )
        if name in described
        else None
        for name in ("k_desc", "scale_desc", *(f"q{size}_desc" for size in build.Q_DESCRIPTORS), "weights_desc")
    ]  # fmt: skip
    pointers = [gluon_on_cpu.Pointer(x.flatten()) for x in (p.block_tables, p.context_lens, whole)]
    parts = batch_size * given.groups(next_n)
    balanced = given.schedule == "balanced"
    grid = min(workgroups, parts * -(-columns // 64)) if balanced else parts * given.split_kv
    numbers = (
        batch_size, columns, given.split_kv, low_reciprocal(grid if balanced else given.split_kv),
        p.block_tables.stride(0), p.context_lens.stride(0), p.weights.stride(0), whole.stride(0),
    )  # fmt: skip
    constants = build.constants(shape, given, p.context_lens.dim() == 2)
    gluon_on_cpu.run(kernel, grid, [*descriptors, *pointers, *map(gluon_on_cpu.Value, numbers)], constants)
    expected, work = reference_logits(*p.arguments)
    rows = expected.shape[0]
    assert whole[rows:].isnan().all(), "the guard row was written"
    assert whole[:, p.logits_width :].isnan().all(), "guard columns were written"
    return worst_error(whole[:rows, : p.logits_width], expected, work)


@pytest.mark.parametrize("name", CASES)
def test_source_matches_the_reference_on_the_cpu(name: str, kernel_on_cpu: Callable[..., None]) -> None:
    lens, next_n, given, more = CASES[name]
    element, norm = emulate(kernel_on_cpu, make_problem(lens, next_n=next_n, **({"heads": 64} | more)), given)
    assert element <= 4e-6
    assert norm <= 1e-6


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 66, 132, 255, 528, 65535, 65536])
def test_quotients_by_products_are_exact(divisor: int, kernel_on_cpu: Callable[..., None]) -> None:
    divided = kernel_on_cpu.__globals__["_even_share"].__globals__["_divided"]
    largest, source = 2**31 - 1, torch.Generator().manual_seed(divisor)
    drawn = torch.randint(largest, (200_000,), generator=source)
    x = torch.cat([torch.arange(200_000), drawn, drawn % 2**25, largest - torch.arange(200_000)])
    near = x // divisor * divisor
    x = torch.cat([x, near, (near - 1).clamp(min=0)]).int()
    portion = gluon_on_cpu.Value(low_reciprocal(divisor))
    quotient, rest = divided(gluon_on_cpu.Value(x), gluon_on_cpu.Value(divisor), portion)
    assert torch.equal(quotient.data, x // divisor)
    assert torch.equal(rest.data, x % divisor)
    pid = torch.arange(1 << 20, dtype=torch.int32)
    part = ((pid.float() + 0.5) * portion.data.float()).int()
    assert torch.equal(part, pid // divisor)


def test_gaps_between_requests_and_between_rows_of_weights(kernel_on_cpu: Callable[..., None]) -> None:
    p = make_problem(RAGGED, next_n=3, heads=32)
    gapped = torch.zeros(len(RAGGED), 3 * 32 * 128 + 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
    gapped = gapped[:, : 3 * 32 * 128].unflatten(1, (3, 32, 128))
    gapped.copy_(p.q)
    rows = p.weights.shape[0]
    loose = torch.zeros((rows + 1) * 36).as_strided((rows, 32), (36, 1), 4)
    loose.copy_(p.weights)
    p.q, p.weights = gapped, loose
    element, norm = emulate(kernel_on_cpu, p, config(3, 2))
    assert element <= 4e-6
    assert norm <= 1e-6


@pytest.mark.parametrize("workgroups", [1, 2, 7, 40, 500])
def test_any_number_of_workgroups_shares_the_tiles(workgroups: int, kernel_on_cpu: Callable[..., None]) -> None:
    p = make_problem((700, 0, 1, 64, 0, 130, 65), next_n=2, heads=16)
    element, norm = emulate(kernel_on_cpu, p, config(1, 1, num_stages=2), workgroups)
    assert element <= 4e-6
    assert norm <= 1e-6


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_scales_that_arrive_late_are_still_the_tiles_own(
    consumers: int, kernel_on_cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever releases a ring slot then sleeps until the producer has filled it again.
    monkeypatch.setattr(gluon_on_cpu.Barriers, "pause_s", 0.003)
    p = make_problem((900, 64, 1000), next_n=4, heads=32)
    element, norm = emulate(kernel_on_cpu, p, config(4, 4, consumers, num_stages=2 * consumers), workgroups=1)
    assert element <= 4e-6
    assert norm <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference_and_repeats_bitwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if current_arch().isa != "sm90":
        pytest.skip("needs a Hopper GPU")
    if "sm90" not in spec.SPACES:
        monkeypatch.setitem(spec.SPACES, "sm90", space.__name__)
    lens, next_n, given, more = CASES[name]
    more = {"heads": 64} | more
    p = make_problem(lens, next_n=next_n, device="cuda", **more)
    shape = Shape(len(lens), next_n, more["heads"], p.q.shape[3], p.kv_cache.shape[1])
    assert space.why_invalid(shape, given, current_arch()) is None
    columns = min(p.logits_width, p.block_tables.shape[1] * shape.block_kv)
    wholes = []
    for _ in range(3):
        out, whole = p.guarded_output()
        traits = traits_of(p.kv_cache, p.weights, p.context_lens)
        launch.launch(p.q, p.kv_cache, p.weights, p.context_lens, p.block_tables, out, columns, shape, given, traits)
        wholes.append(whole)
    expected, work = reference_logits(*p.arguments)
    rows = expected.shape[0]
    assert wholes[0][rows:].isnan().all(), "the guard row was written"
    assert wholes[0][:, p.logits_width :].isnan().all(), "guard columns were written"
    element, norm = worst_error(wholes[0][:rows, : p.logits_width], expected, work)
    assert element <= 1e-3
    assert norm <= 2.5e-4
    for whole in wholes[1:]:
        assert torch.equal(whole.view(torch.int32), wholes[0].view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("next_n", range(1, 9))
@pytest.mark.parametrize("heads", [32, 64])
def test_large_launches_repeat_bitwise_and_agree_with_the_portable_kernel(heads: int, next_n: int) -> None:
    # Workgroups here change requests with a full ring, many times over: a race shows as a tile that differs.
    if current_arch().isa != "sm90":
        pytest.skip("needs a Hopper GPU")
    shape = Shape(64, next_n, heads, 128, 64, 31808)
    p = make_problem((31808,) * 64, next_n=next_n, heads=heads, device="cuda")
    traits = traits_of(p.kv_cache, p.weights, p.context_lens)
    plain = portable_space.default_config(shape, current_arch())
    assert plain is not None
    tensors = (p.q, p.kv_cache, p.weights, p.context_lens, p.block_tables)
    expected = torch.empty(64 * next_n, 31808, device="cuda")
    portable_launch.launch(*tensors, expected, 31808, shape, plain, traits)
    seen = expected.isfinite()
    for given in (c for c in spec.candidates(shape, current_arch()) if c.kernel == "sm90"):
        first = torch.full_like(expected, float("nan"))
        launch.launch(*tensors, first, 31808, shape, given, traits)
        assert torch.equal(first.isfinite(), seen), given
        off = (first - expected)[seen].double().norm() / expected[seen].double().norm()
        assert off <= 3e-4, given
        again = torch.empty_like(expected)
        for _ in range(100):
            again.fill_(float("nan"))
            launch.launch(*tensors, again, 31808, shape, given, traits)
            assert torch.equal(again.view(torch.int32), first.view(torch.int32)), given
