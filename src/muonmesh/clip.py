"""Clipping by norm for an optimizer of two halves, of which only one cares for magnitudes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import agree_on_plan
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource, multiply, own_gradient, scale_gradient, whole_gradient
from muonmesh.errors import LayoutError, PlanError, explain_error
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.numerics.rules import RULES
from muonmesh.step.kept import Clip
from muonmesh.step.planning import Planned
from muonmesh.step.slots import RUNNING, view_of

ClipPolicy = Literal["adamw_only", "all", "separate", "per_matrix"]

DECAY = 0.95
"""Decay of a matrix's running norm, so that it remembers about twenty gradients."""

WARM_UP = 10
"""Gradients of a matrix that ``per_matrix`` only measures. Up to 1 / (1 − DECAY) of them count equally."""

SPIKE = 2.0
"""A gradient counts in the running norm as at most so many times it, or one spike would disarm the guard."""

ERRORS, REPLAN, ALIKE, SQUARED, INVARIANT, FELT, MATRICES = range(7)
"""Places in the vector of sums: ranks that found an error; ranks that must plan again; a number made of the arguments
and its square, by whose sums ranks see whether all were given the same; squares of the gradients whose scale the update
does not feel (Muon's), and of those whose scale it feels (AdamW's); then both for each of the source's `norms_apart`,
and the squares of each matrix."""


@dataclass(frozen=True)
class GradNorms:
    """Norms of the gradients before clipping, over all shards, every element counted once.

    ``float(norms)`` and ``norms.item()`` are the total, as in loops written for torch's function; reading never
    communicates, so one rank alone may log. On CUDA reading waits for the device.

    Attributes:
        total: 0-d fp64 tensor, norm of all gradients; None if it was not asked for.
        muon: Norm of the gradients of Muon's half, the groups whose rule is scale-invariant; None likewise.
        adamw: Norm of the others': AdamW's, and those of rules that feel the scale of gradients; None likewise.
        skipped: 0-d bool tensor, whether the next ``step`` changes nothing.
        apart: The norms of gradients that the others leave out, by name: `GradientSource.norms_apart`, of what was
            measured.
    """

    total: Tensor | None
    muon: Tensor | None
    adamw: Tensor | None
    skipped: Tensor
    apart: Mapping[str, Tensor] = field(default_factory=dict)

    def item(self) -> float:
        """Return the total norm."""
        return float(self)

    def __float__(self) -> float:
        """Return the total norm; nan if it was not asked for."""
        return math.nan if self.total is None else float(self.total)

    def __format__(self, spec: str) -> str:
        """Return the total norm as text."""
        return format(float(self), spec)


