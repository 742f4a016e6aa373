"""Facts: what the graph of one forward shows of each parameter, by rules that read its nodes.

A weight is the operand of a product; autograd's nodes between the parameter and the product may only be views and
casts. What lies above and below the product tells input layers, output layers and fused weights. What cannot be read
without doubt is None, and `split_params` then goes by its other rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from muonmesh.groups.cuts import as_matrices, parts_made
from muonmesh.groups.graph import EACH, VIEWS, Node, Past, nodes_behind, reached
from muonmesh.groups.parameter_sites import Matrices, global_shape
from muonmesh.groups.products import Product, Stored, is_weight, learn, source_of, weight_at
from muonmesh.names import starred


@dataclass
class Facts:
    """What a forward showed of one parameter.

    Attributes:
        does: "multiplies" activations, is "looked up", makes a weight ("computed"), or else is "added" to activations,
            also by being joined with them; None if none of these was seen without doubt.
        stored: Whether a matrix is stored "out×in" or "in×out"; None if the graph does not tell.
        first: Whether it only reads the model's inputs; None: unknown.
        last: Whether it makes outputs that no other layer reads; None: unknown.
        cut: How the out dim is cut into parts, as an entry of "matrices" for a matrix out × in: "whole" if it is not
            cut; None: unknown.
        groups: The number of groups of the convolution whose weight it is; 0 for other weights.
        hidden: Whether something that hides what it computes reads it, or what it makes, so that there may be more
            parts than ``cut`` has.
    """

    does: Literal["multiplies", "looked up", "computed", "added"] | None = None
    stored: Stored | None = None
    first: bool | None = None
    last: bool | None = None
    cut: Matrices | None = None
    groups: int = 0
    hidden: bool = False


def facts_of_graph(
    outputs: Iterable[Tensor], named: Collection[tuple[str, nn.Parameter]], inputs: Collection[Tensor]
) -> tuple[dict[str, Facts], bool]:
    """Return what the graph behind some outputs shows of each parameter, by name, and whether a node hides more.

    Outputs that are computed on by others, such as hidden states or keys beside logits, do not count as outputs.

    Args:
        outputs: The tensors that a forward returned.
        named: The parameters with their names; frozen ones that did not require gradients are not seen.
        inputs: The inputs, which required gradients. What is made of none is a fixed number, or hidden from the graph.
    """
    names = {id(parameter): name for name, parameter in named}
    order, roots = nodes_behind(outputs, names, {id(tensor) for tensor in inputs})
    try:
        return _facts_of_nodes(order, roots, named, names), any(node.is_opaque for node in order)
    finally:  # nodes know each other, and would hold the graph until garbage is collected
        for node in order:
            vars(node).clear()


def _facts_of_nodes(
    order: list[Node], roots: set[Node], named: Collection[tuple[str, nn.Parameter]], names: Mapping[int, str]
) -> dict[str, Facts]:
    """Return what nodes show of each parameter; ``roots`` are those of the outputs, and ``names`` the names by id."""
    learn(order)
    is_last = last_layers(order, roots)
    facts: dict[str, Facts] = defaultdict(Facts)
    products: dict[str, list[Product]] = defaultdict(list)
    for node in order:
        if node.leaf is not None:
            facts[names[id(node.leaf)]] = _of_leaf(node, node.leaf)
        if node.effect == "looks up" and (table := weight_at(node.below[0])) is not None:
            facts[names[id(table[0])]].does = "looked up"
        for product in node.products:
            products[names[id(product.parameter)]].append(product)
    for parameter in _computed(order):
        facts[names[id(parameter)]].does = "computed"
    for name, uses in products.items():
        weight = facts[name]
        weight.does = "multiplies" if weight.does in (None, "added") else weight.does
        weight.first = _agreed(map(is_first, uses))
        weight.last = _agreed(is_last[use.node] for use in uses)
        weight.groups = max(use.groups for use in uses)
        weight.stored = _agreed(use.stored for use in uses)
        parts, hides = zip(*map(parts_made, uses), strict=True)
        if weight.stored and weight.groups < 2 and None not in parts:
            weight.cut = as_matrices(frozenset[Any]().union(*parts), uses[0].rows)
        weight.hidden = weight.hidden or any(hides)
    _unlike_others(facts, {name: global_shape(parameter) for name, parameter in named})
    return dict(facts)


def _of_leaf(leaf: Node, parameter: Tensor) -> Facts:
    """Return what the nodes show that read a parameter, or a view of it, without a product."""
    views = reached([leaf], lambda node: [user for user in node.readers if user.effect in VIEWS])
    users = [(view, user) for view in views for user in view.readers]
    added = len(global_shape(parameter)) > 1 and any(_takes_as_activations(*user) for user in users)
    return Facts("added" if added else None, hidden=any(user.is_opaque for _, user in users))


def _takes_as_activations(view: Node, user: Node) -> bool:
    """Whether a node adds, joins or normalizes a parameter, or multiplies it by a weight."""
    reads = any(product.reads is not None and product.reads[0] is view for product in user.products)
    return reads or user.effect in ("adds", "joins", "normalizes")


def _agreed(values: Iterable[Any]) -> Any:
    """Return the only value among some; None if they differ."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else None


