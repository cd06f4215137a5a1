"""Kernel hashes: what changes them, and that every registered source is there."""

from __future__ import annotations

from importlib import resources

import pytest

from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import SPACES
from tilewise.kernels.registry import KERNELS, _code, kernel_source_hash

SOURCE = """
def kernel(a, b):
    # why
    if a:
        return (a, b)
    return b
"""
SAME = """
def kernel(
    a,
    b,
):

    if a:  # another reason
        return (
            a,
            b,
        )
    return b
"""


def test_layout_and_comments_do_not_count() -> None:
    assert _code(SOURCE) == _code(SAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [("return b", "return a"), ("(a, b):", "(b, a):"), ("        return (a", "        pass\n    return (a")],
)
def test_code_and_its_nesting_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert _code(SOURCE) != _code(SOURCE.replace(old, new, 1))


def test_a_formatted_string_is_one_token_in_every_python() -> None:
    # From 3.12 on the tokenizer takes it apart, and rows measured under one Python would be stale under another.
    text = 'x = f"a{b:{c}}d{f\'{e}\'}" + f"""g\n{h}\ni""" + "j"\n'
    assert _code(text) == ["x", "=", "f\"a{b:{c}}d{f'{e}'}\"", "+", 'f"""g\n{h}\ni"""', "+", '"j"', "<newline>"]


def test_every_kernel_has_its_sources_and_a_space() -> None:
    for name, kernel in KERNELS.items():
        assert name in SPACES
        for source in kernel.sources:
            assert resources.files("tilewise").joinpath(source).is_file(), source
        assert len(kernel_source_hash(name)) == 16


def test_unknown_kernel_is_a_typed_error() -> None:
    with pytest.raises(UnsupportedError, match="kernel must be one of"):
        kernel_source_hash("v999")
