"""Planning: from param groups to a Plan, read off the parameters without communication."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import View, merged, union
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource
from muonmesh.comm.storage import (
    Declared,
    Signature,
    Storage,
    connected_ranks,
    local_of,
    ranks_of,
    sharded_over_replicas,
    storage_of,
    this_rank,
    world_size,
)
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import (
    Elementwise,
    FlatParameter,
    Parameter,
    Piece,
    Plan,
    Rates,
    Teams,
    cost,
    gathered,
    make_plan,
    split_matrices,
)
from muonmesh.layout.gram import fits, is_cheaper
from muonmesh.layout.plan import pieces
from muonmesh.numerics.coefficients import coefficient_schedule, degrees_of
from muonmesh.numerics.kernels import DIVIDED_FROM_ROWS
from muonmesh.numerics.newton_schulz import gram_segments, resolve_method
from muonmesh.numerics.rules import RULES, Rule, is_matrix_rule, rule_of
from muonmesh.settings import LOST_GROUP, LOST_LAYOUTS, ExchangeMode, Precision, ProcessGroup
from muonmesh.step.blocks import Blocks
from muonmesh.step.census import Census
from muonmesh.step.homes import Home, Stored, homes_of

Holdings = tuple[tuple[Piece, ...], ...]
"""For each Matrix of a plan, the pieces of it that this rank stores."""


@dataclass(frozen=True)
class Member:
    """One parameter with what its group, number ``group``, says of it; several may share one flat tensor.

    Attributes:
        name: Canonical name.
        tensor: What the user holds.
        group: Number of its group.
        spec: How it splits into matrices.
        storage: Where it lives.
        momentum_storage: Where its momentum lives: there too, or shared among the replicas.
        homes: Where each thing lives that its rule keeps of it, by key; empty for AdamW's.
    """

    name: str
    tensor: Tensor
    group: int
    spec: Any
    storage: Storage
    momentum_storage: Storage
    homes: Mapping[str, Home] = field(default_factory=dict)


@dataclass
class Planned:
    """What was read off the parameters, valid while their signature stays the same.

    It keeps the parameters alive, so that a new one cannot take an old one's identity.

    Attributes:
        signature: See `signature_of`.
        muon: Members of the Muon groups, as the plan's parameters are numbered; None for one that only other ranks
            of the connected set hold.
        elementwise: Members of the AdamW groups, as the plan numbers them; None likewise.
        adamw: All members of each group that is AdamW's; empty for the others.
        plan: Who orthogonalises what.
        rank: This process.
        holdings: The pieces of each Matrix that are stored here.
        momentum_holdings: The pieces of each Matrix whose momentum is stored here: the same, unless replicas share it.
        device: Of the Muon parameters, or of the first parameter if there are none; the CPU without any.
        exchange: Made when the ranks have compared their plans.
    """

    signature: object
    muon: tuple[Member | None, ...]
    elementwise: tuple[Member | None, ...]
    adamw: tuple[tuple[Member, ...], ...]
    plan: Plan
    rank: int
    holdings: Holdings
    momentum_holdings: Holdings
    device: torch.device
    exchange: Exchange | None = None
    _names: list[str] | None = None
    _terms: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @cached_property
    def census(self) -> Census:
        """Where the flags of each parameter stand."""
        return Census.of(self.plan, self.rank)

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The ranks of each parameter that several ranks know of."""
        return [tuple(layout.ranks) for layout in self.plan.targets]

    def group_names(self, names: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
        """Return the names of the groups of all ranks, in one order; the first call asks the others for theirs."""
        if self._names is None:
            self._names = union(group, names)
        return self._names

    def terms_of(self, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Return what the ranks that share some parameters compare of them, as far as no step changes it.

        Ranks may number their groups differently. So a parameter's group is told by its place among the groups of these
        parameters, which must be the same on all ranks.

        Args:
            numbers: Of the parameters, Muon's first and then AdamW's.

        Returns:
            The numbers of their groups on this rank, each once, and a digest of group and dtype of each parameter.
        """
        if numbers not in self._terms:
            everyone = (*self.muon, *self.elementwise)
            members = [member for number in numbers if (member := everyone[number]) is not None]
            groups = tuple(dict.fromkeys(member.group for member in members))
            fixed = [(groups.index(member.group), str(local_of(member.tensor).dtype)) for member in members]
            self._terms[numbers] = groups, hashlib.sha256(str(fixed).encode()).hexdigest()
        return self._terms[numbers]

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

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of momentum in int8."""
        return Blocks(self.plan, self.momentum_holdings, self.matrices_of, self.device)

    @property
    def members(self) -> list[Member]:
        """All parameters of this rank, the Muon half first."""
        return [member for member in self.muon if member is not None] + [m for some in self.adamw for m in some]


def members_of(
    groups: Sequence[Mapping[str, Any]],
    process_group: ProcessGroup,
    layouts: Mapping[str, Declared],
    source: GradientSource,
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
        found = "an optimizer that was unpickled without its layouts, since meshes cannot be pickled"
        write = "Write optimizer.layouts = layouts before the first step"
        raise ValueError(explain_error("layouts", found, "them again", write))
    members: list[Member] = []
    sets: list[tuple[int, ...]] = []
    error: Exception | None = None
    unknown = dict(layouts)
    names = Counter[tuple[str, tuple[int, ...]]]()
    ranks_by_group: dict[int, tuple[int, ...] | None] = {}  # one tuple for all parameters of a group
    for number, settings in enumerate(groups):
        muon = is_matrix_rule(settings["algorithm"])
        specs = settings.get("matrices") or [None] * len(settings["params"])
        for name, tensor, spec in zip(settings["param_names"], settings["params"], specs, strict=True):
            declared = unknown.pop(name, None)
            own = source.group(tensor)
            shared = process_group if own is None else own
            if id(shared) not in ranks_by_group:
                ranks_by_group[id(shared)] = replicas_of(shared)
            replicas = ranks_by_group[id(shared)]
            for part, layout, split in _contents(name, declared, spec):
                try:
                    storage = storage_of(part, tensor, replicas, layout, needed=muon)
                except LayoutError as found:
                    error = error or found
                    sets.append(ranks_of(tensor, replicas, layout))
                    continue
                state = storage
                if shard_state and muon:
                    state = sharded_over_replicas(storage, group_for(shared), tensor.device.type)
                members.append(Member(part, tensor, number, split, storage, state))
                names[part, () if storage.layout is None else tuple(storage.layout.ranks)] += 1
                if storage.layout is not None:
                    sets.append(storage.layout.ranks)
    for (name, _), count in names.items():
        if count > 1:
            error = error or LayoutError(
                explain_error(
                    name,
                    f"{count} parameters of this name",
                    "a name of its own for each, by which ranks and checkpoints know it",
                    'Give "param_names" with a prefix that tells them apart, such as "encoder." and "decoder."',
                )
            )
    if unknown:
        write = "Correct the names: they have no prefixes such as module. and _orig_mod. in front"
        needed = "names of parameters in the groups"
        error = error or LayoutError(explain_error("layouts", f"{sorted(unknown)}", needed, write))
    return members, sets, error


def likely_sets(
    groups: Sequence[Mapping[str, Any]],
    process_group: ProcessGroup,
    layouts: Mapping[str, Declared],
    source: GradientSource,
) -> list[tuple[int, ...]]:
    """Return the ranks that share the parameters of groups in which something is wrong, to tell those ranks."""
    sets = []
    for group in groups:
        names = group.get("param_names")
        for number, tensor in enumerate(group.get("params") or ()):
            if isinstance(tensor, Tensor):
                name = names[number] if isinstance(names, list) and number < len(names) else None
                own = source.group(tensor)
                replicas = replicas_of(process_group if own is None else own)
                sets.append(ranks_of(tensor, replicas, layouts.get(name) if isinstance(name, str) else None))
    return sets


def _contents(name: str, declared: Any, spec: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, declared layout, matrices) of each parameter that a tensor holds."""
    if isinstance(declared, (tuple, list)) and declared and all(isinstance(d, FlatParameter) for d in declared):
        return [(flat.name, flat.layout, flat.matrices) for flat in declared]
    if isinstance(declared, FlatParameter):
        return [(declared.name, declared.layout, declared.matrices if declared.matrices is not None else spec)]
    return [(name, declared, spec)]


def signature_of(
    groups: Sequence[Mapping[str, Any]],
    process_group: ProcessGroup,
    layouts: Mapping[str, Declared],
    source: GradientSource,
) -> object:
    """Return what must stay the same for a plan to stay valid; read every step, so it is cheap."""
    return (
        process_group,
        tuple((name, id(entry)) for name, entry in layouts.items()),
        id(source),
        tuple(tuple(map(source.group, group["params"])) for group in groups),
        tuple(tuple(map(Signature.of, group["params"])) for group in groups),
        tuple(
            (
                group["algorithm"],
                _frozen(group["param_names"]),
                _frozen(group.get("matrices")),
                str(group["ns_coefficients"]),
                group["ns_steps"],
                group["ns_method"],
                _asked(group) if is_matrix_rule(group["algorithm"]) else (),
            )
            for group in groups
        ),
    )


def _asked(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a group's rule keeps, and how many sums it asks for."""
    rule: Rule = rule_of(group)
    return (*rule.keeps().items(), rule.sums())


def _frozen(value: Any) -> Any:
    """Return tuples for lists, so that what is changed in place differs from what was."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def holdings_of(plan: Plan, rank: int, *, state: bool) -> Holdings:
    """Return for each Matrix of a plan the pieces of it that ``rank`` stores, or stores the momentum of."""
    found = []
    for assignment in plan.assignments:
        parameter = plan.parameters[assignment.parameter]
        found.append(tuple(pieces(parameter.momentum_storage if state else parameter.target, rank, assignment.matrix)))
    return tuple(found)


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
        found = "an optimizer that was unpickled without its ProcessGroup, which cannot be pickled"
        write = "Write optimizer.process_group = group before the first step"
        raise ValueError(explain_error("process_group", found, "it again", write))
    if process_group == "local" or (process_group is not None and world_size() == 1):
        return (this_rank(),)
    if process_group == "world":
        return tuple(range(world_size()))
    if isinstance(process_group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(process_group))
    return None


def method_of(group: Mapping[str, Any], rows: int, cols: int, dtype: torch.dtype) -> Literal["standard", "gram"]:
    """Return how a group, which has been checked, orthogonalises a rows × cols matrix."""
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
    members = _with_homes(groups, members)
    muon = tuple(member for member in members if is_matrix_rule(groups[member.group]["algorithm"]))
    devices = {member.tensor.device for member in muon}
    if len(devices) > 1:
        found, write = f"Muon parameters on {sorted(map(str, devices))}", "Give each device an optimizer of its own"
        raise LayoutError(explain_error("the groups", found, "one device per process", write))
    elementwise = tuple(m for m in members if groups[m.group]["algorithm"] == "adamw" and m.storage.layout is not None)
    parameters = [_parameter(groups[member.group], member, precision.compute) for member in muon]
    plan = make_plan(
        parameters,
        ranks=connected_ranks([member.storage for member in members]),
        bucket_elements=bucket_elements(bucket_cap_mb, precision),
        elementwise=[Elementwise(m.name, m.storage.layout) for m in elementwise if m.storage.layout is not None],
        grams=grams_of(parameters, exchange, precision),
        teams=teams_of(exchange),
        itemsize=precision.compute.itemsize,
    )
    adamw = tuple(
        tuple(m for m in members if m.group == number and group["algorithm"] == "adamw")
        for number, group in enumerate(groups)
    )
    device = next((member.tensor.device for member in (*muon, *members)), torch.device("cpu"))
    return _planned(signature, muon, elementwise, adamw, plan, device)


def grams_of(parameters: Sequence[Parameter], exchange: ExchangeMode, precision: Precision) -> set[tuple[int, int]]:
    """Return the (parameter, index) of the matrices whose Gram matrices are summed: those that fit, if asked for."""
    if exchange == "owner" or teams_of(exchange) is not None:
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


def teams_of(exchange: ExchangeMode) -> Teams | None:
    """Return which teams there may be; None if every matrix has one owner."""
    return exchange if isinstance(exchange, Teams) else Teams() if exchange == "teams" else None


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
    parameters, elementwise = merged(views, ranks)
    mine = {
        (member.name, member.storage.layout.ranks): member
        for member in (*planned.muon, *planned.elementwise)
        if member is not None and member.storage.layout is not None
    }
    grams = grams_of(parameters, exchange, precision)
    elements = bucket_elements(bucket_cap_mb, precision)
    plan = make_plan(
        parameters,
        ranks=ranks,
        bucket_elements=elements,
        elementwise=elementwise,
        grams=grams,
        teams=teams_of(exchange),
        itemsize=precision.compute.itemsize,
    )

    def own(parameter: Parameter | Elementwise) -> Member | None:
        return mine.get((parameter.name, parameter.target.ranks)) if planned.rank in parameter.target.ranks else None

    muon, rest = tuple(map(own, parameters)), tuple(map(own, elementwise))
    return _planned(planned.signature, muon, rest, planned.adamw, plan, planned.device)


def _planned(
    signature: object,
    muon: tuple[Member | None, ...],
    elementwise: tuple[Member | None, ...],
    adamw: tuple[tuple[Member, ...], ...],
    plan: Plan,
    device: torch.device,
) -> Planned:
    rank = this_rank()
    holdings = holdings_of(plan, rank, state=False)
    shared = any(parameter.momentum_storage is not parameter.target for parameter in plan.parameters)
    momentum_holdings = holdings_of(plan, rank, state=True) if shared else holdings
    return Planned(signature, muon, elementwise, adamw, plan, rank, holdings, momentum_holdings, device)


def bucket_elements(bucket_cap_mb: float, precision: Precision) -> int:
    """Return how many elements one owner computes at a time."""
    return max(1, int(bucket_cap_mb * 2**20 / precision.compute.itemsize))


def _parameter(group: Mapping[str, Any], member: Member, dtype: torch.dtype) -> Parameter:
    assert member.storage.layout is not None
    assert member.momentum_storage.layout is not None
    matrices = split_matrices(member.name, member.storage.shape, member.spec)
    steps = len(coefficient_schedule(group["ns_coefficients"], group["ns_steps"]))
    degrees = degrees_of(group["ns_coefficients"], group["ns_steps"])
    shapes = {(matrix.rows, matrix.cols) for matrix in matrices}  # most parameters are many matrices of few shapes
    gram = {shape: method_of(group, *shape, dtype) == "gram" for shape in shapes}
    flops = {shape: cost(*shape, degrees=degrees, gram=gram[shape]) for shape in shapes}
    shared = dict.fromkeys(shapes, 0)
    if member.tensor.device.type == "cpu":
        large = (shape for shape in shapes if min(shape) >= DIVIDED_FROM_ROWS)
        shared |= {shape: gathered(*shape, degrees=degrees, gram=gram[shape]) for shape in large}
    settings = f"{group['ns_coefficients']}, {steps} steps, {group['ns_method']}, {dtype}"
    each = tuple(flops[matrix.rows, matrix.cols] for matrix in matrices)
    segments = len(gram_segments(group["ns_coefficients"], group["ns_steps"]))
    rule = RULES[group["algorithm"]]
    assert issubclass(rule, Rule)
    if not rule.orthogonalizes:  # a pass or two over the elements
        each, shared = tuple(2 * matrix.numel for matrix in matrices), dict.fromkeys(shapes, 0)
    if rule.changes_matrices():  # which the Gram exchange never has whole
        settings, segments = f"{settings}, {group['algorithm']}", 0
    if rule.asks_for_sums():  # which the Gram exchange does not take
        segments = 0
    companions = tuple(home.companion for home in member.homes.values() if home.companion is not None)
    return Parameter(
        member.name,
        member.momentum_storage.layout,
        member.storage.layout,
        matrices,
        each,
        settings,
        segments,
        companions,
        rule_of(group).sums(),
        tuple(shared[matrix.rows, matrix.cols] for matrix in matrices),
    )


def _with_homes(groups: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> list[Member]:
    """Return the members with the homes of what their rules keep."""
    sharing: dict[int, list[int]] = {}
    for number, member in enumerate(members):
        if is_matrix_rule(groups[member.group]["algorithm"]):
            sharing.setdefault(id(member.tensor), []).append(number)
    found = list(members)
    for numbers in sharing.values():
        keeps = rule_of(groups[members[numbers[0]].group]).keeps()
        together = {n: Stored(m.name, m.spec, m.storage, m.momentum_storage) for n in numbers for m in (members[n],)}
        for number, homes in homes_of(keeps, together).items():
            found[number] = replace(members[number], homes=homes)
    return found
