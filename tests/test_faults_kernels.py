"""Kinds of fault that kernels and launchers of this field have had, each tried on every kernel there is.

docs/faults.md lists the kinds by id. Interpreted here, compiled where there is a GPU; what needs neither runs anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from interpreted_memory import only_own_memory  # noqa: E402
from paged_cache import Problem, make_problem  # noqa: E402

import tilewise  # noqa: E402
from tilewise.dispatch.selector import select  # noqa: E402
from tilewise.errors import InvalidConfigError, InvalidShapeError, InvalidTensorError  # noqa: E402
from tilewise.kernels import timing  # noqa: E402
from tilewise.kernels.arch import ARCHS, Arch, current_arch, match_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits import launch  # noqa: E402
from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits, warm_up  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import (  # noqa: E402
    BLOCK_KVS,
    SPACES,
    Config,
    Shape,
    candidates,
    default_config,
    is_valid,
    space,
)
from tilewise.kernels.paged_mqa_logits.traits import usual_traits  # noqa: E402
from tilewise.kernels.registry import KERNELS  # noqa: E402

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = float("inf"), float("nan")
# What changes how fast a kernel is, but not which of its code is generated.
_TUNING = {
    "split_kv": 1, "num_warps": 4, "num_stages": 3, "waves_per_eu": 0, "consumers": 0, "token_split": 0,
    "ctas_per_sm": 0, "program_order": "",
}  # fmt: skip


def variants(shape: Shape, arch: Arch) -> list[Config]:
    """A candidate for each piece of code that any registered kernel has for this shape; in parts, where it can be."""
    found: dict[Config, Config] = {}
    for config in candidates(shape, arch):
        code = dataclasses.replace(config, **_TUNING)
        if code not in found or abs(config.split_kv - 2) < abs(found[code].split_kv - 2):
            found[code] = config
    return list(found.values())


def poison(problem: Problem) -> Problem:
    """The problem with its block table in a wider one, where every entry past a context names a page full of NaN."""
    used = set(problem.block_tables.flatten().tolist())
    spare = next(page for page in range(problem.kv_cache.shape[0]) if page not in used)
    problem.kv_cache[spare] = 0xFF  # NaN as e4m3fn and as fp32
    rows, width = problem.block_tables.shape
    wide = torch.full((rows + 1, width + 5), spare, dtype=torch.int32, device=problem.q.device)
    wide[:rows, :width] = torch.where(problem.block_tables < 0, spare, problem.block_tables)
    return dataclasses.replace(problem, block_tables=wide[:rows, :width])


def check(problem: Problem, config: Config, expected: Any) -> None:
    """Every element right, nothing read or written outside; `expected` is `reference_logits` of the problem."""
    out, whole = problem.guarded_output()
    with contextlib.nullcontext() if out.is_cuda else only_own_memory(problem, out):
        paged_mqa_logits(*problem.arguments, config=config, out=out)
    element, norm = worst_error(out, *expected)
    limits = (timing.MAX_ELEMENT_ERROR, timing.MAX_NORM_ERROR) if out.is_cuda else (1e-6, 1e-6)
    assert element <= limits[0], f"{config}: worst element {element}"
    assert norm <= limits[1], f"{config}: norm-wise {norm}"
    assert whole[-1].isnan().all(), f"{config}: the row after the last one was written"
    assert whole[:, problem.logits_width :].isnan().all(), f"{config}: a column past the width was written"


# -- pages, tables, layouts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_kv", [page for page in BLOCK_KVS if page > 1])
def test_every_variant_at_every_page_size(block_kv: int, device: str) -> None:
    """K3, K6, K7, K8, G9: one grid for all; the table ends with the context, and what lies past it is poison."""
    problem = poison(
        make_problem(
            (block_kv + 1, 7, 300), next_n=3, heads=16, head_dim=64, block_kv=block_kv, table_tail=0, logits_width=300,
            device=device,
        )
    )  # fmt: skip
    expected = reference_logits(*problem.arguments)
    shape, arch = Shape(3, 3, 16, 64, block_kv, 300), current_arch()
    plain = [config for config in space("portable").grid(shape, arch) if is_valid(shape, config, arch) is None]
    found = list(dict.fromkeys([*variants(shape, arch), *plain]))
    assert {config.mma_m for config in found if config.kernel == "portable"} == {"kv", "heads"}
    assert {config.fuse_n for config in found} == {1, 2, 3}
    for config in found:
        check(problem, config, expected)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("block_kv", [1, 2, 8, 16, 32, 48, 64, 128, 256, 512])
def test_a_page_size_is_served_or_refused_by_name(block_kv: int, arch: Arch) -> None:
    """K4, K19: no kernel takes pages that it was not built for, and the refusal names the page size."""
    if block_kv not in BLOCK_KVS:
        with pytest.raises(InvalidShapeError, match=f"block_kv.*got {block_kv}"):
            Shape(4, 2, 32, 128, block_kv, 4096)
        return
    shape = Shape(4, 2, 32, 128, block_kv, 4096)
    least = {"portable": 16, "sm90": 32, "gfx950": 1}
    for kernel in SPACES:
        if not space(kernel).runs_on(arch) or not served(Shape(4, 2, 32, 128, 64, 4096), kernel, arch):
            continue  # the installed Triton may be one that a kernel is not trusted with
        configs = space(kernel).candidates(shape, arch)
        assert served(shape, kernel, arch) == (block_kv >= least[kernel]), kernel
        if block_kv < least[kernel]:
            assert all(f"block_kv {block_kv}" in str(is_valid(shape, config, arch)) for config in configs), kernel


def served(shape: Shape, kernel: str, arch: Arch) -> bool:
    return any(is_valid(shape, config, arch) is None for config in space(kernel).candidates(shape, arch))


def test_a_page_that_no_kernel_reads_is_refused_before_the_launch() -> None:
    """K4, K19: asked for by name, a kernel for larger pages does not run on pages of one token."""
    for block_kv, error in ((1, InvalidConfigError), (2, InvalidShapeError), (48, InvalidShapeError)):
        problem = make_problem([70, 3], next_n=2, heads=32, block_kv=block_kv)
        out, whole = problem.guarded_output()
        for config in (Config(), None):
            with pytest.raises(error, match="block_kv"):
                paged_mqa_logits(*problem.arguments, config=config, out=out)
        assert whole.isnan().all()


def test_preshuffled_pages_without_a_kernel_for_them_are_a_typed_error() -> None:
    """K10, K11: where only kernels for flat pages run, nothing scores preshuffled ones, chosen or asked for."""
    problem = make_problem([70, 3], next_n=2, heads=32)
    out, whole = problem.guarded_output()
    for config in (Config(), None):
        with pytest.raises(InvalidConfigError, match="flat pages only"):
            paged_mqa_logits(*problem.arguments, config=config, out=out, cache_layout="preshuffled")
    with pytest.raises(InvalidShapeError, match="cache_layout must be"):
        paged_mqa_logits(*problem.arguments, out=out, cache_layout="tiled")  # type: ignore[arg-type]
    assert whole.isnan().all()


def test_the_same_bytes_in_another_layout_are_other_keys() -> None:
    """K10: the reference reads the two layouts apart, or a kernel that mixes them up would pass."""
    problem = make_problem([200], next_n=1, heads=32)
    flat, work = reference_logits(*problem.arguments)
    shuffled, _ = reference_logits(*problem.arguments, cache_layout="preshuffled")
    assert worst_error(shuffled, flat, work)[0] > 0.1
    assert worst_error(flat, flat, work)[0] == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_kv", [16, 64])
def test_moving_a_token_between_pages_moves_its_logit(block_kv: int, device: str) -> None:
    """K12: values and scale of a token belong to one slot, and go with it; every other logit stays as it was."""
    problem = make_problem([block_kv + 9], next_n=1, heads=16, head_dim=64, block_kv=block_kv, device=device)
    page_a, page_b = (problem.kv_cache[int(page)].flatten() for page in problem.block_tables[0, :2])
    slot_a, slot_b = block_kv - 2, 5
    a, b = slot_a, block_kv + slot_b  # their columns
    for config in variants(Shape(1, 1, 16, 64, block_kv, block_kv + 9), current_arch()):
        before = paged_mqa_logits(*problem.arguments, config=config)
        for start, size in ((0, 64), (block_kv * 64, 4)):  # the values, then the scale
            at_a, at_b = (slice(start + slot * size, start + (slot + 1) * size) for slot in (slot_a, slot_b))
            kept = page_a[at_a].clone()
            page_a[at_a] = page_b[at_b]
            page_b[at_b] = kept
        after = paged_mqa_logits(*problem.arguments, config=config)
        moved = before.clone()
        moved[0, a], moved[0, b] = before[0, b], before[0, a]
        largest = before.abs().max()
        assert (before[0, a] - before[0, b]).abs() > 0.01 * largest
        assert (after - moved).abs().max() <= (1e-3 * largest if after.is_cuda else 0.0), str(config)


# -- lengths and rows

# (lengths, next_n, columns that each row scores, columns that each row writes)
BOUNDS: dict[str, tuple[Any, int, list[int], list[int]]] = {
    "last tokens of one sequence": ([9], 3, [7, 8, 9], [9, 9, 9]),
    "shorter than next_n": ([2], 4, [0, 0, 1, 2], [2, 2, 2, 2]),
    "padding beside a request": ([0, 5], 2, [0, 0, 4, 5], [0, 0, 5, 5]),
    "per token, not consecutive": ([[7, 9], [5, 5]], 2, [7, 9, 5, 5], [9, 9, 5, 5]),
    "per token, falling": ([[9, 2, 0]], 3, [9, 2, 0], [9, 9, 9]),
    "per token, padding": ([[0, 0], [0, 3]], 2, [0, 0, 0, 3], [0, 0, 3, 3]),
}


def counted(logits: Any) -> tuple[list[int], list[int]]:
    """How many columns each row scores and writes; both have to be its first ones."""
    scored, written = logits.isfinite(), ~logits.isnan()
    counts = scored.sum(1).tolist(), written.sum(1).tolist()
    column = torch.arange(logits.shape[1], device=logits.device)
    for mask, each in zip((scored, written), counts, strict=True):
        assert torch.equal(mask, column < torch.tensor(each, device=logits.device).unsqueeze(1))
    return counts


@pytest.mark.parametrize("name", BOUNDS)
def test_the_reference_bounds_each_token_as_counted_by_hand(name: str) -> None:
    """K13: what every kernel is compared with is itself held against numbers that were counted by hand."""
    lens, next_n, scored, written = BOUNDS[name]
    problem = make_problem(lens, next_n=next_n, heads=16, head_dim=64, logits_width=20)
    assert counted(reference_logits(*problem.arguments)[0]) == (scored, written)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BOUNDS)
def test_each_token_has_its_own_bound(name: str, device: str) -> None:
    """K13: 1-D lengths end with the last token, 2-D lengths are taken as they are."""
    lens, next_n, scored, written = BOUNDS[name]
    problem = make_problem(lens, next_n=next_n, heads=16, head_dim=64, logits_width=20, device=device)
    for fuse_n in {1, next_n}:
        out, _ = problem.guarded_output()
        paged_mqa_logits(*problem.arguments, config=Config(fuse_n=fuse_n), out=out)
        assert counted(out) == (scored, written)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [31, 256])
def test_nothing_but_padding_rows(batch_size: int, device: str) -> None:
    """G2: batches of empty requests, at and off multiples of 32, read no table and write nothing."""
    problem = make_problem(
        [0] * batch_size, next_n=1, heads=8, head_dim=64, logits_width=64, table_tail=0, device=device
    )
    out, whole = problem.guarded_output()
    paged_mqa_logits(*problem.arguments, config=Config(), out=out)
    assert whole.isnan().all()


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["q", "weights", "context_lens", "block_tables", "out"])
def test_tensors_that_disagree_on_the_rows_are_refused(name: str, change: int) -> None:
    """G6: padded to the size of a graph, one tensor has more rows than another: an error, and nothing is written."""
    names = ("q", "kv_cache", "weights", "context_lens", "block_tables", "max_model_len")
    for lens in ([70, 3], [[69, 70], [3, 3]]):
        problem = make_problem(lens, next_n=2, heads=32)
        out, whole = problem.guarded_output()
        arguments = {**dict(zip(names, problem.arguments, strict=True)), "out": out}
        tensor = arguments[name]
        arguments[name] = tensor[:change] if change < 0 else torch.cat([tensor, tensor[:1]])
        with pytest.raises(InvalidTensorError, match=r"must (be|have) .*got"):
            paged_mqa_logits(**arguments, config=Config())
        assert whole.isnan().all()


# -- numbers

KINDS = ["float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "float16", "bfloat16"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_fp8_is_refused(kind: str) -> None:
    """K29, K30: bytes of another 8-bit format are never read as e4m3fn, in the queries or in the cache."""
    problem = make_problem([70], next_n=2, heads=32)
    out, whole = problem.guarded_output()
    dtype = getattr(torch, kind)
    q = problem.q.view(torch.uint8).to(dtype) if dtype.itemsize > 1 else problem.q.view(dtype)
    cache = problem.kv_cache.to(dtype) if dtype.itemsize > 1 else problem.kv_cache.view(dtype)
    with pytest.raises(InvalidTensorError, match=f"q must be float8_e4m3fn, got .*{kind}"):
        paged_mqa_logits(q, *problem.arguments[1:], config=Config(), out=out)
    with pytest.raises(InvalidTensorError, match=f"kv_cache must be uint8 or float8_e4m3fn, got .*{kind}"):
        paged_mqa_logits(problem.q, cache, *problem.arguments[2:], config=Config(), out=out)
    assert whole.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_that_mean_something_else_in_fnuz(device: str) -> None:
    """K29: 0x80 is minus zero (NaN in fnuz); a NaN, 0x7f, stays in the column of its token."""
    problem = make_problem([70], next_n=2, heads=16, head_dim=64, device=device)
    values = problem.kv_cache[int(problem.block_tables[0, 0])].flatten()[: 64 * 64].view(64, 64)
    config = Config(fuse_n=2, dot_n=2)
    values[3:9, ::2] = 0x00
    problem.q.view(torch.uint8)[0, 0, :, 5] = 0x00
    zero = paged_mqa_logits(*problem.arguments, config=config)
    values[3:9, ::2] = 0x80
    problem.q.view(torch.uint8)[0, 0, :, 5] = 0x80
    minus_zero = paged_mqa_logits(*problem.arguments, config=config)
    assert torch.equal(zero, minus_zero)
    values[11, 7] = 0x7F
    with_nan = paged_mqa_logits(*problem.arguments, config=config)
    others = torch.arange(70, device=device) != 11
    assert torch.equal(with_nan[:, others], zero[:, others])


def put(rows: Any, columns: Any, value: float) -> Callable[[Any], Any]:
    return lambda logits: logits.__setitem__((rows, columns), value)


EVERY = slice(None)
# What faulty kernels have made of correct logits, [4 rows, 220 columns] of requests with 200 and 60 tokens.
PLANTED: dict[str, Callable[[Any], Any]] = {
    "all NaN": put(EVERY, EVERY, NAN),
    "half of the rows NaN": put(slice(None, None, 2), EVERY, NAN),
    "the last row never written": put(-1, EVERY, NAN),
    "a block scores zero": put(EVERY, slice(64, 128), 0.0),
    "one element off by a hundredth": lambda logits: logits[1, 17:18].mul_(1.01),
    "two tokens swapped": lambda logits: logits[:, 3:5].copy_(logits[:, 3:5].flip(1)),
    "one infinity": put(0, 0, INF),
    "one column too few": put(0, 150, -INF),
    "a later token's column scored": put(0, 199, 1.0),
    "a column past the context written": put(2, 60, 0.0),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_judge_of_every_launch_finds_planted_faults(name: str) -> None:
    """K1, K2, K25: rows left out, blocks of zeros and NaN now and then are no close miss to the check before timing."""
    problem = make_problem([200, 60], next_n=2, heads=32, logits_width=220)
    expected, work = reference_logits(*problem.arguments)
    limits = timing.MAX_ELEMENT_ERROR, timing.MAX_NORM_ERROR
    assert worst_error(expected.float(), expected, work) <= limits
    damaged = expected.clone()
    PLANTED[name](damaged)
    element, norm = worst_error(damaged, expected, work)
    assert element > limits[0] or norm > limits[1]


# -- what is launched, and what was prepared


@pytest.mark.interpret
def test_the_choice_follows_the_context_and_not_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """K20: a buffer and a table for a quarter of a million tokens give the config that short ones give."""
    chosen: list[Config] = []
    choose = launch._choose

    def recorded(shape: Shape, arch: Arch) -> Config:
        chosen.append(choose(shape, arch))
        return chosen[-1]

    monkeypatch.setattr(launch, "_choose", recorded)
    problem = make_problem([300], next_n=4, heads=16, head_dim=64, table_tail=4096)
    for width, longest in ((512, 300), (1 << 18, 300), (1 << 18, 64), (512, 64)):
        paged_mqa_logits(*problem.arguments[:5], width, max_context_len=longest)
    assert chosen[0] == chosen[1]
    assert chosen[2] == chosen[3]
    assert chosen[0] != chosen[2], "the context decides nothing: this test could not fail"


@pytest.mark.parametrize("device", DEVICES)
def test_own_output_has_aligned_rows_whatever_the_width(device: str) -> None:
    """K23: top-k kernels read rows 16 bytes at a time, by a stride that also holds for a single row."""
    problem = make_problem([5], next_n=1, heads=16, head_dim=64, device=device)
    for width in (1, 5, 63, 163, 163844):
        for clean in (False, True):
            out = paged_mqa_logits(*problem.arguments[:5], width, config=Config(), clean_logits=clean)
            assert out.shape == (1, width)
            assert out.stride(1) == 1
            assert out.stride(0) >= width
            assert out.stride(0) % 4 == 0
            assert out.data_ptr() % 16 == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_token", [False, True])
def test_a_prepared_launch_serves_other_tensors_and_smaller_batches(per_token: bool, device: str) -> None:
    """G11: bound once, called with tensors at other addresses; for every kernel that this device runs."""
    shape = Shape(4, 3, 32, 64, 64, 300)
    for config in variants(shape, current_arch()):
        prepared = tilewise.prepare(shape, config, per_token_lens=per_token, device=device)
        for lens in ((300, 0, 7, 65), (64, 129)):
            each = [[length, max(0, length - 2), length] for length in lens] if per_token else lens
            problem = make_problem(each, next_n=3, heads=32, head_dim=64, logits_width=300, device=device)
            out, whole = problem.guarded_output()
            tensors = problem.arguments[:5]
            columns = min(300, problem.block_tables.shape[1] * 64)
            prepared(*tensors, out, columns)
            element, norm = worst_error(out, *reference_logits(*problem.arguments))
            assert element <= timing.MAX_ELEMENT_ERROR, config
            assert norm <= timing.MAX_NORM_ERROR, config
            assert whole[-1].isnan().all(), config
    with pytest.raises(InvalidConfigError, match="fuse_n"):
        tilewise.prepare(shape, dataclasses.replace(config, fuse_n=9), device=device)


@pytest.mark.parametrize("arch", [ARCHS["h200"], ARCHS["mi355x"]], ids=lambda arch: arch.name)
def test_what_is_compiled_for_a_shape_is_what_it_launches(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """K24, G11: preparing a shape leaves nothing to compile at its real batch and context, whatever the kernel."""
    launchers = {kernel: launch.launcher(kernel) for kernel in SPACES}

    def without_a_gpu(kernel: str) -> Any:
        own = launchers[kernel]
        return SimpleNamespace(launch_key=own.launch_key, refuses=own.refuses, launch=lambda *arguments: None)

    monkeypatch.setattr(launch, "launcher", without_a_gpu)
    monkeypatch.setattr(launch, "_arch", lambda q: arch)
    for batch_size, next_n, heads, longest in (
        (1, 1, 32, 300),
        (7, 4, 64, 4096),
        (300, 6, 32, 131072),
        (4096, 2, 16, 64),
    ):
        shape = Shape(batch_size, next_n, heads, 128, 64, longest)
        for per_token in (False, True):
            traits = usual_traits(shape, per_token_lens=per_token)
            for config in candidates(shape, arch)[::5]:
                monkeypatch.setattr(launch, "_warmed", set())
                launch.compile_config(shape, config, traits, device="cpu")
                wanted = launchers[config.kernel].launch_key(shape, config, traits)
                assert launch._warmed == {wanted}, f"{config} for {shape}"


def test_what_changes_the_code_is_part_of_what_was_warmed() -> None:
    """A8, G11: layout, sizes and options that give another binary give another key, for every kernel."""
    archs = {"portable": ARCHS["h200"], "sm90": ARCHS["h200"], "gfx950": ARCHS["mi355x"]}
    others = [{"heads": 64}, {"head_dim": 64}, {"block_kv": 128}]
    shape = Shape(16, 6, 32, 128, 64, 4096)
    for name in SPACES:
        own = launch.launcher(name)
        config = space(name).candidates(shape, archs[name])[0]
        keys = [own.launch_key(shape, config, usual_traits(shape, per_token_lens=each)) for each in (False, True)]
        for change in [*others, {"cache_layout": "preshuffled"}] if name == "gfx950" else others:
            other = dataclasses.replace(shape, **change)  # type: ignore[arg-type]
            keys.append(own.launch_key(other, config, usual_traits(other)))
        for field, value in (("fuse_n", 2), ("tile_kv", 2 * config.tile_kv), ("num_warps", 2 * config.num_warps)):
            other_config = dataclasses.replace(config, dot_n=1, **{field: value})
            if field in space(name).READS and is_valid(shape, other_config, archs[name]) is None:
                keys.append(own.launch_key(shape, other_config, usual_traits(shape)))
        assert len(set(keys)) == len(keys) >= 6, name


@pytest.mark.interpret
def test_a_launch_after_warm_up_compiles_nothing() -> None:
    """G11: every batch x next_n of a plan is ready after one call, lengths per token too, however large the batch."""
    plan = [Shape(batch, next_n, 8, 64, 16, 64) for batch in (1, 5) for next_n in (1, 3)]
    for per_token in (False, True):
        assert warm_up(plan, device="cpu", per_token_lens=per_token) > 0
        assert warm_up(plan, device="cpu", per_token_lens=per_token) == 0
        before = set(launch._warmed)
        for shape in plan:
            lens = [[9] * shape.next_n] * shape.batch_size if per_token else [9] * shape.batch_size
            problem = make_problem(lens, next_n=shape.next_n, heads=8, head_dim=64, block_kv=16)
            paged_mqa_logits(*problem.arguments, max_context_len=64)
            paged_mqa_logits(*problem.arguments, config=default_config(shape, current_arch()))
        assert launch._warmed == before


def test_every_kernel_has_all_its_parts() -> None:
    """K33: space, launcher and sources of a kernel go by one name, and each module offers what is asked of it."""
    assert set(SPACES) == set(launch.LAUNCHERS) == set(KERNELS)
    wanted = list(inspect.signature(launch.Launcher.launch).parameters)[1:]
    for kernel in SPACES:
        own = launch.launcher(kernel)
        assert list(inspect.signature(own.launch).parameters) == wanted
        assert list(inspect.signature(own.launch_key).parameters) == ["shape", "config", "traits"]
        assert {"kernel", "fuse_n", "tile_kv"} <= space(kernel).READS


def compiled_portable(shape: Shape, arch: Arch) -> Any:
    """The portable kernel with its default config for a real GPU; needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilewise.kernels.paged_mqa_logits import portable_launch

    config = space("portable").default_config(shape, arch)
    assert config is not None
    kernel = portable_launch._paged_mqa_logits_kernel
    constants = portable_launch._constexprs(shape, config, usual_traits(shape))
    pointers = dict(
        zip(kernel.arg_names, ("*fp8e4nv", "*fp8e4nv", "*fp32", "*i32", "*i32", "*fp32", "*fp32"), strict=False)
    )
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 2, 5)}
    target = GPUTarget("cuda", 90, 32) if arch.vendor == "nvidia" else GPUTarget("hip", arch.isa, 64)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")  # Triton 3.9, of its next default
