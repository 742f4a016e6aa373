"""torch.compile of a whole training step under FSDP2: forward, backward and the optimizer in one function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support.meshes import mesh_of

OURS = str(Path(mm.__file__).parent)


def trained(compiled: bool) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """Three steps; weights and state of this rank, graph breaks by what they say, and graphs of the last step."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of((2,)))
    optimizer = mm.from_model(model, lr=torch.tensor(0.05, dtype=torch.float64), compute_dtype=torch.float32)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return optimizer.step()

    run = torch.compile(step, backend="aot_eager") if compiled else step
    graphs = 0
    for number in range(3):
        graphs = counters["stats"]["unique_graphs"]
        run(torch.randn(8, 12, generator=torch.Generator().manual_seed(2 * number + dist.get_rank())))
    tensors = {name: local_of(p).detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        tensors.update({f"{name}.{key}": local_of(value).clone() for key, value in optimizer.state[p].items()})
    graphs = counters["stats"]["unique_graphs"] - graphs
    breaks = {str(key): value for key, value in counters["graph_break"].items()}
    torch._dynamo.reset()
    return tensors, breaks, graphs


def test_a_whole_step_under_fsdp2_has_the_bits_of_an_uncompiled_one(workers) -> None:
    for (plain, _, _), (compiled, breaks, graphs) in zip(
        workers(2).run(trained, False), workers(2).run(trained, True), strict=True
    ):
        assert plain.keys() == compiled.keys()
        assert [name for name, value in plain.items() if not torch.equal(value, compiled[name])] == []
        # The optimizer is called and never looked into, and nothing is compiled again in the last step.
        # A clone, and so its environment, may lie in a folder of the package's name.
        assert [message for message in breaks if OURS in message and "Muon.step" not in message] == []
        assert any("Muon.step" in message for message in breaks)
        assert graphs == 0
