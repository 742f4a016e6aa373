"""Precision: the dtypes of one optimizer, and where it keeps state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muonmesh.numerics.kernels import KernelName


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer.

    Attributes:
        compute: Of orthogonalization and wire.
        state: Of what rules keep for each element: fp32 where momentum is kept in int8.
        master: Of masters; None for none.
        kernels: What multiplies.
        int8: Whether momentum is kept in int8, with a scale for each block (`muonmesh.step.blocks`).
        on_host: Whether what has a number for each element is kept on the host (`muonmesh.step.offload`).
    """

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None
    kernels: KernelName = "auto"
    int8: bool = False
    on_host: bool = False

    @staticmethod
    def of(shared: Mapping[str, Any]) -> Precision:
        """Return what the settings that all groups share say."""
        int8, on_host = shared["state_dtype"] == "int8", shared["state_device"] is not None
        state = torch.float32 if int8 else shared["state_dtype"]
        return Precision(shared["compute_dtype"], state, shared["master_dtype"], shared["kernels"], int8, on_host)

    def leaves(self, device: torch.device) -> bool:
        """Whether what has a number for each element is kept elsewhere than its parameter on ``device``."""
        return self.on_host and device.type != "cpu"

    def kept_on(self, device: torch.device) -> torch.device:
        """Return where what has a number for each element of a parameter on ``device`` is kept."""
        return torch.device("cpu") if self.leaves(device) else device

    @property
    def carried(self) -> torch.dtype:
        """Of what a rule keeps by row, column or matrix: fp32, or fp64 where any of the others is."""
        return torch.promote_types(torch.promote_types(self.compute, self.state), torch.float32)
