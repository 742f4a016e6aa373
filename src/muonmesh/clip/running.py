"""Running norms: limit the gradient of each matrix under the policy "per_matrix"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonmesh.clip.limits import is_one
from muonmesh.comm.gradients import GradientSource, multiply, own_gradient
from muonmesh.comm.views import view_in_storage
from muonmesh.numerics.kernels.memory import upload
from muonmesh.step.planning import Planned
from muonmesh.step.runtime import Clip
from muonmesh.step.state_layout import RUNNING

DECAY = 0.95
"""Decay of a matrix's running norm, so that it remembers about twenty gradients."""

WARM_UP = 10
"""The number of first gradients of a matrix that ``per_matrix`` only measures. The first 1 / (1 − DECAY) gradients of
a matrix count equally in the running norm."""

SPIKE = 2.0
"""A gradient counts in the running norm as at most SPIKE times the running norm.

Otherwise one spike would raise the running norm so far that it no longer limits later spikes.
"""


def limit_matrices(
    planned: Planned,
    state: Mapping[Tensor, Mapping[str, Any]],
    source: GradientSource,
    squares: Tensor,
    skip: Tensor,
    max_norm: float,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Limit the gradient of each matrix on this rank by its running norm, and return the new running norms.

    Args:
        planned: The plan of the optimizer.
        state: The optimizer's state.
        source: The source of the gradients.
        squares: fp64, the squared gradient norm of each matrix of the plan, over all ranks.
        skip: 0-d bool, whether the step is skipped; then no gradient is scaled.
        max_norm: The largest norm of a gradient, in units of its matrix's running norm.

    Returns:
        For each tensor, fp32 (2, matrices): the new running norms, and the numbers of gradients in them.
    """
    sizes = [len(numbers) for numbers in planned.matrices_of.values()]
    if not sizes:
        return ()
    none = torch.zeros(max(sizes), dtype=torch.float32, device=squares.device)
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
    # By tensor: a flat tensor holds several parameters, and its gradient is written back once.
    names = {member.tensor: member.name for member in members.values()}
    gradients = {tensor: own_gradient(name, tensor, source) for tensor, name in names.items()}
    scaled = dict[Tensor, Tensor]()
    for factor, assignment, pieces in zip(every, planned.plan.assignments, planned.gradient_holdings, strict=True):
        member = members.get(assignment.parameter)
        own = None if member is None else gradients[member.tensor]
        if member is None or own is None or is_one(factor):
            continue
        if not planned.plan.parameters[assignment.parameter].scale_invariant:  # AdamW's norm limits it
            continue
        local, scaled[member.tensor] = own
        for piece in pieces:
            multiply(view_in_storage(local, piece), factor)
    for tensor, gradient in scaled.items():
        source.write(tensor, gradient)
    return tuple(zip(planned.matrices_of, torch.split(fresh, sizes, dim=1), strict=True))


def _limited(norms: Tensor, running: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the factors that limit gradients by their running norms, and the new running norms.

    Args:
        norms: fp64 (n,), the gradient norms; a norm of exactly zero does not change its running norm.
        running: fp32 (2, n): the running norm, and the number of gradients in it.
        max_norm: The largest norm of a gradient, in units of its running norm, after the warm-up.

    Returns:
        fp64 (n,) and fp32 (2, n). A running norm is a mean of gradient norms, in which each counts as at most twice
        (`SPIKE`) the mean before it. AdaGC (arXiv 2502.11034) limits the averaged norms too.
    """
    mean, seen = running.double()
    warm = seen >= WARM_UP
    limit = max_norm * mean
    factors = torch.where(warm & (norms > limit), limit / norms, 1.0)
    counted = torch.where(warm, torch.minimum(norms, SPIKE * mean), norms)
    rate = (1 / (seen + 1)).clamp(min=1 - DECAY)
    fresh = torch.stack([mean + rate * (counted - mean), seen + 1])
    return factors, torch.where(norms > 0, fresh.float(), running)


def keep_running_norms(clip: Clip, state: Mapping[Tensor, Mapping[str, Any]], stop: Tensor | None) -> None:
    """Write the running norms to the state after a step, unless ``stop``, a 0-d bool on the device, is True."""
    for tensor, fresh in clip.running:
        for key, value in zip(RUNNING, fresh, strict=True):
            kept = state[tensor].get(key)
            if kept is not None:  # without a gradient, no state has been created
                value = value.view_as(kept)
                kept.copy_(value if stop is None else torch.where(stop, kept, value))
