"""Squares: the vector that all ranks add up when gradients are clipped, and what a rank adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource, whole_gradient
from muonmesh.comm.views import view_in_storage
from muonmesh.errors import LayoutError, explain_error
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.numerics.rules import RULES
from muonmesh.step.planning import Planned

ERRORS, REPLAN, RANKS, ALIKE, SQUARED, INVARIANT, FELT, MATRICES = range(8)
"""Places in the vector, which is fp64.

ERRORS: how many ranks found an error. REPLAN: how many must plan again. RANKS: how many have valid arguments. ALIKE and
SQUARED: a number made of the arguments, and its square; by their sums these ranks see whether all were given the same
arguments. INVARIANT: the squares of the gradients of groups whose rule is `scale_invariant`, told as "muon". FELT:
those of all other groups, told as "adamw": AdamW's, and those of rules on matrices that feel the scale. From MATRICES
on: both again for each of the source's `norms_apart`, and then, from `matrices_from` on, the squares of each matrix
of the plan.
"""


class Slots(NamedTuple):
    """The places of a connected set's matrices in one sum over several sets, such as pipeline stages.

    Attributes:
        planned: The plan for which the places were agreed on; with another plan all sets must agree again.
        first: How many matrices the sets before it have.
        total: How many matrices all sets have.
    """

    planned: Planned
    first: int
    total: int


def half_of(group: Mapping[str, Any]) -> int:
    """Return the place of a group's half in the vector: whether its rule feels the scale of gradients."""
    return INVARIANT if RULES[group["algorithm"]].scale_invariant else FELT


def matrices_from(source: GradientSource) -> int:
    """Return the place in the vector from which on there are the squares of the matrices."""
    return MATRICES + 2 * len(source.norms_apart)


def zeros_for(planned: Planned, source: GradientSource) -> Tensor:
    """Return the vector before anything is added.

    Its length is the same under every policy, so that ranks with different policies still meet, and raise.
    """
    length = matrices_from(source) + len(planned.plan.assignments)
    return torch.zeros(length, dtype=torch.float64, device=planned.device)


def number_of(name: str, parameter: Tensor, source: GradientSource) -> int:
    """Return by which norms a gradient is measured: 0 for the usual ones, else 1 + its index in ``norms_apart``.

    Raises:
        LayoutError: the source names a norm that it does not list, so that other ranks may not know of it.
    """
    apart = source.norm_apart(parameter)
    if apart is None:
        return 0
    if apart not in source.norms_apart:
        found = f"norm_apart() = {apart!r}"
        needed = f"one of the names in norms_apart: {', '.join(source.norms_apart) or 'it has none'}"
        write = "Correct norm_apart() of the GradientSource, or its norms_apart"
        raise LayoutError(explain_error(name, found, needed, write))
    return 1 + list(source.norms_apart).index(apart)


def norms_of(sums: Tensor, number: int = 0) -> dict[str, Tensor]:
    """Return the norms "total", "muon" and "adamw" of the vector, 0-d fp64 each; or of what is measured apart."""
    muon, adamw = sums[INVARIANT + 2 * number], sums[FELT + 2 * number]
    return {"total": (muon + adamw).sqrt(), "muon": muon.sqrt(), "adamw": adamw.sqrt()}


