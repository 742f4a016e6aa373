"""Storage orders of fused projections in known modules: which rows of a parameter belong to which matrix.

A wrong split is a wrong update without an error. So an order is listed only if it was read in the module's forward;
`tests/unit/test_groups.py` runs these forwards. A module is recognized by its class, not by the parameter's name. The
sizes that the module states must add up to the parameter's size; otherwise the parameter stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

# Plain data, nested: "whole", ("rows", 768, 768, 768), ("stack", ("transposed", "whole")), …; see docs/groups.md.
Matrices = str | tuple[Any, ...]


class Fused(NamedTuple):
    """The storage order of one kind of fused projection.

    `classes` is a regular expression for the full names of the owner's classes in `transformers`. `attribute` is one
    for the name of the linear module in its owner. `order(owner, out)` returns the split of the `out` rows. `parts`
    names the parts, for the reason.
    """

    classes: str
    attribute: str
    order: Callable[[Any, int], tuple[Any, ...]]
    parts: str


def _equal(count: int) -> Callable[[Any, int], tuple[Any, ...]]:
    return lambda owner, out: ("rows", *[out // count] * count)


def _by_split_size(owner: Any, out: int) -> tuple[Any, ...]:
    return ("rows", *[owner.split_size] * (out // owner.split_size))


def _per_head(dim: str) -> Callable[[Any, int], tuple[Any, ...]]:
    return lambda owner, out: ("interleaved", 3, 0, getattr(owner, dim))


def _grouped_query(owner: Any, out: int) -> tuple[Any, ...]:
    heads = getattr(owner, "num_heads", None) or owner.config.num_attention_heads
    kv = owner.num_key_value_heads * owner.head_dim
    return ("rows", heads * owner.head_dim, kv, kv)


def _falcon(owner: Any, out: int) -> tuple[Any, ...]:
    if owner.new_decoder_architecture and owner.num_heads != owner.num_kv_heads:
        # A group of queries, one key, one value, again and again.
        queries = owner.num_heads // owner.num_kv_heads
        return ("interleaved", (queries * owner.head_dim, owner.head_dim, owner.head_dim), 0)
    if owner.multi_query and not owner.new_decoder_architecture:
        return ("rows", owner.num_heads * owner.head_dim, owner.head_dim, owner.head_dim)
    return ("interleaved", 3, 0, owner.head_dim)


def _bigcode(owner: Any, out: int) -> tuple[Any, ...]:
    if owner.is_cross_attention:
        return ("interleaved", 2, 0, owner.head_dim)
    if owner.multi_query:
        return ("rows", owner.embed_dim, owner.kv_dim, owner.kv_dim)
    return ("interleaved", 3, 0, owner.head_dim)


def _heads(*sizes: int) -> tuple[Any, ...]:
    """Return the split of rows that are stored head by head, where each head has parts of these sizes."""
    return ("interleaved", len(sizes), 0, sizes[0]) if len(set(sizes)) == 1 else ("interleaved", sizes, 0)


# The first match counts, so exceptions come before the rule that they break. transformers 5.23.
FUSED = (
    Fused("GPTNeoX(Japanese)?Attention", "query_key_value", _per_head("head_size"), "q, k, v head by head"),
    Fused("(Bloom|Persimmon)Attention", "query_key_value", _per_head("head_dim"), "q, k, v head by head"),
    Fused("FalconAttention", "query_key_value", _falcon, "q, k, v"),
    # Four groups of heads for four TPU cores, each q, v, k.
    Fused("CodeGenAttention", "qkv_proj", lambda o, out: ("interleaved", 3, 0, out // 12), "q, v, k by quarters"),
    Fused("(GPT2|ImageGPT|DecisionTransformerGPT2|)Attention", "c_attn", _by_split_size, "q, k, v"),
    Fused("GPTBigCodeAttention", "c_attn", _bigcode, "q, k, v"),
    Fused("Phi(3|4Multimodal)Attention", "qkv_proj", _grouped_query, "q, k, v"),
    Fused("DbrxAttention", "Wqkv", _grouped_query, "q, k, v"),
    Fused("(?!Exaone4_5_Vision).*Attention", "qkv", _equal(3), "q, k, v"),
    Fused(".*Attention", "kv_b_proj", lambda o, out: _heads(o.qk_nope_head_dim, o.v_head_dim), "k, v head by head"),
    Fused(".*", "gate_up_proj", _equal(2), "gate, up"),
)


WHOLE = "muonmesh_shape"
"""Attribute of a parameter that is a plain shard, with the shape of the whole parameter."""


def global_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter before sharding.

    A DTensor knows it, DeepSpeed's ZeRO-3 keeps it in `ds_shape`, and integrations set the attribute `WHOLE` of a plain
    shard.
    """
    return tuple(getattr(parameter, WHOLE, getattr(parameter, "ds_shape", parameter.shape)))


