"""MainGrad: where Megatron-Core keeps gradients; the library is not imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.gradients import GradientSource
from muonmesh.errors import LayoutError, explain_error


class MainGrad(GradientSource):
    """Gradients of Megatron-Core's DistributedDataParallel: ``parameter.main_grad``, in fp32 for bf16 parameters too.

    It is a view of the buffer that Megatron reduces, so clipping and ``zero_grad`` write into it and never replace it.

    Args:
        named_parameters: Names and parameters as ``model.named_parameters()`` gives them, for groups without
            ``param_names`` such as Megatron's own; None: the groups have names.
        data_parallel: Ranks that hold the same, where ``layouts=`` does not say so.
        expert_data_parallel: The same for experts, which carry ``allreduce=False``. None: as the others.
    """

    # Values of ``grad_norm_group`` on parameters: by it layers that predict further tokens are clipped apart
    # (SEPARATE_GRAD_NORM_GROUPS in megatron/core/optimizer/optimizer.py of Megatron-LM's main; 0.16.1 has none).
    norms_apart = ("mtp",)

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        data_parallel: dist.ProcessGroup | None = None,
        expert_data_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        self._names = {parameter: name for name, parameter in named_parameters or ()}
        self._data, self._experts = data_parallel, expert_data_parallel

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``main_grad``.

        Raises:
            LayoutError: there is a ``grad`` instead, which nothing has added to a ``main_grad``.
        """
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None and parameter.grad is not None:
            name = self.name(parameter) or f"a parameter of shape {tuple(parameter.shape)}"
            write = "Wrap the model in Megatron's DistributedDataParallel, or leave out gradients=MainGrad(...)"
            raise LayoutError(explain_error(name, "a gradient in grad and no main_grad", "one in main_grad", write))
        return gradient

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Copy a gradient into ``main_grad``; None makes it zero, as Megatron's ``zero_grad_buffer`` does."""
        held: Tensor | None = getattr(parameter, "main_grad", None)
        if held is None or held is gradient:
            return
        if gradient is None:
            held.zero_()
        else:
            held.copy_(gradient)

    def name(self, parameter: Tensor) -> str | None:
        """Return the name it was given with."""
        return self._names.get(parameter)

    def group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the data-parallel group, of experts theirs."""
        experts = not getattr(parameter, "allreduce", True)
        return self._experts if experts and self._experts is not None else self._data

    def counted(self, parameter: Tensor) -> bool:
        """Return False for the copy of a tied embedding that the first pipeline stage holds too (``shared``)."""
        return not getattr(parameter, "shared", False)

    def norm_apart(self, parameter: Tensor) -> str | None:
        """Return ``grad_norm_group``, which layers that predict further tokens carry."""
        return getattr(parameter, "grad_norm_group", None)


class ParameterInterval(NamedTuple):
    """What this rank keeps of a parameter of Megatron's: its elements from low to high, flattened."""

    parameter: Tensor
    low: int
    high: int


class FlatMainGrad(MainGrad):
    """Gradients of intervals of flattened parameters: the same intervals of ``main_grad``, of which they are views.

    Args:
        intervals: For each tensor that is stepped what it is of which parameter; others are parameters themselves.
    """

    def __init__(self, intervals: dict[Tensor, ParameterInterval]) -> None:
        super().__init__()
        self._intervals = intervals

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the interval of ``main_grad``, in the shape of what is stepped."""
        whole, interval = super().gradient(self._parameter(parameter)), self._intervals.get(parameter)
        if whole is None or interval is None:
            return whole
        return whole.view(-1)[interval.low : interval.high].view(parameter.shape)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Copy a gradient into the interval; None leaves it to Megatron's ``zero_grad_buffer``."""
        held = None if gradient is None else self.gradient(parameter)
        if gradient is not None and held is not None and gradient.data_ptr() != held.data_ptr():
            held.copy_(gradient)

    def counted(self, parameter: Tensor) -> bool:
        """As `MainGrad.counted` of the parameter."""
        return super().counted(self._parameter(parameter))

    def norm_apart(self, parameter: Tensor) -> str | None:
        """As `MainGrad.norm_apart` of the parameter."""
        return super().norm_apart(self._parameter(parameter))

    def _parameter(self, tensor: Tensor) -> Tensor:
        interval = self._intervals.get(tensor)
        return tensor if interval is None else interval.parameter