def add_squares(
    planned: Planned,
    groups: Sequence[Mapping[str, Any]],
    source: GradientSource,
    measured: set[int],
    sums: Tensor,
    *,
    matrices: bool,
) -> Exception | None:
    """Add the squares of the gradients stored here to the sums.

    Where n ranks store the same elements, each adds 1/n of their squares, so that every element counts once.

    Args:
        planned: The plan whose gradients are measured.
        groups: The param groups.
        source: Where they are.
        measured: The halves to measure, as places in the sums.
        sums: fp64 vector, written: see `ERRORS` and what follows it.
        matrices: Whether to tell the matrices apart.

    Returns:
        The first thing that is wrong with a gradient. The others are still read: ranks may sum a partial one together.
    """
    error: Exception | None = None
    found = list[tuple[int, Tensor, int]]()  # a place in the sums, elements of a gradient, how many ranks store them
    gradients, norm_of = dict[int, Tensor](), dict[int, int]()
    first = matrices_from(source)
    for number, member in [*enumerate(planned.muon), *((-1, member) for some in planned.adamw for member in some)]:
        if member is None or (half := half_of(groups[member.group])) not in measured:
            continue
        if not source.counted(member.tensor):
            continue
        try:
            gradient = whole_gradient(member.name, member.tensor, source)
            half += 2 * number_of(member.name, member.tensor, source)
        except (LayoutError, TypeError) as wrong:
            error = error or wrong
            continue
        if gradient is None:
            continue
        if matrices and number >= 0:
            gradients[number], norm_of[number] = gradient.contiguous(), half
            continue
        storage = member.gradient_storage
        found += [(half, part, storage.copies) for part in storage.parts(gradient)]
    for matrix, (assignment, pieces) in enumerate(
        zip(planned.plan.assignments, planned.gradient_holdings, strict=True)
    ):
        if assignment.parameter in gradients:
            member = planned.muon[assignment.parameter]
            assert member is not None
            gradient, copied = gradients[assignment.parameter], member.gradient_storage.copies
            found += [(first + matrix, view_in_storage(gradient, piece), copied) for piece in pieces]
    if found:
        places, parts, copies = zip(*found, strict=True)
        index = upload(places, dtype=torch.int64, device=sums.device)
        stored_by = upload(copies, dtype=torch.float64, device=sums.device)
        sums.index_add_(0, index, sums_of_squares(parts) / stored_by)
    # Of a matrix that is not held here nothing has been added, so it may count anywhere.
    halves = [norm_of.get(assignment.parameter, INVARIANT) for assignment in planned.plan.assignments]
    for half in dict.fromkeys(halves) if matrices else ():
        which = [first + matrix for matrix, its in enumerate(halves) if its == half]
        sums[half] += sums[upload(which, dtype=torch.int64, device=sums.device)].sum()
    return error


def reduce_squares(
    sums: Tensor,
    exchange: Exchange,
    source: GradientSource,
    group: dist.ProcessGroup | None,
    *,
    matrices: bool,
    slots: Slots | None = None,
) -> None:
    """Add the sums up over the ranks, in place: over the connected set, and over the sets that meet in a group.

    Where all of the set is in the group, one reduction over the group does both for the head of the vector. Else the
    ranks of the set that are in the group share out what all of the set have added up.

    Args:
        sums: The vector.
        exchange: Of the connected set.
        source: Where gradients are.
        group: Of other sets to be clipped with; None: there are none.
        matrices: Whether to add up the squares of the matrices too, which each set has for itself.
        slots: Where the sum over the group has room for those of this set; None: they take a sum of their own.
    """
    first = matrices_from(source)
    if slots is not None:
        told = torch.cat([sums[:first], sums.new_zeros(slots.total)])
        count = len(sums) - first if matrices else 0
        its, own = told[first + slots.first :][:count], sums[first:][:count]
        its.copy_(own)
        dist.all_reduce(told, group=group)
        sums[:first], own[:] = told[:first], its
        return
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    here = sum(rank in exchange.plan.ranks for rank in ranks)
    if here == len(ranks):  # the same length under every policy, so that unequal ones do not wait for each other
        exchange.reduce_sums(sums)
        return
    head, whole = sums[:first], here == len(exchange.plan.ranks)
    if not whole:
        exchange.reduce_sums(head)
        head /= here
    dist.all_reduce(head, group=group)
    if matrices and not bool(stops(sums)):
        exchange.reduce_sums(sums[first:])


def unequal(sums: Tensor) -> Tensor:
    """Return whether ranks were given different arguments, 0-d bool."""
    ranks, alike, squared = (sums[place].round().long() for place in (RANKS, ALIKE, SQUARED))
    return ranks * squared != alike**2  # for whole numbers, n Σd² = (Σd)² says that all are equal


def stops(sums: Tensor) -> Tensor:
    """Return whether nothing is to be scaled, 0-d bool, the same on all ranks that have added up."""
    return (sums[ERRORS] != 0) | (sums[REPLAN] != 0) | unequal(sums)
