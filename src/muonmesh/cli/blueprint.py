"""Blueprint: the parameters of a model that nobody builds: their names, shapes and splits, from a configuration alone.

A few architectures are known here by formula, because building one with `transformers`, even without memory, takes
longer than planning it for two thousand ranks. All others are built on the meta device. The test of this file holds
the formulas to what `transformers` builds and `muonmesh.split_params` says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muonmesh.cli.configuration import PRESETS, fields_of
from muonmesh.cli.failure import RunError
from muonmesh.files import is_whole
from muonmesh.layout import MatrixSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Part:
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


def blueprint(model: str, *, vocab: int, seq: int) -> list[Part]:
    """Return the parameters of the model that ``--model`` names: a preset, a folder or file, or a model type.

    Args:
        model: As for ``muonmesh train``, or one of `KNOWN`.
        vocab, seq: Of the presets of ``muonmesh train``, which leave them open.

    Raises:
        ValueError: there is no such model, or none of a causal language model.
    """
    if model in KNOWN:
        fields = KNOWN[model]
    elif "/" not in model and not model.endswith(".json") and not Path(model).exists() and model not in PRESETS:
        from transformers import CONFIG_MAPPING

        if model not in CONFIG_MAPPING:
            raise RunError(
                f"--model {model}: found no file, folder or model of this name; needed a config.json, a folder with "
                f"one, a model type such as gpt2, or one of {', '.join((*KNOWN, *PRESETS))}. Write: --model deepseek-v3"
            )
        fields = fields_of(model, seq=seq)
    else:
        fields = fields_of(model, seq=seq)
    if model in PRESETS:
        fields = {**fields, "vocab_size": vocab, "tie_word_embeddings": False}
    formula = FORMULAS.get(fields["model_type"])
    try:
        parts = None if formula is None else list(formula(_Sizes(fields)))
    except _NotSaid:
        parts = None
    return _built(model, fields) if parts is None else parts


class _NotSaid(Exception):
    """A field that shapes depend on is not there, or is none that the formula knows."""


class _Sizes:
    """Fields of a configuration; reading one that is not a size raises `_NotSaid`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> int:
        value: Any = self._fields.get(name)
        if not is_whole(value) or value < 0:
            raise _NotSaid(name)
        return int(value)

    def get(self, name: str, otherwise: int) -> int:
        return otherwise if self._fields.get(name) is None else self[name]

    def insist(self, name: str, wanted: bool, *, may_lack: bool = False) -> None:
        if self._fields.get(name, wanted if may_lack else None) is not wanted:
            raise _NotSaid(name)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool):
            raise _NotSaid(name)
        return value


def _around(sizes: _Sizes, layers: Iterator[Part]) -> Iterator[Part]:
    """Yield embedding, layers, last norm, and the head unless it is the embedding."""
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    tied = sizes.flag("tie_word_embeddings")
    yield Part("model.embed_tokens.weight", (vocabulary, hidden), None)
    yield from layers
    yield Part("model.norm.weight", (hidden,), None)
    if not tied:
        yield Part("lm_head.weight", (vocabulary, hidden), None)


def _mlp(name: str, hidden: int, width: int) -> Iterator[Part]:
    yield Part(f"{name}.gate_proj.weight", (width, hidden), "whole")
    yield Part(f"{name}.up_proj.weight", (width, hidden), "whole")
    yield Part(f"{name}.down_proj.weight", (hidden, width), "whole")


def _norms(layer: str, hidden: int) -> Iterator[Part]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Part(f"{layer}.{norm}.weight", (hidden,), None)


def _llama(sizes: _Sizes) -> Iterator[Part]:
    sizes.insist("attention_bias", False, may_lack=True)
    sizes.insist("mlp_bias", False, may_lack=True)
    return _around(sizes, _llama_layers(sizes, normed=False))


def _qwen3(sizes: _Sizes) -> Iterator[Part]:
    sizes.insist("attention_bias", False, may_lack=True)
    sizes["head_dim"]  # not the quotient where it is not said
    return _around(sizes, _llama_layers(sizes, normed=True))


def _llama_layers(sizes: _Sizes, *, normed: bool) -> Iterator[Part]:
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    size = sizes.get("head_dim", hidden // heads)
    keys = sizes["num_key_value_heads"] * size
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows in (("q_proj", heads * size), ("k_proj", keys), ("v_proj", keys)):
            yield Part(f"{layer}.self_attn.{name}.weight", (rows, hidden), "whole")
        yield Part(f"{layer}.self_attn.o_proj.weight", (hidden, heads * size), "whole")
        for norm in ("q_norm", "k_norm") if normed else ():
            yield Part(f"{layer}.self_attn.{norm}.weight", (size,), None)
        yield from _mlp(f"{layer}.mlp", hidden, sizes["intermediate_size"])
        yield from _norms(layer, hidden)


def _deepseek(sizes: _Sizes) -> Iterator[Part]:
    sizes.insist("attention_bias", False, may_lack=True)
    return _around(sizes, _deepseek_layers(sizes))


def _deepseek_layers(sizes: _Sizes) -> Iterator[Part]:
    hidden, heads, experts = sizes["hidden_size"], sizes["num_attention_heads"], sizes["n_routed_experts"]
    plain, rotary, value = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    queries, latent, width = sizes["q_lora_rank"], sizes["kv_lora_rank"], sizes["moe_intermediate_size"]
    if plain != value:
        raise _NotSaid("v_head_dim")
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        yield Part(f"{attention}.q_a_proj.weight", (queries, hidden), "whole")
        yield Part(f"{attention}.q_a_layernorm.weight", (queries,), None)
        yield Part(f"{attention}.q_b_proj.weight", (heads * (plain + rotary), queries), "whole")
        yield Part(f"{attention}.kv_a_proj_with_mqa.weight", (latent + rotary, hidden), ("rows", latent, rotary))
        yield Part(f"{attention}.kv_a_layernorm.weight", (latent,), None)
        both = ("interleaved", 2, 0, value)
        yield Part(f"{attention}.kv_b_proj.weight", (heads * (plain + value), latent), both)
        yield Part(f"{attention}.o_proj.weight", (hidden, heads * value), "whole")
        if number < sizes["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", hidden, sizes["intermediate_size"])
        else:
            split = ("stack", ("rows", width, width))
            yield Part(f"{layer}.mlp.gate.weight", (experts, hidden), None)
            yield Part(f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden), split)
            yield Part(f"{layer}.mlp.experts.down_proj", (experts, hidden, width), "stack")
            yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width * sizes["n_shared_experts"])
        yield from _norms(layer, hidden)


FORMULAS: dict[str, Callable[[_Sizes], Iterator[Part]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek,
}


def _built(model: str, fields: Mapping[str, Any]) -> list[Part]:
    """Build the model without memory and ask who goes where."""
    import torch

    from muonmesh.cli.configuration import configuration
    from muonmesh.cli.model import build_model

    with torch.device("meta"):
        return parts_of(build_model(configuration(model, fields)))


def parts_of(built: nn.Module) -> list[Part]:
    """Return the parameters of a model that is there, with the splits that `muonmesh.split_params` gives them."""
    import muonmesh as mm

    found = {}
    for group in mm.split_params(built):
        muon = group["algorithm"] == "muon"
        splits = group["matrices"] if muon else [None] * len(group["params"])
        for name, parameter, split in zip(group["param_names"], group["params"], splits, strict=True):
            found[name] = Part(name, tuple(parameter.shape), split)
    return list(found.values())
