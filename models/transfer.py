"""Carrying one shape's best config over to another shape, as the nearest-shape rung and baseline do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, Config, Shape
from tilewise.models.structure import config_columns

_SCALED = ("fuse_n", "dot_n", "split_kv")


def transfer(config: Config, source: Shape, target: Shape, candidates: Sequence[Config]) -> int:
    """Index of the candidate for `target` that is most like `config` was for `source`.

    Alike means: the same fields where they do not depend on the shape, all tokens fused where they all were, and as
    many programs. Equally alike candidates keep their order.
    """
    columns = config_columns(candidates)
    own = config_columns([config])
    cost = np.zeros(len(candidates))
    for name in CONFIG_FIELDS:
        if name not in _SCALED:
            cost += 4.0 * (columns[name] != own[name])
    fuse_n = target.next_n if 1 < config.fuse_n == source.next_n else min(config.fuse_n, target.next_n)
    cost += 2.0 * np.abs(np.log2(columns["fuse_n"] / fuse_n))
    cost += np.abs(np.log2(columns["dot_n"] / config.dot_n))
    programs = max(1, source.batch_size) * config.groups(source.next_n) * config.split_kv
    offered = max(1, target.batch_size) * np.ceil(target.next_n / columns["fuse_n"]) * columns["split_kv"]
    cost += 0.5 * np.abs(np.log2(offered / programs))
    return int(np.argmin(np.round(cost, 6)))
