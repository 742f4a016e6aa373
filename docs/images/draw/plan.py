"""Draw how much each rank of a cluster orthogonalizes, as ``muonmesh plan`` says.

    python docs/images/draw/plan.py                   # writes docs/images/plan.png

The plan is the one that every rank of that cluster would make, for DeepSeek-V3 on 2,048 ranks and on half of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from canvas import IMAGES, INK, QUIET, save
from matplotlib import pyplot
from matplotlib.colors import LinearSegmentedColormap

from muonmesh.tools.cli.plan_command import PlanRequest, planned

WIDE = 64  # ranks in a row
COLOURS = ("#f3f3f0", "#fbe3d6", "#f2a99b", "#d1495b")  # of no work, less than the mean, about it, much more
CASES = (("hsdp=8x32,tp=8", "ddp=8,ep=32,fsdp=8"), ("hsdp=4x32,tp=8", "ddp=4,ep=32,fsdp=8"))


def draw(picture: Path) -> None:
    """Write the picture."""
    found = [planned(PlanRequest(model="deepseek-v3", mesh=mesh, experts=experts)) for mesh, experts in CASES]
    shades = LinearSegmentedColormap.from_list("work", COLOURS)
    heights = [one["ranks"] // WIDE for one in found]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), dpi=110, layout="constrained", sharey=True)
    for axes, one, height in zip(panels, found, heights, strict=True):
        loads = np.array(one["flops_by_rank"], dtype=float)
        shares = (loads / loads.mean()).reshape(height, WIDE)
        shown = axes.imshow(shares, cmap=shades, vmin=0.5, vmax=1.5, origin="upper")
        busiest = one["balance"]["busiest rank over mean"]
        title = f"{one['ranks']:,} ranks, --mesh {one['mesh']}\nbusiest over mean {busiest:.2f}"
        axes.set_title(title, fontsize=9, color=INK)
        axes.set_ylim(max(heights) - 0.5, -0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=panels, shrink=0.8)
    bar.set_label("FLOPs over the mean", color=QUIET, fontsize=8)
    bar.ax.tick_params(labelsize=8, colors=QUIET)
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "plan.png")
    draw(parser.parse_args().picture)
