"""Preflight: all ranks agree whether and how to step, before any rank writes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from muonmesh.comm.agreement import Agreed, Said, standing
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.gradients import partial_axes, reduced
from muonmesh.comm.same_plan import insist_on_equal
from muonmesh.comm.step_callbacks import StepCallbacks
from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_storage
from muonmesh.errors import PlanError, about
from muonmesh.layout import Elementwise, Parameter
from muonmesh.layout.piece_table import PieceTable, Row
from muonmesh.numerics.kernels.pinned_copies import upload
from muonmesh.settings.reading import StepSettings
from muonmesh.step import by_kernel
from muonmesh.step.flag_vector import PLACED, Flags, FlagVector
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.parameters import Collected
from muonmesh.step.planning import StepPlan
from muonmesh.step.replicas import Fingerprint, lines, said_of_settings
from muonmesh.step.runtime import Runtime

Entries = Sequence[ParameterStep | None]
"""The parameters of a plan with their gradients, Muon's first; None for a parameter that only other ranks hold."""


def preflight(
    planned: StepPlan,
    collected: Collected,
    settings: StepSettings,
    runtime: Runtime,
    replicas: Mapping[int, Fingerprint],
    *,
    error: Exception | None,
    skip: Tensor | None,
    overflow: Tensor | None,
) -> Flags:
    """Reduce one vector of small flags over all ranks (`FlagVector`); raise on every rank if any rank found an error.

    Partial gradients of replicated parameters are reduced too. If the CPU waits for the flags, this happens after the
    ranks have agreed which gradients are partial; else before, on the ranks that have a partial gradient.

    Args:
        planned: The plan that this rank follows.
        collected: The parameters with their gradients.
        settings: The settings that this rank read from its groups.
        runtime: The runtime state of the optimizer. If its CPU does not wait for the flags, the device masks writes by
            the flags, and errors are raised when the next step begins.
        replicas: `fingerprints` of replicated parameters, if this step compares them; else empty.
        error: Another error of this rank. The rank still takes part in the reduction, so that no rank waits for it.
        skip: 0-d bool tensor, whether this rank wants the step to change nothing.
        overflow: 0-d bool tensor, whether its GradScaler has found an overflow; this skips the step too.

    Returns:
        The flags that the ranks agreed on. If ``Flags.replan`` is set, some rank must plan again, and no other flag
        counts.

    Raises:
        Exception: ``error``, on the rank that found it.
        PlanError: on the other ranks; and on every rank if some replicas lack a gradient that other replicas have, or
            if ranks that share a parameter have different settings for it.
    """
    exchange, entries = planned.exchange, [*collected.muon, *collected.elementwise]
    error = settings.error or collected.error or error
    waits = settings.at_rest or host_waits(runtime, planned)
    alone = len(exchange.plan.ranks) == 1
    if alone and error is not None:
        raise error
    snapshot = collected.snapshot
    if (alone or not waits) and not (snapshot is not None and snapshot.is_plain):
        _reduce(entries, {number: partial_axes(e.gradient) for number, e in enumerate(entries) if e is not None})
    # If partial gradients are not summed yet, a matrix counts as non-zero if any rank has a non-zero summand.
    nonzero = _nonzero(planned, collected, waits=waits)
    moves = settings.at_rest and _moves(collected)
    if alone:
        exchange.communicator.begin_step()
        stop = skip if overflow is None else overflow if skip is None else skip | overflow
        return _flags(nonzero, stop, overflow, waits=waits, only_creates_state=settings.at_rest and not moves)
    # The current values, without the runtime: it may keep these terms until the next step, and would then hold itself.
    terms, flag_vector = (planned, settings, replicas, runtime.precision, runtime.loaded), planned.flag_vector
    answers: dict[str, Said] = {
        **standing(error, follows=True),
        **flag_vector.of_gradients(entries),
        **said_of_settings(*terms),
        **{"skip": skip, "overflow": overflow, "moves": moves, "nonzero": nonzero},
    }
    agreed = exchange.communicator.agree(flag_vector.agreement, answers, planned.device)
    raise_errors = partial(_raise_errors, exchange, flag_vector, error, partial(lines, *terms))
    overflowed = None if overflow is None else agreed.any("overflow")
    if not waits:
        _tell_later(runtime, agreed, raise_errors)
        runtime.last.absent = _absent(entries, agreed, waits=False)
        stop = _stops(agreed, "replan", "skip", "overflow")
        return _flags(agreed.answers("nonzero"), stop, overflowed, waits=False)
    raise_errors(agreed)
    if agreed.says("replan"):
        return Flags([], None, replan=True)
    _reduce(entries, flag_vector.partial(agreed))
    runtime.last.absent = _absent(entries, agreed, waits=True)
    rests, stops = settings.at_rest and not agreed.says("moves"), agreed.says("skip", "overflow")
    return _flags(agreed.on_host("nonzero"), stops, overflowed, waits=True, only_creates_state=rests)


