"""The drop-in for DeepGEMM: where it goes in and comes out, who serves what, and that its answers are right."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_cache import make_problem  # noqa: E402

from tilewise.dispatch.integrations import deep_gemm as dropin  # noqa: E402
from tilewise.dispatch.integrations import deep_gemm_install, deep_gemm_times  # noqa: E402
from tilewise.errors import InvalidTensorError, UnsupportedError  # noqa: E402
from tilewise.kernels.arch import get_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits import peers  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import Shape  # noqa: E402

H200 = get_arch("h200")
INDEXER = "vllm.v1.attention.backends.mla.indexer"
LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
HOME = "vllm.utils.deep_gemm"


def deep_gemm_module(name="deep_gemm"):
    """A module that has DeepGEMM's names and signatures, and says what it was called with."""
    module = ModuleType(name)

    def fp8_fp4_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
                                 indices=None, **more):  # fmt: skip
        return ("own", q, context_lens, schedule_meta, indices, more)

    def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
        return torch.full((num_sms + 1, 2), -5, dtype=torch.int32)

    module.fp8_fp4_paged_mqa_logits = fp8_fp4_paged_mqa_logits
    module.get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata
    module.get_num_sms = lambda: 132
    return module


def vllm_modules(names):
    """vLLM's modules with the names that they bind, as in vLLM 0.33."""
    home = ModuleType(HOME)
    home._fp8_fp4_paged_mqa_logits_impl = None
    home._get_paged_mqa_logits_metadata_impl = None

    def fp8_fp4_paged_mqa_logits(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len,
                                 indices=None):  # fmt: skip
        return "vllm's"

    def get_paged_mqa_logits_metadata(context_lens, block_size, num_sms, indices=None):
        return "vllm's schedule"

    def native_next_n_supported(next_n):
        return next_n in (1, 2, 4)

    home.fp8_fp4_paged_mqa_logits = fp8_fp4_paged_mqa_logits
    home.get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata
    home.native_next_n_supported = native_next_n_supported
    made = {"vllm": ModuleType("vllm"), "vllm.utils": ModuleType("vllm.utils"), HOME: home}
    for name in names:
        made[name] = ModuleType(name)
    if LAYER in made:
        made[LAYER].fp8_fp4_paged_mqa_logits = fp8_fp4_paged_mqa_logits
    if INDEXER in made:
        made[INDEXER].get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata
        made[INDEXER].native_next_n_supported = native_next_n_supported
    return made


