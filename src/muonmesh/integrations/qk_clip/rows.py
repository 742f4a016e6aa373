"""Rows: finds the rows of weights that make the attention logits of each head, and scales them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from muonmesh.checkpoint.record import boxes_of, fill
from muonmesh.comm.storage import Storage
from muonmesh.errors import explain_error
from muonmesh.groups.facts import Facts
from muonmesh.groups.parameter_sites import Site, class_names, parameter_sites
from muonmesh.groups.roles import role
from muonmesh.layout import split_matrices
from muonmesh.names import canonical_name

_NO_SOFTMAX = re.compile(r".*(Delta(Net|Attention)|LightningAttention|Mamba2?Layer|Mixer)")
_NORM = re.compile(r"(q|k|qk|query|key)_?(b_)?((layer|rms|l2)_?)?(norm|ln)|(norm|ln)_?(q|k|qk|query|key)")
_ADAPTER = re.compile(r"(.*_)?(q|k|query|key)_adapter.*")

# Names of projections in attention modules, and of parameters that the modules hold themselves: what they make.
_PARTS: dict[str, tuple[str, ...]] = {
    r"q|query|q_b|wq|q_lin|to_q|query_proj|q_proj|q_b_proj|q_proj_weight": ("q",),
    r"linear_q|linear_q_proj|linear_q_up_proj": ("q",),
    r"k|key|wk|k_lin|to_k|key_proj|k_proj|linear_k|k_proj_weight": ("k",),
    r"kv_b_proj|linear_kv_up_proj|kv_proj|to_kv": ("k", "v"),
    r"(?i:.*qkv.*|query_key_value|c_attn|in_proj|in_proj_weight|att_proj)": ("q", "k", "v"),
}


@dataclass(frozen=True)
class LogitRows:
    """Indices ``low`` to ``high`` of one dim of a parameter, which are a factor of the logits of a head.

    Attributes:
        name: Canonical name of the parameter.
        dim: The dim.
        low, high: The first index, and the index after the last.
        head: Number of the head.
        power: To multiply the head's logits by γ, multiply these elements by γ to this power.
    """

    name: str
    dim: int
    low: int
    high: int
    head: int
    power: float


@dataclass(frozen=True)
class Attention:
    """One attention module with the rows that make its logits.

    Attributes:
        name: Canonical name.
        module: The module.
        heads: The number of heads of its queries.
        rows: The rows of queries and keys that make the logits.
        queries: The module and key of the weight that makes the queries.
        places: The module and key of each parameter in ``rows``, by its name. A tied parameter has several names.
        shapes: The shape of each of these parameters.
    """

    name: str
    module: nn.Module
    heads: int
    rows: tuple[LogitRows, ...]
    queries: tuple[nn.Module, str]
    places: Mapping[str, tuple[nn.Module, str]]
    shapes: Mapping[str, tuple[int, ...]]


def attentions(model: nn.Module, forward_facts: Mapping[int, Facts], stepped: Mapping[str, Any]) -> list[Attention]:
    """Return the attention modules of a model in its order, without linear attention.

    ``forward_facts`` are what a forward showed of each parameter, by id: how the weights of q, k and v in one are cut.
    Where they and the class of the module show no cut, that of ``stepped`` counts: an optimizer's splits by name.

    To multiply the logits of a head by γ, its queries and keys are multiplied by √γ each. If several heads of queries
    share a head of keys, the queries are multiplied by γ and the keys stay, so that no other head changes. In latent
    attention (MLA), q_C and k_C are multiplied by √γ and the rotary q_R by γ; k_R stays, because all heads share it
    (arXiv 2507.20534).

    Raises:
        ValueError: the model has no known attention module; the weight of a module's queries or keys is not known; or
            the logits of a module do not depend on the size of its weights.
    """
    projections: dict[nn.Module, list[tuple[Site, str, Any]]] = {}
    forms: dict[nn.Module, Any] = {}
    for site in parameter_sites(model):
        attribute, owner = site.layer
        attribute = attribute.replace("bias", "weight")  # in_proj_bias of torch's
        attends = any("Attention" in name for name in class_names(owner)) and not _is_linear(owner)
        if not attends or not _named(attribute):
            continue
        if site.key.endswith("weight"):
            form = role(site, {}, forward_facts.get(id(site.parameter))).matrices
            uncut = form in ("whole", ("transposed", "whole"))
            forms[site.module] = stepped.get(site.name, form) if uncut and len(_named(attribute)) > 1 else form
        if site.key.endswith("weight") or site.key.endswith("bias"):
            projections.setdefault(owner, []).append((site, attribute, forms.get(site.module, "whole")))
    result = []
    for owner, entries in projections.items():
        first = entries[0][0]
        if any("CodeGen" in kind for kind in class_names(owner)):  # q, v, k by quarters
            _refuse_heads(first, owner, "q, v, k", None, None, first.shape[0])
        name = first.name.rsplit(".", 1 if first.module is owner else 2)[0]
        _refuse_norms_and_adapters(name, owner)
        heads, _ = _heads_of(owner, "q")
        if heads is None:
            _refuse_heads(first, owner, "q", None, None, first.shape[0])
        _refuse_missing(name, owner, {part for _, attribute, _ in entries for part in _named(attribute)})
        rows = tuple(row for site, attribute, form in entries for row in _rows(site, owner, attribute, form))
        query_weight = next(site for site, attribute, _ in entries if "q" in _named(attribute) and len(site.shape) > 1)
        scaled = {row.name for row in rows}
        sites = [site for site, _, _ in entries if site.name in scaled]
        places = {site.name: (site.module, site.key) for site in sites}
        shapes = {site.name: tuple(site.shape) for site in sites}
        result.append(Attention(name, owner, heads, rows, (query_weight.module, query_weight.key), places, shapes))
    if not result:
        found_none = "no attention module whose queries and keys are known"
        needed = "modules called ...Attention that hold q_proj and k_proj, or a fused projection that is known"
        write = "Leave QKClip out, or name the projections so"
        raise ValueError(explain_error(type(model).__name__, found_none, needed, write))
    return result


def without_softmax(model: nn.Module) -> list[str]:
    """Return the names of linear attention and state space layers, which have no softmax over logits."""
    return [canonical_name(name) for name, module in model.named_modules() if _is_linear(module)]


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is linear attention or a state space, by `layer_type` of `transformers` or its class."""
    states_linear = getattr(module, "layer_type", None) == "linear_attention"
    return states_linear or any(_NO_SOFTMAX.fullmatch(name) for name in class_names(module))


