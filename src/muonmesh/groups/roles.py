"""Roles: decides for each parameter whether it is a matrix for Muon, or which kind of parameter of AdamW.

The types and attributes of modules and the shapes decide. A parameter's name decides only if nothing else does, and the
reason says so.
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
from torch.nn.utils.parametrize import ParametrizationList

from muonmesh.errors import about, explain_error
from muonmesh.groups.classifiers import classified
from muonmesh.groups.fused import count_of, is_turned, known_cut
from muonmesh.groups.graph import Facts
from muonmesh.groups.input_output_layers import InputOutputLayers, features_of
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
from muonmesh.layout.matrix import as_tuples

PRECEDENCE: tuple[Kind, ...] = ("embeddings", "head", "vectors", "matrices")
"""If a parameter is shared under several names with different roles, the first of these kinds counts."""

# A pattern of "class around/class:name" with all base classes, the kind for AdamW, and the reason; the first counts.
_NAMES: tuple[tuple[str, Kind, str], ...] = (
    (r"/[^:]*Norm(Gated|\dd)?\b[^:]*:", "vectors", "norm"),
    (r"(^|[._:])lora_", "matrices", "factor of a LoRA pair: Muon's update is meant for their product"),
    (r"/(?![^:]*\b(Linear|_ConvNd)\b)[^:]*Embed[^:]*:", "embeddings", "embedding"),
    (r"(Router|Gating|TopKGate|MoEGate)[^:]*:|[._:]router\.weight$", "matrices", "router of experts"),
)
# Names of parameters that unknown modules hold, and that are no matrices.
_TABLE = re.compile(
    r"(^|_)(pos|position|positional|embed|embeddings?|emb|tokens?|query|queries|latents?|probe|table|bias(es)?|d"
    r"|gate|scale|gamma|beta|a_log|dt|sinks?|prompt|prefix|codebook|codevectors|mask|cls|registers?|level)(_|$)",
    re.IGNORECASE,
)
# Names that the Trainer of transformers exempts from decay, and A of state spaces, whose mark wrappers may drop.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)|(^|\.)a_log$")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")


def role(site: Site, layers: InputOutputLayers, facts: Facts | None = None) -> Role:
    """Return the role of the parameter at `site`; `layers` are its ends, and `facts` what a forward showed.

    What a forward showed counts more than names and sizes. What it hides leaves them, and the role is then a guess.

    Raises:
        ValueError: the parameter is flattened, uninitialized or from a traced module, so its role cannot be found.
    """
    _refuse_unknowable(site)
    decided = _declared(site) or classified(site) or _adapter(site) or _named(site)
    decided = decided or _end(site, layers, facts) or _vector(site) or _computed(site, facts)
    if decided is not None:
        return decided
    decided = _layer(site, facts) or _expert(site, facts) or _bare(site, facts)
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
    for name, module in site.owners:
        if inner != "modules_to_save" and inner in (getattr(module, "adapter_layer_names", None) or ()):
            rows = isinstance(getattr(module, "base_layer", None), nn.Embedding)
            kind: Kind = "vectors" if len(site.shape) < 2 else "embeddings" if rows else "matrices"
            reason = f"{inner} of the adapter {class_of(module)}: the matrix that acts is computed from it"
            return _adamw(kind, reason, site)
        inner = name
    return None


def _named(site: Site) -> Role | None:
    """Return the role of a parameter whose class or name tells it."""
    around = ["|".join(class_names(module)) for _, module in site.owners[1::-1]]
    text = f"{'/'.join(['', *around][-2:])}:{site.name}"
    matching = next(((kind, reason) for pattern, kind, reason in _NAMES if re.search(pattern, text)), None)
    if matching is None:
        return None
    kind, reason = matching
    table = isinstance(site.module, nn.Embedding | nn.EmbeddingBag)
    if kind != "vectors" and not table and not _is_matrix(site.shape):
        return None
    return _adamw(kind, f"{reason} ({class_of(site.module)})", site)


def _end(site: Site, layers: InputOutputLayers, facts: Facts | None) -> Role | None:
    if len(site.shape) < 2:
        return None
    layer = next((layers[id(m)] for _, m in site.owners if id(m) in layers), None)
    if facts is not None and facts.does == "multiplies":
        if facts.last:
            layer = "head", "output layer: in a forward, no other layer reads what it makes"
        elif facts.first:
            layer = "embeddings", "input layer: in a forward, it reads the model's inputs"
        elif layer is not None and (facts.last if layer[0] == "head" else facts.first) is False:
            layer = None
    if layer is None or (layer[0] == "embeddings" and not _is_matrix(site.shape)):
        return None
    shown = facts is not None and (facts.does != "multiplies" or facts.last or facts.first)
    return replace(_adamw(*layer, site), guess=not shown)


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def _vector(site: Site) -> Role | None:
    if len(site.shape) < 2:
        return _adamw("vectors", "bias" if "bias" in site.key else "vector", site)
    if not _is_matrix(site.shape):
        return _adamw("vectors", f"vector: only one dim of {site.shape} is larger than 1", site)
    return None


def _computed(site: Site, facts: Facts | None) -> Role | None:
    if facts is not None and facts.does == "computed":
        reason = "in a forward, the matrix that acts is computed from it"
    elif any(isinstance(m, ParametrizationList) for _, m in site.owners[:2]):
        reason = "behind torch.nn.utils.parametrize: the matrix that acts is computed from it"
    else:
        return None
    return _adamw("matrices", reason, site)


def _experts(module: nn.Module) -> set[int]:
    counts = (getattr(module, name, None) for name in _EXPERT_COUNTS)
    listed = getattr(module, "experts", None)
    numbers = {count for count in counts if isinstance(count, int) and not isinstance(count, bool)}
    return numbers | {len(listed)} if isinstance(listed, nn.ModuleList) else numbers


def _layer(site: Site, facts: Facts | None) -> Role | None:
    """Return the role of the weight of a convolution or of a linear layer of any library."""
    module, shape, features = site.module, site.shape, features_of(site.module)
    if isinstance(module, _ConvNd):
        if module.groups > 1:
            kind = "depthwise" if module.groups == module.in_channels else f"{module.groups} groups:"
            return _adamw("matrices", f"{kind} convolution: many small filters, not one matrix", site)
        if isinstance(module, _ConvTransposeNd):
            return _adamw("matrices", "transposed convolution, stored in × out × kernel", site)
        return _matrix("convolution", site, facts)
    if features is None or site.key != "weight" or shape not in (features, features[::-1]):
        return None
    if isinstance(module, nn.Linear):
        around = next((m for _, m in site.owners[:2] if module.out_features in _experts(m)), None)
        if around is not None:
            return _adamw("matrices", f"router: one output for each expert of {class_of(around)}", site)
    return _matrix("linear", site, facts, "Conv1D" in class_names(module) or shape != features)


def _expert(site: Site, facts: Facts | None) -> Role | None:
    """Return the role of a stack of experts in a module that has no other layers, or of their biases."""
    module, shape = site.module, site.shape
    if shape[0] not in _experts(module) and not any("Expert" in name for name in class_names(module)):
        return None
    if len(shape) == 3:
        return _matrix("experts, one matrix each", site, facts, is_turned(module))
    stacks = [p for p in module._parameters.values() if p is not None and len(global_shape(p)) == 3]
    if len(shape) == 2 and any(global_shape(p)[0] == shape[0] for p in stacks):
        return _adamw("vectors", "biases of experts, one each", site)
    return None


def _bare(site: Site, facts: Facts | None) -> Role:
    """Return the role of a parameter of a module that is not known."""
    holder, shape, table = class_of(site.module), site.shape, _TABLE.search(site.key)
    description, fused = f"a parameter of {holder}", known_cut(site, shape[0])
    if len(shape) == 2 and (fused.cut or fused.certain):
        return _matrix(description, site, facts)
    if facts is not None and facts.does == "looked up":
        return _adamw("embeddings", f"a table of {holder}: a forward looks rows of it up", site)
    if facts is not None and facts.does == "added":
        return _adamw("embeddings", f"a table of {holder}: a forward adds it to activations", site)
    if facts is not None and facts.groups > 1:
        return _adamw("matrices", "many small filters of a convolution in groups, not one matrix", site)
    if facts is not None and facts.stored is not None and shape[0] > 1 and not table:
        return _matrix(f"{description}, by which a forward multiplies", site, facts)
    if shape[0] == 1 or (len(shape) == 2 and table):
        return _adamw("embeddings", f"{description}; going by its name or shape, a table and no matrix", site)
    if len(shape) == 2:
        return _matrix(f"{description}, which is not known: taken as one matrix, out × in", site, facts)
    reason = f"{description}, which is not known: {len(shape)} dims do not tell which are matrices"
    return _adamw("matrices", reason, site)


def _matrix(description: str, site: Site, facts: Facts | None, transposed: bool = False) -> Role:
    """Return the role of a weight that is a matrix or a stack of them.

    A cut that a forward shows counts, unless something in it hides further cuts and the class of the module tells them.

    Args:
        description: What the weight is, for the reason.
        site: The parameter.
        facts: What a forward showed of it.
        transposed: Whether it is stored in × out, unless the forward shows it.
    """
    if facts is not None and facts.stored is not None:
        transposed = facts.stored == "in×out"
    kernel = isinstance(site.module, _ConvNd) or (facts is not None and facts.groups == 1)
    rows = site.shape[-1 if transposed else -2 if len(site.shape) == 3 and not kernel else 0]
    cut, parts, certain = known_cut(site, rows)
    shown = 1 if facts is None or certain else count_of(facts.cut, rows)
    if facts is not None and shown > 1 and not (facts.hidden and count_of(cut, rows) > shown):
        cut, parts = facts.cut, f"a forward cuts its output into {shown} parts"
    notes = f", fused: {parts}" if cut else ""
    spec: Matrices = ("transposed", cut or "whole") if transposed else cut or "whole"
    matrices = by_shape(site.shape, spec, kernel=kernel or len(site.shape) > 3)
    notes += ", stored in × out" if transposed else ""
    doubtful = not certain and facts is not None and facts.cut is None
    if doubtful and facts is not None:
        hides = "an operation that reads what it makes hides" if facts.hidden else "a forward does not show"
        notes += f"; {hides} whether it is fused"
    return Role("muon", "matrices", description + notes, matrices, guess=not certain and (facts is None or doubtful))
