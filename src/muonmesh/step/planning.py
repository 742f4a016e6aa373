"""Planning: makes the plan of a step from the parameters of all groups, without communication."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.ranks import connected_ranks, device_without_parameters
from muonmesh.comm.same_plan import View, merged, union
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Elementwise, Parameter, Piece, Plan, cost, occupied, split_matrices
from muonmesh.layout.piece_table import NOWHERE, PieceTable
from muonmesh.numerics.coefficients import CoefficientName, Coefficients, choose, coefficient_schedule, coefficient_set
from muonmesh.numerics.kernels import check_kernels, told_products
from muonmesh.numerics.newton_schulz import Orthogonalizer, form_of
from muonmesh.numerics.rules import Rule, rule_of
from muonmesh.step.flag_vector import FlagVector
from muonmesh.step.int8_momentum import Blocks
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.state_layout import Precision
from muonmesh.step.state_placement import with_owners, with_state_layouts

Planner = Callable[..., Plan]
"""`make_plan` with the settings of an optimizer: its memory budget, owners that keep state, and ranks of a machine."""

Orthogonalizers = dict[tuple[int, tuple[int, int]], Orthogonalizer]
"""The orthogonalizer of matrices, by the number of their group and their shape as assembled."""


class ElementwiseTensor(NamedTuple):
    """A tensor that an elementwise rule steps, once, whether it holds one parameter of the group or is a flat buffer.

    Attributes:
        member: The parameter; of a flat buffer, one of them.
        parameters: The number of parameters.
        places: Where they lie in a flat buffer that has more than them, such as padding; None if they fill it.
    """

    member: OptimizedParameter
    parameters: int
    places: tuple[slice, ...] | None


@dataclass
class StepPlan:
    """The plan of an optimizer, with the facts about its parameters; valid while their signature stays the same.

    This object keeps the parameters alive, so that a new one cannot take an old one's identity.

    Attributes:
        signature: The facts that the plan was made for (`muonmesh.step.connection.Signature`).
        muon: Members of the Muon groups in the order of the plan; None for a parameter that only other ranks of the
            connected set hold.
        elementwise: Members of the AdamW groups whose ranks are known, in the order of the plan. Ranks agree on their
            gradients and settings. None for a parameter that only other ranks of the connected set hold.
        adamw: For each param group all its members if its rule is elementwise, else an empty tuple. All are stepped.
        plan: The plan with the owner of each matrix.
        rank: The rank of this process.
        device: The device of Muon's parameters, or of the first parameter if there are none. Without parameters see
            `device_without_parameters`.
        orthogonalizers: The orthogonalizers of each Muon group of this rank, by group and shape.
        connected: Whether the ranks have compared their plans.
        exchange: The exchange that runs the plan; set when they have.
        vectors: Vectors on the device with an entry for each matrix, with what they were made of, and the search for
            gradients of zero (`by_kernel.vectors_of_stream`).
        snapshot: The parameters of the last step with their state, which it has left in the forms in which steps use
            them (`parameters.Snapshot`).
        collected: The parameters of the last step, if the next step may use all of them again (`parameters.Collected`).
        state_forms: The forms of the state of each parameter, by the identity of its OptimizedParameter, and by whether
            it has master weights (`OptimizedParameter.forms`).
        said_of_settings: What this rank has last said of its settings, after what that was made of
            (`replicas.said_of_settings`).
    """

    signature: Any
    muon: tuple[OptimizedParameter | None, ...]
    elementwise: tuple[OptimizedParameter | None, ...]
    adamw: tuple[tuple[OptimizedParameter, ...], ...]
    plan: Plan
    rank: int
    device: torch.device
    orthogonalizers: Orthogonalizers
    connected: bool = False
    exchange: Exchange = field(init=False)
    vectors: dict[str, Any] = field(default_factory=dict)
    snapshot: Any = None
    collected: Any = None
    state_forms: dict[tuple[int, bool], Any] = field(default_factory=dict)
    said_of_settings: tuple[Any, Precision, bool, bytes] | None = None
    _names: list[str] | None = field(default=None, init=False)

    def forget_steps(self) -> None:
        """Forget what the last step has found of the parameters. It holds their state."""
        self.snapshot = self.collected = None

    def orthogonalizer(self, number: int) -> Orthogonalizer:
        """Return the orthogonalizer of a matrix of which this rank stores something."""
        matrix, member = self.plan.assignments[number].matrix, self.muon[self.plan.assignments[number].parameter]
        assert member is not None
        return self.orthogonalizers[member.group, matrix.shape]

    @cached_property
    def flag_vector(self) -> FlagVector:
        """The vector of flags that ranks agree by, with the place of each parameter's flags."""
        return FlagVector(self.plan, self.rank)

    @cached_property
    def elementwise_tensors(self) -> list[list[ElementwiseTensor]]:
        """The tensors of each group with an elementwise rule that has parameters."""
        groups = list[list[ElementwiseTensor]]()
        for members in filter(None, self.adamw):
            sharing: dict[int, list[OptimizedParameter]] = {}
            for member in members:
                sharing.setdefault(id(member.tensor), []).append(member)
            tensors = list[ElementwiseTensor]()
            for parameters in sharing.values():
                places = occupied([member.storage.layout for member in parameters], self.rank)
                tensors.append(ElementwiseTensor(parameters[-1], len(parameters), places))
            groups.append(tensors)
        return groups

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The ranks of each parameter of the plan."""
        return [tuple(layout.ranks) for layout in self.plan.targets]

    @property
    def replicated(self) -> dict[Tensor, str]:
        """The names of the parameters that have replicas on several ranks, by tensor."""
        return {member.tensor: member.name for member in self.members if member.storage.copies > 1}

    def group_names(self, names: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
        """Return the group names of all ranks, in the same order on every rank; the first call communicates."""
        if self._names is None:
            self._names = union(group, names)
        return self._names

    @cached_property
    def terms(self) -> list[tuple[tuple[int, ...], str]]:
        """The fixed part of the settings that ranks with shared parameters compare, for each set of these ranks.

        Ranks may number their groups differently. So a parameter's group is identified by its place among the groups of
        the set's parameters; this place must be the same on all ranks. For each set (`FlagVector.shared`) there are
        the numbers of these groups on this rank, each once, and a digest of group and dtype of each parameter. There
        are no groups if this rank does not belong to the set.
        """
        everyone, terms = (*self.muon, *self.elementwise), []
        for numbers in self.flag_vector.shared:
            members = [member for number in numbers if (member := everyone[number]) is not None]
            groups = tuple(dict.fromkeys(member.group for member in members))
            fixed = [(groups.index(member.group), str(local_of(member.tensor).dtype)) for member in members]
            terms.append((groups, hashlib.sha256(str(fixed).encode()).hexdigest()))
        return terms

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of momentum in int8."""
        holdings: dict[Tensor, dict[int, Sequence[Piece]]] = {}
        for number, assignment in enumerate(self.plan.assignments):
            if (member := self.muon[assignment.parameter]) is not None:
                pieces = [row.piece for row in self.plan.rows(number, self.rank, gather=True)]
                holdings.setdefault(member.tensor, {})[number] = pieces
        return Blocks(self.plan, holdings, self.device)

    @cached_property
    def gradient_table(self) -> PieceTable:
        """The pieces of each Matrix whose gradient this rank has, in no buffer; its own parameters have the numbers."""
        at_momentum = any(member is not None and member.at_momentum for member in self.muon)
        places = {
            number: index for index, number in enumerate(n for n, member in enumerate(self.muon) if member is not None)
        }
        rows = []
        for number, assignment in enumerate(self.plan.assignments):
            if (index := places.get(assignment.parameter)) is not None:
                for row in self.plan.rows(number, self.rank, gather=at_momentum):
                    rows.append(replace(row.in_matrix(NOWHERE, 0), parameter=index))
        return PieceTable(tuple(rows))

    @property
    def members(self) -> list[OptimizedParameter]:
        """All parameters of this rank, Muon's parameters first."""
        return [member for member in self.muon if member is not None] + [m for members in self.adamw for m in members]


