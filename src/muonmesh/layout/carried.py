"""Carried: the plan by which what rules keep by row, column or matrix travels to the owners of the matrices and back.

It is small beside the matrices, so it travels all at once: one bucket, before the first matrix is computed and after
the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from muonmesh.layout.companion import Companion
from muonmesh.layout.parameter import Parameter
from muonmesh.layout.plan import Assignment, Plan


@dataclass(frozen=True)
class Carried:
    """What travels beside the matrices of a plan.

    Attributes:
        plan: A plan of its own, of one bucket. Its parameters are the companions, and its matrices are the numbers of
            one matrix each, which have the owner of that matrix.
        of: For each assignment of ``plan`` the assignment of the other plan that it belongs to, and its companion.
        members: For each parameter of ``plan`` the parameter of the other plan that it is a companion of.
    """

    plan: Plan
    of: tuple[tuple[int, Companion], ...]
    members: tuple[int, ...]

    @staticmethod
    def beside(plan: Plan) -> Carried | None:
        """Return what travels beside a plan's matrices; None if no rule keeps anything that has to."""
        numbers: dict[tuple[int, str], int] = {}
        parameters: list[Parameter] = []
        assignments: list[Assignment] = []
        of: list[tuple[int, Companion]] = []
        members: list[int] = []
        for number, assignment in enumerate(plan.assignments):
            parameter = plan.parameters[assignment.parameter]
            for companion in parameter.companions:
                key = assignment.parameter, companion.key
                if key not in numbers:
                    numbers[key] = len(parameters)
                    nothing = (0,) * len(companion.matrices)
                    name, place = f"{parameter.name}.{companion.key}", companion.storage
                    parameters.append(Parameter(name, place, place, companion.matrices, nothing, ""))
                    members.append(assignment.parameter)
                part = companion.matrices[assignment.matrix.index]
                assignments.append(Assignment(numbers[key], part, assignment.team[:1], 0))
                of.append((number, companion))
        if not assignments:
            return None
        bucket = tuple(range(len(assignments)))
        return Carried(Plan(plan.ranks, tuple(parameters), tuple(assignments), (bucket,)), tuple(of), tuple(members))
