"""Precision: the dtypes of one optimizer, and where it keeps state, which is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels import KernelName


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer, its kernels, and the place of its state.

    Attributes:
        compute: The dtype of orthogonalization.
        state: The dtype of per-element state; fp32 if momentum is kept in int8.
        master: The dtype of master weights; None: there are none.
        kernels: The kernels that multiply matrices.
        int8: Whether momentum is kept in int8, with a scale for each block (`muonmesh.step.blocks`).
        on_host: Whether per-element state is kept in CPU memory (`muonmesh.step.offload`).
    """

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None
    kernels: KernelName = "auto"
    int8: bool = False
    on_host: bool = False

    @staticmethod
    def of(shared: Mapping[str, Any]) -> Precision:
        """Return the `Precision` that the settings of all groups describe."""
        int8, on_host = shared["state_dtype"] == "int8", shared["state_device"] is not None
        state = torch.float32 if int8 else shared["state_dtype"]
        return Precision(shared["compute_dtype"], state, shared["master_dtype"], shared["kernels"], int8, on_host)

    def leaves(self, device: torch.device) -> bool:
        """Whether the per-element state of a parameter on ``device`` is kept on another device."""
        return self.on_host and device.type != "cpu"

    def kept_on(self, device: torch.device) -> torch.device:
        """Return the device that keeps the per-element state of a parameter on ``device``."""
        return torch.device("cpu") if self.leaves(device) else device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for per-element state of a parameter on ``device``: on this device, or in pinned CPU memory."""
        if not self.leaves(device):
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())

    def copy_of(self, local: Tensor, dtype: torch.dtype, *, wait: bool = False) -> Tensor:
        """Return a contiguous copy in another dtype, placed as by `zeros`; ``wait``: the CPU may read it at once."""
        if not self.leaves(local.device):
            return local.detach().to(dtype).contiguous()
        return self.zeros(local.shape, dtype, local.device).copy_(local.detach(), non_blocking=not wait)

    @property
    def wire(self) -> torch.dtype:
        """The dtype of the matrices that ranks send: ``compute``, but bf16 for fp16, whose range is too small."""
        return torch.bfloat16 if self.compute == torch.float16 else self.compute

    @property
    def carried(self) -> torch.dtype:
        """The dtype of state by row, column or matrix: fp32, or fp64 if ``compute`` or ``state`` is fp64."""
        return torch.promote_types(torch.promote_types(self.compute, self.state), torch.float32)
