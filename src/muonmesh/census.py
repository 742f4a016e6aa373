"""Census: the flags by which the ranks of a connected set tell each other about gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.comm.gradients import partial_axes
from muonmesh.layout import Elementwise, Parameter, Plan
from muonmesh.slots import Slot


@dataclass(frozen=True)
class Census:
    """Where each parameter's flags stand in the vector of a connected set.

    Attributes:
        presence: For each parameter, Muon's first and then AdamW's, the place of its first flag "present" and how
            many it has: one for each part of a copy where there are several copies, else one.
        mine: For each parameter the places of the flags that this rank sets.
        size: Flags "present" altogether; as many "missing" follow.
        axes: Parameters whose gradient may be partial, with the first place and the number of their mesh axes.
        width: Those places altogether; twice as many flags.
        replicated: For each flag "present" whether all replicas must have the same.
    """

    presence: tuple[tuple[int, int], ...]
    mine: tuple[tuple[int, ...], ...]
    size: int
    axes: tuple[tuple[int, int, int], ...]
    width: int
    replicated: tuple[bool, ...]

    @staticmethod
    def of(plan: Plan, rank: int) -> Census:
        """Count them; all but ``mine`` is the same on every rank of the connected set."""
        parameters: list[Parameter | Elementwise] = [*plan.parameters, *plan.others]
        presence, mine, replicated = list[tuple[int, int]](), list[tuple[int, ...]](), list[bool]()
        for parameter in parameters:
            several = parameter.target.copies() > 1
            count = parameter.target.part_count() if several else 1
            first = len(replicated)
            parts = parameter.target.parts(rank) if several and rank in parameter.target.ranks else (0,)
            mine.append(tuple(first + part for part in parts))
            presence.append((first, count))
            replicated += [several] * count
        axes, width = [], 0
        for number, parameter in enumerate(parameters):
            mesh = getattr(parameter.target, "mesh", ())
            if parameter.target.copies() > 1 and len(parameter.target.ranks) > 1:
                axes.append((number, width, len(mesh)))
                width += len(mesh)
        return Census(tuple(presence), tuple(mine), len(replicated), tuple(axes), width, tuple(replicated))

    def counted(self, slots: Sequence[Slot | None]) -> list[int]:
        """Return this rank's flags: "present", "missing", "partial over this axis", "not partial over it"."""
        present, missing = [0] * self.size, [0] * self.size
        for places, slot in zip(self.mine, slots, strict=True):
            if slot is not None:
                found = missing if slot.gradient is None else present
                for place in places:
                    found[place] = 1
        partial, whole = [0] * self.width, [0] * self.width
        for number, first, count in self.axes:
            slot = slots[number]
            if slot is not None and slot.gradient is not None:
                over = partial_axes(slot.gradient)
                over = (False,) * (count - len(over)) + over  # replicas outside a DTensor's mesh stand in front
                for axis, flag in enumerate(over):
                    (partial if flag else whole)[first + axis] = 1
        return present + missing + partial + whole
