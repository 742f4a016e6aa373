"""FSDP1's wrapper with ``use_orig_params=True``: real wrappers, real gradients, the bits of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import muonmesh as mm
from muonmesh.integrations.fsdp1 import declared_layouts
from muonmesh.names import canonical_name
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks

COVERS = ("integrations.fsdp1.declared_layouts",)

SETTINGS: dict[str, Any] = {"lr": 0.02, "compute_dtype": torch.float32}


class Net(nn.Module):
    """Odd sizes: FSDP1 pads between parameters and at the end, parts end inside rows, some ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7, bias=False))])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks[0](self.embedding(tokens))))
        return logits


def wrap(model: Net, strategy: str = "FULL_SHARD", *, use_orig_params: bool = True) -> nn.Module:
    kind = ShardingStrategy[strategy]
    mesh = mesh_of((2, dist.get_world_size() // 2)) if "HYBRID" in strategy else None
    how: Any = {"sharding_strategy": kind, "use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_mesh=mesh, **how)
    return FullyShardedDataParallel(model, device_mesh=mesh, **how)


def full_parameters(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Every parameter and its gradient, by name."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return {
            canonical_name(name): (p.detach().clone(), None if p.grad is None else p.grad.clone())
            for name, p in model.named_parameters()
        }


def trainable(strategy: str) -> tuple[nn.Module, mm.Muon]:
    model = Net()
    groups = mm.split_params(model)
    wrapped = wrap(model, strategy)
    return wrapped, mm.Muon(groups, layouts=declared_layouts(wrapped), **SETTINGS)


def backward_of_rank(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randint(0, 11, (5,), generator=generator)).square().mean().backward()


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("FULL_SHARD", 2), ("NO_SHARD", 2), ("SHARD_GRAD_OP", 4), ("HYBRID_SHARD", 4)]
)
@on_ranks()
def test_fsdp1_has_the_bits_of_one_process_saved_in_the_middle(strategy: str) -> None:
    """Step under FSDP1, and a copy with the same gradients alone; return what differs, who is flat, and a norm."""
    wrapped, optimizer = trainable(strategy)
    alone = Net()
    other = mm.from_model(alone, process_group="local", **SETTINGS)
    differing: list[str] = []
    for step in range(4):
        if step == 2:  # each rank saves what it holds, and others go on
            weights, saved = (
                {name: value for name, (value, _) in full_parameters(wrapped).items()},
                optimizer.state_dict(),
            )
            wrapped, optimizer = trainable(strategy)
            with FullyShardedDataParallel.summon_full_params(wrapped):
                for name, parameter in wrapped.named_parameters():
                    parameter.data.copy_(weights[canonical_name(name)])
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        backward_of_rank(wrapped, step)
        for name, (_, gradient) in full_parameters(wrapped).items():
            alone.get_parameter(name).grad = gradient
        norms = optimizer.clip_grad_norm_(0.1)
        norm_alone = other.clip_grad_norm_(0.1)
        optimizer.step()
        other.step()
        differing += [
            f"{name} after step {step}"
            for name, (value, _) in full_parameters(wrapped).items()
            if not torch.equal(value, alone.get_parameter(name))
        ]
    described = [line for line in str(optimizer.explain()).splitlines() if "flat×" in line]
    assert differing == []
    assert bool(described) == (strategy != "NO_SHARD")
    assert abs(float(norms) - float(norm_alone)) < 1e-12  # ranks add squares in another order


def wrapped_after(declare: bool) -> None:
    model = Net()
    optimizer = mm.from_model(model, process_group="world", **SETTINGS)
    wrapped = wrap(model)
    if declare:
        optimizer.layouts = declared_layouts(wrapped)
    backward_of_rank(wrapped, 0)
    optimizer.step()


def test_an_optimizer_made_before_the_wrapper_is_told_of_it(workers) -> None:
    for outcome in workers(2).run_expecting_errors(wrapped_after, False):
        assert outcome.error is mm.LayoutError, outcome
        assert "FSDP1 (FullyShardedDataParallel) has flattened" in outcome.message
        assert "layouts=muonmesh.integrations.fsdp1.declared_layouts(model)" in outcome.message
    workers(2).run(wrapped_after, True)


@on_ranks(2)
def test_the_parameters_that_a_flat_one_replaced_are_told_of() -> None:
    """What is said of parameters that are flat ones alone, and at the hundredth step of those that they replaced."""
    model = Net()
    optimizer = mm.from_model(model, process_group="world", **SETTINGS)
    wrapped = wrap(model, use_orig_params=False)
    with pytest.raises(mm.LayoutError, match=r"found one flat parameter instead of them.*use_orig_params=True"):
        declared_layouts(wrapped)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(100):
            optimizer.step()
    (message,) = [str(warning.message) for warning in caught]
    assert "nothing else had one either" in message
    assert "make the optimizer after what replaces parameters (FSDP1" in message


def test_a_model_without_the_wrapper_has_no_layouts_of_fsdp1() -> None:
    with pytest.raises(ValueError, match="found no module wrapped by FullyShardedDataParallel"):
        declared_layouts(Net())
