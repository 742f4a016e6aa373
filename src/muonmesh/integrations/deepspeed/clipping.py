"""Clipping: the limits of an engine, and the norms of all its gradients, before a step changes the first tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.clip.limits import Decision, Limits
from muonmesh.clip.squares import SCALE_INVARIANT, SCALE_SENSITIVE, add_squares, zeros_for
from muonmesh.comm.gradients import ParameterGrad
from muonmesh.errors import explain_error
from muonmesh.optimizer import Muon
from muonmesh.step.connection import plan


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
        problem = f"clip= and gradient_clipping {config['gradient_clipping']} in the config"
        raise ValueError(explain_error("clip", problem, "only one of them", "Remove gradient_clipping"))
    limits = Limits(**clip) if isinstance(clip, Mapping) else Limits(clip)
    limits.check()
    return limits


class EngineGradients(ParameterGrad):
    """The gradients of a flat tensor before DeepSpeed has prepared them: where its ZeRO stage keeps them.

    Args:
        zero: DeepSpeed's own optimizer.
        number: The index of the flat tensor in it.
    """

    def __init__(self, zero: Any, number: int) -> None:
        self._zero, self._number = zero, number
        self._joined: Tensor | None = None  # for each parameter of the flat tensor the same copy

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that DeepSpeed will give to the flat tensor, still multiplied by the loss scale."""
        if parameter.grad is not None:  # an offloaded tensor has its gradient already
            return parameter.grad
        if self._joined is None:
            pieces = [piece.reshape(-1) for piece in self._zero.averaged_gradients[self._number]]
            padding = pieces[0].new_zeros(parameter.numel() - sum(piece.numel() for piece in pieces))
            self._joined = torch.cat([*pieces, padding])
        return self._joined


def measure(
    limits: Limits, zero: Any, muons: Sequence[Muon], visible: Sequence[Muon], groups: Sequence[Mapping[str, Any]]
) -> Decision:
    """Return what follows from the gradients of all tensors. All ranks call it.

    DeepSpeed has prepared the gradients only of the visible tensors; those of the others are `EngineGradients`.

    Args:
        limits: The limits by which a step is clipped.
        zero: DeepSpeed's own optimizer.
        muons: Each `Muon` of a step, in the order of the flat tensors.
        visible: The Muons whose gradients DeepSpeed has prepared.
        groups: The param groups of the engine's optimizer, which have the running means of the norms.
    """
    device = next(tensor.device for muon in muons for group in muon.param_groups for tensor in group["params"])
    sums = zeros_for((), device)
    for number, muon in enumerate(muons):
        prepared = muon in visible
        source = muon.gradients if prepared else EngineGradients(zero, number)
        scale = 1.0 if prepared else float(getattr(zero, "loss_scale", 1.0))
        squares = zeros_for((), device)
        planned = plan(muon.param_groups, muon._runtime)
        error = add_squares(planned, muon.param_groups, source, {SCALE_INVARIANT, SCALE_SENSITIVE}, squares)
        if error is not None:
            raise error
        sums += squares / (scale * scale)
    dist.all_reduce(sums)
    return limits.decide(sums, groups)
