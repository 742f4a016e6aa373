"""A platform of verl for machines without accelerator, by its own registry: verl 0.9.1 knows none, and asks for CUDA.

It is all that is not real in the tests of verl: which device verl is told that it has.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

torch.cpu.set_rng_state = torch.set_rng_state  # verl asks for it when it loads a checkpoint


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """A CPU; torch.cpu answers what torch.cuda would."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass
