"""Cover: the proof that storage and matrices cover each parameter exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from muonmesh.errors import LayoutError, NotCovered, explain_error
from muonmesh.layout.flat import Layout
from muonmesh.layout.parameter import Elementwise, Parameter
from muonmesh.layout.region import Block, Region


def prove(parameters: Sequence[Parameter], elementwise: Sequence[Elementwise]) -> None:
    """Prove that storage covers each parameter exactly once per replica, and that the matrices tile it."""
    stored: list[tuple[str, Layout]] = [(other.name, other.target) for other in elementwise]
    for parameter in parameters:
        layouts = [parameter.momentum_storage, parameter.target, *(s.layout for s in parameter.factored_states)]
        stored += [(parameter.name, layout) for layout in {id(layout): layout for layout in layouts}.values()]
    for name, layout in stored:
        try:
            layout.prove_cover()
        except LayoutError as error:
            needed, write = "each element held once in each copy", "Correct its placements or its entry in layouts="
            raise LayoutError(explain_error(name, str(error), needed, write)) from None
    proved: dict[tuple[int, ...], list[tuple[Block, ...]]] = {}
    for parameter in parameters:
        tiled = [(parameter.target, parameter.matrices)]
        tiled += [(state.layout, state.matrices) for state in parameter.factored_states]
        for layout, matrices in tiled:
            blocks = [matrix.blocks for matrix in matrices]
            if proved.get(layout.shape) != blocks:  # layers are alike
                try:
                    _prove_tiling([block.region for matrix_blocks in blocks for block in matrix_blocks], layout.shape)
                except LayoutError as error:
                    needed, write = "matrices that cover it exactly once", "Correct its matrices"
                    raise LayoutError(explain_error(parameter.name, str(error), needed, write)) from None
                proved[layout.shape] = blocks


def _prove_tiling(regions: Sequence[Region], shape: Sequence[int], dim: int = 0) -> None:
    """Prove that regions tile a box: along each dim their runs are equal or disjoint and fill it, recursively."""
    if dim == len(shape):
        if len(regions) != 1:
            raise NotCovered(f"the element at {regions[0].offset} in {len(regions)} matrices")
        return
    groups: dict[tuple[int, int, int], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.offset[dim], region.step[dim], region.shape[dim]), []).append(region)
    position = 0
    for number, (offset, step, count) in enumerate(sorted(groups)):
        if step == 1 and offset == position:
            position += count
        elif (offset, step * count) == (number, shape[dim]) and step == len(groups):
            position = shape[dim]  # `step` progressions, one for each remainder
        else:
            raise NotCovered(f"matrices that overlap or leave a gap at index {position} of dim {dim}")
    if position != shape[dim]:
        raise NotCovered(f"matrices that leave a gap at index {position} of dim {dim}")
    for group in groups.values():
        _prove_tiling(group, shape, dim + 1)
