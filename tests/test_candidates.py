"""What `candidates` remembers for a caller never shows in its answers."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.arch import ARCHS
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.kernels.paged_mqa_logits.spec import SPACES, Shape, Verdicts, candidates, default_config, is_valid, space

SHAPES = st.builds(
    Shape,
    st.integers(0, 1 << 20) | st.integers(0, 300),
    st.integers(1, 8),
    st.sampled_from(spec.HEADS),
    st.sampled_from(spec.HEAD_DIMS),
    st.sampled_from((16, 32, 64, 128, 256)),
    st.integers(0, 1 << 20),
)


@pytest.mark.parametrize("arch", ["h200", "mi355x"])
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4))
def test_remembered_verdicts_change_nothing(arch: str, shapes: list[Shape]) -> None:
    verdicts: Verdicts = {}
    for shape in [*shapes, *shapes]:
        expected = list(
            dict.fromkeys(
                config
                for kernel in SPACES
                if space(kernel).runs_on(ARCHS[arch])
                for config in [default_config(shape, ARCHS[arch]), *space(kernel).candidates(shape, ARCHS[arch])]
                if is_valid(shape, config, ARCHS[arch]) is None
            )
        )
        found = candidates(shape, ARCHS[arch], verdicts)
        assert found == candidates(shape, ARCHS[arch])
        assert found[0] == default_config(shape, ARCHS[arch])
        assert set(found) == set(expected)
        assert len(found) == len(set(found))


@pytest.mark.parametrize("arch", ["h200", "mi355x"])
@given(shape=SHAPES, batch_size=st.integers(1, 512), context=st.integers(1, 1 << 20))
def test_only_the_sizes_that_kernels_are_compiled_for_decide(
    arch: str, shape: Shape, batch_size: int, context: int
) -> None:
    other = dataclasses.replace(shape, batch_size=batch_size, max_context_len=context, mean_context_len=context // 2)
    for kernel in SPACES:
        if space(kernel).runs_on(ARCHS[arch]):
            for config in space(kernel).candidates(shape, ARCHS[arch]):
                whys = [space(kernel).why_invalid(one, config, ARCHS[arch]) for one in (shape, other)]
                assert whys[0] == whys[1]


def test_too_many_programs_are_refused_whatever_is_remembered() -> None:
    verdicts: Verdicts = {}
    small, large = Shape(1, 1, 32), Shape(1 << 20, 1, 32)
    even = space("portable").default_config(large, ARCHS["h200"])
    assert even is not None
    config = dataclasses.replace(even, split_kv=1 << 12)
    candidates(small, ARCHS["h200"], verdicts)
    next(iter(verdicts.values()))[config] = config
    assert is_valid(small, config, ARCHS["h200"]) is None
    assert "2^31" in str(is_valid(large, config, ARCHS["h200"]))
    assert config not in candidates(large, ARCHS["h200"], verdicts)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MOST_VERDICTS", (4, 300))
    verdicts: Verdicts = {}
    for heads in (8, 16, 32, 64):
        for next_n in (1, 2, 3):
            for batch_size in range(1, 40, 3):
                candidates(Shape(batch_size, next_n, heads), ARCHS["h200"], verdicts)
                assert len(verdicts) <= 4
                assert all(len(known) < 600 for known in verdicts.values())
