"""split_params: who goes to Muon, who to AdamW, what the matrices are, and why."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonmesh.groups import ParamGroups, split_params
from tests.support.reference import split
from tests.support.samples import one_in
from tests.support.workers import Pool

COVERS = (
    "groups.known.row_of",
    "groups.roles.role",
    "groups.split.split_params",
    "groups.parameter_sites.parameter_sites",
)

V, H = "adamw.vectors", "adamw.head"
E, M = "adamw.embeddings", "adamw.matrices"


def split_or_group(groups: ParamGroups) -> dict[str, Any]:
    """Name → the `matrices` entry, or the group's name for AdamW."""
    return {
        name: group["matrices"][i] if group["algorithm"] == "muon" else group["name"]
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


def reason(groups: ParamGroups, name: str) -> str:
    return next(g["reasons"][g["param_names"].index(name)] for g in groups if name in g["param_names"])


def tiled(shape: tuple[int, ...], spec: Any) -> int:
    """The number of matrices, having checked that they tile a parameter of this shape."""
    pieces = split(torch.empty(shape, device="meta"), spec)
    assert all(piece.ndim == 2 for piece in pieces)
    assert sum(piece.numel() for piece in pieces) == math.prod(shape)
    # The same split with all but the dim that is cut made small, element by element.
    cut = {"rows": -2, "cols": -1}
    small, inner, transposed = [min(size, 2) for size in shape], spec, False
    while not isinstance(inner, str):
        kind, *rest = inner
        if kind in ("rows", "cols", "heads", "interleaved"):
            dim = cut[kind] if kind in cut else -2 + rest[1]
            dim = -3 - dim if transposed else dim
            small[dim] = shape[dim]
            break
        transposed ^= kind == "transposed"
        inner = rest[0] if rest else "whole"
    elements = torch.arange(math.prod(small))
    assert torch.cat([p.flatten() for p in split(elements.view(small), spec)]).sort().values.equal(elements)
    return len(pieces)


# --- real models -----------------------------------------------------------------------------------------------------


class Expected:
    """What a transformers model becomes: counted by hand from its configuration, not copied from a run.

    muon: (tensors, matrices, elements); adamw: (tensors, elements); names: the ones that are easy to get wrong.
    """

    def __init__(self, muon: tuple[int, int, int], adamw: tuple[int, int], names: dict[str, Any]) -> None:
        self.muon, self.adamw, self.names = muon, adamw, names


MODELS: dict[str, Expected] = {
    # 12 layers, width 768; Conv1D stores in × out; the head is the embedding.
    "GPT2LMHeadModel": Expected(
        (12 * 4, 12 * 6, 12 * 12 * 768**2),
        (2 + 12 * 8 + 2, (50257 + 1024) * 768 + 12 * (4 + 3 + 1 + 4 + 1) * 768 + 2 * 768),
        {
            "transformer.h.0.attn.c_attn.weight": ("transposed", ("rows", 768, 768, 768)),
            "transformer.h.11.attn.c_proj.weight": ("transposed", "whole"),
            "transformer.h.0.mlp.c_fc.weight": ("transposed", "whole"),
            "transformer.h.0.mlp.c_proj.weight": ("transposed", "whole"),
            "transformer.h.0.attn.c_attn.bias": V,
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            "lm_head.weight": None,  # shared with wte
        },
    ),
    # 44 layers, width 6144, 64 heads of 96.
    "GPTNeoXForCausalLM": Expected(
        (44 * 4, 44 * 6, 44 * 12 * 6144**2),
        (2 + 44 * 8 + 2, 2 * 50432 * 6144 + 44 * (4 + 3 + 1 + 4 + 1) * 6144 + 2 * 6144),
        {
            "gpt_neox.layers.0.attention.query_key_value.weight": ("interleaved", 3, 0, 96),
            "gpt_neox.layers.43.attention.dense.weight": "whole",
            "gpt_neox.embed_in.weight": E,
            "embed_out.weight": None,  # the name of transformers 4
            "lm_head.weight": H,
        },
    ),
    "LlamaForCausalLM": Expected(
        (32 * 7, 32 * 7, 32 * (4 * 4096**2 + 3 * 11008 * 4096)),
        (2 + 32 * 2 + 1, 2 * 32000 * 4096 + 65 * 4096),
        {
            "model.layers.0.mlp.gate_proj.weight": "whole",
            "model.layers.0.self_attn.o_proj.weight": "whole",
            "model.embed_tokens.weight": E,
            "lm_head.weight": H,
            "model.norm.weight": V,
        },
    ),
    # Vision: 34 layers of width 768. Text: 48 layers of width 5120, 16 experts of width 8192 stored in × out.
    "Llama4ForConditionalGeneration": Expected(
        (
            34 * 6 + 1 + 3 + 48 * 9,
            34 * 6 + 1 + 3 + 48 * (4 + 16 * 3 + 3),
            588 * 768
            + 34 * (4 * 768**2 + 2 * 768 * 5632)
            + (5632 * 4096 + 4096**2 + 7680 * 5120)
            + 48 * (2 * 5120**2 + 2 * 1024 * 5120 + 17 * 3 * 5120 * 8192),
        ),
        (
            34 * 10 + 6 + 48 * 3 + 3,
            34 * (9 * 768 + 5632) + 6 * 768 - 768 + 1025 * 768 + 48 * (2 + 16) * 5120 + 5120 + 2 * 202048 * 5120,
        ),
        {
            "language_model.model.layers.0.feed_forward.experts.gate_up_proj": (
                "stack",
                ("transposed", ("rows", 8192, 8192)),
            ),
            "language_model.model.layers.0.feed_forward.experts.down_proj": ("stack", ("transposed", "whole")),
            "language_model.model.layers.0.feed_forward.router.weight": M,
            "language_model.model.layers.0.feed_forward.shared_expert.gate_proj.weight": "whole",
            "multi_modal_projector.linear_1.weight": "whole",
            "vision_model.patch_embedding.linear.weight": "whole",  # a guess: an input layer
            "vision_model.positional_embedding_vlm": E,
            "vision_model.class_embedding": V,
            "language_model.lm_head.weight": H,
        },
    ),
    "Qwen3ForCausalLM": Expected(
        (32 * 7, 32 * 7, 32 * (4 * 4096**2 + 3 * 22016 * 4096)),
        (2 + 32 * 4 + 1, 2 * 151936 * 4096 + 32 * (2 * 4096 + 2 * 128) + 4096),
        {
            "model.layers.0.self_attn.q_norm.weight": V,
            "model.layers.0.self_attn.q_proj.weight": "whole",
            "lm_head.weight": H,
        },
    ),
    # 24 layers of width 2048, 128 experts of width 768.
    "Qwen3MoeForCausalLM": Expected(
        (24 * 6, 24 * (4 + 128 * 3), 24 * (2 * 2048**2 + 2 * 256 * 2048 + 128 * 3 * 768 * 2048)),
        (2 + 24 * 5 + 1, 2 * 151936 * 2048 + 24 * (128 * 2048 + 2 * 2048 + 2 * 64) + 2048),
        {
            "model.layers.0.mlp.experts.gate_up_proj": ("stack", ("rows", 768, 768)),
            "model.layers.0.mlp.experts.down_proj": "stack",
            "model.layers.0.mlp.gate.weight": M,
            "model.layers.0.self_attn.k_norm.weight": V,
        },
    ),
    "MixtralForCausalLM": Expected(
        (32 * 6, 32 * (4 + 8 * 3), 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 8 * 3 * 14336 * 4096)),
        (2 + 32 * 3 + 1, 2 * 32000 * 4096 + 32 * (8 + 2) * 4096 + 4096),
        {
            "model.layers.0.mlp.experts.gate_up_proj": ("stack", ("rows", 14336, 14336)),
            "model.layers.0.mlp.experts.down_proj": "stack",
            "model.layers.0.mlp.gate.weight": M,
        },
    ),
    # 61 layers, the first 3 dense; 128 heads of 128 + 64 (rotary); latents of 1536 and 512; 256 experts and one shared.
    "DeepseekV3ForCausalLM": Expected(
        (
            61 * 5 + 3 * 3 + 58 * 5,
            61 * 6 + 3 * 3 + 58 * (256 * 3 + 3),
            61 * (1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384)
            + 3 * 3 * 18432 * 7168
            + 58 * 257 * 3 * 2048 * 7168,
        ),
        (2 + 61 * 4 + 58 + 1, 2 * 129280 * 7168 + 61 * (1536 + 512 + 2 * 7168) + 58 * 256 * 7168 + 7168),
        {
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "whole",  # a guess
            "model.layers.0.self_attn.kv_b_proj.weight": ("interleaved", 2, 0, 128),
            "model.layers.0.self_attn.q_b_proj.weight": "whole",
            "model.layers.0.self_attn.kv_a_layernorm.weight": V,
            "model.layers.0.mlp.gate_proj.weight": "whole",
            "model.layers.3.mlp.gate.weight": M,
            "model.layers.3.mlp.experts.gate_up_proj": ("stack", ("rows", 2048, 2048)),
            "model.layers.60.mlp.shared_experts.down_proj.weight": "whole",
        },
    ),
    # 36 layers of width 2880, 128 experts of width 2880, gate and up row by row, in × out, with biases.
    "GptOssForCausalLM": Expected(
        (36 * 6, 36 * (4 + 128 * 3), 36 * (2 * 4096 * 2880 + 2 * 512 * 2880 + 128 * 3 * 2880**2)),
        (
            2 + 36 * (1 + 4 + 2 + 2 + 2) + 1,
            2 * 201088 * 2880
            + 36 * (64 + 4096 + 2 * 512 + 2880 + 128 * 2880 + 128 + 128 * (5760 + 2880) + 2 * 2880)
            + 2880,
        ),
        {
            "model.layers.0.mlp.experts.gate_up_proj": ("stack", ("transposed", ("interleaved", 2, 0))),
            "model.layers.0.mlp.experts.down_proj": ("stack", ("transposed", "whole")),
            "model.layers.0.mlp.experts.gate_up_proj_bias": V,
            "model.layers.0.mlp.experts.down_proj_bias": V,
            "model.layers.0.mlp.router.weight": M,
            "model.layers.0.self_attn.sinks": V,
        },
    ),
    # Vision: 12 layers of width 768 and a pooling head with torch's attention. Text: 26 layers of width 2304.
    "Gemma3ForConditionalGeneration": Expected(
        (
            12 * 6 + 4 + 1 + 26 * 7,
            12 * 6 + 6 + 1 + 26 * 7,
            12 * (4 * 768**2 + 2 * 768 * 3072)
            + (4 * 768**2 + 2 * 768 * 3072)
            + 768 * 2304
            + 26 * (2 * 2048 * 2304 + 2 * 1024 * 2304 + 3 * 9216 * 2304),
        ),
        (
            3 + (1 + 12 * 10 + 2) + 7 + 1 + 26 * 6 + 1,
            (768 + 196) * 768
            + 262208 * 2304
            + 768
            + 12 * (4 + 4 + 1 + 4) * 768
            + 2 * 768
            + (1 + 3 + 1 + 2 + 4 + 1) * 768
            + 768
            + 26 * (4 * 2304 + 2 * 256)
            + 2304,
        ),
        {
            "model.vision_tower.head.attention.in_proj_weight": ("rows", 768, 768, 768),
            "model.vision_tower.head.attention.out_proj.weight": "whole",
            "model.vision_tower.head.probe": V,
            "model.vision_tower.embeddings.patch_embedding.weight": E,
            "model.vision_tower.embeddings.position_embedding.weight": E,
            "model.multi_modal_projector.mm_input_projection_weight": ("transposed", "whole"),
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": "whole",
            "model.language_model.embed_tokens.weight": E,
            "lm_head.weight": None,  # shared
        },
    ),
    "Phi3ForCausalLM": Expected(
        (32 * 4, 32 * (3 + 1 + 2 + 1), 32 * (4 * 3072**2 + 3 * 8192 * 3072)),
        (2 + 32 * 2 + 1, 2 * 32064 * 3072 + 65 * 3072),
        {
            "model.layers.0.self_attn.qkv_proj.weight": ("rows", 3072, 3072, 3072),
            "model.layers.0.mlp.gate_up_proj.weight": ("rows", 8192, 8192),
            "model.layers.0.mlp.down_proj.weight": "whole",
        },
    ),
    "T5ForConditionalGeneration": Expected(
        (6 * 6 + 6 * 10, 6 * 6 + 6 * 10, 6 * (12 * 512**2 + 4 * 512 * 2048)),
        (1 + 2 + 6 * 2 + 6 * 3 + 2, 32128 * 512 + 2 * 32 * 8 + 32 * 512),
        {
            "shared.weight": E,
            "lm_head.weight": None,
            "encoder.embed_tokens.weight": None,
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": f"{E}[weight_decay=0.0]",
            "decoder.block.5.layer.1.EncDecAttention.k.weight": "whole",
            "decoder.block.5.layer.2.DenseReluDense.wo.weight": "whole",
        },
    ),
    # 64 layers of width 4096: z, x of 8192, B, C of 8 groups of 128, 128 time steps.
    "Mamba2ForCausalLM": Expected(
        (64 * 2, 64 * 2, 64 * (18560 * 4096 + 8192 * 4096)),
        (2 + 64 * 7 + 1, 2 * 32768 * 4096 + 64 * (4096 + 3 * 128 + 5 * 10240 + 8192) + 4096),
        {
            "backbone.layers.0.mixer.in_proj.weight": "whole",  # a guess
            "backbone.layers.0.mixer.conv1d.weight": M,
            "backbone.layers.0.mixer.A_log": V,
            "backbone.layers.0.mixer.norm.weight": V,
            "backbone.layers.0.mixer.out_proj.weight": "whole",
        },
    ),
    "FalconH1ForCausalLM": Expected(
        (
            32 * 9,
            32 * 9,
            32 * (3 * 14336 * 4096 + 2688 * 4096 + 1024 * 4096 + 2 * 4096**2 + 2 * 1024 * 4096),
        ),
        (2 + 32 * 7 + 1, 2 * 128000 * 4096 + 32 * (3 * 128 + 5 * 1536 + 2 * 4096) + 4096),
        {
            "model.layers.0.mamba.in_proj.weight": "whole",  # a guess
            "model.layers.0.mamba.conv1d.weight": M,
            "model.layers.0.mamba.D": V,
            "model.layers.0.feed_forward.gate_proj.weight": "whole",
        },
    ),
    # 4 + 4 layers of width 384; the encoder's positions are frozen sinusoids.
    "WhisperForConditionalGeneration": Expected(
        (2 + 4 * 6 + 4 * 10, 2 + 4 * 6 + 4 * 10, 384 * (80 + 384) * 3 + 4 * (12 * 384**2 + 4 * 384 * 1536)),
        (
            2 + 2 + 4 * (3 + 2 + 4) + 2 + 4 * (6 + 2 + 6) + 2,
            (51865 + 448) * 384 + 2 * 384 + 4 * (3 + 4 + 1 + 4) * 384 + 4 * (6 + 4 + 1 + 6) * 384 + 4 * 384,
        ),
        {
            "model.encoder.conv1.weight": "flatten",  # a guess: an input layer of 80 mel bins
            "model.encoder.conv2.weight": "flatten",
            "model.encoder.embed_positions.weight": None,  # frozen
            "model.decoder.embed_positions.weight": E,
            "model.decoder.layers.0.encoder_attn.k_proj.weight": "whole",
            "proj_out.weight": None,  # shared
        },
    ),
    "ViTForImageClassification": Expected(
        (12 * 6, 12 * 6, 12 * 12 * 768**2),
        (4 + 12 * 10 + 4, (1 + 197 + 768 + 1) * 768 + 12 * (4 + 4 + 4 + 1) * 768 + 2 * 768 + 2 * 768 + 2),
        {
            "vit.embeddings.position_embeddings": E,
            "vit.embeddings.cls_token": V,
            "vit.embeddings.patch_embeddings.projection.weight": E,
            # as wide as a flattened patch, 3·16·16 = 768, and no input layer all the same
            "vit.layers.0.attention.q_proj.weight": "whole",
            "classifier.weight": H,
            "classifier.bias": V,
        },
    ),
    # Depths 3, 3, 9, 3; widths 96 to 768.
    "ConvNextForImageClassification": Expected(
        (
            2 * 18 + 3,
            2 * 18 + 3,
            8 * (3 * 96**2 + 3 * 192**2 + 9 * 384**2 + 3 * 768**2) + 4 * 2 * (96**2 + 192**2 + 384**2),
        ),
        (
            4 + 18 * 7 + 3 * 3 + 4,
            (48 + 3) * 96
            + (49 + 1 + 1 + 2 + 4 + 1) * (3 * 96 + 3 * 192 + 9 * 384 + 3 * 768)
            + (2 + 2) * (96 + 192 + 384)
            + 2 * 768
            + 2 * 768
            + 2,
        ),
        {
            "convnext.embeddings.patch_embeddings.weight": E,
            "convnext.encoder.stages.0.layers.0.dwconv.weight": M,
            "convnext.encoder.stages.1.downsampling_layer.1.weight": "flatten",
            "convnext.encoder.stages.0.layers.0.layer_scale_parameter": V,
            "classifier.weight": H,
        },
    ),
    "BertForMaskedLM": Expected(
        (12 * 6 + 1, 12 * 6 + 1, (12 * 12 + 1) * 768**2),
        (
            3 + 2 + 12 * 10 + 1 + 3,
            (30522 + 512 + 2) * 768 + 2 * 768 + 12 * (4 + 2 + 4 + 1 + 2) * 768 + 30522 + 3 * 768,
        ),
        {
            "cls.predictions.transform.dense.weight": "whole",
            "cls.predictions.decoder.weight": None,  # shared
            "cls.predictions.bias": V,
            "bert.embeddings.token_type_embeddings.weight": E,
            "bert.embeddings.LayerNorm.weight": V,
        },
    ),
}


