"""Ends: tells input and output layers from what the nodes of a graph read and what reads them."""

from __future__ import annotations

from collections.abc import Iterator

from muonmesh.groups.graph import EACH, Node, Past, reached
from muonmesh.groups.products import Product, is_weight, source_of


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
