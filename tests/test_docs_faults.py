"""docs/faults.md: every kind of fault once, and every test that it names is there, and marked as the page says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "faults.md"
COLUMNS = ["id", "seen in", "kind of fault", "what happens here", "tests"]
NUMBERS = {
    "K": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 15, 16, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 32, 33),
    "G": (2, 3, 6, 7, 8, 9, 11),
    "C": (1, 2, 3, 4, 5, 7, 8, 10, 11, 13),
    "A": (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 18, 19),
    "M": (1, 2, 3, 5),
    "F": (1, 2, 5, 6),
}
IDS = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`( \(GPU\))?")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def faults() -> list[list[str]]:
    return [row for row in rows() if row != COLUMNS and set(row[0]) != {"-"}]


@functools.cache
def functions_of(file: str) -> dict[str, list[str]]:
    """The test functions of a file, each with its decorators as text."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert node.name not in found, f"{file} has two tests called {node.name}: one never runs"
            found[node.name] = [ast.unparse(one) for one in node.decorator_list]
    return found


def test_every_table_has_the_same_columns() -> None:
    assert all(len(row) == len(COLUMNS) and all(row) for row in rows())
    assert rows().count(COLUMNS) == len(NUMBERS)


def test_every_kind_is_there_once_and_in_order() -> None:
    assert [row[0] for row in faults()] == IDS


@pytest.mark.parametrize("fault", faults(), ids=lambda row: row[0])
def test_every_test_that_is_named_exists(fault: list[str]) -> None:
    cell = fault[-1]
    if cell.startswith("none: "):
        assert len(cell) > 30, "a kind without a test has a reason"
        return
    named = NAMED.findall(cell)
    assert named, "a kind has tests, or says `none:` and why"
    assert ", ".join(f"`{file}::{test}`{gpu}" for file, test, gpu in named) == cell, "names a test in no known form"
    assert len(set(named)) == len(named)
    for file, test, gpu in named:
        assert (TESTS / file).is_file(), file
        assert test in functions_of(file), f"{file}::{test}"
        only_gpu = any(text.endswith(".gpu") for text in functions_of(file)[test])
        assert only_gpu == bool(gpu), f"{file}::{test} needs a GPU: {only_gpu}"


@pytest.mark.parametrize("file", sorted(path.name for path in TESTS.glob("test_faults_*.py")))
def test_every_kind_that_a_test_claims_is_a_kind_whose_row_names_it(file: str) -> None:
    """The ids at the start of a docstring and the table say the same."""
    named = {(row[0], test) for row in faults() for where, test, _ in NAMED.findall(row[-1]) if where == file}
    claimed = set()
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            ids = re.match(r"([A-Z]\d+(?:, [A-Z]\d+)*): ", ast.get_docstring(node) or "")
            assert ids is not None, f"{node.name} must say which kinds of fault it is about"
            claimed |= {(one, node.name) for one in ids[1].split(", ")}
    assert named == claimed
