"""What each parameter is to the module that holds it: a matrix for Muon, or something for AdamW.

Decided by the type and the attributes of the modules and by shapes. A parameter's name decides only where nothing
else tells, and the reason says so.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from muonmesh.errors import about, explain_error
from muonmesh.groups.classifiers import classified
from muonmesh.groups.fused_projections import (
    LOOKS_FUSED,
    Matrices,
    class_names,
    expert_order,
    fused_order,
    global_shape,
)
from muonmesh.groups.heads import named_parts
from muonmesh.groups.reading import cut_by_code
from muonmesh.groups.sites import Kind, Role, Site, class_of, unwrapped
from muonmesh.layout.matrix import as_tuples

Ends = Mapping[int, tuple[Kind, str]]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

GUESS = "; a guess, for no stack of blocks comes before it"
"""Ends the reason for a head that may as well be the last layer of a pipeline stage."""

_NORM = re.compile(r"Norm(Gated|\dd)?$")
_ROUTER = re.compile(r"Router|Gating|TopKGate|MoEGate")
# What the Trainer of transformers exempts from decay by name, and A of state spaces, whose mark wrappers may drop.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)|(^|\.)a_log$")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_NOT_A_MATRIX = re.compile(
    r"(^|_)(pos|position|positional|embed|embeddings?|emb|tokens?|query|queries|latents?|probe|table|bias(es)?|d"
    r"|gate|scale|gamma|beta|a_log|dt|sinks?|prompt|prefix|codebook|codevectors|mask|cls|registers?|level)(_|$)",
    re.IGNORECASE,
)


def ends(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """The modules where the model meets its data, by id: as what they are trained, and how that is known.

    Output layers:

    1. What a module names as such: `get_output_embeddings()` (transformers), `get_classifier()` (timm), and layers
       beside it that are as wide. Of a module of several layers it is the last.
    2. In a transformers model, outside its base model: a layer onto the labels or the vocabulary, and one whose
       output no later layer out there can read. Directly in the model, if it has no base model: onto the labels.
    3. In any other model: the last linear or convolution registered, if it is inside no block, that is reached
       through containers only. Where no stack of blocks comes before it, that is a guess, and the reason says so.

    Input layers: see `_input_layers`. A pipeline stage is to get what the whole model gets, so a block that is alone in
    it is no model.
    """
    found: dict[int, tuple[Kind, str]] = {}
    inner: set[int] = set()  # the models inside a transformers model, whose outputs it reads
    for module in model.modules():
        for method in ("get_output_embeddings", "get_classifier"):
            if not callable(getattr(module, method, None)):
                continue
            try:
                named = [_final(layer) for layer in _modules_of(getattr(module, method)())]
            except (AttributeError, NotImplementedError):  # a pipeline stage without the head; a backbone
                continue
            widths = {_outputs(layer) for layer in named} - {None}
            beside = [child for child in map(unwrapped, module.children()) if _outputs(child) in widths]
            for layer in (*named, *beside):
                found.setdefault(id(layer), ("head", f"output layer: {method}() of {class_of(module)}"))
        for layer, how in _label_layers(module, outermost=id(module) not in inner):
            found.setdefault(id(unwrapped(layer)), ("head", f"output layer: {how} {class_of(module)}"))
        if hasattr(module, "base_model_prefix"):
            inner.update(map(id, module.modules()))
    body = _body(model)
    if not hasattr(body, "base_model_prefix") and (last := _last_layer(body)) is not None:
        layer, known = last
        how = "output layer: the model's last layer, inside no block" + ("" if known else GUESS)
        found.setdefault(id(layer), ("head", how))
    for layer, kind, how in _input_layers(model):
        found.setdefault(id(layer), (kind, how))
    return found


def _modules_of(value: Any) -> Iterator[nn.Module]:
    """The modules in what a model returns as its output layers: one, or several in containers."""
    if isinstance(value, nn.ModuleDict | Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | nn.ModuleList):
        for part in value:
            yield from _modules_of(part)
    elif isinstance(value, nn.Module):
        yield unwrapped(value)


def _final(module: nn.Module) -> nn.Module:
    """The last layer of a module that computes an output; an adapter's wrapper stands for the layer in it."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | _ConvNd)]
    return module if not layers or hasattr(module, "base_layer") else layers[-1]


