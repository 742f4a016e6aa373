"""FactoredPlan: the plan by which factored states travel to the owners of their matrices, and back after a step.

A factored state is state of a rule by row, column or matrix. One that is kept at the owners does not travel. The others
are small compared with the matrices, so they travel in one bucket: to the owners before the first matrix is computed,
and back after the last matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from muonmesh.layout.factored_state import FactoredState
from muonmesh.layout.parameter import Parameter
from muonmesh.layout.plan import Assignment, Plan


@dataclass(frozen=True)
class FactoredPlan:
    """The plan of the factored states that travel in addition to the matrices of a plan, the main plan.

    Attributes:
        plan: A separate plan with one bucket. Its parameters are the factored states. Each assignment is the part of a
            factored state that belongs to one matrix of the main plan, and has the owner of this matrix.
        of: For each assignment of ``plan`` its matrix's number in the main plan, and the factored state.
    """

    plan: Plan
    of: tuple[tuple[int, FactoredState], ...]

    @staticmethod
    def beside(plan: Plan) -> FactoredPlan | None:
        """Return the factored plan of a main plan; None if no factored state has to travel."""
        numbers: dict[tuple[int, str], int] = {}
        parameters: list[Parameter] = []
        assignments: list[Assignment] = []
        of: list[tuple[int, FactoredState]] = []
        for number, assignment in enumerate(plan.assignments):
            parameter = plan.parameters[assignment.parameter]
            for factored in parameter.factored_states:
                if factored.at_owner:
                    continue
                key = assignment.parameter, factored.key
                if key not in numbers:
                    numbers[key] = len(parameters)
                    nothing = (0,) * len(factored.matrices)
                    name, layout = f"{parameter.name}.{factored.key}", factored.layout
                    parameters.append(Parameter(name, layout, layout, factored.matrices, nothing, ""))
                part = factored.matrices[assignment.matrix.index]
                assignments.append(Assignment(numbers[key], part, assignment.owner, 0))
                of.append((number, factored))
        if not assignments:
            return None
        bucket = tuple(range(len(assignments)))
        return FactoredPlan(Plan(plan.ranks, tuple(parameters), tuple(assignments), (bucket,)), tuple(of))
