"""Ranks that share one GPU over gloo: every layout steps as one process does, and with the same bits."""

from __future__ import annotations

import socket
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.support import problem

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "by torch, fp32": {"kernels": "torch", "compute_dtype": torch.float32},
    "state on the host": {"state_device": "cpu"},
    "int8": {"state_dtype": "int8"},
    "a bucket at a time": {"memory_budget_mb": 0},
}


def on_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def gradients(step: int) -> dict[str, Tensor | None]:
    return {name: value.to(DEVICE) for name, value in problem.gradients(step).items()}


def step(layout: str, **settings: Any) -> dict[str, Tensor]:
    *_, (model, optimizer) = problem.steps(layout, STEPS, on_device(problem.initial()), gradients, **settings)
    return problem.result(model, optimizer)


def differing(layout: str, name: str) -> dict[str, float]:
    """Return by how much tensors differ from those of one process on the same device, relative to their norms.

    Scales of blocks in int8 lie where the blocks do, so they are not compared.
    """
    settings = SETTINGS[name]
    alone, many = step("local", **settings), step(layout, **settings)
    alike = [key for key in alone if name != "int8" or key in problem.PARAMETERS]
    keys = problem.differing({key: alone[key] for key in alike}, {key: many[key] for key in alike})
    pairs = {key: (many[key].double(), alone[key].double()) for key in keys}
    return {key: float((a - b).norm() / b.norm().clamp(min=1e-30)) for key, (a, b) in pairs.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("ranks", "layout"), [*product((2, 4), problem.LAYOUTS), *product((4,), problem.TWO_DIMS)])
def test_ranks_have_the_bits_of_one_process(workers, ranks: int, layout: str, name: str) -> None:
    by_rank = workers(ranks).run(differing, layout, name, timeout=120.0)
    if name == "by torch, fp32":  # cuBLAS multiplies a batch otherwise than its matrices one by one
        assert all(error < 1e-6 for errors in by_rank for error in errors.values()), by_rank
    else:
        assert by_rank == [{}] * ranks


def of_nccl(rank: int, ranks: int, port: int, results: Any) -> None:
    """What `differing` finds in each layout, by layout and tensor, with a GPU for each rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    errors = {layout: differing(layout, "default") for layout in problem.LAYOUTS}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, errors)
    if rank == 0:
        results.put(everyone)
    dist.destroy_process_group()


def test_ranks_of_nccl_have_the_bits_of_one_process() -> None:
    ranks = torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(of_nccl, (ranks, port, results), nprocs=ranks)  # type: ignore[no-untyped-call]
    assert results.get() == [{layout: {} for layout in problem.LAYOUTS}] * ranks
