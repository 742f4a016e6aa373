"""Four kinds of small models that learn the standard library byte by byte: GPT-2, Llama, convolutions, experts."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from muonmesh.tools.cli.model import build_model

VOCAB, CONTEXT, FILES = 256, 128, 60
KINDS = ("gpt2", "llama", "convolutions", "experts")


class Convolutions(nn.Module):
    """Causal convolutions over bytes: in each block one over three places, and two that widen and narrow."""

    def __init__(self, width: int, layers: int) -> None:
        """Build it with random weights."""
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(layers))
        self.mixing = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**n) for n in range(layers))
        self.wide = nn.ModuleList(nn.Conv1d(width, 4 * width, 1) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Conv1d(4 * width, width, 1) for _ in range(layers))
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, places, 256) of the next byte of each place of x, int64 (batch, places)."""
        h = self.embedding(x).mT
        for number, norm in enumerate(self.norms):
            before = nn.functional.pad(norm(h), (2 * 2**number, 0))
            h = h + self.narrow[number](nn.functional.gelu(self.wide[number](self.mixing[number](before))))
        logits: Tensor = self.lm_head(h.mT)
        return logits


def build(kind: str, *, width: int, layers: int, seed: int = 0, experts: int = 4) -> nn.Module:
    """A model of one of `KINDS`; its matrices have as many rows as it is wide, or more. Two experts see each byte."""
    torch.manual_seed(seed)
    if kind == "convolutions":
        return Convolutions(width, layers)
    heads = max(1, width // 64)
    ends: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": CONTEXT}
        return build_model(GPT2Config(**sizes, **ends))
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "intermediate_size": width * 8 // 3, "max_position_embeddings": CONTEXT}
    if kind == "llama":
        return build_model(LlamaConfig(**sizes, **ends))
    return build_model(MixtralConfig(**sizes | {"intermediate_size": 2 * width}, num_local_experts=experts, **ends))


def text(*, held_out: bool = False) -> Tensor:
    """Bytes of some of the standard library, int64, or of the files after them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = files[FILES : FILES + 10] if held_out else files[:FILES]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8).long()


def windows(data: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Windows of `CONTEXT` + 1 bytes that begin anywhere, (count, 129)."""
    starts = torch.randint(len(data) - CONTEXT, (count,), generator=generator).tolist()
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte in windows, in nats."""
    logits = model(batch[:, :-1])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def trained(
    model: nn.Module, optimizer: Optimizer, *, seed: int, steps: int, lr: float, batch: int, held_out: int
) -> dict[str, Any]:
    """Train, and return the mean loss of windows held out; the learning rate falls by nine tenths of ``lr``."""
    data, numbers = text(), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - 0.9 * step / steps)
        loss(model, windows(data, batch, numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = windows(text(held_out=True), held_out, torch.Generator().manual_seed(0)).split(batch)
    with torch.no_grad():
        return {"validation": sum(loss(model, part).item() for part in parts) * batch / held_out}