@cache
def real(name: str) -> nn.Module:
    config = getattr(transformers, name).config_class()
    with torch.device("meta"):
        return getattr(transformers, name)(config)


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_transformers_model(name: str) -> None:
    model, expected = real(name), MODELS[name]
    groups = split_params(model)
    assert groups[0]["name"] == "muon"
    counts: dict[str, list[int]] = {"muon": [0, 0, 0], "adamw": [0, 0]}
    sizes: dict[Any, int] = {}
    for group in groups:
        count = counts[group["algorithm"]]
        count[0] += len(group["params"])
        count[-1] += sum(p.numel() for p in group["params"])
        for p, spec in zip(group["params"], group.get("matrices", ()), strict=group["algorithm"] == "muon"):
            key = (tuple(p.shape), spec)
            sizes[key] = sizes.get(key) or tiled(*key)
            count[1] += sizes[key]
    assert tuple(counts["muon"]) == expected.muon
    assert tuple(counts["adamw"]) == expected.adamw
    entries = split_or_group(groups)
    assert {n: entries.get(n) for n in expected.names} == expected.names


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_every_trainable_parameter_is_assigned_once_with_a_reason(name: str) -> None:
    model = real(name)
    groups = split_params(model)
    in_groups = [p for group in groups for p in group["params"]]
    assert {id(p) for p in in_groups} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len({id(p) for p in in_groups}) == len(in_groups)
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
        assert len(group["reasons"]) == len(group["params"])
        assert all(group["reasons"])
    assert set(groups.frozen) == {n for n, p in by_name.items() if not p.requires_grad}


