"""Preflight: what all ranks agree on before any of them writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.comm.exchange import Exchange, compare
from muonmesh.errors import PlanError, explain_error
from muonmesh.layout import Plan
from muonmesh.planning import Planned
from muonmesh.step import Flags, Slot, nonzero_on_device, nonzero_on_host


@dataclass
class Pending:
    """Flags on their way to a host that does not wait for them, with what this rank itself found wrong."""

    flags: Tensor
    arrived: torch.cuda.Event | None
    error: Exception | None

    @staticmethod
    def start(flags: Tensor, error: Exception | None) -> Pending:
        """Begin to copy them."""
        if not flags.is_cuda:
            return Pending(flags.clone(), None, error)
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Pending(host, arrived, error)

    def raise_errors(self, exchange: Exchange) -> None:
        """Raise on every rank what the flags say, a step late."""
        if self.arrived is not None:
            self.arrived.synchronize()
        _raise_errors(exchange, self.flags.tolist(), self.error)


def preflight(
    planned: Planned,
    exchange: Exchange,
    muon: Sequence[Slot],
    adamw: Sequence[Sequence[Slot]],
    *,
    error: Exception | None,
    at_rest: bool,
    waits: bool,
) -> tuple[Flags, Pending | None]:
    """Reduce one vector of small flags over all ranks; raise on every rank if any found an error.

    The vector holds for each Matrix "any non-zero gradient", for each Muon parameter "present" and "missing", and
    last "something moves" and "error".

    Args:
        planned: What is stepped.
        exchange: Reduces.
        muon, adamw: The parameters with their gradients.
        error: What this rank found wrong; it takes part all the same, so that nobody waits for it.
        at_rest: Every learning rate is exactly 0.
        waits: Whether the host reads the flags now. If not, writes are masked by them on the device, and errors are
            raised through the Pending when the next step begins.

    Raises:
        Exception: ``error``, on the rank that found it.
        PlanError: on the other ranks; and on every rank if some replicas lack a gradient that others have.
    """
    plan, device = planned.plan, planned.device
    waits = waits or at_rest
    gradients = [slot.gradient for slots in adamw for slot in slots if slot.gradient is not None]
    tail = [
        *(int(slot.gradient is not None) for slot in muon),
        *(int(slot.gradient is None) for slot in muon),
        int(at_rest and any(bool(gradient.any()) for gradient in gradients)),
        int(error is not None),
    ]
    if waits:
        nonzero = torch.tensor(nonzero_on_host(plan, planned.holdings, muon), dtype=torch.uint8, device=device)
    else:
        nonzero = nonzero_on_device(plan, planned.holdings, muon, device)
    flags = torch.cat([nonzero, torch.tensor(tail, dtype=torch.uint8).to(device, non_blocking=True)])
    exchange.reduce_flags(flags)
    matrices = len(plan.assignments)
    if waits:
        found = flags.tolist()
        _raise_errors(exchange, found, error)
        present = [bool(flag) for flag in found[matrices : matrices + len(muon)]]
        only_creates_state = at_rest and not found[-2] and not any(found[:matrices])
        return Flags([bool(flag) for flag in found[:matrices]], present, only_creates_state), None
    stop = _stop(plan, flags)
    active = (flags[:matrices] != 0) & ~stop
    present = [slot.gradient is not None for slot in muon]
    return Flags(list(active.unbind()), present, stop=stop), Pending.start(flags, error)


def _raise_errors(exchange: Exchange, flags: Sequence[int], error: Exception | None) -> None:
    if flags[-1]:
        try:
            compare(exchange.group, exchange.plan, None if error is None else str(error))
        except PlanError:
            if error is not None:
                raise error from None
            raise
    matrices, count = len(exchange.plan.assignments), len(exchange.plan.parameters)
    for number, parameter in enumerate(exchange.plan.parameters):
        if flags[matrices + number] and flags[matrices + count + number] and parameter.target.copies() > 1:
            raise PlanError(
                explain_error(
                    parameter.name,
                    f"a gradient on some of the ranks {parameter.target.ranks} and none on others",
                    "one on every replica or on none, since replicas would drift apart",
                    "Let DDP handle parameters that some ranks do not use (find_unused_parameters=True)",
                )
            )


def _stop(plan: Plan, flags: Tensor) -> Tensor:
    """Return on the device whether `_raise_errors` will raise."""
    matrices, count = len(plan.assignments), len(plan.parameters)
    present, missing = flags[matrices : matrices + count], flags[matrices + count : matrices + 2 * count]
    copies = [parameter.target.copies() > 1 for parameter in plan.parameters]
    replicated = torch.tensor(copies, dtype=torch.uint8).to(flags.device, non_blocking=True)
    return (flags[-1] != 0) | (present * missing * replicated != 0).any()
