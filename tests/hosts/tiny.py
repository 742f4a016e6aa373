"""Tiny models from configurations, and data for them: nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
MATRICES = 14  # what Muon trains in `llama()`: seven a layer


def llama(**settings: object) -> LlamaForCausalLM:
    """Return a Llama of two layers, the same at every call and on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": VOCABULARY, "tie_word_embeddings": False, **sizes, **settings})
    return LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences of eight tokens, as `transformers` names them."""

    def __init__(self, count: int = 32) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}