def _label_layers(module: nn.Module, outermost: bool) -> Iterator[tuple[nn.Module, str]]:
    config, prefix = getattr(module, "config", None), getattr(module, "base_model_prefix", None)
    base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
    if config is None or prefix is None or base is module:
        return
    cut_away = isinstance(prefix, str) and base is None and hasattr(module, prefix)  # a pipeline stage without it
    labels = getattr(config, "num_labels", None)
    sizes = {labels, labels + 1 if isinstance(labels, int) else None, getattr(config, "vocab_size", None)} - {None}
    inside = {id(m) for m in base.modules()} if isinstance(base, nn.Module) else set()
    outside = [m for m in (module.modules() if inside or cut_away else module.children()) if id(m) not in inside]
    layers = [layer for layer in outside if _outputs(layer) is not None]
    for number, layer in enumerate(layers):
        if _outputs(layer) in sizes:
            yield layer, "onto the labels of"
        elif inside and outermost and all(_inputs(later) != _outputs(layer) for later in layers[number + 1 :]):
            yield layer, "outside the base model, and no later layer there can read it, in"


def _input_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Kind, str]]:
    """The layers that read data: no layer registered before them makes numbers of which theirs may consist.

    That is a convolution of at most 4 channels anywhere. In models of transformers and timm, which are whole, it is any
    layer inside no block, or of at most 4 inputs (coordinates). What a pipeline stage lacks could have made anything.

    In such a model a linear map outside the blocks is an output layer if it makes 2 to 4 numbers, or as many as an
    input layer reads and no other layer does: it tells the data.
    """
    whole = any(
        hasattr(m, "base_model_prefix") or callable(getattr(m, "get_classifier", None)) for m in model.modules()
    )
    everything = list(model.modules())
    made: set[int] = set()
    in_blocks: set[int] = set()  # what blocks make is no data, unless nothing else in the model could read data
    if any(isinstance(m, nn.Embedding) or (isinstance(m, _ConvNd) and m.in_channels <= 4) for m in everything):
        blocks = [
            c for m in everything if isinstance(m, _CONTAINERS) for c in m.children() if _is_block(unwrapped(c), m)
        ]
        in_blocks = {out for block in blocks for m in block.modules() if (out := _outputs(m)) is not None}

    entire, data = whole, Counter[int]()  # how many input layers read so many inputs

    def walk(module: nn.Module, blocked: bool) -> Iterator[tuple[nn.Module, Kind, str]]:
        nonlocal whole
        for child in module._modules.values():
            if child is None:
                whole = False
                continue
            child = unwrapped(child)
            convolution = isinstance(child, _ConvNd)
            out, into = _outputs(child), _inputs(child)
            if out is not None and into is not None:
                plain = not convolution or (child.groups == 1 and not isinstance(child, _ConvTransposeNd))
                coordinates = into <= 4 and whole and not convolution
                makers = set(map(_outputs, module.children())) if coordinates else made  # boxes are read anew
                foreign = plain and not any(into == w or (w and w >= 16 and into % w == 0) for w in makers)
                narrow = coordinates or (into <= 4 and convolution)
                if foreign and (narrow or (whole and not blocked and into not in in_blocks)):
                    what = f"{'convolution' if convolution else 'linear map'} of {into} inputs, made by no layer"
                    data[into] += not convolution
                    yield child, "embeddings", f"input layer: {what}"
                elif (
                    entire
                    and not blocked
                    and not convolution
                    and (1 < out <= 4 or 0 < data[out] == sum(_inputs(m) == out for m in everything))
                ):
                    yield child, "head", f"output layer: {out} numbers, outside the blocks"
                made.add(out)
            elif isinstance(child, nn.Embedding | nn.EmbeddingBag):
                made.add(child.embedding_dim)
            yield from walk(child, blocked or (isinstance(module, _CONTAINERS) and _is_block(child, module)))

    yield from walk(nn.ModuleList([model]) if isinstance(model, _ConvNd) else model, False)


def _outputs(layer: nn.Module) -> int | None:
    return layer.out_channels if isinstance(layer, _ConvNd) else (_features(layer) or (None, None))[0]


def _inputs(layer: nn.Module) -> int | None:
    return layer.in_channels if isinstance(layer, _ConvNd) else (_features(layer) or (None, None))[1]


def _body(model: nn.Module) -> nn.Module:
    """The model inside wrappers of any kind: as long as one child holds all the parameters, the innermost model."""
    body = model = unwrapped(model)
    while not hasattr(model, "base_model_prefix"):  # a transformers model is no wrapper
        children = [c for c in model.children() if next(c.parameters(), None) is not None]
        if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
            break
        lightning = "LightningModule" in class_names(model)
        model = unwrapped(children[0])
        if lightning or _is_model(model):
            body = model
    return body


