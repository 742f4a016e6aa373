"""Ends: guesses the input and output layers of a model by what it names, by names of layers and by their order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonmesh.groups.fused_projections import class_names, global_shape
from muonmesh.groups.sites import Kind, class_of, unwrapped

Ends = Mapping[int, tuple[Kind, str]]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_HEAD = re.compile(
    r"((lm|out|output|cls|bbox|box|mask|value|policy)_)?head|classifier|score|unembed(ding)?|output(_projection)?"
    r"|(to_)?logits"
)
"""Names of output layers in models. Hidden layers of transformers and timm may have them too."""


def ends(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """Return the likely input and output layers of a model by id, each with the kind of its group and the reason.

    Output layers are those that a module names: `get_output_embeddings()` (transformers), `get_classifier()` (timm),
    and layers in the same module with as many outputs. If the named layer is an embedding, whose weight a linear layer
    may share, also linear layers of the same size. If no module names one, it is the layer that is registered last, if
    it is in no block, and, in models of one's own, each layer outside the blocks with the name of an output layer.

    Input layers are convolutions of at most 4 channels that no layer before them makes.
    """
    found: dict[int, tuple[Kind, str]] = {}
    for module in model.modules():
        for method in ("get_output_embeddings", "get_classifier"):
            try:
                named = [_final(layer) for layer in _modules_of(getattr(module, method)())]
            except (AttributeError, NotImplementedError):  # no such method; a stage without the head; a backbone
                continue
            widths = {_outputs(layer) for layer in named} - {None}
            beside = [child for child in map(unwrapped, module.children()) if _outputs(child) in widths]
            tables = [(t.num_embeddings, t.embedding_dim) for t in named if isinstance(t, nn.Embedding)]
            beside += [layer for layer in module.modules() if features_of(layer) in tables]
            for layer in (*named, *beside):
                found.setdefault(id(layer), ("head", f"output layer: {method}() of {class_of(module)}"))
    if not found:
        body = _body(model)
        base = getattr(body, "base_model", None)  # of transformers
        for key, layer in _outside_blocks(body):
            if _HEAD.fullmatch(key) and base in (None, body):
                found[id(layer)] = "head", f"output layer: {key!r}, inside no block"
        last = None if may_be_block(body) else _last_in(body)
        if last is not None and base is not body:
            found.setdefault(id(last), ("head", "output layer: the model's last layer, inside no block"))
    made: set[int] = set()
    for layer in model.modules():
        out, into = _outputs(layer), _inputs(layer)
        plain = isinstance(layer, _ConvNd) and layer.groups == 1 and not isinstance(layer, _ConvTransposeNd)
        if plain and into is not None and into <= 4 and into not in made:
            how = f"input layer: convolution of {into} inputs, made by no layer"
            found.setdefault(id(layer), ("embeddings", how))
        made |= set() if out is None else {out}
    return found


def _outside_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers and convolutions outside all blocks, with their names; of a head the last."""
    for key, child in module.named_children():
        child = unwrapped(child)
        if isinstance(child, nn.Linear | _ConvNd) or (_HEAD.fullmatch(key) and _final(child) is not child):
            yield key, _final(child)
        elif isinstance(child, _CONTAINERS) and not _is_block(child, module):
            yield from _outside_blocks(child)


def may_be_block(model: nn.Module) -> bool:
    """Whether a model may be a block of a larger one: it makes as many outputs as it reads, and has no blocks."""
    body = _body(model)
    last = _last_in(body)
    layers = [m for m in body.modules() if isinstance(m, nn.Linear | _ConvNd)]
    held = [(unwrapped(child), m) for m in body.modules() if isinstance(m, _CONTAINERS) for child in m.children()]
    if last is None or any(_is_block(child, container) for child, container in held):
        return False
    return isinstance(layers[0], _ConvNd) == isinstance(last, _ConvNd) and _outputs(last) == _inputs(layers[0])


def _last_in(module: nn.Module) -> nn.Module | None:
    """Return the layer that is registered last in a model, if it is in no block; None if there is none.

    There is also none if parts of the model are missing after it, as in a pipeline stage.
    """
    for key, child in reversed(module._modules.items()):
        if child is None or (isinstance(child, _CONTAINERS) and len(child) == 0):
            return None
        child = unwrapped(child)
        if isinstance(child, nn.Linear | _ConvNd):
            return child
        if _HEAD.fullmatch(key) and _final(child) is not child:
            return _final(child)
        tables = (nn.Embedding, nn.EmbeddingBag)
        if not isinstance(child, tables) and any(len(global_shape(p)) > 1 for p in child.parameters()):
            inside = isinstance(child, _CONTAINERS) and not _is_block(child, module)
            return _last_in(child) if inside else None
    return None


def _modules_of(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that a model returns as its output layers: one module, or several in containers."""
    if isinstance(value, nn.ModuleDict | Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | nn.ModuleList):
        for part in value:
            yield from _modules_of(part)
    elif isinstance(value, nn.Module):
        yield unwrapped(value)


def _final(module: nn.Module) -> nn.Module:
    """Return the last layer of a module; an adapter's wrapper is returned itself, in place of the layer in it."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | _ConvNd)]
    return module if not layers or hasattr(module, "base_layer") else layers[-1]


def _outputs(layer: nn.Module) -> int | None:
    return layer.out_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[0]


def _inputs(layer: nn.Module) -> int | None:
    return layer.in_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[1]


def _body(model: nn.Module) -> nn.Module:
    """Return the innermost model inside wrappers; a wrapper is a module in which one child has all parameters.

    A model is more than one block: it has an embedding or a container. What a LightningModule holds is one too.
    """
    body = model = unwrapped(model)
    while True:
        children = [c for c in model.children() if next(c.parameters(), None) is not None]
        if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
            return body
        lightning = "LightningModule" in class_names(model)
        model = unwrapped(children[0])
        if lightning or any(isinstance(unwrapped(c), (nn.Embedding, *_CONTAINERS)) for c in model.children()):
            body = model


def _is_block(module: nn.Module, container: nn.Module) -> bool:
    """Whether a module is a block: a module of several layers, not a layer or a container of layers."""
    if isinstance(module, nn.Sequential):  # an entry of a list is one block
        numbered = isinstance(container, nn.ModuleDict) and all(key.isdecimal() for key in container)
        return numbered or isinstance(container, nn.ModuleList)
    if isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, nn.EmbeddingBag, *_CONTAINERS)):
        return False
    return any(len(global_shape(p)) > 1 for p in module.parameters())


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer of any library, read from its attributes; None for other modules."""
    if "Conv1D" in class_names(module) and isinstance(out := getattr(module, "nf", None), int):
        weight = module._parameters.get("weight")
        shape = global_shape(weight) if weight is not None else ()
        return (out, shape[0]) if len(shape) == 2 and shape[1] == out else None
    for names in (("out_features", "in_features"), ("output_size", "input_size")):
        out, into = (getattr(module, name, None) for name in names)
        if isinstance(out, int) and isinstance(into, int):
            return out, into
    return None