@pytest.fixture
def loaded(monkeypatch):
    """Puts modules among the loaded ones, and takes them and the drop-in out again."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("deep_gemm", "vllm")]:
        monkeypatch.delitem(sys.modules, name)

    def put(modules):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        dropin.uninstall()
        return modules

    yield put
    dropin.uninstall()


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(dropin, "_arch", lambda tensor: H200)


def arguments(problem, width=None):
    lens = problem.context_lens
    if lens.dim() == 1:
        lens = peers.row_lens(lens, problem.q.shape[1], problem.q.shape[1])
    return problem.q, problem.kv_cache, problem.weights, lens, problem.block_tables, None, width or problem.logits_width


# -- in and out


def test_without_deepgemm_there_is_nothing_to_replace(loaded):
    if dropin.available():
        pytest.skip("DeepGEMM is installed here")
    with pytest.raises(UnsupportedError, match="nothing to replace"):
        dropin.install()
    dropin.uninstall()


def test_installed_over_deepgemms_functions_and_taken_out_again(loaded):
    module = loaded({"deep_gemm": deep_gemm_module()})["deep_gemm"]
    before = dict(vars(module))
    dropin.install()
    dropin.install()
    assert module.fp8_fp4_paged_mqa_logits is dropin.fp8_fp4_paged_mqa_logits
    assert module.get_paged_mqa_logits_metadata is dropin.get_paged_mqa_logits_metadata
    assert not hasattr(module, "fp8_paged_mqa_logits")  # 2.8 has none: none is made up
    dropin.uninstall()
    dropin.uninstall()
    assert vars(module) == before


@pytest.mark.parametrize("with_package", [True, False])
def test_vllms_names_are_replaced_where_loaded_and_later_importers_bind_the_dropin(loaded, with_package):
    modules = loaded(vllm_modules([INDEXER]) | ({"deep_gemm": deep_gemm_module()} if with_package else {}))
    before = {name: dict(vars(module)) for name, module in modules.items()}
    dropin.install()
    home, indexer = modules[HOME], modules[INDEXER]
    assert home.fp8_fp4_paged_mqa_logits is dropin.vllm_fp8_fp4_paged_mqa_logits
    assert indexer.get_paged_mqa_logits_metadata is dropin.vllm_get_paged_mqa_logits_metadata
    assert [n for n in range(1, 10) if indexer.native_next_n_supported(n)] == [1, 2, 3, 4, 5, 6, 7, 8]
    # A layer that is loaded now binds the drop-in, and vLLM's first call keeps DeepGEMM's function of the moment.
    layer = ModuleType(LAYER)
    layer.fp8_fp4_paged_mqa_logits = home.fp8_fp4_paged_mqa_logits
    loaded_later = {LAYER: layer}
    sys.modules.update(loaded_later)
    if with_package:
        home._fp8_fp4_paged_mqa_logits_impl = modules["deep_gemm"].fp8_fp4_paged_mqa_logits
    dropin.install()
    dropin.uninstall()
    try:
        assert layer.fp8_fp4_paged_mqa_logits is before[HOME]["fp8_fp4_paged_mqa_logits"]
        if with_package:
            own = before["deep_gemm"]["fp8_fp4_paged_mqa_logits"]
            assert home._fp8_fp4_paged_mqa_logits_impl is own
            home._fp8_fp4_paged_mqa_logits_impl = None
        assert {name: dict(vars(module)) for name, module in modules.items()} == before
    finally:
        del sys.modules[LAYER]


def test_many_threads_install_and_uninstall_at_once(loaded):
    module = loaded({"deep_gemm": deep_gemm_module()})["deep_gemm"]
    before = dict(vars(module))

    def work():
        for _ in range(50):
            dropin.install()
            dropin.uninstall()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dropin.uninstall()
    assert vars(module) == before


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dropin.vllm_fp8_fp4_paged_mqa_logits, "fp8_fp4_paged_mqa_logits"),
        (dropin.vllm_get_paged_mqa_logits_metadata, "get_paged_mqa_logits_metadata"),
        (dropin.vllm_native_next_n_supported, "native_next_n_supported"),
    ],
)
def test_vllms_signatures(ours, theirs):
    assert list(inspect.signature(ours).parameters) == list(
        inspect.signature(getattr(vllm_modules([])[HOME], theirs)).parameters
    )


# -- who serves


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(q=lambda p: (p.q, torch.zeros(1, dtype=torch.int32))), "with scales"),
        (dict(q=lambda p: (p.q.view(torch.int8), None)), "float8_e4m3fn"),
        (dict(indices=lambda p: torch.zeros(2, dtype=torch.int32)), "indices"),
        (dict(logits_dtype=lambda p: torch.bfloat16), "bfloat16"),
        (dict(weights=lambda p: p.weights.bfloat16()), "weights"),
    ],
)
def test_what_only_deepgemm_takes_goes_there_or_is_a_typed_error(loaded, change, match):
    problem = make_problem([70, 5], next_n=1, heads=32)
    q, kv_cache, weights, lens, tables, _, width = arguments(problem)
    given = {name: value(problem) for name, value in change.items()}
    q, weights = given.pop("q", (q, None)), given.pop("weights", weights)
    schedule = torch.zeros(133, 2, dtype=torch.int32)
    call = (q, kv_cache, weights, lens, tables, schedule, width)
    if not peers.installed():
        with pytest.raises(UnsupportedError, match=match):
            dropin.fp8_fp4_paged_mqa_logits(*call, **given)
    module = loaded({"deep_gemm": deep_gemm_module()})["deep_gemm"]
    dropin.install()
    said, values, got_lens, got_schedule, indices, more = module.fp8_fp4_paged_mqa_logits(*call, **given)
    assert said == "own"
    assert got_lens is lens
    assert got_schedule is schedule
    assert (values[0] is q[0], values[1] is q[1]) == (True, True)
    assert indices is given.get("indices")
    assert more == {name: value for name, value in given.items() if name == "logits_dtype"}


def test_the_eighth_positional_argument_is_indices_or_clean_logits(loaded):
    loaded({"deep_gemm": deep_gemm_module()})
    dropin.install()
    problem = make_problem([70, 5], next_n=1, heads=32)
    indices = torch.zeros(2, dtype=torch.int32)
    assert dropin.fp8_fp4_paged_mqa_logits(*arguments(problem), indices)[4] is indices


def test_a_launch_that_we_do_not_take_goes_to_deepgemm(loaded):
    loaded({"deep_gemm": deep_gemm_module()})
    dropin.install()
    problem = make_problem([70], next_n=2, heads=32)
    q = torch.zeros(1, 2, 24, 128).to(torch.float8_e4m3fn)  # no kernel of ours has 24 heads
    schedule = torch.zeros(133, 2, dtype=torch.int32)
    lens = torch.tensor([[69, 70]], dtype=torch.int32)
    found = dropin.fp8_fp4_paged_mqa_logits(
        (q, None), problem.kv_cache, problem.weights, lens, problem.block_tables, schedule, 70
    )
    assert found[0] == "own"
    assert found[3] is schedule


def test_at_a_next_n_that_deepgemm_has_not_its_rows_are_shorter(loaded, on_an_h200):
    seen = {}

    def own(q, kv_cache, weights, lens, tables, schedule, width):
        seen.update(q=q[0].shape, lens=lens.tolist(), tables=tables.tolist(), schedule=schedule.shape)
        return "rows"

    module = deep_gemm_module()
    module.fp8_fp4_paged_mqa_logits = own
    loaded({"deep_gemm": module})
    dropin.install()
    problem = make_problem([70, 9], next_n=6, heads=32)
    q = torch.zeros(2, 6, 24, 128).to(torch.float8_e4m3fn)
    lens = torch.tensor([[65, 66, 67, 68, 69, 70], [4, 5, 6, 7, 8, 9]], dtype=torch.int32)
    schedule = torch.zeros(133, 2, dtype=torch.int32)
    found = dropin.fp8_fp4_paged_mqa_logits(
        q, problem.kv_cache, problem.weights, lens, problem.block_tables, schedule, 70
    )
    assert found == "rows"
    assert seen["q"] == (6, 2, 24, 128)
    assert seen["lens"] == [[65, 66], [67, 68], [69, 70], [4, 5], [6, 7], [8, 9]]
    assert seen["tables"] == [problem.block_tables[b].tolist() for b in (0, 0, 0, 1, 1, 1)]
    assert seen["schedule"] == (133, 2)


@pytest.mark.parametrize("q_dimensions", [3, 5])
def test_tensors_of_other_dimensions_are_refused_by_name(loaded, q_dimensions):
    problem = make_problem([70], next_n=1, heads=32)
    q, *others = arguments(problem)
    with pytest.raises(InvalidTensorError, match="q must have 4 dimensions"):
        dropin.fp8_fp4_paged_mqa_logits(q[0] if q_dimensions == 3 else q[None], *others)


def times_file(tmp_path, rows):
    folder = tmp_path / "data" / "peers"
    folder.mkdir(parents=True)
    text = ",".join(deep_gemm_times.COLUMNS) + "\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    (folder / "deep_gemm_h200.csv").write_text(text)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Puts measured times in place of those that are shipped."""
    caches = (deep_gemm_times._rows, deep_gemm_times.own_kernel_may_be_faster, dropin._is_deep_gemms)

    def put(rows):
        times_file(tmp_path, rows)
        monkeypatch.setattr(deep_gemm_times.resources, "files", lambda package: tmp_path)
        for cache in caches:
            cache.cache_clear()

    yield put
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def test_deepgemms_kernel_is_what_runs_where_it_was_measured_to_be_faster(loaded, on_an_h200, measured):
    measured([(64, 2, 16, 32768, 32768, 90.0, 100.0), (64, 2, 1, 32768, 32768, 99.0, 100.0)])
    assert deep_gemm_times.own_kernel_is_faster(Shape(16, 2, 64, max_context_len=30000), H200)
    assert not deep_gemm_times.own_kernel_is_faster(Shape(1, 2, 64, max_context_len=30000), H200), "that is a tie"
    assert not deep_gemm_times.own_kernel_is_faster(Shape(64, 2, 64, max_context_len=30000), H200), "that is far away"
    assert not deep_gemm_times.own_kernel_is_faster(Shape(16, 2, 32), H200)
    module = loaded({"deep_gemm": deep_gemm_module()})["deep_gemm"]
    dropin.install()
    lens = torch.full((16, 2), 40, dtype=torch.int32)
    schedule = module.get_paged_mqa_logits_metadata(lens, 64, 132)
    assert (schedule == -5).all(), "where DeepGEMM may run, the schedule has to be its own"
    assert (module.get_paged_mqa_logits_metadata(lens[:1], 64, 132) != -5).all()
    kv_cache = torch.zeros(4, 64, 1, 132, dtype=torch.uint8)
    tables = torch.zeros(16, 512, dtype=torch.int32)
    q = torch.zeros(16, 2, 64, 128).to(torch.float8_e4m3fn)
    found = module.fp8_fp4_paged_mqa_logits((q, None), kv_cache, torch.zeros(32, 64), lens, tables, schedule, 32768)
    assert found[0] == "own"
    assert found[3] is schedule


