"""Draw what one optimizer step takes beside its peers, from a result of ``benchmarks/step.py``.

    python docs/images/draw/step.py                   # writes docs/images/step.png

The ratios are those of benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canvas import IMAGES, INK, QUIET, RANKS, save
from matplotlib import pyplot

RESULT = IMAGES.parents[1] / "benchmarks" / "results" / "step.json"
LAYOUTS = {"one": "one process", "ddp2": "DDP, 2 ranks", "fsdp2": "FSDP2, 2 ranks"}
COLOURS = {"muonmesh": RANKS[0], "dion Muon": RANKS[2], "torch.optim.Muon": RANKS[1]}
NAMES = {"muonmesh": "muonmesh", "dion Muon": "Muon of microsoft/dion", "torch.optim.Muon": "torch.optim.Muon"}


def draw(picture: Path) -> None:
    """Write the picture."""
    tables = json.loads(RESULT.read_text())["tables"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=110, layout="constrained")
    for place, layout in enumerate(LAYOUTS):
        for row, (contender, colour) in enumerate(COLOURS.items()):
            ratio = tables[layout]["contenders"][contender]["ratio"]
            height = place * 4 + row
            axes.barh(height, ratio, height=0.85, color=colour, label=NAMES[contender] if place == 0 else None)
            axes.text(ratio + 0.05, height, f"{ratio:.1f}×", va="center", fontsize=12, color=INK)
    axes.set_yticks([place * 4 + 1 for place in range(len(LAYOUTS))], [*LAYOUTS.values()], fontsize=12, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("time of one optimizer step, muonmesh = 1 (less is better)", fontsize=11, color=QUIET)
    axes.tick_params(axis="x", labelsize=10, colors=QUIET)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize=11, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, columnspacing=1)
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "step.png")
    draw(parser.parse_args().picture)
