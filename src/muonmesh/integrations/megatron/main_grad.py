"""MainGrad, ShardedGrad: read the gradients of Megatron-Core, without importing Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muonmesh.comm.gradients import GradientSource, ParameterGrad
from muonmesh.errors import LayoutError, explain_error


def stamp(parameter: Tensor, name: str, default: Any) -> Any:
    """Return an attribute that Megatron has set on a parameter; Megatron-FSDP's parameters refer to the original."""
    return getattr(getattr(parameter, "orig_param", parameter), name, default)


class NormsOfMegatron(GradientSource):
    """A source of Megatron's gradients, whose parameters say by their attributes which norm measures them."""

    # Values of the parameters' attribute ``grad_norm_group``. Layers of multi-token prediction ("mtp") are clipped by a
    # norm of their own (SEPARATE_GRAD_NORM_GROUPS in megatron/core/optimizer/optimizer.py of 0.19.2; 0.16.1 has no
    # such attribute).
    norms_apart = ("mtp",)

    def counted(self, parameter: Tensor) -> bool:
        """Return whether norms count this parameter.

        False for the last pipeline stage's copy of a tied embedding (``shared``), which the first stage has too.
        """
        return not stamp(self.whole(parameter), "shared", False)

    def norm_apart(self, parameter: Tensor) -> str | None:
        """Return the parameter's ``grad_norm_group``, such as "mtp" for multi-token prediction; None if it has none."""
        name: str | None = stamp(self.whole(parameter), "grad_norm_group", None)
        return name

    def whole(self, parameter: Tensor) -> Tensor:
        """Return the parameter of Megatron of which a tensor is a part, or the tensor itself."""
        return parameter


class ShardedGrad(NormsOfMegatron, ParameterGrad):
    """Gradients of Megatron-FSDP: ``parameter.grad``, a DTensor; None on a rank that holds no element."""


class MainGrad(NormsOfMegatron):
    """Gradients of Megatron-Core's DistributedDataParallel: ``parameter.main_grad``, in fp32 for bf16 parameters too.

    ``main_grad`` is a view of the buffer that Megatron reduces. So clipping and ``zero_grad`` write into ``main_grad``
    and never replace it.

    Args:
        intervals: For each tensor that is an interval of a flattened parameter: the parameter, and the interval's first
            element. The tensor's gradient is this interval of ``main_grad``, and only Megatron's ``zero_grad_buffer``
            zeroes gradients. None: the optimizer steps only whole parameters.
    """

    def __init__(self, *, intervals: Mapping[Tensor, tuple[Tensor, int]] | None = None) -> None:
        self._intervals, self._zeroes = intervals or {}, intervals is None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``main_grad``, or for an interval of a parameter, the same interval of ``main_grad`` in its shape.

        Raises:
            LayoutError: the parameter has a ``grad`` and no ``main_grad``.
        """
        whole, low = self._intervals.get(parameter, (parameter, None))
        gradient: Tensor | None = getattr(whole, "main_grad", None)
        if gradient is None and whole.grad is not None:
            subject = f"a parameter of shape {tuple(whole.shape)}"
            write = "Wrap the model in Megatron's DistributedDataParallel, or leave out gradients=MainGrad(...)"
            raise LayoutError(explain_error(subject, "a gradient in grad and no main_grad", "one in main_grad", write))
        if gradient is None or low is None:
            return gradient
        return gradient.view(-1)[low : low + parameter.numel()].view(parameter.shape)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Copy a gradient into ``main_grad``; None sets ``main_grad`` to zero, as Megatron's ``zero_grad_buffer``."""
        if gradient is None:
            if self._zeroes and (whole := getattr(parameter, "main_grad", None)) is not None:
                whole.zero_()
        elif (target := self.gradient(parameter)) is not None and target.data_ptr() != gradient.data_ptr():
            target.copy_(gradient)

    def whole(self, parameter: Tensor) -> Tensor:
        """Return the parameter of which a tensor is an interval, or the tensor itself."""
        return self._intervals.get(parameter, (parameter,))[0]
