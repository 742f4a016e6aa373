"""CUDA graphs that a caller captures, on a simulated device, which replays late and objects to what CUDA forbids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from tests.device.simulated import SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

CUDA = torch.device("cuda:0")


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        call()
        graph.capture_end()
    return graph


FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "a host read": lambda x: x.sum().item(),
    "a copy from the host": lambda x: x.copy_(torch.ones(1, 2, 3).pin_memory(), non_blocking=True),
    "a wait": lambda x: torch.cuda.synchronize(),
    "an event": lambda x: torch.cuda.Event().record(),
}


@pytest.mark.parametrize("operation", FORBIDDEN)
def test_the_device_captures_nothing_that_cuda_forbids(operation: str) -> None:
    with SimulatedDevice(3):
        x = torch.zeros(1, 2, 3, device=CUDA)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            captured(lambda: FORBIDDEN[operation](x))


def test_a_step_that_is_captured_itself_is_refused() -> None:
    """It would repeat its learning rate, and read tables from memory that the host has used for others."""
    with SimulatedDevice(0):
        parameter = nn.Parameter(torch.randn(8, 12).to(CUDA))
        parameter.grad = torch.randn(8, 12).to(CUDA)
        settings = {"process_group": "local", "compute_dtype": torch.float32, "kernels": "torch"}
        optimizer = mm.Muon([("w", parameter)], lr=0.1, **settings)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=r"step\(\): found in a CUDA graph capture"):
                optimizer.step()
            graph.capture_end()
        optimizer.step()


def test_orthogonalize_can_be_captured_by_its_caller() -> None:
    with SimulatedDevice(0):
        x, again = torch.randn(2, 6, 9).to(CUDA), torch.randn(2, 6, 9).to(CUDA)
        out = torch.empty_like(x)
        for _ in range(3):
            mm.orthogonalize(x, dtype=torch.float32, out=out)
        graph = captured(lambda: mm.orthogonalize(x, dtype=torch.float32, out=out))
        x.copy_(again)
        graph.replay()
        assert torch.equal(out.cpu(), mm.orthogonalize(again, dtype=torch.float32).cpu())
