"""QK-clip: what it notes of attention logits, and what the weights make of them afterwards."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import re
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.conditional_detr.modeling_conditional_detr import ConditionalDetrDecoderSelfAttention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioAttention

import muonmesh as mm
from muonmesh.integrations.qk_clip import attention as attention_module
from muonmesh.integrations.qk_clip.attention import bound_of, largest_logits
from tests.support import zoo

COVERS = (
    "integrations.qk_clip.attention.bound_of",
    "integrations.qk_clip.clip.QKClip",
    "integrations.qk_clip.shared_heads.SharedHeads",
    "integrations.qk_clip.rows.LogitRows",
)

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 20, "vocab_size": 31}
DEEPSEEK = {
    **{**SIZES, "num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 2},
    **{"qk_nope_head_dim": 4, "v_head_dim": 3, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 2},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1},
}
TOKENS = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))
EXAMPLE = {"input_ids": TOKENS}
QUERIES = "model.layers.0.self_attn.q_proj.weight"


def build_family(family: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 6, "vocab_size": 31, "n_positions": 16}
        config: Any = transformers.GPT2Config(**sizes, **dropouts)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif family == "neox":
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))
    elif family == "phi3":
        config = transformers.Phi3Config(**SIZES, num_key_value_heads=6, pad_token_id=0)
        model = transformers.Phi3ForCausalLM(config)
    elif family in ("deepseek", "deepseek, square"):  # torch has no fast kernel on a CPU if sizes of k and v differ
        sizes = {**DEEPSEEK, "v_head_dim": 6} if "square" in family else DEEPSEEK
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    elif family == "hybrid":
        sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
        kinds = ["linear_attention", "full_attention"]
        model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**sizes, layer_types=kinds))
    else:
        groups = 2 if family == "grouped" else 6
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, num_key_value_heads=groups, attention_bias=True)
        )
    with torch.no_grad():
        for name, p in model.named_parameters():  # logits that differ from head to head, and biases that count
            if "layernorm" not in name and "norm" not in name and "ln_" not in name:
                p.normal_(std=0.4)
    model.set_attn_implementation(attention)
    return model.train()


def loss_of_tokens(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return loss


def first(clip: mm.QKClip) -> Tensor:
    """Of the first layer, whose input no other attention changes."""
    return next(iter(clip.largest.values())).clone()


def by_hand(model: Any) -> Tensor:
    """The largest logit of each head of the first layer, one product at a time."""
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(TOKENS))
    q, k = (p(x).view(*TOKENS.shape, -1, 4).transpose(1, 2) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, torch.arange(9)[None]))
    largest = torch.full((6,), -torch.inf)
    for batch in range(3):
        for head in range(6):
            for i in range(9):
                for j in range(i + 1):
                    logit = (q[batch, head, i] @ k[batch, head * k.shape[1] // 6, j]) / 2
                    largest[head] = torch.maximum(largest[head], logit)
    return largest.detach()


@pytest.mark.parametrize(
    ("family", "implementation", "attention"),
    [
        ("llama", "eager", "eager"),
        ("grouped", "eager", "eager"),
        ("llama", "sdpa", "eager"),  # changed after the clip was made
        pytest.param("grouped", "flex_attention", "flex_attention", marks=pytest.mark.soak),  # compiled for a minute
    ],
)
def test_the_largest_logits_are_noted(family: str, implementation: str, attention: str) -> None:
    model: Any = build_family(family, implementation).requires_grad_(
        attention != "flex_attention"
    )  # which has no backward on CPUs
    clip = mm.QKClip(model, threshold=1e9, example=EXAMPLE)
    model.set_attn_implementation(attention)
    loss_of_tokens(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.zeros_like(TOKENS))  # what is not trained on does not count
    clip.step()
    assert model.config._attn_implementation == attention  # which models read, for their masks
    torch.testing.assert_close(first(clip), by_hand(model), rtol=1e-4, atol=1e-5)
    assert list(clip.largest) == [f"model.layers.{n}.self_attn" for n in range(2)]


def test_every_kind_of_mask_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some queries at a time too."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 7, 3, generator=generator), torch.randn(2, 2, 7, 3, generator=generator)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.5
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = logits.masked_fill(~lower, -torch.inf).amax((0, 2, 3))
    bias = torch.randn(1, 4, 7, 7, generator=generator) * 5
    biased = (logits + bias).masked_fill(~lower, -torch.inf).amax((0, 2, 3))
    added = torch.zeros(2, 1, 7, 7).masked_fill(~lower, torch.finfo(torch.float32).min)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 7, 7, device="cpu")
    for limit in (1 << 24, 2 * 4 * 7 * 2):
        monkeypatch.setattr(attention_module, "AT_ONCE", limit)
        for mask in (lower[None, None], added, block):
            torch.testing.assert_close(largest_logits(q, k, scale=0.5, mask=mask), expected)
            torch.testing.assert_close(largest_logits(q, k, scale=0.5, mask=mask, bias=bias), biased)
        torch.testing.assert_close(largest_logits(q, k, scale=0.5, causal=True), expected)
        torch.testing.assert_close(largest_logits(q, k, scale=0.5), logits.amax((0, 2, 3)))


def test_a_model_may_change_to_an_implementation_that_is_registered_later() -> None:
    """Nothing was recorded from then on, without a word. The clip notices it at its next step."""
    model: Any = build_family("llama")
    clip = mm.QKClip(model, threshold=1e9)
    loss_of_tokens(model)
    clip.step()
    expected = first(clip)
    AttentionInterface.register("later", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    AttentionMaskInterface.register("later", sdpa_mask)
    model.set_attn_implementation("later")
    for _ in range(2):
        loss_of_tokens(model)
        clip.step()
    torch.testing.assert_close(first(clip), expected)


def test_products_that_overflow_in_fp16_are_finite_logits() -> None:
    """Kernels scale them in fp32. They were inf, so the largest logits were never clipped."""
    q = torch.full((1, 1, 1, 4), 320.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert largest_logits(q.to(dtype), q.to(dtype), scale=2**-4).tolist() == [4 * 320.0**2 / 16]
    with torch.autocast("cpu", torch.float16):
        assert largest_logits(q, q, scale=2**-4).tolist() == [4 * 320.0**2 / 16]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_checkpointing_that_keeps_every_result_sees_nothing_of_the_clip(attention: str) -> None:
    """Selective checkpointing noticed that a tensor that it kept was written, and would keep logits computed again."""
    model: Any = build_family("llama", attention)
    clip = mm.QKClip(model, threshold=1e9)
    kept: list[str] = []

    def keep(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept.append(str(function))
        return CheckpointPolicy.MUST_SAVE

    def gradients() -> list[Tensor]:
        kept.clear()
        model.zero_grad()
        hidden = model.get_input_embeddings()(TOKENS)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selective})
        model(inputs_embeds=hidden, use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    selective = functools.partial(create_selective_checkpoint_contexts, keep)
    with_clip, kept_with_clip = gradients(), [*kept]
    clip.step()
    assert all(largest.isfinite().all() for largest in clip.largest.values())
    del clip
    without = gradients()
    assert kept == kept_with_clip
    assert all(map(torch.equal, with_clip, without))


class SoftmaxInputs(TorchFunctionMode):
    """The largest input of each softmax for each head, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.softmax:
            self.largest.append(args[0].detach().amax((0, 2, 3)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_position_biases_count(attention: str) -> None:
    """In T5 and its like they come beside the mask. S was the largest product of a query and a key, called exact."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=24, d_kv=4, d_ff=20, num_layers=2, num_heads=6, vocab_size=31, dropout_rate=0
    )
    model: Any = transformers.T5EncoderModel(config).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "relative" in name:
                p.normal_(std=9.0)
    padding = torch.ones_like(TOKENS).index_fill_(1, torch.tensor([0]), 0)
    model.set_attn_implementation("eager")
    with SoftmaxInputs() as softmaxes:
        model(input_ids=TOKENS, attention_mask=padding)
    model.set_attn_implementation(attention)
    clip = mm.QKClip(model, threshold=1e9)
    model(input_ids=TOKENS, attention_mask=padding)
    clip.step()
    for noted, largest in zip(clip.largest.values(), softmaxes.largest, strict=True):
        above = noted - largest
        assert float(above.min()) > -1e-4
        assert float(above.max()) < (1e-4 if attention == "eager" else math.log(9))


class OwnAttention(nn.Module):
    """Attention whose class nobody knows, with queries and keys in one weight."""

    num_heads, head_dim = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


def test_an_optimizers_splits_say_which_rows_make_queries_where_nothing_else_does() -> None:
    """As for a model that is sharded, whose forward cannot be an example."""
    model = nn.ModuleDict({"mix": OwnAttention(), "head": nn.Linear(8, 3)})
    with pytest.raises(ValueError, match="q, k, v in one weight, split as 'whole'"):
        mm.QKClip(model, optimizer=mm.from_model(model))
    overrides = {"mix.qkv.weight": {"algorithm": "muon", "matrices": ("rows", 8, 8, 8)}}
    clip = mm.QKClip(model, optimizer=mm.from_model(model, overrides=overrides))
    ((attention, _),) = clip._attentions.values()
    weight = [(row.low, row.high, row.head) for row in attention.rows if row.name.endswith("weight")]
    assert weight == [(0, 4, 0), (4, 8, 1), (8, 12, 0), (12, 16, 1)]


@pytest.mark.parametrize("family", ["llama", "grouped", "gpt2", "neox", "phi3", "deepseek"])
def test_logits_above_the_threshold_are_brought_back_to_it_and_others_stay(family: str) -> None:
    """With biases, fused, stored in × out, head by head, keys that heads share, latent attention."""
    model = build_family(family, "eager")  # exact
    probe = mm.QKClip(model, threshold=1e9, example=EXAMPLE)
    loss_of_tokens(model)
    probe.step()
    before = first(probe)
    del probe
    threshold = float(before.sort().values[2:4].mean())
    clip = mm.QKClip(model, threshold=threshold, example=EXAMPLE)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # again: the second time there is nothing left to clip
        loss_of_tokens(model)
        clip.step()
    after = first(clip)
    assert int((before > threshold).sum()) == 3
    expected = before.clamp(max=threshold)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, state[name])}
    assert changed
    assert all(
        any(end in name for end in ("q_proj", "k_proj", "qkv", "c_attn", "query", "_b_proj")) for name in changed
    )
    if family == "grouped":
        assert not any("k_proj" in name for name in changed)  # or another head's logits would change
    if family == "deepseek":  # the rotary key is all heads'
        assert not any("kv_a_proj" in name for name in changed)


def test_both_weights_take_half_and_momentum_and_values_none() -> None:
    model = build_family("llama")
    optimizer = mm.from_model(model.bfloat16(), lr=0.0, master_dtype=torch.float32, state_dtype=torch.float32)
    clip = mm.QKClip(model, threshold=2.0, optimizer=optimizer)
    loss_of_tokens(model).backward()
    optimizer.step()  # which makes the state; at rate 0 nothing but the clip would change
    names = dict(model.named_parameters())
    q, k, v = (names[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    states = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in (q, k, v)]
    module = model.get_submodule("model.layers.1.self_attn")
    clip.record(module, torch.tensor([8.0, 1.0, 2.0, 4.5, float("nan"), float("inf")]))
    clip.step()
    factors = torch.tensor([0.25, 1, 1, 2 / 4.5, 1, 1], dtype=torch.float64).sqrt().float().repeat_interleave(4)
    for p, old in zip((q, k), states[:2], strict=True):
        master = optimizer.state[p]["master"]
        assert torch.equal(master, old["master"] * factors[:, None])
        assert torch.equal(optimizer.state[p]["momentum_buffer"], old["momentum_buffer"])
    assert torch.equal(optimizer.state[v]["master"], states[2]["master"])
    optimizer.zero_grad()
    loss_of_tokens(model).backward()
    optimizer.step()
    assert torch.equal(q, optimizer.state[q]["master"].bfloat16())  # the next step does not undo it


class Attention(nn.Module):
    """One's own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.q_proj, self.k_proj = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor, clip: mm.QKClip) -> Tensor:
        q, k = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        clip.observe(self, q, k, scale=0.5, causal=True)
        return q @ k.mT


def test_attention_of_ones_own_tells_what_it_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    clip = mm.QKClip(model, threshold=0.01)
    x = torch.randn(2, 5, 8)
    logits = model[0](x, clip) * 0.5
    clip.step()
    masked = logits.detach().masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(clip.largest["0"], masked.amax((0, 2, 3)))
    model[0](x, clip)
    clip.step()
    torch.testing.assert_close(clip.largest["0"], torch.full((3,), 0.01), rtol=1e-4, atol=0)


def test_an_evaluation_between_two_steps_changes_no_weight() -> None:
    """Attention of one's own recorded in evaluations too, so a model that was evaluated trained to other weights."""
    torch.manual_seed(0)
    model, (training, evaluation) = nn.Sequential(Attention()), (torch.randn(2, 5, 8), 9 * torch.randn(2, 5, 8))
    module, clip = model[0], mm.QKClip(model, threshold=1e9)
    module(training, clip)
    clip.step()
    expected = clip.largest["0"]
    module(training, clip)
    module.eval()
    module(evaluation, clip)
    clip.record(module, torch.full((3,), 1e6))
    q = torch.randn(2, 3, 5, 4) * 99
    with clip.watching(module):
        scaled_dot_product_attention(q, q, q)
    module.train()
    with torch.no_grad(), clip.watching(module):
        scaled_dot_product_attention(q, q, q)
    clip.step()
    assert torch.equal(clip.largest["0"], expected)


def test_attention_of_transformers_whose_queries_are_not_known_is_refused() -> None:
    """It was left out without a word, if other attention of the model was known."""
    model = nn.ModuleDict({"decoder": ConditionalDetrDecoderSelfAttention(transformers.ConditionalDetrConfig(), 24, 6)})
    model["language_model"] = build_family("llama")
    with pytest.raises(
        ValueError, match=r"decoder: found attention in ConditionalDetrDecoderSelfAttention, whose quer"
    ):
        mm.QKClip(model)
    model["decoder"].requires_grad_(False)
    assert len(mm.QKClip(model).largest) == 2


def test_adapters_inside_an_attention_module_are_refused() -> None:
    """Zamba2 adds what its adapters make to queries and keys. Only the rest was scaled, so logits stayed too large."""
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 6, "num_mem_blocks": 1, "adapter_rank": 4}
    sizes |= {"mamba_d_state": 8, "mamba_headdim": 6, "n_mamba_heads": 8, "mamba_ngroups": 1}
    for adapts in (True, False):
        kinds = ["mamba", "hybrid"] * 2
        config = transformers.Zamba2Config(**sizes, layers_block_type=kinds, use_shared_attention_adapter=adapts)
        model = transformers.Zamba2ForCausalLM(config)
        if adapts:
            with pytest.raises(ValueError, match=r"self_attn: found linear_q_adapter_list, whose outputs are added"):
                mm.QKClip(model)
        else:
            assert len(mm.QKClip(model).largest) == 2


def test_layers_with_configs_of_their_own() -> None:
    """The config of the whole model raises an error where it is asked for what only its layers have."""
    with torch.device("meta"):
        model = transformers.Dots3NoteForCausalLM(zoo.small_config("Dots3NoteForCausalLM", 16))
    assert model.config.is_heterogeneous
    assert len(mm.QKClip(model).largest) == 2


def test_a_model_may_get_its_memory_later() -> None:
    """On "meta" nothing could be recorded: "Cannot copy out of meta tensor"."""
    with torch.device("meta"):
        model = nn.Sequential(Attention())
    clip = mm.QKClip(model, threshold=0.01)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    clip.step()
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        model[0](x, clip)
        clip.step()
    torch.testing.assert_close(clip.largest["0"], torch.full((3,), 0.01), rtol=1e-4, atol=0)


def test_what_cannot_be_clipped_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold: found 0; needed a number above 0"):
        mm.QKClip(build_family("llama"), threshold=0)
    with pytest.raises(ValueError, match="found no attention module whose queries and keys are known"):
        mm.QKClip(nn.Linear(3, 3))
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: found q_norm, which norms queries or keys"):
        mm.QKClip(transformers.Qwen3ForCausalLM(config))
    config = transformers.Llama4TextConfig(**SIZES, num_key_value_heads=2, head_dim=4, num_local_experts=2)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: found qk_norm, which norms queries or keys"):
        mm.QKClip(transformers.Llama4ForCausalLM(config))
    for key in (
        "q_norm",
        "qk_norm",
        "k_layernorm",
        "query_layer_norm",
        "k_rms_norm",
        "q_ln",
        "norm_q",
        "ln_k",
        "q_b_norm",
    ):
        model = nn.Sequential(Attention())
        model[0].add_module(key, nn.LayerNorm(4))
        with pytest.raises(ValueError, match=f"0: found {key}, which norms queries or keys"):
            mm.QKClip(model)
    squeezed = transformers.SqueezeBertConfig(**SIZES, embedding_size=24)  # projections that are convolutions
    with pytest.raises(ValueError, match="SqueezeBertSelfAttention: found a forward that does not use"):
        mm.QKClip(transformers.SqueezeBertModel(squeezed))
    clip = mm.QKClip(build_family("llama"))
    with pytest.raises(ValueError, match="found a module that is not known"):
        clip.record(nn.Linear(2, 2), torch.ones(6))
    module = next(m for m in clip._model.modules() if type(m).__name__ == "LlamaAttention")
    with pytest.raises(ValueError, match="found the logits of 3 of 6 heads; needed to know which"):
        clip.record(module, torch.ones(3))


@pytest.mark.parametrize(
    ("family", "wrapped", "part"), [("llama", "q_proj", "q"), ("llama", "k_proj", "k"), ("grouped", "q_proj", "q")]
)
def test_queries_or_keys_that_an_adapter_wraps_are_refused(family: str, wrapped: str, part: str) -> None:
    """Without queries it was a StopIteration; without keys, logits were brought halfway back. PEFT wraps layers so."""
    model = build_family(family)
    for _, module in list(model.named_modules()):
        if hasattr(module, wrapped):
            adapted = nn.Module()
            adapted.base_layer = getattr(module, wrapped)
            setattr(module, wrapped, adapted)
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn: found no weight that is known to make {part};"):
        mm.QKClip(model)


def test_frozen_queries_in_a_module_that_is_trained_are_refused() -> None:
    """An optimizer does not step them, so the logits stayed above the threshold, without a word."""
    model = build_family("grouped")
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.requires_grad_(False)
    mm.QKClip(model, optimizer=mm.from_model(model))  # as a frozen part of a model
    attention.get_submodule("k_proj").requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight: found a frozen parameter"):
        mm.QKClip(model, optimizer=mm.from_model(model))


def falcon() -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    torch.manual_seed(0)
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, new_decoder_architecture=True)).train()


