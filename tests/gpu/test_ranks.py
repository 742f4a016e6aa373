"""Ranks that share one GPU over gloo, and ranks of NCCL with a GPU each: the bits of one process in every layout."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.gpu import ranks as on_ranks
from tests.support import problem
from tests.support.workers import Pool

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "by torch, fp32": {"kernels": "torch", "compute_dtype": torch.float32},
    "state on the host": {"state_device": "cpu"},
    "int8": {"state_dtype": "int8"},
    "a bucket at a time": {"memory_budget_mb": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("ranks", "layout"), [*product((2, 4), problem.LAYOUTS), *product((4,), problem.TWO_DIMS)])
def test_ranks_have_the_bits_of_one_process(workers: Callable[[int], Pool], ranks: int, layout: str, name: str) -> None:
    by_rank = workers(ranks).run(on_ranks.of_layout, DEVICE, layout, timeout=120.0, **SETTINGS[name])
    if name == "by torch, fp32":  # cuBLAS multiplies a batch otherwise than its matrices one by one
        assert all(error < 1e-6 for errors in by_rank for error in errors.values()), by_rank
    else:
        assert by_rank == [{}] * ranks


def of_nccl(rank: int, ranks: int, port: int, results: Any) -> None:
    """What differs in each layout, by layout and tensor, with a GPU for each rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    errors = {layout: on_ranks.of_layout(DEVICE, layout) for layout in problem.LAYOUTS}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, errors)
    if rank == 0:
        results.put(everyone)
    dist.destroy_process_group()


def test_a_gpu_for_each_rank() -> None:
    ranks = torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(of_nccl, (ranks, port, results), nprocs=ranks)  # type: ignore[no-untyped-call]
    assert results.get() == [{layout: {} for layout in problem.LAYOUTS}] * ranks
