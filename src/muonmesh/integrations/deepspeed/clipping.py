"""Clipping: norms of the whole model's gradients, taken before DeepSpeed steps the first flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.clip.limits import GradNorms, Limits, scale_groups
from muonmesh.clip.squares import MATRICES, half_of
from muonmesh.errors import explain_error
from muonmesh.integrations.deepspeed.calls import Call
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.numerics.rules import is_matrix_rule

_ARGUMENTS = ("max_norm", "policy", "skip_above")


def limits_of(clip: float | Mapping[str, Any] | None, config: Mapping[str, Any]) -> Limits | None:
    """Return the limits that ``clip=`` means.

    Args:
        clip: The largest norm of AdamW's gradients, or arguments of `Muon.clip_grad_norm_` by name.
        config: DeepSpeed's config, which may ask for clipping too.

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, or DeepSpeed clips as well.
    """
    if clip is None:
        return None
    given: dict[str, Any] = dict(clip) if isinstance(clip, Mapping) else {"max_norm": clip}
    for key in given:
        if key not in _ARGUMENTS:
            known = ", ".join(_ARGUMENTS)
            raise TypeError(explain_error("clip", f"the argument {key!r}", f"one of {known}", "Rename or remove it"))
    if config.get("gradient_clipping"):
        found = f"clip= and gradient_clipping {config['gradient_clipping']} in the config"
        raise ValueError(explain_error("clip", found, "only one of them", "Remove gradient_clipping"))
    limits = Limits(**given)
    limits.check()
    return limits


def measure(
    limits: Limits, zero: Any, calls: Sequence[Call], visible: Sequence[Call]
) -> tuple[GradNorms, dict[int, Tensor]]:
    """Return the norms of the gradients of all calls, and what `clip` multiplies each half by; all ranks call it.

    Between backward and step DeepSpeed holds the gradients of the other flat tensors where its stage keeps them, still
    multiplied by the loss scale; they are read there.

    Args:
        limits: By which a step is clipped.
        zero: DeepSpeed's own optimizer.
        calls: What a step consists of.
        visible: Those of which DeepSpeed has prepared the gradients.
    """
    sums = torch.zeros(MATRICES, dtype=torch.float64, device=calls[0].tensor.device)
    for number, call in enumerate(calls):
        prepared = call in visible
        scale = 1.0 if prepared else float(getattr(zero, "loss_scale", 1.0))
        for group in call.muon.param_groups:
            half = half_of(group)
            for tensor in group["params"]:
                gradient = tensor.grad if prepared else _pending(zero, number, tensor)
                for storage in call.storages[tensor] if gradient is not None else ():
                    for part in storage.parts(gradient):
                        squares = sums_of_squares([part])[0].to(sums.device)
                        sums[half] += squares / (scale * scale * storage.copies)
    dist.all_reduce(sums)
    skip = limits.skips(sums)
    return limits.told(sums, skip), limits.coefficients(sums, skip)


def clip(call: Call, limits: Limits, coefficients: Mapping[int, Tensor]) -> None:
    """Scale the gradients of a call that is about to be stepped."""
    scale_groups(call.muon.param_groups, call.muon.gradients, coefficients)
    if limits.policy == "per_matrix" and any(is_matrix_rule(g["algorithm"]) for g in call.muon.param_groups):
        # Of a call with both halves (stage 0) AdamW's has just been scaled by its own norm, which is at most that.
        call.muon.clip_grad_norm_(limits.max_norm, policy="per_matrix")


def _pending(zero: Any, number: int, tensor: Tensor) -> Tensor:
    """Return the gradient that DeepSpeed will give a flat tensor, (size,) or without padding at its end."""
    if tensor.grad is not None:  # offloaded: it is there already
        return tensor.grad
    pieces: Sequence[Tensor] = zero.averaged_gradients[number]
    return torch.cat([piece.reshape(-1) for piece in pieces])
