"""How much each measured shape counts in training, by the traffic that is served."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.data.traffic import Traffic
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models.baselines import shape_distance

# Of all weight, the share that follows the traffic; the rest is even, so that what comes next is not forgotten.
TRAFFIC_SHARE = 0.5
NEIGHBOURS = 3
HALF_DISTANCE = 1.0  # a measured shape this many doublings away takes half as much
MOST = 20.0


def traffic_weights(shapes: Sequence[Shape], traffic: Sequence[Traffic]) -> npt.NDArray[np.float64]:
    """[shapes] weights of mean 1 or a little less, where MOST cuts. Each launch of the traffic is dealt to the nearest
    measured shapes, nearer ones first."""
    total = sum(one.count for one in traffic)
    dealt = np.zeros(len(shapes))
    for one in traffic:
        distance = np.array([shape_distance(shape, one.shape) for shape in shapes])
        near = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        share = 0.5 ** (distance[near] / HALF_DISTANCE)
        dealt[near] += one.count / total * share / share.sum()
    weight = (1.0 - TRAFFIC_SHARE) + TRAFFIC_SHARE * dealt * len(shapes)
    return np.asarray(np.round(np.minimum(weight, MOST), 6), dtype=np.float64)
