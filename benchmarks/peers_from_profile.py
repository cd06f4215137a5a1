"""Configs for benchmarks/peers.py from a profile, which is a run of its own: the fastest of each launch that it holds.

    python benchmarks/peers_from_profile.py PROFILE --out CHOICES.json

A config's time is the geometric mean over passes 0 and 1, as far as there are both. Launches that the profile lacks are
left out: `peers.py --choose --choices CHOICES.json` then fixes those. Where no portable config was timed it is the
default, so that the duel has one. Needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "tests"))
import checkout  # type: ignore[import-not-found]  # noqa: E402, F401
import peers_rows  # noqa: E402
from peers_entries import entries  # noqa: E402

from tilewise.data.table import read_table  # noqa: E402
from tilewise.kernels.arch import get_arch  # noqa: E402
from tilewise.kernels.paged_mqa_logits import portable_space  # noqa: E402
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SHAPE_FIELDS, Config, Shape  # noqa: E402

PASSES = (0, 1)
ABOUT = ("device_name", "driver", "torch_version", "triton_version", "git_commit")


def fixed(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Entry name to its choice, of the rows of a profile."""
    times: dict[tuple[Shape, str], dict[Config, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["status"] == "correct" and row["pass_index"] in PASSES:
            shape = Shape(**{name: row[name] for name in SHAPE_FIELDS})
            config = Config.from_dict({name: row[name] for name in CONFIG_FIELDS})
            times[shape, row["contexts"]][config].append(row["latency_us"])
    found: dict[str, dict[str, Any]] = {}
    for entry in entries():
        own = times.get((entry.shape, entry.target.contexts))
        if own is None:
            continue
        order = sorted(own, key=lambda config: statistics.geometric_mean(own[config]))
        choice: dict[str, Any] = {"contexts": entry.target.contexts, "ours": order[0].to_dict()}
        plain = portable_space.default_config(entry.shape, get_arch("h200"))
        for kernel, otherwise in (("sm90", None), ("portable", plain)):
            best = next((config for config in order if config.kernel == kernel), otherwise)
            choice[kernel] = None if best is None else best.to_dict()
        found[entry.name] = choice
    return found


def main() -> None:
    """Write the choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    columns = read_table(args.profile).to_pydict()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    choices = fixed(rows)
    about: dict[str, Any] = {name: sorted({str(row[name]) for row in rows}) for name in ABOUT}
    about["kernel_hash"] = {kernel: sorted({row["kernel_hash"] for row in rows if row["kernel"] == kernel})
                            for kernel in ("sm90", "portable")}  # fmt: skip
    about["source"] = f"the fastest in passes 0 and 1 of {args.profile.name}"
    about["measured_at"] = max(row["measured_at"] for row in rows)
    peers_rows.write_choices(args.out, about, choices)
    print(f"{len(choices)} of {len(entries())} launches")


if __name__ == "__main__":
    main()
