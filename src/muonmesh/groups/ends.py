"""Ends: the layers where a model meets its data, found by what modules say of themselves and by their order."""

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
"""Ends the reason for a head that may as well be the last layer of a pipeline stage."""

UNREAD = "; perhaps an output layer: inside no block, and no other layer reads what it makes"
"""Ends the reason for a weight that is Muon's and may as well be the head, registered before the blocks."""

_HEAD = re.compile(r"((lm|out|output)_)?head|classifier|unembed(ding)?|output(_projection)?|(to_)?logits")
"""What models call their output layer. `conv_head` and the like are hidden layers."""


def ends(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """The modules where the model meets its data, by id: as what they are trained, and how that is known.

    Output layers:

    1. What a module names as such: `get_output_embeddings()` (transformers), `get_classifier()` (timm), and layers
       beside it that are as wide. Of a module of several layers it is the last. If it is an embedding, whose weight a
       linear map may share, it is a map of that size.
    2. In a transformers model, outside its base model: a layer onto the labels or the vocabulary, and one whose
       output no later layer out there can read. Directly in the model, if it has no base model: onto the labels.
    3. In any other model: the last linear or convolution registered, if it is inside no block, that is reached
       through containers and modules called `lm_head` only. Where no stack of blocks comes before it, that is a guess,
       and the reason says so. Also what is called an output layer (`_HEAD`), inside no block, wherever it is
       registered; in timm's models a hidden layer may be called so. A model without any of these may have another
       layer that looks like one: see `_unread`.

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
    """The linear layers and convolutions inside no block, each with its name; of an output in sequence the last."""
    for key, child in module.named_children():
        child = unwrapped(child)
        if isinstance(child, nn.Linear | _ConvNd) or (isinstance(child, nn.Sequential) and _HEAD.fullmatch(key)):
            yield key, _final(child)
        elif isinstance(child, _CONTAINERS) and not _is_block(child, module):
            yield from _outside_blocks(child)


def _unread(body: nn.Module, outside: list[nn.Module]) -> Iterator[nn.Module]:
    """The linear maps outside the blocks that read what blocks make, and whose outputs no layer of the model reads.

    That is also a map from the width to the rows of an embedding. A multiple of the width may be read in pieces.
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
    input layer reads and no other layer does: it tells the data. In a list of heads it is the last of an entry.
    """
    whole = _is_whole(model)
    everything = list(model.modules())
    made: set[int] = set()
    in_blocks: set[int] = set()  # what blocks make is no data, unless nothing else in the model could read data
    if any(isinstance(m, nn.Embedding) or (isinstance(m, _ConvNd) and m.in_channels <= 4) for m in everything):
        blocks = [
            c for m in everything if isinstance(m, _CONTAINERS) for c in m.children() if _is_block(unwrapped(c), m)
        ]
        in_blocks = {out for block in blocks for m in block.modules() if (out := _outputs(m)) is not None}

    # An entry of a list that is linear maps alone is no block if it ends in a few numbers: heads, as for boxes.
    entries = [entry for m in everything if isinstance(m, nn.ModuleList) for entry in m]
    chains = [[c for c in entry.modules() if next(c.parameters(recurse=False), None) is not None] for entry in entries]
    boxes = {id(chain[-1]) for chain in chains if chain and all(isinstance(c, nn.Linear) for c in chain)}
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
    """Whether it holds a model of transformers or timm, which names its output layers itself."""
    return any(hasattr(m, "base_model_prefix") or callable(getattr(m, "get_classifier", None)) for m in model.modules())


def _outputs(layer: nn.Module) -> int | None:
    return layer.out_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[0]


def _inputs(layer: nn.Module) -> int | None:
    return layer.in_channels if isinstance(layer, _ConvNd) else (features_of(layer) or (None, None))[1]


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
    if last is None or last is not layers[-1] or more:  # more: what a pipeline stage leaves of what comes later
        return None
    # What comes out as wide as it went in may be followed by itself: one block of a model, as far as can be known.
    pixels = isinstance(layers[0], _ConvNd) and not isinstance(last, _ConvNd)
    if not stacked_before and not pixels and _outputs(last) == _inputs(layers[0]):
        return None
    return last, stacked_before


def features_of(module: nn.Module) -> tuple[int, int] | None:
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
