"""Graph: reads from autograd's graph of one forward what each weight does, and how its output is cut into parts.

A weight is the operand of a product; autograd's nodes between the parameter and the product may only be views and
casts. What lies above and below the product tells input layers, output layers and fused weights. What cannot be read
without doubt is None, and `split_params` then goes by its other rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from muonmesh.groups.fused_projections import Matrices
from muonmesh.names import starred

# The places of the two operands among the inputs of a product; the second of a layer's is its weight, out × in.
_PRODUCTS = {"Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Addbmm": (1, 2), "GroupedMm": (0, 1)}
_LAYERS = {"Convolution": (0, 1), "Linear": (0, 1), "MkldnnLinear": (0, 1)}
_RESHAPED = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "ToCopy", "Clone", "Expand"}
_RESHAPED |= {"Flatten", "Unflatten", "Contiguous"}
_TURNED = {"T", "Transpose", "Permute"}
_CUTS = {"Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind", "Select", "Slice", "Glu"}
_LOOK_UP = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"}
# These keep every feature apart, if the other operand is no activation.
_EACH = {"Add", "Sub", "Mul", "Div", "Neg", "Exp", "Pow", "Clamp", "ClampMin", "ClampMax", "MaskedFill", "Where"}
_EACH |= {"Relu", "Gelu", "Silu", "Sigmoid", "Tanh", "Softplus", "Elu", "LeakyRelu", "Mish", "Hardswish", "Hardtanh"}
_EACH |= {"Hardsigmoid", "LogSigmoid", "Prelu", "NativeDropout", "FusedDropout"}
_EACH |= {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}
# These read all features of what they are given, so a weight whose output they read is one matrix.
_READERS = {"NativeLayerNorm", "FusedRmsNorm", "RmsNorm", "NativeGroupNorm", "Softmax", "LogSoftmax", "Norm", "Var"}
_READERS |= {"LinalgVectorNorm", "Sum", "Mean", "Cat", "Stack", "ViewAsComplex", "NllLoss", "MseLoss", "Rsqrt", "Sqrt"}
_READERS |= {"BinaryCrossEntropyWithLogits", "MaxPool2DWithIndices", "AvgPool2D", "AdaptiveAvgPool2D", "ConstantPadNd"}
_READERS |= {"UpsampleNearest2D", "UpsampleBilinear2D", "Repeat"}

_MOST_PARTS = 16
"""A weight whose output is cut into more parts is taken for one matrix, whose heads are looked at one by one."""

Edge = tuple[Any, int]
"""A node of the graph and the number of one of its outputs."""


@dataclass
class Seen:
    """What a forward showed of one parameter.

    Attributes:
        uses: How often it was an operand of a product.
        does: "multiplies" activations, is "looked up", makes a weight ("computed"), or is a factor of a "pair" beside a
            layer (LoRA); None if nothing of these was seen without doubt.
        stored: Whether a matrix is stored "out×in" or "in×out"; None if the graph does not tell.
        first: Whether it only reads the model's inputs; None: unknown.
        last: Whether it makes outputs that no other layer reads; None: unknown.
        cut: How the out dim is cut into parts, as an entry of "matrices" for a matrix out × in; None if it is not, or
            if the graph does not tell.
        grouped: Whether it is the weight of a convolution in several groups.
    """

    uses: int = 0
    does: Literal["multiplies", "looked up", "computed", "pair"] | None = None
    stored: Literal["out×in", "in×out"] | None = None
    first: bool | None = None
    last: bool | None = None
    cut: Matrices | None = None
    grouped: bool = False


class Form(NamedTuple):
    """Which numbers a view holds: dims of (size, stride) pairs; a stride of 0 means that the number does not change."""

    offset: int
    dims: tuple[tuple[tuple[int, int], ...], ...]

    def viewed(self, shape: Iterable[int]) -> Form | None:
        """Return the form in another shape; None if its numbers then have no strides."""
        atoms: list[tuple[int, int]] = []
        for size, stride in (atom for dim in self.dims for atom in dim if atom[0] != 1):
            if atoms and atoms[-1][1] == size * stride:  # also of two strides of 0
                size *= atoms.pop()[0]
            atoms.append((size, stride))
        dims = []
        for size in shape:
            dim = []
            while size > 1:
                if not atoms:
                    return None
                held, stride = atoms.pop(0)
                if size % held == 0:
                    dim.append((held, stride))
                    size //= held
                elif held % size == 0:
                    dim.append((size, stride * (held // size)))
                    atoms.insert(0, (held // size, stride))
                    size = 1
                else:
                    return None
            dims.append(tuple(dim))
        return None if atoms else Form(self.offset, tuple(dims))

    def sliced(self, dim: int, start: int, count: int, step: int = 1) -> Form | None:
        """Return the form of ``count`` indices of a dim; None if its numbers then have no strides."""
        dims = list(self.dims)
        if count == prod(size for size, _ in dims[dim]):
            return self
        atoms = list(dims[dim])
        inner = prod(size for size, _ in atoms[1:])
        if not atoms or (len(atoms) > 1 and (step != 1 or start % inner or count % inner)):
            return None
        _, stride = atoms[0]
        dims[dim] = ((count // inner, stride * step), *atoms[1:])
        return Form(self.offset + start // inner * stride, tuple(dims))

    def atoms(self) -> tuple[tuple[int, int], ...]:
        """Return the (size, stride) pairs that tell numbers apart, the largest stride first, merged where they join."""
        found: list[tuple[int, int]] = []
        for size, stride in sorted(((n, s) for dim in self.dims for n, s in dim if n > 1 and s), key=lambda a: -a[1]):
            if found and found[-1][1] == size * stride:
                size *= found.pop()[0]
            found.append((size, stride))
        return tuple(found)


def kind_of(node: Any) -> str:
    """Return the name of the operation behind a node: "Addmm" for AddmmBackward0."""
    return str(node.name()).partition("Backward")[0].strip("_")


def _dim(saved: int) -> int:
    """Return a dim that a node has saved; negative ones are shown as unsigned numbers of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


