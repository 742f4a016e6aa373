"""What one rank of a host does: DeepSpeed's engine, Megatron-Core, FSDP2. Imported in a process of `tests.gpu.rank`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import muonmesh as mm
from tests.gpu.rank import attempt
from tests.support import gathered, problem

STEPS = 4
STAGES = (1, 2, 3)


def deepspeed_engine(_: str) -> dict[str, Any]:
    """For each stage what differs from one process, clipped or not, and what after loading a checkpoint."""
    from tests.hosts import deepspeed_engine as ds

    def resumed(config: dict[str, Any], how: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            return ds.differences(ds.save(config, folder), ds.resume(config, folder, how))

    outcomes: dict[str, Any] = {}
    for stage in STAGES:
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        cases: dict[str, Callable[[], Any]] = {
            "exact in fp32": lambda config=config: ds.exactness(config),
            "exact in bf16": lambda config=config: ds.exactness(config, compute_dtype=torch.bfloat16),
            "clipped": lambda config=config: clipped(ds.clipped(config, {"max_norm": 1.0})),
            "its checkpoint": lambda config=config: resumed(config, "its own"),
            "our checkpoint": lambda config=config: resumed(config, "ours"),
        }
        outcomes |= {f"{stage} {name}": attempt(case) for name, case in cases.items()}
    return outcomes


def clipped(outcome: tuple[list[str], list[tuple[Any, Any]]]) -> list[str]:
    """What differs, and each step whose norms are not those of one process or were not clipped."""
    wrong, norms = outcome
    return wrong + [f"norms {pair}" for pair in norms if pair[0] != pair[1] or not pair[0][2] > 1.0 or pair[0][3]]


def megatron(_: str) -> dict[str, Any]:
    """For each way of holding parameters what three steps make of a GPT, beside one process."""
    from tests.megatron.host import Shape
    from tests.megatron.training import train

    shapes = {
        "DDP, fp32": Shape(),
        "DDP, bf16": Shape(dtype=torch.bfloat16),
        "distributed optimizer, bf16": Shape(flat=True, dtype=torch.bfloat16),
        "distributed optimizer, bf16, overlapping": Shape(
            flat=True, overlap=True, late_gather=True, dtype=torch.bfloat16
        ),
        "distributed optimizer, fp16": Shape(flat=True, dtype=torch.float16),
    }
    return {
        name: trained if isinstance(trained := attempt(train, shape), str) else trained._asdict()
        for name, shape in shapes.items()
    }


# ---------------------------------------------------------------- FSDP2


def llama(device: str, **settings: Any) -> nn.Module:
    """A Llama of two layers, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": False, **sizes})
    model: nn.Module = LlamaForCausalLM(config).to(device, **settings)
    return model


def tokens(step: int, device: str) -> Tensor:
    return torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(step)).to(device)


class Sharded:
    """A Llama under FSDP2 that computes in bf16 and is trained by its own gradients, which are kept."""

    def __init__(self, device: str) -> None:
        self.device, self.model = device, llama(device)
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = mm.from_model(self.model, lr=0.02)

    def backward(self, step: int) -> float:
        batch = tokens(step, self.device)
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        return float(loss.detach())

    def step(self) -> dict[str, Tensor]:
        """Clip, step, and return the gradients before that."""
        gradients = gathered.whole({name: p.grad for name, p in self.model.named_parameters()})  # type: ignore[misc]
        self.optimizer.clip_grad_norm_(0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients

    def give(self, gradients: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            gradient = gradients[name].to(self.device)
            parameter.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)

    def snapshot(self) -> dict[str, Tensor]:
        return problem.result(self.model, self.optimizer)


def plain(device: str, steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of the Llama without FSDP2 after the same gradients."""
    model = llama(device)
    optimizer = mm.from_model(model, lr=0.02, process_group="local")
    for gradients in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].to(device)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    return gathered.whole(dict(model.named_parameters()))


def fsdp2(device: str) -> dict[str, Any]:
    """What differs from one process, what after loading a checkpoint, and the losses of both runs."""
    with tempfile.TemporaryDirectory() as folder:
        first, gradients, losses = Sharded(device), [], []
        for step in range(STEPS):
            if step == STEPS // 2:
                mm.checkpoint.save(f"{folder}/saved", first.model, first.optimizer)
            losses.append(first.backward(step))
            gradients.append(first.step())
        ended = first.snapshot()
        second = Sharded(device)
        second.backward(STEPS)  # something else, which loading has to undo
        second.step()
        mm.checkpoint.load(f"{folder}/saved", second.model, second.optimizer)
    again = second.backward(STEPS // 2)
    second.optimizer.zero_grad()
    for step in range(STEPS // 2, STEPS):
        second.give(gradients[step])
        second.step()
    started = gathered.whole(dict(llama(device).named_parameters()))
    return {
        "one process": differing(plain(device, gradients), ended),
        "resumed": differing(ended, second.snapshot()) if ended.keys() == second.snapshot().keys() else "other state",
        "still": [name for name, value in started.items() if torch.equal(value, ended[name])],
        "losses": losses,
        "loss again": again,
    }


def differing(tensors: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """By how much tensors differ, relative to their norms, where they are not the same bit for bit."""
    return {
        name: float((value.double() - other[name].double()).norm() / other[name].double().norm().clamp(min=1e-30))
        for name, value in tensors.items()
        if not torch.equal(value, other[name])
    }