def class_names(module: nn.Module, library: str = "") -> list[str]:
    """Return the names of the module's classes, most derived first (`fully_shard` adds a class of its own in front).

    Mixins that are no modules are left out. If `library` is given, classes outside this package are left out too.
    """
    modules = (c for c in type(module).__mro__ if issubclass(c, nn.Module))
    return [c.__name__ for c in modules if not library or c.__module__.split(".")[0] == library]


def fused_order(owner: nn.Module, attribute: str, out: int) -> tuple[tuple[Any, ...], str] | None:
    """Return the split of the `out` output rows of the linear module `owner.attribute`, and the names of its parts.

    None if the owner's class is unknown, or if the sizes that it states do not fit the parameter.
    """
    names = class_names(owner, "transformers")
    for fused in FUSED:
        if re.fullmatch(fused.attribute, attribute) and any(re.fullmatch(fused.classes, n) for n in names):
            order = fused.order(owner, out)
            return (order, fused.parts) if order and _fits(order, out) else None
    return None


def _fits(order: tuple[Any, ...], out: int) -> bool:
    kind, *sizes = order
    if kind == "rows":
        return bool(min(sizes) > 0 and sum(sizes) == out)
    count, _, block = (*sizes, 1)[:3]
    turn = sum(count) if isinstance(count, tuple) else count * block
    return bool(turn > 0 and out % turn == 0)


def expert_order(module: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[Matrices, str]:
    """Return the split of a stack of experts, `module.name` of `shape` (experts, ., .), and the reason.

    A module of `transformers` may have attributes for both facts: whether experts are stored in × out
    (`is_transposed`), and whether gate and up follow each other or alternate (`is_concatenated`). Without them, the
    first fact follows from the shapes (the output of `gate_up_proj` is twice the input of `down_proj`), and the second
    from the class.
    """
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        transposed = _stored_in_by_out(module)
    inner: Matrices = "whole"
    reason = "experts, one matrix each"
    if name == "gate_up_proj":
        names = class_names(module, "transformers")
        concatenated = getattr(module, "is_concatenated", "GptOssExperts" not in names if names else None)
        rows = shape[2] if transposed else shape[1]
        if concatenated is not None and rows % 2 == 0:
            inner = ("rows", rows // 2, rows // 2) if concatenated else ("interleaved", 2, 0)
            reason = "experts, gate and up " + ("of each" if concatenated else "alternating row by row")
    if transposed:
        inner, reason = ("transposed", inner), reason + ", stored in × out"
    return ("stack" if inner == "whole" else ("stack", inner)), reason


def _stored_in_by_out(module: nn.Module) -> bool:
    if getattr(module, "gate_up_proj", None) is None or getattr(module, "down_proj", None) is None:
        return False
    up, down = global_shape(module.gate_up_proj), global_shape(module.down_proj)  # type: ignore[arg-type]
    return len(up) == len(down) == 3 and up[1] == down[2] and up[2] == 2 * down[1]
