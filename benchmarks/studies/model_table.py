"""Models of other libraries for `model_roles.py`, and small ones written as their projects write them.

A model whose library is not installed is left out. The miniatures are our own; each has what its project is known for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = torch.randn(2, 3, 64, 64)
LARGE_IMAGE = torch.randn(2, 3, 224, 224)
IDS = torch.arange(16).view(2, 8) % 13

Ways = Callable[[], Iterator[tuple[nn.Module, Any]]]


def _of(library: str, make: Callable[[Any], nn.Module], *inputs: Any, **named: Any) -> Ways:
    def makers() -> Iterator[tuple[nn.Module, Any]]:
        yield make(importlib.import_module(library)).eval(), named or inputs

    return makers


class Calls(nn.Module):
    """A model of named layers, whose forward is a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.run(self, *args)


def _heads(x: Tensor, count: int = 4) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


class Dit(nn.Module):
    """Modulation in six parts along dim 1, and an output layer inside a module of its own."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.patches, self.label, self.time = nn.Conv2d(4, d, 2, 2), nn.Embedding(10, d), nn.Linear(16, d)
        self.blocks = nn.ModuleList(self.block(d) for _ in range(2))
        self.final_layer = nn.ModuleDict(
            {"linear": nn.Linear(d, 16), "mod": nn.Sequential(nn.SiLU(), nn.Linear(d, 2 * d))}
        )
        self.norm = nn.LayerNorm(d, elementwise_affine=False)

    @staticmethod
    def block(d: int) -> nn.ModuleDict:
        """A block's layers."""
        mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU("tanh"), nn.Linear(2 * d, d))
        mod = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        return nn.ModuleDict({"qkv": nn.Linear(d, 3 * d), "proj": nn.Linear(d, d), "mlp": mlp, "mod": mod})

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Noise of an image."""
        c = self.label(label) + self.time(time)
        x = self.patches(image).flatten(2).mT
        for block in self.blocks:
            a, b, g, d, e, h = block["mod"](c).unsqueeze(1).chunk(6, dim=2)
            qkv = block["qkv"](self.norm(x) * (1 + b) + a).reshape(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            x = x + g * block["proj"](_joined(F.scaled_dot_product_attention(*qkv.unbind(0))))
            x = x + h * block["mlp"](self.norm(x) * (1 + e) + d)
        shift, scale = self.final_layer["mod"](c).chunk(2, dim=1)
        out: Tensor = self.final_layer["linear"](self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        return out


def _rotated(x: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.arange(a.shape[-2])[:, None] * torch.linspace(0.1, 1, a.shape[-1])
    return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)


def _gpt_fast(self: Any, ids: Tensor) -> Tensor:
    x = self.tok_embeddings(ids)
    for layer in self.layers:
        q, k, v = layer["wqkv"](layer["norm"](x)).split([32, 16, 16], dim=-1)
        q, k, v = _rotated(_heads(q)), _rotated(_heads(k, 2)), _heads(v, 2)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        x = x + layer["wo"](_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        x = x + layer["w2"](F.silu(layer["w1"](x)) * layer["w3"](x))
    out: Tensor = self.output(x)
    return out


def gpt_fast() -> nn.Module:
    """One projection of q, k and v for grouped queries, cut by local variables."""
    sizes = {"wqkv": (32, 64), "wo": (32, 32), "w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}
    layers = [
        nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in sizes.items()} | {"norm": nn.RMSNorm(32)}) for _ in "12"
    ]
    ends = {"tok_embeddings": nn.Embedding(13, 32), "output": nn.Linear(32, 13, bias=False)}
    return Calls(_gpt_fast, layers=nn.ModuleList(layers), **ends)


def _nanochat(self: Any, ids: Tensor) -> Tensor:
    x = first = F.rms_norm(self.wte(ids), (32,))
    for i, layer in enumerate(self.h):
        y = F.rms_norm(0.9 * x + 0.1 * first, (32,))
        q, k = (F.rms_norm(_rotated(_heads(layer[name](y))), (8,)) for name in ("c_q", "c_k"))
        v = layer["c_v"](y)
        if f"{i}" in self.value_embeds:
            v = v + 2 * torch.sigmoid(layer["gate"](y[..., :8])) * self.value_embeds[f"{i}"](ids)
        x = x + layer["c_proj"](_joined(F.scaled_dot_product_attention(q, k, _heads(v), is_causal=True)))
        x = x + layer["mlp_proj"](F.relu(layer["c_fc"](F.rms_norm(x, (32,)))).square())
    return 15 * torch.tanh(self.lm_head(F.rms_norm(x, (32,))) / 15)


def nanochat() -> nn.Module:
    """Value embeddings with small gates, norms without weights, a stream that is mixed with its start, soft caps."""
    sizes = {
        "c_q": (32, 32),
        "c_k": (32, 32),
        "c_v": (32, 32),
        "c_proj": (32, 32),
        "c_fc": (32, 64),
        "mlp_proj": (64, 32),
    }
    h = [nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in (sizes | {"gate": (8, 32)}).items()}) for _ in "12"]
    ends = {"wte": nn.Embedding(13, 32), "value_embeds": nn.ModuleDict({"1": nn.Embedding(13, 32)})}
    return Calls(_nanochat, h=nn.ModuleList(h), lm_head=nn.Linear(32, 13, bias=False), **ends)


class Whisper(nn.Module):
    """An encoder of two convolutions, a decoder with cross attention, and logits by the table of tokens."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, d, 3, padding=1), nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.randn(8, d))
        self.token_embedding = nn.Embedding(13, d)
        self.encoder = nn.ModuleList(self.block(d, False) for _ in range(2))
        self.decoder = nn.ModuleList(self.block(d, True) for _ in range(2))

    @staticmethod
    def block(d: int, cross: bool) -> nn.ModuleDict:
        """A block's layers."""
        names = ("query", "key", "value", "out", *(("xq", "xk", "xv", "xo") if cross else ()))
        mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        return nn.ModuleDict({name: nn.Linear(d, d) for name in names} | {"mlp": mlp, "norm": nn.LayerNorm(d)})

    def forward(self, mel: Tensor, ids: Tensor) -> Tensor:
        """Logits."""
        audio = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).mT
        audio = audio + torch.sin(torch.arange(audio.shape[1] * audio.shape[2]).view(audio.shape[1:]).float())
        for block in self.encoder:
            audio = self.run(block, audio, None)
        x = self.token_embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.decoder:
            x = self.run(block, x, audio)
        return x @ self.token_embedding.weight.T

    def run(self, block: Any, x: Tensor, audio: Tensor | None) -> Tensor:
        """One block."""
        y = block["norm"](x)
        q, k, v = (_heads(block[name](y)) for name in ("query", "key", "value"))
        x = x + block["out"](_joined(F.scaled_dot_product_attention(q, k, v)))
        if audio is not None:
            q, k, v = _heads(block["xq"](x)), _heads(block["xk"](audio)), _heads(block["xv"](audio))
            x = x + block["xo"](_joined(F.scaled_dot_product_attention(q, k, v)))
        out: Tensor = x + block["mlp"](block["norm"](x))
        return out


