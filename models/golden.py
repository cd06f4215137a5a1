"""Golden picks: what a bundle answered when it was made, kept inside it and checked after loading."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.errors import InvalidBundleError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.bundle import Bundle
from tilewise.models.choice import first_best

COUNT = 24


def golden_picks(bundle: Bundle) -> list[dict[str, Any]]:
    """The model's pick and its predicted time for some measured shapes, evenly dealt over the table."""
    indices = np.unique(np.linspace(0, len(bundle.exact) - 1, COUNT).round().astype(int)).tolist()
    picks = []
    for index in indices:
        config, predicted = _pick(bundle, index)
        shape = bundle.exact.shape(index)
        picks.append({"shape": shape.to_dict(), "config": config.to_dict(), "predicted_us": predicted})
    return picks


def verify(bundle: Bundle) -> None:
    """Raise InvalidBundleError unless every golden shape gets the golden pick at the golden time."""
    for golden in bundle.manifest["golden"]:
        try:
            shape, wanted = Shape(**golden["shape"]), Config.from_dict(golden["config"])
            index, time = bundle.exact.find(shape), float(golden["predicted_us"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidBundleError(f"golden pick is malformed: {error}") from error
        if index is None:
            raise InvalidBundleError(f"golden shape {shape} is not among the measured")
        config, predicted = _pick(bundle, index)
        if config != wanted or not np.isclose(predicted, time, rtol=1e-6, atol=0.0):
            raise InvalidBundleError(
                f"golden shape {shape} must get {wanted} in {time:.4g} us, got {config} in {predicted:.4g} us"
            )


def golden_configs(bundle: Bundle) -> dict[Shape, Config]:
    """The golden shapes of a verified bundle and their picks."""
    return {Shape(**one["shape"]): Config.from_dict(one["config"]) for one in bundle.manifest["golden"]}


def _pick(bundle: Bundle, index: int) -> tuple[Config, float]:
    configs = list(bundle.exact.times(index))
    times = bundle.predict_us(bundle.exact.shape(index), configs)
    best = first_best(configs, times)
    if best is None:
        raise InvalidBundleError("the model predicts no time for a measured shape")
    return configs[best], float(times[best])
