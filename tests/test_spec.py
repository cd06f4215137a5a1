"""Shapes, configs and the one predicate: a truth table, and what must hold for every shape on every GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import InvalidConfigError, InvalidShapeError
from tilewise.kernels.arch import ARCHS, get_arch
from tilewise.kernels.paged_mqa_logits.spec import (
    CONFIG_FIELDS,
    HEADS,
    SPACES,
    Config,
    Shape,
    bytes_moved,
    candidates,
    default_config,
    floor_us,
    flops,
    is_valid,
    space,
)

H200 = get_arch("h200")


def shapes(**fixed: object) -> st.SearchStrategy[Shape]:
    values: dict[str, st.SearchStrategy[object]] = {
        "batch_size": st.one_of(st.integers(0, 300), st.sampled_from([4096, 8192, 16384, 32768])),
        "next_n": st.integers(1, 8),
        "heads": st.sampled_from(HEADS),
        "head_dim": st.sampled_from([64, 128]),
        "block_kv": st.sampled_from([16, 32, 64, 128, 256]),
        "max_context_len": st.one_of(st.integers(0, 2000), st.sampled_from([32768, 131072, 262144, 1 << 20])),
    }
    values.update({name: st.just(value) for name, value in fixed.items()})
    return st.builds(Shape, **values)


@given(shape=shapes(), arch=st.sampled_from([a for a in ARCHS.values() if a.isa in ("sm90", "cpu", "gfx950")]))
def test_default_is_valid_and_the_first_candidate_and_every_candidate_is_valid(shape: Shape, arch: object) -> None:
    found = candidates(shape, arch)  # type: ignore[arg-type]
    assert found[0] == default_config(shape, arch)  # type: ignore[arg-type]
    assert len(set(found)) == len(found)
    for config in found:
        assert is_valid(shape, config, arch) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("compute_units", [78, 80, 128, 132, 228, 256, 304])
def test_split_follows_the_live_compute_unit_count(compute_units: int) -> None:
    arch = dataclasses.replace(H200, compute_units=compute_units)
    shape = Shape(4, 6, 32, max_context_len=131072)
    plain = space("portable").default_config(shape, arch)
    assert plain is not None
    assert plain.split_kv == 4 * compute_units // 4


def test_candidates_cover_every_number_of_groups() -> None:
    for next_n in range(1, 9):
        found = {
            config.groups(next_n)
            for config in space("portable").grid(Shape(16, next_n, 32), H200)
            if config.mma_m == "kv"
        }
        expected = {-(-next_n // fuse) for fuse in range(1, next_n + 1)}
        assert found == expected


# (changes to the shape, changes to the config, part of the reason; None: valid)
TRUTH: list[tuple[dict[str, object], dict[str, object], str | None]] = [
    ({}, {}, None),
    ({}, {"kernel": "v999"}, "kernel must be one of"),
    ({"next_n": 1}, {"fuse_n": 2}, "fuse_n must be 1 to next_n (1), got 2"),
    ({}, {"fuse_n": 0}, "fuse_n must be"),
    ({}, {"fuse_n": 6, "dot_n": 3}, "dot_n must be a power of two"),
    ({}, {"fuse_n": 2, "dot_n": 4}, "at most fuse_n (2), got 4"),
    ({"heads": 128}, {"fuse_n": 4, "dot_n": 4}, "dot_n x heads must be at most 256, got 512"),
    ({"heads": 8}, {"mma_m": "heads"}, "at least 16"),
    ({}, {"mma_m": "rows"}, "mma_m must be"),
    ({}, {"tile_kv": 48}, "tile_kv must be a power of two"),
    ({}, {"tile_kv": 512}, "tile_kv must be at most 256"),
    ({}, {"split_kv": 0}, "split_kv must be at least 1"),
    ({}, {"split_kv": 1 << 30}, "under 2^31 programs"),
    ({}, {"num_warps": 3}, "num_warps must be"),
    ({}, {"num_stages": 9}, "num_stages must be 1 to 8"),
    ({}, {"waves_per_eu": 2}, "waves_per_eu is for AMD"),
    ({}, {"schedule": "balanced"}, "does not read schedule"),
    ({}, {"consumers": 2}, "does not read consumers"),
    ({"cache_layout": "preshuffled"}, {}, "flat pages only"),
    ({"block_kv": 1}, {}, "pages of at least 16 tokens"),
    ({"heads": 128}, {"fuse_n": 6, "dot_n": 2, "tile_kv": 256, "num_stages": 8}, "bytes of shared memory"),
    ({}, {"split_kv": 5000}, None),  # more parts than tiles: some programs find nothing to do
]


@pytest.mark.parametrize(("shape_changes", "config_changes", "reason"), TRUTH)
def test_truth_table(shape_changes: dict[str, object], config_changes: dict[str, object], reason: str | None) -> None:
    shape = Shape(**{"batch_size": 16, "next_n": 6, "heads": 32, **shape_changes})  # type: ignore[arg-type]
    config = Config(**config_changes)  # type: ignore[arg-type]
    got = is_valid(shape, config, H200)
    if reason is None:
        assert got is None
    else:
        assert got is not None
        assert reason in got


def test_a_kernel_runs_only_on_its_archs() -> None:
    shape = Shape(1, 1, 32)
    for kernel, arch in itertools.product(SPACES, ARCHS.values()):
        if not space(kernel).runs_on(arch):
            reason = is_valid(shape, Config(kernel=kernel), arch)
            assert reason is not None
            assert "does not run on" in reason


@pytest.mark.parametrize("isa", ["sm75", "sm80", "gfx90a", "gfx942"])
def test_gpus_without_fp8_products_have_no_kernel(isa: str) -> None:
    arch = dataclasses.replace(H200, name="other", isa=isa)
    with pytest.raises(InvalidConfigError, match="no kernel serves"):
        default_config(Shape(1, 1, 32), arch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", -1), ("batch_size", 1.0), ("batch_size", True), ("batch_size", "16"), ("batch_size", None),
        ("next_n", 0), ("next_n", 9), ("heads", 24), ("heads", 256), ("head_dim", 96), ("block_kv", 48),
        ("block_kv", 512), ("max_context_len", -1), ("max_context_len", float("nan")), ("mean_context_len", 40000),
        ("cache_layout", "nhd"), ("cache_layout", ["flat", "flat"]),
    ],
)  # fmt: skip
def test_bad_shape_names_field_value_and_range(field: str, value: object) -> None:
    values: dict[str, object] = {"batch_size": 16, "next_n": 6, "heads": 32, field: value}
    with pytest.raises(InvalidShapeError) as error:
        Shape(**values)  # type: ignore[arg-type]
    assert field in str(error.value)
    assert "got" in str(error.value)


def test_mean_context_defaults_to_the_longest() -> None:
    assert Shape(1, 1, 32, max_context_len=500) == Shape(1, 1, 32, max_context_len=500, mean_context_len=500)


def test_config_dict_round_trip_and_strictness() -> None:
    config = Config(fuse_n=6, dot_n=2, split_kv=33, num_stages=5)
    assert Config.from_dict(config.to_dict()) == config
    assert list(config.to_dict()) == list(CONFIG_FIELDS)
    for bad in ({"fuse_n": "6"}, {"fuse_n": True}, {"fuse_n": 6.0}, {"speed": 1}, {"kernel": None}):
        with pytest.raises(InvalidConfigError, match="got"):
            Config.from_dict(bad)


def test_floor_by_hand() -> None:
    """Batch 2, next_n 3, 32 heads, 640 tokens in pages of 64: the terms, one by one."""
    shape = Shape(2, 3, 32, max_context_len=640)
    assert flops(shape) == 2 * 3 * 32 * 128 * 1280
    queries, keys, table, logits = 6 * 32 * 132, 1280 * 132, 4 * 20, 4 * 3 * 1280
    assert bytes_moved(shape) == queries + keys + table + logits
    assert floor_us(shape, H200) == bytes_moved(shape) / 4.58e6
    big = Shape(64, 6, 64, max_context_len=131072)
    assert floor_us(big, H200) == flops(big) / 1493e6


def test_empty_batch_has_a_default() -> None:
    assert is_valid(Shape(0, 4, 32), default_config(Shape(0, 4, 32), H200), H200) is None


@pytest.mark.parametrize("field", ["batch_size", "heads"])
def test_an_int_too_long_to_print_is_refused_like_any_other(field: str) -> None:
    values: dict[str, int] = {"batch_size": 16, "next_n": 6, "heads": 32, field: 10**5000}
    with pytest.raises(InvalidShapeError, match="got far more"):
        Shape(**values)


@pytest.mark.parametrize("order", [0, 1])
def test_what_is_remembered_of_one_batch_size_holds_for_another(order: int) -> None:
    """An even schedule has a limit on its workgroups, which is the batch's and not the kind of shape's."""
    arch = get_arch("h200")
    shapes = [Shape(200, 8, 32, 128, 64, 4096, 0), Shape(1 << 20, 8, 32, 128, 64, 4096, 0)]
    verdicts: dict = {}
    for shape in shapes if order else reversed(shapes):
        assert candidates(shape, arch, verdicts) == candidates(shape, arch)
