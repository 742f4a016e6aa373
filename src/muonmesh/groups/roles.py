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
from muonmesh.groups.ends import Ends, features_of
from muonmesh.groups.graph import Seen
from muonmesh.groups.sites import Kind, Matrices, Role, Site, class_names, class_of, global_shape
from muonmesh.layout.matrix import as_tuples

PRECEDENCE: tuple[Kind, ...] = ("embeddings", "head", "vectors", "matrices")
"""If a parameter is shared under several names with different roles, the first of these kinds counts."""

_NORM = re.compile(r"Norm(Gated|\dd)?$")
_ROUTER = re.compile(r"Router|Gating|TopKGate|MoEGate")
# Names that the Trainer of transformers exempts from decay, and A of state spaces, whose mark wrappers may drop.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)|(^|\.)a_log$")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_NOT_A_MATRIX = re.compile(
    r"(^|_)(pos|position|positional|embed|embeddings?|emb|tokens?|query|queries|latents?|probe|table|bias(es)?|d"
    r"|gate|scale|gamma|beta|a_log|dt|sinks?|prompt|prefix|codebook|codevectors|mask|cls|registers?|level)(_|$)",
    re.IGNORECASE,
)


def role(site: Site, known: Ends, seen: Seen | None = None) -> Role:
    """Return the role of the parameter at `site`; `known` comes from `ends`, and `seen` from a forward.

    What a forward showed counts more than names and sizes.

    Raises:
        ValueError: the parameter is flattened, uninitialized or from a traced module, so its role cannot be found.
    """
    _refuse_unknowable(site)
    found = _declared(site) or classified(site) or _adapter(site)
    if found is None and (end := _end(site, known, seen)) is not None:
        return end
    found = found or _embedding(site) or _vector(site) or _parametrised(site) or _computed(site, seen)
    found = found or _torch_fused(site)
    if found is not None:
        return found
    expert = _expert(site, seen)
    if expert is None and (found := _router(site)) is not None:
        return found
    found = expert or _convolution(site, seen) or _linear(site, seen) or _unknown(site, seen)
    if seen is not None and seen.hidden and seen.cut is None:
        hides = "an autograd function that reads what it makes hides whether it is fused"
        return replace(found, reason=f"{found.reason}; {hides}", guess=True)
    return replace(found, guess=seen is None)


def shared_roles(same: Sequence[Site], known: Ends, seen: Seen | None) -> list[Role]:
    """Return the roles of one parameter at all its places; the first is the role that counts."""
    roles = [role(site, known, seen) for site in same]
    if same[0].parameter.is_complex():  # its parts are stepped, as in torch.optim
        roles = [replace(r, algorithm="adamw", guess=False, reason=f"complex numbers ({r.reason})") for r in roles]
    return sorted(roles, key=lambda r: PRECEDENCE.index(r.kind))


def _refuse_unknowable(site: Site) -> None:
    parameter, module = site.parameter, site.module
    if isinstance(parameter, UninitializedParameter):
        found = f"a parameter of the lazy module {class_of(module)}, which has no shape yet"
        write = "Run one forward pass before split_params(model)"
        raise ValueError(explain_error(site.name, found, "its shape", write))
    if "InterpreterModule" in class_names(module):  # of torch.export, also in torch.distributed.pipelining.pipeline
        what = "The module of this parameter was traced and has lost its class, so nothing says whether the parameter "
        what += "is a matrix or an embedding. Write split_params(model).held_by(stage), with the model from before "
        what += "tracing"
        raise ValueError(about(site.name, what))
    flat = getattr(parameter, "_is_flat_param", False)
    weight = isinstance(module, nn.Linear | _ConvNd | nn.Embedding) and site.key == "weight"
    if flat or (weight and len(site.shape) < 2):
        found = f"a weight of {class_of(module)} flattened to shape {site.shape}"
        needed = "the weight with its own shape, because a flat piece would be trained as a vector"
        write = "Call split_params(model) before the wrapper that flattens (FSDP1, ZeRO), or shard with fully_shard"
        raise ValueError(explain_error(site.name, found, needed, write))


def _adamw(kind: Kind, reason: str, matrices: Matrices | None) -> Role:
    return Role("adamw", kind, reason, matrices)


def _muon(reason: str, matrices: Matrices) -> Role:
    return Role("muon", "matrices", reason, matrices)


def by_shape(shape: tuple[int, ...]) -> Matrices | None:
    """Return the split of a parameter of which only the shape is known; None if the shape does not decide it."""
    return {2: "whole", 3: "stack"}.get(len(shape))


def declared_by(module: nn.Module) -> Mapping[str, Any]:
    """Return `muonmesh_matrices` of a module or of its class (not of a wrapped module), or an empty mapping."""
    declared = inspect.getattr_static(module, "muonmesh_matrices", {})
    if not isinstance(declared, Mapping):
        found = f"muonmesh_matrices = {declared!r}"
        write = 'Write muonmesh_matrices = {"weight": ("rows", ...)}'
        raise TypeError(explain_error(class_of(module), found, "a dict from its parameters' names", write))
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
        exempt, parts = getattr(module, "no_weight_decay", None), getattr(module, "no_weight_decay_keywords", None)
        if (callable(exempt) and key in exempt()) or (callable(parts) and any(part in key for part in parts())):
            return f"no_weight_decay() of {class_of(module)}"
    return "its name" if _NO_DECAY.search(site.name.lower()) else None


