"""What `paged_mqa_logits` remembers of a launch's checks never lets through what they would refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_cache import make_problem  # noqa: E402

from tilewise.errors import InvalidShapeError, InvalidTensorError  # noqa: E402
from tilewise.kernels.arch import ARCHS  # noqa: E402
from tilewise.kernels.paged_mqa_logits import launch  # noqa: E402
from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import SPACES, Config, Shape, default_config  # noqa: E402

CONFIG = Config(fuse_n=2)


class Recorder:
    """Stands where a kernel's launch module does, and keeps the traits that it was given."""

    def __init__(self):
        self.traits = []

    def refuses(self, traits):
        return None

    def launch_key(self, shape, config, traits):
        return ("recorded", shape.next_n)

    def launch(self, *arguments):
        self.traits.append(arguments[-1])


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(launch, "launcher", lambda kernel: found)
    monkeypatch.setattr(launch, "_warmed", set())
    monkeypatch.setattr(launch, "_known", {})
    return found


def moved(tensor, by):
    """The tensor's values, `by` bytes past an address that is a multiple of 16."""
    raw = torch.zeros(tensor.numel() * tensor.element_size() + 32, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + by
    view = raw[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_an_address_is_looked_at_in_every_call(recorder, name):
    problem = make_problem([70, 5], next_n=2, heads=32)
    given = dict(zip(("q", "kv_cache", "weights", "context_lens", "block_tables"), problem.arguments, strict=False))
    given["max_model_len"] = problem.logits_width
    given[name] = moved(given[name], 0)
    paged_mqa_logits(**given, config=CONFIG)
    given[name] = moved(given[name], 8)
    with pytest.raises(InvalidTensorError, match=f"{name} must start at a multiple of 16 bytes"):
        paged_mqa_logits(**given, config=CONFIG)
    assert len(recorder.traits) == 1


def test_where_the_weights_start_is_told_to_the_kernel_in_every_call(recorder):
    problem = make_problem([70, 5], next_n=2, heads=32)
    q, kv_cache, weights, *others = problem.arguments
    for by in (0, 4, 0):
        paged_mqa_logits(q, kv_cache, moved(weights, by), *others, config=CONFIG)
    assert [traits.dense_weights for traits in recorder.traits] == [True, False, True]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(max_model_len=True), InvalidTensorError),
        (dict(max_model_len=1.0), InvalidTensorError),
        (dict(max_context_len=1.0), InvalidShapeError),
        (dict(mean_context_len=1.0), InvalidShapeError),
        (dict(cache_layout=["flat"]), (InvalidShapeError, TypeError)),
        (dict(weights=torch.zeros(2, 32).half()), InvalidTensorError),
        (dict(weights=torch.zeros(32, 2).t()), InvalidTensorError),
        (dict(out=torch.zeros(2, 2)), InvalidTensorError),
        (dict(out=torch.zeros(2, 1, dtype=torch.float64)), InvalidTensorError),
    ],
)
def test_what_equals_a_good_call_to_a_dictionary_or_nearly_is_refused_still(recorder, change, error):
    problem = make_problem([1], next_n=2, heads=32)
    names = ("q", "kv_cache", "weights", "context_lens", "block_tables", "max_model_len")
    given = dict(zip(names, problem.arguments, strict=True)) | {"max_context_len": 1, "mean_context_len": 1}
    for _ in range(2):
        paged_mqa_logits(**given, out=torch.zeros(2, 1), config=CONFIG)
    with pytest.raises(error):
        paged_mqa_logits(**{"out": torch.zeros(2, 1), **given, **change}, config=CONFIG)
    assert len(recorder.traits) == 2


def test_no_more_geometries_are_remembered_than_allowed(recorder, monkeypatch):
    monkeypatch.setattr(launch, "MOST_KNOWN", 3)
    problem = make_problem([70, 5], next_n=2, heads=32)
    for width in range(70, 80):
        paged_mqa_logits(*problem.arguments[:-1], width, config=CONFIG)
        assert len(launch._known) <= 3
    assert len(recorder.traits) == 10


def test_weights_that_tma_cannot_read_go_to_the_portable_kernel(monkeypatch):
    """A copy of such rows would end in a CUDA error; and one such call decides nothing for aligned ones after it."""
    launchers = {kernel: launch.launcher(kernel) for kernel in SPACES}
    launched = []

    def without_a_gpu(kernel):
        own = launchers[kernel]
        return SimpleNamespace(
            launch_key=own.launch_key, refuses=own.refuses, launch=lambda *arguments: launched.append(kernel)
        )

    monkeypatch.setattr(launch, "launcher", without_a_gpu)
    monkeypatch.setattr(launch, "_arch", lambda q: ARCHS["h200"])
    monkeypatch.setattr(launch, "_known", {})
    monkeypatch.setattr(launch, "_warmed", set())
    hopper = default_config(Shape(64, 4, 64, max_context_len=32768), ARCHS["h200"])
    assert hopper.kernel == "sm90"
    monkeypatch.setattr(launch, "_choose", lambda shape, arch: hopper)
    p = make_problem([300] * 4, next_n=4, heads=64)
    wide = torch.zeros(16 * 68 + 4)
    for first, pitch, kernel in ((1, 64, "portable"), (0, 64, "sm90"), (0, 67, "portable"), (0, 68, "sm90")):
        weights = wide.as_strided((16, 64), (pitch, 1), first)
        paged_mqa_logits(p.q, p.kv_cache, weights, p.context_lens, p.block_tables, 300)
        assert launched.pop() == kernel, (first, pitch)
        if kernel == "portable":
            with pytest.raises(InvalidTensorError, match="16 bytes"):
                paged_mqa_logits(p.q, p.kv_cache, weights, p.context_lens, p.block_tables, 300, config=hopper)
    assert launched == []
