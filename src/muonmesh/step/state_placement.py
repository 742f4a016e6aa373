"""State placement: where the state of each parameter lives, by its rule, its momentum and the plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from muonmesh.comm.storage import Storage
from muonmesh.layout import FlatShards, Layout, MeshLayout, Plan
from muonmesh.layout.factored_state import FactoredState, factored_in_buffers, factored_matrices
from muonmesh.layout.flat import Interval
from muonmesh.numerics.rules import KeptAs, rule_of
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.state_layout import StateLayout


def with_state_layouts(
    groups: Sequence[Mapping[str, Any]], members: Sequence[OptimizedParameter]
) -> list[OptimizedParameter]:
    """Return the members with their state layouts.

    Raises:
        ValueError: a parameter does not split as its group says.
    """
    sharing: dict[int, list[OptimizedParameter]] = {}
    for member in members:
        sharing.setdefault(id(member.tensor), []).append(member)
    layouts: dict[int, dict[str, StateLayout]] = {}
    for sharing_tensor in sharing.values():
        keeps = rule_of(groups[sharing_tensor[0].group]).keeps()
        layouts |= zip(map(id, sharing_tensor), state_layouts_of(keeps, sharing_tensor), strict=True)
    return [replace(member, state_layouts=layouts[id(member)]) for member in members]


def state_layouts_of(
    keeps: Mapping[str, KeptAs] | Sequence[str], members: Sequence[OptimizedParameter]
) -> list[dict[str, StateLayout]]:
    """Return the state layouts of the parameters that one tensor holds: one parameter, or several if it is flat.

    State by row, column or matrix follows the momentum: it is placed on the mesh of the momentum, or it is in a flat
    buffer that is cut between the same ranks. State at the owners is placed by `with_owners`, once there is a plan.

    Args:
        keeps: See `Rule.keeps`; the names alone of what an elementwise rule keeps.
        members: The parameters, in the order of the tensor.

    Raises:
        ValueError: a parameter does not split as its group says.
    """
    if not isinstance(keeps, Mapping):
        layouts = [StateLayout("weights", member.storage, dtype=member.tensor.dtype) for member in members]
        return [dict.fromkeys(keeps, layout) for layout in layouts]
    layouts_of_members: list[dict[str, StateLayout]] = [{} for _ in members]
    for key, kind in keeps.items():
        if kind == "momentum" or kind == "weights":
            for member, state_layouts in zip(members, layouts_of_members, strict=True):
                storage = member.momentum_storage if kind == "momentum" else member.storage
                state_layouts[key] = StateLayout(kind, storage)
            continue
        forms = [factored_matrices(member.name, member.storage.shape, member.spec, kind) for member in members]
        buffers = dict[str, tuple[FlatShards, tuple[int, ...]]]()
        for member, (shape, _) in zip(members, forms, strict=True):
            if isinstance(layout := member.momentum_storage.layout, FlatShards):
                buffers[member.name] = layout, shape
        flat = factored_in_buffers(buffers)
        for member, (shape, matrices), state_layouts in zip(members, forms, layouts_of_members, strict=True):
            layout, target = member.momentum_storage.layout, cast(Layout, flat.get(member.name))
            if "×" in kind:  # the owners keep this state; they are known when there is a plan
                target = MeshLayout.replicated(shape, (0,))
            elif isinstance(layout, MeshLayout):
                target = replace(layout, shape=shape)  # placed alike on the same mesh
            storage = Storage(target, target.shape) if "×" in kind else member.momentum_storage.factored(target)
            state_layouts[key] = StateLayout(kind, storage, FactoredState(key, kind, target, matrices))
    return layouts_of_members


def with_owners(plan: Plan, members: Sequence[OptimizedParameter | None]) -> tuple[OptimizedParameter | None, ...]:
    """Return the members of a plan, with the layouts of the state that the owners of their matrices keep.

    Args:
        plan: The plan with the owner of each matrix.
        members: The members of Muon's groups in the order of the plan; None for one that only other ranks hold. Those
            that share a flat tensor also share the flat buffers of this state.
    """
    owners = {(assignment.parameter, assignment.matrix.index): assignment.owner for assignment in plan.assignments}
    buffers = defaultdict[tuple[int, str], Counter[int]](Counter)  # elements of each owner, over all parameters
    entries = list[tuple[int, str, StateLayout, defaultdict[int, list[Interval]], list[int]]]()
    for number, member in enumerate(members):
        for key, state_layout in member.state_layouts.items() if member is not None else ():
            assert member is not None
            if state_layout.factored is None or not state_layout.at_owner:
                continue
            buffer, first = buffers[id(member.tensor), key], 0
            intervals, starts = defaultdict[int, list[Interval]](list), list[int]()
            entries.append((number, key, state_layout, intervals, starts))
            for matrix in state_layout.factored.matrices:
                owner = owners[number, matrix.index]
                starts.append(buffer[owner])
                intervals[owner].append(Interval(first, matrix.numel, buffer[owner]))
                buffer[owner] += matrix.numel
                first += matrix.numel
    placed = list(members)
    for number, key, state_layout, intervals, starts in entries:
        member, factored, ranks = placed[number], state_layout.factored, plan.parameters[number].target.ranks
        assert member is not None
        assert factored is not None
        sizes = tuple(buffers[id(member.tensor), key][rank] for rank in ranks)
        of_ranks = tuple(tuple(intervals.get(rank, ())) for rank in ranks)
        layout = FlatShards(MeshLayout.replicated(factored.layout.shape, ranks), of_ranks, sizes)
        factored = replace(factored, layout=layout, starts=tuple(starts))
        at_owners = StateLayout(state_layout.kept_as, Storage(layout, layout.shape), factored)
        placed[number] = replace(member, state_layouts={**member.state_layouts, key: at_owners})
    return tuple(placed)
