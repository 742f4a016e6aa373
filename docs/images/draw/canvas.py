"""What the scripts that draw the documents' pictures share: colours, and small files that are the same every time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a machine that draws need not have a display

from PIL import Image

IMAGES = Path(__file__).parents[1]
INK, QUIET = "#222222", "#666666"
RANKS = ("#30638e", "#d1495b", "#edae49", "#2e8b70")  # apart in brightness too, for print and for the colour-blind


def save(figure: Any, picture: Path, *, colours: int = 64) -> None:
    """Write a figure as PNG with a palette of a few colours, a third of the bytes, and without a date."""
    full = io.BytesIO()
    figure.savefig(full, format="png", metadata={"Software": None})
    with Image.open(full) as image:
        image.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(picture, optimize=True)