def _refuse_norms_and_adapters(name: str, owner: nn.Module) -> None:
    for key, child in owner._modules.items():
        if child is not None and _ADAPTER.fullmatch(key) and any(True for _ in child.parameters()):
            fault = f"{key}, whose outputs are added to queries or keys, and which QKClip would not scale"
            write = "Leave QKClip out, or leave these projections without adapters"
            raise ValueError(explain_error(name, fault, "plain projections of queries and keys", write))
        if child is not None and not isinstance(child, nn.Identity) and _NORM.fullmatch(key):
            fault = f"{key}, which norms queries or keys, so that their weights' size does not change the logits"
            needed = "attention whose logits grow with its weights"
            raise ValueError(explain_error(name, fault, needed, "Leave QKClip out: the norm already bounds the logits"))


def _refuse_missing(name: str, owner: nn.Module, parts: set[str]) -> None:
    """Raise ValueError if the weight of queries or keys is not known, such as one that an adapter of PEFT wraps."""
    needed_parts = ("q",) if _is_grouped(owner) else ("q", "k")  # keys that several heads share are not scaled
    for part in needed_parts:
        if part not in parts:
            problem, needed = f"no weight that is known to make {part}", "plain projections of queries and keys"
            write = "Leave QKClip out, or leave these projections without adapters"
            raise ValueError(explain_error(name, problem, needed, write))


def _is_grouped(owner: nn.Module) -> bool:
    return _heads_of(owner, "k")[0] != _heads_of(owner, "q")[0]


def _rows(site: Site, owner: nn.Module, attribute: str, form: Any) -> Iterator[LogitRows]:
    """Yield the rows of one parameter, weight or bias, that make queries and keys."""
    stored = isinstance(form, tuple) and form[0] == "transposed"
    dim = int(stored and len(site.shape) == 2)
    if len(site.shape) == 1:  # a bias is cut as the rows of its weight
        form = form[1] if stored else form
    grouped = _is_grouped(owner)
    nope, rope = _said_by(owner, "qk_nope_head_dim"), _said_by(owner, "qk_rope_head_dim")
    latent = nope is not None and rope is not None
    for part, head, low, high in _heads_in(site, owner, form, _named(attribute), dim):
        if latent and part == "q":
            assert nope is not None
            yield LogitRows(site.name, dim, low, low + nope, head, 0.5)
            yield LogitRows(site.name, dim, low + nope, high, head, 1.0)
        elif part == "q":
            yield LogitRows(site.name, dim, low, high, head, 1.0 if grouped else 0.5)
        elif latent or not grouped:
            yield LogitRows(site.name, dim, low, high, head, 0.5)


def _named(attribute: str) -> tuple[str, ...]:
    """Return which of q, k and v a projection of this name makes, in their order; empty without q and k."""
    return next((names for pattern, names in _PARTS.items() if re.fullmatch(pattern, attribute)), ())


