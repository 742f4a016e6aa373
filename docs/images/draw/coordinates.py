"""Draw how much outputs change in three steps at several widths, from `benchmarks/coordinates.py`.

python docs/images/draw/coordinates.py               # writes docs/images/coordinates.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canvas import IMAGES, INK, QUIET, RANKS, save
from matplotlib import pyplot

RESULT = IMAGES.parents[1] / "benchmarks" / "results" / "coordinates.json"
OUTPUTS = {"hidden 2": "features after the last hidden matrix", "logits": "logits"}
NAMES = {"match_rms_adamw": "Muon, match_rms_adamw", "unit_rms_norm": "Muon, unit_rms_norm", "AdamW": "AdamW"}


def draw(picture: Path) -> None:
    """Write the picture."""
    runs = json.loads(RESULT.read_text())["runs"]
    figure, panels = pyplot.subplots(1, len(OUTPUTS), figsize=(8, 3.6), dpi=110, layout="constrained", sharey=True)
    for axes, (output, title) in zip(panels, OUTPUTS.items(), strict=True):
        for (case, name), colour in zip(NAMES.items(), RANKS, strict=False):
            for carried, style in ((False, ":"), (True, "-")):
                some = [run for run in runs if (run["case"], run["carried"]) == (case, carried)]
                changes = [run["change"][output] / some[0]["change"][output] for run in some]
                label = f"{name}, {'carried over' if carried else 'as it is'}"
                axes.plot([run["width"] for run in some], changes, style, color=colour, marker="o", ms=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([run["width"] for run in some], [str(run["width"]) for run in some])
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("width", fontsize=9, color=QUIET)
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("change over that at width 256\n(flat is better)", fontsize=9, color=QUIET)
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=3
    )
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "coordinates.png")
    draw(parser.parse_args().picture)