def plan_members(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[OptimizedParameter],
    signature: object,
    precision: Precision,
    planner: Planner,
) -> StepPlan:
    """Make the plan of this rank's parameters.

    Raises:
        LayoutError: Muon's parameters are on several devices, or a layout cannot be mapped to whole matrices.
    """
    members = with_state_layouts(groups, members)
    muon = tuple(member for member in members if member.is_matrix)
    devices = {member.tensor.device for member in muon}
    if len(devices) > 1:
        problem, write = f"Muon parameters on {sorted(map(str, devices))}", "Give each device an optimizer of its own"
        raise LayoutError(explain_error("the groups", problem, "one device per process", write))
    elementwise = tuple(m for m in members if not m.is_matrix and m.storage.layout is not None)
    orthogonalizers: Orthogonalizers = {}
    parameters = [_parameter(groups[member.group], member, precision, orthogonalizers) for member in muon]
    devices_here = (member.tensor.device for member in (*muon, *members))
    device = next(devices_here, None) or device_without_parameters()
    plan = planner(
        parameters,
        host=device.type == "cpu",
        ranks=connected_ranks([member.storage for member in members]),
        elementwise=[Elementwise(m.name, m.storage.layout) for m in elementwise if m.storage.layout is not None],
    )
    adamw = tuple(tuple(m for m in members if m.group == n and not m.is_matrix) for n in range(len(groups)))
    if muon:
        check_kernels(precision.kernels, device=device, dtype=precision.compute)
    return StepPlan(signature, with_owners(plan, muon), elementwise, adamw, plan, this_rank(), device, orthogonalizers)