def host_waits(runtime: Runtime, planned: StepPlan) -> bool:
    """Return whether the CPU waits for reduced flags and sums of the parameters of a plan."""
    waits = runtime.driver.waits
    return planned.device.type == "cpu" if waits is None else waits


def _nonzero(planned: StepPlan, collected: Collected, *, waits: bool) -> list[bool] | Tensor:
    """Return for each matrix whether this rank's gradient is not zero: a list if the CPU knows, else on the device."""
    table, matrices, snapshot = planned.gradient_table, len(planned.plan.assignments), collected.snapshot
    gradients = collected.gradients
    if snapshot is None or not snapshot.is_plain:
        gradients = [of if of is None else local_of(of) for of in gradients]
    if planned.device.type == "cpu" and waits:
        return _nonzero_on_host(table, gradients, matrices)
    vectors = by_kernel.vectors_of_stream(planned.vectors, planned.device)
    if "active" not in vectors:
        vectors["active"] = torch.empty(matrices, dtype=torch.bool, device=planned.device)
    nonzero: Tensor = vectors["active"].zero_()
    _mark_nonzero(by_kernel.mark_nonzero(table, gradients, vectors, nonzero, snapshot), gradients, nonzero)
    return nonzero


def _nonzero_on_host(table: PieceTable, gradients: Sequence[Tensor | None], matrices: int) -> list[bool]:
    """Return for each matrix whether its gradient has an element that is not zero, or is NaN.

    Some elements of each piece are looked at first, because torch reads all elements before it answers.

    Args:
        table: The pieces of all gradients on this rank.
        gradients: The gradients, as the table numbers them.
        matrices: The number of matrices.
    """
    is_nonzero = [False] * matrices
    for row in table.rows:
        if not is_nonzero[row.assignment] and (gradient := gradients[row.parameter]) is not None:
            first = gradient.as_strided((), (), gradient.storage_offset() + row.piece.storage_start).item()
            parts = view_in_storage(gradient, row.piece).chunk(16) if first == 0 else ()
            is_nonzero[row.assignment] = first != 0 or any(bool(part.any()) for part in parts)
    return is_nonzero


def _mark_nonzero(rows: Sequence[Row], gradients: Sequence[Tensor | None], nonzero: Tensor) -> None:
    """Mark matrices on the device of which a row of the gradient has an element that is not zero, or is NaN.

    Args:
        rows: The rows.
        gradients: The gradients, as the table numbers them.
        nonzero: bool (matrices,), written.
    """
    pairs = [(row, g) for row in rows if row.piece.numel and (g := gradients[row.parameter]) is not None]
    if pairs:
        norms = torch._foreach_norm([view_in_storage(gradient, row.piece) for row, gradient in pairs], float("inf"))
        numbers = upload([row.assignment for row, _ in pairs], dtype=torch.int64, device=nonzero.device)
        # With uint8, 256 rows of one matrix would add up to none.
        counts = torch.zeros(len(nonzero), dtype=torch.int32, device=nonzero.device)
        nonzero |= counts.index_add_(0, numbers, (torch.stack(norms) != 0).to(torch.int32)) != 0


def _moves(collected: Collected) -> bool:
    """Return whether a gradient of AdamW's parameters is not zero, so that a step does not only create state."""
    gradients = [entry.gradient for entry in collected.elementwise if entry is not None]
    return any(bool(local_of(gradient).any()) for gradient in gradients if gradient is not None)


def _reduce(entries: Entries, partial_gradients: Mapping[int, Sequence[int]]) -> None:
    """Reduce partial gradients, given by the numbers of their parameters with the reduction along each axis."""
    for number, axes in partial_gradients.items():
        if (entry := entries[number]) is not None and any(axes):
            entry.gradient = reduced(entry.member.tensor, entry.gradient, axes).contiguous()


def _absent(entries: Entries, agreed: Agreed, *, waits: bool) -> dict[Tensor, bool | Tensor]:
    """Return the tensors without a gradient on this rank, each with `ParameterStep.present`, which this function sets.

    If the CPU does not wait, only the device knows the flags. It is asked about shards only: either all replicas have a
    gradient, or none of them has.
    """
    lacking = {number: entry for number, entry in enumerate(entries) if entry is not None and not entry.present}
    if not lacking:
        return {}
    present: Sequence[bool] | Tensor = agreed.on_host("present") if waits else agreed.answers("present")
    absent = dict[Tensor, bool | Tensor]()  # a flat tensor has one gradient for all its parameters
    for number, entry in lacking.items():
        layout, tensor = entry.member.storage.layout, entry.member.tensor
        is_known = waits or (layout is not None and layout.copies() < len(layout.ranks))
        absent[tensor] = absent.get(tensor, False) | (present[number] if is_known else False)
    for entry in lacking.values():
        entry.present = absent[entry.member.tensor]
    return absent


