"""Ends: finds the input and output layers of a model, by attributes of modules and by their order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonmesh.groups.fused_projections import class_names, global_shape
from muonmesh.groups.sites import Kind, class_of, unwrapped

Ends = Mapping[int, tuple[Kind, str]]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

GUESS = "; a guess, for no stack of blocks comes before it"
"""Suffix of the reason for a head that may also be the last layer of a pipeline stage."""

UNREAD = "; perhaps an output layer: inside no block, and no other layer reads what it makes"
"""Suffix of the reason for a weight of Muon that may also be the head, registered before the blocks."""

_HEAD = re.compile(
    r"((lm|out|output|cls|bbox|box|mask|value|policy)_)?head|classifier|unembed(ding)?|output(_projection)?|(to_)?logits"
)
"""Names of output layers in models. Names such as `conv_head` are hidden layers."""


def ends(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """Return the input and output layers of a model by id, each with the kind of its group and the reason.

    Output layers:

    1. A layer that a module names: `get_output_embeddings()` (transformers), `get_classifier()` (timm), and layers in
       the same module with as many outputs. Of a module with several layers, it is the last layer. If the named layer
       is an embedding, whose weight a linear layer may share, also linear layers of the same size.
    2. In a transformers model, outside its base model: a layer with as many outputs as labels or vocabulary entries,
       and a layer whose output no later layer outside the base model can read. If there is no base model, a layer
       directly in the model with as many outputs as labels.
    3. In any other model: the linear layer or convolution that is registered last, if it is outside all blocks, that
       is, only in containers and modules called `lm_head`. If no stack of blocks comes before it, this is a guess, and
       the reason says so. Also a layer outside all blocks with the name of an output layer (`_HEAD`), in any order,
       except in timm's models, where a hidden layer may have such a name. A model without any of these may have another
       layer that looks like an output layer: see `_unread`.

    Input layers: see `_input_layers`. A pipeline stage must get the same groups as the whole model, so a single block
    in a stage is not treated as a model.
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
            tables = [(t.num_embeddings, t.embedding_dim) for t in named if isinstance(t, nn.Embedding)]
            beside += [layer for layer in module.modules() if features_of(layer) in tables]
            for layer in (*named, *beside):
                found.setdefault(id(layer), ("head", f"output layer: {method}() of {class_of(module)}"))
        for layer, how in _label_layers(module, outermost=id(module) not in inner):
            found.setdefault(id(unwrapped(layer)), ("head", f"output layer: {how} {class_of(module)}"))
        if hasattr(module, "base_model_prefix"):
            inner.update(map(id, module.modules()))
    body = _body(model)
    outside = [] if _is_whole(model) else list(_outside_blocks(body))
    if not hasattr(body, "base_model_prefix") and (last := _last_layer(body)) is not None:
        layer, known = last
        how = "output layer: the model's last layer, inside no block" + ("" if known else GUESS)
        found.setdefault(id(layer), ("head", how))
    for key, layer in outside:
        if _HEAD.fullmatch(key):
            found.setdefault(id(layer), ("head", f"output layer: {key!r}, inside no block"))
    for layer, kind, how in _input_layers(model):
        found.setdefault(id(layer), (kind, how))
    if all(kind != "head" for kind, _ in found.values()):
        for layer in _unread(body, [layer for _, layer in outside]):
            found.setdefault(id(layer), ("matrices", UNREAD))
    return found


