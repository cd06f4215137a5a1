"""Write the measured tables of the documentation from the committed rows, or check that they are current.

    python scripts/docs_tables.py            rewrite them
    python scripts/docs_tables.py --check    fail when a page differs from what the rows give

A page marks a table with `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
PAGES = ("docs/measured-h200.md", "README.md")
MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> dict[str, Callable[[], str]]:
    """Table name to what makes it."""
    import floor_share
    import fused_vs_per_next_n
    import m_efficiency
    import peers_rows
    import peers_summary
    import portable_vs_prototype
    import prototypes
    from measured_rows import FIRST_PASS, load, load_plain_triton

    rows, plain = load("h200"), load_plain_triton("h200")
    uniform = [row for row in plain if row.pass_index == FIRST_PASS and row.contexts == "uniform"]

    def prototype() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            portable_vs_prototype.summarise(portable_vs_prototype.RESULTS)
        return text.getvalue().strip()

    def evaluation() -> str:
        manifest = ROOT / "models" / "fitted" / "paged_mqa_logits" / "h200" / "manifest.json"
        metrics = json.loads(manifest.read_text(encoding="utf-8"))["metrics"]
        count = f"{metrics['judged_shapes']} judged shapes, {metrics['duelled']:.0f} by a duel"
        lines = [
            f"| {count} | geomean | P90 | worst | within 2 % | within 5 % |",
            "|---|---|---|---|---|---|",
        ]
        for name, found in [("**tilewise**", metrics), *metrics["baselines"].items()]:
            regrets = " | ".join(f"{found[f'{key}_regret']:.3f}" for key in ("geomean", "p90", "worst"))
            lines.append(f"| {name} | {regrets} | {found['within_2pct']:.1%} | {found['within_5pct']:.1%} |")
        return "\n".join(lines)

    return {
        "evaluation": evaluation,
        "m-efficiency": lambda: m_efficiency.table(plain, "h200"),
        "fused-summary": lambda: fused_vs_per_next_n.summary(uniform, "h200"),
        "fused-detail": lambda: fused_vs_per_next_n.detail(uniform),
        "floor-share": lambda: floor_share.table(rows, "h200", "the best kernel"),
        "floor-share-plain": lambda: floor_share.table(plain, "h200", "portable kernel"),
        "portable-vs-prototype": prototype,
        "prototypes": lambda: prototypes.table(prototypes.read(prototypes.RESULTS)),
        "peers": lambda: peers_summary.overview(peers_rows.read(peers_rows.ROWS), "ours"),
        "peers-select": lambda: peers_summary.overview(peers_rows.read(peers_rows.ROWS), "select"),
        "peers-every-launch": lambda: peers_summary.table(peers_rows.read(peers_rows.ROWS), "ours"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    makers = tables()
    stale = []
    for name in PAGES:
        page = ROOT / name
        old = page.read_text(encoding="utf-8")
        new = MARK.sub(lambda match: f"{match[1]}{makers[match[2]]()}\n{match[3]}", old)
        if new != old:
            stale.append(name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.check and stale:
        print(f"tables are not what the rows give in {', '.join(stale)}: run python scripts/docs_tables.py")
    return int(bool(args.check and stale))


if __name__ == "__main__":
    sys.exit(main())
