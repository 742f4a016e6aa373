"""Draw what two gloo ranks did in one step, from the spans that torch's profiler kept of it.

`python -m benchmarks.studies.overlap --only trace --trace docs/images/draw/timeline.json` measures, and this draws
docs/images/timeline.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canvas import IMAGES, INK, save
from matplotlib import pyplot
from matplotlib.patches import Rectangle

KEPT = Path(__file__).with_suffix(".json")

COLOURS = {
    "2 momentum": "#2e8b70",
    "AdamW": "#7d5ba6",
    "3 gather": "#edae49",
    "4 orthogonalize": "#30638e",
    "5 scatter": "#d1495b",
    "6 update": "#66b2a0",
}
DARK = ("2 momentum", "AdamW", "4 orthogonalize", "5 scatter")  # white text can be read on these

Span = dict[str, Any]


def draw(measured: dict[str, Any], picture: Path) -> None:
    """Write the picture as PNG."""
    ranks = measured["ranks"]
    figure, axes = pyplot.subplots(figsize=(9.6, 4.4), dpi=150, layout="constrained")
    _draw_lanes(axes, ranks, max(span["end"] for spans in ranks for span in spans))
    axes.set_xlabel("milliseconds since the step began", fontsize=10)
    figure.legend(
        [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS.values()],
        list(COLOURS),
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=9.5,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    save(figure, picture)
    pyplot.close(figure)


def _draw_lanes(axes: Any, ranks: Sequence[Sequence[Span]], end: float) -> None:
    """Draw three lanes a rank, for what it computes, its gathers and its scatters."""
    y, ticks = 0.0, {}
    for rank, spans in enumerate(ranks):
        ticks |= {y + 0.4: f"rank {rank} computes", y + 1.13: "gathers", y + 1.65: "scatters"}
        for span in spans:
            if span["lane"] == "host":
                _bar(axes, span, y, 0.8, end)
            else:
                _bar(axes, span, y + (0.88 if span["stage"] == "3 gather" else 1.4), 0.5, end)
        y += 2.3
    axes.set_xlim(0, end)
    axes.set_ylim(y - 0.3, -0.1)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9.5)
    axes.tick_params(axis="y", left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def _bar(axes: Any, span: Span, top: float, height: float, end: float) -> None:
    """Draw a span with its name and the number of its bucket, or what of these it is wide enough to hold."""
    stage, width = span["stage"], min(span["end"], end) - span["begin"]
    axes.barh(top, width, left=span["begin"], height=height, color=COLOURS[stage], align="edge", ec="white", lw=0.5)
    name = stage.lstrip("0123456789 ")
    bucket = "" if span["bucket"] is None else str(span["bucket"] + 1)
    named = f"{name} bucket {bucket}" if bucket else name
    text = next((t for t in (named, bucket if bucket else name) if len(t) * 0.0095 * end < width), "")
    ink = "white" if stage in DARK else INK
    middle = span["begin"] + width / 2, top + height / 2
    axes.text(*middle, text, ha="center", va="center", fontsize=9, color=ink, clip_on=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "timeline.png")
    arguments = parser.parse_args()
    draw(json.loads(KEPT.read_text()), arguments.picture)
