"""Memory of a selector that is asked for many distinct shapes: resident memory as it goes.

    python benchmarks/selection_memory.py [--shapes 1000000] [--arch h200] [--bundle FOLDER] [--mode on] [--json]

Every shape is asked for once as a Shape and once by its sizes, so that both memories of decisions fill. With `--mode
off` nothing is weighed, which takes a twentieth of the time and fills the memories all the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits.spec import Shape


def resident_mb() -> float:
    """Resident memory of this process, megabytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=1_000_000, help="distinct shapes (default: 1000000)")
    parser.add_argument("--arch", default="h200", help="GPU (default: h200)")
    parser.add_argument("--bundle", help="folder of a bundle (default: the one in force)")
    parser.add_argument("--mode", default="on", help="off, shadow, on or strict (default: on)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    chooser = Selector(args.arch, bundle_dir=args.bundle, mode=args.mode)
    chooser.select(Shape(1, 1, 32))
    start, rows = time.perf_counter(), [(0, resident_mb())]
    for at in range(args.shapes):
        batch_size, next_n, length = 1 + at % 250, 1 + at % 6, 512 + at
        chooser.select(Shape(batch_size, next_n, 32, max_context_len=length))
        chooser.select(batch_size=batch_size, next_n=next_n, heads=32, max_context_len=length)
        if (at + 1) % max(1, args.shapes // 10) == 0:
            rows.append((at + 1, resident_mb()))
    result = {
        "arch": args.arch,
        "model_id": chooser.model_id,
        "mode": args.mode,
        "shapes": args.shapes,
        "seconds": round(time.perf_counter() - start, 1),
        "resident_mb": [{"shapes": count, "mb": round(mb, 1)} for count, mb in rows],
        "counted_apart": len(chooser.shapes_seen()) - 1,
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        if name != "resident_mb":
            print(f"{name:16}{value}")
    for count, mb in rows:
        print(f"{count:>10} shapes{mb:>10.1f} MB")


if __name__ == "__main__":
    main()
