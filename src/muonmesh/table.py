"""Table: rows of text whose cells stand below each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), ruled: bool = False) -> list[str]:
    """Return a line for each row.

    Args:
        rows: Equally long ones.
        right: The columns that end at the right; all others begin at the left.
        ruled: Whether a rule follows the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    if ruled:
        lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