@pytest.mark.parametrize("arch", [ARCHS["h200"], ARCHS["mi355x"]], ids=lambda arch: arch.name)
def test_the_portable_kernel_compiles_with_the_installed_triton(arch: Arch) -> None:
    """K33: what the launcher hands over is what the kernel takes, for real targets, on a machine without a GPU."""
    compiled = compiled_portable(Shape(4, 2, 16, 64, 64, 4096), arch)
    assert compiled.asm["cubin" if arch.vendor == "nvidia" else "hsaco"]
    assert compiled.metadata.shared <= arch.shared_memory_bytes


@pytest.mark.parametrize(("heads", "next_n"), [(16, 8), (32, 8), (64, 2), (128, 1)])  # those that need most registers
def test_the_portable_default_does_not_spill_on_hopper(heads: int, next_n: int) -> None:
    """K33: another Triton may need more registers."""
    import triton

    compiled = compiled_portable(Shape(16, next_n, heads, 128, 64, 32768), ARCHS["h200"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = Path(compiled.metadata_group[f"{compiled.name}.cubin"])
    code = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout
    assert "QGMMA" in code
    assert not re.findall(r"\b(?:LDL|STL)\b", code), "registers were spilled"


# -- measuring


def test_a_clock_that_stands_or_runs_backwards_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5, A11: such samples are dropped; where no other is left, the config counts as failed, and says why."""
    good, bad = Config(), Config(split_kv=2)
    elapsed = {good: iter([0.004, 0.0, -1.0, 0.002, NAN]), bad: iter([0.0, -1.0, NAN, 0.0, -0.5])}
    replayed: list[Config] = []

    class Graph:  # no clock of a real device can be made to go wrong
        def capture_begin(self) -> None: ...
        def capture_end(self) -> None:
            self.config = captured[-1]

        def replay(self) -> None:
            replayed.append(self.config)

        def reset(self) -> None: ...

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, other: Event) -> float:
            return next(elapsed[replayed[-1]])

    captured: list[Config] = []
    device = SimpleNamespace(
        Stream=lambda: None, Event=Event, CUDAGraph=Graph, stream=lambda stream: contextlib.nullcontext()
    )
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=device))
    monkeypatch.setattr(timing, "check", lambda problem, config, arch: timing.Timing(config))
    problem: Any = SimpleNamespace(
        launch=lambda config, turn: captured.append(config), launches=1, needs_flush=lambda arch: False
    )
    one, two = timing.time_candidates(problem, [good, bad], ARCHS["h200"], rounds=5)
    assert (one.status, sorted(one.samples_us)) == ("correct", [2.0, 4.0])
    assert (two.status, two.samples_us) == ("runtime", [])
    assert "zero or less" in str(two.reason)


def test_the_cache_to_flush_is_the_last_level_whatever_the_driver_reports() -> None:
    """A19: a driver that reports one die's L2 does not make a warm cache look cold."""
    for name, isa, units in (("mi355x", "gfx950", 128), ("h200", "sm90", 66)):
        for reported in (0, 4 << 20):
            arch = match_arch(isa, units, "", l2_bytes=reported)
            assert arch.name not in ARCHS
            assert arch.last_level_cache_bytes >= ARCHS[name].last_level_cache_bytes


@pytest.mark.gpu
def test_every_launch_of_a_timed_graph_reads_its_own_pages() -> None:
    """A18: no page is walked twice, and all of them together exceed the last-level cache twofold."""
    arch = current_arch()
    shape = Shape(16, 1, 32, 128, 64, 32768)
    pages = 16 * 512
    pool = timing.PagePool(pages * max(2, -(-2 * arch.last_level_cache_bytes // (pages * 64 * 132))), 64, 128)
    problem = timing.make_problem(shape, [32768] * 16, pool, arch, logits_width=32768)
    tables = torch.stack(problem.block_tables)
    assert tables.min() >= 0
    assert tables.unique().numel() == tables.numel() == len(problem.block_tables) * pages
    assert problem.footprint_bytes == tables.numel() * 64 * 132
    assert problem.footprint_bytes >= 2 * arch.last_level_cache_bytes


# -- streams and graphs


@pytest.mark.gpu
def test_selecting_does_not_disturb_a_capture() -> None:
    """A3: a shape that was never seen is weighed while a graph is captured, and the capture goes on."""
    counter = torch.zeros(1, device="cuda")
    counter += 1  # loads the addition before the capture
    arch = current_arch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        counter += 1
        for batch_size in (3, 17, 91):
            decision = select(Shape(batch_size, 5, 32, 128, 64, 7777 + batch_size), arch=arch)
            assert is_valid(Shape(batch_size, 5, 32, 128, 64, 7777 + batch_size), decision.config, arch) is None
        counter += 1
    counter.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 2


@pytest.mark.gpu
def test_a_graph_and_eager_launches_at_once_do_not_mix() -> None:
    """G8: nothing is shared between a captured launch and one on another stream."""
    problems = [
        make_problem(lens, next_n=4, heads=32, seed=seed, device="cuda")
        for seed, lens in enumerate(([30000, 77, 0, 5000], [15000, 29999]))
    ]
    config = default_config(Shape(4, 4, 32, 128, 64, 30000), current_arch())
    expected = [paged_mqa_logits(*p.arguments, config=config, clean_logits=True).clone() for p in problems]
    outs = [torch.empty_like(one) for one in expected]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        paged_mqa_logits(*problems[0].arguments, config=config, out=outs[0], clean_logits=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(side):
            paged_mqa_logits(*problems[1].arguments, config=config, out=outs[1], clean_logits=True)
    torch.cuda.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


@pytest.mark.gpu
def test_a_wide_output_costs_no_more_than_a_narrow_one() -> None:
    """K20, K21: a million columns with 8,000 scored take no fill and no larger grid; either would be 4x and more."""
    times = {}
    for width in (8192, 1 << 20):
        tail = (width - 8000) // 64  # as in a captured graph, the table is as wide as the output
        problem = make_problem([8000] * 64, next_n=4, heads=32, table_tail=tail, logits_width=width, device="cuda")
        out = torch.empty(256, width, device="cuda")
        best = INF
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(20):
                paged_mqa_logits(*problem.arguments, max_context_len=8000, out=out)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        times[width] = best
    assert times[1 << 20] < 2 * times[8192], times