# -- schedules


def ranges_of(schedule, batch_size):
    """The requests that each multiprocessor works on, by the rules of DeepGEMM's scheduler on Hopper."""
    starts = schedule[:, 0].tolist()
    assert (schedule[:, 1] == 0).all()
    assert starts[0] == 0
    assert starts[-1] == batch_size
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("batch_size", [1, 5, 132, 133, 4096])
def test_a_spare_schedule_covers_every_request_once_and_is_the_callers_own(loaded, on_an_h200, batch_size):
    loaded({"deep_gemm": deep_gemm_module()})
    dropin.install()
    lens = torch.full((batch_size, 6), 40, dtype=torch.int32)
    first = dropin.get_paged_mqa_logits_metadata(lens, 64, 132)
    assert first.shape == (133, 2)
    assert first.dtype == torch.int32
    work = ranges_of(first, batch_size)
    assert [request for one in work for request in one] == list(range(batch_size))
    assert max(map(len, work)) - min(map(len, work)) <= 1
    first.fill_(9)
    assert (dropin.get_paged_mqa_logits_metadata(lens, 64, 132)[-1] == torch.tensor([batch_size, 0])).all()


def test_vllms_schedule_has_half_the_entries_at_next_n_4(loaded, on_an_h200):
    loaded(vllm_modules([]))
    dropin.install()
    for next_n, slots in ((1, 132), (4, 66), (6, 132)):
        lens = torch.ones(3, next_n, dtype=torch.int32)
        assert dropin.vllm_get_paged_mqa_logits_metadata(lens, 64, 132).shape == (slots + 1, 2)
    assert dropin.vllm_get_paged_mqa_logits_metadata(lens, 64, 132, indices=lens[:, 0]) == "vllm's schedule"


