"""Cuts: tells from what reads the output of a weight how its rows are cut into matrices."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product
from typing import Any

from muonmesh.groups.forms import Atoms, Form, through
from muonmesh.groups.graph import CUTS, EACH, VIEWS, Node, Past
from muonmesh.groups.parameter_sites import Matrices
from muonmesh.groups.products import Product, source_of

Parts = frozenset[tuple[int, Atoms]]
"""Parts of the rows of a weight out × in: the first row, and (size, stride) pairs."""

_Step = tuple[Node, int, tuple[tuple[str, int], ...]]
"""A node that a path has reached, the place among its inputs, and the products on the path."""

_MOST_PARTS = 16
"""A weight whose output is cut into more parts is taken for one matrix, whose heads are looked at one by one."""

_DEEPEST = 60
"""Operations behind a product; what cuts further behind is not looked for."""


def parts_made(weight: Product) -> tuple[Parts | None, bool]:
    """Return into which rows the features that a weight makes are cut, and whether there may be more parts.

    The first is one part if they are not cut, and None if this is unknown.
    """
    shape = weight.node.shape()
    features_made = rows = Atoms()
    if weight.form is not None:
        features_made, rows = weight.form.dims[weight.out], weight.one_of_stack(weight.out)
    features = Form(0, (tuple((size, int((size, stride) in rows)) for size, stride in features_made),))
    is_readable = len(rows) == 1 and features.sizes[0] == shape[weight.features]
    dims = (features.dims[0] if is_readable and i == weight.features else ((n, 0),) for i, n in enumerate(shape))
    output = Form(0, tuple(dims))
    hides: list[Node] = []
    pieces = _pieces(weight.node, 0, output, hides) or [output]
    if weight.form is None or weight.rows == 0 or not is_readable or (hides and len(pieces) == 1):
        return None, bool(hides)
    ((count, stride),) = rows
    first = weight.form.offset // stride % weight.rows
    if len(pieces) > _MOST_PARTS:
        return frozenset({(first, ((count, 1),))}), bool(hides)
    return frozenset((first + piece.offset, piece.atoms()) for piece in pieces), bool(hides)


def _pieces(node: Node, number: int, form: Form, hides: list[Node], deep: int = 0) -> list[Form]:
    """Return the parts into which an output of a node is cut, itself if it is not; add nodes that may hide parts.

    What is only written into a state that the model returns has no parts: nothing is computed from it.
    """
    users = node.by_output.get(number, [])
    whole, parts = not users, dict[Any, Form]()
    for user, position in users:
        if user.effect in CUTS:
            inner = _parts(user, form, hides, deep)
        elif user.effect == "writes" and not user.users:
            inner = []
        else:
            after = _after(user, position, form) if deep < _DEEPEST else None
            inner = None if after is None else _pieces(user, 0, after, hides, deep + 1)
        if inner is None:  # it reads all features
            whole = True
            may_cut = user.effect in (*VIEWS, "gates") or _picks(user, form) or _is_cut_again(user)
            if user.is_opaque or may_cut or deep >= _DEEPEST:
                hides.append(user)
        parts |= {(part.offset, part.atoms()): part for part in inner or ()}
    if not whole and not parts:
        return []
    cuts = [user for user, _ in users if user.effect in CUTS]
    if whole or len(parts) < 2 or (form.offset, form.atoms()) in parts or _joined(cuts):
        return [form]
    return list(parts.values())


def _parts(cut: Node, form: Form, hides: list[Node], deep: int) -> list[Form] | None:
    """Return the parts of all outputs of a node that cuts; None if they are unknown."""
    gates = cut.effect == "gates"
    pieces: list[Form] = []
    for number in range(2 if gates else len(cut.outputs)):
        part = through(form, cut, number)
        if part is None:
            return None
        pieces += [part] if gates else _pieces(cut, number, part, hides, deep + 1)
    return pieces


def _is_cut_again(node: Node) -> bool:
    """Whether a node joins features with others and the result is cut, so that its parts are not seen."""
    if node.kind != "Cat":
        return False
    rank = len(node.shape())
    dim = node.dim("dim", rank)
    return any(user.effect in CUTS and user.dim("dim", rank) == dim for user in node.readers)


def _picks(node: Node, form: Form) -> bool:
    """Whether a node picks features by indices, which may be a cut; its shape tells, because indices may be packed."""
    features = [i for i, dim in enumerate(form.dims) if any(stride for _, stride in dim)]
    if not features or node.kind not in ("Index", "IndexSelect", "Gather"):
        return False
    behind = form.sizes[features[0] :]
    return node.shape()[-len(behind) :] != behind


def _after(node: Node, position: int, form: Form) -> Form | None:
    """Return the form behind a view, a function of each element, or what keeps channels apart; None behind others."""
    if node.effect in ("reshapes", "turns", "moves"):
        return through(form, node, 0)
    shape = node.shape()
    if node.kind == "Cat" and len(shape) == len(form.dims):
        dim = node.dim("dim", len(shape))
        apart = all(not stride for _, stride in form.dims[dim])  # tokens of several experts, and no features
        return form._replace(dims=(*form.dims[:dim], ((shape[dim], 0),), *form.dims[dim + 1 :])) if apart else None
    if node.kind == "Convolution" and position == 0 and shape[1] == node.fn._saved_groups > 1:  # depthwise
        return form._replace(dims=tuple(form.dims[1] if i == 1 else ((n, 0),) for i, n in enumerate(shape)))
    if node.effect not in EACH or shape != form.sizes:
        return None
    source, others = node.below[position], [other for other, _ in node.others(position) if Past.LIVE in other.past]
    if not others:
        return form
    if source is None or node.kind not in ("Add", "Sub"):
        return None
    return form if all(_sums_products(other, source[0]) for other in others) else None


def _sums_products(other: Node, term: Node) -> bool:
    """Whether two terms are both products of weights, and neither is computed from the other: no residual stream.

    A frozen weight, such as that beside an adapter, is no node of the graph: its product has one operand alone.
    """
    start = source_of((other, 0))
    if start is None or not (start[0].products or None in start[0].operands):
        return False
    return not start[0].is_below(term) and not term.is_below(start[0])


def _joined(cuts: list[Node]) -> bool:
    """Whether all parts are joined again side by side, before any product: the two halves of a rotary embedding.

    Parts also count as joined if each is the same operand of a product of the same kind, and the results of these
    products are joined. The parts are then values of different heads.
    """
    reached = [_joins(cut, number) for cut in cuts for number in cut.by_output]
    if len(reached) < 2:
        return False
    before = [{join for join, _, products in steps if not products} for steps in reached]
    behind = [{(join, products) for join, _, products in steps if products} for steps in reached]
    places = {position for steps in reached for _, position, products in steps if products}
    side_by_side = len(places) == len(reached) and bool(set.intersection(*behind))
    return side_by_side or bool(set.intersection(*before))


def _joins(cut: Node, number: int) -> set[_Step]:
    """Return the nodes that join an output of a cut with other tensors before a product with a weight reads it."""
    todo: list[_Step] = [(user, position, ()) for user, position in cut.by_output[number]]
    met, joins = set[Node](), set[_Step]()
    while todo and len(met) < 50:
        node, position, products = todo.pop(0)
        if node in met or node.products:
            continue
        met.add(node)
        if node.effect == "joins":
            joins.add((node, position, products))
        passed = (*products, (node.kind, position)) if node.is_product else products
        todo += [(user, at, passed) for user, at, _ in node.users if not (products and node.effect == "joins")]
    return joins


@cache
def as_matrices(parts: Parts, out: int) -> Matrices | None:
    """Return the entry of "matrices" for parts of ``out`` rows; None if no entry says it."""
    if parts == {(0, ((out, 1),))}:
        return "whole"
    owner: dict[int, int] = {}
    for i, (offset, atoms) in enumerate(sorted(parts)):
        places = product(*(range(0, size * stride, stride) for size, stride in atoms))
        for strides in places:
            if owner.setdefault(offset + sum(strides), i) != i:  # one product cuts what another does not
                return None
    rows = [owner.get(row, -1) for row in range(out)]
    if len(parts) == 1:
        return "whole" if set(rows) == {0} else None
    period = next(size for size in range(1, out + 1) if out % size == 0 and rows == rows[:size] * (out // size))
    order, runs = zip(*((i, len(list(run))) for i, run in groupby(rows[:period])), strict=True)
    if order != tuple(range(len(parts))):
        return None
    if period == out:
        return ("rows", *runs)
    if len(set(runs)) > 1:
        return ("interleaved", runs, 0)
    return ("interleaved", len(runs), 0) if runs[0] == 1 else ("interleaved", len(runs), 0, runs[0])
