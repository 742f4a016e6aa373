"""Roles: decides for each parameter whether it is a matrix for Muon, or which kind of parameter of AdamW.

What a module or a classifier states comes first, then what a forward showed, then what is known of classes and names.
Where no forward was read, the role is a guess, and its reason says so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from muonmesh.errors import about, explain_error
from muonmesh.groups.classifiers import classified
from muonmesh.groups.facts import Facts
from muonmesh.groups.known import TABLE, InputOutputLayers, Known, row_of
from muonmesh.groups.parameter_sites import (
    Kind,
    Matrices,
    Role,
    Site,
    answer_of,
    class_names,
    class_of,
    global_shape,
    is_traced,
)
from muonmesh.layout.matrix import as_tuples, parts_of

PRECEDENCE: tuple[Kind, ...] = ("embeddings", "head", "vectors", "matrices")
"""If a parameter is shared under several names with different roles, the first of these kinds counts."""

# Names that the Trainer of transformers exempts from decay, and A of state spaces, whose mark wrappers may drop.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)|(^|\.)a_log$")
_UNSEEN = Facts()
"""What is known of a parameter without a forward."""

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")


def role(site: Site, layers: InputOutputLayers, facts: Facts | None = None) -> Role:
    """Return the role of the parameter at `site`; `layers` are its ends, and `facts` what a forward showed.

    What a forward showed counts more than names and sizes. What it hides leaves them, and the role is then a guess.

    Raises:
        ValueError: the parameter is flattened, uninitialized or from a traced module, so its role cannot be found.
    """
    _refuse_unknowable(site)
    forward_facts, row = facts or _UNSEEN, row_of(site)
    decided = _declared(site) or classified(site) or _adapter(site) or _of_adamw(site, row)
    decided = decided or _end(site, layers, forward_facts) or _no_matrix(site, forward_facts)
    if decided is not None:
        return decided
    decided = _layer(site, forward_facts, row) or _stack(site, forward_facts, row) or _bare(site, forward_facts, row)
    return decided if decided.algorithm == "muon" else replace(decided, guess=facts is None)


def shared_roles(same: Sequence[Site], layers: InputOutputLayers, facts: Facts | None) -> list[Role]:
    """Return the roles of one parameter at all its places; the first is the role that counts."""
    roles = [role(site, layers, facts) for site in same]
    if same[0].parameter.is_complex():  # its parts are stepped, as in torch.optim
        roles = [replace(r, algorithm="adamw", guess=False, reason=f"complex numbers ({r.reason})") for r in roles]
    return sorted(roles, key=lambda r: PRECEDENCE.index(r.kind))


def _refuse_unknowable(site: Site) -> None:
    parameter, module = site.parameter, site.module
    if isinstance(parameter, UninitializedParameter):
        problem = f"a parameter of the lazy module {class_of(module)}, which has no shape yet"
        write = "Run one forward pass before split_params(model)"
        raise ValueError(explain_error(site.name, problem, "its shape", write))
    if is_traced(module):
        message = "The module of this parameter was traced and has lost its class, so nothing says whether it "
        message += "is a matrix or an embedding. Write split_params(model).held_by(stage), with the model from before "
        message += "tracing"
        raise ValueError(about(site.name, message))
    flat = getattr(parameter, "_is_flat_param", False)
    weight = isinstance(module, nn.Linear | _ConvNd | nn.Embedding) and site.key == "weight"
    if flat or (weight and len(site.shape) < 2):
        problem = f"a weight of {class_of(module)} flattened to shape {site.shape}"
        needed = "the weight with its own shape, because a flat piece would be trained as a vector"
        write = "Call split_params(model) before the wrapper that flattens (FSDP1, ZeRO), or shard with fully_shard"
        raise ValueError(explain_error(site.name, problem, needed, write))


def _adamw(kind: Kind, reason: str, site: Site) -> Role:
    return Role("adamw", kind, reason, by_shape(site.shape, kernel=isinstance(site.module, _ConvNd)))


def by_shape(shape: tuple[int, ...], spec: Matrices = "whole", *, kernel: bool = False) -> Matrices | None:
    """Return the split of a parameter whose matrices split as ``spec`` does; None if its shape does not decide it.

    Args:
        shape: The shape: one matrix, or a stack of them.
        spec: The split of each matrix.
        kernel: Whether it is the weight of a convolution: one matrix, out × (in · kernel).
    """
    if len(shape) == 2:
        return spec
    form = "flatten" if kernel else "stack"
    return (form if spec == "whole" else (form, spec)) if kernel or len(shape) == 3 else None


def declared_by(module: nn.Module) -> Mapping[str, Any]:
    """Return `muonmesh_matrices` of a module or of its class (not of a wrapped module), or an empty mapping."""
    declared = inspect.getattr_static(module, "muonmesh_matrices", {})
    if not isinstance(declared, Mapping):
        problem = f"muonmesh_matrices = {declared!r}"
        write = 'Write muonmesh_matrices = {"weight": ("rows", ...)}'
        raise TypeError(explain_error(class_of(module), problem, "a dict from its parameters' names", write))
    return declared


def declarations(site: Site) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules around `site` whose `muonmesh_matrices` has an entry for it, with its key, nearest first."""
    return ((module, key) for module, key in site.keys if key in declared_by(module))


