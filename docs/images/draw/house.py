"""Draw the rooms of the package, and which of them imports which.

    python docs/images/draw/house.py                   # writes docs/images/house.png

Rooms are the folders and the files at the root of ``src/muonmesh``. `numerics/kernels` is a room of its own, and so is
each folder of `tools`.
Arrows are read off the sources. A room stands one floor above the highest room that it imports. `errors` is left out:
everybody imports it.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from canvas import IMAGES, INK, QUIET, save
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

SOURCE = Path(__file__).parents[3] / "src" / "muonmesh"
SAID = {
    "tools.cli": "muonmesh train, plan",
    "integrations": "DeepSpeed, Megatron,\nTrainer, Lightning, …",
    "tools.migration": "settings of others",
    "tools.auditing": "what a step of\nany optimizer does",
    "tools.testing": "prove_rule",
    "tools.checkpoints": "convert",
    "tools.forecasts": "a step on a cluster\nthat is not here",
    "tools.local_part": "of a whole tensor",
    "build": "from_model",
    "optimizer": "one step on one screen",
    "checkpoint": "state to load and save,\nfiles that cannot execute",
    "clip": "norms, skipping",
    "report": "explain, metrics",
    "step": "planning, preflight,\nmuon_step, offload",
    "comm": "storage, agreement,\nschedule, exchange",
    "groups": "who goes to Muon,\nwho to AdamW",
    "settings": "what groups may say",
    "numerics": "Newton–Schulz,\nscale, rules",
    "layout": "Region, Layout,\nMatrix, Plan",
    "names": "canonical names",
    "table": "aligned text",
    "files": "read, written whole",
    "numerics.kernels": "products",
}


def room_of(names: tuple[str, ...]) -> str:
    """The room of ``muonmesh.a.b.c``."""
    return ".".join(names[:2]) if names[:2] == ("numerics", "kernels") or names[0] == "tools" else names[0]


def arrows() -> dict[str, set[str]]:
    """For each room the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        names = file.relative_to(SOURCE).with_suffix("").parts
        if names in (("__init__",), ("__main__",), ("testing",), ("tools", "__init__"), ("checkpoint", "__init__")):
            continue
        room = room_of(names)
        found.setdefault(room, set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("muonmesh."):
                other = room_of(tuple(node.module.split(".")[1:]))
                if other not in (room, "errors"):
                    found[room].add(other)
    found.pop("errors", None)
    return found


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rooms by floor, the ground floor first; fails if there is a circle."""
    height: dict[str, int] = {}
    while fresh := [room for room in graph if room not in height and graph[room] <= height.keys()]:
        for room in fresh:
            height[room] = 1 + max((height[other] for other in graph[room]), default=-1)
    assert len(height) == len(graph), f"a circle among {sorted(graph.keys() - height.keys())}"
    return [[room for room in graph if height[room] == floor] for floor in range(1 + max(height.values()))]


def draw(picture: Path) -> None:
    """Write the picture."""
    graph = arrows()
    storeys = floors(graph)
    figure, axes = pyplot.subplots(figsize=(10, 1.15 * len(storeys)), dpi=110)
    width, high = 2.0, 0.62
    place = {}
    for floor, rooms in enumerate(storeys):
        for number, room in enumerate(rooms):
            place[room] = (number - (len(rooms) - 1) / 2) * 2.6, float(floor)
    for room, others in graph.items():
        for other in others:
            (x, y), (u, v) = place[room], place[other]
            near = y - v <= 1
            axes.add_patch(
                FancyArrowPatch(
                    (x, y - high / 2),
                    (u, v + high / 2),
                    arrowstyle="-|>",
                    mutation_scale=9,
                    color="#3b6ea5" if near else "#b8c4d0",
                    linewidth=1.3 if near else 0.8,
                    connectionstyle=f"arc3,rad={0.0 if near else 0.12}",
                    zorder=1,
                )
            )
    for room, (x, y) in place.items():
        box = FancyBboxPatch(
            (x - width / 2, y - high / 2), width, high, boxstyle="round,pad=0.03", fc="#eef4fa", ec="#3b6ea5", zorder=2
        )
        axes.add_patch(box)
        axes.text(x, y + 0.14, room, ha="center", va="center", fontsize=10, weight="bold", color=INK, zorder=3)
        axes.text(x, y - 0.12, SAID[room], ha="center", va="center", fontsize=7, color=QUIET, zorder=3)
    wide = max(abs(x) for x, _ in place.values()) + width
    axes.set_xlim(-wide, wide)
    axes.set_ylim(-0.6, len(storeys) - 0.4)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    save(figure, picture)
    print(f"{len(graph)} rooms, {sum(map(len, graph.values()))} arrows, {len(storeys)} floors, errors left out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=IMAGES / "house.png")
    draw(parser.parse_args().picture)
