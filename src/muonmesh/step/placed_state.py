"""Placed state: where the state of each parameter lives, which follows from its rule, its momentum and the plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from muonmesh.comm.storage import Storage
from muonmesh.layout import FlatShards, Layout, MeshLayout, Plan
from muonmesh.layout.companion import Companion, companion_matrices, companions_in_buffers
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
    sharing = defaultdict[int, list[int]](list)
    found = list(members)
    for number, member in enumerate(members):
        if member.is_matrix:
            sharing[id(member.tensor)].append(number)
        else:
            state_layout = StateLayout("weights", member.storage, dtype=member.tensor.dtype)
            keeps = rule_of(groups[member.group]).keeps()
            found[number] = replace(member, state_layouts=dict.fromkeys(keeps, state_layout))
    for numbers in sharing.values():
        together = [members[number] for number in numbers]
        state_layouts = state_layouts_of(rule_of(groups[together[0].group]).keeps(), together)
        for number, each in zip(numbers, state_layouts, strict=True):
            found[number] = replace(members[number], state_layouts=each)
    return found


def state_layouts_of(
    keeps: Mapping[str, KeptAs], together: Sequence[OptimizedParameter]
) -> list[dict[str, StateLayout]]:
    """Return the state layouts of the parameters that one tensor holds: one parameter, or several if it is flat.

    State by row, column or matrix follows the momentum: it is placed on the mesh of the momentum, or it is in a flat
    buffer that is cut between the same ranks. State at the owners is placed by `with_owners`, once there is a plan.

    Args:
        keeps: See `Rule.keeps`.
        together: The parameters, in the order of the tensor.

    Raises:
        ValueError: a parameter does not split as its group says.
    """
    found: list[dict[str, StateLayout]] = [{} for _ in together]
    for key, kept in keeps.items():
        if kept == "momentum" or kept == "weights":
            for member, state_layouts in zip(together, found, strict=True):
                state_layouts[key] = StateLayout(
                    kept, member.momentum_storage if kept == "momentum" else member.storage
                )
            continue
        made = [companion_matrices(member.name, member.storage.shape, member.spec, kept) for member in together]
        buffers = dict[str, tuple[FlatShards, tuple[int, ...]]]()
        for member, (shape, _) in zip(together, made, strict=True):
            if isinstance(layout := member.momentum_storage.layout, FlatShards):
                buffers[member.name] = layout, shape
        flat = companions_in_buffers(buffers)
        for member, (shape, matrices), state_layouts in zip(together, made, found, strict=True):
            layout, place = member.momentum_storage.layout, cast(Layout, flat.get(member.name))
            if "×" in kept:  # the owners keep this state; they are known when there is a plan
                place = MeshLayout.replicated(shape, (0,))
            elif isinstance(layout, MeshLayout):
                place = replace(layout, shape=shape)  # placed alike on the same mesh
            storage = Storage(place, place.shape) if "×" in kept else member.momentum_storage.companion(place)
            state_layouts[key] = StateLayout(kept, storage, Companion(key, kept, place, matrices))
    return found


def with_owners(plan: Plan, members: Sequence[OptimizedParameter | None]) -> tuple[OptimizedParameter | None, ...]:
    """Return the members of a plan, with the layouts of the state that the owners of their matrices keep.

    Args:
        plan: The plan with the owner of each matrix.
        members: The members of Muon's groups in the order of the plan; None for one that only other ranks hold. Those
            that share a flat tensor also share the flat buffers of this state.
    """
    owners = {(each.parameter, each.matrix.index): each.owner for each in plan.assignments}
    buffers = defaultdict[tuple[int, str], Counter[int]](Counter)  # elements of each owner, over all parameters
    held = dict[tuple[int, str], tuple[StateLayout, Counter[int], list[tuple[int, Interval]]]]()
    for number, member in enumerate(members):
        for key, kept in member.state_layouts.items() if member is not None else ():
            assert member is not None
            if kept.companion is None or not kept.at_owner:
                continue
            buffer, intervals, first = buffers[id(member.tensor), key], list[tuple[int, Interval]](), 0
            held[number, key] = kept, buffer, intervals
            for matrix in kept.companion.matrices:
                owner = owners[number, matrix.index]
                intervals.append((owner, Interval(first, matrix.numel, buffer[owner])))
                buffer[owner] += matrix.numel
                first += matrix.numel
    found = list(members)
    for (number, key), (kept, buffer, intervals) in held.items():
        member = found[number]
        assert kept.companion is not None
        assert member is not None
        ranks = plan.parameters[number].target.ranks
        within = MeshLayout.replicated(kept.companion.layout.shape, ranks)
        some: dict[int, list[Interval]] = {rank: [] for rank in ranks}
        for owner, interval in intervals:
            some[owner].append(interval)
        place = FlatShards(within, tuple(map(tuple, some.values())), tuple(buffer[rank] for rank in ranks))
        starts = tuple(interval.start for _, interval in intervals)
        companion = replace(kept.companion, layout=place, starts=starts)
        state_layout = StateLayout(kept.kept_as, Storage(place, place.shape), companion)
        found[number] = replace(member, state_layouts={**member.state_layouts, key: state_layout})
    return tuple(found)