def _is_model(module: nn.Module) -> bool:
    """Whether it shows that it is more than one block of a model: it holds an embedding or a stack of blocks."""
    if hasattr(module, "base_model_prefix"):
        return True
    children = [unwrapped(child) for child in module.children()]
    return not isinstance(module, _CONTAINERS) and any(isinstance(c, nn.Embedding) or _is_stack(c) for c in children)


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a container of blocks, or an empty one, of which a pipeline stage has none."""
    if not isinstance(module, _CONTAINERS):
        return False
    children = [unwrapped(child) for child in module.children()]
    return not children or any(_is_block(child, module) or _is_stack(child) for child in children)


def _is_block(module: nn.Module, container: nn.Module) -> bool:
    """Whether it is a module of several layers, rather than a layer or a container of such."""
    if isinstance(module, nn.Sequential):  # an entry of a list is one block
        return isinstance(container, nn.ModuleList) or (
            isinstance(container, nn.ModuleDict) and all(key.isdecimal() for key in container)
        )
    if isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, nn.EmbeddingBag, *_CONTAINERS)):
        return False
    return any(len(global_shape(p)) > 1 for p in module.parameters())


def _last_layer(body: nn.Module) -> tuple[nn.Module, bool] | None:
    """The last linear or convolution, if it is inside no block, and whether a stack of blocks comes before it."""
    layers = [m for m in body.modules() if isinstance(m, nn.Linear | _ConvNd)]
    last: nn.Module | None = None
    stacked = stacked_before = more = False

    def walk(module: nn.Module) -> None:
        nonlocal last, stacked, stacked_before, more
        for child in module._modules.values():
            if child is None:
                more = True
                continue
            child = unwrapped(child)
            if isinstance(child, nn.Linear | _ConvNd):
                last, stacked_before, more = child, stacked, False
            elif _is_block(child, module):
                stacked = stacked or isinstance(module, _CONTAINERS)
            elif isinstance(child, _CONTAINERS):
                if next(child.children(), None) is None:
                    stacked = more = True
                walk(child)

    walk(body)
    if last is None or last is not layers[-1] or more:  # more: what a pipeline stage leaves of what comes later
        return None
    # What comes out as wide as it went in may be followed by itself: one block of a model, as far as can be known.
    pixels = isinstance(layers[0], _ConvNd) and not isinstance(last, _ConvNd)
    if not stacked_before and not pixels and _outputs(last) == _inputs(layers[0]):
        return None
    return last, stacked_before


def role(site: Site, known: Ends) -> Role:
    """What the parameter at `site` is; `known` comes from `ends`.

    Raises:
        ValueError: the parameter is no longer the module's own (flattened, uninitialised, traced), so that nothing says
            what it is.
    """
    _refuse_unknowable(site)
    found = _declared(site) or classified(site)
    for rule in (_adapter, _end, _embedding, _vector, _parametrised, _torch_fused):
        found = found or rule(site, known)
    for rule in (_expert, _router, _convolution, _linear):
        found = found or rule(site, known)
    return found or _unknown(site)


def _refuse_unknowable(site: Site) -> None:
    parameter, module = site.parameter, site.module
    if isinstance(parameter, UninitializedParameter):
        found = f"a parameter of the lazy module {class_of(module)}, which has no shape yet"
        raise ValueError(
            explain_error(site.name, found, "its shape", "Run one forward pass before split_params(model)")
        )
    if "InterpreterModule" in class_names(module):  # torch.export's, also of torch.distributed.pipelining.pipeline
        what = (
            "The module of this parameter was traced and has lost its class, so nothing says whether the parameter is "
        )
        what += "a matrix or an embedding. Write split_params(model).held_by(stage), with the model from before tracing"
        raise ValueError(about(site.name, what))
    flat = getattr(parameter, "_is_flat_param", False)
    weight = isinstance(module, nn.Linear | _ConvNd | nn.Embedding) and site.key == "weight"
    if flat or (weight and len(site.shape) < 2):
        raise ValueError(
            explain_error(
                site.name,
                f"a weight of {class_of(module)} flattened to shape {site.shape}",
                "the weight with its own shape, because a flat piece would be trained as a vector",
                "Call split_params(model) before the wrapper that flattens (FSDP1, ZeRO), or shard with fully_shard",
            )
        )


def _adamw(kind: Kind, reason: str, matrices: Matrices | None) -> Role:
    return Role("adamw", kind, reason, matrices)


def _muon(reason: str, matrices: Matrices) -> Role:
    return Role("muon", "matrices", reason, matrices)


def by_shape(shape: tuple[int, ...]) -> Matrices | None:
    """The matrices of a parameter of which nothing but its shape is known; None: the shape does not tell."""
    return {2: "whole", 3: "stack"}.get(len(shape))


def declared_by(module: nn.Module) -> Mapping[str, Any]:
    """What `module` says of its parameters in `muonmesh_matrices` (its own or its class's, not a wrapped module's)."""
    declared = inspect.getattr_static(module, "muonmesh_matrices", {})
    if not isinstance(declared, Mapping):
        found = f"muonmesh_matrices = {declared!r}"
        write = 'Write muonmesh_matrices = {"weight": ("rows", ...)}'
        raise TypeError(explain_error(class_of(module), found, "a dict from its parameters' names", write))
    return declared


def declarations(site: Site) -> Iterator[tuple[nn.Module, str]]:
    """The modules around `site` whose `muonmesh_matrices` has an entry for it, and its key there, nearest first."""
    key = site.key
    for name, module in site.owners:
        if key in declared_by(module):
            yield module, key
        key = f"{name}.{key}"


def without_decay(site: Site) -> str | None:
    """Say who exempts a parameter from weight decay; None: nobody.

    That is its own `_no_weight_decay` (Mamba), `no_weight_decay()` of a module around it (timm), or the names that the
    Trainer of transformers exempts.
    """
    if getattr(site.parameter, "_no_weight_decay", False):
        return "_no_weight_decay"
    key = site.key
    for name, module in site.owners:
        exempt, parts = getattr(module, "no_weight_decay", None), getattr(module, "no_weight_decay_keywords", None)
        if (callable(exempt) and key in exempt()) or (callable(parts) and any(part in key for part in parts())):
            return f"no_weight_decay() of {class_of(module)}"
        key = f"{name}.{key}"
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
    if len(site.shape) < 2:
        given = f"{matrices!r} from {reason} for a parameter of shape {site.shape}"
        raise ValueError(explain_error(site.name, given, "two or more dims", f"Write {key!r}: None there, for AdamW"))
    return _muon(reason, as_tuples(matrices))


def _adapter(site: Site, known: Ends) -> Role | None:
    # peft holds a pair as two ModuleDicts (ParameterDicts for embeddings) of one layer, which names what it adds.
    names = {name for name, _ in site.owners[:2]} | {site.key}
    for pair in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if names & set(pair) and any(all(hasattr(m, part) for part in pair) for _, m in site.owners[:3]):
            # Orthogonal factors do not make an orthogonal product, which is what Muon is about.
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


def _end(site: Site, known: Ends) -> Role | None:
    if len(site.shape) < 2:
        return None
    found = next((known[id(m)] for _, m in site.owners if id(m) in known), None)
    if found is None or (found[0] == "embeddings" and not _is_matrix(site.shape)):
        return None
    return _adamw(*found, "flatten" if isinstance(site.module, _ConvNd) else by_shape(site.shape))


def _embedding(site: Site, known: Ends) -> Role | None:
    module = site.module
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if table or (_is_matrix(site.shape) and any("Embed" in n for n in class_names(module)) and not _features(module)):
        return _adamw("embeddings", f"embedding ({class_of(module)})", by_shape(site.shape))
    return None


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def _vector(site: Site, known: Ends) -> Role | None:
    module, shape = site.module, site.shape
    norm = isinstance(module, nn.LayerNorm | nn.GroupNorm | _NormBase) or any(
        _NORM.search(name) for name in class_names(module)
    )
    if norm:
        return _adamw("vectors", f"norm ({class_of(module)})", None)
    if len(shape) < 2:
        return _adamw("vectors", "bias" if "bias" in site.key else "vector", None)
    if not _is_matrix(shape):
        return _adamw("vectors", f"vector: only one dim of {shape} is larger than 1", None)
    return None


def _parametrised(site: Site, known: Ends) -> Role | None:
    if any(isinstance(m, ParametrizationList) for _, m in site.owners[:2]):
        reason = "behind torch.nn.utils.parametrize: the matrix that acts is computed from it"
        return _adamw("matrices", reason, "flatten" if len(site.shape) > 3 else by_shape(site.shape))
    return None


def _torch_fused(site: Site, known: Ends) -> Role | None:
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
    return {count for count in counts if isinstance(count, int) and not isinstance(count, bool)}


def _expert(site: Site, known: Ends) -> Role | None:
    module, shape = site.module, site.shape
    if isinstance(module, _ConvNd):
        return None
    if shape[0] not in _experts(module) and not any("Expert" in name for name in class_names(module)):
        return None
    if len(shape) == 3:
        matrices, reason = expert_order(module, site.key, shape)
        return replace(_muon(reason, matrices), guess="looks fused" in reason)
    stacks = [p for p in module._parameters.values() if p is not None and len(global_shape(p)) == 3]
    if len(shape) == 2 and any(global_shape(p)[0] == shape[0] for p in stacks):
        return _adamw("vectors", "biases of experts, one each", "whole")
    return None


def _router(site: Site, known: Ends) -> Role | None:
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


def _convolution(site: Site, known: Ends) -> Role | None:
    module = site.module
    if not isinstance(module, _ConvNd):
        return None
    if module.groups > 1:
        what = "depthwise" if module.groups == module.in_channels else f"{module.groups} groups:"
        return _adamw("matrices", f"{what} convolution: many small filters, not one matrix", "flatten")
    if isinstance(module, _ConvTransposeNd):
        return _adamw("matrices", "transposed convolution, stored in × out × kernel", "flatten")
    matrices, fused, guess = _parts(site, module.out_channels, module.in_channels)
    flattened: Matrices = "flatten" if matrices == "whole" else ("flatten", matrices)
    return replace(_muon(f"convolution{fused}", flattened), guess=guess)


def _parts(site: Site, out: int, into: int) -> tuple[Matrices, str, bool]:
    """Return how the `out` rows of a layer split, how that is known, and whether it is not.

    What holds nothing but the layer, such as a convolution and its norm, stands for the layer.
    """
    for (attribute, _), (_, owner) in itertools.pairwise(site.owners):
        convolution = isinstance(site.module, _ConvNd)
        if (order := fused_order(owner, attribute, out)) is not None:
            matrices, parts = order
            return matrices, f", fused: {parts} ({class_of(owner)})", False
        if (
            named_parts(attribute) not in (("q",), ("k",), ("v",))
            and (read := cut_by_code(owner, attribute, out, convolution)) is not None
        ):
            return read, f", fused: as the code of {class_of(owner)} cuts its output", False
        if LOOKS_FUSED.search(attribute) and out > into:
            return "whole", f"; {attribute!r} may be fused, but how {class_of(owner)} stores it is not known", True
        if sum(len(global_shape(p)) > 1 for p in owner.parameters()) > 1:
            break
    return "whole", "", False


def _features(module: nn.Module) -> tuple[int, int] | None:
    """(out, in) of a linear layer of any library, by the attributes that state them."""
    if "Conv1D" in class_names(module) and isinstance(out := getattr(module, "nf", None), int):
        weight = module._parameters.get("weight")
        shape = global_shape(weight) if weight is not None else ()
        return (out, shape[0]) if len(shape) == 2 and shape[1] == out else None
    for names in (("out_features", "in_features"), ("output_size", "input_size")):
        out, into = (getattr(module, name, None) for name in names)
        if isinstance(out, int) and isinstance(into, int):
            return out, into
    return None


def _linear(site: Site, known: Ends) -> Role | None:
    module, shape, features = site.module, site.shape, _features(site.module)
    if features is None or site.key != "weight" or len(shape) != 2:
        return None
    out, into = features
    transposed = "Conv1D" in class_names(module) or (shape == (into, out) and shape != (out, into))
    if not transposed and shape != (out, into):
        return None
    matrices, fused, guess = _parts(site, out, into)
    reason = f"linear{fused}"
    if transposed:
        matrices, reason = ("transposed", matrices), f"{reason}, stored in × out"
    return replace(_muon(reason, matrices), guess=guess)


def _unknown(site: Site) -> Role:
    where, shape = class_of(site.module), site.shape
    if len(shape) == 2 and not _NOT_A_MATRIX.search(site.key):
        reason = f"a parameter of {where}, which is not known: taken as one matrix, out × in"
        return replace(_muon(reason, "whole"), guess=True)
    if len(shape) == 2:
        return _adamw("embeddings", f"a parameter of {where}; going by its name, a table and no matrix", "whole")
    if shape[0] == 1:
        return _adamw("embeddings", f"a table of {where}: a leading dim of 1", by_shape(shape))
    reason = f"a parameter of {where}, which is not known: {len(shape)} dims do not tell which are matrices"
    return _adamw("matrices", reason, by_shape(shape))
