"""Table: aligns the cells of rows of text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muonmesh.errors import escaped


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), ruled: bool = False) -> list[str]:
    """Return the lines of a table, one for each row, with aligned columns.

    Args:
        rows: The cells of each row; all rows have the same number of cells.
        right: The numbers of the right-aligned columns; all others are left-aligned.
        ruled: Whether a horizontal line follows the first row.
    """
    rows = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    if ruled:
        lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
