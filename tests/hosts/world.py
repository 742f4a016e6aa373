"""A rank of the pool as a launcher starts one: with the environment of torchrun, and hosts that remember nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
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


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
