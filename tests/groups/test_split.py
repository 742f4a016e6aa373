"""split_params: who goes to Muon, who to AdamW, what the matrices are, and why."""

from __future__ import annotations

import copy
import fnmatch
import io
import math
import pickle
import warnings
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
from tests.support.on_ranks import on_ranks
from tests.support.reference import split
from tests.support.samples import one_in

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


def assert_tiled(shape: tuple[int, ...], spec: Any) -> None:
    """Assert that the matrices tile a parameter of this shape."""
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


# --- real models -----------------------------------------------------------------------------------------------------


LLAMA = {"*.embed_tokens.weight": E, "lm_head.weight": H}


def mixture(width: int) -> dict[str, Any]:
    """Experts whose gate and up have `width` rows each, and their router."""
    experts = {"*.experts.gate_up_proj": ("stack", ("rows", width, width)), "*.experts.down_proj": "stack"}
    return {**LLAMA, **experts, "*.mlp.gate.weight": M}


# The matrices of a transformers model that are not "whole": what is easy to get wrong, said from its code and
# configuration, not copied from a run.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {  # Conv1D stores in × out; the head is the embedding
        "*.wte.weight": E,
        "*.wpe.weight": E,
        "*.attn.c_attn.weight": ("transposed", ("rows", 768, 768, 768)),
        "*.c_proj.weight": ("transposed", "whole"),
        "*.c_fc.weight": ("transposed", "whole"),
    },
    "GPTNeoXForCausalLM": {  # 64 heads of 96
        "*.query_key_value.weight": ("interleaved", 3, 0, 96),
        "*.embed_in.weight": E,
        "lm_head.weight": H,
    },
    "LlamaForCausalLM": LLAMA,
    # the vision part's input layer is a guess
    "Llama4ForConditionalGeneration": {
        "*.experts.gate_up_proj": ("stack", ("transposed", ("rows", 8192, 8192))),
        "*.experts.down_proj": ("stack", ("transposed", "whole")),
        "*.router.weight": M,
        "*.positional_embedding_vlm": E,
        "*.embed_tokens.weight": E,
        "*.lm_head.weight": H,
    },
    "Qwen3ForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": mixture(768),
    "MixtralForCausalLM": mixture(14336),
    # kv_a_proj_with_mqa is a guess
    "DeepseekV3ForCausalLM": {"*.kv_b_proj.weight": ("interleaved", 2, 0, 128), **mixture(2048)},
    "GptOssForCausalLM": {  # gate and up row by row, in × out, with biases
        **LLAMA,
        "*.experts.gate_up_proj": ("stack", ("transposed", ("interleaved", 2, 0))),
        "*.experts.down_proj": ("stack", ("transposed", "whole")),
        "*_proj_bias": V,
        "*.router.weight": M,
    },
    # the vision part's pooling head has torch's attention, and its projection is a guess; the head is shared
    "Gemma3ForConditionalGeneration": {
        "*.in_proj_weight": ("rows", 768, 768, 768),
        "*.probe": V,
        "*.vision_tower.embeddings.*.weight": E,
        "*.embed_tokens.weight": E,
    },
    "Phi3ForCausalLM": {
        **LLAMA,
        "*.qkv_proj.weight": ("rows", 3072, 3072, 3072),
        "*.gate_up_proj.weight": ("rows", 8192, 8192),
    },
    "T5ForConditionalGeneration": {"shared.weight": E, "*.relative_attention_bias.weight": f"{E}[weight_decay=0.0]"},
    # in_proj is a guess
    "Mamba2ForCausalLM": {"*.embeddings.weight": E, "*.conv1d.weight": M, "lm_head.weight": H},
    "FalconH1ForCausalLM": {**LLAMA, "*.conv1d.weight": M},
    # an input layer of 80 mel bins is a guess; the encoder's positions are frozen sinusoids
    "WhisperForConditionalGeneration": {"*.encoder.conv?.weight": "flatten", "*.decoder.embed_*.weight": E},
    # q_proj is as wide as a flattened patch, 3·16·16 = 768, and no input layer all the same
    "ViTForImageClassification": {
        "*.position_embeddings": E,
        "*.cls_token": V,
        "*.patch_embeddings.projection.weight": E,
        "classifier.weight": H,
    },
    "ConvNextForImageClassification": {
        "*.patch_embeddings.weight": E,
        "*.dwconv.weight": M,
        "*.downsampling_layer.1.weight": "flatten",
        "classifier.weight": H,
    },
    "BertForMaskedLM": {"bert.embeddings.*_embeddings.weight": E},  # the decoder is shared
}


