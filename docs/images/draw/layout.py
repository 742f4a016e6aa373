"""Draw the way of a fused q, k, v weight under FSDP2 over tensor parallelism: to the owners of its matrices, and back.

    python docs/images/draw/layout.py                  # writes docs/images/layout.png

Nothing in the picture is invented. The script makes the real layout of a 1280 × 768 weight on a 2 × 2 mesh, splits it
into its three matrices, makes the real plan, and draws what the layout and the routes of the plan say.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvas import IMAGES, INK, QUIET, RANKS, save
from matplotlib import pyplot
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from muonmesh.layout import MeshLayout, Parameter, Plan, Shard, cost, make_plan, split_matrices

ROWS, COLS = {"q": 768, "k": 256, "v": 256}, 768
MESH = (2, 2)  # (FSDP2, tensor parallel); rank = 2 · its place on the FSDP2 axis + its place on the other one

# Lengths are in rows of the weight, downwards.
GAP = 90  # between two ranks
WIDTH = 350  # of a box
WEIGHT, STORED, OWNED, UPDATED = 0, 640, 1400, 2160  # left edges of the four columns
TITLES = {
    WEIGHT: "The whole weight\n(on no rank alone)",
    STORED: "What each rank\nstores",
    OWNED: "Each owner has one\nwhole matrix and\northogonalizes it",
    UPDATED: "Each rank updates\nwhat it stores",
}


@dataclass(frozen=True)
class Move:
    """Rows of one matrix that one rank stores: where they are in its storage, in the matrix and in the weight."""

    rank: int
    owner: int
    matrix: int
    rows: int
    in_storage: int
    in_matrix: int
    in_weight: int


def plan_of_weight() -> tuple[MeshLayout, Plan]:
    """Return the layout that FSDP2 over colwise tensor parallelism gives the weight, and its plan."""
    layout = MeshLayout((sum(ROWS.values()), COLS), MESH, (0, 1, 2, 3), (Shard(0, split_factor=2), Shard(0)))
    matrices = split_matrices("qkv.weight", layout.shape, ("rows", *ROWS.values()))
    flops = tuple(cost(matrix.rows, matrix.cols, degrees=[[3]] * 5) for matrix in matrices)
    parameter = Parameter("qkv.weight", layout, layout, matrices, flops, "5 steps")
    return layout, make_plan([parameter], bucket_elements=1 << 24)


def moves_of(plan: Plan) -> list[Move]:
    """Return what goes to the owners, as the routes of the plan say; the way back is the same read backwards."""
    layout = plan.parameters[0].target
    moves = []
    for rank in plan.ranks:
        (block,) = layout.blocks(rank)
        routes = plan.routes(0, rank, gather=True).stored
        assert routes == plan.routes(0, rank, gather=False).stored
        for owner, rows_to_owner in routes.items():
            for row in rows_to_owner:
                rows, cols = row.piece.shape
                assert cols == COLS  # no axis of the mesh cuts the columns
                stored, placed = row.piece.storage_start // COLS, row.piece.matrix_start // COLS
                moves.append(Move(rank, owner, row.assignment, rows, stored, placed, block.region.offset[0] + stored))
    assert sum(move.rows for move in moves) == layout.shape[0]
    return moves


def draw(picture: Path) -> None:
    """Write the picture as PNG."""
    layout, plan = plan_of_weight()
    moves = moves_of(plan)
    stored = layout.local_shape(0)[0]
    height = len(plan.ranks) * stored + (len(plan.ranks) - 1) * GAP
    weight = (height - layout.shape[0]) / 2
    storages = {rank: float(rank * (stored + GAP)) for rank in plan.ranks}
    owned, y = dict[int, float](), 0.0
    for assignment in plan.assignments:
        owned[assignment.matrix.index] = y
        y += assignment.matrix.rows + (height - layout.shape[0]) / (len(plan.assignments) - 1)

    figure, axes = pyplot.subplots(figsize=(9.6, 6.9), dpi=150)
    figure.subplots_adjust(left=0, right=1, top=1, bottom=0)
    axes.set_xlim(-320, UPDATED + WIDTH + 70)
    axes.set_ylim(height + 250, -330)
    axes.set_axis_off()
    for x, title in TITLES.items():
        axes.text(x + WIDTH / 2, -150, title, ha="center", va="bottom", fontsize=11, color=INK, linespacing=1.25)
    for x, way in (((STORED + WIDTH + OWNED) / 2, "gather →"), ((OWNED + WIDTH + UPDATED) / 2, "scatter →")):
        axes.text(x, -30, way, ha="center", va="bottom", fontsize=11, color=QUIET, style="italic")

    for move in moves:
        stays = move.rank == move.owner
        at_weight, at_owner = weight + move.in_weight, owned[move.matrix] + move.in_matrix
        at_rank = storages[move.rank] + move.in_storage
        _ribbon(axes, move, WEIGHT + WIDTH, at_weight, STORED, at_rank, alpha=0.12)
        _ribbon(axes, move, STORED + WIDTH, at_rank, OWNED, at_owner, alpha=0.38, dotted=stays)
        _ribbon(axes, move, OWNED + WIDTH, at_owner, UPDATED, at_rank, alpha=0.38, dotted=stays)
        for x in (STORED, UPDATED):
            _box(axes, x, at_rank, move.rows, move.rank, _rows_of(move))
        _box(axes, OWNED, at_owner, move.rows, move.rank, f"from rank {move.rank}")
    for rank in plan.ranks:
        (block,) = layout.blocks(rank)
        fsdp, tensor = divmod(rank, MESH[1])
        label = f"rank {rank}\n(FSDP2 {fsdp}, TP {tensor})"
        _box(axes, WEIGHT, weight + block.region.offset[0], block.region.shape[0], rank, "")
        largest = max((move for move in moves if move.rank == rank), key=lambda move: move.rows)
        _label(axes, WEIGHT, weight + largest.in_weight, largest.rows, rank, label)
        for x in (STORED, UPDATED):
            _heading(axes, x, storages[rank], f"rank {rank}")
    for assignment in plan.assignments:
        name = list(ROWS)[assignment.matrix.index]
        _heading(axes, OWNED, owned[assignment.matrix.index], f"{name} on rank {assignment.owner}")
    _brackets(axes, weight)

    sent = sum(move.rows for move in moves if move.rank != move.owner) / layout.shape[0]
    idle = [f"rank {rank}" for rank in plan.ranks if all(rank != a.owner for a in plan.assignments)]
    axes.text(
        (UPDATED + WIDTH - 250) / 2,
        height + 60,
        "A color stands for the rank that stores the rows. Dotted rows stay on their rank: nothing is sent for them.\n"
        f"Here {sent:.0%} of the weight is sent to an owner, and as much is sent back. "
        f"{' and '.join(idle).capitalize()} owns matrices of other weights.",
        ha="center",
        va="top",
        fontsize=10,
        color=INK,
        linespacing=1.4,
    )
    save(figure, picture)
    pyplot.close(figure)


def _rows_of(move: Move) -> str:
    first, last = move.in_weight, move.in_weight + move.rows - 1
    name = list(ROWS)[move.matrix]
    return f"{name}: rows\n{first}–{last}" if move.rows > 100 else f"{name}: {first}–{last}"


def _heading(axes: Any, x: float, top: float, text: str) -> None:
    axes.text(x + WIDTH / 2, top - 12, text, ha="center", va="bottom", fontsize=10.5, color=INK, weight="bold")


def _box(axes: Any, x: float, top: float, rows: int, rank: int, label: str) -> None:
    box = Rectangle((x, top), WIDTH, rows, facecolor=RANKS[rank], edgecolor="white", linewidth=1.2, zorder=3)
    axes.add_patch(box)
    _label(axes, x, top, rows, rank, label)


def _label(axes: Any, x: float, top: float, rows: int, rank: int, label: str) -> None:
    ink = INK if rank == 2 else "white"
    axes.text(x + WIDTH / 2, top + rows / 2, label, ha="center", va="center", fontsize=9.5, color=ink, zorder=4)


def _brackets(axes: Any, top: float) -> None:
    """Mark the rows of q, k and v beside the whole weight."""
    for name, rows in ROWS.items():
        ends = [top + 8, top + 8, top + rows - 8, top + rows - 8]
        axes.plot([WEIGHT - 20, WEIGHT - 38, WEIGHT - 38, WEIGHT - 20], ends, color=INK, lw=1.2)
        text = f"{name}\n{rows} × {COLS}"
        axes.text(WEIGHT - 55, top + rows / 2, text, ha="right", va="center", fontsize=10, color=INK)
        top += rows
        if top < sum(ROWS.values()):
            axes.plot([WEIGHT - 10, WEIGHT + WIDTH], [top, top], color=INK, lw=1.2, ls=(0, (4, 3)), zorder=5)


def _ribbon(
    axes: Any, move: Move, x0: float, y0: float, x1: float, y1: float, *, alpha: float, dotted: bool = False
) -> None:
    """Draw a band as high as the rows from (x0, y0) to (x1, y1)."""
    rows, colour, middle = move.rows, RANKS[move.rank], (x0 + x1) / 2
    there = [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]
    back = [(x1, y1 + rows), (middle, y1 + rows), (middle, y0 + rows), (x0, y0 + rows)]
    curve = [Outline.CURVE4] * 3
    outline = Outline([*there, *back, (x0, y0)], [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY])
    if dotted:
        axes.add_patch(PathPatch(outline, facecolor="none", edgecolor=colour, alpha=0.75, hatch="..", lw=0))
    else:
        axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor="none", alpha=alpha))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "layout.png")
    draw(parser.parse_args().picture)
