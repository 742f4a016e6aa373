"""Pipeline: what ranks of different pipeline stages, which share no parameter, tell each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from muonmesh.errors import PlanError, about


def failed_elsewhere() -> PlanError:
    """Return the error of a rank that has found nothing wrong itself."""
    return PlanError(about("step", "Another rank found an error, so every rank stops. Read the message of that rank"))


def raise_together(error: Exception | None, device: torch.device) -> None:
    """Raise on every rank if any has an error: a stage would wait for the activations of one that has raised.

    One number is summed over the world.

    Raises:
        Exception: ``error`` on the ranks that have one.
        PlanError: on the others.
    """
    failed = torch.tensor([float(error is not None)], dtype=torch.float32, device=device)
    dist.all_reduce(failed)
    if error is not None:
        raise error
    if float(failed):
        raise failed_elsewhere()