def test_attention_outside_the_interface_of_transformers_is_refused() -> None:
    """Nothing was recorded, so that nothing was ever clipped, without a word."""
    model = falcon()
    with pytest.raises(ValueError, match=r"FalconAttention: found a forward that does not use the attention interface"):
        mm.QKClip(model, example=EXAMPLE)
    optimizer = mm.from_model(model, example=EXAMPLE)
    clips: list[mm.QKClip] = []
    for layer in model.transformer.h:

        def forward(*args: Any, attention: Any = layer.self_attention, of_class: Any, **kwargs: Any) -> Any:
            with clips[0].watching(attention):
                return of_class(*args, **kwargs)

        layer.self_attention.forward = functools.partial(forward, of_class=layer.self_attention.forward)
    clips.append(mm.QKClip(model, optimizer=optimizer))
    loss_of_tokens(model)
    clips[0].step()
    assert all(largest.isfinite().all() for largest in clips[0].largest.values())


def test_modules_that_never_record_are_named() -> None:
    """Their logits were not clipped, without a word."""
    model = nn.Sequential(Attention())
    clip = mm.QKClip(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            clip.step()
    (said,) = [str(warning.message) for warning in caught]
    assert re.search(
        r"QKClip: 0 recorded no logits in 100 steps, so they are not clipped\. If .*model\.train\(\).*clip\.observe",
        said,
    )


def splits_of(model: nn.Module) -> list[dict[str, Any]]:
    """Groups without the names of their parameters: hidden matrices, and the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [{"params": matrices, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}]


@pytest.mark.parametrize("origin", ["without names", "from a module around the model"])
def test_an_optimizer_may_know_the_weights_by_other_names(origin: str) -> None:
    """No weight was scaled, without a word."""
    clipped = []
    for other in (False, True):
        model = build_family("llama")
        optimizer = mm.from_model(model, lr=0.0, adamw={"lr": 0.0})
        if other and origin == "without names":
            optimizer = mm.Muon([{**group, "lr": 0.0} for group in splits_of(model)])
        elif other:
            optimizer = mm.from_model(nn.ModuleDict({"inner": model}), lr=0.0, adamw={"lr": 0.0})
        clip = mm.QKClip(model, threshold=1.0, optimizer=optimizer)
        loss_of_tokens(model).backward()
        optimizer.step()
        assert float(first(clip).max()) > 1.0
        clipped.append(model.state_dict())
    assert not torch.equal(build_family("llama").state_dict()[QUERIES], clipped[0][QUERIES])
    torch.testing.assert_close(clipped[1], clipped[0], rtol=0, atol=0)


def test_weights_that_another_optimizer_steps_are_refused() -> None:
    """The biases stayed, so that logits stayed above the threshold, without a word."""
    model = build_family("llama")
    matrices = splits_of(model)[0]["params"]
    named = [(name, p) for name, p in model.named_parameters() if any(p is matrix for matrix in matrices)]
    with pytest.raises(ValueError, match=r"q_proj\.bias: found a parameter that makes .* does not step; .* clip\.step"):
        mm.QKClip(model, optimizer=mm.Muon([{"params": named, "algorithm": "muon"}]))


def test_a_tied_weight_takes_the_smallest_factor_of_the_modules_that_it_serves() -> None:
    """The second module's logits stayed above the threshold, if only they were."""
    model: Any = build_family("llama")
    attentions = [layer.self_attn for layer in model.model.layers]
    attentions[1].q_proj = attentions[0].q_proj
    clip = mm.QKClip(model, threshold=10.0, optimizer=(optimizer := mm.from_model(model, lr=0.0, adamw={"lr": 0.0})))
    before = [attentions[0].q_proj.weight.detach().clone(), *(a.k_proj.weight.detach().clone() for a in attentions)]
    largest = torch.tensor([[20.0, 40.0, 1.0, 1.0, 20.0, 10.0], [40.0, 20.0, 30.0, 1.0, 1.0, 10.0]])
    for attention, of_heads in zip(attentions, largest, strict=True):
        clip.record(attention, of_heads)
    optimizer.step()
    factors = (10.0 / largest.double()).clamp(max=1.0).sqrt()
    after = [attentions[0].q_proj.weight, *(a.k_proj.weight for a in attentions)]
    for new, old, by_head in zip(after, before, [factors.amin(0), *factors], strict=True):
        torch.testing.assert_close(new.detach(), (old.double() * by_head.repeat_interleave(4)[:, None]).float())


def test_a_model_that_was_compiled_and_run_before_is_watched() -> None:
    """Another clip had wrapped the attention function, and compiled code kept that nobody watched."""
    mm.QKClip(build_family("llama"))  # gone at once
    torch._dynamo.reset()
    model = build_family("llama")
    compiled: Any = torch.compile(model, backend="eager")
    loss_of_tokens(compiled)
    clip = mm.QKClip(model, threshold=1e9)
    loss_of_tokens(compiled)
    clip.step()
    assert all(largest.isfinite().all() for largest in clip.largest.values())


def clip_and_step_on_tokens(model: nn.Module, optimizer: mm.Muon) -> None:
    optimizer.zero_grad()
    loss_of_tokens(model).backward()
    optimizer.clip_grad_norm_(1.0, skip_above=1e-9)
    optimizer.step()


def test_a_skipped_step_changes_no_weight() -> None:
    model = build_family("llama")
    optimizer = mm.from_model(model, lr=0.01)
    clip = mm.QKClip(model, threshold=1e-3, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip_and_step_on_tokens(model, optimizer)
    assert optimizer.skipped
    assert float(first(clip).max()) > 1e-3
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == []


def test_a_second_clip_of_the_same_model_is_refused() -> None:
    model = build_family("llama")
    optimizer = mm.from_model(model, lr=0.01)
    mm.QKClip(model, threshold=50.0, optimizer=optimizer)  # kept by the optimizer
    with pytest.raises(ValueError, match=r"already clips this model; needed one .* Change the threshold attribute"):
        mm.QKClip(model, threshold=10.0)


def test_optimizer_and_clip_are_freed_without_a_collection() -> None:
    model = build_family("llama")
    gc.collect()
    gc.disable()
    try:
        optimizer = mm.from_model(model, lr=0.01)
        clip = mm.QKClip(model, threshold=1.0, optimizer=optimizer)
        clip_and_step_on_tokens(model, optimizer)
        watched = weakref.ref(optimizer), weakref.ref(clip)
        del optimizer, clip
        assert [reference() for reference in watched] == [None, None]
        mm.QKClip(model, threshold=10.0)  # nothing clips it any more
    finally:
        gc.enable()


# ------------------------------------------------------------------ the log-sum-exp of kernels

LOGITS: dict[int, Tensor] = {}
PADDED = torch.ones_like(TOKENS).index_fill_(1, torch.tensor([0]), 0)  # every sequence begins with padding


def exact(model: nn.Module, padding: Tensor | None = None) -> dict[str, Tensor]:
    """The largest logit of each head of each module in fp64, one product for all queries and keys."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = torch.einsum("bhqd,bhkd->bhqk", query.double(), keys) * kwargs["scaling"]
        visible = torch.ones(9, 9, dtype=torch.bool).tril() if mask is None else mask
        LOGITS[id(module)] = torch.where(visible, logits, -torch.inf).amax((0, 2, 3)).detach()
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("oracle", attention)
    AttentionMaskInterface.register("oracle", sdpa_mask)
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("oracle")
    LOGITS.clear()
    twin(input_ids=TOKENS, attention_mask=padding, use_cache=False)
    return {name: LOGITS[id(m)] for name, m in twin.named_modules() if id(m) in LOGITS}


def clip_results(
    model: nn.Module, padding: Tensor | None = None, threshold: float = 1e9
) -> tuple[Mapping[str, Tensor], str]:
    """What a QKClip notes in one forward pass, and what it says of it."""
    clip = mm.QKClip(model, threshold=threshold, example=EXAMPLE)
    model(input_ids=TOKENS, attention_mask=padding, use_cache=False)
    clip.step()
    return clip.largest, clip.explain()


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def packed_forward(q: Tensor, k: Tensor, v: Tensor, starts: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Sequences one after the other, by the name and with the results of flash-attn's operator: lse is (heads, all)."""
    results = []
    for low, high in itertools.pairwise(starts):
        inputs = (x[low:high].transpose(0, 1)[None] for x in (q, k, v))
        results.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, is_causal=True, scale=scale))
    output = torch.cat([result[0][0].transpose(0, 1) for result in results])
    return output, torch.cat([result[1][0] for result in results], 1).contiguous()


