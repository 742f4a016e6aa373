"""Fused weights of known modules of `transformers`: which rows belong to which matrix, if no forward has been read.

A wrong split is a wrong update without an error. So an order is listed only if it was read in the module's forward;
`tests/groups/test_split.py` runs these forwards. A module is recognized by its class, not by the parameter's name. The
sizes that the module states must add up to the parameter's size; otherwise the parameter stays whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from muonmesh.groups.ends import features_of
from muonmesh.groups.sites import Matrices, Site, class_names, class_of, global_shape


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


def _quarters(owner: Any, out: int) -> Matrices:  # four groups of heads for four TPU cores, each q, v, k
    return ("interleaved", 3, 0, out // 12)


def _splits(owner: Any, out: int) -> Matrices:
    return ("rows", *[owner.split_size] * (out // owner.split_size))


# Class of the module around a linear layer, name of the layer in it, split of the layer's rows, and what the parts are.
# The first match counts, so exceptions come before the rule that they break. transformers 5.23.
_ORDERS: tuple[tuple[str, str, Callable[[Any, int], Matrices], str], ...] = (
    ("(GPTNeoX(Japanese)?|Bloom|Persimmon)Attention", "query_key_value", _by_head, "q, k, v head by head"),
    ("FalconAttention", "query_key_value", _falcon, "q, k, v"),
    ("CodeGenAttention", "qkv_proj", _quarters, "q, v, k by quarters"),
    ("(GPT2|ImageGPT|DecisionTransformerGPT2|)Attention", "c_attn", _splits, "q, k, v"),
    ("GPTBigCodeAttention", "c_attn", _bigcode, "q, k, v"),
    ("Phi(3|4Multimodal)Attention", "qkv_proj", _grouped_query, "q, k, v"),
    ("DbrxAttention", "Wqkv", _grouped_query, "q, k, v"),
    ("(?!Exaone4_5_Vision).*Attention", "qkv", lambda _, out: ("rows", *[out // 3] * 3), "q, k, v"),
    (".*Attention", "kv_b_proj", _latent, "k, v head by head"),
    (".*", "gate_up_proj", lambda _, out: ("rows", *[out // 2] * 2), "gate, up"),
)


def known_cut(site: Site) -> tuple[Matrices | None, str]:
    """Return how the rows of a weight out × in split, and the names of the parts; None for one matrix or unknown.

    A module that holds only this layer, or this layer and its norm, is treated like the layer itself.
    """
    out = (features_of(site.module) or (0,))[0]
    for (name, _), (_, owner) in itertools.pairwise(site.owners) if out else ():
        classes = class_names(owner, "transformers")
        for around, layer, order, parts in _ORDERS:
            if re.fullmatch(layer, name) and any(re.fullmatch(around, each) for each in classes):
                cut = order(owner, out)
                return (cut, f"{parts} ({class_of(owner)})") if _fits(cut, out) else (None, "")
        if sum(len(global_shape(p)) > 1 for p in owner.parameters()) > 1:
            break
    return None, ""


def _fits(cut: Any, out: int) -> bool:
    kind, sizes = cut[0], tuple(cut[1:])
    if kind == "rows":
        return bool(min(sizes) > 0 and sum(sizes) == out)
    count, _, block = (*sizes, 1)[:3]  # of an interleaved split
    turn = sum(count) if isinstance(count, tuple) else count * block
    return bool(turn > 0 and out % turn == 0)


def expert_cut(site: Site) -> tuple[Matrices | None, str, bool]:
    """Return how the rows of each expert of a stack split, the names of the parts, and whether it is stored in × out.

    A module of `transformers` may have attributes for both facts: whether experts are stored in × out
    (`is_transposed`), and whether gate and up follow each other or alternate (`is_concatenated`). Without them, the
    first fact follows from the shapes (the output of `gate_up_proj` is twice the input of `down_proj`), and the second
    from the class.
    """
    module, names = site.module, class_names(site.module, "transformers")
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        shapes = [] if up is None or down is None else [global_shape(up), global_shape(down)]
        transposed = [len(shape) for shape in shapes] == [3, 3] and shapes[0][1:] == (shapes[1][2], 2 * shapes[1][1])
    rows = site.shape[2 if transposed else 1]
    joined = getattr(module, "is_concatenated", "GptOssExperts" not in names if names else None)
    if site.key != "gate_up_proj" or joined is None or rows % 2:
        return None, "", transposed
    return ("rows", rows // 2, rows // 2) if joined else ("interleaved", 2, 0), "gate and up", transposed


def experts_in_two_dims(site: Site) -> Matrices | None:
    """Return the split of a stack of experts that is stored in two dims, one below the other; None for others."""
    if "DbrxExpertGLU" not in class_names(site.module, "transformers") or len(site.shape) != 2:
        return None
    down, count = site.key == "w2", site.module.moe_num_experts  # w2 is used in × out
    return ("transposed", ("heads", count, 1)) if down else ("heads", count, 0)
