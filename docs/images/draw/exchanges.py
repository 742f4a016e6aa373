"""Draw the loss against the bytes of Muon's exchange, where it is late or rare, from `fewer_exchanges.py`.

    PYTHONPATH=. python docs/images/draw/exchanges.py                   # writes docs/images/exchanges.png

The loss of a way does not depend on the number of ranks, its bytes do: blocks are drawn for two numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.studies import sweep
from benchmarks.studies.fewer_exchanges import best, share_of_bytes
from canvas import IMAGES, INK, QUIET, save
from matplotlib import pyplot

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "fewer_exchanges.json"
LINES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("plain", 4, {"color": "#222222", "linewidth": 1.8}),
    ("delayed", 4, {"color": "#edae49"}),
    ("corrected", 4, {"color": "#2e8b70"}),
    ("blocks of 4", 4, {"color": "#d1495b"}),
    ("blocks of 4", 64, {"color": "#d1495b", "linestyle": ":"}),
    ("blocks of 8", 8, {"color": "#30638e"}),
    ("blocks of 8", 64, {"color": "#30638e", "linestyle": ":"}),
)
AFTER = 50  # steps that are left out, since all losses fall alike there


def draw(picture: Path) -> None:
    """Write the picture."""
    runs = json.loads(RESULTS.read_text())["runs"]
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4.5 * len(models), 3.6), dpi=110, layout="constrained", squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        for way, ranks, style in LINES:
            if own := [run for run in runs if (run["model"], run["way"]) == (model, way)]:
                curve = sweep.middle(best(own, model, way))["validation"]
                share = share_of_bytes(way, ranks) / curve[-1][0]
                told = f"{way}, {ranks} ranks" if way.startswith("blocks") else way
                shown = [(step * share, loss) for step, loss in curve if step >= AFTER]
                axes.plot(*zip(*shown, strict=True), label=told, **{"linewidth": 1.3, **style})
                axes.plot(*shown[-1], "o", markersize=4, color=style["color"])
        axes.set_title(model, fontsize=9, color=INK, loc="left")
        axes.set_xlabel("bytes of the exchange over those of plain Muon's training", fontsize=8, color=QUIET)
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("validation loss, mean of the seeds", fontsize=8, color=QUIET)
    panels[0, 0].legend(frameon=False, fontsize=7, loc="upper right")
    save(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "exchanges.png")
    draw(parser.parse_args().picture)
