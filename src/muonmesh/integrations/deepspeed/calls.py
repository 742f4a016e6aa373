"""Call: one of the calls of `Muon.step` that a step of a DeepSpeed engine makes; and the clipping before the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.clip.limits import GradNorms, Limits
from muonmesh.clip.norm_means import counted, means_of
from muonmesh.clip.squares import half_of, norms_of, zeros_for
from muonmesh.comm.storage import Storage, this_rank, world_size
from muonmesh.errors import explain_error
from muonmesh.layout import FlatShards
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `Muon.step`, which steps one flat tensor of a ZeRO engine, or at stage 0 all parameters.

    Attributes:
        muon: The optimizer that plans the call and takes the step. It knows which parameters lie in the flat tensor.
        reasons: Why each parameter is in its group, by name.
    """

    muon: Muon
    reasons: Mapping[str, str]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor that the call steps."""
        tensor: Tensor = self.muon.param_groups[0]["params"][0]
        return tensor

    @cached_property
    def parameters(self) -> list[OptimizedParameter]:
        """The parameters in the tensors that the call steps."""
        return placed_members(self.muon)

    @cached_property
    def layouts(self) -> dict[str, FlatShards]:
        """Where the elements of each parameter lie in the flat tensors of all ranks, by name; empty at stage 0."""
        held = {each.name: each.storage.layout for each in self.parameters}
        return {name: layout for name, layout in held.items() if isinstance(layout, FlatShards)}

    @cached_property
    def storages(self) -> Mapping[Tensor, list[Storage]]:
        """For each tensor that the call steps: the storages of the parameters in it."""
        found = defaultdict[Tensor, list[Storage]](list)
        for parameter in self.parameters:
            found[parameter.tensor].append(parameter.storage)
        return found

    def explain(self) -> Explanation:
        """Return an explanation of the call, with a row for each parameter."""
        explanation = self.muon.explain()
        rows = (replace(row, reason=self.reasons[row.parameter]) for row in explanation.rows)
        return replace(explanation, rows=tuple(rows))


def explain_step(calls: Sequence[Call]) -> Explanation:
    """Return one explanation of all calls of an engine's step, with the sums of their work and traffic."""
    explanations = [call.explain() for call in calls]
    added = {
        name: sum(getattr(one, name) for one in explanations)
        for name in ("orthogonalizations", "collectives", "bytes_sent", "bytes_received", "state_bytes", "host_bytes")
    }
    return Explanation(
        rows=tuple(row for one in explanations for row in one.rows),
        rank=this_rank(),
        flops={rank: sum(one.flops.get(rank, 0) for one in explanations) for rank in range(world_size())},
        step_bytes=max(one.step_bytes for one in explanations),
        budget_bytes=max(one.budget_bytes for one in explanations),
        **added,
    )


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
    limits: Limits, zero: Any, calls: Sequence[Call], visible: Sequence[Call], groups: Sequence[Mapping[str, Any]]
) -> tuple[GradNorms, dict[int, Tensor], Tensor | None]:
    """Return the norms of the gradients of all calls, the factors to scale them, and the new `means_of` the groups.

    All ranks call it. There are no new means if ``skip_above`` is no multiple of them.

    DeepSpeed has prepared the gradients only of the visible calls. The gradients of the other flat tensors lie where
    the ZeRO stage keeps them, still multiplied by the loss scale. `measure` reads them there.

    Args:
        limits: The limits by which a step is clipped.
        zero: DeepSpeed's own optimizer.
        calls: All calls of a step.
        visible: The calls whose gradients DeepSpeed has prepared.
        groups: The param groups of the engine's optimizer, which have the running means of the norms.
    """
    sums = zeros_for((), calls[0].tensor.device)
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
    means = None if limits.multiple is None else means_of(groups, sums.device)
    skip = limits.skips(sums, means=means)
    fresh = None if means is None else counted(means, torch.stack([*norms_of(sums).values()]))
    return limits.told(sums, skip), limits.coefficients(sums, skip), fresh


def _pending(zero: Any, number: int, tensor: Tensor) -> Tensor:
    """Return the gradient that DeepSpeed will give to a flat tensor: shape (size,), or shorter by the padding."""
    if tensor.grad is not None:  # an offloaded tensor has its gradient already
        return tensor.grad
    pieces: Sequence[Tensor] = zero.averaged_gradients[number]
    return torch.cat([piece.reshape(-1) for piece in pieces])