def _declared(site: Site) -> Role | None:
    found = next(declarations(site), None)
    if found is None:
        return None
    module, key = found
    matrices = declared_by(module)[key]
    reason = f"muonmesh_matrices of {class_of(module)}"
    if matrices is None:
        return _adamw("matrices" if len(site.shape) > 1 else "vectors", reason, by_shape(site.shape))
    return _muon(reason, as_tuples(matrices))


def _adapter(site: Site) -> Role | None:
    # peft holds a pair as two ModuleDicts (ParameterDicts for embeddings) of one layer.
    names = {name for name, _ in site.owners[:2]} | {site.key}
    for pair in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if names & set(pair) and any(all(hasattr(m, part) for part in pair) for _, m in site.owners[:3]):
            # The product of orthogonalized factors is not orthogonal, but Muon's update should be.
            kind: Kind = "matrices" if len(site.shape) > 1 else "vectors"
            return _adamw(kind, "factor of a LoRA pair: Muon's update is meant for their product", by_shape(site.shape))
    inner = site.key
    for name, module in site.owners:
        if inner != "modules_to_save" and inner in (getattr(module, "adapter_layer_names", None) or ()):
            rows = isinstance(getattr(module, "base_layer", None), nn.Embedding)
            kind = "vectors" if len(site.shape) < 2 else "embeddings" if rows else "matrices"
            reason = f"{inner} of the adapter {class_of(module)}: the matrix that acts is computed from it"
            return _adamw(kind, reason, by_shape(site.shape))
        inner = name
    return None


def _end(site: Site, known: Ends, seen: Seen | None) -> Role | None:
    if len(site.shape) < 2:
        return None
    found = next((known[id(m)] for _, m in site.owners if id(m) in known), None)
    if seen is not None and seen.does == "multiplies":
        if seen.last:
            found = "head", "output layer: in a forward, no other layer reads what it makes"
        elif seen.first:
            found = "embeddings", "input layer: in a forward, it reads the model's inputs"
        elif found is not None and (seen.last if found[0] == "head" else seen.first) is False:
            found = None
    if found is None or (found[0] == "embeddings" and not _is_matrix(site.shape)):
        return None
    matrices = "flatten" if isinstance(site.module, _ConvNd) else by_shape(site.shape)
    return replace(_adamw(*found, matrices), guess=seen is None)


def _embedding(site: Site) -> Role | None:
    module = site.module
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if table or (_is_matrix(site.shape) and any("Embed" in n for n in class_names(module)) and not features_of(module)):
        return _adamw("embeddings", f"embedding ({class_of(module)})", by_shape(site.shape))
    return None


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def _vector(site: Site) -> Role | None:
    module, shape = site.module, site.shape
    if any(_NORM.search(name) for name in class_names(module)):
        return _adamw("vectors", f"norm ({class_of(module)})", None)
    if len(shape) < 2:
        return _adamw("vectors", "bias" if "bias" in site.key else "vector", None)
    if not _is_matrix(shape):
        return _adamw("vectors", f"vector: only one dim of {shape} is larger than 1", None)
    return None


def _parametrised(site: Site) -> Role | None:
    if any(isinstance(m, ParametrizationList) for _, m in site.owners[:2]):
        reason = "behind torch.nn.utils.parametrize: the matrix that acts is computed from it"
        return _adamw("matrices", reason, "flatten" if len(site.shape) > 3 else by_shape(site.shape))
    return None


def _computed(site: Site, seen: Seen | None) -> Role | None:
    if seen is None or seen.does not in ("computed", "pair"):
        return None
    if seen.does == "pair":
        reason = "factor of a low-rank pair beside a layer (LoRA): Muon's update is meant for their product"
    else:
        reason = "in a forward, the matrix that acts is computed from it"
    return _adamw("matrices", reason, "flatten" if len(site.shape) > 3 else by_shape(site.shape))