def _outside_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers and convolutions outside all blocks, with their names; of a head the last."""
    for key, child in module.named_children():
        child = unwrapped(child)
        if isinstance(child, nn.Linear | _ConvNd) or (_HEAD.fullmatch(key) and _final(child) is not child):
            yield key, _final(child)
        elif isinstance(child, _CONTAINERS) and not _is_block(child, module):
            yield from _outside_blocks(child)


def _unread(body: nn.Module, outside: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield linear layers outside the blocks that read outputs of blocks and whose outputs no other layer reads.

    This includes a layer from the model's width to the number of rows of an embedding. An output that is a multiple of
    the input is left out, because another layer may read it in pieces.
    """
    apart = set(map(id, outside))
    blocks = {_outputs(m) for m in body.modules() if id(m) not in apart}
    read = {_inputs(m) for m in body.modules()}
    tables = [(m.num_embeddings, m.embedding_dim) for m in body.modules() if isinstance(m, nn.Embedding)]
    for layer in outside:
        if (features := features_of(layer)) is not None and features[1] in blocks:
            out, into = features
            if (features in tables and out != into) or (out not in read and out % into):
                yield layer


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
    """Yield layers that read data, and output layers found by their sizes, each with its kind and reason.

    A layer reads data if its inputs cannot be outputs of layers registered before it, by their sizes. This is checked
    for convolutions of at most 4 channels. In models of transformers and timm, which are complete, it is also checked
    for layers outside all blocks, and for layers with at most 4 inputs (coordinates). It is not checked for these
    layers in other models, because a pipeline stage lacks layers that may have made the inputs.

    In complete models, a linear layer outside the blocks is an output layer if it has 2 to 4 outputs, or as many
    outputs as only input layers have inputs, because it then predicts the data. In a list of heads, it is the last of
    an entry.
    """
    whole = _is_whole(model)
    everything = list(model.modules())
    made: set[int] = set()
    in_blocks: set[int] = set()  # outputs of blocks are no data, unless no other layer could read data
    if any(isinstance(m, nn.Embedding) or (isinstance(m, _ConvNd) and m.in_channels <= 4) for m in everything):
        blocks = [
            c for m in everything if isinstance(m, _CONTAINERS) for c in m.children() if _is_block(unwrapped(c), m)
        ]
        in_blocks = {out for block in blocks for m in block.modules() if (out := _outputs(m)) is not None}

    # An entry of a list with only linear layers and few outputs is a head, as for boxes, and no block.
    entries = [entry for m in everything if isinstance(m, nn.ModuleList) for entry in m.children()]
    chains = [[c for c in entry.modules() if next(c.parameters(recurse=False), None) is not None] for entry in entries]
    boxes = {id(chain[-1]) for chain in chains if chain and all(isinstance(c, nn.Linear) for c in chain)}
    entire, data = whole, Counter[int]()  # number of input layers by their number of inputs

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
                makers = set(map(_outputs, module.children())) if coordinates else made  # boxes may be read again
                foreign = plain and not any(into == w or (w and w >= 16 and into % w == 0) for w in makers)
                narrow = coordinates or (into <= 4 and convolution)
                if foreign and (narrow or (whole and not blocked and into not in in_blocks)):
                    what = f"{'convolution' if convolution else 'linear map'} of {into} inputs, made by no layer"
                    data[into] += not convolution
                    yield child, "embeddings", f"input layer: {what}"
                elif (
                    entire
                    and (not blocked or id(child) in boxes)
                    and not convolution
                    and (1 < out <= 4 or 0 < data[out] == sum(_inputs(m) == out for m in everything))
                ):
                    yield child, "head", f"output layer: {out} numbers, outside the blocks"
                made.add(out)
            elif isinstance(child, nn.Embedding | nn.EmbeddingBag):
                made.add(child.embedding_dim)
            yield from walk(child, blocked or (isinstance(module, _CONTAINERS) and _is_block(child, module)))

    yield from walk(nn.ModuleList([model]) if isinstance(model, _ConvNd) else model, False)


def _is_whole(model: nn.Module) -> bool:
    """Whether a model is complete: it contains a model of transformers or timm, which names its output layers."""
    return any(hasattr(m, "base_model_prefix") or callable(getattr(m, "get_classifier", None)) for m in model.modules())


def _outputs(layer: nn.Module) -> int | None:
    return layer.out_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[0]


def _inputs(layer: nn.Module) -> int | None:
    return layer.in_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[1]


def _body(model: nn.Module) -> nn.Module:
    """Return the innermost model inside wrappers; a wrapper is a module in which one child has all parameters."""
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
    """Whether a module is more than one block of a model: it has an embedding or a stack of blocks."""
    if hasattr(module, "base_model_prefix"):
        return True
    children = [unwrapped(child) for child in module.children()]
    return not isinstance(module, _CONTAINERS) and any(isinstance(c, nn.Embedding) or _is_stack(c) for c in children)


def _is_stack(module: nn.Module) -> bool:
    """Whether a module is a container of blocks, or an empty container, as in a pipeline stage without its blocks."""
    if not isinstance(module, _CONTAINERS):
        return False
    children = [unwrapped(child) for child in module.children()]
    return not children or any(_is_block(child, module) or _is_stack(child) for child in children)


def _is_block(module: nn.Module, container: nn.Module) -> bool:
    """Whether a module is a block: a module of several layers, not a layer or a container of layers."""
    if isinstance(module, nn.Sequential):  # an entry of a list is one block
        numbered = isinstance(container, nn.ModuleDict) and all(key.isdecimal() for key in container)
        return numbered or isinstance(container, nn.ModuleList)
    if isinstance(module, (nn.Linear, _ConvNd, nn.Embedding, nn.EmbeddingBag, *_CONTAINERS)):
        return False
    return any(len(global_shape(p)) > 1 for p in module.parameters())


def _last_layer(body: nn.Module) -> tuple[nn.Module, bool] | None:
    """Return the last linear layer or convolution, if it is in no block, and whether a stack of blocks precedes it."""
    layers = [m for m in body.modules() if isinstance(m, nn.Linear | _ConvNd)]
    last: nn.Module | None = None
    stacked = stacked_before = more = False

    def walk(module: nn.Module) -> None:
        nonlocal last, stacked, stacked_before, more
        for key, child in module._modules.items():
            if child is None:
                more = True
                continue
            child = unwrapped(child)
            if isinstance(child, nn.Linear | _ConvNd):
                last, stacked_before, more = child, stacked, False
            elif key == "lm_head":  # a norm and the layer, in a module: OLMo-core's
                walk(child)
            elif _is_block(child, module):
                stacked = stacked or isinstance(module, _CONTAINERS)
            elif isinstance(child, _CONTAINERS):
                if next(child.children(), None) is None:
                    stacked = more = True
                walk(child)

    walk(body)
    if last is None or last is not layers[-1] or more:  # more: later layers that a pipeline stage lacks
        return None
    # A module with as many outputs as inputs may be followed by another one like it, so it may be a block of a model.
    pixels = isinstance(layers[0], _ConvNd) and not isinstance(last, _ConvNd)
    if not stacked_before and not pixels and _outputs(last) == _inputs(layers[0]):
        return None
    return last, stacked_before


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
