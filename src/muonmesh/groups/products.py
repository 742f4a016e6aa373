"""Products: where a forward multiplies by a weight, and how the weight is stored as an operand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import Literal

from torch import Tensor

from muonmesh.groups.forms import Atoms, Form, through
from muonmesh.groups.graph import NOTHING, VIEWS, Edge, Node, Past
from muonmesh.groups.parameter_sites import global_shape

Stored = Literal["out×in", "in×out"]


@dataclass(eq=False, slots=True)
class Product:
    """One product with a weight.

    Attributes:
        node: The node of the product.
        parameter: The weight.
        form: The form of the weight as an operand; None if it is unknown.
        out: The dim of the operand that becomes the product's features.
        inner: The dim of the operand that is summed.
        features: The dim of the product's result that the weight makes.
        reads: Where the other operand comes from.
        groups: The number of groups of a convolution; 0 for others.
        stored: How the weight, or each of a stack, is stored; None if the operand is none of these.
        rows: The rows of the weight out × in, or of one of a stack; 0 if it is not known how it is stored.
    """

    node: Node
    parameter: Tensor
    form: Form | None
    out: int
    inner: int
    features: int
    reads: Edge | None
    groups: int = 0
    stored: Stored | None = None
    rows: int = 0

    def __post_init__(self) -> None:
        shape, self.stored = global_shape(self.parameter), self._stored()
        if self.stored is not None:
            layer = self.node.effect == "applies"
            self.rows = shape[-1] if self.stored == "in×out" else shape[0] if layer else shape[-2]

    def _stored(self) -> Stored | None:
        shape = global_shape(self.parameter)
        if self.form is None:
            return None
        if self.node.effect == "applies":
            return "out×in" if self.out == 0 else None
        ((out, out_stride), *more), inner = self.one_of_stack(self.out) or ((0, 0),), self.one_of_stack(self.inner)
        if more or len(shape) > 3 or (self.form.ranks and out not in shape[-2:]):
            return None
        if out_stride == shape[-1] and inner == ((shape[-1], 1),):
            return "out×in"
        return "in×out" if out_stride == 1 and inner == ((shape[-2], shape[-1]),) else None

    def one_of_stack(self, dim: int) -> Atoms:
        """Return the (size, stride) pairs of a dim of the operand, but for those between the matrices of a stack."""
        assert self.form is not None
        shape = global_shape(self.parameter)
        stack = prod(shape[1:]) if len(shape) == 3 and self.node.effect != "applies" else 0
        return tuple(atom for atom in self.form.dims[dim] if not stack or atom[1] != stack)


def weight_at(edge: Edge | None) -> tuple[Tensor, Form | None] | None:
    """Return the parameter that an edge leads to through views and casts, with its form there."""
    path = []
    while edge is not None and edge[0].leaf is None:
        if edge[0].effect not in VIEWS or len(edge[0].below) != 1:
            return None
        path.append(edge)
        edge = edge[0].below[0]
    parameter = None if edge is None else edge[0].leaf
    if parameter is None or len(shape := global_shape(parameter)) < 2:
        return None
    form: Form | None = Form(0, tuple(((n, prod(shape[i + 1 :])),) for i, n in enumerate(shape)))
    for node, number in reversed(path):
        form = form and through(form, node, number)
    return parameter, form


def _products_of(node: Node) -> list[Product]:
    """Return the products with weights that a node is."""
    edges, layer = node.operands, node.effect == "applies"
    weights = [None if layer and i == 0 else weight_at(edge) for i, edge in enumerate(edges)]
    if edges and all(weights):  # one that is expanded over a batch is a learned input
        weights = [None if weight is None or weight[1] is None or weight[1].repeats else weight for weight in weights]
    if all(weights) or not any(weights):  # a product of two parameters makes a weight, or reads a learned input
        return []
    if layer and weights[1] is not None:
        convolves = node.kind == "Convolution"
        out, inner = (1, 0) if convolves and node.fn._saved_transposed else (0, 1)
        features, groups = (1, node.fn._saved_groups) if convolves else (len(node.shape()) - 1, 0)
        return [Product(node, *weights[1], out, inner, features, edges[0], groups)]
    rank, first, second = len(node.shape()), *weights
    products = [] if first is None else [Product(node, *first, -2, -1, rank - 2, edges[1])]
    return products if second is None else [*products, Product(node, *second, -1, -2, rank - 1, edges[0])]


def is_weight(edge: Edge | None) -> bool:
    """Whether an edge leads to a matrix that is a parameter, or to what is computed from such parameters alone."""
    if edge is None:
        return False
    past = edge[0].past
    return weight_at(edge) is not None or (Past.LEARNED in past and Past.LIVE not in past)


def learn(order: Iterable[Node]) -> None:
    """Find the products with weights among nodes, each after those that it reads, and what each is computed from."""
    for node in order:
        node.products = _products_of(node)
        past = reduce(or_, (source.past for source in node.sources), NOTHING)
        looks_up = node.effect == "looks up" and Past.LIVE not in past  # rows of inputs are no table
        if node.products or looks_up or (Past.LIVE in past and any(map(is_weight, node.operands))):
            past |= Past.LIVE | Past.WEIGHED | Past.LEARNED
        if node.is_input:
            past |= Past.LIVE | Past.DATA
        if node.is_opaque:
            past |= Past.LIVE | Past.HIDDEN
        if node.leaf is not None and sum(size > 1 for size in global_shape(node.leaf)) > 1:
            past |= Past.LEARNED
        if any(product.reads is not None and Past.LEARNED in product.reads[0].past for product in node.products):
            past |= Past.DEEP
        node.past = past


def source_of(edge: Edge | None, more: Iterable[str] = ()) -> Edge | None:
    """Return what an edge leads to behind views, casts, biases and operations of these effects."""
    while edge is not None:
        node = edge[0]
        below = [before for before in node.below if before is not None and Past.LIVE in before[0].past]
        passed = node.effect in ("reshapes", "turns", "moves", *more) or node.kind == "Add"
        if not passed or len(below) != 1:
            return edge
        edge = below[0]
    return None
