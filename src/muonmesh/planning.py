"""Planning: from param groups to a Plan, read off the parameters without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.census import Census
from muonmesh.comm.agreement import View, merged
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.storage import (
    Declared,
    Signature,
    Storage,
    connected_ranks,
    layout_of,
    ranks_of,
    sharded_over_replicas,
    this_rank,
    world_size,
)
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Elementwise, FlatParameter, Parameter, Plan, Rates, cost, make_plan, split_matrices
from muonmesh.layout.gram import fits, is_cheaper
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.newton_schulz import gram_segments, resolve_method
from muonmesh.settings import LOST_GROUP, LOST_LAYOUTS, ExchangeMode, ProcessGroup
from muonmesh.slots import Holdings, Precision, holdings_of


@dataclass(frozen=True)
class Member:
    """One parameter with what its group, number ``group``, says of it; several may share one flat tensor.

    Attributes:
        name: Canonical name.
        tensor: What the user holds.
        group: Number of its group.
        spec: How it splits into matrices.
        storage: Where it lives.
        state: Where its momentum lives: there too, or shared among the replicas.
    """

    name: str
    tensor: Tensor
    group: int
    spec: Any
    storage: Storage
    state: Storage


@dataclass
class Planned:
    """What was read off the parameters, valid while their signature stays the same.

    It keeps the parameters alive, so that a new one cannot take an old one's identity.

    Attributes:
        signature: See `signature_of`.
        muon: Members of the Muon groups, as the plan's parameters are numbered; None for one that only other ranks
            of the connected set hold.
        others: Members of the AdamW groups likewise.
        adamw: All members of each group that is AdamW's; empty for the others.
        plan: Who orthogonalises what.
        rank: This process.
        holdings: The pieces of each Matrix that are stored here.
        state_holdings: Those whose momentum is stored here.
        device: Of the Muon parameters, or of the first parameter if there are none; the CPU without any.
        exchange: Made when the ranks have compared their plans.
    """

    signature: object
    muon: tuple[Member | None, ...]
    others: tuple[Member | None, ...]
    adamw: tuple[tuple[Member, ...], ...]
    plan: Plan
    rank: int
    holdings: Holdings
    state_holdings: Holdings
    device: torch.device
    exchange: Exchange | None = None

    @cached_property
    def census(self) -> Census:
        """Where the flags of each parameter stand."""
        return Census.of(self.plan, self.rank)

    @cached_property
    def matrices_of(self) -> dict[Tensor, tuple[int, ...]]:
        """For each tensor of the Muon half on this rank the numbers of its matrices' assignments, in order."""
        numbers = {(a.parameter, a.matrix.index): number for number, a in enumerate(self.plan.assignments)}
        found: dict[Tensor, tuple[int, ...]] = {}
        for parameter, member in enumerate(self.muon):
            if member is not None:
                matrices = self.plan.parameters[parameter].matrices
                found[member.tensor] = found.get(member.tensor, ()) + tuple(
                    numbers[parameter, m.index] for m in matrices
                )
        return found

    @property
    def members(self) -> list[Member]:
        """All parameters of this rank, the Muon half first."""
        return [member for member in self.muon if member is not None] + [m for some in self.adamw for m in some]


