"""Heads: cuts attention weights into one matrix for each head, by attributes of the attention module."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from torch import nn

from muonmesh.errors import about, explain_error
from muonmesh.groups.sites import WHOLE, Role, Site, class_names

HeadPart: TypeAlias = Literal["q", "k", "v", "o"]
"""A projection of attention (query, key, value or output) that `split_params` may cut into one matrix per head."""

TAG = "muon_num_heads"
"""Attribute of a parameter that gives DeepSpeed's own Muon the number of heads in its rows."""

# Names of projections in attention modules, and of parameters that the modules hold themselves.
_PARTS: dict[str, tuple[str, ...]] = {
    r"q|query|q_b|wq|q_lin|to_q|query_proj|q_proj|q_b_proj|q_proj_weight": ("q",),
    r"linear_q|linear_q_proj|linear_q_up_proj": ("q",),
    r"k|key|wk|k_lin|to_k|key_proj|k_proj|linear_k|k_proj_weight": ("k",),
    r"v|value|wv|v_lin|to_v|value_proj|v_proj|linear_v|v_proj_weight": ("v",),
    r"o_proj|out_proj|out_lin|wo|c_proj|linear_proj|dense|to_out": ("o",),
    r"kv_b_proj|linear_kv_up_proj|kv_proj|to_kv": ("k", "v"),
    r"(?i:.*qkv.*|query_key_value|c_attn|in_proj|in_proj_weight|att_proj)": ("q", "k", "v"),
}


def parts_of(per_head: object) -> tuple[HeadPart, ...]:
    """Return the projections to cut into heads for a value of `per_head` in `split_params`.

    Raises:
        ValueError: `per_head` is neither a bool nor a collection of "q", "k", "v" and "o".
    """
    if isinstance(per_head, bool):
        return ("q", "k") if per_head else ()
    known = get_args(HeadPart)
    given = tuple(per_head) if isinstance(per_head, Collection) and not isinstance(per_head, str) else ()
    if not given or any(part not in known for part in given):
        needed = 'True, which means ("q", "k"), False, or some of "q", "k", "v", "o"'
        raise ValueError(explain_error("split_params", f"per_head={per_head!r}", needed, 'Write per_head=("q", "k")'))
    return tuple(part for part in known if part in given)


def by_heads(site: Site, role: Role, parts: Collection[HeadPart]) -> tuple[Role, tuple[HeadPart, ...]]:
    """Return the role of a parameter with its projections cut into heads, and the projections that were cut.

    DeepSpeed's tag, ``parameter.muon_num_heads``, cuts any matrix, whatever `parts` says.

    If q, k and v of one head follow each other in storage (NeoX, Megatron), each becomes a matrix for each head, even
    v: its rows are between other rows, so they cannot stay one matrix.

    Args:
        site: The place of the parameter in the model.
        role: The role of the parameter. AdamW's parameters stay unchanged.
        parts: The projections to cut.

    Raises:
        ValueError: the parameter is one of these projections, and its module does not state the number of heads, or the
            heads do not add up to the parameter.
    """
    if role.algorithm != "muon" or len(site.shape) != 2:
        return role, ()
    attribute, owner = place_of(site)
    named = named_parts(attribute)
    wanted = tuple(part for part in get_args(HeadPart) if part in named and part in parts)
    if (tag := getattr(site.parameter, TAG, None)) is not None:
        return _tagged(site, role, tag), wanted
    if not wanted or not any("Attention" in name for name in class_names(owner)):
        return role, ()
    _refuse_shard(site, owner)
    form: Any = role.matrices
    transposed = isinstance(form, tuple) and form[0] == "transposed"
    if transposed:
        form = form[1]
    length = site.shape[int((named == ("o",)) != transposed)]
    sizes = [size for _, size in blocks_of(site, owner, form, named, length, whole={*named} - {*wanted})]
    equal = form[0] != "rows" and len(set(sizes)) == 1
    cut = ("heads", len(sizes), int(named == ("o",))) if equal else ("rows", *sizes)
    told = ", ".join(named if equal else wanted)  # all projections that are stored head by head
    matrices: Any = ("transposed", cut) if transposed else cut
    return replace(role, matrices=matrices, reason=f"{role.reason}; one matrix for each head of {told}"), wanted


def _refuse_shard(site: Site, owner: nn.Module) -> None:
    """Raise a ValueError if a weight is a plain shard and its whole shape is unknown, so heads would be miscounted."""
    parameter, ranks = site.parameter, said_by(owner, "tensor_model_parallel_size") or 1
    if ranks > 1 and getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, WHOLE, None) is None:
        found = f"a tensor-parallel shard of {site.shape}, one of {ranks}"
        write = "Use get_megatron_optimizer(..., per_head=True) of muonmesh.integrations.megatron, or write "
        write += f"parameter.{WHOLE} = (rows, columns) of the whole before split_params"
        raise ValueError(explain_error(site.name, found, "the whole shape, in which heads are counted", write))


def _tagged(site: Site, role: Role, tag: object) -> Role:
    """Return the role of a parameter with DeepSpeed's tag for the number of heads; heads are blocks of its rows."""
    counts = isinstance(tag, int) and not isinstance(tag, bool) and tag > 0
    if counts and role.matrices == "whole" and site.shape[0] % tag == 0:  # type: ignore[operator]
        return replace(role, matrices=("heads", tag, 0), reason=f"{role.reason}; one matrix for each head: {TAG}={tag}")
    found = f"{TAG}={tag!r} on {site.shape}, which splits as {role.matrices!r}"
    needed = "whole heads that follow each other in the rows of one matrix"
    write = f'del parameter.{TAG}, and overrides={{"{site.name}": {{"algorithm": "muon", "matrices": ...}}}}'
    raise ValueError(explain_error(site.name, found, needed, f"Write {write}"))


