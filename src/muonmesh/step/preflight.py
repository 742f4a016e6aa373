"""Preflight: all ranks agree whether and how to step, before any rank writes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from muonmesh.comm.agreement import insist_on_equal
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import partial_axes, reduced
from muonmesh.comm.storage import local_of
from muonmesh.comm.telling import tell_all
from muonmesh.comm.work import Work
from muonmesh.errors import PlanError, about
from muonmesh.layout import Elementwise, Parameter
from muonmesh.settings.reading import SettingsFound
from muonmesh.step.flag_vector import Flags, ReducedFlags
from muonmesh.step.nonzero import nonzero_of
from muonmesh.step.parameter_steps import Collected, ParameterStep
from muonmesh.step.planning import Connected
from muonmesh.step.replicas import Fingerprint
from muonmesh.step.runtime import Runtime
from muonmesh.step.settings_digest import digests, lines


def _tell_later(runtime: Runtime, answers: ReducedFlags, raise_errors: Callable[[ReducedFlags], None]) -> None:
    """Make every rank raise the errors of the flags when its next step begins, because the CPU does not wait now."""

    def say(flags: Tensor) -> None:
        found = ReducedFlags(answers.flag_vector, flags)
        if bool(found.somebody("replan")) and not bool(found.somebody("error")):
            what = "Some ranks changed their param groups or parameters since the last step, and other ranks did not. "
            what += "Call add_param_group, and replace parameters, on every rank that shares them, before the same step"
            raise PlanError(about("the groups", what))
        if bool(found.stops()):
            raise_errors(found)

    runtime.tell(answers.flags, say, first=True)


def preflight(
    connected: Connected,
    collected: Collected,
    settings: SettingsFound,
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
        connected: The plan that this rank follows, with its exchange.
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
    planned, exchange = connected
    plan, muon = planned.plan, collected.muon
    entries, flag_vector = [*muon, *collected.elementwise], planned.flag_vector
    at_rest, error = settings.at_rest, settings.error or collected.error or error
    waits = at_rest or runtime.driver.host_waits(planned.device)
    alone = len(plan.ranks) == 1 and not settings.on_device  # then the CPU knows everything except the tensors' values
    if alone and error is not None:
        raise error
    if alone or not waits:
        for entry in entries:
            if entry is None or type(entry.gradient) is Tensor:
                continue
            if any(axes := partial_axes(entry.gradient)):
                entry.gradient = reduced(entry.member.tensor, entry.gradient, axes).contiguous()
    # A partial gradient is not summed yet: its matrix counts as non-zero if any rank has a non-zero summand.
    nonzero = nonzero_of(planned, muon, waits=waits)
    gradients = (entry.gradient for entry in collected.elementwise if entry is not None)
    moves = at_rest and any(bool(local_of(gradient).any()) for gradient in gradients if gradient is not None)
    moves = moves or not runtime.driver.creates_state  # gradients elsewhere may be no zeros
    if alone:
        exchange.wire.begin_step()
        return _of_one_rank(nonzero, skip, overflow, waits=waits, only_creates_state=at_rest and not moves)
    failed: bool | Tensor = error is not None
    if settings.on_device:
        failed = settings.wrong_on_device() | failed
    tail = {
        "skip": skip,
        "overflow": overflow,
        "moves": moves,
        "error": failed,
        "stays": True,
    }
    # The current values, without the runtime: it may keep these terms until the next step, and would then hold itself.
    terms = planned, settings, replicas, runtime.precision, runtime.loaded
    flags = exchange.wire.agree(flag_vector.vector(nonzero.clamp(max=1), entries, digests(*terms), tail))
    answers = ReducedFlags(flag_vector, flags)
    raise_errors = partial(_raise_errors, exchange, error, partial(lines, *terms), settings)
    overflowed, stops = answers.somebody("overflow"), answers.stops()
    if not waits:
        stop = stops | answers.somebody("replan") | answers.somebody("skip") | overflowed
        active = (answers.of("nonzero") != 0) & ~stop
        runtime.last.absent = _absent(entries, answers, waits=False)
        _tell_later(runtime, answers, raise_errors)
        return Flags(active, overflowed, stop=stop)
    if bool(stops):
        raise_errors(answers)
    told = answers.told()
    nonzeros = [flag != 0 for flag in told["nonzero"]]
    if any(told["replan"]):
        return Flags(nonzeros, overflowed, replan=True)
    for number, first, count in flag_vector.axes:  # parameters of which some rank may have a partial gradient
        entry, axes = entries[number], tuple(max(0, op - 1) for op in told["said"][first : first + count])
        if entry is not None and any(axes):
            entry.gradient = reduced(entry.member.tensor, entry.gradient, axes).contiguous()
    runtime.last.absent = _absent(entries, answers, waits=True)
    only_creates_state = at_rest and not any(told["moves"]) and not any(nonzeros)
    skips = any(told["skip"] + told["overflow"])
    return Flags(nonzeros, overflowed, skips, only_creates_state)


def _absent(
    entries: Sequence[ParameterStep | None], answers: ReducedFlags, *, waits: bool
) -> dict[Tensor, bool | Tensor]:
    """Return the tensors without a gradient on this rank, each with `ParameterStep.present`, which this function sets.

    If the CPU does not wait, only the device knows the flags. It is asked about shards only: either all replicas have a
    gradient, or none of them has.
    """
    lacking = {number: entry for number, entry in enumerate(entries) if entry is not None and not entry.present}
    if not lacking:
        return {}
    present: Sequence[bool] | Tensor = answers.present().tolist() if waits else answers.present()
    absent = dict[Tensor, bool | Tensor]()  # a flat tensor has one gradient for all its parameters
    for number, entry in lacking.items():
        layout, tensor = entry.member.storage.layout, entry.member.tensor
        known = waits or (layout is not None and layout.copies() < len(layout.ranks))
        absent[tensor] = absent.get(tensor, False) | (present[number] if known else False)
    for entry in lacking.values():
        entry.present = absent[entry.member.tensor]
    return absent


def _of_one_rank(
    nonzero: Tensor,
    skip: Tensor | None,
    overflow: Tensor | None,
    *,
    waits: bool,
    only_creates_state: bool,
) -> Flags:
    """Return the flags of a rank that shares no parameter with others; arguments as in `preflight`."""
    stops = [flag for flag in (skip, overflow) if flag is not None]
    active = nonzero != 0
    if waits:
        nonzeros: list[bool] = active.tolist()
        skips = any(map(bool, stops))
        return Flags(nonzeros, overflow, skips, only_creates_state and not any(nonzeros))
    stop = None
    for flag in stops:
        stop = flag if stop is None else stop | flag
        active = active & ~flag
    return Flags(active, overflow, stop=stop)


def stand_aside(connected: Connected, settings: SettingsFound, runtime: Runtime) -> bool:
    """Take part in the preflight of the other ranks, and report that this rank cannot follow the plan.

    If the CPUs of the other ranks do not read the flags now, ranks that follow the plan run the step with masked
    writes. This rank then takes part in their exchange, so that they do not wait for it.

    Args:
        connected: The last plan of this rank, which the other ranks may still follow, with its exchange.
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
    (planned, exchange), error = connected, settings.error
    # At learning rate 0 the CPUs of all ranks wait, as in `preflight`: see `SettingsFound.at_rest`.
    waits, flag_vector = settings.at_rest or runtime.driver.host_waits(planned.device), planned.flag_vector
    vector = flag_vector.only("replan" if error is None else "error", planned.device)
    answers = ReducedFlags(flag_vector, exchange.wire.agree(vector))
    raise_errors = partial(_raise_errors, exchange, error, dict, settings)
    if waits:
        if bool(answers.stops()):
            raise_errors(answers)
        return False
    if not (followed := bool(answers.somebody("stays"))) and not bool(answers.somebody("error")):
        return False  # all ranks have changed, so all plan again
    if followed:
        if runtime.precision.int8:
            planned.blocks.agree(exchange.wire)
        exchange.run(Work())
    _tell_later(runtime, answers, raise_errors)
    return True


