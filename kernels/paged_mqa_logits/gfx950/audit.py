"""`tilewise audit --arch gfx950`: compile the offered forms of the kernel and tabulate what each costs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilewise.errors import UnsupportedError
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.gfx950 import assembly, build, space
from tilewise.kernels.paged_mqa_logits.gfx950.forms import MAX_QUERY_BYTES, PAGINGS, forms
from tilewise.kernels.paged_mqa_logits.gfx950.resources import (
    ROW_FIELDS,
    Key,
    Row,
    encode,
    key_of,
    per_token_128_keys,
)
from tilewise.kernels.paged_mqa_logits.spec import HEAD_DIMS, MAX_NEXT_N, Config, Shape
from tilewise.kernels.registry import kernel_source_hash

VGPRS_PER_SIMD = 512  # vector and accumulator registers of a lane, shared by the waves of a SIMD, in units of 8
MAX_WAVES_PER_SIMD = 8


def inspect(shape: Shape, config: Config, lens_2d: bool = True) -> Row:
    """Compile one launch's binary with the installed Triton and say what it costs, or why it may not launch."""
    try:
        compiled = build.compile_for(shape, config, lens_2d)
    except Exception as error:  # whatever Triton raises: the reason is the result
        reason = " ".join(str(error).split())[-160:]
        return Row(f"fails to compile: {type(error).__name__}: {reason}", *[0] * (len(ROW_FIELDS) - 1))
    text = compiled.asm["amdgcn"]
    code = assembly.parse(text)
    first, last = assembly.main_loop(code)
    counts = assembly.count(code[first : last + 1])
    spills = _number(text, r"\.vgpr_spill_count:\s+(\d+)")
    scratch = _number(text, r"\.private_segment_fixed_size:\s+(\d+)")
    allocated = -(-_number(text, r"\.amdhsa_next_free_vgpr\s+(\d+)") // 8) * 8
    problem = ""
    if spills or scratch:
        problem = f"spills {spills} vector registers to {scratch} bytes of scratch"
    elif waits := assembly.short_waits(code):
        problem = f"has a wait that is too short: {waits[0]}"
    return Row(
        problem=problem,
        vgpr=_number(text, r"; NumVgprs: (\d+)"),
        agpr=_number(text, r"; NumAgprs: (\d+)"),
        sgpr=_number(text, r"\.sgpr_count:\s+(\d+)"),
        lds_bytes=int(compiled.metadata.shared),
        scratch_bytes=scratch,
        spills=spills,
        sgpr_spills=_number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        waves_per_simd=min(MAX_WAVES_PER_SIMD, VGPRS_PER_SIMD // allocated),
        mfma=counts.mfma,
        mfma_cycles=counts.mfma_cycles,
        valu=counts.valu,
        memory=counts.memory,
        instructions=counts.instructions,
    )


def keys(heads: Iterable[int] = (16, 32, 64, 128), head_dims: Iterable[int] = (128, 64)) -> Iterator[Key]:
    """Every binary that the space offers."""
    for head_dim in head_dims:
        for number in heads:
            for fuse_n in range(1, MAX_NEXT_N + 1):
                if fuse_n * number * head_dim > MAX_QUERY_BYTES:
                    break
                for kind in PAGINGS:
                    for form in forms(number, head_dim, kind):
                        if space.holds_whole_tiles(number, fuse_n, form.mfma):
                            yield Key(number, head_dim, kind, fuse_n, form)


def launch_of(key: Key) -> tuple[Shape, Config]:
    """A launch whose binary stands for the key."""
    block_kv = {"whole": 256, "gather": 16, "single": 1}[key.paging]
    layout: Any = "flat" if key.paging == "single" else "preshuffled"
    shape = Shape(16, key.fuse_n, key.heads, key.head_dim, block_kv, 131072, None, layout)
    return shape, space.config_of(key.fuse_n, key.form, 1, "xcd")


def summary(shape: Shape, config: Config, row: Row) -> dict[str, Any]:
    """What one audited launch comes to, with the figures that forms are compared by."""
    form = key_of(shape, config).form
    return {
        "config": str(config),
        "kind": "compiled (static)",
        "triton": build.triton_version(),
        **{name: getattr(row, name) for name in ROW_FIELDS},
        "valu_per_token_128_keys": round(per_token_128_keys(row.valu, config.fuse_n, form), 1),
        "mfma_cycles_per_token_128_keys": round(per_token_128_keys(row.mfma_cycles, config.fuse_n, form), 1),
        "memory_per_token_128_keys": round(per_token_128_keys(row.memory, config.fuse_n, form), 2),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--arch", default="gfx950", help="gfx950, mi355x or mi350x")
    parser.add_argument("--heads", type=int, choices=(16, 32, 64, 128), help="audit one head count (default: all)")
    parser.add_argument(
        "--next-n",
        type=int,
        choices=range(1, MAX_NEXT_N + 1),
        help="audit the default config of this next_n (default: the whole space)",
    )
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="(default: both, or 128 with --next-n)")
    parser.add_argument("--block-kv", type=int, default=128, help="tokens per page, with --next-n")
    parser.add_argument("--batch-size", type=int, default=16, help="requests, with --next-n")
    parser.add_argument("--context-len", type=int, default=131072, help="tokens of context, with --next-n")
    parser.add_argument("--layout", choices=("flat", "preshuffled"), default="preshuffled", help="with --next-n")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="folder for the audit file of the whole space")


def run(args: argparse.Namespace) -> int:
    """The command. 0, or 1 where a default config may not launch."""
    if get_arch(args.arch).isa != "gfx950":
        raise UnsupportedError(f"audit is for gfx950, got --arch {args.arch}")
    if build.triton_version() is None:
        raise UnsupportedError("audit compiles kernels: it needs triton (the PyPI wheel has the AMD compiler)")
    return _audit_one(args) if args.next_n is not None else _audit_space(args)


def _audit_one(args: argparse.Namespace) -> int:
    shape = Shape(
        args.batch_size, args.next_n, args.heads or 32, args.head_dim or 128, args.block_kv, args.context_len, None,
        args.layout,
    )  # fmt: skip
    config = space.preferred(shape, get_arch(args.arch))
    result = summary(shape, config, inspect(shape, config, lens_2d=False))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name:32s} {value}")
    return 1 if result["problem"] else 0