def members_of(
    groups: Sequence[Mapping[str, Any]],
    replicas: Sequence[int] | None,
    layouts: Mapping[str, Declared],
    group: dist.ProcessGroup | None,
    *,
    shard_state: bool,
) -> tuple[list[Member], list[tuple[int, ...]], Exception | None]:
    """Return the parameters of all groups in order, with where they live.

    Returns:
        The members; the sets of ranks that share one; and the first error, since even a rank that found one must meet
        the others: a parameter is held in a way that is unknown or not as declared, or an entry of ``layouts`` fits no
        name.
    """
    if layouts == LOST_LAYOUTS:
        raise ValueError(
            "layouts: found an optimizer that was unpickled without its layouts, since meshes cannot be pickled; "
            "needed them again. Write optimizer.layouts = layouts before the first step"
        )
    members: list[Member] = []
    sets: list[tuple[int, ...]] = []
    error: Exception | None = None
    unknown = dict(layouts)
    known: set[tuple[str, tuple[int, ...]]] = set()
    for number, settings in enumerate(groups):
        muon = settings["algorithm"] == "muon"
        specs = settings.get("matrices") or [None] * len(settings["params"])
        for name, tensor, spec in zip(settings["param_names"], settings["params"], specs, strict=True):
            declared = unknown.pop(name, None)
            for part, layout, split in _contents(name, declared, spec):
                try:
                    storage = layout_of(part, tensor, replicas, layout, needed=muon)
                except LayoutError as found:
                    error = error or found
                    sets.append(ranks_of(tensor, replicas, layout))
                    continue
                state = storage
                if shard_state and muon:
                    state = sharded_over_replicas(storage, group, tensor.device.type)
                members.append(Member(part, tensor, number, split, storage, state))
                key = part, storage.layout.ranks if storage.layout is not None else ()
                if key in known:  # by which the ranks tell each other about parameters
                    needed, write = "a name each, without wrappers' prefixes", "Rename one of them in param_names"
                    error = error or LayoutError(explain_error(part, "two parameters of this name", needed, write))
                known.add(key)
                if storage.layout is not None:
                    sets.append(storage.layout.ranks)
    if unknown:
        error = error or LayoutError(
            f"layouts: found {sorted(unknown)}; needed names of parameters in the groups. Names have no prefixes such "
            "as module. or _orig_mod."
        )
    return members, sets, error


def _contents(name: str, declared: Any, spec: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, declared layout, matrices) of each parameter that a tensor holds."""
    if isinstance(declared, (tuple, list)) and declared and all(isinstance(d, FlatParameter) for d in declared):
        return [(flat.name, flat.layout, flat.matrices) for flat in declared]
    if isinstance(declared, FlatParameter):
        return [(declared.name, declared.layout, declared.matrices if declared.matrices is not None else spec)]
    return [(name, declared, spec)]


def signature_of(
    groups: Sequence[Mapping[str, Any]], process_group: ProcessGroup, layouts: Mapping[str, Declared]
) -> object:
    """Return what must stay the same for a plan to stay valid; read every step, so it is cheap."""
    return (
        process_group,
        tuple((name, id(entry)) for name, entry in layouts.items()),
        tuple(tuple(map(Signature.of, group["params"])) for group in groups),
        tuple((str(g["ns_coefficients"]), g["ns_steps"], g["ns_method"], id(g.get("matrices"))) for g in groups),
    )


def group_for(process_group: ProcessGroup) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold plain tensors whole; None for one rank or if nobody said."""
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    return dist.group.WORLD if process_group == "world" and world_size() > 1 else None


def replicas_of(process_group: ProcessGroup) -> tuple[int, ...] | None:
    """Return the ranks that hold plain tensors whole, or None if nobody said.

    Raises:
        ValueError: the group was lost in pickling.
    """
    if process_group == LOST_GROUP:
        raise ValueError(
            "process_group: found an optimizer that was unpickled without its ProcessGroup, which cannot be "
            "pickled; needed it again. Write optimizer.process_group = group before the first step"
        )
    if process_group == "local" or (process_group is not None and world_size() == 1):
        return (this_rank(),)
    if process_group == "world":
        return tuple(range(world_size()))
    if isinstance(process_group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(process_group))
    return None


def method_of(group: Mapping[str, Any], rows: int, cols: int, dtype: torch.dtype) -> Literal["standard", "gram"]:
    """Return how a group orthogonalises a rows × cols matrix.

    Raises:
        ValueError: the method it asks for cannot be met.
    """
    return resolve_method(
        rows,
        cols,
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        method=group["ns_method"],
        dtype=dtype,
    )


def plan_members(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
    signature: object,
    precision: Precision,
    bucket_cap_mb: float,
    exchange: ExchangeMode,
) -> Planned:
    """Make the plan of this rank's parameters.

    Raises:
        LayoutError: a parameter is held in a way that cannot be mapped to whole matrices.
    """
    muon = tuple(member for member in members if groups[member.group]["algorithm"] == "muon")
    devices = {member.tensor.device for member in muon}
    if len(devices) > 1:
        raise LayoutError(
            f"found Muon parameters on {sorted(map(str, devices))}; needed one device per process. "
            "Give each device an optimizer of its own"
        )
    others = tuple(m for m in members if groups[m.group]["algorithm"] == "adamw" and m.storage.layout is not None)
    parameters = [_parameter(groups[member.group], member, precision.compute) for member in muon]
    plan = make_plan(
        parameters,
        ranks=connected_ranks([member.storage for member in members]),
        bucket_elements=bucket_elements(bucket_cap_mb, precision),
        others=[Elementwise(m.name, m.storage.layout) for m in others if m.storage.layout is not None],
        grams=grams_of(parameters, exchange, precision),
    )
    adamw = tuple(
        tuple(m for m in members if m.group == number and group["algorithm"] == "adamw")
        for number, group in enumerate(groups)
    )
    device = next((member.tensor.device for member in (*muon, *members)), torch.device("cpu"))
    return _planned(signature, muon, others, adamw, plan, device)