def _xlstm(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids)
    for block in self.blocks:
        inner, z = block["up"](block["norm"](x)).chunk(2, dim=-1)
        mixed = F.silu(block["conv"](inner.mT)[..., : inner.shape[1]].mT)
        q, k, v = block["q"](mixed), block["k"](mixed), block["v"](inner)
        gates = block["gates"](torch.cat((q, k, v), -1))
        i, f = gates.split(4, dim=-1)
        weights = torch.tril(torch.sigmoid(f).cumsum(1)[:, :, None] - f.cumsum(1)[:, None]).sum(-1) + i.sum(-1)[:, None]
        x = x + block["down"](((q @ k.mT) * weights @ v) * F.silu(z))
    out: Tensor = self.out(x)
    return out


def xlstm() -> nn.Module:
    """A matrix memory: an up projection in two, gates of q, k and v side by side."""
    sizes = {"up": (32, 64), "q": (32, 32), "k": (32, 32), "v": (32, 32), "gates": (96, 8), "down": (32, 32)}
    more = {"norm": lambda: nn.LayerNorm(32), "conv": lambda: nn.Conv1d(32, 32, 4, padding=3, groups=32)}
    linear = lambda: {name: nn.Linear(*size) for name, size in sizes.items()}  # noqa: E731
    blocks = [nn.ModuleDict(linear() | {name: make() for name, make in more.items()}) for _ in "12"]
    return Calls(_xlstm, blocks=nn.ModuleList(blocks), embed=nn.Embedding(13, 32), out=nn.Linear(32, 13))


def _agent(self: Any, observation: Tensor) -> Any:
    h = self.network(observation)
    return self.actor(h), self.critic(self.value(observation))


def agent() -> nn.Module:
    """A policy and a value network of their own."""
    body = lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())  # noqa: E731
    return Calls(_agent, network=body(), value=body(), actor=nn.Linear(32, 4), critic=nn.Linear(32, 1))


