"""Known: what the classes, names and order of modules say of a weight, which is a guess until a forward is read.

A wrong split is a wrong update without an error. So the table has only orders that were read in a module's forward;
`tests/groups/test_split.py` runs these forwards. A weight that is fused otherwise stays one matrix until a forward
shows its parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from muonmesh.groups.parameter_sites import (
    Kind,
    Matrices,
    Site,
    answer_of,
    class_chain,
    class_of,
    global_shape,
    unwrapped,
)

InputOutputLayers = Mapping[int, tuple[Kind, str]]
"""Input and output layers by id, each with the kind of its group and the reason."""


class Known(NamedTuple):
    """What is known of a parameter by its module and its name.

    Attributes:
        pattern: An expression for "classes of the module around/classes of the module:name", with all base classes.
        reason: What the parameter is, or what its parts are.
        adamw: The kind of its group, if AdamW updates it.
        cut: How the rows of a weight out × in split: the number of equal blocks, an entry of "matrices", or a function
            of the module around its layer, and of the site, that returns an entry.
        certain: Whether a forward cannot show more than this.
    """

    pattern: str
    reason: str
    adamw: Kind | None = None
    cut: int | Matrices | Callable[[Any, Site], Matrices] = 1
    certain: bool = False


TABLE = re.compile(
    r"(^|_)(pos|position|positional|embed|embeddings?|emb|tokens?|query|queries|latents?|probe|table|bias(es)?|d"
    r"|gate|scale|gamma|beta|a_log|dt|sinks?|prompt|prefix|codebook|codevectors|mask|cls|registers?|level)(_|$)",
    re.IGNORECASE,
)
"""Names of parameters that unknown modules hold, and that are no matrices."""


def _dbrx(experts: Any, site: Site) -> Matrices:
    """Return the split of experts that are rows of one matrix."""
    count = experts.moe_num_experts
    return ("transposed", ("heads", count, 1)) if site.key == "w2" else ("heads", count, 0)


def _by_head(owner: Any, _: Site) -> Matrices:
    """Return the split of q, k, v of each head, head by head."""
    return "interleaved", 3, 0, getattr(owner, "head_size", None) or owner.head_dim


def _by_quarter(_: Any, site: Site) -> Matrices:
    """Return the split of q, v, k of a quarter of the heads at a time."""
    return "interleaved", 3, 0, site.shape[0] // 12


def _bigcode(owner: Any, _: Site) -> Matrices:
    """Return the split of queries with shared keys and values, or head by head; of keys and values alone."""
    if owner.multi_query and not owner.is_cross_attention:
        return "rows", owner.embed_dim, owner.kv_dim, owner.kv_dim
    return "interleaved", 2 if owner.is_cross_attention else 3, 0, owner.head_dim


def _grouped_query(owner: Any, _: Site) -> Matrices:
    """Return the split of queries, and of keys and values that groups of them share."""
    shared = owner.num_key_value_heads * owner.head_dim
    return "rows", owner.config.num_attention_heads * owner.head_dim, shared, shared


def _splits(owner: Any, site: Site) -> Matrices:
    """Return the split of q, k, v, or of k, v of cross-attention: more rows than columns, however they are stored."""
    return ("rows", *[owner.split_size] * (max(site.shape) // owner.split_size))


def _falcon(owner: Any, site: Site) -> Matrices:
    """Return the split of queries and shared keys and values, which lists of indices pick: no graph shows these."""
    size, groups = owner.head_dim, owner.num_kv_heads if owner.new_decoder_architecture else 1
    sizes = (owner.num_heads // groups * size, size, size)
    return ("interleaved", sizes, 0) if groups > 1 else ("rows", *sizes) if owner.multi_query else _by_head(owner, site)


def _latent(owner: Any, _: Site) -> Matrices:
    """Return the split of keys and values of latent attention, head by head."""
    key, value = owner.qk_nope_head_dim, owner.v_head_dim
    return ("interleaved", 2, 0, key) if key == value else ("interleaved", (key, value), 0)


# The first that matches counts.
_KNOWN = (
    Known(r"/[^:]*Norm(Gated|\dd)?\b[^:]*:", "norm", "vectors"),
    Known(r"(^|[._:])lora_", "factor of a LoRA pair: Muon's update is meant for their product", "matrices"),
    Known(r"/(?![^:]*\b(Linear|_ConvNd)\b)[^:]*Embed[^:]*:", "embedding", "embeddings"),
    Known(r"(Router|Gating|TopKGate|MoEGate)[^:]*:|[._:]router\.weight$", "router of experts", "matrices"),
    Known(r"\btorch\.MultiheadAttention\b[^:]*:.*in_proj_weight$", "q, k, v", cut=3, certain=True),
    Known(r"\btorch\.LSTM(Cell)?\b[^:]*:.*weight_[ih]h", "gates", cut=4, certain=True),
    Known(r"\btorch\.GRU(Cell)?\b[^:]*:.*weight_[ih]h", "gates", cut=3, certain=True),
    Known(r"\btorch\.RNN(Cell)?Base\b[^:]*:.*weight_", "recurrent", certain=True),
    Known(r"\btransformers\.(\w*GPT2?|)Attention\b.*:.*\bc_attn\.weight$", "q, k, v", cut=_splits),
    Known(r"\btransformers\.GPTBigCodeAttention\b.*:.*\bc_attn\.weight$", "q, k, v", cut=_bigcode),
    Known(
        r"\btransformers\.(GPTNeoX(Japanese)?|Bloom|Persimmon)Attention\b[^:]*:.*\bquery_key_value\.weight$",
        "q, k, v head by head",
        cut=_by_head,
    ),
    Known(r"\btransformers\.CodeGenAttention\b[^:]*:.*\bqkv_proj\.weight$", "q, v, k by quarters", cut=_by_quarter),
    Known(
        r"\btransformers\.(Phi3|Phi4Multimodal|Dbrx)Attention\b[^:]*:.*\b(qkv_proj|Wqkv)\.weight$",
        "q, k, v",
        cut=_grouped_query,
    ),
    Known(r"\btransformers\.FalconAttention\b.*query_key_value\.weight$", "q, k, v", cut=_falcon),
    Known(r"\btransformers\.DbrxExpertGLU\b[^:]*:", "experts", cut=_dbrx),
    Known(r"\btransformers\.\w*Attention\b[^:]*:.*\.kv_b_proj\.weight$", "k, v head by head", cut=_latent),
    Known(r"\btransformers\.(?!Exaone4_5_Vision)\w*Attention\b[^:]*:.*\.qkv\.weight$", "q, k, v", cut=3),
    Known(r"\btransformers\.GptOssExperts\b.*gate_up_proj$", "gate, up", cut=("interleaved", 2, 0)),
    Known(r"\btransformers\..*:.*\bgate_up_proj(\.weight)?$", "gate, up", cut=2),
)


def _with_library(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def row_of(site: Site) -> Known | None:
    """Return what is known of the parameter at a site."""
    around = [" ".join(map(_with_library, class_chain(module))) for _, module in site.owners[1::-1]]
    text = f"{'/'.join(['', *around][-2:])}:{site.name}"
    return next((row for row in _KNOWN if re.search(row.pattern, text)), None)


_HEAD = re.compile(
    r"(?:.*?\.)?(((lm|out|output|cls|bbox|box|mask|value|policy)_)?head|classifier|score|unembed(ding)?"
    r"|output(_projection)?|(to_)?logits)(?=\.|$)"
)
"""Paths of output layers, or of modules that end in one. Hidden layers of transformers and timm may have them too."""

_IN_BLOCK = re.compile(r"(^|\.)\d+\.\D|\D\.\d+\.")
"""Paths of layers in a block: below an entry of a list. Numbers alone, as in nested `nn.Sequential`, are no block."""


def input_output_layers(model: nn.Module) -> InputOutputLayers:
    """Return the likely input and output layers of a model.

    Output layers are those that a module names: `get_output_embeddings()` (transformers) and `get_classifier()` (timm).
    If no module names one, they are the layers with the name of an output layer, and the layer that is registered last,
    unless they are in a block. Input layers are convolutions of at most 4 channels
    that no layer before them makes.
    """
    ends: dict[int, tuple[Kind, str]] = {}
    for module in model.modules():
        for method in ("get_output_embeddings", "get_classifier"):
            named = tree_leaves(answer_of(module, method))
            lists = (layer if isinstance(layer, nn.ModuleList) else [layer] for layer in named)
            for layer in (layer for layer in chain(*lists) if isinstance(layer, nn.Module)):
                ends.setdefault(id(_final(layer)), ("head", f"output layer: {method}() of {class_of(module)}"))
    root = unwrapped(model)
    base = getattr(root, "base_model", None)  # of transformers
    if not ends:
        layers = list(_layers(root))
        heads = {match[0]: layer for path, layer in layers if layer is not None and (match := _HEAD.match(path))}
        for path, layer in heads.items() if base in (None, root) else ():
            ends[id(layer)] = "head", f"output layer: {path!r}, inside no block"
        last = layers[-1][1] if layers and base is not root and not may_be_block(model) else None
        if last is not None and _sizes(last) is not None:
            ends.setdefault(id(last), ("head", "output layer: the model's last layer, inside no block"))
    widths: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, _ConvNd) and layer.in_channels <= 4 and layer.in_channels not in widths:
            how = f"input layer: convolution of {layer.in_channels} inputs, made by no layer"
            if layer.groups == 1 and not isinstance(layer, _ConvTransposeNd):
                ends.setdefault(id(layer), ("embeddings", how))
        widths |= {size for size in (_sizes(layer) or ())[:1]}
    return ends


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
        elif isinstance(inner, nn.Linear | _ConvNd) or hasattr(inner, "base_layer"):
            yield at, None if _IN_BLOCK.search(at) else inner
        elif not isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            if any(p is not None and len(global_shape(p)) > 1 for p in inner._parameters.values()):
                yield at, inner
            yield from _layers(inner, at)


def may_be_block(model: nn.Module) -> bool:
    """Whether a model may be a block of a larger one: it makes as many outputs as it reads, and has no blocks."""
    layers = [layer for _, layer in _layers(unwrapped(model))]
    sizes = [(size, isinstance(layer, _ConvNd)) for layer in layers if layer is not None and (size := _sizes(layer))]
    if not sizes or None in layers:
        return False
    (first, of_first), (last, of_last) = sizes[0], sizes[-1]
    return of_first == of_last and first[1] == last[0]


def _final(module: nn.Module) -> nn.Module:
    """Return the last layer of a module; an adapter's wrapper is returned itself, in place of the layer in it."""
    layers = [m for m in unwrapped(module).modules() if isinstance(m, nn.Linear | _ConvNd)]
    return unwrapped(module) if not layers or hasattr(module, "base_layer") else layers[-1]


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a convolution or a linear layer of any library; None for other modules."""
    features = ("out_features", "in_features"), ("output_size", "input_size")
    # Models have channels too: those of the images that they read and make.
    for names in (("out_channels", "in_channels"),) if isinstance(layer, _ConvNd) else features:
        out, into = (getattr(layer, name, None) for name in names)
        if isinstance(out, int) and isinstance(into, int):
            return out, into
    return None
