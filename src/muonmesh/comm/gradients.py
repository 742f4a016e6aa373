"""Gradients: finds the gradient of each parameter on this rank, in the layout of the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from muonmesh.comm.storage import PLAIN, Storage, is_freed, local_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.numerics.dtypes import HELD_DTYPES, NEEDED_HELD, real_of


class GradientSource(Protocol):
    """Where a framework keeps gradients, names and process groups; for ``Muon(..., gradients=...)``.

    Steps, clipping and metrics read gradients here and nowhere else. To support a framework, derive a class and
    override `gradient` and `write`. The other methods have defaults: names come from the param groups, and process
    groups from ``process_group=``.

    The optimizer makes these calls:

    1. For each new plan, on this rank alone: `name`, `group` and `momentum_storages`. After all ranks have compared
       their plans, `bind` on all ranks.
    2. When a step, clipping or metrics begin: `complete` on all ranks; then, on this rank alone and for each parameter,
       `gradient` and `at_momentum`. Clipping also calls `counted` and `norm_apart`, and `write` for each gradient that
       it scales.
    3. In ``zero_grad``: `write` with None for each parameter, on this rank alone.

    Attributes:
        norms_apart: Names of further norms, for gradients that are measured and clipped apart from all others; the same
            on every rank.
    """

    norms_apart: Sequence[str] = ()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient, or None; a step never writes to it.

        The gradient has the shape and placements of the parameter. Its dtype may differ.

        Raises:
            LayoutError, TypeError: a required gradient is missing. Every rank raises this error.
        """

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Store the gradient that clipping has scaled; None, from ``zero_grad``, resets it.

        Args:
            parameter: The parameter whose gradient it is.
            gradient: The tensor that `gradient` returned, scaled in place; or a copy, if that tensor had other strides
                or placements than the parameter, or could not be scaled in place.
        """

    def name(self, parameter: Tensor) -> str | None:
        """Return the name by which ranks and checkpoints know a parameter; None means its name in the param group."""
        return None

    def group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks that hold the same plain tensor or shard; None means the ranks of ``process_group=``."""
        return None

    def counted(self, parameter: Tensor) -> bool:
        """Return whether norms count a parameter; False if ranks of another pipeline stage hold it too and count it."""
        return True

    def at_momentum(self, parameter: Tensor) -> bool:
        """Return whether a gradient has the flattened layout of the momentum; False means the parameter's layout."""
        return False

    def norm_apart(self, parameter: Tensor) -> str | None:
        """Return the name in ``norms_apart`` whose norm measures and clips a gradient; None means the usual norms."""
        return None

    def momentum_storages(self, matrices: Sequence[tuple[str, Tensor, Storage]]) -> Sequence[Storage]:
        """Return where the momentum of each matrix lives. It is called when a plan is made, and sends nothing.

        Args:
            matrices: For each matrix: its name, its parameter, and the default place of its momentum.

        Raises:
            LayoutError: the source cannot add up the gradient of a matrix. Every rank raises then.
        """
        return [storage for *_, storage in matrices]

    def bind(self, replicated: Mapping[Tensor, str], group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        """Receive the parameters that several ranks hold as equal copies. All these ranks call it after planning.

        Args:
            replicated: The names of these parameters.
            group: The ranks of ``process_group=``; None if there is only one rank.
            bucket_bytes: The largest number of bytes to send at a time.
        """
        return

    def complete(self, step: int) -> None:
        """Bring gradients to where they are read. All ranks call it when a step, clipping or metrics begin.

        Args:
            step: The number of steps that have begun.
        """
        return

    def scaler_error(self) -> Exception | None:
        """Return why a GradScaler cannot work here, such as that it does not see gradients; None if it can."""
        return None


class ParameterGrad(GradientSource):
    """The gradients that autograd leaves in ``parameter.grad``."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``parameter.grad``."""
        return parameter.grad

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Set ``parameter.grad``."""
        if parameter.grad is not gradient:
            parameter.grad = gradient


PARAMETER_GRAD = ParameterGrad()
"""The default source of gradients of an optimizer."""

REDUCTIONS = ("", "sum", "avg", "max", "min")
"""Reductions of gradients that are partial over an axis of a mesh; "": not partial. All commute with positive
factors."""


def check_source(source: object) -> None:
    """Raise a TypeError unless ``source`` is None or an object with the methods of `GradientSource`.

    A source with ``place``, the earlier name of `GradientSource.momentum_storages`, is refused too: nothing calls it.
    """
    methods = (name for name, method in vars(GradientSource).items() if callable(method) and not name.startswith("_"))
    missing = [name for name in methods if not callable(getattr(source, name, None))]
    if source is not None and (missing or isinstance(source, type)):
        lacks = f" without {', '.join(f'{name}()' for name in missing)}" if missing else ", a class"
        problem, write = f"{source!r}{lacks}", "Derive its class from muonmesh.GradientSource, and pass an instance"
        raise TypeError(explain_error("gradients", problem, "a GradientSource", write))
    if callable(getattr(source, "place", None)):
        needed = "momentum_storages(), which is called in its place"
        raise TypeError(
            explain_error("gradients", f"{source!r} with place()", needed, "Rename it to momentum_storages")
        )


def gradient_of(name: str, parameter: Tensor, source: GradientSource) -> Tensor | None:
    """Return the local part of a parameter's gradient in the layout of the parameter, or None.

    If a gradient is replicated along a mesh axis that shards the parameter, this function cuts it, provided that no
    other axis cuts the same dim. If two axes do, as may happen with FSDP2 over tensor parallelism, it raises an error.
    A partial gradient is returned as a DTensor, for `reduced`. Norm weights have partial gradients under pure tensor
    parallelism with ``SequenceParallel``.

    Raises:
        LayoutError: the gradient has another layout than its parameter.
        TypeError: the gradient is sparse, complex or of a dtype without arithmetic, or on another device.
    """
    gradient = source.gradient(parameter)
    if gradient is None or source.at_momentum(parameter):
        return gradient
    if gradient.dtype not in HELD_DTYPES and not (gradient.is_complex() and parameter.is_complex()):
        problem = f"a gradient of dtype {gradient.dtype}"
        raise TypeError(explain_error(name, problem, NEEDED_HELD, "Write parameter.grad = parameter.grad.float()"))
    if gradient.layout is not torch.strided:
        problem = f"a gradient with layout {gradient.layout}"
        raise TypeError(explain_error(name, problem, "a dense gradient", "Write Embedding(..., sparse=False)"))
    if is_freed(local_of(gradient)):
        problem, write = "a gradient whose memory was freed", "Call backward after the memory was freed, or zero_grad"
        raise TypeError(explain_error(name, problem, "one with data", write))
    if gradient.is_meta or gradient.device != parameter.device:
        problem, needed = f"a gradient on {gradient.device}", "one with data, on the device of its parameter"
        raise TypeError(explain_error(name, problem, needed, "Materialize the model before the backward pass"))
    if type(gradient) is Tensor and type(parameter) in PLAIN and gradient.shape == parameter.shape:
        return gradient  # the most common case
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        kinds = ("a plain tensor", "a DTensor")
        problem = f"{kinds[isinstance(gradient, DTensor)]} as gradient of {kinds[isinstance(parameter, DTensor)]}"
        needed = "a gradient with the layout of the parameter"
        write = "Let autograd set the gradient, or write grad = DTensor.from_local(grad, mesh, placements)"
        raise LayoutError(explain_error(name, problem, needed, write))
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = _as_its_parameter(name, parameter, gradient)
        if isinstance(gradient, DTensor):
            return gradient
    if gradient.shape != local_of(parameter).shape:
        problem = f"a gradient of local shape {tuple(gradient.shape)}"
        needed = f"the parameter's local shape {tuple(local_of(parameter).shape)}"
        write = "Assign a gradient of the parameter's shape"
        raise LayoutError(explain_error(name, problem, needed, write))
    return gradient


def _as_its_parameter(name: str, parameter: DTensor, gradient: DTensor) -> Tensor:
    """Return the local part of a gradient with the parameter's placements; a partial gradient stays a DTensor."""
    gradient = _cut_where_replicated(gradient, parameter)
    if gradient.placements == parameter.placements:
        return local_of(gradient)
    # Partial only along axes that replicate the parameter: along others the local part has another shape.
    partial = all(
        source_at == target_at
        or (type(source_at) is Partial and source_at.reduce_op in REDUCTIONS and isinstance(target_at, TorchReplicate))
        for source_at, target_at in zip(gradient.placements, parameter.placements, strict=False)
    )
    if not partial or gradient.device_mesh != parameter.device_mesh:
        problem = f"a gradient placed {tuple(gradient.placements)}"
        needed = f"the parameter's placements {tuple(parameter.placements)}"
        write = "Write parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        raise LayoutError(explain_error(name, problem, needed, write))
    return gradient


def _cut_where_replicated(gradient: DTensor, parameter: DTensor) -> DTensor:
    """Shard a replicated gradient along the mesh axes that shard its parameter. No communication.

    Only plain shards of a dim that a single axis cuts are supported. Otherwise the gradient is returned unchanged.

    Tensor parallelism leaves such a replicated gradient for an embedding that is sharded by vocabulary.
    """
    if gradient.device_mesh != parameter.device_mesh or gradient.ndim != parameter.ndim:
        return gradient
    placements = list(gradient.placements)
    cut = [getattr(placement, "dim", None) for placement in parameter.placements]
    for axis, (source_at, target_at) in enumerate(zip(gradient.placements, parameter.placements, strict=True)):
        if isinstance(source_at, TorchReplicate) and type(target_at) is TorchShard and cut.count(target_at.dim) == 1:
            placements[axis] = target_at
    return gradient if placements == list(gradient.placements) else gradient.redistribute(placements=placements)


def partial_axes(tensor: Tensor | None) -> tuple[int, ...]:
    """Return for each mesh axis of a DTensor its index in `REDUCTIONS`, 0 if not partial; empty for other tensors."""
    if tensor is None or type(tensor) is Tensor or not isinstance(tensor, DTensor):
        return ()
    return tuple(REDUCTIONS.index(p.reduce_op) if isinstance(p, Partial) else 0 for p in tensor.placements)


def reduced(parameter: Tensor, gradient: Tensor | None, axes: Sequence[int]) -> Tensor:
    """Return the local part of a partial gradient after torch's reduction over mesh axes; None counts as zero.

    All ranks of the mesh call this with the same ``axes``, each an index in `REDUCTIONS` as `partial_axes` returns.
    """
    assert isinstance(parameter, DTensor)
    if gradient is None:
        axes = axes[-parameter.device_mesh.ndim :]
        placed = [Partial(REDUCTIONS[op]) if op else p for p, op in zip(parameter.placements, axes, strict=True)]
        gradient = _wrapped(torch.zeros_like(local_of(parameter)), parameter, placed)
    assert isinstance(gradient, DTensor)
    return local_of(gradient.redistribute(placements=parameter.placements))


def whole_gradient(name: str, parameter: Tensor, source: GradientSource) -> Tensor | None:
    """Return a gradient as `gradient_of` does, but reduced if it is partial. All ranks of its mesh call this."""
    gradient = gradient_of(name, parameter, source)
    axes = partial_axes(gradient)
    return reduced(parameter, gradient, axes) if any(axes) else gradient


def multiply(local: Tensor, coefficient: Tensor) -> None:
    """Multiply a tensor in place by a 0-d fp64 tensor, which is rounded to fp32 or the wider dtype of the tensor."""
    local = real_of(local)
    local.mul_(coefficient.to(torch.promote_types(local.dtype, torch.float32)))


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return a gradient divided by the loss scale of a GradScaler: a new tensor in fp32 or wider."""
    local = local_of(gradient)
    inverse = scale.double().reciprocal().to(local.device)
    return _wrapped(local.to(torch.promote_types(local.dtype, torch.float32), copy=True).mul_(inverse), gradient)


def _wrapped(local: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return a local tensor unchanged, or as a DTensor with the mesh and shape of ``like`` if that is a DTensor."""
    if not isinstance(like, DTensor):
        return local
    placements, mesh, stride = placements or like.placements, like.device_mesh, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)
