"""checkpoint.convert where ranks hold shards: DTensors stay DTensors, and what is whole is cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import muonmesh as mm
from muonmesh.checkpoint import convert
from tests.support.workers import Pool


class Net(nn.Module):
    """Two ranks cut each parameter, one of them unevenly: torch's Muon takes even shards only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(8, 5)


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def give(model: nn.Module, seed: int) -> None:
    for name, value in gradients(model, seed).items():
        parameter = model.get_parameter(name)
        cut = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None) if cut else value
        )


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    rest = [(name, p) for name, p in model.named_parameters() if name != "up.weight"]
    muon = torch.optim.Muon([("up.weight", model.get_parameter("up.weight"))], lr=0.02, weight_decay=0.1)
    return [muon, torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0)]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def converted(live: bool) -> list[str]:
    """The names of what is not bit for bit as in one process, after a step from converted state."""
    single, sharded = Net(), Net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    ends = []
    pairs = {id(model): pair(model) for model in (single, sharded)}
    for model in (single, sharded):
        for seed in range(2):
            give(model, seed)
            for optimizer in pairs[id(model)]:
                optimizer.step()
    with torch.no_grad():  # sharded sums round otherwise: the weights and the state of one process for both
        for name, parameter in single.named_parameters():
            cut = sharded.get_parameter(name)
            cut.copy_(distribute_tensor(parameter.detach(), cut.device_mesh, cut.placements, src_data_rank=None))
    for model in (single, sharded):
        settings = mm.convert_settings(*pairs[id(model)])
        muon = mm.from_model(model, **settings, process_group="local", compute_dtype=torch.float32)
        if live and model is sharded:
            state = convert(pairs[id(sharded)], muon)
            assert all(isinstance(e["exp_avg"], DTensor) for e in state["state"].values() if "exp_avg" in e)
        else:
            state = convert([optimizer.state_dict() for optimizer in pairs[id(single)]], muon, package="torch")
        muon.load_state_dict(state)
        give(model, 2)
        muon.step()
        ends.append({name: whole(parameter) for name, parameter in model.named_parameters()})
    return [name for name, end in ends[0].items() if not torch.equal(end, ends[1][name])]


def test_shards_go_on_with_the_bits_of_one_process(workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(converted, True) == [[], []]
    assert workers(2).run(converted, False) == [[], []]
