"""AdjacentMatrices: matrices of a batch that lie one after the other in the storage of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonmesh.comm.work import Local
from muonmesh.layout import Plan


@dataclass(slots=True)
class AdjacentMatrices:
    """Matrices of a batch that lie one after the other in the storage of a parameter.

    Attributes:
        parameter: As the plan numbers it.
        assignment: The first of them.
        stored: As `Local.stored` says.
        start: The place of their first element.
        count: How many there are.
    """

    parameter: int
    assignment: int
    stored: str
    start: int
    count: int

    def of(self, storage: Tensor, shape: tuple[int, int], *, apart: bool) -> Sequence[Tensor]:
        """Return their elements in a contiguous storage: in one tensor or, ``apart``, one each, as they are stored.

        Args:
            storage: Of the parameter, or of what is stored as it is.
            shape: Of each matrix, as it is stored.
            apart: See above.
        """
        rows, cols = shape
        some = storage.view(-1)[self.start : self.start + self.count * rows * cols].view(self.count, rows, cols)
        return some.unbind() if apart else (some,)


def adjacent_matrices(plan: Plan, batch: Sequence[Local]) -> list[AdjacentMatrices]:
    """Return the runs of a batch of matrices of one shape, none of which is stored in pieces."""
    found: list[AdjacentMatrices] = []
    for local in batch:
        assignment = plan.assignments[local.assignment]
        run = found[-1] if found else None
        if (
            run is not None
            and run.parameter == assignment.parameter
            and run.stored == local.stored
            and local.start == run.start + run.count * assignment.matrix.numel
        ):
            run.count += 1
        else:
            found.append(AdjacentMatrices(assignment.parameter, local.assignment, local.stored, local.start, 1))
    return found
