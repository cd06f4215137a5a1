"""What the rows of benchmarks/peers.py come to: figures, limits and tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peers_entries import Entry, entries
from peers_rows import shape_of

from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, bytes_moved, flops

LEAST_FLOOR_US = 50.0  # a launch costs microseconds by itself
# What must hold; an entry beyond one is duelled again before it counts.
LEAST_RATIO, LEAST_FLOOR_SHARE, MOST_PER_TOKEN_ODD, MOST_PER_TOKEN_8, MOST_RAGGED = 0.98, 0.70, 1.10, 1.05, 1.05
LEAST_RAGGED_RATIO = 1.12  # at next_n 4 and 6


@dataclass(frozen=True)
class Result:
    """One entry: the last time that it was measured."""

    name: str
    group: str
    shape: Shape
    attempt: int
    us: dict[str, float]  # by role; deep_gemm is the best of its modes
    config: dict[str, Config]  # by role, without deep_gemm
    tokens_per_row: int | None  # of DeepGEMM's best mode
    modes: dict[int, float]  # DeepGEMM's times by query tokens of a row
    floor_us: float

    def ratio(self, role: str, peer: str = "deep_gemm") -> float | None:
        """Time of the peer over ours: above 1, ours is faster."""
        if role not in self.us or peer not in self.us:
            return None
        return self.us[peer] / self.us[role]


def results(rows: Sequence[dict[str, Any]], attempt: int | None = None) -> dict[str, Result]:
    """Entry name to its result, by the last attempt, or by the one given."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "correct" and row["latency_us"] is not None and attempt in (None, row["attempt"]):
            by_name.setdefault(row["name"], []).append(row)
    found = {}
    for name, own in by_name.items():
        last = max(row["attempt"] for row in own)
        own = [row for row in own if row["attempt"] == last]
        us: dict[str, float] = {}
        config: dict[str, Config] = {}
        modes: dict[int, float] = {}
        for row in own:
            for role in row["roles"].split("+"):
                us[role] = min(row["latency_us"], us.get(role, math.inf))
                if row["config"]:
                    config[role] = Config.from_dict(json.loads(row["config"]))
            if row["tokens_per_row"]:
                modes[row["tokens_per_row"]] = row["latency_us"]
        shape = shape_of(own[0])
        floor = math.nan
        if own[0]["read_tbps"] and own[0]["fp8_tflops"]:
            floor = max(bytes_moved(shape) / (own[0]["read_tbps"] * 1e6), flops(shape) / (own[0]["fp8_tflops"] * 1e6))
        best = min(modes, key=lambda tokens: modes[tokens]) if modes else None
        found[name] = Result(name, own[0]["group"], shape, last, us, config, best, modes, floor)
    return found


def geomean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def per_token(found: dict[str, Result], role: str) -> dict[str, float]:
    """Time a token at next_n 3, 5 and 7 over the mean of the even neighbours', and at 8 over that at 6."""
    ratios = {}

    def each(stem: str, next_n: int) -> float | None:
        result = found.get(f"{stem}/{next_n}")
        return None if result is None or role not in result.us else result.us[role] / next_n

    for result in found.values():
        if result.group != "odd":
            continue
        next_n = result.shape.next_n
        stem = result.name.rsplit("/", 1)[0]
        against = (6,) if next_n == 8 else (next_n - 1, next_n + 1)
        times = [each(stem, n) for n in (next_n, *against)]
        known = [time for time in times if time is not None]
        if len(known) == len(times):
            ratios[result.name] = known[0] * len(against) / sum(known[1:])
    return ratios


def ragged(found: dict[str, Result], role: str, listed: Sequence[Entry]) -> dict[str, float]:
    """Time of each ragged batch over that of a uniform batch with as many pages."""
    ratios = {}
    for entry in listed:
        if entry.twin and entry.name in found and entry.twin in found:
            us, even = found[entry.name].us.get(role), found[entry.twin].us.get(role)
            if us is not None and even is not None:
                ratios[entry.name] = us / even
    return ratios


