"""Input and output layers of a model, guessed by what it names, by names of layers and by their order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from muonmesh.groups.parameter_sites import Kind, answer_of, class_names, class_of, global_shape, unwrapped

InputOutputLayers = Mapping[int, tuple[Kind, str]]

_HEAD = re.compile(
    r"(?:.*?\.)?(((lm|out|output|cls|bbox|box|mask|value|policy)_)?head|classifier|score|unembed(ding)?"
    r"|output(_projection)?|(to_)?logits)(?=\.|$)"
)
"""Paths of output layers, or of modules that end in one. Hidden layers of transformers and timm may have them too."""

_IN_BLOCK = re.compile(r"(^|\.)\d+\.\D|\D\.\d+\.")
"""Paths of layers in a block: below an entry of a list. Numbers alone, as in nested `nn.Sequential`, are no block."""


def input_output_layers(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """Return the likely input and output layers of a model by id, each with the kind of its group and the reason.

    Output layers are those that a module names: `get_output_embeddings()` (transformers) and `get_classifier()` (timm).
    If no module names one, they are the layers with the name of an output layer, and the layer that is registered last,
    unless they are in a block. Input layers are convolutions of at most 4 channels that no layer before them makes.
    """
    layers_found: dict[int, tuple[Kind, str]] = {}
    for module in model.modules():
        for method in ("get_output_embeddings", "get_classifier"):
            named = tree_leaves(answer_of(module, method))
            lists = (layer if isinstance(layer, nn.ModuleList) else [layer] for layer in named)
            for layer in (layer for layer in chain(*lists) if isinstance(layer, nn.Module)):
                layers_found.setdefault(id(_final(layer)), ("head", f"output layer: {method}() of {class_of(module)}"))
    if not layers_found:
        root = unwrapped(model)
        layers, base = list(_layers(root)), getattr(root, "base_model", None)  # of transformers
        heads = {match[0]: layer for path, layer in layers if layer is not None and (match := _HEAD.match(path))}
        for path, layer in heads.items() if base in (None, root) else ():
            layers_found[id(layer)] = "head", f"output layer: {path!r}, inside no block"
        if layers and base is not root and not may_be_block(model):
            last = layers[-1][1]
            if last is not None and sizes_of(last) is not None:
                layers_found.setdefault(id(last), ("head", "output layer: the model's last layer, inside no block"))
    widths: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, _ConvNd) and layer.in_channels <= 4 and layer.in_channels not in widths:
            how = f"input layer: convolution of {layer.in_channels} inputs, made by no layer"
            if layer.groups == 1 and not isinstance(layer, _ConvTransposeNd):
                layers_found.setdefault(id(layer), ("embeddings", how))
        widths |= {size for size in (sizes_of(layer) or ())[:1]}
    return layers_found


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module | None]]:
    """Yield the modules of a model that hold matrices, but for embeddings, in their order and with their paths.

    None stands for what is no output layer: layers in blocks and in base models of `transformers`, and parts that are
    missing, as in a pipeline stage.
    """
    for key, child in module._modules.items():
        inner, at = None if child is None else unwrapped(child), f"{path}.{key}" if path else key
        empty = isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not len(inner)
        if inner is None or empty or getattr(inner, "base_model", None) is inner:
            yield at, None
        elif isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            continue
        elif isinstance(inner, nn.Linear | _ConvNd) or hasattr(inner, "base_layer"):
            yield at, None if _IN_BLOCK.search(at) else inner
        else:
            if any(p is not None and len(global_shape(p)) > 1 for p in inner._parameters.values()):
                yield at, inner
            yield from _layers(inner, at)


def may_be_block(model: nn.Module) -> bool:
    """Whether a model may be a block of a larger one: it makes as many outputs as it reads, and has no blocks."""
    layers = [layer for _, layer in _layers(unwrapped(model))]
    sizes = [(sizes_of(layer), isinstance(layer, _ConvNd)) for layer in layers if layer is not None]
    sized = [(size, convolution) for size, convolution in sizes if size is not None]
    if not sized or None in layers:
        return False
    (first, of_first), (last, of_last) = sized[0], sized[-1]
    return of_first == of_last and first[1] == last[0]


def _final(module: nn.Module) -> nn.Module:
    """Return the last layer of a module; an adapter's wrapper is returned itself, in place of the layer in it."""
    layers = [m for m in unwrapped(module).modules() if isinstance(m, nn.Linear | _ConvNd)]
    return unwrapped(module) if not layers or hasattr(module, "base_layer") else layers[-1]


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a convolution or a linear layer of any library; None for other modules."""
    return (module.out_channels, module.in_channels) if isinstance(module, _ConvNd) else features_of(module)


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