def _torch_fused(site: Site) -> Role | None:
    module, (rows, *_) = site.module, site.shape
    if isinstance(module, nn.MultiheadAttention) and len(site.shape) == 2:
        if site.key == "in_proj_weight":
            return _muon("attention: q, k, v", ("rows", rows // 3, rows // 3, rows // 3))
        return _muon(f"attention: {site.key.split('_')[0]}", "whole")
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and site.key.startswith("weight_"):
        hidden = module.hidden_size
        if site.key.startswith("weight_hr") or rows == hidden:
            return _muon("recurrent weight", "whole")
        return _muon(f"recurrent weights: {rows // hidden} gates", ("rows", *[hidden] * (rows // hidden)))
    return None


def _experts(module: nn.Module) -> set[int]:
    counts = (getattr(module, name, None) for name in _EXPERT_COUNTS)
    listed = getattr(module, "experts", None)
    found = {count for count in counts if isinstance(count, int) and not isinstance(count, bool)}
    return found | {len(listed)} if isinstance(listed, nn.ModuleList) else found


def _expert(site: Site, seen: Seen | None) -> Role | None:
    module, shape = site.module, site.shape
    if isinstance(module, _ConvNd):
        return None
    if shape[0] not in _experts(module) and not any("Expert" in name for name in class_names(module)):
        return None
    if len(shape) == 3:
        matrices, told = _stored(seen)
        return _muon(f"experts, one matrix each{told}", "stack" if matrices == "whole" else ("stack", matrices))
    stacks = [p for p in module._parameters.values() if p is not None and len(global_shape(p)) == 3]
    if len(shape) == 2 and any(global_shape(p)[0] == shape[0] for p in stacks):
        return _adamw("vectors", "biases of experts, one each", "whole")
    return None


def _router(site: Site) -> Role | None:
    if len(site.shape) != 2:
        return None
    around = [module for _, module in site.owners[:2]]
    named = next((m for m in around if any(_ROUTER.search(name) for name in class_names(m))), None)
    if named is not None:
        return _adamw("matrices", f"router of experts ({class_of(named)})", "whole")
    if isinstance(site.module, nn.Linear) and re.search("(^|_)router$", site.owners[0][0]):
        return _adamw("matrices", f"router, going by its name in {class_of(around[-1])}", "whole")
    if isinstance(site.module, nn.Linear) and any(site.module.out_features in _experts(m) for m in around):
        return _adamw("matrices", f"router: one output for each expert of {class_of(around[-1])}", "whole")
    return None


def _convolution(site: Site, seen: Seen | None) -> Role | None:
    module = site.module
    if not isinstance(module, _ConvNd):
        return None
    if module.groups > 1:
        what = "depthwise" if module.groups == module.in_channels else f"{module.groups} groups:"
        return _adamw("matrices", f"{what} convolution: many small filters, not one matrix", "flatten")
    if isinstance(module, _ConvTransposeNd):
        return _adamw("matrices", "transposed convolution, stored in × out × kernel", "flatten")
    matrices, told = _stored(seen)
    return _muon(f"convolution{told}", "flatten" if matrices == "whole" else ("flatten", matrices))


def _stored(seen: Seen | None, transposed: bool = False) -> tuple[Matrices, str]:
    """Return the split of one matrix as it is stored, and a text of what a forward showed."""
    cut = None if seen is None else seen.cut
    told = f", fused: a forward cuts its output into {_count(cut)} parts" if cut else ""
    if seen is not None and seen.stored is not None:
        transposed = seen.stored == "in×out"
    return (("transposed", cut or "whole"), f"{told}, stored in × out") if transposed else (cut or "whole", told)


def _count(cut: Matrices) -> int:
    sizes = cut[1:]
    return len(sizes) if cut[0] == "rows" else len(sizes[0]) if isinstance(sizes[0], tuple) else int(sizes[0])


def _linear(site: Site, seen: Seen | None) -> Role | None:
    module, shape, features = site.module, site.shape, features_of(site.module)
    if features is None or site.key != "weight" or len(shape) != 2:
        return None
    out, into = features
    transposed = "Conv1D" in class_names(module) or (shape == (into, out) and shape != (out, into))
    if not transposed and shape != (out, into):
        return None
    matrices, told = _stored(seen, transposed)
    return _muon(f"linear{told}", matrices)


def _unknown(site: Site, seen: Seen | None) -> Role:
    where, shape = class_of(site.module), site.shape
    if seen is not None and seen.does == "looked up":
        return _adamw("embeddings", f"a table of {where}: a forward looks rows of it up", by_shape(shape))
    if seen is not None and seen.grouped:
        return _adamw("matrices", "many small filters of a convolution in groups, not one matrix", by_shape(shape))
    if seen is not None and seen.stored is not None and shape[0] > 1 and not _NOT_A_MATRIX.search(site.key):
        matrices, told = _stored(seen)
        reason = f"a parameter of {where}, by which a forward multiplies{told}"
        if len(shape) == 3:
            matrices = "stack" if matrices == "whole" else ("stack", matrices)
        if len(shape) > 3:
            matrices = "flatten" if matrices == "whole" else ("flatten", matrices)
        return _muon(reason, matrices)
    if len(shape) == 2 and not _NOT_A_MATRIX.search(site.key):
        return _muon(f"a parameter of {where}, which is not known: taken as one matrix, out × in", "whole")
    if len(shape) == 2:
        return _adamw("embeddings", f"a parameter of {where}; going by its name, a table and no matrix", "whole")
    if shape[0] == 1:
        return _adamw("embeddings", f"a table of {where}: a leading dim of 1", by_shape(shape))
    reason = f"a parameter of {where}, which is not known: {len(shape)} dims do not tell which are matrices"
    return _adamw("matrices", reason, by_shape(shape))