def _shape(edge: Edge) -> tuple[int, ...]:
    node, number = edge
    if (variable := getattr(node, "variable", None)) is not None:
        return tuple(variable.shape)
    return tuple(int(size) for size in node._input_metadata[number].shape)


def _through(form: Form, node: Any, number: int) -> Form | None:
    """Return the form of output ``number`` of a view, given the form of its input; None if it is unknown."""
    kind, dims, rank = kind_of(node), form.dims, len(form.dims)
    if kind == "T":
        return Form(form.offset, dims[::-1])
    if kind == "Transpose":
        a, b = _dim(node._saved_dim0) % rank, _dim(node._saved_dim1) % rank
        order = [b if i == a else a if i == b else i for i in range(rank)]
        return Form(form.offset, tuple(dims[i] for i in order))
    if kind == "Permute":
        return Form(form.offset, tuple(dims[_dim(i) % rank] for i in node._saved_dims))
    shape = _shape((node, 0 if kind == "Glu" else number))
    if kind == "Expand":
        old = [()] * (len(shape) - rank) + list(dims)
        sizes = [prod(size for size, _ in dim) for dim in old]
        return Form(
            form.offset,
            tuple(dim if n == size else ((n, 0),) for n, size, dim in zip(shape, sizes, old, strict=True)),
        )
    if kind in _RESHAPED:
        return form.viewed(shape)
    if kind not in _CUTS:
        return None
    dim = _dim(node._saved_dim) % rank
    length = prod(size for size, _ in dims[dim])
    if kind in ("Select", "Unbind"):
        index = number if kind == "Unbind" else _dim(node._saved_index) % length
        found = form.sliced(dim, index, 1)
        return found and Form(found.offset, found.dims[:dim] + found.dims[dim + 1 :])
    if kind == "Slice":
        start, step = slice(_dim(node._saved_start), _dim(node._saved_end)).indices(length)[0], node._saved_step
        return form.sliced(dim, start, shape[dim], step)
    if kind == "Glu":
        return form.sliced(dim, number * length // 2, length // 2)
    return form.sliced(dim, sum(_shape((node, before))[dim] for before in range(number)), shape[dim])


@dataclass
class _Use:
    """One product with a weight: the node, the parameter, its form as an operand, and the other operand."""

    node: Any
    parameter: Tensor
    form: Form | None
    out: int  # dim of the operand that becomes the product's features
    inner: int  # dim of the operand that is summed
    features: int  # dim of the product's result
    reads: Edge | None
    grouped: bool = False


@dataclass
class _Walk:
    """Autograd's graph from the nodes ``roots`` down: all nodes, each after those that it reads, and their users."""

    roots: list[Any]
    parameters: Mapping[int, str]
    inputs: Collection[int]
    order: dict[Any, int] = field(default_factory=dict)
    users: dict[Any, list[tuple[Any, int, int]]] = field(default_factory=lambda: defaultdict(list))
    uses: dict[Any, list[_Use]] = field(default_factory=lambda: defaultdict(list))
    live: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the nodes and find the products."""
        todo: list[tuple[Any, bool]] = [(node, False) for node in self.roots]
        begun: set[Any] = set()
        while todo:
            node, done = todo.pop()
            if done:
                self.order[node] = len(self.order)
                continue
            if node in begun:
                continue
            begun.add(node)
            todo.append((node, True))
            for place, (before, number) in enumerate(node.next_functions):
                if before is not None:
                    self.users[before].append((node, place, number))
                    todo.append((before, False))
        for node in self.order:
            self._find_uses(node)
            below = [before for before, _ in node.next_functions if before is not None]
            self.live[node] = bool(
                self.uses.get(node)
                or self.is_data(node)
                or kind_of(node) in _LOOK_UP
                or self.is_opaque(node)
                or any(self.live[before] for before in below)
            )

    def is_data(self, node: Any) -> bool:
        """Whether a node is an input of the model."""
        return hasattr(node, "variable") and id(node.variable) in self.inputs

    @staticmethod
    def is_opaque(node: Any) -> bool:
        """Whether a node hides what it computes: a checkpoint, a compiled or a custom function."""
        return "CppNode" in node.name() or (hasattr(node, "saved_tensors") and not hasattr(node, "variable"))

    def weight(self, edge: Edge) -> tuple[Tensor, Form | None] | None:
        """Return the parameter that an edge leads to through views and casts, with its form there."""
        path, (node, number) = [], edge
        while node is not None and not hasattr(node, "variable"):
            if kind_of(node) not in _RESHAPED | _TURNED | _CUTS - {"Glu"} or len(node.next_functions) != 1:
                return None
            path.append((node, number))
            node, number = node.next_functions[0]
        if node is None or id(node.variable) not in self.parameters or node.variable.dim() < 2:
            return None
        shape = node.variable.shape
        form: Form | None = Form(0, tuple(((n, prod(shape[i + 1 :])),) for i, n in enumerate(shape)))
        for view, number in reversed(path):
            form = form and _through(form, view, number)
        return node.variable, form

    def _find_uses(self, node: Any) -> None:
        kind = kind_of(node)
        places = _PRODUCTS.get(kind) or _LAYERS.get(kind)
        if places is None:
            return
        edges = [node.next_functions[place] for place in places]
        weights = [None if kind in _LAYERS and i == 0 else self.weight(edge) for i, edge in enumerate(edges)]
        if all(weights):  # a product of two parameters makes a weight, or reads a learned input
            return
        rank = len(_shape((node, 0)))
        for i, found in enumerate(weights):
            if found is None:
                continue
            reads = None if edges[1 - i][0] is None else edges[1 - i]
            grouped = kind == "Convolution" and node._saved_groups > 1
            if kind in _LAYERS:
                out, inner, features = 0, 1, 1 if kind == "Convolution" else rank - 1
                if kind == "Convolution" and node._saved_transposed:
                    out, inner = 1, 0
            else:
                out, inner, features = (-1, -2, rank - 1) if i else (-2, -1, rank - 2)
            self.uses[node].append(_Use(node, *found, out, inner, features, reads, grouped))

    def is_below(self, node: Any, top: Any) -> bool:
        """Whether the value of ``top`` is computed from that of ``node``."""
        floor, todo, met = self.order[node], [top], {top}
        while todo:
            above = todo.pop()
            if above is node:
                return True
            for before, _ in above.next_functions:
                if before is not None and before not in met and self.order[before] >= floor:
                    met.add(before)
                    todo.append(before)
        return False

    def source(self, edge: Edge | None, more: Iterable[str] = ()) -> Edge | None:
        """Return what an edge leads to behind views, casts, biases and the operations of these kinds."""
        passed = {*_RESHAPED, *_TURNED, "Add", *more}
        while edge is not None and edge[0] is not None:
            node = edge[0]
            below = [before for before in node.next_functions if before[0] is not None and self.live[before[0]]]
            if kind_of(node) not in passed or len(below) != 1:
                return edge
            edge = below[0]
        return None


def seen_by(
    outputs: Iterable[Tensor], named: Collection[tuple[str, nn.Parameter]], inputs: Collection[Tensor]
) -> dict[str, Seen]:
    """Return what the graph behind some outputs shows of each parameter, by name.

    Outputs that are computed on by others, such as hidden states or keys beside logits, do not count as outputs.

    Args:
        outputs: The tensors that a forward returned.
        named: The parameters with their names; frozen ones that did not require gradients are not seen.
        inputs: The inputs, which required gradients. What is made of none is a fixed number, or hidden from the graph.
    """
    names = {id(parameter): name for name, parameter in named}
    roots = list(dict.fromkeys(out.grad_fn for out in outputs if out.grad_fn is not None))
    walk = _Walk(roots, names, {id(tensor) for tensor in inputs})
    walk.roots = [node for node in roots if not walk.users.get(node)]
    found: dict[str, Seen] = defaultdict(Seen)
    facts: dict[str, list[tuple[_Use, bool | None, bool | None]]] = defaultdict(list)
    learned, data = _below(walk)
    ends = _above(walk)
    for uses in walk.uses.values():
        for use in uses:
            reads = use.reads[0] if use.reads is not None else None
            first = None if reads is None else False if reads in learned else (reads in data or None)
            facts[names[id(use.parameter)]].append((use, first, ends.get(use.node)))
    for node in walk.order:
        if hasattr(node, "variable") and id(node.variable) in names:
            found[names[id(node.variable)]] = Seen()
        if kind_of(node) in _LOOK_UP and (at := walk.weight(node.next_functions[0])) is not None:
            found[names[id(at[0])]].does = "looked up"
    for parameter in _computed(walk):
        found[names[id(parameter)]].does = "computed"
    for name, all_uses in facts.items():
        seen = found[name]
        seen.uses = len(all_uses)
        seen.does = seen.does or "multiplies"
        seen.first = _agreed(first for _, first, _ in all_uses)
        seen.last = _agreed(last for _, _, last in all_uses)
        seen.grouped = any(use.grouped for use, _, _ in all_uses)
        seen.stored = _agreed(_stored(use) for use, _, _ in all_uses)
        cuts = [_cut(walk, use) for use, _, _ in all_uses] if seen.stored and not seen.grouped else [None]
        seen.cut = _agreed(cuts)
    for parameter in _pairs(walk):
        found[names[id(parameter)]].does = "pair"
    _unlike_others(found, {name: tuple(parameter.shape) for name, parameter in named})
    return dict(found)


def _agreed(values: Iterable[Any]) -> Any:
    """Return the only value among some; None if they differ."""
    some = list(dict.fromkeys(values))
    return some[0] if len(some) == 1 else None


def _below(walk: _Walk) -> tuple[set[Any], set[Any]]:
    """Return the nodes whose values weights or tables take part in, and those that inputs and nothing hidden make."""
    learned, data, hidden = set[Any](), set[Any](), set[Any]()
    for node in walk.order:
        below = {before for before, _ in node.next_functions if before is not None}
        own = bool(walk.uses.get(node)) or kind_of(node) in _LOOK_UP
        if hasattr(node, "variable") and id(node.variable) in walk.parameters:
            own = sum(size > 1 for size in node.variable.shape) > 1
        if own or not below.isdisjoint(learned):
            learned.add(node)
        if walk.is_opaque(node) or not below.isdisjoint(hidden):
            hidden.add(node)
        if walk.is_data(node) or not below.isdisjoint(data):
            data.add(node)
    return learned, data - hidden


def _above(walk: _Walk) -> dict[Any, bool | None]:
    """Return for each product with a weight whether it makes outputs that no other layer reads; None: unknown."""
    read: dict[Any, bool] = {}
    clean: dict[Any, bool] = {}  # reaches an output without another product
    direct: dict[Any, bool] = {}  # reaches an output without another weight
    for node in reversed(walk.order):
        root = node in walk.roots
        read[node], clean[node], direct[node] = False, root, root
        for user, place, _ in walk.users.get(node, ()):
            uses = walk.uses.get(user)
            if uses and (any(use.reads == user.next_functions[place] for use in uses) or _is_biased(user, place)):
                biased = _is_biased(user, place)
                read[node] |= read[user] if biased else True
                clean[node] |= biased and clean[user]
                direct[node] |= biased and direct[user]
                continue
            fused = walk.is_opaque(user) or (kind_of(user) not in _EACH and _holds_matrix(walk, user, place))
            read[node] |= read[user] or fused
            direct[node] |= direct[user]
            clean[node] |= clean[user] and not fused and not _is_product(user)
    found: dict[Any, bool | None] = {}
    for node in walk.uses:
        if not direct[node]:
            found[node] = False
        elif read[node] or not clean[node] or _is_residual(walk, node):
            found[node] = None
        else:
            found[node] = True
    return found


def _is_product(node: Any) -> bool:
    kind = kind_of(node)
    return kind in _PRODUCTS or kind in _LAYERS or kind.startswith("ScaledDotProduct")


def _is_biased(product: Any, place: int) -> bool:
    """Whether an input of a product is what it adds."""
    return kind_of(product) in ("Addmm", "Baddbmm", "Addbmm") and place == 0


def _holds_matrix(walk: _Walk, node: Any, place: int) -> bool:
    """Whether a kernel, such as an LSTM's, reads a matrix of the model beside an activation."""
    others = (edge for i, edge in enumerate(node.next_functions) if i != place and edge[0] is not None)
    return any(walk.weight(edge) is not None for edge in others)


def _is_residual(walk: _Walk, product: Any) -> bool:
    """Whether the result of a product is added to what the product itself is computed from."""
    todo, met = [product], {product}
    while todo:
        node = todo.pop()
        for user, place, _ in walk.users.get(node, ()):
            if kind_of(user) == "Add":
                for other in (edge for i, edge in enumerate(user.next_functions) if i != place):
                    start = walk.source(other, _EACH)
                    if start is not None and start[0] is not product and walk.is_below(start[0], product):
                        return True
            if user not in met and not walk.uses.get(user):
                met.add(user)
                todo.append(user)
    return False


def _computed(walk: _Walk) -> Iterator[Tensor]:
    """Yield the parameters from which a weight is computed element by element, as by weight norm or pruning."""
    for node in walk.order:
        kind = kind_of(node)
        places = _PRODUCTS.get(kind) or _LAYERS.get(kind) or ()
        edges = [node.next_functions[place] for place in places]
        for i, (start, _) in enumerate(edges):
            other = edges[1 - i][0]
            if start is None or walk.live[start] or walk.weight(edges[i]) is not None:
                continue
            if other is not None and not walk.live[other]:
                continue
            todo, met = [start], {start}
            while todo:
                below = todo.pop()
                if hasattr(below, "variable") and below.variable.dim() > 1:
                    yield below.variable
                more = {before for before, _ in below.next_functions if before is not None} - met
                met |= more
                todo += more


def _pairs(walk: _Walk) -> Iterator[Tensor]:
    """Yield the two weights of low-rank pairs whose product is added to that of a layer with the same input (LoRA)."""
    scaled = ("Mul", "Div", "NativeDropout")
    for node in walk.order:
        if kind_of(node) != "Add":
            continue
        ends = [walk.source(edge, scaled) for edge in node.next_functions]
        sides = [walk.uses.get(end[0], []) if end is not None else [] for end in ends]
        for upper, base in (sides, sides[::-1]) if len(sides) == 2 else ():
            if len(upper) != 1 or len(base) != 1:
                continue
            middle = walk.source(upper[0].reads, scaled)
            lower = walk.uses.get(middle[0], []) if middle is not None else []
            if len(lower) != 1 or walk.source(lower[0].reads, scaled) != walk.source(base[0].reads, scaled):
                continue
            if min(lower[0].parameter.shape[:2]) < min(base[0].parameter.shape[:2]):
                yield from (lower[0].parameter, upper[0].parameter)


def _stored(use: _Use) -> Literal["out×in", "in×out"] | None:
    """Return how a weight is stored; None if the operand is not one matrix, or one of a stack, in this order."""
    shape = tuple(use.parameter.shape)
    if use.form is None or len(shape) < 2:
        return None
    if kind_of(use.node) in _LAYERS:
        return "out×in" if use.out == 0 else None
    sides: dict[Any, str] = {((shape[-2], shape[-1]),): "rows", ((shape[-1], 1),): "cols"} if len(shape) < 4 else {}
    out, inner = (sides.get(_one_of_stack(use, dim)) for dim in (use.out, use.inner))
    return "out×in" if (out, inner) == ("rows", "cols") else "in×out" if (out, inner) == ("cols", "rows") else None


def _one_of_stack(use: _Use, dim: int) -> tuple[tuple[int, int], ...]:
    """Return the (size, stride) pairs of a dim of an operand without those that tell the matrices of a stack apart."""
    assert use.form is not None
    stacked = use.parameter.dim() == 3 and kind_of(use.node) not in _LAYERS
    stack = prod(use.parameter.shape[1:]) if stacked else 0
    return tuple(atom for atom in use.form.dims[dim] if not stack or atom[1] != stack)


def _cut(walk: _Walk, use: _Use) -> Matrices | None:
    """Return how the features that a weight makes are cut into parts that stay apart; None if they are not."""
    assert use.form is not None
    shape, made = _shape((use.node, 0)), use.form.dims[use.out]
    own = _one_of_stack(use, use.out)
    out = prod(size for size, _ in own)
    if len(own) != 1 or shape[use.features] != prod(size for size, _ in made):
        return None
    features = tuple((size, int((size, stride) in own)) for size, stride in made)
    form = Form(0, tuple(features if i == use.features else ((n, 0),) for i, n in enumerate(shape)))
    pieces = _pieces(walk, use.node, 0, form)
    return None if pieces is None or not 1 < len(pieces) <= _MOST_PARTS else _as_matrices(pieces, out)


def _pieces(walk: _Walk, node: Any, number: int, form: Form, deep: int = 0) -> list[Form] | None:
    """Return the parts into which an output of a node is cut; itself if it is not cut; None if this is unknown."""
    users = [(user, place) for user, place, nr in walk.users.get(node, ()) if nr == number]
    whole, parts = not users, dict[Any, Form]()
    for user, place in users:
        if kind_of(user) in _CUTS:
            inner = _parts(walk, user, form, deep)
        elif (after := _kept(walk, user, place, form)) is not None and deep < 60:
            inner = _pieces(walk, user, 0, after, deep + 1)
        elif kind_of(user) in _EACH | _READERS or _is_product(user):
            inner, whole = [], True
        else:
            return None
        if inner is None:
            return None
        parts |= {(part.offset, part.atoms()): part for part in inner}
    cuts = [user for user, _ in users if kind_of(user) in _CUTS]
    if whole or len(parts) < 2 or (form.offset, form.atoms()) in parts or _joined(walk, cuts):
        return [form]
    return list(parts.values())


def _parts(walk: _Walk, cut: Any, form: Form, deep: int) -> list[Form] | None:
    """Return the parts of all outputs of a node that cuts."""
    gated = kind_of(cut) == "Glu"
    found: list[Form] = []
    for number in range(2 if gated else len(cut._input_metadata)):
        part = _through(form, cut, number)
        if part is None:
            return None
        inner = [part] if gated else _pieces(walk, cut, number, part, deep + 1)
        if inner is None and part.atoms() == form.atoms():
            return None
        found += inner or [part]
    return found


def _kept(walk: _Walk, node: Any, place: int, form: Form) -> Form | None:
    """Return the form behind a view, a function of each element or a depthwise convolution; None behind others."""
    kind, shape = kind_of(node), _shape((node, 0))
    if kind in _RESHAPED | _TURNED:
        return _through(form, node, 0)
    if kind == "Convolution" and _is_depthwise(node, place):
        return Form(form.offset, tuple(form.dims[1] if i == 1 else ((n, 0),) for i, n in enumerate(shape)))
    if kind not in _EACH or shape != tuple(prod(size for size, _ in dim) for dim in form.dims):
        return None
    own = node.next_functions[place][0]
    others = [other for i, (other, _) in enumerate(node.next_functions) if i != place and other is not None]
    others = [other for other in others if walk.live[other]]
    sums = kind in ("Add", "Sub") and all(_sums_products(walk, other, own) for other in others)
    return form if not others or sums else None


def _is_depthwise(node: Any, place: int) -> bool:
    """Whether a convolution changes each channel by itself."""
    return place == 0 and node._saved_groups > 1 and _shape((node, 0))[1] == node._saved_groups


def _sums_products(walk: _Walk, other: Any, own: Any) -> bool:
    """Whether two terms are both products of weights, and neither is computed from the other: no residual stream."""
    start = walk.source((other, 0))
    if start is None or not walk.uses.get(start[0]):
        return False
    return not walk.is_below(start[0], own) and not walk.is_below(own, start[0])


def _joined(walk: _Walk, cuts: list[Any]) -> bool:
    """Whether all parts are joined again side by side, before any product: the two halves of a rotary embedding."""
    reached: list[set[Any]] = []
    for cut in cuts:
        for number in range(len(cut._input_metadata)):
            todo = [user for user, _, nr in walk.users.get(cut, ()) if nr == number]
            if not todo:
                continue
            met: set[Any] = set()
            while todo and len(met) < 50:
                node = todo.pop(0)
                if node in met:
                    continue
                met.add(node)
                if not _is_product(node):
                    todo += [user for user, _, _ in walk.users.get(node, ())]
            reached.append({node for node in met if kind_of(node) in ("Cat", "Stack")})
    return len(reached) > 1 and bool(set.intersection(*reached))


def _as_matrices(pieces: list[Form], out: int) -> Matrices | None:
    """Return the entry of "matrices" for pieces of ``out`` rows; None if no entry says it."""
    pieces = sorted(pieces, key=lambda piece: piece.offset)
    runs, turns = [], set()
    for piece in pieces:
        atoms = piece.atoms()
        if not atoms:  # one row
            runs.append(1)
            turns.add(out)
        elif len(atoms) == 1 and atoms[0][1] == 1:
            runs.append(atoms[0][0])
            turns.add(out)
        elif len(atoms) == 1:
            runs.append(1)
            turns.add(atoms[0][1])
        elif len(atoms) == 2 and atoms[1][1] == 1:
            runs.append(atoms[1][0])
            turns.add(atoms[0][1])
        else:
            return None
        if len(turns) > 1 or (turns != {out} and atoms[0][0] * atoms[0][1] != out):
            return None
    (turn,) = turns
    if [piece.offset for piece in pieces] != [sum(runs[:i]) for i in range(len(runs))] or sum(runs) != turn:
        return None
    if turn == out:
        return ("rows", *runs)
    if len(set(runs)) > 1:
        return ("interleaved", tuple(runs), 0)
    return ("interleaved", len(runs), 0) if runs[0] == 1 else ("interleaved", len(runs), 0, runs[0])


def _unlike_others(found: Mapping[str, Seen], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Forget that a layer in a block is the first or the last, if most blocks have the same layer inside.

    A block that has no layer before it reads inputs, but it is a block like the others.
    """
    alike: dict[Any, list[Seen]] = defaultdict(list)
    for name, seen in found.items():
        around, _, _ = name.rpartition(".")
        if not around.rpartition(".")[2].isdecimal():
            alike[starred(name), shapes[name]].append(seen)
    for group in alike.values():
        for end in ("first", "last"):
            counts = Counter(getattr(seen, end) for seen in group)
            if counts[True] and counts[False]:
                for seen in group:
                    if getattr(seen, end):
                        setattr(seen, end, None)
