"""What a GPU without a profile gets: the H200's profile is hidden, and found again with a few timings.

    python benchmarks/transfer_gpu.py [--arch h200] [--repeats 5] [--out benchmarks/results/transfer_gpu_h200.json]

Judged on the whole judging set by its second pass: the default; the analytic estimate alone; the estimate corrected by
so many timings of the first pass, at shapes far from each other that are not judged; and for comparison a model of all
other timings. The default is left for a predicted gain beyond 5 % by the estimates, beyond noise by the model. On a GPU
that nobody has profiled there is no tuned default: that of the H200 was found on it, and is shown for orientation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.store import load_profile
from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import default_config
from tilewise.models.adapt import Estimate, adapt, leave_one_gpu_out, picks_by
from tilewise.models.bundle import unsquash
from tilewise.models.features import features_of
from tilewise.models.fit import examples, fit_rank
from tilewise.models.judging import figures, geomean, judging_set, noise_margin
from tilewise.models.measurements import measurements
from tilewise.models.sampling import next_launches

OP = "paged_mqa_logits"
COUNTS = (10, 20, 30, 60, 120)
PER_SHAPE = 3
MARGIN = 0.05
NAMES = ("geomean_regret", "p90_regret", "worst_regret", "geomean_against_default", "worst_against_default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    arch = get_arch(args.arch)
    columns: Any = load_profile(OP, arch.name).columns
    measured = measurements(columns, op=OP, arch=arch.name)
    judged = judging_set(measured, arch)
    margin = noise_margin(measured)
    hidden = {one.shape_id for one in judged}
    timed = {
        (measured.shapes[s], measured.configs[c]): us
        for s, c, us in zip(
            measured.shape_id.tolist(), measured.config_id.tolist(), measured.first_us.tolist(), strict=True
        )
        if s not in hidden and us == us
    }
    offered: dict[Any, list[Any]] = {}
    for shape, config in timed:
        offered.setdefault(shape, []).append(config)
    pool = [shape for shape in offered if default_config(shape, arch) in offered[shape]]

    def of(times: Any, least: float = MARGIN) -> dict[str, Any]:
        found = figures(judged, picks_by(judged, times, least))
        error = [np.nanmedian(np.abs(times[o.shape_id] / o.second_us - 1.0)) for o in judged]
        return {**{name: found[name] for name in NAMES}, "time_median_error": float(np.median(error))}

    prior = Estimate.prior(arch)
    estimates = {one.shape_id: prior.predict_us(one.shape, one.configs) for one in judged}
    result: dict[str, Any] = {
        "what": "picks on the judging set without and with a few timings of the GPU; means over the repeats",
        "op": OP,
        "arch": arch.name,
        "judged_shapes": len(judged),
        "pool_shapes": len(pool),
        "default": {name: figures(judged, {o.shape_id: o.default for o in judged})[name] for name in NAMES},
        "estimate": of(estimates),
    }
    for count in COUNTS:
        runs = []
        for seed in range(args.repeats):
            spread = next_launches(None, pool, arch, 10**6, seed=seed, offer=lambda shape: offered[shape])
            shapes = list(dict.fromkeys(one.shape for one in spread))[: -(-count // PER_SHAPE)]
            chosen = []
            for shape in shapes:
                best = offered[shape][int(np.argmin(prior.predict_us(shape, offered[shape])))]
                drawn = [one.config for one in spread if one.shape == shape]
                chosen += [(shape, c) for c in list(dict.fromkeys([drawn[0], best, *drawn]))[:PER_SHAPE]]
            timings = [(shape, config, timed[shape, config]) for shape, config in chosen[:count]]
            model = adapt(timings, arch)
            runs.append(of({one.shape_id: model.predict_us(one.shape, one.configs) for one in judged}))
        result[f"estimate_and_{count}_timings"] = {
            name: (max if name.startswith("worst") else lambda values: geomean(np.array(values)))(
                [run[name] for run in runs]
            )
            for name in (*NAMES, "time_median_error")
        }
    rank = fit_rank(
        data := examples(measured, arch), np.flatnonzero(~np.isin(measured.shape_id[data.cell], list(hidden))), 0
    )
    full = {o.shape_id: np.exp(unsquash(rank.predict(features_of(o.shape, o.configs, arch)))) for o in judged}
    result["all_other_timings"] = {name: value for name, value in of(full, margin).items() if name in NAMES}
    try:
        result["leave_one_gpu_out"] = leave_one_gpu_out({arch: measured})
    except InvalidProfileError as error:
        result["leave_one_gpu_out"] = {"none": str(error)}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