def _two(mean: str, log: str) -> Callable[..., Any]:
    def forward(self: Any, observation: Tensor) -> Any:
        h = F.relu(self.fc2(F.relu(self.fc1(observation))))
        return getattr(self, mean)(h), torch.tanh(getattr(self, log)(h))

    return forward


def sac() -> nn.Module:
    """Mean and deviation side by side."""
    layers = {
        "fc1": nn.Linear(8, 32),
        "fc2": nn.Linear(32, 32),
        "fc_mean": nn.Linear(32, 3),
        "fc_logstd": nn.Linear(32, 3),
    }
    return Calls(_two("fc_mean", "fc_logstd"), **layers)


def _transformers(name: str, config: dict[str, Any], **inputs: Tensor) -> Ways:
    def make(library: Any) -> nn.Module:
        kind = getattr(library, name)
        model: nn.Module = kind(kind.config_class(**config))
        return model

    return _of("transformers", make, **inputs)


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 13,
}
_SMALL |= {"pad_token_id": 0, "use_cache": False}
_KV = _SMALL | {"num_key_value_heads": 2}
_MOE = _KV | {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 13, "use_cache": False}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
}
_STATES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 13,
    "state_size": 8,
    "use_cache": False,
    "pad_token_id": 0,
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 13, "use_cache": False}

_OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "GPT2LMHeadModel": (_GPT2, {"input_ids": IDS}),
    "LlamaForCausalLM": (_KV, {"input_ids": IDS}),
    "BertForMaskedLM": (_SMALL, {"input_ids": IDS}),
    "BertForSequenceClassification": (_SMALL, {"input_ids": IDS}),
    "MixtralForCausalLM": (_MOE, {"input_ids": IDS}),
    "Qwen3MoeForCausalLM": (_MOE, {"input_ids": IDS}),
    "GPTNeoXForCausalLM": (_SMALL, {"input_ids": IDS}),
    "BloomForCausalLM": (
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 13, "use_cache": False},
        {"input_ids": IDS},
    ),
    "FalconForCausalLM": (_SMALL, {"input_ids": IDS}),
    "Phi3ForCausalLM": (_KV, {"input_ids": IDS}),
    "DiffLlamaForCausalLM": (_KV, {"input_ids": IDS}),
    "CohereForCausalLM": (_KV, {"input_ids": IDS}),
    "GemmaForCausalLM": (_KV | {"head_dim": 16}, {"input_ids": IDS}),
    "ModernBertForMaskedLM": (_SMALL, {"input_ids": IDS}),
    "MambaForCausalLM": (_STATES, {"input_ids": IDS}),
    "Mamba2ForCausalLM": (
        _STATES | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
        {"input_ids": IDS},
    ),
    "T5ForConditionalGeneration": (_T5, {"input_ids": IDS, "decoder_input_ids": IDS}),
    "ViTForImageClassification": (_VISION, {"pixel_values": IMAGE}),
    "Dinov2Model": (_VISION | {"patch_size": 16}, {"pixel_values": IMAGE}),
    "Qwen2ForCausalLM": (_KV, {"input_ids": IDS}),
    "OlmoForCausalLM": (_KV, {"input_ids": IDS}),
    "StableLmForCausalLM": (_KV, {"input_ids": IDS}),
    "Starcoder2ForCausalLM": (_KV, {"input_ids": IDS}),
    "PersimmonForCausalLM": (_SMALL, {"input_ids": IDS}),
    "CodeGenForCausalLM": (_GPT2 | {"rotary_dim": 4}, {"input_ids": IDS}),
    "GPTBigCodeForCausalLM": (_GPT2, {"input_ids": IDS}),
    "MptForCausalLM": (
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 13, "use_cache": False},
        {"input_ids": IDS},
    ),
    "RobertaForMaskedLM": (_SMALL, {"input_ids": IDS}),
    "ElectraForMaskedLM": (_SMALL | {"embedding_size": 32}, {"input_ids": IDS}),
    "DebertaForMaskedLM": (_SMALL, {"input_ids": IDS}),
    "Lfm2ForCausalLM": (_KV | {"layer_types": ["conv", "full_attention"]}, {"input_ids": IDS}),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
        {"pixel_values": IMAGE},
    ),
    "SwinForImageClassification": (
        {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "image_size": 64},
        {"pixel_values": IMAGE},
    ),
}
_TIMM = (
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "levit_128s",
    "xcit_nano_12_p16_224",
)
_TIMM += (
    "cait_xxs24_224",
    "res2net50_26w_4s",
    "coatnet_nano_rw_224",
    "mixer_s32_224",
    "gmlp_s16_224",
    "convnext_atto",
    "resnet18",
)
_TORCHVISION = (
    "resnet18",
    "googlenet",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
    "mobilenet_v3_small",
    "densenet121",
    "maxvit_t",
)


