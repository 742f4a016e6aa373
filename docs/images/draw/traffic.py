"""Draw what gradients and a step send under Muon of several packages, from `benchmarks/step_traffic.py`.

python docs/images/draw/traffic.py                   # writes docs/images/traffic.png

Lengths are relative to AdamW's, since clusters differ by far.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canvas import IMAGES, INK, QUIET, save
from matplotlib import pyplot

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "step_traffic.json"
OURS, OTHERS = "#d1495b", "#b8b8b0"


def draw(picture: Path) -> None:
    """Write the picture."""
    cases = {name: rows for name, rows in json.loads(RESULTS.read_text())["tables"].items() if rows}
    heights = [len(rows) for rows in cases.values()]
    figure, panels = pyplot.subplots(
        len(cases), 1, figsize=(8, 0.28 * sum(heights) + 0.5 * len(cases)), dpi=110, layout="constrained",
        sharex=True, squeeze=False, height_ratios=heights,
    )  # fmt: skip
    for axes, (name, rows) in zip(panels[:, 0], cases.items(), strict=True):
        base = rows["AdamW"]["bytes"]
        methods = list(rows)[::-1]
        lengths = [rows[method]["bytes"] / base for method in methods]
        axes.barh(methods, lengths, color=[OURS if "muonmesh" in method else OTHERS for method in methods])
        for place, (method, length) in enumerate(zip(methods, lengths, strict=True)):
            told = f" {rows[method]['bytes'] / 1e9:.1f} GB, {rows[method]['messages']:,} messages"
            axes.text(length, place, told, va="center", fontsize=7, color=QUIET)
        axes.set_title(name, fontsize=9, color=INK, loc="left")
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("bytes sent in a step over those of AdamW", fontsize=8, color=QUIET)
    panels[-1, 0].margins(x=0.25)
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "traffic.png")
    draw(parser.parse_args().picture)
