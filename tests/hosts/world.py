"""A rank of the pool as a launcher starts one: with the environment of torchrun, and hosts that remember nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState


@contextmanager
def launched(**more: str) -> Iterator[None]:
    """Set what torchrun sets, and ``more`` as `accelerate launch` does; take all of it back at the end.

    Accelerate keeps what it found in singletons, which are forgotten on both ends.
    """
    before = dict(os.environ)
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # read by nobody: the ranks have met
    os.environ |= more
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ |= before


@contextmanager
def accelerated(emulated: bool) -> Iterator[None]:
    """Let Accelerate take the CPU for an accelerator whose collectives are gloo's.

    Accelerate 1.15 knows FSDP and DeepSpeed on accelerators only; on a CPU it trains DDP, without a word. This shim is
    all that is not real: what it calls the process's device and backend. (DeepSpeed is kept from compiling an operation
    for its own reductions on a CPU; gloo's are used.)
    """
    if not emulated:
        yield
        return
    honest, variable = PartialState._prepare_backend, "ACCELERATE_TORCH_DEVICE"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    os.environ[variable] = "cpu"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        PartialState._prepare_backend = honest
        os.environ.pop(variable, None)


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
