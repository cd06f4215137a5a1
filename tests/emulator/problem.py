"""Runs tilewise's gfx950 kernel on the emulator, on the tensors that a launch would get."""

from __future__ import annotations

import numpy as np
import torch
from paged_cache import Problem
from torch import Tensor

from tilewise.kernels.paged_mqa_logits.gfx950 import build
from tilewise.kernels.paged_mqa_logits.gfx950 import launch as launcher
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

from .code_object import CodeObject
from .launch import launch
from .memory import Memory


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The whole storage behind a tensor as uint8, shared with it."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def map_tensor(memory: Memory, tensor: Tensor) -> int:
    """The address of a tensor's first element, its storage mapped."""
    return memory.map(as_bytes(tensor)) + tensor.storage_offset() * tensor.element_size()


def shape_of(problem: Problem, cache_layout: str = "flat") -> Shape:
    """The launch shape of a problem."""
    batch_size, next_n, heads, head_dim = problem.q.shape
    block_kv = problem.kv_cache.shape[1]
    columns = problem.block_tables.shape[1] * block_kv
    return Shape(batch_size, next_n, heads, head_dim, block_kv, columns, None, cache_layout)


def preshuffled(kv_cache: Tensor) -> Tensor:
    """The cache with each page's values in 16 x 16 byte tiles, [block_kv / 16, head_dim / 16, 16 tokens, 16 bytes].

    Same strides, page gaps included; scales stay where they are.
    """
    pages, block_kv, _, width = kv_cache.shape
    head_dim = width - 4
    copy = torch.as_strided(kv_cache.new_zeros(pages, kv_cache.stride(0)), kv_cache.shape, kv_cache.stride())
    flat_in, flat_out = kv_cache.flatten(1), copy.flatten(1)
    values = flat_in[:, : block_kv * head_dim].reshape(pages, block_kv // 16, 16, head_dim // 16, 16)
    flat_out[:, : block_kv * head_dim] = values.transpose(2, 3).reshape(pages, -1)
    flat_out[:, block_kv * head_dim :] = flat_in[:, block_kv * head_dim :]
    return copy


def emulate(problem: Problem, config: Config, out: Tensor, cache_layout: str = "flat", programs=None) -> int:
    """One launch into `out`; the number of wave-instructions. The cache is converted where preshuffled is asked for."""
    kv_cache = preshuffled(problem.kv_cache) if cache_layout == "preshuffled" else problem.kv_cache
    shape = shape_of(problem, cache_layout)
    memory = Memory()
    addresses = {
        "q_ptr": map_tensor(memory, problem.q),
        "kv_ptr": (kv := map_tensor(memory, kv_cache)),
        "scale_ptr": kv,
        "table_ptr": map_tensor(memory, problem.block_tables),
        "lens_ptr": map_tensor(memory, problem.context_lens),
        "weights_ptr": map_tensor(memory, problem.weights),
        "out_ptr": map_tensor(memory, out),
    }
    columns = min(out.shape[1], problem.block_tables.shape[1] * shape.block_kv)
    numbers = launcher.launch_numbers(
        problem.q, kv_cache, problem.weights, problem.context_lens, problem.block_tables, out, columns, shape, config
    )
    return run(shape, config, problem.context_lens.dim() == 2, memory, addresses, numbers, programs)


def run(shape, config, lens_2d, memory, addresses, numbers, programs=None) -> int:
    """Launch with every argument given by name; `programs` are those to run, all by default."""
    kernel = CodeObject(build.compile_for(shape, config, lens_2d).asm["hsaco"])
    values = {**addresses, **numbers}
    forms = {"i32": "i", "i64": "q"}
    arguments = [(forms.get(kind, "Q"), values[name]) for name, kind in build.SIGNATURE.items()]
    return launch(kernel, memory, programs or numbers["programs"], config.num_warps, arguments)