def _raise_errors(
    exchange: Exchange,
    error: Exception | None,
    lines: Callable[[], Mapping[str, str]],
    settings: SettingsFound,
    answers: ReducedFlags,
) -> None:
    """Raise the error that the flags report. All ranks of the exchange call this function if the flags stop a step."""
    flag_vector, plan = answers.flag_vector, exchange.plan
    if bool(answers.somebody("error")):
        tell_all(None, error or settings.late(), group=exchange.group)
    parameters: list[Parameter | Elementwise] = [*plan.parameters, *plan.elementwise]
    for flag in answers.half_missing().nonzero().flatten().tolist():
        parameter = parameters[flag_vector.owners[flag]]
        what = f"Some of the ranks {parameter.target.ranks} have a gradient and others have none, so their replicas "
        what += "would drift apart. Every replica needs a gradient, or none. If some ranks do not use the parameter, "
        what += (
            "write DistributedDataParallel(..., find_unused_parameters=True). If your loop averages gradients, give "
        )
        what += "the parameter a gradient of zeros there"
        raise PlanError(about(parameter.name, what))
    axes = [number for number, _, count in flag_vector.axes for _ in range(count)]
    for flag in answers.mixed().nonzero().flatten().tolist():
        parameter = parameters[axes[flag]]
        what = f"The gradient is placed differently on the ranks {parameter.target.ranks}: partial on some and whole "
        what += "on others, or partial with different reductions. Write "
        what += "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        raise PlanError(about(parameter.name, what))
    insist_on_equal(exchange.group, lines())
