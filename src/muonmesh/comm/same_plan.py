"""Same plan: checks that all ranks of a connected set have made the same plan, and names the first difference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from muonmesh.comm.gather_objects import gather_objects, gather_objects_by_rank
from muonmesh.errors import PlanError, about, explain_error
from muonmesh.layout import Elementwise, Parameter, Plan
from muonmesh.layout.parameter import describe

CHECKSUM = " with the checksum "
"""Stands between the name of a tensor and its checksum in a line of `insist_on_equal`."""


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
    everyone = gather_objects_by_rank(dict(lines), group=group)
    for name in dict.fromkeys(name for lines_of_rank in everyone.values() for name in lines_of_rank):
        line_by_rank = {rank: lines_of_rank[name] for rank, lines_of_rank in everyone.items() if name in lines_of_rank}
        first, *rest = line_by_rank
        other = next((rank for rank in rest if line_by_rank[rank] != line_by_rank[first]), None)
        if other is not None:
            entry, other_entry = _difference(line_by_rank[first], line_by_rank[other])
            problem = f"{entry} on rank {first} and {other_entry} on rank {other}"
            needed = "the same settings and dtypes on every rank that holds it"
            write = "Set the groups alike on every rank; a schedule must not depend on the rank"
            if entry.startswith("state loaded=") or CHECKSUM in entry:
                needed = "the same weights and state on every rank that holds it"
                write = "Seed alike before you build the model, or broadcast its weights. Load state on every rank"
            raise PlanError(explain_error(name, problem, needed, write))
    text = "The settings of the param groups differ between ranks. Set them alike on every rank"
    raise PlanError(about("the groups", text))


def union(group: dist.ProcessGroup | None, names: Sequence[str]) -> list[str]:
    """Return the names of all ranks of a group, each name once and in the same order on every rank."""
    names_by_rank = gather_objects(list(names), group=group)
    return list(dict.fromkeys(itertools.chain.from_iterable(names_by_rank)))


def merged(views: Sequence[View], ranks: Sequence[int]) -> View:
    """Return all parameters of a connected set.

    Args:
        views: The parameters of each rank.
        ranks: The ranks of the connected set, in the order of ``views``.

    Raises:
        PlanError: a rank lacks a parameter that it shares according to another rank, or describes it differently. The
            message names the first difference.
    """
    lines = [{_key(p): describe(p) for parameters_of_kind in view for p in parameters_of_kind} for view in views]
    number_of = {rank: number for number, rank in enumerate(ranks)}
    by_key = {_key(p): p for view in views for parameters_of_kind in view for p in parameters_of_kind}
    for key, parameter in by_key.items():
        line_by_rank = {rank: lines[number_of[rank]].get(key) for rank in parameter.target.ranks if rank in number_of}
        if len(set(line_by_rank.values())) > 1:
            first, *rest = line_by_rank
            other = next(rank for rank in rest if line_by_rank[rank] != line_by_rank[first])
            a, b = lines[number_of[first]], lines[number_of[other]]
            raise _first_difference(first, list(a.values()), other, list(b.values()))
    if all(list(a) == list(lines[0]) for a in lines):
        return views[0]
    names = sorted(by_key)
    return View(
        tuple(p for key in names if isinstance(p := by_key[key], Parameter)),
        tuple(p for key in names if isinstance(p := by_key[key], Elementwise)),
    )


def insist(group: dist.ProcessGroup | None, plan: Plan) -> None:
    """Check that all ranks of a group made the same plan.

    Raises:
        PlanError: the plans differ. Every rank raises this error, which names the first difference.
    """
    if len(set(gather_objects(plan.digest, group=group))) > 1:
        (first, lines), *rest = gather_objects_by_rank(plan.description(), group=group).items()
        raise next(_first_difference(first, lines, rank, others) for rank, others in rest if others != lines)


def _difference(a: str, b: str) -> tuple[str, str]:
    """Return the first pair of entries that differ between two lines; the entries are separated by ", " and a letter.

    The numbers of a tuple, such as AdamW's betas, are one entry.
    """
    pairs = zip(*(re.split(r", (?=[A-Za-z_])", line) for line in (a, b)), strict=False)
    return next(((entry, two) for entry, two in pairs if entry != two), (a, b))


def _key(parameter: Parameter | Elementwise) -> tuple[str, tuple[int, ...]]:
    return parameter.name, tuple(parameter.target.ranks)


def _first_difference(a: int, lines_a: list[str], b: int, lines_b: list[str]) -> PlanError:
    pairs = itertools.zip_longest(lines_a, lines_b, fillvalue="nothing more")
    difference = next((pair for pair in pairs if pair[0] != pair[1]), ("?", "?"))
    text = f"Rank {a} has '{difference[0]}', where rank {b} has '{difference[1]}'. Every rank needs the same "
    text += "parameters, in the same order, with the same settings. Build the model and the param groups in the "
    text += "same way on every rank"
    return PlanError(about("the plans differ", text))