def without_decay(site: Site) -> str | None:
    """Return the reason why a parameter has no weight decay, as text; None if it has weight decay.

    The reasons: its attribute `_no_weight_decay` (Mamba), `no_weight_decay()` of a module around it (timm), or a name
    that the Trainer of transformers exempts.
    """
    if getattr(site.parameter, "_no_weight_decay", False):
        return "_no_weight_decay"
    for module, key in site.keys:
        exempt, parts = answer_of(module, "no_weight_decay"), answer_of(module, "no_weight_decay_keywords")
        if key in (exempt or ()) or any(part in key for part in parts or ()):
            return f"no_weight_decay() of {class_of(module)}"
    return "its name" if _NO_DECAY.search(site.name.lower()) else None


def _declared(site: Site) -> Role | None:
    declaration = next(declarations(site), None)
    if declaration is None:
        return None
    module, key = declaration
    matrices = declared_by(module)[key]
    reason = f"muonmesh_matrices of {class_of(module)}"
    if matrices is None:
        return _adamw("matrices" if len(site.shape) > 1 else "vectors", reason, site)
    return Role("muon", "matrices", reason, as_tuples(matrices))


def _adapter(site: Site) -> Role | None:
    """Return the role of what an adapter of PEFT adds beside or in place of a layer."""
    inner = site.key
    for name, adapter in site.owners:
        if inner not in ("base_layer", "modules_to_save") and hasattr(adapter, "adapter_layer_names"):
            reason = f"of the adapter {class_of(adapter)}: the matrix that acts is computed from it"
            rows = isinstance(getattr(adapter, "base_layer", None), nn.Embedding)
            role = _adamw("vectors" if len(site.shape) < 2 else "embeddings" if rows else "matrices", reason, site)
            experts = getattr(adapter, "num_experts", 1)
            if experts > 1 and len(site.shape) == 2 and "ParamWrapper" in class_names(adapter, "peft"):
                cut: Matrices = ("heads", experts, 0) if inner == "lora_A" else ("interleaved", experts, 1)
                return replace(role, matrices=cut, reason=f"{reason}, a pair of factors for each of {experts} experts")
            return role
        inner = name
    return None


def _of_adamw(site: Site, row: Known | None) -> Role | None:
    """Return the role of a parameter whose class or name tells that it is AdamW's."""
    if row is None or row.adamw is None:
        return None
    table = isinstance(site.module, nn.Embedding | nn.EmbeddingBag)
    if row.adamw != "vectors" and not table and not _is_matrix(site.shape):
        return None
    return _adamw(row.adamw, f"{row.reason} ({class_of(site.module)})", site)


def _end(site: Site, layers: InputOutputLayers, facts: Facts) -> Role | None:
    if len(site.shape) < 2:
        return None
    layer = next((layers[id(m)] for _, m in site.owners if id(m) in layers), None)
    shown = facts.does is not None
    if facts.does == "multiplies":
        if facts.last:
            layer = "head", "output layer: in a forward, no other layer reads what it makes"
        elif facts.first:
            layer = "embeddings", "input layer: in a forward, it reads the model's inputs"
        elif layer is not None:
            shown = False
            layer = None if (facts.last if layer[0] == "head" else facts.first) is False else layer
    if layer is None or (layer[0] == "embeddings" and not _is_matrix(site.shape)):
        return None
    return replace(_adamw(*layer, site), guess=not shown)


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def _no_matrix(site: Site, facts: Facts) -> Role | None:
    """Return the role of a vector, a table, or what another matrix is computed from."""
    if len(site.shape) < 2:
        return _adamw("vectors", "bias" if "bias" in site.key else "vector", site)
    if not _is_matrix(site.shape):
        return _adamw("vectors", f"vector: only one dim of {site.shape} is larger than 1", site)
    if any("ParametrizationList" in class_names(module) for _, module in site.owners[:2]):
        reason = "behind torch.nn.utils.parametrize: the matrix that acts is computed from it"
        return _adamw("matrices", reason, site)
    if facts.does == "computed":
        return _adamw("matrices", "in a forward, the matrix that acts is computed from it", site)
    groups = getattr(site.module, "groups", 1) if isinstance(site.module, _ConvNd) else facts.groups
    if groups > 1:
        kind = "depthwise" if groups == site.shape[0] else f"{groups} groups:"
        return _adamw("matrices", f"{kind} convolution: many small filters, not one matrix", site)
    if isinstance(site.module, _ConvTransposeNd):
        return _adamw("matrices", "transposed convolution, stored in × out × kernel", site)
    return None


