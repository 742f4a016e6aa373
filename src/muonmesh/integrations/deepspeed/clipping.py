"""Clipping: the limits of an engine, and the norms of all its gradients, before a step changes the first tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.clip.limits import GradNorms, Limits
from muonmesh.clip.norm_means import counted, means_of
from muonmesh.clip.squares import norms_of, scale_kind_of, zeros_for
from muonmesh.comm.storage import Storage
from muonmesh.errors import explain_error
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.optimizer import Muon


def limits_of(clip: float | Mapping[str, Any] | None, config: Mapping[str, Any]) -> Limits | None:
    """Return the limits that the ``clip=`` argument of `initialize` sets; None means no clipping.

    Args:
        clip: The largest norm of AdamW's gradients over all ranks; or ``max_norm``, ``policy`` and ``skip_above`` of
            `Muon.clip_grad_norm_`, by name; or None.
        config: DeepSpeed's config, which must not set ``gradient_clipping`` too.

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, or the config sets ``gradient_clipping``.
    """
    if clip is None:
        return None
    if config.get("gradient_clipping"):
        found = f"clip= and gradient_clipping {config['gradient_clipping']} in the config"
        raise ValueError(explain_error("clip", found, "only one of them", "Remove gradient_clipping"))
    limits = Limits(**clip) if isinstance(clip, Mapping) else Limits(clip)
    limits.check()
    return limits


def measure(
    limits: Limits,
    zero: Any,
    storages: Mapping[Muon, Mapping[Tensor, Sequence[Storage]]],
    visible: Sequence[Muon],
    groups: Sequence[Mapping[str, Any]],
) -> tuple[GradNorms, dict[int, Tensor], Tensor | None]:
    """Return the norms of the gradients of all tensors, the factors to scale them, and the new `means_of` the groups.

    All ranks call it. There are no new means if ``skip_above`` is no multiple of them.

    DeepSpeed has prepared the gradients only of the visible tensors. The gradients of the other flat tensors lie where
    the ZeRO stage keeps them, still multiplied by the loss scale. `measure` reads them there.

    Args:
        limits: The limits by which a step is clipped.
        zero: DeepSpeed's own optimizer.
        storages: For each `Muon` of a step, by its tensors: the storages of the parameters in them.
        visible: The Muons whose gradients DeepSpeed has prepared.
        groups: The param groups of the engine's optimizer, which have the running means of the norms.
    """
    device = next(tensor.device for tensors in storages.values() for tensor in tensors)
    sums = zeros_for((), device)
    for number, (muon, tensors) in enumerate(storages.items()):
        prepared = muon in visible
        scale = 1.0 if prepared else float(getattr(zero, "loss_scale", 1.0))
        for group in muon.param_groups:
            kind = scale_kind_of(group)
            for tensor in group["params"]:
                gradient = tensor.grad if prepared else _pending(zero, number, tensor)
                for storage in tensors[tensor] if gradient is not None else ():
                    for part in storage.parts(gradient):
                        squares = sums_of_squares([part])[0].to(sums.device)
                        sums[kind] += squares / (scale * scale * storage.copies)
    dist.all_reduce(sums)
    means = None if limits.multiple is None else means_of(groups, sums.device)
    skip = limits.skips(sums, means=means)
    fresh = None if means is None else counted(means, torch.stack([*norms_of(sums).values()]))
    return limits.grad_norms(sums, skip), limits.coefficients(sums, skip), fresh


def _pending(zero: Any, number: int, tensor: Tensor) -> Tensor:
    """Return the gradient that DeepSpeed will give to a flat tensor: shape (size,), or shorter by the padding."""
    if tensor.grad is not None:  # an offloaded tensor has its gradient already
        return tensor.grad
    pieces: Sequence[Tensor] = zero.averaged_gradients[number]
    return torch.cat([piece.reshape(-1) for piece in pieces])
