"""Agreement: whether all ranks that belong together made the same plan, and the process groups in which they step."""

from __future__ import annotations

import itertools
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

_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made of each set of ranks; equal on all ranks of the set."""

_kept: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""The groups in which optimizers step."""


class View(NamedTuple):
    """The parameters that one rank holds, as it tells them to the ranks of its connected set."""

    parameters: tuple[Parameter, ...]
    elementwise: tuple[Elementwise, ...]


def agree_on_plan(group: dist.ProcessGroup | None, plan: Plan | None, error: Exception | None) -> list[View] | None:
    """Make sure that no rank of a group found an error, and that all have the same plan.

    A rank that could not make a plan passes None and its error; every rank then raises instead of waiting.

    Returns:
        None if the plans are the same, else what each rank of the group holds, for `merged`.

    Raises:
        Exception: ``error``, on the rank that found it.
        PlanError: on the others, naming that rank and its error.
    """
    if len(set(tell_all(None if plan is None else plan.digest, error, group=group))) == 1:
        return None
    assert plan is not None
    return tell_all(View(plan.parameters, plan.elementwise), group=group)


def insist_on_equal(group: dist.ProcessGroup | None, lines: Mapping[str, str]) -> None:
    """Raise on every rank of a group what the ranks have set differently; called when digests have shown a difference.

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
            raise PlanError(explain_error(name, found, needed, write))
    what = "The settings of the param groups differ between ranks. Set them alike on every rank"
    raise PlanError(about("the groups", what))


def union(group: dist.ProcessGroup | None, names: Sequence[str]) -> list[str]:
    """Return the names that the ranks of a group have, each once and in the same order everywhere."""
    return list(dict.fromkeys(name for some in tell_all(list(names), group=group) for name in some))


def merged(views: Sequence[View], ranks: Sequence[int]) -> View:
    """Return all parameters of a connected set, from what each of its ranks holds.

    Raises:
        PlanError: a rank lacks a parameter that another one says it shares, or sees it differently; the
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
    """Make sure that all ranks of a group made the same plan.

    Raises:
        PlanError: on every rank, naming the first difference.
    """
    if len(set(tell_all(plan.digest, group=group))) > 1:
        descriptions, ranks = tell_all(plan.description(), group=group), dist.get_process_group_ranks(group)
        other = next(i for i, lines in enumerate(descriptions) if lines != descriptions[0])
        raise _first_difference(ranks[0], descriptions[0], ranks[other], descriptions[other])


def _difference(a: str, b: str) -> tuple[str, str]:
    """Return the first entries in which two lines differ."""
    pairs = zip(a.split(", "), b.split(", "), strict=False)
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
    """Return a process group of exactly these ranks: one of the candidates, the world, or a new one.

    A new group is made by its members alone (``use_local_synchronization``), ranks outside do not take part, and kept
    for the next optimizer, since each costs threads or a communicator.
    """
    if len(ranks) == 1:
        return None
    for candidate in (*candidates, dist.group.WORLD):
        if candidate is not None and sorted(dist.get_process_group_ranks(candidate)) == sorted(ranks):
            return candidate
    key = tuple(sorted(ranks))
    if _kept.get(key) not in distributed_c10d._world.pg_map:  # there is none, or it has been destroyed
        _kept[key] = new_group(ranks)
    return _kept[key]


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group that waits as long as the default one, made by its members alone; all call this.

    With local synchronization torch makes its name of the ranks and the number of groups that this process is in. Where
    one member is in more groups than another, they would wait for each other under different names for ever. So all
    ranks are made to give it the same name.
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
    """Return a group of the same ranks that reduces tensors of hosts: this one, or a new one, made by all of them."""
    takes = "cpu:" in dist.get_backend_config(group)
    return group if takes else new_group(dist.get_process_group_ranks(group), "gloo")