def _experts(module: nn.Module) -> set[int]:
    counts = (getattr(module, name, None) for name in _EXPERT_COUNTS)
    listed = getattr(module, "experts", None)
    numbers = {count for count in counts if isinstance(count, int) and not isinstance(count, bool)}
    return numbers | {len(listed)} if isinstance(listed, nn.ModuleList) else numbers


def _layer(site: Site, facts: Facts, row: Known | None) -> Role | None:
    """Return the role of the weight of a convolution or of a linear layer."""
    if isinstance(site.module, _ConvNd):
        return _matrix("convolution", site, facts, row)
    linear = isinstance(site.module, nn.Linear)
    if site.key != "weight" or len(site.shape) != 2 or not (linear or "Conv1D" in class_names(site.module)):
        return None
    around = next((m for _, m in site.owners[:2] if linear and site.shape[0] in _experts(m)), None)
    if around is not None:
        return _adamw("matrices", f"router: one output for each expert of {class_of(around)}", site)
    return _matrix("linear", site, facts, row)


def _stack(site: Site, facts: Facts, row: Known | None) -> Role | None:
    """Return the role of a stack of experts, one matrix each, or of their biases."""
    module, shape = site.module, site.shape
    if shape[0] not in _experts(module) and not any("Expert" in name for name in class_names(module)):
        return None
    if len(shape) == 3:
        return _matrix("experts, one matrix each", site, facts, row)
    stacks = [p for p in module._parameters.values() if p is not None and len(global_shape(p)) == 3]
    if len(shape) == 2 and any(global_shape(p)[0] == shape[0] for p in stacks):
        return _adamw("vectors", "biases of experts, one each", site)
    return None


def _bare(site: Site, facts: Facts, row: Known | None) -> Role:
    """Return the role of a parameter of a module that is not known."""
    holder, shape = f"a parameter of {class_of(site.module)}", site.shape
    if facts.does in ("looked up", "added"):
        how = "looks rows of it up" if facts.does == "looked up" else "adds it to activations"
        return _adamw("embeddings", f"a table of {class_of(site.module)}: a forward {how}", site)
    named = row is None and TABLE.search(site.key)
    if shape[0] == 1 or (named and len(shape) == 2):
        return _adamw("embeddings", f"{holder}; going by its name or shape, a table and no matrix", site)
    if facts.stored is not None and not named:
        return _matrix(f"{holder}, by which a forward multiplies", site, facts, row)
    if len(shape) == 2:
        doubt = "" if row is not None and row.certain else ", which is not known: taken as one matrix, out × in"
        return _matrix(f"{holder}{doubt}", site, facts, row)
    return _adamw("matrices", f"{holder}, which is not known: {len(shape)} dims do not tell which are matrices", site)


def _matrix(description: str, site: Site, facts: Facts, row: Known | None) -> Role:
    """Return the role of a weight that is a matrix or a stack of them.

    A cut that a forward shows counts, unless something in it hides further cuts and the class of the module tells them.
    """
    transposed = bool({"Conv1D", "Llama4TextExperts"} & {*class_names(site.module)})
    transposed = transposed or bool(getattr(site.module, "is_transposed", False))  # experts of transformers
    if facts.stored is not None:
        transposed = facts.stored == "in×out"
    kernel = isinstance(site.module, _ConvNd) or facts.groups == 1
    rows = site.shape[-1 if transposed else -2 if len(site.shape) == 3 and not kernel else 0]
    cut, parts, certain = _known_cut(site, row, rows), row.reason if row else "", row is not None and row.certain
    shown = 1 if certain else _count_of(facts.cut, rows)
    if shown > 1 and not (facts.hidden and _count_of(cut, rows) > shown):
        cut, parts = facts.cut, f"a forward cuts its output into {shown} parts"
    notes = f", fused: {parts}" if cut else ""
    spec: Matrices = ("transposed", cut or "whole") if transposed else cut or "whole"
    matrices = by_shape(site.shape, spec, kernel=kernel or len(site.shape) > 3)
    notes += ", stored in × out" if transposed else ""
    guess = not certain and facts.cut is None
    if guess and facts is not _UNSEEN:
        hides = "an operation that reads what it makes hides" if facts.hidden else "a forward does not show"
        notes += f"; {hides} whether it is fused"
    return Role("muon", "matrices", description + notes, matrices, guess=guess)


def _known_cut(site: Site, row: Known | None, rows: int) -> Matrices | None:
    """Return how the table splits the rows of a weight out × in; None: it does not, or the sizes do not fit."""
    cut = 1 if row is None else row.cut
    if isinstance(cut, int):
        cut = "whole" if rows % cut else ("rows", *[rows // cut] * cut)
    elif callable(cut):
        cut = cut(site.layer[1], site)
    return cut if _count_of(cut, rows) > 1 else None


def _count_of(cut: Matrices | None, rows: int) -> int:
    """Return the number of matrices in a split of the rows of a weight; 0 if it does not fit."""
    try:
        return len(parts_of("", (rows, 1), cut or "whole"))
    except ValueError:
        return 0
