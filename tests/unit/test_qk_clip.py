"""QK-clip: what it notes of attention logits, and what the weights make of them afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import muonmesh as mm
from muonmesh.integrations.qk_clip import max_logits as logits_module
from muonmesh.integrations.qk_clip.max_logits import largest_logits

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 20, "vocab_size": 31}
DEEPSEEK = {
    **{**SIZES, "num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 2},
    **{"qk_nope_head_dim": 4, "v_head_dim": 3, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 2},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1},
}
TOKENS = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))


def build(family: str, attention: str = "sdpa") -> nn.Module:
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
    elif family == "deepseek":
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK))
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


def forward(model: nn.Module) -> Tensor:
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
    found = torch.full((6,), -torch.inf)
    for batch in range(3):
        for head in range(6):
            for i in range(9):
                for j in range(i + 1):
                    logit = (q[batch, head, i] @ k[batch, head * k.shape[1] // 6, j]) / 2
                    found[head] = torch.maximum(found[head], logit)
    return found.detach()


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("grouped", "eager"),
        pytest.param("grouped", "flex_attention", marks=pytest.mark.soak),  # compiled for a minute
    ],
)
def test_the_largest_logits_are_noted(family: str, attention: str) -> None:
    model = build(family, attention).requires_grad_(attention != "flex_attention")  # which has no backward on CPUs
    clip = mm.QKClip(model, threshold=1e9)
    forward(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.zeros_like(TOKENS))  # what is not trained on does not count
    clip.step()
    torch.testing.assert_close(first(clip), by_hand(model), rtol=1e-4, atol=1e-5)
    assert list(clip.largest) == [f"model.layers.{n}.self_attn" for n in range(2)]


def test_every_kind_of_mask_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some queries at a time too."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 7, 3, generator=generator), torch.randn(2, 2, 7, 3, generator=generator)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.5
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = logits.masked_fill(~lower, -torch.inf).amax((0, 2, 3))
    added = torch.zeros(2, 1, 7, 7).masked_fill(~lower, torch.finfo(torch.float32).min)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 7, 7, device="cpu")
    for at_once in (1 << 24, 2 * 4 * 7 * 2):
        monkeypatch.setattr(logits_module, "AT_ONCE", at_once)
        for mask in (lower[None, None], added, block):
            torch.testing.assert_close(largest_logits(q, k, scale=0.5, mask=mask), expected)
        torch.testing.assert_close(largest_logits(q, k, scale=0.5, causal=True), expected)
        torch.testing.assert_close(largest_logits(q, k, scale=0.5), logits.amax((0, 2, 3)))


@pytest.mark.parametrize("family", ["llama", "grouped", "gpt2", "neox", "phi3", "deepseek"])
def test_logits_above_the_threshold_are_brought_back_to_it_and_others_stay(family: str) -> None:
    """With biases, fused, stored in × out, head by head, keys that heads share, latent attention."""
    model = build(family)
    probe = mm.QKClip(model, threshold=1e9)
    forward(model)
    probe.step()
    before = first(probe)
    del probe
    threshold = float(before.sort().values[2:4].mean())
    clip = mm.QKClip(model, threshold=threshold)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # again: the second time there is nothing left to clip
        forward(model)
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
    model = build("llama")
    optimizer = mm.from_model(model.bfloat16(), lr=0.0, master_dtype=torch.float32, state_dtype=torch.float32)
    clip = mm.QKClip(model, threshold=2.0, optimizer=optimizer)
    forward(model).backward()
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
    forward(model).backward()
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


def test_what_cannot_be_clipped_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold: found 0; needed a number above 0"):
        mm.QKClip(build("llama"), threshold=0)
    with pytest.raises(ValueError, match="found no attention module whose queries and keys are known"):
        mm.QKClip(nn.Linear(3, 3))
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: found q_norm, which norms queries or keys"):
        mm.QKClip(transformers.Qwen3ForCausalLM(config))
    clip = mm.QKClip(build("llama"))
    with pytest.raises(ValueError, match="found a module that is not known"):
        clip.record(nn.Linear(2, 2), torch.ones(6))
    module = next(m for m in clip._model.modules() if type(m).__name__ == "LlamaAttention")
    with pytest.raises(ValueError, match="found the logits of 3 of 6 heads; needed to know which"):
        clip.record(module, torch.ones(3))


def stepped(model: nn.Module, optimizer: mm.Muon) -> None:
    optimizer.zero_grad()
    forward(model).backward()
    optimizer.clip_grad_norm_(1.0, skip_above=1e-9)
    optimizer.step()


def test_a_skipped_step_changes_no_weight() -> None:
    model = build("llama")
    optimizer = mm.from_model(model, lr=0.01)
    clip = mm.QKClip(model, threshold=1e-3, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepped(model, optimizer)
    assert optimizer.skipped
    assert float(first(clip).max()) > 1e-3
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == []


def test_a_second_clip_of_the_same_model_is_refused() -> None:
    model = build("llama")
    optimizer = mm.from_model(model, lr=0.01)
    mm.QKClip(model, threshold=50.0, optimizer=optimizer)  # kept by the optimizer
    with pytest.raises(ValueError, match=r"already clips this model; needed one .* Change the threshold attribute"):
        mm.QKClip(model, threshold=10.0)


def test_optimizer_and_clip_are_freed_without_a_collection() -> None:
    model = build("llama")
    gc.collect()
    gc.disable()
    try:
        optimizer = mm.from_model(model, lr=0.01)
        clip = mm.QKClip(model, threshold=1.0, optimizer=optimizer)
        stepped(model, optimizer)
        watched = weakref.ref(optimizer), weakref.ref(clip)
        del optimizer, clip
        assert [each() for each in watched] == [None, None]
        mm.QKClip(model, threshold=10.0)  # nothing clips it any more
    finally:
        gc.enable()