def _vision(name: str) -> Callable[[Any], nn.Module]:
    more = {"googlenet": {"init_weights": False}}.get(name, {})

    def make(library: Any) -> nn.Module:
        model: nn.Module = getattr(library, name)(weights=None, **more)
        return model

    return make


def _timm(name: str) -> Callable[[Any], nn.Module]:
    def make(library: Any) -> nn.Module:
        model: nn.Module = library.create_model(name)
        return model

    return make


_DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
_UNET = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_UNET |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_VAE = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4}
_VAE |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
}
_SD3 |= {"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16, "out_channels": 4}
_LATENT = torch.randn(2, 4, 8, 8)
_TEXT = torch.randn(2, 5, 32)
_EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])

MODELS: dict[str, Ways] = {
    **{f"transformers/{n}": _transformers(n, config, **options) for n, (config, options) in _OF_TRANSFORMERS.items()},
    **{f"timm/{n}": _of("timm", _timm(n), LARGE_IMAGE) for n in _TIMM},
    **{f"torchvision/{n}": _of("torchvision.models", _vision(n), LARGE_IMAGE) for n in _TORCHVISION},
    "diffusers/DiT": _of(
        "diffusers", lambda d: d.DiTTransformer2DModel(**_DIT), _LATENT, torch.tensor([1, 2]), torch.tensor([3, 4])
    ),
    "diffusers/SD3": _of(
        "diffusers",
        lambda d: d.SD3Transformer2DModel(**_SD3),
        hidden_states=_LATENT,
        encoder_hidden_states=_TEXT,
        pooled_projections=torch.randn(2, 16),
        timestep=torch.tensor([1, 2]),
    ),
    "diffusers/UNet2D": _of(
        "diffusers", lambda d: d.UNet2DModel(**_UNET), torch.randn(2, 3, 16, 16), torch.tensor([1, 2])
    ),
    "diffusers/AutoencoderKL": _of("diffusers", lambda d: d.AutoencoderKL(**_VAE), torch.randn(2, 3, 16, 16)),
    "torch_geometric/GCN": _of("torch_geometric.nn", lambda g: g.GCN(8, 32, 3, 5), torch.randn(4, 8), _EDGES),
    "torch_geometric/GAT": _of("torch_geometric.nn", lambda g: g.GAT(8, 32, 3, 5, heads=4), torch.randn(4, 8), _EDGES),
    "torch_geometric/GIN": _of("torch_geometric.nn", lambda g: g.GIN(8, 32, 3, 5), torch.randn(4, 8), _EDGES),
    "torch_geometric/GraphSAGE": _of(
        "torch_geometric.nn", lambda g: g.GraphSAGE(8, 32, 3, 5), torch.randn(4, 8), _EDGES
    ),
    "x_transformers/decoder": _of(
        "x_transformers",
        lambda x: x.TransformerWrapper(num_tokens=13, max_seq_len=8, attn_layers=x.Decoder(dim=32, depth=2, heads=4)),
        IDS,
    ),
    "x_transformers/glu, rotary": _of(
        "x_transformers",
        lambda x: x.TransformerWrapper(
            num_tokens=13,
            max_seq_len=8,
            attn_layers=x.Decoder(dim=32, depth=2, heads=4, ff_glu=True, rotary_pos_emb=True, attn_kv_heads=2),
        ),
        IDS,
    ),
    "vit_pytorch/cross_vit": _of(
        "vit_pytorch.cross_vit",
        lambda v: v.CrossViT(
            image_size=64, num_classes=5, sm_dim=32, lg_dim=48, sm_patch_size=16, lg_patch_size=32, depth=2
        ),
        IMAGE,
    ),
    "miniature/DiT": _of("builtins", lambda _: Dit(), _LATENT, torch.randn(2, 16), torch.tensor([1, 2])),
    "miniature/gpt-fast": _of("builtins", lambda _: gpt_fast(), IDS),
    "miniature/nanochat": _of("builtins", lambda _: nanochat(), IDS),
    "miniature/whisper": _of("builtins", lambda _: Whisper(), torch.randn(2, 8, 16), IDS),
    "miniature/xlstm": _of("builtins", lambda _: xlstm(), IDS),
    "miniature/CleanRL, PPO": _of("builtins", lambda _: agent(), torch.randn(2, 8)),
    "miniature/CleanRL, SAC": _of("builtins", lambda _: sac(), torch.randn(2, 8)),
}
