"""Fused weights of known modules: which rows belong to which matrix, if no forward has been read or can show it.

A wrong split is a wrong update without an error. So an order is listed only if it was read in the module's forward;
`tests/groups/test_split.py` runs these forwards. A module is recognized by its class, not by the parameter's name. The
sizes that the module states must add up to the parameter's size; otherwise the parameter stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from muonmesh.groups.parameter_sites import Matrices, Site, class_names, class_of, global_shape
from muonmesh.layout.matrix import parts_of


class Fused(NamedTuple):
    """What the class of a module tells of a weight out × in.

    Attributes:
        cut: How its rows split; None for one matrix or unknown.
        parts: The names of the parts.
        certain: Whether this counts more than a forward, which may not show the parts.
    """

    cut: Matrices | None = None
    parts: str = ""
    certain: bool = False


def _equal(count: int) -> Callable[[Any, int], Matrices]:
    return lambda _, out: ("rows", *[out // count] * count)


def _gates(owner: Any, out: int) -> Matrices | None:
    size = owner.hidden_size
    return None if out == size else ("rows", *[size] * (out // size))


def _grouped_query(owner: Any, out: int) -> Matrices:
    heads = getattr(owner, "num_heads", None) or owner.config.num_attention_heads
    kv = owner.num_key_value_heads * owner.head_dim
    return ("rows", heads * owner.head_dim, kv, kv)


def _bigcode(owner: Any, out: int) -> Matrices:
    if owner.multi_query and not owner.is_cross_attention:
        return ("rows", owner.embed_dim, owner.kv_dim, owner.kv_dim)
    return ("interleaved", 2 if owner.is_cross_attention else 3, 0, owner.head_dim)


def _by_head(owner: Any, out: int) -> Matrices:
    return ("interleaved", 3, 0, getattr(owner, "head_size", None) or owner.head_dim)


def _falcon(owner: Any, out: int) -> Matrices:
    size, groups = owner.head_dim, owner.num_kv_heads if owner.new_decoder_architecture else 1
    if not owner.new_decoder_architecture and not owner.multi_query:
        return _by_head(owner, out)
    queries = owner.num_heads // groups * size
    return ("interleaved", (queries, size, size), 0) if groups > 1 else ("rows", queries, size, size)


def _latent(owner: Any, out: int) -> Matrices:
    key, value = owner.qk_nope_head_dim, owner.v_head_dim
    return ("interleaved", 2, 0, key) if key == value else ("interleaved", (key, value), 0)


def _splits(owner: Any, out: int) -> Matrices:
    return ("rows", *[owner.split_size] * (out // owner.split_size))


def _gate_up(owner: Any, out: int) -> Matrices | None:
    """Whether gate and up follow each other or alternate, a module of experts may say by `is_concatenated`."""
    names = class_names(owner, "transformers")
    joined = getattr(owner, "is_concatenated", "GptOssExperts" not in names if names else None)
    return None if joined is None else ("rows", out // 2, out // 2) if joined else ("interleaved", 2, 0)


# Library and class of the module around a layer or a parameter, its name in the module, split of its rows (None: one
# matrix), and what the parts are. The first match counts, so exceptions come before their rule. transformers 5.23.
_ORDERS: tuple[tuple[str, str, Callable[[Any, int], Matrices | None] | None, str], ...] = (
    ("torch:MultiheadAttention", "in_proj_weight", _equal(3), "q, k, v"),
    ("torch:MultiheadAttention", ".*", None, ""),
    ("torch:RNN(Cell)?Base", "weight_hr.*", None, ""),
    ("torch:RNN(Cell)?Base", "weight_.*", _gates, "gates"),
    ("transformers:(GPTNeoX(Japanese)?|Bloom|Persimmon)Attention", "query_key_value", _by_head, "q, k, v head by head"),
    ("transformers:FalconAttention", "query_key_value", _falcon, "q, k, v"),
    (
        "transformers:CodeGenAttention",
        "qkv_proj",
        lambda _, out: ("interleaved", 3, 0, out // 12),
        "q, v, k by quarters",
    ),
    ("transformers:(GPT2|ImageGPT|DecisionTransformerGPT2|)Attention", "c_attn", _splits, "q, k, v"),
    ("transformers:GPTBigCodeAttention", "c_attn", _bigcode, "q, k, v"),
    ("transformers:Phi(3|4Multimodal)Attention", "qkv_proj", _grouped_query, "q, k, v"),
    ("transformers:DbrxAttention", "Wqkv", _grouped_query, "q, k, v"),
    ("transformers:(?!Exaone4_5_Vision).*Attention", "qkv", _equal(3), "q, k, v"),
    ("transformers:.*Attention", "kv_b_proj", _latent, "k, v head by head"),
    ("transformers:DbrxExpertGLU", "w1|v1", lambda owner, _: ("heads", owner.moe_num_experts, 0), "experts"),
    (
        "transformers:DbrxExpertGLU",
        "w2",
        lambda owner, _: ("transposed", ("heads", owner.moe_num_experts, 1)),
        "experts",
    ),
    (".*", "gate_up_proj", _gate_up, "gate, up"),
)


def known_cut(site: Site, out: int) -> Fused:
    """Return how the ``out`` rows of a weight out × in split by the class of the module that holds it.

    A module that holds only this layer, or this layer and its norm, is treated like the layer itself.
    """
    keys = (site.key, *(name for name, _ in site.owners))
    for name, (_, owner) in zip(keys, site.owners, strict=False):
        classes = [f"{c.__module__.partition('.')[0]}:{c.__name__}" for c in type(owner).__mro__]
        for around, inner, order, parts in _ORDERS:
            if re.fullmatch(inner, name) and any(re.fullmatch(around, class_name) for class_name in classes):
                cut, certain = None if order is None else order(owner, out), around.startswith("torch:")
                fits = count_of(cut, out) > 1
                return Fused(cut, f"{parts} ({class_of(owner)})", certain) if fits else Fused(certain=certain)
        if sum(len(global_shape(p)) > 1 for p in owner.parameters()) > 1:
            break
    return Fused()


def count_of(cut: Matrices | None, out: int) -> int:
    """Return the number of matrices in a split of ``out`` rows; 0 if it does not fit."""
    try:
        return len(parts_of("", (out, 1), cut or "whole"))
    except ValueError:
        return 0


def is_turned(experts: Any) -> bool:
    """Whether a module stores its experts in × out.

    The attribute `is_transposed` of `transformers` says it; without it, it follows from the shapes: the output of
    `gate_up_proj` is twice the input of `down_proj`.
    """
    if (transposed := getattr(experts, "is_transposed", None)) is not None:
        return bool(transposed)
    up, down = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    shapes = [] if up is None or down is None else [global_shape(up), global_shape(down)]
    return [len(shape) for shape in shapes] == [3, 3] and shapes[0][1:] == (shapes[1][2], 2 * shapes[1][1])