def grams_of(parameters: Sequence[Parameter], exchange: ExchangeMode, precision: Precision) -> set[tuple[int, int]]:
    """Return the (parameter, index) of the matrices whose Gram matrices are summed: those that fit, if asked for."""
    if exchange == "owner":
        return set()
    rates = exchange if isinstance(exchange, Rates) else Rates()
    return {
        (number, matrix.index)
        for number, parameter in enumerate(parameters)
        for matrix, flops in zip(parameter.matrices, parameter.flops, strict=True)
        if parameter.segments
        and fits(parameter, matrix)
        and (exchange == "gram" or is_cheaper(parameter, matrix, flops, precision.compute.itemsize, rates))
    }


def widened(
    planned: Planned,
    views: Sequence[View],
    ranks: Sequence[int],
    precision: Precision,
    bucket_cap_mb: float,
    exchange: ExchangeMode,
) -> Planned:
    """Return the plan of a connected set whose ranks hold different parameters, from what each of them holds.

    Raises:
        PlanError: a rank lacks a parameter that another one says it holds, or sees it differently.
    """
    parameters, others = merged(views, ranks)
    mine = {
        (member.name, member.storage.layout.ranks): member
        for member in (*planned.muon, *planned.others)
        if member is not None and member.storage.layout is not None
    }
    grams = grams_of(parameters, exchange, precision)
    elements = bucket_elements(bucket_cap_mb, precision)
    plan = make_plan(parameters, ranks=ranks, bucket_elements=elements, others=others, grams=grams)

    def own(parameter: Parameter | Elementwise) -> Member | None:
        return mine.get((parameter.name, parameter.target.ranks)) if planned.rank in parameter.target.ranks else None

    muon, rest = tuple(map(own, parameters)), tuple(map(own, others))
    return _planned(planned.signature, muon, rest, planned.adamw, plan, planned.device)


def _planned(
    signature: object,
    muon: tuple[Member | None, ...],
    others: tuple[Member | None, ...],
    adamw: tuple[tuple[Member, ...], ...],
    plan: Plan,
    device: torch.device,
) -> Planned:
    rank = this_rank()
    holdings = holdings_of(plan, rank, state=False)
    shared = any(parameter.source is not parameter.target for parameter in plan.parameters)
    state_holdings = holdings_of(plan, rank, state=True) if shared else holdings
    return Planned(signature, muon, others, adamw, plan, rank, holdings, state_holdings, device)


def bucket_elements(bucket_cap_mb: float, precision: Precision) -> int:
    """Return how many elements one owner computes at a time."""
    return max(1, int(bucket_cap_mb * 2**20 / precision.compute.itemsize))


def _parameter(group: Mapping[str, Any], member: Member, dtype: torch.dtype) -> Parameter:
    assert member.storage.layout is not None
    assert member.state.layout is not None
    matrices = split_matrices(member.name, member.storage.shape, member.spec)
    degrees = [len(step) for step in coefficient_schedule(group["ns_coefficients"], group["ns_steps"])]
    flops = {  # most parameters are many matrices of few shapes
        shape: cost(*shape, degrees=degrees, gram=method_of(group, *shape, dtype) == "gram")
        for shape in {(matrix.rows, matrix.cols) for matrix in matrices}
    }
    settings = f"{group['ns_coefficients']}, {group['ns_steps']} steps, {group['ns_method']}, {dtype}"
    each = tuple(flops[matrix.rows, matrix.cols] for matrix in matrices)
    segments = len(gram_segments(group["ns_coefficients"], group["ns_steps"]))
    return Parameter(member.name, member.state.layout, member.storage.layout, matrices, each, settings, segments)
