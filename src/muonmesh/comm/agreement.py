"""Agreement: checks that all ranks of a connected set made the same plan, and makes their process groups."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from muonmesh.comm.meeting import seconds_of_collectives
from muonmesh.comm.telling import tell_all
from muonmesh.errors import PlanError, about, explain_error
from muonmesh.layout import Elementwise, Parameter, Plan
from muonmesh.layout.parameter import describe

CHECKSUM = " with the checksum "
"""Stands between the name of a tensor and its checksum in a line of `insist_on_equal`."""

_made: Counter[tuple[int, ...]] = Counter()
"""Number of process groups that this process has made for each set of ranks; equal on all ranks of the set."""

_kept: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""The process groups that optimizers use, by their ranks."""


class View(NamedTuple):
    """The parameters of one rank, which it sends to the other ranks of its connected set."""

    parameters: tuple[Parameter, ...]
    elementwise: tuple[Elementwise, ...]


def insist_on_equal(group: dist.ProcessGroup | None, lines: Mapping[str, str]) -> None:
    """Raise an error on every rank of a group that names the first difference; called when digests differ.

    Args:
        group: The ranks; None for one rank.
        lines: The settings, and the checksums if the step compares them, of each parameter on this rank as text, by
            the parameter's name.

    Raises:
        PlanError: always.
    """
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    everyone = tell_all(dict(lines), group=group)
    for name in dict.fromkeys(name for some in everyone for name in some):
        told = {rank: some[name] for rank, some in zip(ranks, everyone, strict=True) if name in some}
        first, *rest = told
        other = next((rank for rank in rest if told[rank] != told[first]), None)
        if other is not None:
            mine, theirs = _difference(told[first], told[other])
            found = f"{mine} on rank {first} and {theirs} on rank {other}"
            needed = "the same settings and dtypes on every rank that holds it"
            write = "Set the groups alike on every rank; a schedule must not depend on the rank"
            if mine.startswith("state loaded=") or CHECKSUM in mine:
                needed = "the same weights and state on every rank that holds it"
                write = "Seed alike before you build the model, or broadcast its weights. Load state on every rank"
            raise PlanError(explain_error(name, found, needed, write))
    what = "The settings of the param groups differ between ranks. Set them alike on every rank"
    raise PlanError(about("the groups", what))


def union(group: dist.ProcessGroup | None, names: Sequence[str]) -> list[str]:
    """Return the names of all ranks of a group, each name once and in the same order on every rank."""
    return list(dict.fromkeys(name for some in tell_all(list(names), group=group) for name in some))


def merged(views: Sequence[View], ranks: Sequence[int]) -> View:
    """Return all parameters of a connected set.

    Args:
        views: The parameters of each rank.
        ranks: The ranks of the connected set, in the order of ``views``.

    Raises:
        PlanError: a rank lacks a parameter that it shares according to another rank, or describes it differently. The
            message names the first difference.
    """
    lines = [{_key(p): describe(p) for some in view for p in some} for view in views]
    place = {rank: number for number, rank in enumerate(ranks)}
    everything = {_key(p): p for view in views for some in view for p in some}
    for key, parameter in everything.items():
        told = {rank: lines[place[rank]].get(key) for rank in parameter.target.ranks if rank in place}
        if len(set(told.values())) > 1:
            first, *rest = told
            other = next(rank for rank in rest if told[rank] != told[first])
            a, b = lines[place[first]], lines[place[other]]
            raise _first_difference(first, list(a.values()), other, list(b.values()))
    if all(list(a) == list(lines[0]) for a in lines):
        return views[0]
    names = sorted(everything)
    return View(
        tuple(p for key in names if isinstance(p := everything[key], Parameter)),
        tuple(p for key in names if isinstance(p := everything[key], Elementwise)),
    )


def insist(group: dist.ProcessGroup | None, plan: Plan) -> None:
    """Check that all ranks of a group made the same plan.

    Raises:
        PlanError: the plans differ. Every rank raises this error, which names the first difference.
    """
    if len(set(tell_all(plan.digest, group=group))) > 1:
        descriptions, ranks = tell_all(plan.description(), group=group), dist.get_process_group_ranks(group)
        other = next(i for i, lines in enumerate(descriptions) if lines != descriptions[0])
        raise _first_difference(ranks[0], descriptions[0], ranks[other], descriptions[other])


def _difference(a: str, b: str) -> tuple[str, str]:
    """Return the first pair of entries that differ between two lines; the entries are separated by ", " and a letter.

    The numbers of a tuple, such as AdamW's betas, are one entry.
    """
    pairs = zip(*(re.split(r", (?=[A-Za-z_])", line) for line in (a, b)), strict=False)
    return next(((one, two) for one, two in pairs if one != two), (a, b))


def _key(parameter: Parameter | Elementwise) -> tuple[str, tuple[int, ...]]:
    return parameter.name, tuple(parameter.target.ranks)


def _first_difference(a: int, lines_a: list[str], b: int, lines_b: list[str]) -> PlanError:
    pairs = itertools.zip_longest(lines_a, lines_b, fillvalue="nothing more")
    found = next((pair for pair in pairs if pair[0] != pair[1]), ("?", "?"))
    what = f"Rank {a} has '{found[0]}', where rank {b} has '{found[1]}'. Every rank needs the same parameters, in the "
    what += "same order, with the same settings. Build the model and the param groups in the same way on every rank"
    return PlanError(about("the plans differ", what))


def group_of(ranks: Sequence[int], candidates: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks: a candidate, the default group, or a new group.

    Only the members make a new group (``use_local_synchronization``); other ranks do not take part. The group is kept
    for the next optimizer, because each group costs threads or a communicator. None for a single rank.
    """
    if len(ranks) == 1:
        return None
    for candidate in (*candidates, dist.group.WORLD):
        if candidate is not None and sorted(dist.get_process_group_ranks(candidate)) == sorted(ranks):
            return candidate
    key = tuple(sorted(ranks))
    if _kept.get(key) not in distributed_c10d._world.pg_map:  # there is no group, or it has been destroyed
        _kept[key] = new_group(ranks)
    return _kept[key]


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group with the timeout of the default group. All members, and no other ranks, call this.

    With local synchronization, torch derives the group's name from its ranks and from the number of groups of this
    process. If one member is in more groups than another, the two would wait for each other under different names
    forever. So this function gives the group the same name on all members.
    """
    key, timeout = tuple(sorted(ranks)), timedelta(seconds=seconds_of_collectives())
    honest: Any = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    name = f"muonmesh {key} {_made[key]}"
    _made[key] += 1
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        made: dist.ProcessGroup = dist.new_group(key, timeout, backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = honest
    return made


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that can reduce CPU tensors: ``group``, or a new group of all its ranks."""
    takes = "cpu:" in dist.get_backend_config(group)
    return group if takes else new_group(dist.get_process_group_ranks(group), "gloo")
