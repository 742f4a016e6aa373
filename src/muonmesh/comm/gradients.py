"""Gradients: what this rank has of them, laid out as the parameters are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from muonmesh.comm.storage import local_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.numerics.dtypes import HELD_DTYPES, NEEDED_HELD


def gradient_of(name: str, parameter: Tensor) -> Tensor | None:
    """Return the local part of a parameter's gradient, laid out as the parameter, or None.

    A gradient that is whole on every rank is cut as its parameter is. A partial one (pure tensor parallelism with
    ``SequenceParallel`` leaves norm weights so) comes back as the DTensor that it is, for `reduced`.

    Raises:
        LayoutError: the gradient lives elsewhere than its parameter.
        TypeError: the gradient is sparse, complex or of a dtype without arithmetic, or on another device.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_complex() or parameter.is_complex():
        found = f"a gradient of dtype {gradient.dtype}"
        raise TypeError(explain_error(name, found, "a real gradient", "Muon and AdamW here take real tensors only"))
    if gradient.dtype not in HELD_DTYPES:
        found = f"a gradient of dtype {gradient.dtype}"
        raise TypeError(explain_error(name, found, NEEDED_HELD, "Write parameter.grad = parameter.grad.float()"))
    if gradient.layout is not torch.strided:
        found = f"a gradient with layout {gradient.layout}"
        raise TypeError(explain_error(name, found, "a dense gradient", "Write Embedding(..., sparse=False)"))
    if gradient.is_meta or gradient.device != parameter.device:
        found, needed = f"a gradient on {gradient.device}", "one with data, on the device of its parameter"
        raise TypeError(explain_error(name, found, needed, "Materialise the model before the backward pass"))
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        kinds = {True: "a DTensor", False: "a plain tensor"}
        raise LayoutError(
            explain_error(
                name,
                f"{kinds[isinstance(gradient, DTensor)]} as gradient of {kinds[isinstance(parameter, DTensor)]}",
                "the layout of the parameter",
                "Let autograd set the gradient, or write grad = DTensor.from_local(grad, mesh, placements)",
            )
        )
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = _cut_where_replicated(gradient, parameter)
        if gradient.placements != parameter.placements:
            partial = any(isinstance(placement, Partial) for placement in gradient.placements)
            kept = all(
                isinstance(mine, Partial) or mine == theirs
                for mine, theirs in zip(gradient.placements, parameter.placements, strict=False)
            )
            if not (partial and kept) or gradient.device_mesh != parameter.device_mesh:
                raise LayoutError(
                    explain_error(
                        name,
                        f"a gradient placed {tuple(gradient.placements)}",
                        f"the parameter's placements {tuple(parameter.placements)}",
                        "Write parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
                    )
                )
            return gradient
        gradient = local_of(gradient)
    if gradient.shape != local_of(parameter).shape:
        raise LayoutError(
            explain_error(
                name,
                f"a gradient of local shape {tuple(gradient.shape)}",
                f"the parameter's local shape {tuple(local_of(parameter).shape)}",
                "Assign a gradient of the parameter's shape",
            )
        )
    return gradient


def _cut_where_replicated(gradient: DTensor, parameter: DTensor) -> DTensor:
    """Cut a gradient that every rank has whole where its parameter is sharded; sends nothing.

    Tensor parallelism leaves the gradient of an embedding that is sharded by vocabulary so.
    """
    if gradient.device_mesh != parameter.device_mesh or gradient.ndim != parameter.ndim:
        return gradient
    placements = list(gradient.placements)
    cut = [getattr(placement, "dim", None) for placement in parameter.placements]
    for axis, (mine, theirs) in enumerate(zip(gradient.placements, parameter.placements, strict=True)):
        if isinstance(mine, TorchReplicate) and type(theirs) is TorchShard and cut.count(theirs.dim) == 1:
            placements[axis] = theirs
    return gradient if placements == list(gradient.placements) else gradient.redistribute(placements=placements)


def partial_axes(tensor: Tensor | None) -> tuple[bool, ...]:
    """Return for each axis of a DTensor's mesh whether the tensor is a partial sum over it; empty for others."""
    return tuple(isinstance(p, Partial) for p in tensor.placements) if isinstance(tensor, DTensor) else ()


def reduced(parameter: Tensor, gradient: Tensor | None, axes: Sequence[bool]) -> Tensor:
    """Return the local part of a partial gradient's sum over these mesh axes; None counts as zero.

    All ranks of the mesh call it with the same axes.
    """
    assert isinstance(parameter, DTensor)
    axes = axes[-parameter.device_mesh.ndim :]
    local = torch.zeros_like(local_of(parameter)) if gradient is None else local_of(gradient)
    placements = [Partial() if partial else p for p, partial in zip(parameter.placements, axes, strict=True)]
    summands = DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return local_of(summands.redistribute(placements=parameter.placements))


def whole_gradient(name: str, parameter: Tensor) -> Tensor | None:
    """Return `gradient_of` with what is partial summed, by all ranks of the mesh."""
    gradient = gradient_of(name, parameter)
    axes = partial_axes(gradient)
    return reduced(parameter, gradient, axes) if any(axes) else gradient


def own_gradient(name: str, parameter: Tensor) -> Tensor | None:
    """Return the local part of a parameter's gradient to write to, contiguous and laid out as the parameter, or None.

    Where the gradient is not so, it is replaced by one that is.
    """
    gradient = gradient_of(name, parameter)
    if gradient is None or parameter.grad is None:
        return None
    local = local_of(gradient)
    if local_of(parameter.grad) is not local or not local.is_contiguous():
        local = local.contiguous()
        parameter.grad = _wrapped(local, gradient if isinstance(gradient, DTensor) else parameter)
    return local


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return a gradient without the factor of a GradScaler, a new tensor in fp32 or wider."""
    local = local_of(gradient)
    inverse = scale.double().reciprocal().to(local.device)
    return _wrapped(local.to(torch.promote_types(local.dtype, torch.float32), copy=True).mul_(inverse), gradient)


def _wrapped(local: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
