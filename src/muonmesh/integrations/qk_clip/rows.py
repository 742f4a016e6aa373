"""Logits: finds the rows of weights that make the attention logits of each head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from muonmesh.errors import explain_error
from muonmesh.groups.graph import Seen
from muonmesh.groups.heads import blocks_of, heads_of, named_parts, place_of, refuse_heads, said_by
from muonmesh.groups.roles import role
from muonmesh.groups.sites import Site, class_names, sites
from muonmesh.names import canonical_name

_NO_SOFTMAX = re.compile(r".*(Delta(Net|Attention)|LightningAttention|Mamba2?Layer|Mixer)")
_NORM = re.compile(r"(q|k|query|key)_?(norm|layernorm|ln)")


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
    """

    name: str
    module: nn.Module
    heads: int
    rows: tuple[LogitRows, ...]
    queries: tuple[nn.Module, str]


def attentions(model: nn.Module, seen: Mapping[int, Seen]) -> list[Attention]:
    """Return the attention modules of a model in its order, without linear attention.

    ``seen`` is what a forward showed of each parameter, by id: how the weights of q, k and v in one are cut.

    To multiply the logits of a head by γ, its queries and keys are multiplied by √γ each. If several heads of queries
    share a head of keys, the queries are multiplied by γ and the keys stay, so that no other head changes. In latent
    attention (MLA), q_C and k_C are multiplied by √γ and the rotary q_R by γ; k_R stays, because all heads share it
    (arXiv 2507.20534).

    Raises:
        ValueError: the model has no known attention module; or the logits of a module do not depend on the size of its
            weights.
    """
    found: dict[nn.Module, list[tuple[Site, str, Any]]] = {}
    forms: dict[nn.Module, Any] = {}
    for site in sites(model):
        attribute, owner = place_of(site)
        if not {"q", "k"} & set(named_parts(attribute)) or not any("Attention" in name for name in class_names(owner)):
            continue
        if _is_linear(owner):
            continue
        if site.key.endswith("weight"):
            forms[site.module] = role(site, {}, seen.get(id(site.parameter))).matrices
        if site.key.endswith("weight") or site.key.endswith("bias"):
            found.setdefault(owner, []).append((site, attribute, forms.get(site.module, "whole")))
    result = []
    for owner, entries in found.items():
        first = entries[0][0]
        if any("CodeGen" in kind for kind in class_names(owner)):  # q, v, k by quarters
            refuse_heads(first, owner, "q, v, k", None, None, first.shape[0])
        name = first.name.rsplit(".", 1 if first.module is owner else 2)[0]
        _refuse_norms(name, owner)
        heads, _ = heads_of(owner, "q")
        if heads is None:
            refuse_heads(first, owner, "q", None, None, first.shape[0])
        rows = tuple(row for site, attribute, form in entries for row in _rows(site, owner, attribute, form))
        held = next(site for site, attribute, _ in entries if "q" in named_parts(attribute) and len(site.shape) == 2)
        result.append(Attention(name, owner, heads, rows, (held.module, held.key)))
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
    said = getattr(module, "layer_type", None) == "linear_attention"
    return said or any(_NO_SOFTMAX.fullmatch(name) for name in class_names(module))


def _refuse_norms(name: str, owner: nn.Module) -> None:
    for key, child in owner._modules.items():
        if child is not None and not isinstance(child, nn.Identity) and _NORM.fullmatch(key):
            found = f"{key}, which norms queries or keys, so that their weights' size does not change the logits"
            needed = "attention whose logits grow with its weights"
            raise ValueError(explain_error(name, found, needed, "Leave QKClip out: the norm already bounds the logits"))


def _rows(site: Site, owner: nn.Module, attribute: str, form: Any) -> Iterator[LogitRows]:
    """Yield the rows of one parameter, weight or bias."""
    stored = isinstance(form, tuple) and form[0] == "transposed"
    if stored:
        form = form[1]
    dim = int(stored and len(site.shape) == 2)
    grouped = heads_of(owner, "k")[0] != heads_of(owner, "q")[0]
    nope, rope = said_by(owner, "qk_nope_head_dim"), said_by(owner, "qk_rope_head_dim")
    latent = nope is not None and rope is not None
    heads, high, named = Counter[str](), 0, named_parts(attribute)
    for part, size in blocks_of(site, owner, form, named, site.shape[dim], whole=("v",)):
        if not part:
            refuse_heads(site, owner, ", ".join(named), None, None, site.shape[dim])
        head, low, high = heads[part], high, high + size
        heads[part] += 1
        if latent and part == "q":
            assert nope is not None
            yield LogitRows(site.name, dim, low, low + nope, head, 0.5)
            yield LogitRows(site.name, dim, low + nope, high, head, 1.0)
        elif part == "q":
            yield LogitRows(site.name, dim, low, high, head, 1.0 if grouped else 0.5)
        elif part == "k" and (latent or not grouped):
            yield LogitRows(site.name, dim, low, high, head, 0.5)
