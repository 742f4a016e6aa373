"""per_head: attention weights as one matrix for each head, by what the module says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from tests import reference

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 20, "vocab_size": 31}
DEEPSEEK = {
    **{key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    **{"vocab_size": 31, "num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 2},
    **{"qk_nope_head_dim": 4, "v_head_dim": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1},
}


def model(family: str) -> nn.Module:
    with torch.device("meta"):
        if family == "llama":  # grouped queries
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
        if family == "qwen3":  # heads larger than hidden_size / heads
            config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
            return transformers.Qwen3ForCausalLM(config)
        if family == "neox":
            return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))
        if family == "gpt2":
            config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=6, vocab_size=31, n_positions=16)
            return transformers.GPT2LMHeadModel(config)
        if family == "phi3":
            config = transformers.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0)
            return transformers.Phi3ForCausalLM(config)
        if family == "bert":
            return transformers.BertModel(transformers.BertConfig(**SIZES))
        if family.startswith("deepseek"):
            sizes = DEEPSEEK | ({"v_head_dim": 4} if family == "deepseek, k as large as v" else {})
            return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
        return nn.TransformerEncoderLayer(24, 6, 20)


def example(family: str) -> Any:
    """A forward where one weight makes queries, keys or values together, which nothing else tells."""
    tokens = torch.zeros(1, 5, dtype=torch.long, device="meta")
    return {"input_ids": tokens} if family in ("neox", "gpt2", "phi3") or family.startswith("deepseek") else None


def matrices(module: nn.Module, **settings: Any) -> dict[str, Any]:
    found = {}
    for group in mm.split_params(module, **settings):
        if group["algorithm"] == "muon":
            found |= dict(zip(group["param_names"], group["matrices"], strict=True))
    return found


CUT: dict[str, dict[str, Any]] = {
    "llama": {"q_proj": ("heads", 6, 0), "k_proj": ("heads", 2, 0)},
    "qwen3": {"q_proj": ("heads", 6, 0), "k_proj": ("heads", 2, 0)},
    "neox": {"query_key_value": ("heads", 18, 0)},  # q, k, v of head 0, q, k, v of head 1, ...
    "gpt2": {"c_attn": ("transposed", ("rows", *[4] * 12, 24))},  # v stays one
    "phi3": {"qkv_proj": ("rows", *[4] * 8, 8)},
    "bert": {"query": ("heads", 6, 0), "key": ("heads", 6, 0)},
    "deepseek": {"q_b_proj": ("heads", 6, 0), "kv_b_proj": ("rows", *(4, 3) * 6)},
    "deepseek, k as large as v": {"q_b_proj": ("heads", 6, 0), "kv_b_proj": ("heads", 12, 0)},
    "torch": {"in_proj_weight": ("rows", *[4] * 12, 24)},
}


@pytest.mark.parametrize("family", CUT)
def test_queries_and_keys_are_cut_into_heads_and_the_rest_is_not(family: str) -> None:
    """Keys among other rows, of other counts and sizes than the queries, stored in × out, or head by head."""
    shown = example(family)
    before, after = matrices(model(family), example=shown), matrices(model(family), example=shown, per_head=True)
    expected = {
        name: next((cut for end, cut in CUT[family].items() if end in name.split(".")), form)
        for name, form in before.items()
    }
    assert after == expected
    assert before != after


def test_values_and_outputs_are_cut_where_they_are_asked_for() -> None:
    found = matrices(model("qwen3"), per_head=("v", "o"))
    ends = {name.split(".")[-2]: form for name, form in found.items()}
    assert ends["v_proj"] == ("heads", 2, 0)
    assert ends["o_proj"] == ("heads", 6, 1)  # of its columns, which is what a head writes
    assert ends["q_proj"] == ends["k_proj"] == "whole"
    latent = matrices(model("deepseek"), per_head=("o",), example=example("deepseek"))
    assert latent["model.layers.0.self_attn.o_proj.weight"] == ("heads", 6, 1)


def test_a_head_is_stepped_as_a_matrix_of_its_own_and_has_its_scale() -> None:
    """Of six heads; in the fused weight of torch and in one of its own the same."""
    module = nn.MultiheadAttention(24, 6, bias=False)
    gradient = torch.randn(72, 24, generator=torch.Generator().manual_seed(1))
    before = module.in_proj_weight.detach().clone()
    module.in_proj_weight.grad = gradient.clone()
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0}
    mm.from_model(module, per_head=True, compute_dtype=torch.float32, **settings).step()
    expected = before.double()
    for low, high in [(4 * head, 4 * head + 4) for head in range(12)] + [(48, 72)]:
        expected[low:high], _ = reference.muon(
            before[low:high].double(),
            gradient[low:high].double(),
            {},
            coefficients=[tuple(step) for step in coefficient_schedule("polar_express", 5)],
            **settings,
        )
    torch.testing.assert_close(module.in_proj_weight.detach().double(), expected, atol=2e-4, rtol=0)


def test_half_a_head_is_refused() -> None:
    broken = model("llama")
    attention = broken.get_submodule("model.layers.0.self_attn")
    attention.q_proj = nn.Linear(24, 22, bias=False)
    told = (
        r"^model\.layers\.0\.self_attn\.q_proj\.weight: found q of 22 in LlamaAttention, which says 6 heads of 4; "
        r'needed whole heads.* Write overrides=\{"model\.layers\.0\.self_attn\.q_proj\.weight": '
    )
    with pytest.raises(ValueError, match=told):
        mm.split_params(broken, per_head=True)
    said = {"model.layers.0.self_attn.q_proj.weight": {"algorithm": "muon", "matrices": ("heads", 2, 0)}}
    assert matrices(broken, per_head=True, overrides=said)["model.layers.0.self_attn.q_proj.weight"] == ("heads", 2, 0)


def test_what_is_asked_for_in_vain_is_refused() -> None:
    with pytest.raises(ValueError, match="per_head asks for q, k, but split_params knows no attention module"):
        mm.split_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), per_head=True)
    for wrong in ("q", ("x",), (), 1):
        with pytest.raises(ValueError, match=r"per_head=.*; needed True, which means"):
            mm.split_params(model("llama"), per_head=wrong)  # type: ignore[arg-type]


def test_deepspeeds_tag_is_honoured_whoever_steps() -> None:
    """`muon_num_heads` on a parameter, of modules that are not known too; half heads and fused weights are refused."""
    tagged = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False), nn.Linear(24, 5))
    tagged[0].weight.muon_num_heads = 6  # type: ignore[assignment]
    for settings in ({}, {"overrides": {"1.weight": {"algorithm": "muon", "matrices": ("heads", 2, 0)}}}):
        assert matrices(tagged, **settings)["0.weight"] == ("heads", 6, 0)
    said = {"0.weight": {"algorithm": "muon", "matrices": "whole"}}
    assert matrices(tagged, overrides=said)["0.weight"] == "whole"
    for wrong in (5, 0, True, "6"):
        tagged[0].weight.muon_num_heads = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=rf"^0\.weight: found muon_num_heads={wrong!r} .* needed whole heads"):
            mm.split_params(tagged)
    fused = model("phi3")
    fused.get_parameter("model.layers.0.self_attn.qkv_proj.weight").muon_num_heads = 6  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"qkv_proj\.weight: found muon_num_heads=6 .*'rows', 24, 8, 8"):
        mm.split_params(fused, example=example("phi3"))
    with pytest.raises(
        ValueError, match=r"qkv_proj\.weight: found q, k, v in one weight, split as 'whole'; .* example="
    ):
        mm.split_params(model("phi3"), per_head=True)
