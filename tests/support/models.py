"""Tiny real models of `transformers`, held by several ranks the way their users hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.meshes import mesh_of

VOCAB = 101  # which no number of ranks divides
EXPERTS = 6  # four ranks hold 2, 2, 2 and none
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # grouped queries: k and v are half as tall as q
    "tie_word_embeddings": False,
}
# What is orthogonalized: an independent list, by the end of the name. The rest is AdamW's.
MATRICES: dict[str, Any] = {
    "q_proj.weight": "whole",
    "k_proj.weight": "whole",
    "v_proj.weight": "whole",
    "o_proj.weight": "whole",
    "gate_proj.weight": "whole",
    "up_proj.weight": "whole",
    "down_proj.weight": "whole",
    "experts.gate_up_proj": ("stack", ("rows", 40, 40)),
    "experts.down_proj": "stack",
}


def matrices_of(name: str) -> Any:
    """The `matrices` entry of a parameter, or None if it is AdamW's."""
    return next((entry for end, entry in MATRICES.items() if name.endswith(end)), None)


def build(family: str) -> nn.Module:
    """The same model on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=92))
    experts = {"intermediate_size": 40, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**COMMON, **experts, experts_implementation="eager"))


def tokens(step: int, sequences: int, length: int) -> Tensor:
    """One batch, the same on every rank."""
    return torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, batch: Tensor) -> None:
    """Gradients of the mean loss, in place of any others."""
    model.zero_grad()
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()


@dataclass(frozen=True)
class Share:
    """A model on this rank, the part of each batch that is its own, and what the optimizer must be told."""

    model: nn.Module
    part: int
    parts: int
    process_group: str | None = None

    def own_part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.parts)[self.part]


def hold(family: str, layout: str) -> Share:
    """Hold the model of a family by all ranks.

    Layouts:
        fsdp: FSDP2 over all ranks.
        hsdp: FSDP2 on a mesh of replicas × shards.
        tp: tensor parallel over all ranks with `SequenceParallel` norms, as in torchtitan; no FSDP.
        fsdp x tp: that in pairs of ranks, under FSDP2.
        fsdp x plain tp: the same without `SequenceParallel`, as in torch's tutorial: norms live on one mesh axis.
        fsdp x ep: experts shared by pairs of ranks, under FSDP2, which cuts their stacks along the same dim.
        fsdp over dim 1 x ep: FSDP2 cuts each expert by rows instead.
    """
    model, world = build(family), dist.get_world_size()
    if layout == "fsdp":
        shard(model, init_device_mesh("cpu", (world,)))
        return Share(model, dist.get_rank(), world)
    if layout == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,)), sequence_parallel=True)
        return Share(model, 0, 1)
    mesh = mesh_of((2, world // 2), names=("outer", "inner"))
    if layout == "hsdp":
        shard(model, mesh)
        return Share(model, dist.get_rank(), world)
    data, inner = mesh["outer"], mesh["inner"]
    share = Share(model, data.get_local_rank(), data.size(), "world" if "ep" in layout else None)
    if "tp" in layout:
        tensor_parallel(model, inner, sequence_parallel="plain" not in layout)
    else:
        for layer in model.model.layers:
            parallelize_module(layer, inner, {"mlp.experts": ExpertParallel()})
    shard(model, data, dim=1 if "dim 1" in layout else 0)
    return share


def shard(model: Any, mesh: DeviceMesh, dim: int = 0) -> None:
    """FSDP2 layer by layer; stacks of experts along ``dim``."""
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.ndim == 3 else 0))


def tensor_parallel(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Share the layers of a Llama; with ``sequence_parallel`` hidden states are cut by position between them."""
    between = Shard(1) if sequence_parallel else Replicate()
    layer: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    whole: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        layer |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        # The embedding gives whole sequences, from which the model makes its positions.
        enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=between, use_local_output=True)
        whole |= {"model.layers.0": enter, "model.norm": SequenceParallel()}
    parallelize_module(model, mesh, whole)
    for decoder_layer in model.model.layers:
        parallelize_module(decoder_layer, mesh, layer)


class ExpertParallel(ParallelStyle):
    """Each rank of the mesh holds some experts and computes them on all tokens; the outputs are summed."""

    def _apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        local_experts = module.gate_up_proj.to_local().shape[0]
        first = mesh.get_local_rank() * local_experts  # as many on every rank
        module.num_experts = local_experts

        def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_states, chosen, weights = args
            for name, parameter in module.named_parameters():
                vars(module)[name] = parameter.to_local()  # what it computes with, in front of the parameter
            local = chosen - first
            elsewhere = (local < 0) | (
                local >= local_experts
            )  # the module leaves out the expert of the number after the last
            return (
                _summed_gradient(hidden_states, mesh),
                local.where(~elsewhere, local_experts),
                _summed_gradient(weights, mesh),
            )

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for name, _ in module.named_parameters():
                del vars(module)[name]
            return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def _summed_gradient(value: Tensor, mesh: DeviceMesh) -> Tensor:
    replicated = DTensor.from_local(value, mesh, [Replicate()])
    return replicated.to_local(grad_placements=[Partial()])


class OpaqueProduct(torch.autograd.Function):
    """A product with a weight that is no operation of torch, as of a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].flatten(0, -2).T @ x.flatten(0, -2)


class Calls(nn.Module):
    """A model of named layers, whose forward is a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)
