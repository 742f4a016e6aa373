"""Whole parameters and gradients, put together by hand from what the ranks of a Megatron model hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed.tensor import Shard

# The end of a name: the dim along which tensor parallelism cuts it, and of how many pieces each shard consists; where
# they are unequal, how long these are in the whole.
CUTS: dict[str, tuple[int, int | tuple[int, ...]]] = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "eh_proj.weight": (0, 1),
    "linear_q_down_proj.weight": (0, 1),
    "linear_kv_down_proj.weight": (0, 1),
    "linear_q_up_proj.weight": (0, 1),
    "linear_kv_up_proj.weight": (0, 1),
    "mixer.in_proj.weight": (0, (64, 64, 8, 8, 8)),
    "mixer.conv1d.weight": (0, (64, 8, 8)),
    "mixer.conv1d.bias": (0, (64, 8, 8)),
    "mixer.conv1d_weight": (0, (64, 8, 8)),  # as versions after 0.16.1 call it
    "mixer.conv1d_bias": (0, (64, 8, 8)),
    "mixer.norm.weight": (0, 1),
    "mixer.D": (0, 1),
    "in_proj.weight": (0, (16, 16, 32, 32, 4, 4)),
    "out_proj.weight": (1, 1),
    "conv1d.weight": (0, (16, 16, 32)),
    "A_log": (0, 1),
    "dt_bias": (0, 1),
}

OUTER = "outer_fsdp_dp"
Held = dict[str, tuple[int, Tensor]]
"""For each name in the whole model this rank's place among those that cut the parameter, and its shard."""


def named(chunks: Sequence[Any]) -> dict[str, Any]:
    """The parameters of this rank by their names in the whole model."""
    parameters = {}
    for chunk in chunks:
        layers = {
            f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
            for name, module in chunk.named_modules()
            if isinstance(module, TransformerLayer)
        }
        for name, parameter in chunk.named_parameters():
            for local, whole in layers.items():
                if name.startswith(local):
                    name = whole + name.removeprefix(local)
                    break
            if ".local_experts." in name:
                before, _, after = name.partition(".local_experts.")
                number, _, rest = after.partition(".")
                first = parallel_state.get_expert_model_parallel_rank() * experts_of(chunk)
                name = f"{before}.local_experts.{first + int(number)}.{rest}"
            while name.startswith("module."):
                name = name.removeprefix("module.")
            parameters[name] = parameter
    return parameters


def experts_of(chunk: Any) -> int:
    """How many experts a rank holds of each layer."""
    return chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()


def tensor_parallel_rank(name: str) -> int:
    """This rank's place among those that cut a parameter."""
    if re.search(r"experts\.\d", name):
        return int(parallel_state.get_expert_tensor_parallel_rank())
    return int(parallel_state.get_tensor_model_parallel_rank())


def gradients(chunks: Sequence[Any]) -> dict[Any, Tensor]:
    """What Megatron has reduced, for each parameter of this rank all of it.

    With the distributed optimizer a rank has reduced its part of each bucket only: the others' are gathered.
    """
    gradient_of = {}
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            whole = buffer.grad_data.clone()
            if buffer.ddp_config.use_distributed_optimizer:
                ranks, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
                for bucket in buffer.buckets:
                    parts = list(bucket.grad_data.clone().chunk(ranks))
                    dist.all_gather(parts, parts[rank].clone(), group=buffer.data_parallel_group)
                    whole[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(parts)
            for parameter, (start, end, _) in buffer.param_index_map.items():
                gradient_of[parameter] = whole[start:end].view(parameter.shape).to(parameter.main_grad.dtype, copy=True)
    return gradient_of


def local_values(parameters: Mapping[str, Any], values: Mapping[Any, Tensor] | None = None) -> Held:
    """What to hand to `gather`: parameters, or a value for each."""
    values_on_rank = {}
    for name, parameter in parameters.items():
        value = parameter if values is None else values[parameter]
        values_on_rank[name] = tensor_parallel_rank(name), value.detach().clone()
    return values_on_rank


def gather(rank_values: Held) -> dict[str, Tensor]:
    """Put whole tensors together from what all ranks hold; copies must have the same bits. All ranks call it."""
    by_rank: list[Held] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, rank_values)
    shards: dict[str, dict[int, Tensor]] = {}
    for values in by_rank:
        for name, (number, tensor) in values.items():
            other = shards.setdefault(name, {}).setdefault(number, tensor)
            assert torch.equal(other, tensor), f"copies of {name} differ by {(other - tensor).abs().max()}"
    return {name: assembled(name, [pieces[i] for i in sorted(pieces)]) for name, pieces in shards.items()}


def assembled(name: str, shards: Sequence[Tensor]) -> Tensor:
    dim, pieces = next((cut for end, cut in CUTS.items() if name.endswith(end)), (None, 1))
    if dim is None:
        assert all(torch.equal(shards[0], other) for other in shards), f"replicas of {name} differ"
        return shards[0]
    if isinstance(pieces, int):
        parts = [shard.chunk(pieces, dim) for shard in shards]
    else:
        parts = [shard.split([size // len(shards) for size in pieces], dim) for shard in shards]
    return torch.cat([part[piece] for piece in range(len(parts[0])) for part in parts], dim)


def sharded(parameters: dict[str, Any], *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole parameters, or gradients, of the pieces that the ranks of Megatron-FSDP hold. All ranks call it.

    The inner axis of a hybrid mesh cuts a buffer first. If the outer axis does not cut it, it has copies.
    """
    local_pieces = {}
    for name, parameter in parameters.items():
        value = parameter.grad if gradients else parameter
        local = parameter.to_local()[:0] if value is None else value.to_local()
        mesh = parameter.device_mesh
        coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
        placement = dict(zip(mesh.mesh_dim_names, parameter.placements, strict=True))
        outer = coordinate.get(OUTER, 0)
        if outer == 0 or isinstance(placement[OUTER], Shard):
            local_pieces[name] = coordinate["dp_cp"], outer, local.detach().reshape(-1).clone(), tuple(parameter.shape)
    pieces_of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(pieces_of_ranks, local_pieces)
    shapes = {name: shape for pieces in pieces_of_ranks for name, (*_, shape) in pieces.items()}
    in_order = {
        name: sorted((pieces[name] for pieces in pieces_of_ranks if name in pieces), key=lambda piece: piece[:2])
        for name in shapes
    }
    return {name: torch.cat([piece[2] for piece in in_order[name]]).view(shape) for name, shape in shapes.items()}