def packed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """All of a batch as one sequence of packed ones, as `transformers`' flash attention hands them over."""
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output, _ = packed_forward(query, key, value, [0, 9, 18, 27], kwargs["scaling"])
    return output.unflatten(0, (3, 9)), None


FAST = ("llama", "grouped", "gpt2", "neox", "phi3", "deepseek, square")


@pytest.mark.parametrize(
    ("family", "attention", "padding"),
    [
        *((family, "sdpa", padding) for family in FAST for padding in (None, PADDED)),
        # Not known, and seen by its kernel, such as flash attention, under whose name `transformers` loads it.
        ("llama", "packed", None),
    ],
)
def test_the_log_sum_exp_bounds_the_largest_logit(family: str, attention: str, padding: Tensor | None) -> None:
    """Of torch's flash attention on a CPU: never below, and at most ln n above."""
    AttentionInterface.register("packed", packed)
    AttentionMaskInterface.register("packed", sdpa_mask)
    model: Any = build_family(family, attention)
    largest = exact(model, padding)
    if attention == "packed":
        with torch.no_grad():
            clip_results(model)  # nothing is seen without a graph
        model.requires_grad_(False)
    bounds, explanation = clip_results(model, padding)
    assert model.config._attn_implementation == attention
    assert list(bounds) == list(largest)
    for name, bound in bounds.items():
        above = bound.double() - largest[name]
        # To the rounding of fp32; a query that sees no key has 0 in torch's kernel on a CPU.
        assert bool((above > -1e-5 * largest[name].abs()).all()), above
        assert bool((above < math.log(9)).all() | (bound == 0).any()), above
    assert explanation.count("bound, the kernel's log-sum-exp") == 2