def beyond_limits(rows: Sequence[dict[str, Any]], role: str) -> set[str]:
    """Entries that a limit does not hold for, with those that they are compared with."""
    found = results(rows)
    listed = entries()
    names: set[str] = set()
    twins = {entry.name: entry.twin for entry in listed if entry.twin}
    for result in found.values():
        ratio = result.ratio(role)
        least = LEAST_RATIO
        if result.name in twins and result.shape.next_n in (4, 6):
            least = LEAST_RAGGED_RATIO
        if ratio is not None and ratio < least and result.group in ("main", "ragged"):
            names.add(result.name)
        large = result.group == "main" and result.floor_us >= LEAST_FLOOR_US
        if large and role in result.us and result.floor_us / result.us[role] < LEAST_FLOOR_SHARE:
            names.add(result.name)
    for name, ratio in per_token(found, role).items():
        stem, next_n = name.rsplit("/", 1)
        n = int(next_n)
        if ratio > (MOST_PER_TOKEN_8 if n == 8 else MOST_PER_TOKEN_ODD):
            names |= {name, *(f"{stem}/{other}" for other in ((6,) if n == 8 else (n - 1, n + 1)))}
    for name, ratio in ragged(found, role, listed).items():
        if ratio > MOST_RAGGED:
            names |= {name, twins[name]}
    return names


def figures(rows: Sequence[dict[str, Any]], role: str = "ours") -> dict[str, Any]:
    """Every figure of the rows, None where rows are missing."""
    found = results(rows)
    listed = entries()
    expected = [entry.name for entry in listed if entry.group == "main"]
    main = [found[name] for name in expected if name in found]
    pairs = [(result, ratio) for result in main if (ratio := result.ratio(role)) is not None]
    n4_n6 = [(result, ratio) for result, ratio in pairs if result.shape.next_n in (4, 6)]
    shares = {
        result.name: result.floor_us / result.us[role]
        for result in main
        if role in result.us and result.floor_us >= LEAST_FLOOR_US
    }
    odd = per_token(found, role)
    uneven = ragged(found, role, listed)
    uneven_peer = {
        name: ratio
        for name in uneven
        if found[name].shape.next_n in (4, 6) and (ratio := found[name].ratio(role)) is not None
    }
    first = results(rows, attempt=1)
    again = sorted(name for name, result in found.items() if result.attempt > 1)
    lowest = min(pairs, key=lambda pair: pair[1], default=None)
    portable = [ratio for result in main if (ratio := result.ratio(role, "portable")) is not None]
    summed: dict[str, Any] = {
        "role": role,
        "shapes": len(pairs),
        "shapes_expected": len(expected),
        "shapes_missing": [name for name in expected if name not in {result.name for result, _ in pairs}],
        "geomean_vs_deepgemm": geomean(ratio for _, ratio in pairs),
        "min_vs_deepgemm": None if lowest is None else lowest[1],
        "min_vs_deepgemm_shape": None if lowest is None else lowest[0].name,
        "geomean_vs_deepgemm_n4_n6": geomean(ratio for _, ratio in n4_n6),
        "geomean_vs_deepgemm_n4_n6_heads_64": geomean(ratio for r, ratio in n4_n6 if r.shape.heads == 64),
        "geomean_vs_deepgemm_n4_n6_heads_32": geomean(ratio for r, ratio in n4_n6 if r.shape.heads == 32),
        "geomean_vs_deepgemm_by_next_n": {
            n: geomean(ratio for r, ratio in pairs if r.shape.next_n == n) for n in (1, 2, 4, 6)
        },
        "geomean_vs_portable": geomean(portable),
        "min_vs_portable": min(portable, default=None),
        "floor_shapes": len(shares),
        "floor_share_geomean": geomean(shares.values()),
        "floor_share_min": min(shares.values(), default=None),
        "floor_share_min_shape": min(shares, key=lambda name: shares[name], default=None),
        "per_token_odd_max": max((r for n, r in odd.items() if not n.endswith("/8")), default=None),
        "per_token_8_over_6_max": max((r for n, r in odd.items() if n.endswith("/8")), default=None),
        "per_token": odd,
        "ragged_over_uniform_max": max(uneven.values(), default=None),
        "ragged_over_uniform": uneven,
        "ragged_vs_deepgemm_n4_n6_min": min(uneven_peer.values(), default=None),
        "ragged_vs_deepgemm_n4_n6_geomean": geomean(uneven_peer.values()),
        "ragged_vs_deepgemm_n4_n6": uneven_peer,
        "beyond_limits": sorted(beyond_limits(rows, role)),
        "duelled_again": again,
        "duelled_again_first": {name: first[name].ratio(role) for name in again if name in first},
        "failures": sum(row["status"] != "correct" for row in rows),
    }
    timed = [row for row in rows if row["status"] == "correct"]
    if timed:
        last = timed[-1]
        names = ("device_name", "driver", "torch_version", "triton_version", "deep_gemm_version", "git_commit")
        summed |= {name: last.get(name) for name in names}
        for name in ("read_tbps", "fp8_tflops"):
            known = [row[name] for row in timed if row[name]]
            summed[name] = statistics.median(known) if known else None
            summed[f"{name}_range"] = [min(known), max(known)] if known else None
    rounded: dict[str, Any] = _rounded(summed)
    return rounded