def _audit_space(args: argparse.Namespace) -> int:
    wanted = list(
        keys((args.heads,) if args.heads else (16, 32, 64, 128), (args.head_dim,) if args.head_dim else (128, 64))
    )
    rows = []
    for i, key in enumerate(wanted):
        row = inspect(*launch_of(key))
        rows.append((key, row))
        if sys.stderr.isatty():
            print(f"\r{i + 1} of {len(wanted)}", end="", file=sys.stderr)
        if not args.json:
            print(_line(key, row), flush=True)
    encoded = [encode(key, row) for key, row in rows]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"gfx950_triton-{build.triton_version()}.json"
        head = {"triton": build.triton_version(), "kernel_hash": kernel_source_hash("gfx950"), "columns": COLUMNS}
        lines = ",\n  ".join(json.dumps(line) for line in encoded)
        path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n  {lines}\n]}}\n', encoding="utf-8")
    if args.json:
        print(json.dumps({"triton": build.triton_version(), "columns": COLUMNS, "rows": encoded}))
    return 0


COLUMNS = (
    "heads", "head_dim", "paging", "fuse_n", "tile_kv", "num_warps", "waves_per_eu", "mfma_shape", "epilogue",
    *ROW_FIELDS,
)  # fmt: skip


def _line(key: Key, row: Row) -> str:
    form = key.form
    return (
        f"heads {key.heads:3d} d {key.head_dim:3d} {key.paging:6s} fuse {key.fuse_n} tile {form.tile_kv:3d} warps "
        f"{form.num_warps} waves {form.waves_per_eu} {form.mfma:9s} {form.epilogue:6s}: vgpr {row.vgpr:3d} spills "
        f"{row.spills} waves/simd {row.waves_per_simd} valu {per_token_128_keys(row.valu, key.fuse_n, form):.1f} mfma "
        f"cycles {per_token_128_keys(row.mfma_cycles, key.fuse_n, form):.0f} {row.problem}"
    )


def _number(text: str, pattern: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0
