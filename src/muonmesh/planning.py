"""Planning: from param groups to a Plan, read off the parameters without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.storage import Signature, connected_ranks, layout_of, this_rank, world_size
from muonmesh.errors import LayoutError
from muonmesh.layout import Parameter, Plan, cost, make_plan, split_matrices
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.newton_schulz import resolve_method
from muonmesh.settings import LOST_GROUP, ProcessGroup
from muonmesh.step import Holdings, Precision, holdings_of


@dataclass(frozen=True)
class Member:
    """One parameter with what its group, number ``group``, says of it."""

    name: str
    tensor: Tensor
    group: int
    spec: Any


@dataclass
class Planned:
    """What was read off the parameters, valid while their signature stays the same.

    It keeps the parameters alive, so that a new one cannot take an old one's identity.

    Attributes:
        signature: See `signature_of`.
        muon: Members of the Muon groups, as the plan's parameters are numbered.
        adamw: Members of each group that is AdamW's; empty for the others.
        plan: Who orthogonalises what.
        rank: This process.
        holdings: The pieces of each Matrix that are stored here.
        device: Of the Muon parameters, or of the first parameter if there are none.
        exchange: Made when the ranks have compared their plans.
    """

    signature: object
    muon: tuple[Member, ...]
    adamw: tuple[tuple[Member, ...], ...]
    plan: Plan
    rank: int
    holdings: Holdings
    device: torch.device
    exchange: Exchange | None = None


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Return the parameters of all groups in order."""
    return [
        Member(name, tensor, number, spec)
        for number, group in enumerate(groups)
        for name, tensor, spec in zip(
            group["param_names"],
            group["params"],
            group.get("matrices") or [None] * len(group["params"]),
            strict=True,
        )
    ]


def signature_of(groups: Sequence[Mapping[str, Any]], members: Sequence[Member], process_group: ProcessGroup) -> object:
    """Return what must stay the same for a plan to stay valid; read every step, so it is cheap."""
    return (
        process_group,
        tuple((member.group, Signature.of(member.tensor)) for member in members),
        tuple((str(g["ns_coefficients"]), g["ns_steps"], g["ns_method"], id(g.get("matrices"))) for g in groups),
    )


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
    process_group: ProcessGroup,
    precision: Precision,
    bucket_cap_mb: float,
) -> Planned:
    """Read the layouts and make the plan.

    Raises:
        LayoutError: a parameter is held in a way that cannot be mapped to whole matrices.
    """
    replicas = replicas_of(process_group)
    muon = tuple(member for member in members if groups[member.group]["algorithm"] == "muon")
    devices = {member.tensor.device for member in muon}
    if len(devices) > 1:
        raise LayoutError(
            f"found Muon parameters on {sorted(map(str, devices))}; needed one device per process. "
            "Give each device an optimizer of its own"
        )
    plan = make_plan(
        [_parameter(groups[member.group], member, replicas, precision.compute) for member in muon],
        ranks=connected_ranks([member.tensor for member in members], replicas),
        bucket_elements=max(1, int(bucket_cap_mb * 2**20 / precision.compute.itemsize)),
    )
    adamw = tuple(
        tuple(m for m in members if m.group == number and group["algorithm"] == "adamw")
        for number, group in enumerate(groups)
    )
    rank = this_rank()
    device = (muon or members)[0].tensor.device
    signature = signature_of(groups, members, process_group)
    return Planned(signature, muon, adamw, plan, rank, holdings_of(plan, rank), device)


def _parameter(
    group: Mapping[str, Any], member: Member, replicas: Sequence[int] | None, dtype: torch.dtype
) -> Parameter:
    layout = layout_of(member.name, member.tensor, replicas)
    matrices = split_matrices(member.name, tuple(member.tensor.shape), member.spec)
    degrees = [len(step) for step in coefficient_schedule(group["ns_coefficients"], group["ns_steps"])]
    flops = {  # most parameters are many matrices of few shapes
        shape: cost(*shape, degrees=degrees, gram=method_of(group, *shape, dtype) == "gram")
        for shape in {(matrix.rows, matrix.cols) for matrix in matrices}
    }
    settings = f"{group['ns_coefficients']}, {group['ns_steps']} steps, {group['ns_method']}, {dtype}"
    return Parameter(
        member.name, layout, layout, matrices, tuple(flops[matrix.rows, matrix.cols] for matrix in matrices), settings
    )