def _heads_in(
    site: Site, owner: nn.Module, form: Any, named: tuple[str, ...], dim: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield each head of queries and keys in a parameter: projection, number, first row, and the row after the last.

    Args:
        site: The place of the parameter in the model.
        owner: The attention module.
        form: How the parameter splits into projections.
        named: The projections in it, in their order.
        dim: The dim that consists of heads.

    Raises:
        ValueError: the parameter does not split into these projections, or the heads that the module states do not add
            up to it.
    """
    length = site.shape[dim]
    matrices = split_matrices(site.name, site.shape if len(site.shape) == 2 else (length, 1), form)
    if len(matrices) != len(named):
        problem = f"{', '.join(named)} in one weight, split as {form!r}"
        needed, write = "the rows of each, in which heads are counted", "Write example=(inputs,), which shows them"
        raise ValueError(explain_error(site.name, problem, needed, write))
    for part, matrix in zip(named, matrices, strict=True):
        runs = [block.region for block in matrix.blocks] if part != "v" else []
        number = 0
        for run in runs:
            low, count = run.offset[dim], run.shape[dim]
            heads, size = _heads_of(owner, part)
            if len(runs) > 1:  # the runs of q, k and v alternate; DeepSeek's heads of k and v may differ in size
                shortest = min(block.region.shape[dim] for matrix in matrices for block in matrix.blocks)
                size = count if named == ("k", "v") else size or shortest
                heads = count // size
            if heads is None or size is None or heads * size != count or run.step[dim] > 1:
                _refuse_heads(site, owner, part, heads, size, count)
            for first in range(low, low + count, size):
                yield part, number, first, first + size
                number += 1


def _heads_of(owner: nn.Module, part: str) -> tuple[int | None, int | None]:
    """Return the number of heads of queries or keys and their size; None for a value that the module does not state."""
    queries = _said_by(owner, "num_attention_heads", "num_heads", "n_heads", "n_head")
    queries = queries or _said_by(owner, "num_attention_heads_per_partition")  # heads of a shard, or all heads
    grouped = _said_by(owner, "num_key_value_heads", "num_kv_heads", "num_query_groups")
    names = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "hidden_size_per_attention_head")
    # Megatron's latent attention, whose qk_head_dim lacks the rotary part.
    query_names = ("q_head_dim",) if part == "q" else ()
    size = _said_by(owner, *query_names, *names)
    if size is None and queries is not None and (width := _said_by(owner, "embed_dim", "hidden_size")) is not None:
        size = width // queries if width % queries == 0 else None
    return queries if part == "q" else grouped or queries, size


def _said_by(owner: nn.Module, *names: str) -> int | None:
    """Return the first positive integer under these attribute names, of a module and then of its config; else None.

    The layers of one model may have different configs, which `transformers` keeps in the config of the model.
    """
    config: Any = getattr(owner, "config", None)
    if getattr(config, "is_heterogeneous", False) and isinstance(layer := getattr(owner, "layer_idx", None), int):
        config = config.per_layer_config[layer]
    for holder in (owner, config):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _refuse_heads(
    site: Site, owner: nn.Module, part: str, count: int | None, size: int | None, length: int
) -> NoReturn:
    """Raise the ValueError that a projection does not consist of whole heads, by the attributes of its module."""
    of = "an unknown number" if count is None else f"{count}"
    size_text = "of unknown size" if size is None else f"of {size}"
    problem = f"{part} of {length} in {type(owner).__name__}, which says {of} heads {size_text}"
    write = "Correct the head counts that the module states, or leave QKClip out"
    raise ValueError(explain_error(site.name, problem, "whole heads only", write))


def scale_rows(local: Tensor, storage: Storage, factors: list[tuple[LogitRows, Tensor]]) -> None:
    """Multiply rows, or columns, of a parameter by factors, in this rank's shard of the parameter.

    Each element is computed in fp32 or wider and rounded once, so every sharding gives the same bits. A factor of 1
    changes no bit.

    Args:
        local: The local tensor; changed in place.
        storage: Where the parameter lives.
        factors: Pairs of rows (or columns) and their factor, a 0-d fp64 tensor.
    """
    dim, length = factors[0][0].dim, storage.shape[factors[0][0].dim]
    factor_of_index = torch.ones(length, dtype=torch.float64, device=local.device)
    # Weights, or masters, may be in CPU memory.
    values = torch.stack([factor for _, factor in factors]).to(local.device)
    for (rows, _), factor in zip(factors, values.unbind(), strict=True):
        part = factor_of_index[rows.low : rows.high]
        torch.minimum(part, factor, out=part)  # a tied parameter makes the logits of several modules
    wide = torch.promote_types(local.dtype, torch.float32)
    boxes = boxes_of(local.contiguous(), storage.layout, storage.shape)
    for at, box in boxes.items():
        box_factors = factor_of_index[at[dim] :][: box.shape[dim]].to(wide)
        boxes[at] = box.to(wide) * box_factors.view([-1 if axis == dim else 1 for axis in range(box.ndim)])
    fill(local, storage, boxes)