def refuse_none(model: nn.Module, missing: Collection[str]) -> None:
    """Raise an error if the model has no attention module with some of the projections in `per_head`.

    Raises:
        ValueError: `missing` is not empty.
    """
    if missing:
        what = f"per_head asks for {', '.join(missing)}, but split_params knows no attention module with these "
        what += 'projections. Write overrides={"name": {"algorithm": "muon", "matrices": ("heads", 12, 0)}} for each '
        raise ValueError(about(type(model).__name__, what + "weight, or leave per_head out"))


def named_parts(attribute: str) -> tuple[str, ...]:
    """Return the projections that a parameter of this name holds, in their order; empty if the name is unknown."""
    return next((names for pattern, names in _PARTS.items() if re.fullmatch(pattern, attribute)), ())


def place_of(site: Site) -> tuple[str, nn.Module]:
    """Return the name of a projection in its attention module, and this module."""
    if site.key not in ("weight", "bias") or len(site.owners) < 2:
        return site.key.replace("bias", "weight"), site.module
    return site.owners[0][0], site.owners[1][1]


def blocks_of(
    site: Site, owner: nn.Module, form: Any, named: tuple[str, ...], length: int, *, whole: Collection[str]
) -> list[tuple[str, int]]:
    """Return the blocks of a parameter in their order, each with its projection and its size.

    A block is one head. Its projection is "" if the number of alternating parts does not fit the parameter's name.

    Args:
        site: The place of the parameter in the model.
        owner: The attention module.
        form: How the parameter splits without heads.
        named: The projections in it, in their order.
        length: Size of the dim that consists of heads.
        whole: The projections that stay one block each, unless their heads lie between those of others.

    Raises:
        ValueError: the heads that the module states do not add up to the parameter.
    """
    kind = form[0] if isinstance(form, tuple) else form
    if kind == "interleaved":
        runs = list(form[1]) if isinstance(form[1], (tuple, list)) else [form[3] if len(form) > 3 else 1] * form[1]
        _, size = heads_of(owner, "k")
        # DeepSeek's heads of k and v may differ in size.
        sizes = runs if named == ("k", "v") else [min(runs) if size is None else size] * len(runs)
        if any(map(int.__mod__, runs, sizes)) or length % sum(runs):
            refuse_heads(site, owner, ", ".join(named), None, size, length)
        parts = named if len(named) == len(runs) else ("",) * len(runs)
        turn = zip(parts, runs, sizes, strict=True)
        return [(part, size) for part, run, size in turn for _ in range(run // size)] * (length // sum(runs))
    rows = form[1:] if kind == "rows" else (length,) if kind == "whole" else ()
    if len(rows) != len(named):
        found, write = (
            f"{', '.join(named)} in one weight, split as {form!r}",
            "Write example=(inputs,), which shows them",
        )
        raise ValueError(explain_error(site.name, found, "the rows of each, in which heads are counted", write))
    blocks: list[tuple[str, int]] = []
    for part, count in zip(named, rows, strict=True):
        heads, size = (1, count) if part in whole else heads_of(owner, part)
        if heads is None or size is None or heads * size != count:
            refuse_heads(site, owner, part, heads, size, count)
        blocks += [(part, size)] * heads
    return blocks


def heads_of(owner: nn.Module, part: str) -> tuple[int | None, int | None]:
    """Return the number of heads of a projection and their size; None for a value that the module does not state."""
    queries = said_by(owner, "num_attention_heads", "num_heads", "n_heads", "n_head")
    queries = queries or said_by(owner, "num_attention_heads_per_partition")  # heads of a shard, or all heads
    grouped = said_by(owner, "num_key_value_heads", "num_kv_heads", "num_query_groups")
    count = queries if part in ("q", "o") else grouped or queries
    value = said_by(owner, "v_head_dim")
    names = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "hidden_size_per_attention_head")
    own = ("q_head_dim",) if part == "q" else ()  # Megatron's latent attention, whose qk_head_dim lacks the rotary part
    size = value if part in ("v", "o") and value is not None else said_by(owner, *own, *names)
    if size is None and queries is not None and (width := said_by(owner, "embed_dim", "hidden_size")) is not None:
        size = width // queries if width % queries == 0 else None
    return count, size


def said_by(owner: nn.Module, *names: str) -> int | None:
    """Return the first positive integer under these attribute names, of a module and then of its config; else None."""
    for holder in (owner, getattr(owner, "config", None)):
        for name in names:
            found = getattr(holder, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None


def refuse_heads(site: Site, owner: nn.Module, part: str, count: int | None, size: int | None, length: int) -> NoReturn:
    """Raise the ValueError that a projection does not consist of whole heads, by the attributes of its module."""
    of = "an unknown number" if count is None else f"{count}"
    each = "of unknown size" if size is None else f"of {size}"
    found = f"{part} of {length} in {type(owner).__name__}, which says {of} heads {each}"
    write = f'overrides={{"{site.name}": {{"algorithm": "muon", "matrices": ("heads", n, 0)}}}}'
    raise ValueError(explain_error(site.name, found, "whole heads only", f"Write {write}, or leave per_head out"))
