"""CompanionPlan: the plan by which companions travel to the owners of their matrices before a step, and back after it.

A companion is state of a rule by row, column or matrix. Companions that are kept at the owners do not travel. The
others are small compared with the matrices, so they travel in one bucket: to the owners before the first matrix is
computed, and back after the last matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from muonmesh.layout.companion import Companion
from muonmesh.layout.parameter import Parameter
from muonmesh.layout.plan import Assignment, Plan


@dataclass(frozen=True)
class CompanionPlan:
    """The plan of the companions that travel in addition to the matrices of a plan, the main plan.

    Attributes:
        plan: A separate plan with one bucket. Its parameters are the companions. Each assignment is the part of a
            companion that belongs to one matrix of the main plan, and has the owner of this matrix.
        of: For each assignment of ``plan`` the number of the matrix's assignment in the main plan, and the companion.
    """

    plan: Plan
    of: tuple[tuple[int, Companion], ...]

    @staticmethod
    def beside(plan: Plan) -> CompanionPlan | None:
        """Return the companion plan of a main plan; None if no companion has to travel."""
        numbers: dict[tuple[int, str], int] = {}
        parameters: list[Parameter] = []
        assignments: list[Assignment] = []
        of: list[tuple[int, Companion]] = []
        for number, assignment in enumerate(plan.assignments):
            parameter = plan.parameters[assignment.parameter]
            for companion in parameter.companions:
                if companion.at_owner:
                    continue
                key = assignment.parameter, companion.key
                if key not in numbers:
                    numbers[key] = len(parameters)
                    nothing = (0,) * len(companion.matrices)
                    name, place = f"{parameter.name}.{companion.key}", companion.layout
                    parameters.append(Parameter(name, place, place, companion.matrices, nothing, ""))
                part = companion.matrices[assignment.matrix.index]
                assignments.append(Assignment(numbers[key], part, assignment.owner, 0))
                of.append((number, companion))
        if not assignments:
            return None
        bucket = tuple(range(len(assignments)))
        return CompanionPlan(Plan(plan.ranks, tuple(parameters), tuple(assignments), (bucket,)), tuple(of))