# --- the orders are those of the modules' own forward ----------------------------------------------------------------
# One matrix that is zero shows in what the module computes: without v attention gives zero, without q it gives what it
# gives without k, a gated product without either factor is zero. A wrong split would zero a bit of each instead.

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
N_SMALL = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GPT2_SMALL = {**N_SMALL, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "rotary_dim": 4}
for _same in (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "intermediate_size",
):
    GPT2_SMALL.pop(_same)
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {
    **SMALL,
    "experts_implementation": "eager",
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "intermediate_size_mlp": 40,
    "head_dim": 8,
}
DEEPSEEK = {
    **{k: v for k, v in EXPERTS.items() if k not in ("num_experts", "head_dim")},
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
MAMBA = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "use_cache": False}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
FALCON_H1 = {
    **GROUPED,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 4,
    "mamba_chunk_size": 8,
}
DELTA = {
    **GROUPED,
    "layer_types": ["linear_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
BLIP = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {**BLIP, "image_size": 16, "patch_size": 8}

# The model and its settings; the fused parameter; where its effect is read (the input of a module, or the output of
# experts); its matrices; those without which that is zero; those without which it is the same.
ORDERS: list[tuple[str, dict[str, Any], str, str, Any, set[int], set[int]]] = []


def order(
    model: str, settings: dict[str, Any], path: str, fused: str, reader: str, spec: Any, zero: set[int], same: set[int]
) -> None:
    ORDERS.append((model, settings, path + fused, path + reader, spec, zero, same))


GPT2_PATH, LLAMA_PATH = "transformer.h.0.attn.", "model.layers.0."
C_ATTN, QKV = "c_attn.weight", "query_key_value.weight"
THREE = ("rows", 32, 32, 32)
HEADS = ("interleaved", 3, 0, 8)
order("GPT2LMHeadModel", GPT2_SMALL, GPT2_PATH, C_ATTN, "c_proj", ("transposed", THREE), {2}, {0, 1})
order("OpenAIGPTLMHeadModel", GPT2_SMALL, GPT2_PATH, C_ATTN, "c_proj", ("transposed", THREE), {2}, {0, 1})
order("GPTBigCodeForCausalLM", GPT2_SMALL, GPT2_PATH, C_ATTN, "c_proj", ("rows", 32, 8, 8), {2}, {0, 1})
order("GPTBigCodeForCausalLM", {**GPT2_SMALL, "multi_query": False}, GPT2_PATH, C_ATTN, "c_proj", HEADS, {2}, {0, 1})
order("CodeGenForCausalLM", GPT2_SMALL, GPT2_PATH, "qkv_proj.weight", "out_proj", HEADS, {1}, {0, 2})
order("GPTNeoXForCausalLM", N_SMALL, "gpt_neox.layers.0.attention.", QKV, "dense", HEADS, {2}, {0, 1})
order("GPTNeoXJapaneseForCausalLM", N_SMALL, "gpt_neox_japanese.layers.0.attention.", QKV, "dense", HEADS, {2}, {0, 1})
order("BloomForCausalLM", N_SMALL | {"n_head": 4}, "transformer.h.0.self_attention.", QKV, "dense", HEADS, {2}, {0, 1})
order(
    "PersimmonForCausalLM",
    {**N_SMALL, "qk_layernorm": False},
    LLAMA_PATH + "self_attn.",
    QKV,
    "dense",
    HEADS,
    {2},
    {0, 1},
)
for _settings, _spec in (
    ({"multi_query": True}, ("rows", 32, 8, 8)),
    ({"multi_query": False}, HEADS),
    ({"new_decoder_architecture": True, "num_kv_heads": 2}, ("interleaved", (16, 8, 8), 0)),
):
    order("FalconForCausalLM", N_SMALL | _settings, "transformer.h.0.self_attention.", QKV, "dense", _spec, {2}, {0, 1})
order(
    "Phi3ForCausalLM",
    GROUPED,
    LLAMA_PATH + "self_attn.",
    "qkv_proj.weight",
    "o_proj",
    ("rows", 32, 16, 16),
    {2},
    {0, 1},
)
order(
    "DbrxForCausalLM",
    {
        "vocab_size": 50,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 1,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "transformer.blocks.0.norm_attn_norm.attn.",
    "Wqkv.weight",
    "out_proj",
    ("rows", 32, 16, 16),
    {2},
    {0, 1},
)
order(
    "MptForCausalLM",
    {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 1},
    "transformer.blocks.0.attn.",
    "Wqkv.weight",
    "out_proj",
    THREE,
    {2},
    {0, 1},
)
order("ModernBertForMaskedLM", N_SMALL, LLAMA_PATH + "attn.", "Wqkv.weight", "Wo", THREE, {2}, {0, 1})
order(
    "DebertaForMaskedLM",
    N_SMALL,
    "deberta.encoder.layer.0.attention.",
    "self.in_proj.weight",
    "output.dense",
    HEADS,
    {2},
    {0, 1},
)
order("BlipVisionModel", VISION, "encoder.layers.0.self_attn.", "qkv.weight", "projection", THREE, {2}, {0, 1})
order(
    "JetMoeForCausalLM",
    {**GROUPED, "kv_channels": 8, "num_local_experts": 4},
    LLAMA_PATH + "self_attention.",
    "kv_proj.weight",
    "experts.output_linear",
    ("rows", 16, 16),
    {1},
    set(),
)
order(
    "MiniMaxForCausalLM",
    {**EXPERTS, "layer_types": ["linear_attention"], "block_size": 8},
    LLAMA_PATH + "self_attn.",
    "qkv_proj.weight",
    "out_proj",
    HEADS,
    {0, 1, 2},
    set(),
)
order(
    "Qwen3_5ForCausalLM",
    DELTA,
    LLAMA_PATH + "linear_attn.",
    "in_proj_qkv.weight",
    "out_proj",
    ("rows", 16, 16, 32),
    {0, 1, 2},
    set(),
)
order(
    "DeepseekV3ForCausalLM",
    DEEPSEEK,
    LLAMA_PATH + "self_attn.",
    "kv_b_proj.weight",
    "o_proj",
    ("interleaved", 2, 0, 8),
    {1},
    set(),
)
order(
    "DeepseekV3ForCausalLM",
    DEEPSEEK,
    LLAMA_PATH + "self_attn.",
    "kv_a_proj_with_mqa.weight",
    "o_proj",
    ("rows", 12, 4),
    {0},
    set(),
)
GATE_UP, HALVES = "gate_up_proj.weight", ("rows", 40, 40)
order("Phi3ForCausalLM", SMALL, LLAMA_PATH + "mlp.", GATE_UP, "down_proj", HALVES, {0, 1}, set())
order("GlmForCausalLM", {**SMALL, "head_dim": 8}, LLAMA_PATH + "mlp.", GATE_UP, "down_proj", HALVES, {0, 1}, set())
order("ModernBertForMaskedLM", N_SMALL, LLAMA_PATH + "mlp.", "Wi.weight", "Wo", HALVES, {0, 1}, set())
STACKED = "experts.gate_up_proj"
order("MixtralForCausalLM", EXPERTS, LLAMA_PATH + "mlp.", STACKED, "experts", ("stack", HALVES), {0, 1}, set())
order(
    "Qwen3MoeForCausalLM", EXPERTS, LLAMA_PATH + "mlp.", STACKED, "experts", ("stack", ("rows", 20, 20)), {0, 1}, set()
)
order(
    "DeepseekV3ForCausalLM",
    DEEPSEEK,
    LLAMA_PATH + "mlp.",
    STACKED,
    "experts",
    ("stack", ("rows", 20, 20)),
    {0, 1},
    set(),
)
order(
    "Llama4ForCausalLM",
    EXPERTS,
    LLAMA_PATH + "feed_forward.",
    STACKED,
    "experts",
    ("stack", ("transposed", HALVES)),
    {0, 1},
    set(),
)
# GPT-OSS multiplies by up + 1, so only the gate shows.
order(
    "GptOssForCausalLM",
    EXPERTS,
    LLAMA_PATH + "mlp.",
    STACKED,
    "experts",
    ("stack", ("transposed", ("interleaved", 2, 0))),
    {0},
    set(),
)
# z and x gate; B and C multiply each other, which leaves the skip connection D·x.
order(
    "Mamba2ForCausalLM",
    MAMBA2,
    "backbone.layers.0.mixer.",
    "in_proj.weight",
    "out_proj",
    ("rows", 64, 64, 8, 8, 8),
    {0, 1},
    {2, 3},
)
order(
    "FalconH1ForCausalLM",
    FALCON_H1,
    LLAMA_PATH + "mamba.",
    "in_proj.weight",
    "out_proj",
    ("rows", 32, 32, 8, 8, 4),
    {0, 1},
    {2, 3},
)
order(
    "MambaForCausalLM", MAMBA, "backbone.layers.0.mixer.", "in_proj.weight", "out_proj", ("rows", 64, 64), {0, 1}, set()
)
order(
    "MambaForCausalLM", MAMBA, "backbone.layers.0.mixer.", "x_proj.weight", "out_proj", ("rows", 2, 4, 4), set(), {1, 2}
)
order(
    "Lfm2ForCausalLM",
    {**SMALL, "layer_types": ["conv"]},
    LLAMA_PATH + "conv.",
    "in_proj.weight",
    "out_proj",
    THREE,
    {0, 1, 2},
    set(),
)


@pytest.mark.parametrize("case", ORDERS, ids=[f"{case[0]}-{case[2].split('.')[-2]}" for case in ORDERS])
def test_order_is_that_of_the_forward(case: tuple[str, dict[str, Any], str, str, Any, set[int], set[int]]) -> None:
    name, settings, fused, reader, spec, zero, same = case
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**settings)).eval()
    for key, p in model.named_parameters():
        p.requires_grad_(False).normal_(std=0.3)
        if "bias" in key:
            p.zero_()
    parameter = model.get_parameter(fused).requires_grad_()
    inputs = {"input_ids": torch.tensor([[3, 14, 15, 9, 26, 5], [2, 7, 18, 28, 1, 8]])}
    if name == "BlipVisionModel":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    assert split_or_group(split_params(model, example=inputs))[fused] == spec
    if (guess := split_or_group(split_params(model))[fused]) != spec:
        assert "rows" not in str(guess)  # whole, which the first forward contradicts
        assert "interleaved" not in str(guess)

    def run() -> Tensor:
        outputs: list[Tensor] = []
        module = model.get_submodule(reader)
        if reader.endswith("experts"):
            handle = module.register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
        else:
            handle = module.register_forward_pre_hook(lambda module, args: outputs.append(args[0].clone()))
        with torch.no_grad():
            model(**inputs)
        handle.remove()
        return outputs[0]

    flat = torch.arange(parameter.numel()).view(parameter.shape)
    pieces = split(flat, spec)
    parts = len(pieces) // (parameter.shape[0] if parameter.ndim == 3 else 1)
    whole, original = run(), parameter.detach().clone()
    assert whole.abs().max() > 0.01
    results = []
    for part in range(parts):
        with torch.no_grad():
            for piece in pieces[part::parts]:  # of every expert
                parameter.view(-1)[piece.flatten()] = 0
            results.append(run())
            parameter.copy_(original)
    assert {part for part in range(parts) if not results[part].any()} == zero
    for part in same:
        assert not torch.equal(results[part], whole)
        assert all(torch.equal(results[part], results[other]) for other in same)


def test_torch_attention() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    x = torch.randn(2, 5, 8)
    model = nn.ModuleList([attention, nn.Linear(8, 3)])
    spec = split_or_group(split_params(model))["0.in_proj_weight"]
    assert spec == ("rows", 8, 8, 8)
    without = []
    for piece in split(torch.arange(192).view(24, 8), spec):
        changed = copy.deepcopy(attention)
        with torch.no_grad():
            changed.in_proj_weight.view(-1)[piece.flatten()] = 0
            without.append(changed(x, x, x, need_weights=False)[0])
    assert torch.equal(without[0], without[1])
    assert without[0].any()
    assert not without[2].any()
    groups = split_params(nn.ModuleList([nn.MultiheadAttention(8, 2, kdim=6, vdim=4), nn.Linear(8, 3)]))
    separate = split_or_group(groups)
    projections = ["0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight"]
    assert [separate[name] for name in (*projections, "0.in_proj_bias")] == ["whole", "whole", "whole", V]
    reasons = {name: reason for g in groups for name, reason in zip(g["param_names"], g["reasons"], strict=True)}
    reason = "a parameter of MultiheadAttention, which is not known: taken as one matrix, out × in; a guess"
    assert {reasons[name] for name in projections} == {reason}


@pytest.mark.parametrize(("kind", "gates", "closing"), [(nn.LSTM, 4, 2), (nn.GRU, 3, 2)])
def test_recurrent_gates(kind: Any, gates: int, closing: int) -> None:
    torch.manual_seed(0)
    recurrent = kind(6, 5, bias=False)
    spec = ("rows", *[5] * gates)
    by_name = split_or_group(split_params(nn.ModuleList([recurrent, nn.Linear(5, 2)])))
    assert by_name["0.weight_ih_l0"] == by_name["0.weight_hh_l0"] == spec
    with torch.no_grad():  # without its candidate the state stays zero
        for weight in (recurrent.weight_ih_l0, recurrent.weight_hh_l0):
            piece = split(torch.arange(weight.numel()).view(weight.shape), spec)[closing]
            weight.view(-1)[piece.flatten()] = 0
        assert not recurrent(torch.randn(3, 2, 6))[0].any()
    assert split_or_group(split_params(nn.ModuleList([nn.RNN(6, 5), nn.Linear(5, 2)])))["0.weight_hh_l0"] == "whole"
    projected = split_or_group(split_params(nn.ModuleList([nn.LSTM(6, 5, proj_size=3), nn.Linear(3, 2)])))
    assert projected["0.weight_hr_l0"] == "whole"
    cell = split_or_group(split_params(nn.ModuleList([nn.LSTMCell(6, 5), nn.Linear(5, 2)])))
    assert cell["0.weight_hh"] == ("rows", 5, 5, 5, 5)


# --- modules of one's own --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAIN = {
    "embed.weight": E,
    "head.weight": H,
    **{
        f"blocks.{i}.{name}": entry
        for i in (0, 1)
        for name, entry in {
            "norm.weight": V,
            "norm.bias": V,
            "up.weight": "whole",
            "up.bias": V,
            "down.weight": "whole",
        }.items()
    },
}


