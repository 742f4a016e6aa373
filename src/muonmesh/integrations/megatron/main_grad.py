"""MainGrad: where Megatron-Core keeps gradients; the library is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        intervals: For each tensor that is an interval of a flattened parameter that one, and where it begins in it: its
            gradient is that of ``main_grad``, and Megatron's ``zero_grad_buffer`` alone zeroes gradients. None: there
            are only parameters.
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
        intervals: Mapping[Tensor, tuple[Tensor, int]] | None = None,
    ) -> None:
        self._names = {parameter: name for name, parameter in named_parameters or ()}
        self._data, self._experts = data_parallel, expert_data_parallel
        self._intervals, self._zeroes = intervals or {}, intervals is None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``main_grad``, or the interval of it in the shape of what is stepped.

        Raises:
            LayoutError: there is a ``grad`` instead, which nothing has added to a ``main_grad``.
        """
        held, low = self._intervals.get(parameter, (parameter, None))
        gradient: Tensor | None = getattr(held, "main_grad", None)
        if gradient is None and held.grad is not None:
            name = self.name(parameter) or f"a parameter of shape {tuple(held.shape)}"
            write = "Wrap the model in Megatron's DistributedDataParallel, or leave out gradients=MainGrad(...)"
            raise LayoutError(explain_error(name, "a gradient in grad and no main_grad", "one in main_grad", write))
        if gradient is None or low is None:
            return gradient
        return gradient.view(-1)[low : low + parameter.numel()].view(parameter.shape)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Copy a gradient into ``main_grad``; None makes it zero, as Megatron's ``zero_grad_buffer`` does."""
        if gradient is None:
            if self._zeroes and (whole := getattr(parameter, "main_grad", None)) is not None:
                whole.zero_()
        elif (held := self.gradient(parameter)) is not None and held.data_ptr() != gradient.data_ptr():
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
        return not getattr(self._held(parameter), "shared", False)

    def norm_apart(self, parameter: Tensor) -> str | None:
        """Return ``grad_norm_group``, which layers that predict further tokens carry."""
        return getattr(self._held(parameter), "grad_norm_group", None)

    def _held(self, tensor: Tensor) -> Tensor:
        """Return the parameter that a tensor is, or is an interval of."""
        return self._intervals.get(tensor, (tensor,))[0]