def test_without_a_fast_kernel_logits_are_computed_once_more() -> None:
    for model in (build_family("deepseek"), build_family("llama", "eager")):
        largest = exact(model)
        by_layer, explanation = clip_results(model)
        for name, logits in by_layer.items():
            torch.testing.assert_close(logits.double(), largest[name], rtol=1e-5, atol=1e-5)
        assert explanation.count("exact, computed once more") == 2


@pytest.mark.parametrize("family", ["llama", "grouped", "deepseek, square"])
def test_no_logit_stays_above_the_threshold_and_few_go_further_below(family: str) -> None:
    model = build_family(family)
    name, before = next(iter(exact(model).items()))
    threshold = float(before.sort().values[2:4].mean())
    bound = clip_results(model, threshold=threshold)[0][name].double()
    after = exact(model)[name]
    high = bound > threshold
    assert bool(high.any())
    assert bool((after[high] <= threshold * (1 + 1e-5)).all())
    assert bool((after[high] >= before[high] * threshold / bound[high] * (1 - 1e-4)).all())
    torch.testing.assert_close(after[~high], before[~high], rtol=1e-6, atol=0)
    for _ in range(40):  # at rest no logit is further below the threshold than ln n
        clip_results(model, threshold=threshold)
    rest = exact(model)[name]
    assert bool((rest >= torch.minimum(before, torch.tensor(threshold - math.log(9))) * (1 - 1e-4)).all())
    assert bool((clip_results(model)[0][name] <= threshold * (1 + 1e-3)).all())