def test_on_another_gpu_the_schedule_is_deepgemms(loaded):
    loaded({"deep_gemm": deep_gemm_module()})
    dropin.install()
    assert (dropin.get_paged_mqa_logits_metadata(torch.ones(3, 2, dtype=torch.int32), 64, 132) == -5).all()


# -- answers


@pytest.mark.interpret
@pytest.mark.parametrize("next_n", [1, 2, 3, 6, 8, 12])
def test_each_token_sees_as_many_columns_as_its_own_length_says(next_n):
    lens = [[7 + 3 * t for t in range(next_n)], [0] * next_n, [130 - t for t in range(next_n)], [1] * next_n]
    problem = make_problem(lens, next_n=next_n, heads=32, logits_width=150)
    logits = dropin.fp8_fp4_paged_mqa_logits((problem.q, None), *arguments(problem)[1:], clean_logits=True)
    assert logits.shape == (4 * next_n, 150)
    assert logits.stride() == (256, 1)
    expected, work = reference_logits(*problem.arguments, untouched=float("-inf"))
    assert worst_error(logits, expected, work)[0] <= 1e-6


@pytest.mark.interpret
def test_lengths_of_requests_hide_the_future_of_each_token():
    problem = make_problem([70, 0, 2], next_n=3, heads=32, logits_width=80)
    q, kv_cache, weights, _, tables, _, width = arguments(problem)
    given = (q, kv_cache, weights, problem.context_lens, tables, None, width)
    expected, work = reference_logits(*problem.arguments, untouched=float("-inf"))
    assert worst_error(dropin.fp8_paged_mqa_logits(*given, clean_logits=True), expected, work)[0] <= 1e-6