def holding(**parameters: tuple[int, ...]) -> nn.Module:
    """A module of an unknown class that holds bare parameters, followed by a head."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in parameters.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    return nn.ModuleDict({"held": Holder(), "in": nn.Linear(4, 4), "head": nn.Linear(4, 2)})


def test_groups_of_a_plain_model() -> None:
    groups = split_params(Model())
    assert split_or_group(groups) == PLAIN
    assert [g["name"] for g in groups] == ["muon", "adamw.embeddings", "adamw.head", "adamw.vectors"]
    assert [g["algorithm"] for g in groups] == ["muon", "adamw", "adamw", "adamw"]
    assert groups[0]["param_names"] == [f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")]
    assert groups[0]["matrices"] == ["whole"] * 4
    assert "matrices" not in groups[1]
    assert [g.get("weight_decay") for g in groups] == [None, None, None, 0.0]
    assert groups.frozen == {}


def test_the_same_call_gives_the_same_order() -> None:
    first, second = (split_params(real("DeepseekV3ForCausalLM")) for _ in range(2))
    assert [(g["name"], g["param_names"], g["reasons"]) for g in first] == [
        (g["name"], g["param_names"], g["reasons"]) for g in second
    ]


def test_settings_of_an_algorithm_reach_its_groups_and_vectors_keep_no_decay() -> None:
    groups = split_params(Model(), muon={"lr": 0.02}, adamw={"lr": 0.003, "weight_decay": 0.1})
    assert {g["name"]: (g["lr"], g.get("weight_decay")) for g in groups} == {
        "muon": (0.02, None),
        "adamw.embeddings": (0.003, 0.1),
        "adamw.head": (0.003, 0.1),
        "adamw.vectors": (0.003, 0.0),
    }
    groups = split_params(Model(), adamw={"weight_decay": 0.1}, overrides={"bias": {"weight_decay": 0.2}})
    decay = {n: g["weight_decay"] for g in groups if g["algorithm"] == "adamw" for n in g["param_names"]}
    assert decay["blocks.0.norm.weight"] == 0.0
    assert decay["blocks.0.norm.bias"] == 0.2


def test_groups_go_through_torch_optimizers_and_checkpoints() -> None:
    model = Model()
    groups = split_params(model, overrides={"up.weight": {"matrices": ["rows", 8, 8], "algorithm": "muon"}})
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["param_groups"]
    assert loaded[0]["matrices"] == groups[0]["matrices"]
    assert groups[0]["matrices"] == [("rows", 8, 8), "whole"] * 2  # lists, as from JSON, become tuples
    assert [g["reasons"] for g in loaded] == [g["reasons"] for g in groups]
    for twin in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert isinstance(twin, ParamGroups)
        assert (split_or_group(twin), twin.frozen, str(twin)) == (split_or_group(groups), groups.frozen, str(groups))


def test_shared_and_frozen() -> None:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    groups = split_params(model)
    expected = {n: e for n, e in PLAIN.items() if not n.startswith("blocks.0") and n != "head.weight"}
    assert split_or_group(groups) == expected
    assert "head.weight" in reason(groups, "embed.weight")
    assert set(groups.frozen) == {n for n in PLAIN if n.startswith("blocks.0")}
    assert "requires_grad" in groups.frozen["blocks.0.up.weight"]
    shared = nn.Linear(8, 8)
    twice = nn.ModuleDict({"a": shared, "b": shared, "head": nn.Linear(8, 2)})
    assert split_or_group(split_params(twice)) == {"a.weight": "whole", "a.bias": V, "head.weight": H, "head.bias": V}


class Rows(nn.Linear):
    muonmesh_matrices = {"weight": ("rows", 4, 4)}  # noqa: RUF012


def test_a_shared_parameter_that_two_modules_store_differently() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Rows(8, 8), "head": nn.Linear(8, 2)})
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match=r"a\.weight: found one parameter shared by a\.weight, b\.weight.*Write overr"):
        split_params(model)
    split_spec = {"algorithm": "muon", "matrices": ("rows", 4, 4)}
    assert split_or_group(split_params(model, overrides={"b.weight": split_spec}))["a.weight"] == ("rows", 4, 4)


# Wrapped and sharded


def test_wrappers_change_neither_names_nor_groups() -> None:
    def check(model: nn.Module) -> None:
        groups = split_params(model)
        assert split_or_group(groups) == PLAIN
        assert [g["param_names"] for g in groups] == [g["param_names"] for g in split_params(Model())]

    check(torch.compile(Model()))
    check(nn.DataParallel(Model()))
    model = Model()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block | nn.Linear))
    check(model)
    model.blocks[0] = torch.compile(model.blocks[0])
    check(model)
    check(checkpoint_wrapper(torch.compile(Model())))
    with torch.device("meta"):
        check(Model())
    child = nn.ModuleDict({"module": Block(), "head": nn.Linear(8, 2)})  # a child that happens to be called so
    assert "module.up.weight" in split_or_group(split_params(child))


def test_fused_orders_are_found_through_wrappers() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SMALL))
    plain = split_or_group(split_params(model))
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in ("GPT2Attention", "Conv1D"))
    assert split_or_group(split_params(torch.compile(model))) == plain
    assert plain["transformer.h.0.attn.c_attn.weight"] == ("transposed", THREE)


def _sharded_like_plain() -> list[bool]:
    small = {**EXPERTS, "hidden_size": 20, "num_hidden_layers": 2}  # dims that two ranks do not share evenly
    results = []
    for name in ("GptOssForCausalLM", "Llama4ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"):
        settings = {**GPT2_SMALL, "n_embd": 20} if "GPT2" in name else small
        with torch.device("meta"):
            model = getattr(transformers, name)(getattr(transformers, name).config_class(**settings))
        plain = split_params(model)
        blocks = model.transformer.h if "GPT2" in name else model.model.layers
        for block in blocks:
            for child in block.children():
                fully_shard(child)
        fully_shard(model)
        sharded = split_params(model)
        assert all(p.to_local().numel() < p.numel() for p in sharded[0]["params"])
        results.append([{**g, "params": 0} for g in sharded] == [{**g, "params": 0} for g in plain])
    plain_model = Model()
    ddp = split_params(DistributedDataParallel(plain_model))
    results.append([{**g, "params": 0} for g in ddp] == [{**g, "params": 0} for g in split_params(plain_model)])
    return results


@pytest.mark.slow
def test_fully_shard_and_ddp_change_nothing(workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(_sharded_like_plain) == [[True] * 5] * 2


def test_flattened_weights_are_refused() -> None:
    model = Model()
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(128))  # what FSDP1 and ZeRO leave of a matrix
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight: found a weight of Linear flattened .* fully_shard"):
        split_params(model)
    model.blocks[0].up.weight.ds_shape = torch.Size([16, 8])  # ZeRO-3 keeps the shape here
    assert split_or_group(split_params(model)) == PLAIN
    assert "16×8" in str(split_params(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"0\.weight: found a parameter of the lazy module .* forward pass"):
        split_params(lazy)


# The head


def test_output_layers() -> None:
    def heads(model: nn.Module) -> set[str]:
        return {name for name, entry in split_or_group(split_params(model)).items() if entry == H}

    assert heads(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))) == {"2.weight"}
    assert heads(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Sequential(nn.Conv2d(8, 5, 1)))) == {"1.0.weight"}
    assert heads(nn.ModuleDict({"wrapped": Model()})) == {"wrapped.head.weight"}  # as by Lightning
    assert heads(nn.ModuleDict({"table": nn.Embedding(5, 4), "out": nn.Linear(4, 5)})) == {"out.weight"}
    assert heads(nn.Linear(4, 3)) == set()  # a layer is no model
    assert heads(nn.Sequential(Block(), Block())) == set()  # the last layer is inside a block
    behind = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 2), "table": nn.Embedding(3, 4)})
    assert heads(behind) == {"out.weight"}

    class Named(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            return self[0]

    assert heads(Named(nn.Linear(4, 3), Block(4))) == {"0.weight"}
    for name, expected in (
        ("RobertaForSequenceClassification", {"classifier.out_proj.weight"}),
        ("LlamaForSequenceClassification", {"score.weight"}),
        ("CLIPForImageClassification", {"classifier.weight"}),
        ("Wav2Vec2ForCTC", {"lm_head.weight"}),
        ("ResNetForImageClassification", {"classifier.1.weight"}),
        ("BertModel", set()),
        ("LlamaModel", set()),
    ):
        assert heads(real(name)) == expected, name


class HeadFirst(nn.Module):
    """A model whose output layer is registered before the blocks."""

    def __init__(self, name: str, head: nn.Module, *more: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.add_module(name, head)
        self.more = nn.ModuleList(more)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.norm = nn.LayerNorm(4)


def test_a_head_registered_before_the_blocks_goes_by_its_name() -> None:
    for name in ("head", "lm_head", "output", "classifier", "to_logits"):
        by_name = split_or_group(split_params(HeadFirst(name, nn.Linear(4, 12))))
        assert {key for key, entry in by_name.items() if entry == H} == {f"{name}.weight"}
    by_name = split_or_group(
        split_params(HeadFirst("head", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 12))))
    )
    assert {key for key, entry in by_name.items() if entry == H} == {"head.2.weight"}
    assert split_or_group(split_params(HeadFirst("heading", nn.Linear(4, 4))))["heading.weight"] != H

    class Named(HeadFirst):
        """As SelecSLS of timm: it names its output layer, and calls its last hidden layers the head."""

        def get_classifier(self) -> nn.Module:
            return self.more[0]

    by_name = split_or_group(split_params(Named("head", nn.Linear(4, 8), nn.Linear(8, 12))))
    assert {key for key, entry in by_name.items() if entry == H} == {"more.0.weight"}


def test_a_pipeline_stage_without_its_head_is_no_error() -> None:
    with torch.device("meta"):
        stage = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1))
    stage.cls = None
    assert split_or_group(split_params(stage))["bert.encoder.layer.0.output.dense.weight"] == "whole"


# Kinds of modules


def test_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 8, 3),
        nn.Conv1d(8, 8, 3),
        nn.Conv3d(8, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ConvTranspose2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.Linear(8, 2),
    )
    groups = split_params(model)
    by_name = split_or_group(groups)
    kinds = [E, "flatten", "flatten", "flatten", M, M, M, V, H]
    assert {n: e for n, e in by_name.items() if n.endswith("weight")} == {f"{i}.weight": k for i, k in enumerate(kinds)}
    assert "depthwise" in reason(groups, "4.weight")
    assert "2 groups" in reason(groups, "5.weight")
    # What AdamW has by default goes to Muon flattened when told so.
    assert split_or_group(split_params(model, overrides={"4.weight": "muon"}))["4.weight"] == "flatten"


@pytest.mark.parametrize(
    "settings",
    [
        {"muon": {"adamw_betas": (0.9, 0.99)}},
        {"adamw": {"momentum": 0.5}},
        {"overrides": {r"0\.weight": {"adamw_eps": 1e-6}}},
        {"overrides": {"2.weight": {"scale_mode": "original"}}},
    ],
)
def test_a_setting_of_the_other_algorithm_is_refused(settings: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"which (muon|adamw) does not read; needed a setting of these parameters"):
        split_params(model, **settings)
    split_params(model, overrides={"weight": {"momentum": 0.5}})  # one of the two weights reads it


def test_experts_and_routers_of_other_libraries() -> None:
    class GroupedExperts(nn.Module):  # torchtitan's way
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 4
            self.w1, self.w3 = (nn.Parameter(torch.zeros(4, 6, 8)) for _ in range(2))
            self.w2 = nn.Parameter(torch.zeros(4, 8, 6))
            self.b2 = nn.Parameter(torch.zeros(4, 8))

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 4
            self.is_transposed = True  # as experts of transformers say it
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 12))
            self.down_proj = nn.Parameter(torch.zeros(4, 6, 8))

    class FusedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = nn.Parameter(torch.zeros(4, 12, 8))

    class Routed(nn.Module):
        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.num_experts = 4
            self.scores = nn.Linear(8, 4)
            self.experts = experts

    experts = {"a": GroupedExperts(), "b": Turned(), "c": FusedExperts()}
    model = nn.ModuleDict({**{name: Routed(module) for name, module in experts.items()}, "head": nn.Linear(8, 2)})
    groups = split_params(model)
    assert split_or_group(groups) == {
        "a.experts.w1": "stack",
        "a.experts.w2": "stack",
        "a.experts.w3": "stack",
        "a.experts.b2": V,
        "a.scores.weight": M,
        "a.scores.bias": V,
        # how gate and up are stored nobody says, so one matrix until a forward shows it
        "b.experts.gate_up_proj": ("stack", ("transposed", "whole")),
        "b.experts.down_proj": ("stack", ("transposed", "whole")),
        "b.scores.weight": M,
        "b.scores.bias": V,
        "c.experts.w13": "stack",
        "c.scores.weight": M,
        "c.scores.bias": V,
        "head.weight": H,
        "head.bias": V,
    }
    assert reason(groups, "b.experts.gate_up_proj").endswith("; a guess")


def test_a_router_beside_a_list_of_experts_goes_to_adamw() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    by_name = split_or_group(split_params(nn.ModuleDict({"a": Mixture(), "head": nn.Linear(8, 2)})))
    assert by_name["a.gate.weight"] == M
    assert by_name["a.experts.0.weight"] == "whole"


def test_linear_layers_of_other_libraries() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 4))

    model = nn.ModuleDict({"columns": Columns(), "qkv": nn.Linear(4, 12), "head": nn.Linear(4, 2)})
    groups = split_params(model)
    assert split_or_group(groups)["columns.weight"] == "whole"
    assert reason(groups, "columns.weight").endswith("taken as one matrix, out × in; a guess")
    assert split_or_group(groups)["qkv.weight"] == "whole"  # never split on the strength of a name


def test_a_fused_class_with_other_sizes_is_left_whole() -> None:
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED))
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = nn.Linear(32, 72)  # 64 = 4·8 + 2·2·8 are what it states
    groups = split_params(model)
    assert split_or_group(groups)["model.layers.0.self_attn.qkv_proj.weight"] == "whole"
    assert "a guess" in reason(groups, "model.layers.0.self_attn.qkv_proj.weight")


def test_keys_and_values_of_cross_attention_are_two_matrices() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SMALL, add_cross_attention=True))
    by_name = split_or_group(split_params(model))
    assert by_name["transformer.h.0.attn.c_attn.weight"] == ("transposed", ("rows", 32, 32, 32))
    assert by_name["transformer.h.0.crossattention.c_attn.weight"] == ("transposed", ("rows", 32, 32))


def test_a_stack_of_experts_in_one_matrix() -> None:
    from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU

    config = transformers.DbrxConfig().ffn_config
    config.hidden_size, config.ffn_hidden_size, config.moe_num_experts = 8, 6, 4
    experts = DbrxExpertGLU(config)
    by_name = split_or_group(
        split_params(nn.ModuleDict({"experts": experts, "in": nn.Linear(8, 8), "head": nn.Linear(8, 2)}))
    )
    assert by_name["experts.w1"] == by_name["experts.v1"] == ("heads", 4, 0)
    assert [tuple(p.shape) for p in split(experts.w1, by_name["experts.w1"])] == [(6, 8)] * 4
    assert [tuple(p.shape) for p in split(experts.w2, by_name["experts.w2"])] == [(8, 6)] * 4  # out × in


def test_keys_and_values_of_unequal_size_take_turns() -> None:
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK | {"v_head_dim": 4}))
    by_name = split_or_group(split_params(model, example={"input_ids": torch.ones(1, 5, dtype=torch.long)}))
    assert by_name["model.layers.0.self_attn.kv_b_proj.weight"] == ("interleaved", (8, 4), 0)
    assert by_name["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == ("rows", 12, 4)


def test_lora_pairs_are_left_to_adamw() -> None:
    class Lora(nn.Module):  # the structure of peft's layers
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    model = nn.ModuleDict({"q": Lora(), "k": Lora(), "head": nn.Linear(8, 3)})
    pairs = {f"{n}.lora_{f}.default.weight": M for n in "qk" for f in "AB"}
    groups = split_params(model)
    assert split_or_group(groups) == pairs | {"head.weight": H, "head.bias": V}
    assert "LoRA" in reason(groups, "q.lora_A.default.weight")
    assert set(groups.frozen) == {f"{n}.base_layer.{p}" for n in "qk" for p in ("weight", "bias")}
    overridden = split_or_group(split_params(model, overrides={r"lora_[AB]\.": "muon"}))
    assert overridden == dict.fromkeys(pairs, "whole") | {"head.weight": H, "head.bias": V}


def test_parametrised_weights_go_to_adamw() -> None:
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8, bias=False))
    groups = split_params(nn.ModuleDict({"inner": inner, "mid": nn.Linear(8, 8), "head": nn.Linear(8, 3)}))
    by_name = split_or_group(groups)
    assert by_name["inner.parametrizations.weight.original0"] == V  # magnitudes, 8 × 1
    assert by_name["inner.parametrizations.weight.original1"] == M
    assert "parametrize" in reason(groups, "inner.parametrizations.weight.original1")


def test_bare_parameters_of_unknown_modules() -> None:
    model = holding(
        weight=(4, 6), w_in=(6, 4), pos_embed=(5, 4), A_log=(4, 3), pos=(1, 5, 4), cube=(3, 4, 5), row=(1, 4), z=()
    )
    groups = split_params(model)
    by_name = {n.removeprefix("held."): e for n, e in split_or_group(groups).items() if n.startswith("held.")}
    assert by_name == {
        "weight": "whole",
        "w_in": "whole",
        "pos_embed": E,
        "A_log": f"{E}[weight_decay=0.0]",
        "pos": E,
        "cube": M,
        "row": V,
        "z": V,
    }
    assert "not known" in reason(groups, "held.weight")
    assert "by its name" in reason(groups, "held.pos_embed")
    assert "do not tell" in reason(groups, "held.cube")
    assert split_or_group(split_params(model, overrides={"held.cube": "muon"}))["held.cube"] == "stack"
    # that transformers mixes an EmbeddingAccessMixin into its models makes none of them an embedding
    whole = split_params(real("Llama4ForConditionalGeneration"))
    assert "by its name" in reason(whole, "vision_model.positional_embedding_vlm")


# What a module says of itself


def test_a_module_says_how_its_weight_splits() -> None:
    class Attention(nn.Module):
        muonmesh_matrices = {"qkv.weight": ("rows", 4, 2, 2), "table": None}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 8)
            self.out = Rows(4, 8)
            self.table = nn.Parameter(torch.zeros(4, 4))

    model = nn.ModuleDict({"a": Attention(), "head": nn.Linear(4, 2)})
    groups = split_params(torch.compile(model))
    by_name = split_or_group(groups)
    assert by_name["a.qkv.weight"] == ("rows", 4, 2, 2)
    assert by_name["a.out.weight"] == ("rows", 4, 4)
    assert by_name["a.table"] == M
    assert reason(groups, "a.qkv.weight") == "muonmesh_matrices of Attention"
    model["a"].muonmesh_matrices = {"out.weight": ("cols", 2, 2), "out.bias": None}  # the nearest module counts
    assert split_or_group(split_params(model))["a.out.weight"] == ("rows", 4, 4)
    model["a"].muonmesh_matrices = {"qvk.weight": "whole"}
    with pytest.raises(
        ValueError, match=r"Attention: found 'qvk\.weight' in its muonmesh_matrices, which names no param"
    ):
        split_params(model)
    model["a"].muonmesh_matrices = {"qkv.bias": ("rows", 4, 4)}
    with pytest.raises(ValueError, match=r"a\.qkv\.bias: found Muon for shape \(8,\), by .* needed two or more dims"):
        split_params(model)
    model["a"].muonmesh_matrices = ["qkv.weight"]
    with pytest.raises(TypeError, match="needed a dict"):
        split_params(model)


# Overrides


def test_overrides_win_and_the_more_specific_wins_over_them() -> None:
    groups = split_params(
        Model(),
        muon={"lr": 0.02, "momentum": 0.9},
        overrides={
            "blocks.1.up.weight": {"lr": 0.5},
            r"blocks\.\d\.up\.weight": {"lr": 0.1, "nesterov": False},
            r"blocks\.1": {"lr": 0.3},
            "down": "adamw",
            "embed.weight": "muon",
        },
    )
    settings = {n: g for g in groups for n in g["param_names"]}
    assert {k: settings["blocks.0.up.weight"][k] for k in ("lr", "nesterov", "momentum")} == {
        "lr": 0.1,
        "nesterov": False,
        "momentum": 0.9,
    }
    # the exact name over the expressions, the later expression over the earlier, setting by setting
    assert {k: settings["blocks.1.up.weight"][k] for k in ("lr", "nesterov")} == {"lr": 0.5, "nesterov": False}
    assert settings["blocks.1.norm.weight"]["lr"] == 0.3
    assert settings["blocks.1.norm.weight"]["weight_decay"] == 0.0
    assert "lr" not in settings["blocks.0.norm.weight"]
    by_name = split_or_group(groups)
    assert by_name["embed.weight"] == "whole"
    assert settings["blocks.0.down.weight"]["name"] == "adamw.matrices"
    assert reason(groups, "blocks.0.down.weight") == "override 'down' (by default muon: linear)"
    names = [g["name"] for g in groups]
    assert len(set(names)) == len(names)
    algorithms = [g["algorithm"] for g in groups]
    assert algorithms == sorted(algorithms, reverse=True)  # Muon's first
    assert "muon[lr=0.1,nesterov=False]" in names
    assert set(by_name) == set(PLAIN)


def test_an_override_by_any_of_a_shared_parameters_names() -> None:
    for name in ("embed.weight", "head.weight"):
        assert split_or_group(split_params(Model(tied=True), overrides={name: "muon"}))["embed.weight"] == "whole"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"overrides": {"blocks.0.upp.weight": "muon"}},
            ValueError,
            r"no parameter that matches.*blocks\.0\.up\.weight",
        ),
        ({"overrides": {"q_proj$": "muon"}}, ValueError, "no parameter that matches"),
        ({"overrides": {"(": "muon"}}, ValueError, "no regular expression"),
        ({"overrides": {"norm": "muon"}}, ValueError, r"norm\.weight: found Muon .*'norm'.* vector has no matrix"),
        ({"overrides": {"up": "sgd"}}, ValueError, r"overrides\['up'\]: found the algorithm 'sgd'; needed \"muon\" or"),
        ({"overrides": {"up": {"algorithm": "Muon"}}}, ValueError, "found the algorithm 'Muon'"),
        ({"overrides": {"up": 0.1}}, TypeError, r"overrides\['up'\]: found 0.1"),
        ({"overrides": {3: "muon"}}, TypeError, "found the key 3; needed a string"),
        ({"overrides": {nn.Linear(4, 4).weight: "muon"}}, TypeError, "found the key of the class Parameter; needed a"),
        ({"overrides": ["up"]}, TypeError, "needed a mapping"),
        ({"overrides": {"up": {"name": "mine"}}}, ValueError, "found 'name'"),
        ({"overrides": {"embed": {"matrices": "whole"}}}, ValueError, r"embed\.weight: .* needed Muon .*\"algorithm\""),
        ({"muon": 0.02}, TypeError, r"muon=: found 0\.02"),
        ({"adamw": {"params": []}}, ValueError, "adamw=: found 'params'"),
        ({"muon": {"algorithm": "adamw"}}, ValueError, "muon=: found 'algorithm'"),
        ({"muon": {"matrices": "whole"}}, ValueError, "muon=: found 'matrices'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_params(Model(), **arguments)


def test_wrong_models() -> None:
    with pytest.raises(TypeError, match=r"split_params: found a generator; needed a torch\.nn\.Module"):
        split_params(Model().parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Model: found 12 parameters, none with requires_grad"):
        split_params(Model().requires_grad_(False))
    model = Model()
    model.embed.requires_grad_(False)
    with pytest.raises(ValueError, match=r"overrides\['embed'\]: found frozen parameters only"):
        split_params(model, overrides={"embed": "muon"})
    with pytest.raises(ValueError, match=r"found Muon .* needed what its matrices are.*flatten"):
        split_params(holding(tesseract=(2, 3, 4, 5)), overrides={"tesseract": "muon"})


def test_the_table_shows_everything() -> None:
    model = Model()
    model.blocks[0].norm.requires_grad_(False)
    text = str(split_params(model, muon={"lr": 0.02}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "parameter count shape group matrices reason"
    assert "blocks.*.up.weight 2 16×8 muon whole linear; a guess" in lines
    assert "blocks.1.norm.weight 1 8 adamw.vectors - norm (LayerNorm)" in lines
    assert "muon: 4 tensors, 512 elements, lr=0.02" in lines
    assert "adamw.vectors: 4 tensors, 48 elements, weight_decay=0.0" in lines
    assert "left out: blocks.0.norm.bias (1): frozen: requires_grad is False" in lines