def peer_times(rows: Sequence[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """DeepGEMM's time in its native mode beside ours, in the columns of tilewise.dispatch.integrations."""
    return [
        {
            "heads": result.shape.heads,
            "next_n": result.shape.next_n,
            "batch_size": result.shape.batch_size,
            "max_context_len": result.shape.max_context_len,
            "mean_context_len": result.shape.mean_context_len,
            "deep_gemm_us": round(result.modes[result.shape.next_n], 3),
            "tilewise_us": round(result.us[role], 3),
        }
        for result in results(rows).values()
        if role in result.us and result.shape.next_n in result.modes
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {str(name): _rounded(inner) for name, inner in value.items()}
    return value


def table(rows: Sequence[dict[str, Any]], role: str = "ours") -> str:
    """Markdown: every entry, in order."""
    found = results(rows)
    lines = [
        "| heads/context/batch/next_n | ours us | select us | DeepGEMM us (tokens a row) | plain Triton us "
        "| DeepGEMM / ours | of floor | config |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def us(result: Result, name: str) -> str:
        return f"{result.us[name]:.1f}" if name in result.us else "-"

    for entry in entries():
        result = found.get(entry.name)
        if result is None:
            continue
        ratio = result.ratio(role)
        config = str(result.config[role]) if role in result.config else "-"
        share = f"{result.floor_us / result.us[role]:.0%}" if role in result.us else "-"
        lines.append(
            f"| {entry.name} | {us(result, 'ours')} | {us(result, 'select')} | {us(result, 'deep_gemm')} "
            f"({result.tokens_per_row or '-'}) | {us(result, 'portable')} | {'-' if ratio is None else f'{ratio:.3f}'} "
            f"| {share} | {config} |"
        )
    return "\n".join(lines)


def overview(rows: Sequence[dict[str, Any]], role: str = "ours") -> str:
    """Markdown: the figures by heads and next_n."""
    found = results(rows)
    main = [found[e.name] for e in entries() if e.group == "main" and e.name in found]
    lines = [
        "| heads | next_n | shapes | DeepGEMM / ours, geomean | lowest | highest | of floor, from 50 us on |",
        "|---|---|---|---|---|---|---|",
    ]

    def line(heads: object, next_n: object, group: Sequence[Result]) -> None:
        ratios = [ratio for result in group if (ratio := result.ratio(role)) is not None]
        if not ratios:
            return
        share = geomean(r.floor_us / r.us[role] for r in group if role in r.us and r.floor_us >= LEAST_FLOOR_US)
        lines.append(
            f"| {heads} | {next_n} | {len(ratios)} | {geomean(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} "
            f"| {'-' if share is None else f'{share:.0%}'} |"
        )

    for heads in (64, 32):
        for next_n in (6, 4, 2, 1):
            line(heads, next_n, [r for r in main if (r.shape.heads, r.shape.next_n) == (heads, next_n)])
    for heads in (64, 32):
        line(heads, "4 and 6", [r for r in main if r.shape.heads == heads and r.shape.next_n in (4, 6)])
    line("all", "4 and 6", [r for r in main if r.shape.next_n in (4, 6)])
    line("all", "all", main)
    return "\n".join(lines)