def test_layers_without_a_softmax_are_left_out_and_named() -> None:
    model = build_family("hybrid")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_layer, explanation = clip_results(model, threshold=1e-3)
    assert list(by_layer) == ["model.layers.1.self_attn"]
    assert explanation.endswith("left out, without a softmax: model.layers.0.self_attn")
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight"}


def watched(keys: int) -> tuple[mm.QKClip, nn.Module, tuple[Tensor, Tensor, Tensor], Tensor]:
    """A module of one's own, queries, keys and values for it, and the largest logit of each head in fp64."""
    model = nn.Sequential(Attention())
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, 3, length, 4, generator=generator) * 3 for length in (5, keys, keys))
    logits = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) / 2
    return mm.QKClip(model), model[0], (q, k, v), logits.amax((0, 2, 3))


def test_a_kernel_that_runs_in_watching_is_seen_and_parts_of_the_keys_add_up() -> None:
    clip, module, (q, k, v), largest = watched(64)
    with clip.watching(module):
        scaled_dot_product_attention(q, k, v)
    clip.step()
    whole = clip.largest["0"].double()
    with clip.watching(module):  # as in ring attention, where each part has its own log-sum-exp
        for part in range(4):
            scaled_dot_product_attention(q, k.chunk(4, 2)[part], v.chunk(4, 2)[part])
    clip.step()
    parts = clip.largest["0"].double()
    rounding = 1e-6 * largest.abs()
    assert bool((largest - rounding <= parts).all() & (parts <= whole).all())
    assert bool((whole <= largest + math.log(64)).all())
    assert bool((parts <= largest + math.log(16)).all())


