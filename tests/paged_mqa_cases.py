"""Named cases that every kernel of paged MQA logits is tried on, interpreted, emulated or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from paged_cache import Problem, make_problem

from tilewise.kernels.paged_mqa_logits.spec import Config


@dataclass(frozen=True)
class Case:
    """A problem and the config to run it with."""

    name: str
    lens: tuple[int, ...] | tuple[tuple[int, ...], ...]
    next_n: int
    config: Config
    heads: int = 32
    head_dim: int = 128
    block_kv: int = 64
    logits_width: int | None = None
    page_stride: int | None = None
    table_tail: int = 2

    def problem(self, device: str = "cpu", seed: int = 0) -> Problem:
        return make_problem(
            self.lens,
            next_n=self.next_n,
            heads=self.heads,
            head_dim=self.head_dim,
            block_kv=self.block_kv,
            logits_width=self.logits_width,
            page_stride=self.page_stride,
            table_tail=self.table_tail,
            seed=seed,
            device=device,
        )


def _fused(fuse_n: int, dot_n: int, **more: object) -> Config:
    return Config(fuse_n=fuse_n, dot_n=dot_n, **more)  # type: ignore[arg-type]


RAGGED = (300, 77, 6, 0, 64, 1, 63, 65, 513)

CASES: tuple[Case, ...] = (
    # Every next_n, in every grouping that is offered for it, with contexts at and around page seams.
    *(
        Case(f"n{n}-fuse{fuse}-dot{dot}", RAGGED, n, _fused(fuse, dot, split_kv=2))
        for n, fuse, dot in (
            (1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 1), (3, 2, 2), (3, 3, 2), (4, 2, 2), (4, 4, 4), (4, 4, 2),
            (5, 2, 2), (5, 3, 2), (5, 5, 4), (5, 5, 2), (6, 1, 1), (6, 2, 2), (6, 3, 2), (6, 6, 4), (6, 6, 2),
            (7, 4, 4), (7, 7, 4), (7, 3, 2), (8, 8, 4), (8, 8, 8), (8, 3, 1),
        )
    ),
    # Both orientations, every head count, both head dims.
    *(
        Case(f"h{heads}-d{head_dim}-{mma_m}", (130, 0, 65), 3, _fused(fuse, 2 if fuse > 1 else 1, mma_m=mma_m),
             heads=heads, head_dim=head_dim)
        for heads, fuse in ((8, 2), (16, 3), (32, 3), (64, 2), (128, 1))
        for head_dim in (64, 128)
        for mma_m in ("kv", "heads")
    ),
    # Every page size, with tiles below, at and above it; the table ends exactly with the context.
    *(
        Case(f"page{block_kv}-tile{tile}", (300, block_kv, block_kv + 1, block_kv - 1), 4,
             _fused(2, 2, tile_kv=tile, split_kv=3), block_kv=block_kv, table_tail=0)
        for block_kv in (16, 32, 64, 128, 256)
        for tile in (16, 64, 256)
    ),
    Case("more-splits-than-tiles", (64, 1, 128), 2, _fused(2, 2, split_kv=40)),
    Case("width-below-page-end", (2300,), 2, _fused(2, 2, tile_kv=256, split_kv=3), logits_width=2300),
    Case("width-is-context", (2304,), 6, _fused(6, 2, split_kv=5), logits_width=2304),
    Case("width-below-context", (500, 100), 3, _fused(3, 2), logits_width=333),
    Case("width-far-above", (100,), 2, _fused(2, 2), logits_width=5000),
    Case("one-row-odd-width", (100,), 1, _fused(1, 1), logits_width=163),
    Case("page-stride", (300, 77), 3, _fused(3, 2), page_stride=65536),
    Case("page-stride-odd-16", (300, 77), 3, _fused(3, 2), page_stride=64 * 132 + 16),
    Case("per-token-lens", ((7, 9), (5, 5), (0, 0), (64, 63), (0, 3)), 2, _fused(2, 2)),
    Case("per-token-lens-ragged", ((7, 300, 2), (5, 5, 65), (129, 128, 0)), 3, _fused(2, 2, split_kv=2)),
    Case("shorter-than-next-n", (1, 2, 3, 4, 5), 6, _fused(6, 2)),
    Case("all-empty", (0, 0, 0), 4, _fused(4, 4)),
    Case("negative-length", (-1, 70), 2, _fused(2, 2)),
    *(Case(f"all-empty-{batch}", (0,) * batch, 1, _fused(1, 1)) for batch in (8, 31, 32, 33, 64)),
)  # fmt: skip