@cache
def real(name: str) -> nn.Module:
    config = getattr(transformers, name).config_class()
    with torch.device("meta"):
        return getattr(transformers, name)(config)


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_transformers_model(name: str) -> None:
    """Each trainable parameter is in one group, with a reason; matrices tile it, and are those of the table."""
    model, expected = real(name), MODELS[name]
    groups = split_params(model)
    assert groups[0]["name"] == "muon"
    by_name = dict(model.named_parameters())
    assert set(groups.frozen) == {n for n, p in by_name.items() if not p.requires_grad}
    names = [n for group in groups for n in group["param_names"]]
    assert sorted(names) == sorted(by_name.keys() - groups.frozen.keys())
    for group in groups:
        assert all(by_name[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
        assert len(group["reasons"]) == len(group["params"])
        assert all(group["reasons"])
    assert all(fnmatch.filter(names, pattern) for pattern in expected)
    entries = split_or_group(groups)
    for n, entry in entries.items():
        by_dims = "whole" if by_name[n].ndim > 1 else V
        assert entry == next((role for pattern, role in expected.items() if fnmatch.fnmatch(n, pattern)), by_dims), n
    for shape, spec in {(tuple(by_name[n].shape), entries[n]) for n in groups[0]["param_names"]}:
        assert_tiled(shape, spec)


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

MPT = {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 1}
DBRX = {
    **MPT,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
}
MULTI_QUERY, MULTI_HEAD = {"multi_query": True}, {"multi_query": False}
BY_GROUP = {"new_decoder_architecture": True, "num_kv_heads": 2}
JETMOE_SMALL = GROUPED | {"kv_channels": 8, "num_local_experts": 4}
LINEAR = {"layer_types": ["linear_attention"]}

# Where parameters are in models, and where their effect is read.
GPT2, GPT2_SELF, GPT2_OUT = "transformer.h.0.", "transformer.h.0.self_attention.", "transformer.h.0.attn.c_proj"
LAYER, MIXER, NEOX = "model.layers.0.", "backbone.layers.0.mixer.", "gpt_neox.layers.0.attention."
SELF, MLP, EXPERTS_OF = LAYER + "self_attn.", LAYER + "mlp.", LAYER + "mlp.experts"
C_ATTN, QKV, GATE_UP = GPT2 + "attn.c_attn.weight", "query_key_value.weight", MLP + "gate_up_proj.weight"
STACKED, DENSE = EXPERTS_OF + ".gate_up_proj", GPT2_SELF + "dense"
JAPANESE, DEBERTA = "gpt_neox_japanese.layers.0.attention.", "deberta.encoder.layer.0.attention."
DBRX_ATTENTION, MPT_ATTENTION = "transformer.blocks.0.norm_attn_norm.attn.", "transformer.blocks.0.attn."
FALCON, LLAMA4 = LAYER + "mamba.", LAYER + "feed_forward.experts"
BLIP_ATTENTION, DELTA_NET, JETMOE = "encoder.layers.0.self_attn.", LAYER + "linear_attn.", LAYER + "self_attention."

THREE, HALVES, TWENTY = ("rows", 32, 32, 32), ("rows", 40, 40), ("stack", ("rows", 20, 20))
HEADS = ("interleaved", 3, 0, 8)
FALCON_GROUPS, TAKING_TURNS = ("interleaved", (16, 8, 8), 0), ("interleaved", 2, 0)

# The matrices without which the effect is zero, and those without which it is the same.
V_OF_QKV: tuple[set[int], set[int]] = {2}, {0, 1}
V_OF_QVK: tuple[set[int], set[int]] = {1}, {0, 2}
GATED: tuple[set[int], set[int]] = {0, 1}, set()
ALL: tuple[set[int], set[int]] = {0, 1, 2}, set()
FIRST: tuple[set[int], set[int]] = {0}, set()
SECOND: tuple[set[int], set[int]] = {1}, set()
B_AND_C: tuple[set[int], set[int]] = {0, 1}, {2, 3}  # z and x gate; B·C is zero, which leaves the skip connection D·x

# The model and its settings; the fused parameter; where its effect is read (the input of a module, or the output of
# experts); its matrices; those without which that is zero or the same.
ORDERS: list[tuple[str, dict[str, Any], str, str, Any, tuple[set[int], set[int]]]] = [
    ("GPT2LMHeadModel", GPT2_SMALL, C_ATTN, GPT2_OUT, ("transposed", THREE), V_OF_QKV),
    ("OpenAIGPTLMHeadModel", GPT2_SMALL, C_ATTN, GPT2_OUT, ("transposed", THREE), V_OF_QKV),
    ("GPTBigCodeForCausalLM", GPT2_SMALL, C_ATTN, GPT2_OUT, ("rows", 32, 8, 8), V_OF_QKV),
    ("GPTBigCodeForCausalLM", GPT2_SMALL | MULTI_HEAD, C_ATTN, GPT2_OUT, HEADS, V_OF_QKV),
    ("CodeGenForCausalLM", GPT2_SMALL, GPT2 + "attn.qkv_proj.weight", GPT2 + "attn.out_proj", HEADS, V_OF_QVK),
    ("GPTNeoXForCausalLM", N_SMALL, NEOX + QKV, NEOX + "dense", HEADS, V_OF_QKV),
    ("GPTNeoXJapaneseForCausalLM", N_SMALL, JAPANESE + QKV, JAPANESE + "dense", HEADS, V_OF_QKV),
    ("BloomForCausalLM", N_SMALL | {"n_head": 4}, GPT2_SELF + QKV, DENSE, HEADS, V_OF_QKV),
    ("PersimmonForCausalLM", N_SMALL | {"qk_layernorm": False}, SELF + QKV, SELF + "dense", HEADS, V_OF_QKV),
    ("FalconForCausalLM", N_SMALL | MULTI_QUERY, GPT2_SELF + QKV, DENSE, ("rows", 32, 8, 8), V_OF_QKV),
    ("FalconForCausalLM", N_SMALL | MULTI_HEAD, GPT2_SELF + QKV, DENSE, HEADS, V_OF_QKV),
    ("FalconForCausalLM", N_SMALL | BY_GROUP, GPT2_SELF + QKV, DENSE, FALCON_GROUPS, V_OF_QKV),
    ("Phi3ForCausalLM", GROUPED, SELF + "qkv_proj.weight", SELF + "o_proj", ("rows", 32, 16, 16), V_OF_QKV),
    (
        "DbrxForCausalLM",
        DBRX,
        DBRX_ATTENTION + "Wqkv.weight",
        DBRX_ATTENTION + "out_proj",
        ("rows", 32, 16, 16),
        V_OF_QKV,
    ),
    ("MptForCausalLM", MPT, MPT_ATTENTION + "Wqkv.weight", MPT_ATTENTION + "out_proj", THREE, V_OF_QKV),
    ("ModernBertForMaskedLM", N_SMALL, LAYER + "attn.Wqkv.weight", LAYER + "attn.Wo", THREE, V_OF_QKV),
    ("DebertaForMaskedLM", N_SMALL, DEBERTA + "self.in_proj.weight", DEBERTA + "output.dense", HEADS, V_OF_QKV),
    ("BlipVisionModel", VISION, BLIP_ATTENTION + "qkv.weight", BLIP_ATTENTION + "projection", THREE, V_OF_QKV),
    (
        "JetMoeForCausalLM",
        JETMOE_SMALL,
        JETMOE + "kv_proj.weight",
        JETMOE + "experts.output_linear",
        ("rows", 16, 16),
        SECOND,
    ),
    (
        "MiniMaxForCausalLM",
        EXPERTS | LINEAR | {"block_size": 8},
        SELF + "qkv_proj.weight",
        SELF + "out_proj",
        HEADS,
        ALL,
    ),
    ("Qwen3_5ForCausalLM", DELTA, DELTA_NET + "in_proj_qkv.weight", DELTA_NET + "out_proj", ("rows", 16, 16, 32), ALL),
    ("DeepseekV3ForCausalLM", DEEPSEEK, SELF + "kv_b_proj.weight", SELF + "o_proj", ("interleaved", 2, 0, 8), SECOND),
    ("DeepseekV3ForCausalLM", DEEPSEEK, SELF + "kv_a_proj_with_mqa.weight", SELF + "o_proj", ("rows", 12, 4), FIRST),
    ("Phi3ForCausalLM", SMALL, GATE_UP, MLP + "down_proj", HALVES, GATED),
    ("GlmForCausalLM", SMALL | {"head_dim": 8}, GATE_UP, MLP + "down_proj", HALVES, GATED),
    ("ModernBertForMaskedLM", N_SMALL, MLP + "Wi.weight", MLP + "Wo", HALVES, GATED),
    ("MixtralForCausalLM", EXPERTS, STACKED, EXPERTS_OF, ("stack", HALVES), GATED),
    ("Qwen3MoeForCausalLM", EXPERTS, STACKED, EXPERTS_OF, TWENTY, GATED),
    ("DeepseekV3ForCausalLM", DEEPSEEK, STACKED, EXPERTS_OF, TWENTY, GATED),
    ("Llama4ForCausalLM", EXPERTS, LLAMA4 + ".gate_up_proj", LLAMA4, ("stack", ("transposed", HALVES)), GATED),
    # GPT-OSS multiplies by up + 1, so only the gate shows.
    ("GptOssForCausalLM", EXPERTS, STACKED, EXPERTS_OF, ("stack", ("transposed", TAKING_TURNS)), FIRST),
    ("Mamba2ForCausalLM", MAMBA2, MIXER + "in_proj.weight", MIXER + "out_proj", ("rows", 64, 64, 8, 8, 8), B_AND_C),
    (
        "FalconH1ForCausalLM",
        FALCON_H1,
        FALCON + "in_proj.weight",
        FALCON + "out_proj",
        ("rows", 32, 32, 8, 8, 4),
        B_AND_C,
    ),
    ("MambaForCausalLM", MAMBA, MIXER + "in_proj.weight", MIXER + "out_proj", ("rows", 64, 64), GATED),
    ("MambaForCausalLM", MAMBA, MIXER + "x_proj.weight", MIXER + "out_proj", ("rows", 2, 4, 4), (set(), {1, 2})),
    (
        "Lfm2ForCausalLM",
        SMALL | {"layer_types": ["conv"]},
        LAYER + "conv.in_proj.weight",
        LAYER + "conv.out_proj",
        THREE,
        ALL,
    ),
]


@pytest.mark.parametrize("case", ORDERS, ids=[f"{case[0]}-{case[2].split('.')[-2]}" for case in ORDERS])
def test_order_is_that_of_the_forward(case: tuple[str, dict[str, Any], str, str, Any, Any]) -> None:
    name, settings, fused, reader, spec, (zero, same) = case
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


@pytest.mark.slow
@on_ranks(2)
def test_fully_shard_and_ddp_change_nothing() -> None:
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
    assert results == [True] * 5


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
