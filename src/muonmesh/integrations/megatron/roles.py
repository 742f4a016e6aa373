"""Roles and names of parameters in Megatron-Core's own classes, the same for every parallel layout of the model.

A flag on the parameter marks embeddings and output layers. For other parameters, the module's class and the attribute
that holds the module decide. Sizes are sizes of the whole parameter, from the modules' configuration, never from a
shard. The classes are read from megatron-core 0.16.1 and 0.19.2.

Each pipeline stage, and each chunk of a virtual pipeline, counts its layers from 0. Each expert-parallel rank counts
its experts from 0. Names here are those in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from muonmesh.errors import explain_error
from muonmesh.groups.parameter_sites import Kind, Role, Site, class_names
from muonmesh.names import canonical_name

HALVES = ("heads", 2, 0)
"""Gate rows, then up rows: two equal matrices, whatever the size."""


def megatron_role(site: Site) -> Role | None:
    """Return the role of a parameter in a class of Megatron; None means that the general rules decide.

    Raises:
        ValueError: a GroupedMLP holds the parameter. Versions after megatron-core 0.16.1 have no such class.
    """
    if getattr(site.parameter, "is_embedding_or_output_parameter", False) and len(site.shape) == 2:
        return _table(site)
    if "GroupedMLP" in class_names(site.module, "megatron"):
        problem = f"all experts of a GroupedMLP in {site.key}, in another order than its shape says"
        write = "Set moe_grouped_gemm=False, or install Transformer Engine and set moe_use_legacy_grouped_gemm=False"
        raise ValueError(explain_error(site.name, problem, "a weight for each expert", write))
    layer, owner = site.layer
    for classes, attribute, split, description in _FUSED:
        named = len(site.shape) == 2 and re.fullmatch(attribute, layer)
        if named and any(re.fullmatch(classes, name) for name in class_names(owner, "megatron")):
            matrices = "whole" if split is None else split(owner)
            return Role("muon", "matrices", f"{description} ({type(owner).__name__})", matrices)
    return None


def _table(site: Site) -> Role:
    # The last pipeline stage's copy of a tied embedding must get the same update as the first stage's.
    tied = getattr(site.parameter, "shared_embedding", False)
    kind: Kind = "embeddings" if tied or any("Embedding" in n for n in class_names(site.module)) else "head"
    description = {"embeddings": "embedding", "head": "output layer"}[kind]
    return Role("adamw", kind, f"{description}: is_embedding_or_output_parameter", "whole")


def _grouped_query(owner: Any) -> tuple[Any, ...]:
    """Return the split of a fused weight: for each query group its queries, their gates if any, a key, a value."""
    config = owner.config
    groups = config.num_query_groups or config.num_attention_heads
    queries = config.num_attention_heads // groups * config.kv_channels
    gates = (queries,) if getattr(config, "attention_output_gate", False) else ()
    return ("interleaved", (queries, *gates, config.kv_channels, config.kv_channels), 0)


def _keys_values(owner: Any) -> tuple[Any, ...]:
    """Return the split of a fused weight: for each head a key and a value."""
    return ("interleaved", (owner.config.kv_channels, owner.config.kv_channels), 0)


def _gated(owner: Any) -> Any:
    return HALVES if owner.config.gated_linear_unit else "whole"


def _latent_down(owner: Any) -> tuple[Any, ...]:
    return ("rows", owner.config.kv_lora_rank, owner.config.qk_pos_emb_head_dim)


def _latent_down_with_queries(owner: Any) -> tuple[Any, ...]:
    return ("rows", owner.config.q_lora_rank, *_latent_down(owner)[1:])


def _latent_up(owner: Any) -> tuple[Any, ...]:
    return ("interleaved", (owner.config.qk_head_dim, owner.config.v_head_dim), 0)


def _mamba(owner: Any) -> tuple[Any, ...]:
    state = owner.ngroups * owner.d_state
    return ("rows", owner.d_inner, owner.d_inner, state, state, owner.nheads)


def _delta_net(owner: Any) -> tuple[Any, ...]:
    return ("rows", owner.qk_dim, owner.qk_dim, owner.v_dim, owner.v_dim, owner.num_value_heads, owner.num_value_heads)


_LATENT = "MultiLatentAttention|AbsorbedMLASelfAttention"

_FUSED: tuple[tuple[str, str, Callable[[Any], Any] | None, str], ...] = (
    ("SelfAttention", "linear_qkv", _grouped_query, "attention: q, k, v by query group"),
    ("CrossAttention", "linear_kv", _keys_values, "attention: k, v head by head"),
    ("Attention", "linear_proj", None, "attention: output"),
    (_LATENT, "linear_qkv_down_proj", _latent_down_with_queries, "attention: q, latent, rotary key"),
    (_LATENT, "linear_kv_down_proj", _latent_down, "attention: latent, rotary key"),
    (_LATENT, "linear_kv_up_proj", _latent_up, "attention: k, v head by head"),
    (_LATENT, "linear_q(_down|_up)?_proj", None, "attention: q"),
    ("MLP|TEGroupedMLP", "linear_fc1", _gated, "MLP: gate, up, or input"),
    ("MLP|TEGroupedMLP", "linear_fc2", None, "MLP: output"),
    ("MambaMixer", "in_proj", _mamba, "Mamba: z, x, B, C, dt"),
    ("GatedDeltaNet", "in_proj", _delta_net, "gated delta net: q, k, v, z, beta, alpha"),
)
"""Known linear layers, as four entries: a regular expression for the class of the surrounding module; one for the
attribute that holds the linear layer; a function that returns the split of its weight, or None if the weight is one
matrix; and the description."""


def whole_name(site: Site, expert_rank: int) -> str:
    """Return the name of a chunk's parameter in the whole model.

    Args:
        site: The place of the parameter in its chunk.
        expert_rank: The index of this rank among the expert-parallel ranks.
    """
    parts = [name for name, _ in reversed(site.owners)][1:]
    modules = [module for _, module in reversed(site.owners)]
    for i, part in enumerate(parts):
        if not part.isdecimal():
            continue
        container, number = modules[i], getattr(modules[i + 1], "layer_number", None)
        if parts[i - 1] == "layers" and isinstance(number, int):
            parts[i] = str(number - 1)
        elif parts[i - 1] == "local_experts" and isinstance(container, nn.ModuleList):
            parts[i] = str(expert_rank * len(container) + int(part))
    return canonical_name(".".join([*parts, _expert_key(site, expert_rank)]))


def _expert_key(site: Site, expert_rank: int) -> str:
    """Return the parameter's key. With one weight per expert, it has the expert's number in the whole model."""
    numbered = re.fullmatch(r"(weight|bias)(\d+)", site.key)
    count = getattr(site.module, "num_gemms", None)
    if numbered is None or not isinstance(count, int):
        return site.key
    return f"{numbered[1]}{expert_rank * count + int(numbered[2])}"