@dataclass(frozen=True)
class Limits:
    """What a call of `Muon.clip_grad_norm_` asks for; its arguments."""

    max_norm: float
    policy: ClipPolicy
    skip_above: float
    norms: bool
    norm_type: float

    def check(self) -> None:
        """Raise ValueError unless the arguments can be met."""
        if self.policy not in get_args(ClipPolicy):
            known = ", ".join(f'"{policy}"' for policy in get_args(ClipPolicy))
            raise ValueError(explain_error("policy", f"{self.policy!r}", f"one of {known}"))
        for name, value, meaning in (
            ("max_norm", self.max_norm, "to measure only"),
            ("skip_above", self.skip_above, "to skip none but non-finite ones"),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(explain_error(name, f"{value!r}", f"a number of at least 0, or inf {meaning}"))
        if not isinstance(self.norms, bool):
            raise ValueError(explain_error("norms", f"{self.norms!r}", "True or False"))
        if self.norm_type != 2:
            write = "For others call torch.nn.utils.clip_grad_norm_ on the AdamW parameters"
            raise ValueError(explain_error("norm_type", f"{self.norm_type!r}", "2: Euclidean norms alone", write))

    @property
    def whole(self) -> bool:
        """Whether both halves are measured: asked for, or needed to clip, or to see a non-finite gradient."""
        return self.norms or self.policy != "adamw_only" or self.skip_above < math.inf

    @property
    def protects(self) -> tuple[str, ...]:
        """The norms by which the policy clips, of which none may be above ``skip_above``."""
        return {"all": ("total",), "separate": ("muon", "adamw")}.get(self.policy, ("adamw",))

    @property
    def digest(self) -> int:
        """A number below 2**20 made of the arguments, the same on every rank that was given the same."""
        text = f"{self.policy} {float(self.max_norm)} {float(self.skip_above)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % 2**20

    def skips(self, sums: Tensor, apart: Sequence[str] = ()) -> Tensor:
        """Return whether the step is skipped, 0-d bool: too large, or not finite, also of what is measured apart."""
        norms = _norms(sums)
        above = [norms[name] > self.skip_above for name in self.protects]
        infinite = [~_norms(sums, number)["total"].isfinite() for number in range(1 + len(apart))]
        return torch.stack([*above, *infinite]).any()

    def coefficients(self, sums: Tensor, skip: Tensor, apart: Sequence[str] = ()) -> dict[int, Tensor]:
        """Return min(1, max_norm / norm), as torch's function computes it, for each half that is clipped as one.

        They are by the places of the halves in the sums.
        """
        by = {"all": {INVARIANT: "total", FELT: "total"}, "separate": {INVARIANT: "muon", FELT: "adamw"}}
        return {
            half + 2 * number: torch.where(skip, 1.0, (self.max_norm / (norms[name] + 1e-6)).clamp(max=1.0))
            for number, norms in enumerate(_norms(sums, number) for number in range(1 + len(apart)))
            for half, name in by.get(self.policy, {FELT: "adamw"}).items()
        }

    def told(self, sums: Tensor, skip: Tensor, apart: Sequence[str] = ()) -> GradNorms:
        """Return the norms, or with ``norms=False`` those that the policy needs."""
        known = {name: norm if self.norms or name in self.protects else None for name, norm in _norms(sums).items()}
        others = {name: _norms(sums, number)["total"] for number, name in enumerate(apart, 1)}
        return GradNorms(**known, skipped=skip, apart=others)


def _norms(sums: Tensor, number: int = 0) -> dict[str, Tensor]:
    """Return the usual norms, or the same of what is measured apart as number 1, 2, …."""
    muon, adamw = sums[INVARIANT + 2 * number], sums[FELT + 2 * number]
    return {"total": (muon + adamw).sqrt(), "muon": muon.sqrt(), "adamw": adamw.sqrt()}


def clip_gradients(
    planned: Planned,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    exchange: Exchange,
    limits: Limits,
    *,
    source: GradientSource,
    process_group: dist.ProcessGroup | None,
    waits: bool,
) -> tuple[GradNorms, Clip]:
    """Implement `Muon.clip_grad_norm_`: one pass over the gradients, one all-reduce of one fp64 vector.

    Squares and sums are fp64 and a coefficient is rounded once: with fp32 sums it differs between shardings.

    Raises:
        Exception: what this rank found wrong, after it has taken part in what the others wait for.
        PlanError: another rank found something wrong. Nothing has been scaled then.
    """
    measured = {INVARIANT, FELT} if limits.whole else {FELT}
    apart, matrices = source.norms_apart, _matrices(source)
    sums = _zeros(planned, source)
    if not _reduces(planned, measured, process_group):
        limits.check()
        return limits.told(sums, torch.zeros_like(sums[0], dtype=torch.bool), apart), Clip()
    error = add_squares(planned, groups, source, measured, sums, matrices=limits.policy == "per_matrix")
    said = dict.fromkeys(range(matrices), 0)
    try:
        limits.check()
        said[ALIKE], said[SQUARED] = limits.digest, limits.digest**2
    except (TypeError, ValueError) as found:
        error = found
    if error is not None and sums.is_meta:
        raise error  # nothing here has data, so nothing can be asked of the others
    said[ERRORS] = int(error is not None)
    sums[:matrices] += upload(list(said.values()), dtype=sums.dtype, device=sums.device)
    exchange.reduce_sums(sums)
    here = sums[:matrices].clone()
    if process_group is not None:
        add_other_sets(sums[:matrices], exchange, process_group)
    if isinstance(error, ValueError) and not isinstance(error, LayoutError) and not waits:
        raise error  # an argument, which is the same everywhere
    if waits and float(sums[ERRORS]):
        if not float(here[ERRORS]):
            told, write = "an error on another rank of process_group=", "Read that rank's message, which names it"
            raise PlanError(explain_error("clip_grad_norm_", told, "none on any", write))
        agree_on_plan(exchange.group, exchange.plan, error)
    if waits and float(here[REPLAN]):
        raise PlanAgain
    # For whole numbers, n Σd² = (Σd)² says that all are equal.
    unequal = len(exchange.plan.ranks) * here[SQUARED].long() != here[ALIKE].long() ** 2
    if waits and bool(unequal):
        arguments = f"policy={limits.policy!r}, max_norm={limits.max_norm}, skip_above={limits.skip_above}"
        write = "Call it alike everywhere: replicas would drift apart"
        needed = "the same arguments on every rank"
        raise PlanError(explain_error("clip_grad_norm_", f"{arguments} here and others on other ranks", needed, write))
    skip = limits.skips(sums, apart) | (sums[ERRORS] != 0) | (here[REPLAN] != 0) | unequal
    running: tuple[tuple[Tensor, Tensor], ...] = ()
    if error is None:
        scale_groups(groups, source, limits.coefficients(sums, skip, apart))
        if limits.policy == "per_matrix":
            running = _limit_matrices(planned, state, source, sums[matrices:], skip, limits.max_norm)
    return limits.told(sums, skip, apart), Clip(skip, running, error)


def _matrices(source: GradientSource) -> int:
    """Return the place in the sums from which on they are those of the matrices."""
    return MATRICES + 2 * len(source.norms_apart)


def _zeros(planned: Planned, source: GradientSource) -> Tensor:
    """Return the sums before anything is added, fp64; as long under every policy, so that ranks that were given
    different ones do not wait for each other.
    """
    return torch.zeros(_matrices(source) + len(planned.plan.assignments), dtype=torch.float64, device=planned.device)


class PlanAgain(Exception):
    """Some rank must plan again, and all of them know."""


def _reduces(planned: Planned, measured: set[int], process_group: dist.ProcessGroup | None) -> bool:
    """Whether there is anything to measure, or others that may have something."""
    # Others of the set, or in the process group, may have an AdamW half where this rank has none.
    if planned.plan.elementwise or process_group is not None:
        return True
    here = {INVARIANT: any(member is not None for member in planned.muon), FELT: any(planned.adamw)}
    return any(here[half] for half in measured)


def stand_aside_from_sums(
    planned: Planned,
    exchange: Exchange,
    error: Exception | None,
    limits: Limits,
    *,
    source: GradientSource,
    process_group: dist.ProcessGroup | None,
    waits: bool,
) -> GradNorms | None:
    """Take part in the sum that the others wait for, and tell them that this rank cannot follow the plan.

    Args:
        planned: What this rank had planned before, as the others still may have.
        exchange: The exchange of that plan.
        error: What is wrong with its groups; None: they have changed, so that all must plan again.
        limits: The arguments of the call.
        source: Where gradients are.
        process_group: Ranks of other pipeline stages to be clipped with, as in `Muon.clip_grad_norm_`.
        waits: Whether the others' hosts read what is said. If not and some have not changed, `Muon.step` ends in an
            error on all ranks.

    Returns:
        None if all ranks plan again now; else what the call returns.

    Raises:
        Exception: ``error``, unless the others do not wait and `Muon.step` has to say it.
        PlanError: another rank found an error.
    """
    matrices, sums = _matrices(source), _zeros(planned, source)
    if not _reduces(planned, {INVARIANT, FELT} if limits.whole else {FELT}, process_group):
        if error is not None:
            raise error
        return None
    place = ERRORS if error is not None else REPLAN
    sums[:matrices] += upload([int(n == place) for n in range(matrices)], dtype=sums.dtype, device=sums.device)
    exchange.reduce_sums(sums)
    here = sums[:matrices].clone()
    if process_group is not None:
        add_other_sets(sums[:matrices], exchange, process_group)
    if waits and float(here[ERRORS]):
        agree_on_plan(exchange.group, exchange.plan, error)
    if waits or float(here[REPLAN]) == len(exchange.plan.ranks):
        return None
    return limits.told(sums, torch.ones_like(sums[0], dtype=torch.bool), source.norms_apart)


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
    places, parts, copies = list[int](), list[Tensor](), list[int]()
    gradients, norm_of = dict[int, Tensor](), dict[int, int]()
    first = _matrices(source)
    for number, member in [*enumerate(planned.muon), *((-1, member) for some in planned.adamw for member in some)]:
        if member is None or (half := half_of(groups[member.group])) not in measured:
            continue
        if not source.counted(member.tensor):
            continue
        try:
            gradient = whole_gradient(member.name, member.tensor, source)
            half += 2 * _number(member.name, member.tensor, source)
        except (LayoutError, TypeError) as found:
            error = error or found
            continue
        if gradient is None:
            continue
        if matrices and number >= 0:
            gradients[number], norm_of[number] = gradient.contiguous(), half
            continue
        for part in member.storage.parts(gradient):
            places.append(half)
            parts.append(part)
            copies.append(member.storage.copies)
    for place, (assignment, pieces) in enumerate(zip(planned.plan.assignments, planned.holdings, strict=True)):
        if assignment.parameter in gradients:
            member = planned.muon[assignment.parameter]
            assert member is not None
            for piece in pieces:
                places.append(first + place)
                parts.append(view_of(gradients[assignment.parameter], piece))
                copies.append(member.storage.copies)
    if parts:
        index = upload(places, dtype=torch.int64, device=sums.device)
        shares = upload(copies, dtype=torch.float64, device=sums.device)
        sums.index_add_(0, index, sums_of_squares(parts) / shares)
    # Of a matrix that is not held here nothing has been added, so it may count anywhere.
    halves = [norm_of.get(assignment.parameter, INVARIANT) for assignment in planned.plan.assignments]
    for half in dict.fromkeys(halves) if matrices else ():
        which = [first + place for place, its in enumerate(halves) if its == half]
        sums[half] += sums[upload(which, dtype=torch.int64, device=sums.device)].sum()
    return error


def _number(name: str, parameter: Tensor, source: GradientSource) -> int:
    """Return 0 for the usual norms, else the number of what a gradient is measured by, from 1.

    Raises:
        LayoutError: the source names a norm that it does not list, so that other ranks may not know of it.
    """
    apart = source.norm_apart(parameter)
    if apart is None:
        return 0
    if apart not in source.norms_apart:
        found, needed = f"a norm of its own, {apart!r}", f"one of {', '.join(source.norms_apart) or 'none'}"
        write = "Correct norm_apart() of the GradientSource, or its norms_apart"
        raise LayoutError(explain_error(name, found, needed, write))
    return 1 + list(source.norms_apart).index(apart)


def keep_running_norms(clip: Clip, state: Mapping[Tensor, Mapping[str, Any]], stop: Tensor | None) -> None:
    """Write the running norms after a step to the state, unless ``stop``, a 0-d bool on the device, says otherwise."""
    for tensor, fresh in clip.running:
        for key, value in zip(RUNNING, fresh, strict=True):
            kept = state[tensor].get(key)
            if kept is not None:  # else no state has been created here, since there was no gradient
                value = value.view_as(kept)
                kept.copy_(value if stop is None else torch.where(stop, kept, value))


def add_other_sets(sums: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> None:
    """Add the sums of the connected sets that meet in a process group, in place: each set is counted once.

    Each set has all of its sums on all of its ranks; those of them that are in the group share them out.
    """
    sums /= sum(rank in exchange.plan.ranks for rank in dist.get_process_group_ranks(group))
    dist.all_reduce(sums, group=group)


def scale_groups(
    groups: Sequence[Mapping[str, Any]], source: GradientSource, coefficients: Mapping[int, Tensor]
) -> None:
    """Multiply the gradients of each half by its coefficient, a 0-d fp64 tensor, by its place in the sums."""
    coefficients = {place: coefficient for place, coefficient in coefficients.items() if not _is_one(coefficient)}
    for group in groups if coefficients else ():
        for parameter in group["params"]:
            place = half_of(group) + 2 * _number(str(group.get("name")), parameter, source)
            if place in coefficients:
                scale_gradient(parameter, source, coefficients[place])


def _limit_matrices(
    planned: Planned,
    state: Mapping[Tensor, Mapping[str, Any]],
    source: GradientSource,
    squares: Tensor,
    skip: Tensor,
    max_norm: float,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Limit the gradient of each matrix that is stored here by its running norm; return the fresh running norms."""
    sizes = [len(numbers) for numbers in planned.matrices_of.values()]
    if not sizes:
        return ()
    none = torch.zeros(max(sizes), device=squares.device)
    held = [
        [
            state.get(tensor, {}).get(key, none[:size]).view(-1)
            for tensor, size in zip(planned.matrices_of, sizes, strict=True)
        ]
        for key in RUNNING
    ]
    which = [number for some in planned.matrices_of.values() for number in some]
    numbers = upload(which, dtype=torch.int64, device=squares.device)
    factors, fresh = _limited(squares[numbers].sqrt(), torch.stack([torch.cat(some) for some in held]), max_norm)
    every = torch.ones_like(squares).index_copy_(0, numbers, torch.where(skip, 1.0, factors))
    members = {number: member for number, member in enumerate(planned.muon) if member is not None}
    # By tensor: a flat one holds several parameters, and its gradient is handed back once.
    names = {member.tensor: member.name for member in members.values()}
    gradients = {tensor: own_gradient(name, tensor, source) for tensor, name in names.items()}
    scaled = dict[Tensor, Tensor]()
    for factor, assignment, pieces in zip(every, planned.plan.assignments, planned.holdings, strict=True):
        member = members.get(assignment.parameter)
        own = None if member is None else gradients[member.tensor]
        if member is None or own is None or _is_one(factor):
            continue
        local, scaled[member.tensor] = own
        for piece in pieces:
            multiply(view_of(local, piece), factor)
    for tensor, gradient in scaled.items():
        source.write(tensor, gradient)
    return tuple(zip(planned.matrices_of, torch.split(fresh, sizes, dim=1), strict=True))


def _limited(norms: Tensor, running: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the factors that limit gradients by their running norms, and the running norms after them.

    Args:
        norms: fp64 (n,), of the gradients; one of exactly zero changes nothing.
        running: fp32 (2, n): the running norm, and how many gradients it has seen.
        max_norm: What a gradient may be in units of its running norm, from the first after the warm-up on.

    Returns:
        fp64 (n,) and fp32 (2, n). The mean of gradients of which one counts as at most twice (`SPIKE`) the mean
        before it; AdaGC (arXiv 2502.11034) limits what it averages too.
    """
    mean, seen = running.double()
    warm = seen >= WARM_UP
    limit = max_norm * mean
    factors = torch.where(warm & (norms > limit), limit / norms, 1.0)
    counted = torch.where(warm, torch.minimum(norms, SPIKE * mean), norms)
    rate = (1 / (seen + 1)).clamp(min=1 - DECAY)
    fresh = torch.stack([mean + rate * (counted - mean), seen + 1])
    return factors, torch.where(norms > 0, fresh.float(), running)


def half_of(group: Mapping[str, Any]) -> int:
    """Return the place in the sums of a group's half: whether its rule feels the scale of gradients."""
    return INVARIANT if RULES[group["algorithm"]].scale_invariant else FELT


def _is_one(coefficient: Tensor) -> bool:
    """Whether there is nothing to multiply, where asking does not make the host wait."""
    return coefficient.device.type == "cpu" and float(coefficient) == 1
