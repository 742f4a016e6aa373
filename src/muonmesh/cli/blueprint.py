"""Blueprint: the parameters of a model that nobody builds: their names, shapes and splits, from a configuration alone.

`transformers` builds the model on the meta device, without memory, and `muonmesh.split_params` says how it splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import muonmesh as mm
from muonmesh.cli.configuration import PRESETS, configuration, fields_of
from muonmesh.cli.model import build_model
from muonmesh.layout import MatrixSpec


@dataclass(frozen=True)
class ModelParameter:
    """One parameter.

    Attributes:
        name: Canonical name.
        shape: Of the whole parameter.
        matrices: How it splits; None if AdamW updates it.
    """

    name: str
    shape: tuple[int, ...]
    matrices: MatrixSpec | None


_LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False, "attention_bias": False,
          "mlp_bias": False, "num_key_value_heads": 8}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32},
    "llama-3.1-70b": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                      "num_attention_heads": 64},
    "llama-3.1-405b": {**_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
                       "num_attention_heads": 128},
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
        "attention_bias": False,
    },
}  # fmt: skip
"""Models that ``muonmesh plan`` knows by name, by the fields of their config.json on which shapes depend."""


def meta_model(model: str, *, vocab: int, seq: int) -> nn.Module:
    """Return the model that is named by a preset, a folder or file, or a model type, on the meta device.

    Args:
        model: As for ``muonmesh train``, or one of `KNOWN`.
        vocab, seq: Of the presets of ``muonmesh train``, which leave them open.

    Raises:
        ValueError: there is no such model, or none of a causal language model.
    """
    fields = KNOWN.get(model) or fields_of(model, seq=seq)
    if model in PRESETS:
        fields = {**fields, "vocab_size": vocab, "tie_word_embeddings": False}
    with torch.device("meta"):
        return build_model(configuration(model, fields))


def blueprint(model: str, *, vocab: int, seq: int) -> list[ModelParameter]:
    """Return the parameters of the model that ``--model`` names, with the splits of `muonmesh.split_params`.

    See `meta_model` for the arguments and for what it raises.
    """
    found = {}
    for group in mm.split_params(meta_model(model, vocab=vocab, seq=seq)):
        muon = group["algorithm"] == "muon"
        splits = group["matrices"] if muon else [None] * len(group["params"])
        for name, parameter, split in zip(group["param_names"], group["params"], splits, strict=True):
            found[name] = ModelParameter(name, tuple(parameter.shape), split)
    return list(found.values())