def widened(planned: StepPlan, views: Sequence[View], ranks: Sequence[int], planner: Planner) -> StepPlan:
    """Return the plan of a connected set whose ranks hold different parameters.

    Args:
        planned: The plan of this rank's own parameters.
        views: The parameters of each rank.
        ranks: The ranks of the connected set.
        planner: Makes the plan.

    Raises:
        PlanError: a rank lacks a parameter that it holds according to another rank, or describes it differently.
    """
    parameters, elementwise = merged(views, ranks)
    own_members = {
        (member.name, member.storage.layout.ranks): member
        for member in (*planned.muon, *planned.elementwise)
        if member is not None and member.storage.layout is not None
    }
    plan = planner(parameters, host=planned.device.type == "cpu", ranks=ranks, elementwise=elementwise)

    def member_of(parameter: Parameter | Elementwise) -> OptimizedParameter | None:
        ranks = parameter.target.ranks
        return own_members.get((parameter.name, ranks)) if planned.rank in ranks else None

    muon, rest = with_owners(plan, list(map(member_of, parameters))), tuple(map(member_of, elementwise))
    return replace(planned, muon=muon, elementwise=rest, plan=plan)


def flops_of(rule: Rule, rows: int, cols: int, resolved: Orthogonalizer) -> int:
    """Return the FLOPs of a rule and of the orthogonalization; without one it makes one or two passes over a matrix."""
    if not rule.orthogonalizes:
        return rule.flops(rows, cols) + 2 * rows * cols
    form: Any = {"one_gram": resolved.whole, "deflated": resolved.deflated, "on_device": resolved.on_device}
    return rule.flops(rows, cols) + cost(rows, cols, degrees=resolved.degrees, **form)


def set_of(group: Mapping[str, Any], device: torch.device, precision: Precision) -> tuple[Coefficients, str]:
    """Return the coefficients of a group for large matrices, and what tells that smaller ones have others than by name.

    So all matrices of a group are told alike, and which one gets which set follows from its size.
    """
    given, form = group["ns_coefficients"], form_of(device, precision.kernels)
    named = choose(given, group["ns_steps"], sys.maxsize, sys.maxsize, form=form, dtype=precision.compute)
    is_for_some = (given, named, form) == ("auto", "deflated", "device")
    return named, " for large matrices" if is_for_some else ""


def _parameter(
    group: Mapping[str, Any], member: OptimizedParameter, precision: Precision, orthogonalizers: Orthogonalizers
) -> Parameter:
    assert member.storage.layout is not None
    assert member.momentum_storage.layout is not None
    matrices = split_matrices(member.name, member.storage.shape, member.spec)
    device = member.tensor.device
    named, scope = set_of(group, device, precision)
    steps = len(coefficient_schedule(named, group["ns_steps"]))
    rule: Rule = rule_of(group)
    flops = {}
    for shape in {matrix.shape for matrix in matrices}:  # most parameters are many matrices of few shapes
        resolved = orthogonalizers.get((member.group, shape))
        if resolved is None:
            resolved = orthogonalizers[member.group, shape] = Orthogonalizer.of(
                *shape,
                coefficients=group["ns_coefficients"],
                steps=group["ns_steps"],
                method=group["ns_method"],
                dtype=precision.compute,
                kernels=precision.kernels,
                device=device,
                in_place=rule.orthogonalizes and not rule.sees_direction,
            )
        flops[shape] = flops_of(rule, *shape, resolved)
    if isinstance(named, str) and named not in get_args(CoefficientName):  # a user's set, which may differ on ranks
        named = f"{named} {coefficient_set(named)}"
    settings = f"{named}{scope}, {steps} steps, {group['ns_method']}, {precision.compute}"
    if precision.kernels != "auto":  # other kernels round differently
        settings = f"{settings}, kernels {told_products(precision.kernels, device=device, dtype=precision.compute)}"
    flops_by_matrix = tuple(flops[matrix.shape] for matrix in matrices)
    if rule.overrides("balance", "whole") or not rule.orthogonalizes:
        settings = f"{settings}, {group['algorithm']}"
    factored_states = tuple(
        state_layout.factored for state_layout in member.state_layouts.values() if state_layout.factored is not None
    )
    return Parameter(
        member.name,
        member.momentum_storage.layout,
        member.storage.layout,
        matrices,
        flops_by_matrix,
        settings,
        factored_states,
        rule.count_of_sums(),
        scale_invariant=rule.scale_invariant,
    )