def test_where_logits_are_large_the_bound_is_near() -> None:
    clip, module, _, _ = watched(1)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, length, 128, generator=generator) for length in (128, 4096))
    logits = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double())
    with clip.watching(module):
        scaled_dot_product_attention(q, k, k, scale=float(100 / logits.max()))
    clip.step()
    above = clip.largest["0"] - logits.amax((0, 2, 3)) * (100 / logits.max())
    assert -1e-4 < float(above[logits.amax((0, 2, 3)).argmax()]) < 0.05


def test_a_context_in_which_no_kernel_ran_is_an_error() -> None:
    clip, module, (q, k, v), _ = watched(5)
    with (
        pytest.raises(ValueError, match=r"Attention: found no such kernel in watching\(\).*Write clip\.observe"),
        clip.watching(module),
        sdpa_kernel(SDPBackend.MATH),
    ):
        scaled_dot_product_attention(q, k, v)


def test_the_log_sum_exp_of_flex_attention_is_a_bound() -> None:
    clip, module, (q, k, v), largest = watched(16)
    with torch.no_grad():  # which has no backward on CPUs, and no max_scores
        _, beside = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    clip.record(module, bound_of(beside.lse), bound=True)
    clip.step()
    above = clip.largest["0"].double() - largest
    assert bool((above > -1e-6).all() & (above < math.log(16)).all())


