"""Preflight: what all ranks agree on before any of them writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.census import Census
from muonmesh.comm.agreement import compare
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import partial_axes, reduced
from muonmesh.comm.storage import local_of
from muonmesh.errors import PlanError, explain_error
from muonmesh.flags import Flags, nonzero_on_device, nonzero_on_host
from muonmesh.layout import Elementwise, Parameter
from muonmesh.planning import Planned
from muonmesh.slots import Slot

_SKIP, _OVERFLOW, _MOVES, _ERROR = -4, -3, -2, -1
"""Places of the last flags."""


@dataclass
class Pending:
    """Flags on their way to a host that does not wait for them, with what this rank itself found wrong."""

    flags: Tensor
    arrived: torch.cuda.Event | None
    error: Exception | None
    planned: Planned
    census: Census

    @staticmethod
    def start(flags: Tensor, error: Exception | None, planned: Planned, census: Census) -> Pending:
        """Begin to copy them."""
        if not flags.is_cuda:
            return Pending(flags.clone(), None, error, planned, census)
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Pending(host, arrived, error, planned, census)

    def raise_errors(self, exchange: Exchange) -> None:
        """Raise on every rank what the flags say, a step late."""
        if self.arrived is not None:
            self.arrived.synchronize()
        _raise_errors(self.planned, self.census, exchange, self.flags.tolist(), self.error)


def preflight(
    planned: Planned,
    exchange: Exchange,
    muon: Sequence[Slot | None],
    adamw: Sequence[Slot | None],
    *,
    error: Exception | None,
    skip: Tensor | None,
    overflow: Tensor | None,
    at_rest: bool,
    waits: bool,
) -> tuple[Flags, Pending | None]:
    """Reduce one vector of small flags over all ranks; raise on every rank if any found an error.

    The vector holds for each Matrix "any non-zero gradient", then what `Census` says, and last "skip", "overflow",
    "something moves" and "error". Partial gradients are reduced: on a host that waits after the ranks have agreed on
    who takes part, else before, by the ranks that have one.

    Args:
        planned: What is stepped.
        exchange: Reduces.
        muon, adamw: The parameters with their gradients, as `Planned` numbers them.
        error: What this rank found wrong; it takes part all the same, so that nobody waits for it.
        skip: 0-d bool tensor, whether this rank says that the step changes nothing.
        overflow: Likewise, whether its GradScaler has found an overflow; skips too.
        at_rest: Every learning rate is exactly 0.
        waits: Whether the host reads the flags now. If not, writes are masked by them on the device, and errors are
            raised through the Pending when the next step begins.

    Raises:
        Exception: ``error``, on the rank that found it.
        PlanError: on the other ranks; and on every rank if some replicas lack a gradient that others have.
    """
    plan, device, slots = planned.plan, planned.device, (*muon, *adamw)
    census = planned.census
    waits = waits or at_rest
    if not waits:
        for slot in slots:
            if slot is not None and any(axes := partial_axes(slot.gradient)):
                slot.gradient = reduced(slot.tensor, slot.gradient, axes).contiguous()
    gradients = [local_of(slot.gradient) for slot in adamw if slot is not None and slot.gradient is not None]
    told = [torch.zeros((), dtype=torch.bool) if flag is None else flag for flag in (skip, overflow)]
    tail = [
        *census.counted(slots),
        *(int(bool(flag)) if flag.device.type == "cpu" else 0 for flag in told),
        int(at_rest and any(bool(gradient.any()) for gradient in gradients)),
        int(error is not None),
    ]
    if waits:
        nonzero = torch.tensor(nonzero_on_host(plan, planned.holdings, muon), dtype=torch.uint8, device=device)
    else:
        nonzero = nonzero_on_device(plan, planned.holdings, muon, device)
    flags = torch.cat([nonzero, torch.tensor(tail, dtype=torch.uint8).to(device, non_blocking=True)])
    for place, flag in zip((_SKIP, _OVERFLOW), told, strict=True):
        if flag.device.type != "cpu":
            flags[place] = flag
    exchange.reduce_flags(flags)
    overflowed = flags[_OVERFLOW] != 0
    matrices = len(plan.assignments)
    if not waits:
        stop = _stop(census, matrices, flags) | (flags[_SKIP] != 0) | overflowed
        active = (flags[:matrices] != 0) & ~stop
        present = [slot is not None and slot.gradient is not None for slot in muon]
        return Flags(list(active.unbind()), present, overflowed, stop=stop), Pending.start(
            flags, error, planned, census
        )
    found = flags.tolist()
    _raise_errors(planned, census, exchange, found, error)
    for number, axes in _partial(census, found[matrices + 2 * census.size :]).items():
        slot = slots[number]
        if slot is not None:
            slot.gradient = reduced(slot.tensor, slot.gradient, axes).contiguous()
    present = [any(found[matrices + first : matrices + first + count]) for first, count in census.presence]
    only_creates_state = at_rest and not found[_MOVES] and not any(found[:matrices])
    nonzeros = [bool(flag) for flag in found[:matrices]]
    skips = bool(found[_SKIP] or found[_OVERFLOW])
    return Flags(nonzeros, present[: len(muon)], overflowed, skips, only_creates_state), None


def _partial(census: Census, flags: Sequence[int]) -> dict[int, tuple[bool, ...]]:
    """Return the parameters of which some rank has a partial gradient, with the axes."""
    found = {}
    for number, first, count in census.axes:
        axes = tuple(bool(flag) for flag in flags[first : first + count])
        if any(axes):
            found[number] = axes
    return found


def _raise_errors(
    planned: Planned, census: Census, exchange: Exchange, flags: Sequence[int], error: Exception | None
) -> None:
    if flags[_ERROR]:
        compare(exchange.group, exchange.plan, error)
    parameters: list[Parameter | Elementwise] = [*planned.plan.parameters, *planned.plan.others]
    present = flags[len(planned.plan.assignments) :]
    missing, partial = present[census.size :], present[2 * census.size :]
    summed = _partial(census, partial)  # a missing summand is zero
    for number, (parameter, (first, count)) in enumerate(zip(parameters, census.presence, strict=True)):
        differ = any(present[first + part] and missing[first + part] for part in range(count))
        if differ and parameter.target.copies() > 1 and number not in summed:
            raise PlanError(
                explain_error(
                    parameter.name,
                    f"a gradient on some of the ranks {parameter.target.ranks} and none on others",
                    "one on every replica or on none, since replicas would drift apart",
                    "Let DDP handle parameters that some ranks do not use (find_unused_parameters=True)",
                )
            )
    for number, first, count in census.axes:
        if any(partial[axis] and partial[census.width + axis] for axis in range(first, first + count)):
            raise PlanError(
                explain_error(
                    parameters[number].name,
                    f"a partial gradient on some of the ranks {parameters[number].target.ranks} and a whole one on "
                    "others",
                    "the same kind on every rank",
                    "Write parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
                )
            )


def _stop(census: Census, matrices: int, flags: Tensor) -> Tensor:
    """Return on the device whether `_raise_errors` will raise."""
    present = flags[matrices : matrices + census.size]
    missing = flags[matrices + census.size : matrices + 2 * census.size]
    replicated = torch.tensor(census.replicated, dtype=torch.uint8).to(flags.device, non_blocking=True)
    partial = flags[matrices + 2 * census.size :]
    mixed = partial[: census.width] * partial[census.width : 2 * census.width]
    return (flags[_ERROR] != 0) | (present * missing * replicated != 0).any() | (mixed != 0).any()