@pytest.mark.interpret
def test_more_tokens_than_a_kernel_takes_and_lengths_of_requests():
    problem = make_problem([70, 5, 0], next_n=10, heads=32, logits_width=80)
    given = (problem.q, problem.kv_cache, problem.weights, problem.context_lens, problem.block_tables, None, 80)
    logits = dropin.fp8_fp4_paged_mqa_logits(*given, True)
    expected, _ = reference_logits(*problem.arguments)
    scored = expected.isfinite()
    assert (logits[scored] - expected[scored]).abs().max() <= 1e-4 * expected[scored].abs().max()
    assert (logits[~scored] == float("-inf")).all()


@pytest.mark.interpret
def test_vllms_call_with_pages_that_have_gaps_and_a_transposed_table():
    problem = make_problem([[60, 61], [3, 4]], next_n=2, heads=32, logits_width=64, page_stride=64 * 132 + 256)
    tables = problem.block_tables.t().contiguous().t()
    assert tables.stride(1) != 1
    logits = dropin.vllm_fp8_fp4_paged_mqa_logits(
        (problem.q, None), problem.kv_cache, problem.weights, problem.context_lens, tables, None, max_model_len=64,
        indices=None,
    )  # fmt: skip
    expected, _ = reference_logits(*problem.arguments)
    scored = expected.isfinite()
    assert (logits[scored] - expected[scored]).abs().max() <= 1e-4 * expected[scored].abs().max()


@pytest.mark.interpret
def test_an_empty_batch_is_an_empty_answer():
    problem = make_problem([], next_n=2, heads=32, logits_width=80)
    lens = torch.zeros(0, 2, dtype=torch.int32)
    given = (problem.q, problem.kv_cache, problem.weights, lens, problem.block_tables, None, 80)
    assert dropin.fp8_fp4_paged_mqa_logits(*given).shape == (0, 80)


def test_replaced_modules_are_forgotten_when_taken_out(loaded):
    loaded({"deep_gemm": deep_gemm_module()})
    dropin.install()
    assert deep_gemm_install.original(peers.FUNCTION) is not None
    dropin.uninstall()
    assert not deep_gemm_install._replaced
