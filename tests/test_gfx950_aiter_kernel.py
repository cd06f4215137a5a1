"""aiter's own Gluon kernel through our audit and emulator, where AMD's aiter is installed; skipped elsewhere."""

from __future__ import annotations

import functools
import inspect

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("tinygrad")
theirs = pytest.importorskip("aiter.ops.triton.gluon.pa_mqa_logits", reason="AMD's aiter is not installed")

from emulator.code_object import CodeObject  # noqa: E402
from emulator.launch import launch  # noqa: E402
from emulator.memory import Memory  # noqa: E402
from emulator.problem import map_tensor, preshuffled  # noqa: E402
from paged_cache import make_problem  # noqa: E402

from tilewise.kernels.paged_mqa_logits.gfx950 import aiter_model, assembly  # noqa: E402
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error  # noqa: E402

TILE_KV, NUM_WARPS = 256, 4
# The kernel's arguments by name, and what the compiler may count on: multiples of 16 (d), 32-bit ranges (r).
ARGUMENTS = {
    "batch_size": ("i32", ""), "next_n": ("i32", ""), "heads_num": ("i32", "d"), "Q_buffer": ("*fp8e4nv", "dr"),
    "stride_q_batch": ("i32", "d"), "stride_q_next_n": ("i32", "d"), "stride_q_heads": ("i32", "d"),
    "KV_buffer": ("*fp8e4nv", "d"), "stride_k_seq": ("i32", "d"), "scale_buffer": ("*fp32", "d"),
    "stride_scale_seq": ("i32", "d"), "context_len_ptr": ("*i32", "r"), "kv_indices": ("*i32", "r"),
    "weights": ("*fp32", "dr"), "stride_w_batch": ("i32", "d"), "OutLogits_buffer": ("*fp32", ""),
    "stride_out_batch": ("i64", ""), "max_model_len": ("i32", ""), "max_block_len": ("i32", ""),
    "num_block": ("i32", ""), "SplitKV": ("i32", ""),
}  # fmt: skip


@functools.cache
def compiled(heads: int, block_kv: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = theirs._gluon_deepgemm_fp8_paged_mqa_logits_preshuffle
    values = {
        "ChunkQ": heads, "ChunkK": TILE_KV, "KVBlockSize": block_kv, "HiddenDim": 128, "CDNA_VERSION": 4,
        "ARCH": "gfx950",
    }  # fmt: skip
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {name: values[name] for name in names if name in values}
    arguments = {name: ARGUMENTS[name] for name in names if name not in values}
    traits = {"d": ["tt.divisibility", 16], "r": ["tt.pointer_range", 32]}
    source = GluonASTSource(
        fn=kernel,
        signature={name: arguments[name][0] if name in arguments else "constexpr" for name in names},
        constexprs=constants,
        attrs={(i,): [traits[t] for t in arguments[name][1]] for i, name in enumerate(names) if name in arguments},
    )
    options = {"num_warps": NUM_WARPS, "waves_per_eu": 2, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=options), arguments


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_instruction_counts_that_the_static_model_uses(heads):
    text = compiled(heads, 128)[0].asm["amdgcn"]
    code = assembly.parse(text)
    first, last = assembly.main_loop(code)
    counts = assembly.count(code[first : last + 1])
    kept = aiter_model.counts()[heads]
    assert counts.mfma == int(kept["mfma"])
    # Other releases of aiter and of Triton differ a little; the calibration would show it.
    assert counts.valu == pytest.approx(int(kept["valu"]), rel=0.1)
    assert assembly.short_waits(code) == []


@pytest.mark.parametrize(("heads", "next_n", "block_kv"), [(32, 1, 64), (32, 6, 128), (64, 2, 16), (128, 2, 256)])
def test_equals_the_reference(heads, next_n, block_kv):
    problem = make_problem([300, 77, 6], next_n=next_n, heads=heads, block_kv=block_kv, logits_width=1024)
    kernel, arguments = compiled(heads, block_kv)
    cache = preshuffled(problem.kv_cache)
    out, whole = problem.guarded_output()
    memory, split = Memory(), 2
    page = cache.stride(0)
    kv = map_tensor(memory, cache)
    values = {
        "batch_size": 3, "next_n": next_n, "heads_num": heads, "Q_buffer": map_tensor(memory, problem.q),
        "stride_q_batch": problem.q.stride(0), "stride_q_next_n": problem.q.stride(1), "stride_q_heads": 128,
        "KV_buffer": kv, "stride_k_seq": page, "scale_buffer": kv + block_kv * 128, "stride_scale_seq": page // 4,
        "context_len_ptr": map_tensor(memory, problem.context_lens),
        "kv_indices": map_tensor(memory, problem.block_tables), "weights": map_tensor(memory, problem.weights),
        "stride_w_batch": heads, "OutLogits_buffer": map_tensor(memory, out), "stride_out_batch": out.stride(0),
        "max_model_len": out.shape[1], "max_block_len": problem.block_tables.shape[1], "num_block": cache.shape[0],
        "SplitKV": split,
    }  # fmt: skip
    forms = {"i32": "i", "i64": "q"}
    launch(
        CodeObject(kernel.asm["hsaco"]), memory, 3 * next_n * split, NUM_WARPS,
        [(forms.get(kind, "Q"), values[name]) for name, (kind, _) in arguments.items()],
        lds_bytes=kernel.metadata.shared,
    )  # fmt: skip
    expected, work = reference_logits(*problem.arguments)
    scored = expected.isfinite()
    assert worst_error(out.where(scored, expected), expected, work)[0] <= 2e-6
    assert whole[:, problem.logits_width :].isnan().all()