def _computed(order: Iterable[Node]) -> Iterator[Tensor]:
    """Yield the parameters from which a weight is computed element by element, as by weight norm or pruning."""
    for node in order:
        edges = node.operands
        for edge, other in (edges, edges[::-1]) if edges else ():
            of_parameters = edge is not None and Past.LIVE not in edge[0].past and weight_at(edge) is None
            if edge is None or not of_parameters or (other is not None and Past.LIVE not in other[0].past):
                continue
            for below in reached([edge[0]], lambda node_below: node_below.sources):
                if below.leaf is not None and len(global_shape(below.leaf)) > 1:
                    yield below.leaf


def _unlike_others(facts: Mapping[str, Facts], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Set ``first`` and ``last`` of layers in blocks to unknown where blocks that are alike differ in them.

    The first block of a model without an input layer reads the inputs, but its layers have the same role as those of
    the other blocks.
    """
    alike: dict[Any, list[Facts]] = defaultdict(list)
    for name, weight in facts.items():
        layer, _, key = name.rpartition(".")
        block, _, inner = layer.rpartition(".")
        alike[starred(block), inner, key, shapes[name]].append(weight)
    for group in alike.values():
        for end in ("first", "last"):
            if len({getattr(weight, end) for weight in group}) > 1:
                for weight in group:
                    setattr(weight, end, getattr(weight, end) and None)


# ------------------------------------------------------------------ input and output layers


def is_first(product: Product) -> bool | None:
    """Whether a product reads inputs of the model in which no weight took part; None: unknown."""
    reads = product.reads[0] if product.reads is not None else None
    if reads is None:
        return None
    if Past.WEIGHED in reads.past:
        return False
    if Past.HIDDEN in reads.past or Past.DATA not in reads.past or _is_late(product.node):
        return None
    # What is added to the inputs that it reads is a stream: a stage of a model, without its ends. A mask is not read.
    return None if any(term.is_input and term.is_below(product.node) for term in _added(product.node)) else True


def _is_late(product: Node) -> bool:
    """Whether a layer that reads inputs only feeds products with results of deep layers.

    Such layers make the keys and values of a text in each block with cross-attention. They are no input layers. A layer
    whose result meets such results in several blocks is one.
    """

    def meets(user: Node, position: int) -> bool:
        return user.is_product and any(Past.DEEP in other.past for other, _ in user.others(position))

    def reads(user: Node, position: int) -> bool:
        return bool(user.products) and not user.adds(position)

    def onward(node: Node) -> list[Node]:
        return [user for user, position, _ in node.users if not meets(user, position) and not reads(user, position)]

    users = [(user, position) for node in reached([product], onward) for user, position, _ in node.users]
    met = {user for user, position in users if meets(user, position)}
    # Between blocks, layers add to a stream; inside a block, a layer may come between weights of attention and values.
    above = (node for node in reached(met, lambda node: node.readers) if node.products)
    layers_above = [node for node in above if next(_added(node, through=False), None) is not None]
    in_several_blocks = any(node in met for node in reached(layers_above, lambda node: node.readers))
    return bool(met) and not in_several_blocks and not any(reads(*user) for user in users)


def last_layers(order: list[Node], roots: set[Node]) -> dict[Node, bool | None]:
    """Return for each product with a weight whether it makes outputs that no other layer reads; None: unknown."""
    read: dict[Node, bool] = {}
    clean: dict[Node, bool] = {}  # reaches an output without another product
    direct: dict[Node, bool] = {}  # reaches an output without another weight
    is_output: dict[Node, bool | None] = {}
    weights = {
        node: [place for place, edge in enumerate(node.below) if is_weight(edge)]
        for node in order
        if node.effect not in EACH
    }
    for node in reversed(order):
        root = node in roots and not node.users
        reads, cleanly, directly = False, root, root
        for user, position, _ in node.users:
            if user.adds(position):
                reads, cleanly, directly = reads or read[user], cleanly or clean[user], directly or direct[user]
            elif any(product.reads is not None and product.reads[0] is node for product in user.products):
                reads = True
            else:
                fused = user.is_opaque or any(place != position for place in weights.get(user, ()))
                reads |= read[user] or fused
                directly |= direct[user]
                cleanly |= clean[user] and not fused and not user.is_product
        read[node], clean[node], direct[node] = reads, cleanly, directly
        if node.products and not directly:
            is_output[node] = False
        elif node.products:
            is_output[node] = None if reads or not cleanly or _adds_to_stream(node) else True
    return is_output


def _adds_to_stream(product: Node) -> bool:
    """Whether the result of a layer is added to what it reads: a residual stream.

    What one deep layer has made alone, as a spectrum, is none; it may be refined by others.
    """
    below = (term for term in _added(product, through=False) if term.is_below(product))
    stream = next(below, None)
    is_refined = stream is not None and bool(stream.products) and Past.DEEP in stream.past
    return stream is not None and not (is_refined and next(below, None) is None)


def _added(product: Node, through: bool = True) -> Iterator[Node]:
    """Yield the terms of all sums to which the result of a product comes, also ``through`` products with weights."""

    def terms(node: Node, position: int) -> list[Node]:
        starts = (source_of(edge, EACH) for edge in (node.others(position) if node.kind == "Add" else ()))
        return [start[0] for start in starts if start is not None and start[0] is not product]

    for node in reached([product], lambda node: [user for user in node.readers if through or not user.products]):
        for user, position, _ in node.users:
            yield from reached(terms(user, position), lambda term: terms(term, -1))
