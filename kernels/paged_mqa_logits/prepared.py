"""A launch bound before its tensors are known, for kernels that have nothing better to bind than their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.kernels.paged_mqa_logits.traits import usual_traits


def bind(
    launch: Callable[..., None], shape: Shape, config: Config, per_token_lens: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]:
    """What a launch module's `prepare` returns: its `launch` of one config, for any batch up to the shape's."""
    traits = usual_traits(shape, per_token_lens=per_token_lens)

    def prepared(
        q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor, out: Tensor,
        max_columns: int,
    ) -> None:  # fmt: skip
        own = shape if q.shape[0] == shape.batch_size else dataclasses.replace(shape, batch_size=q.shape[0])
        launch(q, kv_cache, weights, context_lens, block_tables, out, max_columns, own, config, traits)

    return prepared
