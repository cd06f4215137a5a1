"""What every test module shares: which tests this process can run, and how Hypothesis searches."""

from __future__ import annotations

import importlib.util
import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # A GPU machine may have pytest without its time limit: the setting is then accepted and does nothing.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take (pytest-timeout is not installed)")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # The same examples on every run: a test that fails for one person fails for all. No deadline, because a shared
        # machine stalls now and then; the time limit of a test still holds.
        settings.register_profile("tilewise", derandomize=True, deadline=None)
        settings.load_profile("tilewise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this process can't run, and say what would."""
    compiled = pytest.mark.skip(reason="this process interprets kernels (TRITON_INTERPRET=1): use `make test`")
    interpreted = pytest.mark.skip(reason="needs a process with TRITON_INTERPRET=1: use `make test`")
    no_gpu = pytest.mark.skip(reason="needs a GPU: use `make gpu-test` on a machine that has one")
    for item in items:
        interpret, gpu = item.get_closest_marker("interpret"), item.get_closest_marker("gpu")
        if interpret and gpu:
            raise pytest.UsageError(f"{item.nodeid} is marked interpret and gpu: no process can run both")
        if bool(interpret) != INTERPRETING:
            item.add_marker(compiled if INTERPRETING else interpreted)
        if gpu and not has_gpu():
            item.add_marker(no_gpu)


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