def _flags(
    active: list[bool] | Tensor,
    stop: bool | Tensor | None,
    overflow: Tensor | None,
    *,
    waits: bool,
    only_creates_state: bool = False,
) -> Flags:
    """Return the flags of a step, given the matrices that move and whether it stops; None: nothing can stop it."""
    if not waits:
        assert isinstance(active, Tensor)
        assert not isinstance(stop, bool)
        return Flags(active if stop is None else active & ~stop, overflow, stop=stop)
    nonzeros: list[bool] = active.tolist() if isinstance(active, Tensor) else active
    return Flags(nonzeros, overflow, stop is not None and bool(stop), only_creates_state and not any(nonzeros))


def stand_aside(planned: StepPlan, settings: StepSettings, runtime: Runtime) -> bool:
    """Take part in the preflight of the other ranks, and report that this rank cannot follow the plan.

    If the CPUs of the other ranks do not read the flags now, ranks that follow the plan run the step with masked
    writes. This rank then takes part in their exchange, so that they do not wait for it.

    Args:
        planned: The last plan of this rank, which the other ranks may still follow.
        settings: The settings that this rank read from its groups. If they have no error, the groups have changed, so
            that all ranks must plan again.
        runtime: The runtime state of the optimizer.

    Returns:
        Whether all ranks will raise an error when their next step begins, because CPUs do not wait for the flags. If
        this rank raised now, it would be a step behind the others. False: all ranks must plan again.

    Raises:
        Exception: the error of this rank, if the CPU waits.
        PlanError: another rank found an error, if the CPU waits.
    """
    exchange, error = planned.exchange, settings.error
    # At learning rate 0 the CPUs of all ranks wait, as in `preflight`: see `StepSettings.at_rest`.
    waits, flag_vector = settings.at_rest or host_waits(runtime, planned), planned.flag_vector
    agreed = exchange.communicator.agree(flag_vector.agreement, standing(error, follows=False), planned.device)
    raise_errors = partial(_raise_errors, exchange, flag_vector, error, dict)
    if waits:
        raise_errors(agreed)
        return False
    if agreed.plan_again(waits=False, follows=False):
        return False
    if bool(agreed.any("follows")):
        if runtime.precision.int8:
            planned.blocks.agree(exchange.communicator)
        exchange.run(StepCallbacks())
    _tell_later(runtime, agreed, raise_errors)
    return True


def _tell_later(runtime: Runtime, agreed: Agreed, raise_errors: Callable[[Agreed], None]) -> None:
    """Make every rank raise the errors of the flags when its next step begins, because the CPU does not wait now."""

    def say(flags: Tensor) -> None:
        answers = replace(agreed, flags=flags)
        if answers.says("replan") and not answers.says("error"):
            text = "Some ranks changed their param groups or parameters since the last step, and other ranks did not. "
            text += "Call add_param_group, and replace parameters, on every rank that shares them, before the same step"
            raise PlanError(about("the groups", text))
        raise_errors(answers)

    runtime.tell(agreed.flags, say, first=True)


def _stops(agreed: Agreed, *names: str) -> Tensor:
    """Return whether a step ends in an error on every rank, or any rank says yes to one of ``names``: 0-d bool."""
    return agreed.any("error", *names) | agreed.differs().any()


def _raise_errors(
    exchange: Exchange,
    flag_vector: FlagVector,
    error: Exception | None,
    lines: Callable[[], Mapping[str, str]],
    agreed: Agreed,
) -> None:
    """Raise the error that the flags report, if any. All ranks of the exchange call this. The CPU waits."""
    if not agreed.says("error") and not bool(agreed.differs().any()):
        return
    if agreed.says("error"):
        gather_objects(None, error, group=exchange.group)
    parameters: list[Parameter | Elementwise] = [*exchange.plan.parameters, *exchange.plan.elementwise]
    for shard in agreed.differs("shard").nonzero().flatten().tolist():
        parameter = parameters[flag_vector.shards[shard]]
        text = f"Some of the ranks {parameter.target.ranks} have a gradient and others have none, so their replicas "
        text += "would drift apart. Every replica needs a gradient, or none. If some ranks do not use the parameter, "
        text += (
            "write DistributedDataParallel(..., find_unused_parameters=True). If your loop averages gradients, give "
        )
        text += "the parameter a gradient of zeros there"
        raise PlanError(about(parameter.name, text))
    for bit in agreed.differs("placed").nonzero().flatten().tolist():
        parameter = parameters[next(number for number, axes in flag_vector.axes.items() if bit // PLACED in axes)]
        text = f"The gradient is placed differently on the ranks {parameter.target.ranks}: partial on some and whole "
        text += "on others, or partial with different reductions. Write "
        text += "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        raise PlanError(about(parameter.name, text))
    insist_on_equal(exchange.group, lines())
