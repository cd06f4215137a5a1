"""Draw the plots of the documentation from the committed rows (needs the [plot] extra).

python scripts/make_plots.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
IMAGES = ROOT / "docs" / "images"
COLOURS = {16: "#8c6bb1", 32: "#1f77b4", 64: "#e6550d", 128: "#31a354"}


def main() -> None:
    import fused_vs_per_next_n
    import m_efficiency
    from measured_rows import FIRST_PASS, load_plain_triton

    # The same bytes from the same rows: no date, and ids that do not depend on the run.
    plt.rcParams.update({"svg.hashsalt": "tilewise", "font.size": 9})
    rows = load_plain_triton("h200")
    uniform = [row for row in rows if row.pass_index == FIRST_PASS and row.contexts == "uniform"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for mma_m, style in (("heads", "--"), ("kv", "-")):
        times = [m_efficiency.best(uniform, 6, heads, mma_m).latency_us * 32 / heads for heads in m_efficiency.HEADS]
        label = {"heads": "heads x tokens as rows", "kv": "cached tokens as rows"}[mma_m]
        left.plot(m_efficiency.HEADS, times, style, marker="o", color="#333333", label=label)
    left.set(xscale="log", xlabel="heads", ylabel="us per 32 heads", ylim=(0, None), title="M-efficiency, next_n 6")
    left.set_xticks(m_efficiency.HEADS, [str(heads) for heads in m_efficiency.HEADS])
    left.minorticks_off()
    left.legend(frameon=False)
    for one, fused in fused_vs_per_next_n.pairs(uniform):
        config, shape = fused.config, fused.shape
        if (config.mma_m, config.tile_kv, config.num_stages) == ("kv", 64, 5):
            right.plot(
                shape.next_n + {16: -0.24, 32: -0.08, 64: 0.08, 128: 0.24}[shape.heads],
                one.latency_us / fused.latency_us,
                ".",
                color=COLOURS[shape.heads],
                alpha=0.7,
            )
    for heads, colour in COLOURS.items():
        right.plot([], [], ".", color=colour, label=f"{heads} heads")
    right.axhline(1, color="#999999", linewidth=0.8)
    right.set(xlabel="next_n", ylabel="per-next_n time / fused time", title="Fusing wins above 1 (one dot, one shape)")
    right.legend(frameon=False, ncols=2)
    figure.suptitle("Measured on one H200, portable kernel", fontsize=9)
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / "h200.svg", metadata={"Date": None})
    print(f"wrote {IMAGES / 'h200.svg'}")


if __name__ == "__main__":
    main()
