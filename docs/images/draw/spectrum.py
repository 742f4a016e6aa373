"""Draw the singular values of a training's momentum and updates, from `benchmarks/spectrum.py`.

python docs/images/draw/spectrum.py               # writes docs/images/spectrum.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canvas import IMAGES, INK, QUIET, RANKS, save
from matplotlib import pyplot

RESULT = IMAGES.parents[1] / "benchmarks" / "results" / "spectrum.json"
PANELS = {
    "momentum_spectral": "largest singular value of the momentum",
    "momentum_stable_rank": "stable rank of the momentum",
    "update_effective_rank": "effective rank of the update, of 64",
    "polar_error": "error of the polar factor",
}


def draw(picture: Path) -> None:
    """Write the picture."""
    (run,) = json.loads(RESULT.read_text())["runs"]
    figure, panels = pyplot.subplots(2, 2, figsize=(7, 4.6), dpi=110, layout="constrained", sharex=True)
    for axes, (figure_name, title), colour in zip(panels.flat, PANELS.items(), RANKS, strict=True):
        values = [each[figure_name] for each in run["figures"]]
        axes.plot([each["step"] for each in run["figures"]], values, color=colour, lw=2)
        axes.set_ylim(0, 1.1 * max(values))
        axes.set_title(title, fontsize=11, color=INK, loc="left")
        axes.tick_params(labelsize=10, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[1]:
        axes.set_xlabel("step", fontsize=11, color=QUIET)
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "spectrum.png")
    draw(parser.parse_args().picture)
