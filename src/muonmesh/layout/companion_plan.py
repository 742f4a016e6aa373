"""CompanionPlan: how companions travel to the owners of their matrices before the step, and back after it.

A companion holds what a rule keeps by row, column or matrix. One that lives at the owners does not travel. The others
are small beside the matrices, so they travel at once, in one bucket: to the owners before the first matrix is computed,
and back after the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from muonmesh.layout.companion import Companion
from muonmesh.layout.parameter import Parameter
from muonmesh.layout.plan import Assignment, Plan


@dataclass(frozen=True)
class CompanionPlan:
    """What travels beside the matrices of a plan, the main plan.

    Attributes:
        plan: A plan of its own, with one bucket. Its parameters are the companions. Each of its assignments is the part
            of a companion that belongs to one matrix of the main plan, and has the owner of that matrix.
        of: For each assignment of ``plan`` the number of that matrix's assignment in the main plan, and the companion.
    """

    plan: Plan
    of: tuple[tuple[int, Companion], ...]

    @staticmethod
    def beside(plan: Plan) -> CompanionPlan | None:
        """Return what travels beside the matrices of the main plan; None if no rule keeps anything that has to."""
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