def test_rounding_and_empty_queries_leave_a_bound_above() -> None:
    lse = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 40
    exactly = lse.amax((0, 2))
    assert bool((bound_of(lse.bfloat16()) >= exactly).all())
    assert bool((bound_of(lse.bfloat16()) <= exactly + exactly.abs() / 100).all())
    lse[:, :, 7] = torch.inf  # flash-attn's word for a query without a key
    assert torch.equal(bound_of(lse), bound_of(lse[:, :, [n for n in range(50) if n != 7]]))
    assert bool(bound_of(torch.full((3, 4), torch.nan)).isnan().all())


def test_a_clip_of_eager_attention_changes_no_other_model() -> None:
    """Here one whose file has two functions for eager attention, of which this module calls the one of another name."""
    config = transformers.models.phi4_multimodal.Phi4MultimodalAudioConfig(hidden_size=12, num_attention_heads=3)
    config._attn_implementation = "eager"
    module = Phi4MultimodalAudioAttention(config).eval()
    hidden = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0))
    before = module(hidden, None)
    clip = mm.QKClip(build_family("llama", "eager"))
    assert torch.equal(module(hidden, None), before)
    assert "eager" not in AttentionInterface._global_mapping
    del clip


def test_an_implementation_that_tells_nothing_is_an_error() -> None:
    def plain(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        return (query @ key.mT).softmax(-1) @ value, None

    AttentionInterface.register("plain", plain)
    AttentionMaskInterface.register("plain", sdpa_mask)
    model = build_family("llama", "plain")
    clip = mm.QKClip(model)
    with pytest.raises(ValueError, match=r"found attention by 'plain'; needed a kernel .*set_attn_implementation"):
        loss_of_tokens(model)
    del clip
