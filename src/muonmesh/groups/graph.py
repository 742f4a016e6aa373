"""Graph: reads from autograd's graph of one forward what each weight does, and how its output is cut into parts.

A weight is the operand of a product; autograd's nodes between the parameter and the product may only be views and
casts. What lies above and below the product tells input layers, output layers and fused weights. What cannot be read
without doubt is None, and `split_params` then goes by its other rules.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby, product
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from muonmesh.groups.parameter_sites import Matrices, global_shape
from muonmesh.names import starred

# The places of the two operands among the inputs of a product; the second of a layer's is its weight, out × in.
_PRODUCTS = {"Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Addbmm": (1, 2), "GroupedMm": (0, 1)}
_LAYERS = {"Convolution": (0, 1), "Linear": (0, 1), "MkldnnLinear": (0, 1)}
_LAYERS["LinearFunctionForZeroStage3"] = (0, 1)  # nn.Linear under ZeRO-3, an autograd function of DeepSpeed
_RESHAPED = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "ToCopy", "Clone", "Expand"}
_RESHAPED |= {"Flatten", "Unflatten", "Contiguous"}
_TURNED = {"T", "Transpose", "Permute"}
_CUTS = {"Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind", "Select", "Slice", "Glu"}
# A DTensor becomes its local shard, a shard a DTensor, and a DTensor is laid out anew: the numbers stay.
_MOVED = {"ToTorchTensor", "FromTorchTensor", "Redistribute"}
# Functions of FSDP2 and ZeRO-3 that mark when a module is over, and return the tensors that they are given.
_MARKS = {"RegisterPostBackwardFunction", "PreBackwardFunctionForModule", "PostBackwardFunctionModule"}
_LOOK_UP = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"}
_JOINS = {"Cat", "Stack"}
_WRITES = {"torch::autograd::Copy", "torch::autograd::CopySlices"}  # also into states that a model returns
_TAKES_ACTIVATIONS = {"Add", "Sub", "Where", "NativeLayerNorm", "FusedRmsNorm", *_JOINS}
_VIEWS = _RESHAPED | _TURNED | _MOVED | _CUTS - {"Glu"}
# These keep every feature apart, if the other operand is no activation.
_EACH = {"Add", "Sub", "Mul", "Div", "Neg", "Exp", "Pow", "Clamp", "ClampMin", "ClampMax", "MaskedFill", "Where"}
_EACH |= {"Relu", "Gelu", "Silu", "Sigmoid", "Tanh", "Softplus", "Elu", "LeakyRelu", "Mish", "Hardswish", "Hardtanh"}
_EACH |= {"Hardsigmoid", "LogSigmoid", "Prelu", "NativeDropout", "FusedDropout"}
_EACH |= {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}
_MOST_PARTS = 16
"""A weight whose output is cut into more parts is taken for one matrix, whose heads are looked at one by one."""


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
    stored: Literal["out×in", "in×out"] | None = None
    first: bool | None = None
    last: bool | None = None
    cut: Matrices | None = None
    groups: int = 0
    hidden: bool = False


class Form(NamedTuple):
    """The elements of a tensor that a view shows: an offset, and (size, stride) pairs for each dim of the view.

    A stride of 0 repeats the same elements. ``ranks`` are the pairs that lead from this rank's shard to the shards of
    other ranks, which have the same view.
    """

    offset: int
    dims: tuple[tuple[tuple[int, int], ...], ...]
    ranks: tuple[tuple[int, int], ...] = ()

    def viewed(self, shape: Iterable[int]) -> Form | None:
        """Return the form in another shape; None if its numbers then have no strides."""
        atoms = _merged(atom for dim in self.dims for atom in dim if atom[0] != 1)
        dims = []
        for size in shape:
            dim = []
            while size > 1:
                available, stride = atoms.pop(0) if atoms else (0, 0)
                count = min(available, size)
                if not count or size % count or available % count:
                    return None
                dim.append((count, stride * (available // count)))
                size //= count
                if available > count:
                    atoms.insert(0, (available // count, stride))
            dims.append(tuple(dim))
        return None if atoms else self._replace(dims=tuple(dims))

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
        return self._replace(offset=self.offset + start // inner * stride, dims=tuple(dims))

    @property
    def repeats(self) -> bool:
        """Whether numbers occur several times."""
        return any(size > 1 and not stride for dim in self.dims for size, stride in dim)

    def atoms(self) -> tuple[tuple[int, int], ...]:
        """Return the (size, stride) pairs that tell numbers apart, the largest stride first, merged where they join."""
        every = [*self.ranks, *(atom for dim in self.dims for atom in dim)]
        return tuple(_merged(sorted((atom for atom in every if atom[0] > 1 and atom[1]), key=lambda atom: -atom[1])))


def _merged(atoms: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) pairs, with one for each run of pairs that step on through the same numbers."""
    runs: list[tuple[int, int]] = []
    for size, stride in atoms:
        if runs and runs[-1][1] == size * stride:  # also of two strides of 0
            size *= runs.pop()[0]
        runs.append((size, stride))
    return runs


_T = TypeVar("_T")


def _reached(starts: Iterable[_T], onward: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield some things and all to which they lead, each once, the nearest first."""
    todo = deque(dict.fromkeys(starts))
    met = set(todo)
    while todo:
        yield (current := todo.popleft())
        new = [neighbor for neighbor in dict.fromkeys(onward(current)) if neighbor not in met]
        met.update(new)
        todo += new


@dataclass(eq=False)
class Node:
    """A node of autograd's graph with all that a walk has shown of it, so that autograd is asked once.

    Attributes:
        below: For each of its inputs, the node and the output that it comes from; None for inputs without a graph.
        users: The nodes that read it, with the place among their inputs and the number of the output that they read.
        leaf: The parameter that it stands for.
        uses: The products with a weight, if it is one.
        live: Whether its value comes from an input, a table or a product, and not from parameters alone.
        learned: Whether weights, tables or other matrices that are parameters take part in it.
        weighed: Whether weights or tables take part in it.
        data: Whether inputs take part in it.
        is_input: Whether it is an input itself.
        hidden: Whether something takes part in it that hides what it computes.
        deep: Whether a weight takes part in it that itself reads what another weight has made.
    """

    fn: Any
    kind: str
    number: int = 0
    below: list[Edge | None] = field(default_factory=list)
    users: list[tuple[Node, int, int]] = field(default_factory=list)
    leaf: Tensor | None = None
    uses: list[_Use] = field(default_factory=list)
    live: bool = False
    learned: bool = False
    weighed: bool = False
    data: bool = False
    is_input: bool = False
    hidden: bool = False
    deep: bool = False

    @cached_property
    def outputs(self) -> Sequence[Any]:
        """What autograd knows of its outputs; it makes the list anew at each look, which takes long for thousands."""
        return cast(Sequence[Any], self.fn._input_metadata)

    @cached_property
    def readers(self) -> Mapping[int, list[tuple[Node, int]]]:
        """For the number of each output that is read, the nodes that read it, with the place among their inputs."""
        readers = defaultdict[int, list[tuple[Node, int]]](list)
        for user, position, number in self.users:
            readers[number].append((user, position))
        return readers

    @cached_property
    def weights(self) -> list[int]:
        """The places of its inputs that are weights."""
        return [position for position, edge in enumerate(self.below) if _weight(edge)]

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return self.kind in _PRODUCTS or self.kind in _LAYERS or self.kind.startswith("ScaledDotProduct")

    @property
    def is_opaque(self) -> bool:
        """Whether it hides what it computes: a checkpoint, a compiled or a custom function."""
        transparent = self.kind in _MOVED or self.kind in _LAYERS
        return not transparent and (isinstance(self.fn, torch._C._FunctionBase) or "CppNode" in self.kind)

    @property
    def operands(self) -> list[Edge | None]:
        """Where the two operands of a product come from; empty for others."""
        return [self.below[position] for position in _PRODUCTS.get(self.kind) or _LAYERS.get(self.kind) or ()]

    @property
    def sources(self) -> list[Node]:
        """The nodes that it reads."""
        return [edge[0] for edge in self.below if edge is not None]

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """Return the shape of one of its outputs."""
        return tuple(int(size) for size in self.outputs[number].shape)

    def others(self, position: int) -> list[Edge]:
        """Return where its inputs come from, but for one."""
        return [edge for i, edge in enumerate(self.below) if i != position and edge is not None]

    def adds(self, position: int) -> bool:
        """Whether it is a product, and this input is what it adds."""
        return position == 0 and self.kind in ("Addmm", "Baddbmm", "Addbmm")

    def is_below(self, top: Node) -> bool:
        """Whether the value of ``top`` is computed from that of this node."""
        return self in _reached([top], lambda node: [source for source in node.sources if source.number >= self.number])


Edge = tuple[Node, int]
"""A node of the graph and the number of one of its outputs."""

_Parts = frozenset[tuple[int, tuple[tuple[int, int], ...]]]
"""Parts of the rows of a weight out × in: the first row, and (size, stride) pairs."""

_Step = tuple[Node, int, tuple[tuple[str, int], ...]]
"""A node that a path has reached, the place among its inputs, and the products on the path."""


@dataclass(eq=False, slots=True)
class _Use:
    """One product with a weight: the node, the parameter, its form as an operand, and the other operand."""

    node: Node
    parameter: Tensor
    form: Form | None
    out: int  # dim of the operand that becomes the product's features
    inner: int  # dim of the operand that is summed
    features: int  # dim of the product's result
    reads: Edge | None
    groups: int
    stored: Literal["out×in", "in×out"] | None = None
    rows: int = 0  # of the weight out × in, or of one of a stack, if it is known how it is stored

    def __post_init__(self) -> None:
        shape, self.stored = global_shape(self.parameter), _stored(self)
        if self.stored is not None:
            layer = self.node.kind in _LAYERS
            self.rows = shape[-1] if self.stored == "in×out" else shape[0] if layer else shape[-2]


@cache
def _kind(name: str) -> str:
    """Return the name of the operation behind a node: "Addmm" for AddmmBackward0."""
    return name.partition("Backward")[0].strip("_")


def _nodes(
    outputs: Iterable[Tensor], names: Mapping[int, str], inputs: Collection[int]
) -> tuple[list[Node], set[Node]]:
    """Return the nodes behind some outputs, each after those that it reads, and those of the outputs."""
    nodes: dict[Any, Node] = {}

    def behind(fn: Any, number: int) -> tuple[Any, int]:
        while fn is not None and fn.name().removesuffix("Backward") in _MARKS:
            fn, number = fn.next_functions[number]
        return fn, number

    def node_of(fn: Any) -> Node:
        if fn not in nodes:
            node = nodes[fn] = Node(fn, _kind(fn.name()))
            if (variable := getattr(fn, "variable", None)) is not None:
                node.leaf = variable if id(variable) in names else None
                node.data = node.is_input = id(variable) in inputs
        return nodes[fn]

    ends = [behind(out.grad_fn, out.output_nr)[0] for out in outputs if out.grad_fn is not None]
    roots = {node_of(fn) for fn in ends if fn is not None}
    todo, order, begun = [(node, False) for node in roots], list[Node](), set[Node]()
    while todo:
        node, is_finished = todo.pop()
        if is_finished:
            node.number = len(order)
            order.append(node)
        elif node not in begun:
            begun.add(node)
            todo.append((node, True))
            for position, (fn, number) in enumerate(behind(*edge) for edge in node.fn.next_functions):
                edge = None if fn is None else (node_of(fn), number)
                node.below.append(edge)
                if edge is not None:
                    edge[0].users.append((node, position, number))
                    todo.append((edge[0], False))
    return order, roots


def _learn(order: Iterable[Node]) -> None:
    """Find the products with weights, and what each node is computed from."""
    for node in order:
        below = node.sources
        node.uses = _uses(node)
        table = node.kind in _LOOK_UP and not any(source.live for source in below)  # rows of inputs are no table
        opaque = node.is_opaque
        matrix = node.leaf is not None and sum(size > 1 for size in global_shape(node.leaf)) > 1
        read = [use.reads[0] for use in node.uses if use.reads is not None]
        node.deep = any(source.learned for source in read) or any(source.deep for source in below)
        node.live = bool(node.uses or node.data or table or opaque) or any(source.live for source in below)
        node.weighed = bool(node.uses or table) or any(source.weighed for source in below)
        node.learned = node.weighed or matrix or any(source.learned for source in below)
        node.data = node.data or any(source.data for source in below)
        node.hidden = opaque or any(source.hidden for source in below)


def _weight(edge: Edge | None) -> tuple[Tensor, Form | None] | None:
    """Return the parameter that an edge leads to through views and casts, with its form there."""
    path = []
    while edge is not None and edge[0].leaf is None:
        node, number = edge
        if node.kind not in _VIEWS or len(node.below) != 1:
            return None
        path.append(edge)
        edge = node.below[0]
    parameter = None if edge is None else edge[0].leaf
    shape = () if parameter is None else global_shape(parameter)
    if parameter is None or len(shape) < 2:
        return None
    form: Form | None = Form(0, tuple(((n, prod(shape[i + 1 :])),) for i, n in enumerate(shape)))
    for node, number in reversed(path):
        form = form and _through(form, node, number)
    return parameter, form


def _uses(node: Node) -> list[_Use]:
    """Return the products with weights that a node is."""
    layer = node.kind in _LAYERS
    edges = node.operands
    if not edges:
        return []
    weights = [None if layer and i == 0 else _weight(edge) for i, edge in enumerate(edges)]
    if all(weights):  # one that is expanded over a batch is a learned input
        weights = [None if weight is None or weight[1] is None or weight[1].repeats else weight for weight in weights]
    if all(weights) or not any(weights):  # a product of two parameters makes a weight, or reads a learned input
        return []
    rank, uses = len(node.shape()), []
    for i, weight in enumerate(weights):
        if weight is None:
            continue
        out, inner, features = (-1, -2, rank - 1) if i else (-2, -1, rank - 2)
        groups = node.fn._saved_groups if node.kind == "Convolution" else 0
        if layer:
            out, inner, features = 0, 1, 1 if node.kind == "Convolution" else rank - 1
            if node.kind == "Convolution" and node.fn._saved_transposed:
                out, inner = 1, 0
        uses.append(_Use(node, *weight, out, inner, features, edges[1 - i], groups))
    return uses


def _source(edge: Edge | None, more: Iterable[str] = ()) -> Edge | None:
    """Return what an edge leads to behind views, casts, biases and the operations of these kinds."""
    passed = {*_RESHAPED, *_TURNED, *_MOVED, "Add", *more}
    while edge is not None:
        below = [before for before in edge[0].below if before is not None and before[0].live]
        if edge[0].kind not in passed or len(below) != 1:
            return edge
        edge = below[0]
    return None


def _dim(saved: int) -> int:
    """Return a dim that a node has saved; negative ones are shown as unsigned numbers of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


def _through(form: Form, node: Node, number: int) -> Form | None:
    """Return the form of output ``number`` of a view, given the form of its input; None if it is unknown."""
    kind, fn, dims, rank = node.kind, node.fn, form.dims, len(form.dims)
    if kind == "T":
        return form._replace(dims=dims[::-1])
    if kind == "Transpose":
        a, b = _dim(fn._saved_dim0) % rank, _dim(fn._saved_dim1) % rank
        order = [b if i == a else a if i == b else i for i in range(rank)]
        return form._replace(dims=tuple(dims[i] for i in order))
    if kind == "Permute":
        return form._replace(dims=tuple(dims[_dim(i) % rank] for i in fn._saved_dims))
    shape = node.shape(0 if kind == "Glu" else number)
    if kind in _MOVED:
        return _sharded(form, shape)
    if kind == "Expand":
        old = [()] * (len(shape) - rank) + list(dims)
        sizes = [prod(size for size, _ in dim) for dim in old]
        grown = (dim if n == size else ((n, 0),) for n, size, dim in zip(shape, sizes, old, strict=True))
        return form._replace(dims=tuple(grown))
    if kind in _RESHAPED:
        return form.viewed(shape)
    if kind not in _CUTS:
        return None
    dim = _dim(fn._saved_dim) % rank
    length = prod(size for size, _ in dims[dim])
    if kind in ("Select", "Unbind"):
        index = number if kind == "Unbind" else _dim(fn._saved_index) % length
        part = form.sliced(dim, index, 1)
        return part and part._replace(dims=part.dims[:dim] + part.dims[dim + 1 :])
    if kind == "Slice":
        start, step = slice(_dim(fn._saved_start), _dim(fn._saved_end)).indices(length)[0], fn._saved_step
        return form.sliced(dim, start, shape[dim], step)
    if kind == "Glu":
        return form.sliced(dim, number * length // 2, length // 2)
    return form.sliced(dim, sum(node.shape(before)[dim] for before in range(number)), shape[dim])


def _sharded(form: Form, shape: tuple[int, ...]) -> Form | None:
    """Return the form of the first rank's shard of this shape; None if ranks have other shards."""
    for i, (size, dim) in enumerate(zip(shape, form.dims, strict=True)):
        whole = prod(n for n, _ in dim)
        if size == whole:
            continue
        if len(dim) != 1 or size < 1 or whole % size:
            return None
        ((_, stride),) = dim
        dims = (*form.dims[:i], ((size, stride),), *form.dims[i + 1 :])
        form = form._replace(dims=dims, ranks=(*form.ranks, (whole // size, size * stride)))
    return form


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
    order, roots = _nodes(outputs, names, {id(tensor) for tensor in inputs})
    try:
        return _facts_of_nodes(order, roots, named, names), any(node.is_opaque for node in order)
    finally:  # nodes know each other, and would hold the graph until garbage is collected
        for node in order:
            vars(node).clear()


def _facts_of_nodes(
    order: list[Node], roots: set[Node], named: Collection[tuple[str, nn.Parameter]], names: Mapping[int, str]
) -> dict[str, Facts]:
    """Return what nodes show of each parameter; ``roots`` are those of the outputs, and ``names`` the names by id."""
    _learn(order)
    last = _last(order, roots)
    facts: dict[str, Facts] = defaultdict(Facts)
    uses_by_name: dict[str, list[tuple[_Use, bool | None]]] = defaultdict(list)
    for node in order:
        if node.leaf is not None:
            views = _reached([node], lambda node_below: [user for user, *_ in node_below.users if user.kind in _VIEWS])
            readers = [(view, user) for view in views for user, *_ in view.users]
            added = len(global_shape(node.leaf)) > 1 and any(_takes_as_activations(*reader) for reader in readers)
            hidden = any(user.is_opaque for _, user in readers)
            facts[names[id(node.leaf)]] = Facts("added" if added else None, hidden=hidden)
        if node.kind in _LOOK_UP and (at := _weight(node.below[0])) is not None:
            facts[names[id(at[0])]].does = "looked up"
        for use in node.uses:
            uses_by_name[names[id(use.parameter)]].append((use, last[node]))
    for parameter in _computed(order):
        facts[names[id(parameter)]].does = "computed"
    for name, uses in uses_by_name.items():
        weight = facts[name]
        weight.does = "multiplies" if weight.does in (None, "added") else weight.does
        weight.first = _agreed(_is_first(use) for use, _ in uses)
        weight.last = _agreed(end for _, end in uses)
        weight.groups = max(use.groups for use, _ in uses)
        weight.stored = _agreed(use.stored for use, _ in uses)
        cuts, hides = zip(*(_cut(use) for use, _ in uses), strict=True)
        if weight.stored and weight.groups < 2 and None not in cuts:
            weight.cut = _as_matrices(frozenset[Any]().union(*cuts), uses[0][0].rows)
        weight.hidden = weight.hidden or any(hides)
    _unlike_others(facts, {name: global_shape(parameter) for name, parameter in named})
    return dict(facts)


def _takes_as_activations(view: Node, user: Node) -> bool:
    """Whether a node adds, joins or normalizes a parameter, or multiplies it by a weight."""
    reads = any(use.reads is not None and use.reads[0] is view for use in user.uses)
    return reads or user.kind in _TAKES_ACTIVATIONS


def _agreed(values: Iterable[Any]) -> Any:
    """Return the only value among some; None if they differ."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else None


def _is_first(use: _Use) -> bool | None:
    """Whether a product reads inputs of the model in which no weight took part; None: unknown."""
    reads = use.reads[0] if use.reads is not None else None
    if reads is None:
        return None
    if reads.weighed:
        return False
    if reads.hidden or not reads.data or _is_late(use.node):
        return None
    # What is added to the inputs themselves is a stream: a stage of a model, without its ends.
    return None if any(term.is_input for term in _added(use.node)) else True


def _is_late(product: Node) -> bool:
    """Whether a layer that reads inputs only feeds products with results of deep layers.

    Such layers make the keys and values of a text in each block with cross-attention. They are no input layers.
    """

    def meets(user: Node, position: int) -> bool:
        return user.is_product and any(other.deep for other, _ in user.others(position))

    def reads(user: Node, position: int) -> bool:
        return bool(user.uses) and not user.adds(position)

    def onward(node: Node) -> list[Node]:
        return [user for user, position, _ in node.users if not meets(user, position) and not reads(user, position)]

    readers = [(user, position) for node in _reached([product], onward) for user, position, _ in node.users]
    return any(meets(*reader) for reader in readers) and not any(reads(*reader) for reader in readers)


def _last(order: list[Node], roots: set[Node]) -> dict[Node, bool | None]:
    """Return for each product with a weight whether it makes outputs that no other layer reads; None: unknown."""
    read: dict[Node, bool] = {}
    clean: dict[Node, bool] = {}  # reaches an output without another product
    direct: dict[Node, bool] = {}  # reaches an output without another weight
    is_output: dict[Node, bool | None] = {}
    for node in reversed(order):
        root = node in roots and not node.users
        reads, cleanly, directly = False, root, root
        for user, position, _ in node.users:
            if user.adds(position):
                reads, cleanly, directly = reads or read[user], cleanly or clean[user], directly or direct[user]
            elif user.uses and any(use.reads is not None and use.reads[0] is node for use in user.uses):
                reads = True
            else:
                fused = user.is_opaque or (user.kind not in _EACH and any(at != position for at in user.weights))
                reads |= read[user] or fused
                directly |= direct[user]
                cleanly |= clean[user] and not fused and not user.is_product
        read[node], clean[node], direct[node] = reads, cleanly, directly
        if node.uses and not directly:
            is_output[node] = False
        elif node.uses:
            residual = reads or not cleanly or any(term.is_below(node) for term in _added(node, through=False))
            is_output[node] = None if residual else True
    return is_output


def _added(product: Node, through: bool = True) -> Iterator[Node]:
    """Yield the terms of all sums to which the result of a product comes, also ``through`` products with weights."""

    def terms(node: Node, position: int) -> list[Node]:
        starts = (_source(edge, _EACH) for edge in (node.others(position) if node.kind == "Add" else ()))
        return [start[0] for start in starts if start is not None and start[0] is not product]

    for node in _reached([product], lambda node: [user for user, *_ in node.users if through or not user.uses]):
        for user, position, _ in node.users:
            yield from _reached(terms(user, position), lambda term: terms(term, -1))


def _computed(order: Iterable[Node]) -> Iterator[Tensor]:
    """Yield the parameters from which a weight is computed element by element, as by weight norm or pruning."""
    for node in order:
        edges = node.operands
        for edge, other in (edges, edges[::-1]) if edges else ():
            if edge is None or edge[0].live or _weight(edge) is not None or not (other is None or other[0].live):
                continue
            for below in _reached([edge[0]], lambda node_below: node_below.sources):
                if below.leaf is not None and len(global_shape(below.leaf)) > 1:
                    yield below.leaf


def _stored(use: _Use) -> Literal["out×in", "in×out"] | None:
    """Return how a weight is stored; None if the operand is not one matrix, one of a stack or some of its rows."""
    shape = global_shape(use.parameter)
    if use.form is None or len(shape) < 2:
        return None
    if use.node.kind in _LAYERS:
        return "out×in" if use.out == 0 else None
    ((out, out_stride), *more), inner = _one_of_stack(use, use.out) or ((0, 0),), _one_of_stack(use, use.inner)
    if more or len(shape) > 3 or (use.form.ranks and out not in shape[-2:]):
        return None
    if out_stride == shape[-1] and inner == ((shape[-1], 1),):
        return "out×in"
    return "in×out" if out_stride == 1 and inner == ((shape[-2], shape[-1]),) else None


def _one_of_stack(use: _Use, dim: int) -> tuple[tuple[int, int], ...]:
    """Return the (size, stride) pairs of a dim of an operand without those that tell the matrices of a stack apart."""
    assert use.form is not None
    shape = global_shape(use.parameter)
    stack = prod(shape[1:]) if len(shape) == 3 and use.node.kind not in _LAYERS else 0
    return tuple(atom for atom in use.form.dims[dim] if not stack or atom[1] != stack)


def _cut(use: _Use) -> tuple[_Parts | None, bool]:
    """Return into which rows the features that a weight makes are cut, and whether there may be more parts.

    The first is one part if they are not cut, and None if this is unknown.
    """
    shape = use.node.shape()
    features_made = rows = tuple[tuple[int, int], ...]()
    if use.form is not None:
        features_made, rows = use.form.dims[use.out], _one_of_stack(use, use.out)
    is_readable = len(rows) == 1 and shape[use.features] == prod(size for size, _ in features_made)
    features = tuple((size, int((size, stride) in rows)) for size, stride in features_made)
    dims = (features if is_readable and i == use.features else ((n, 0),) for i, n in enumerate(shape))
    hides: list[Node] = []
    features_form = Form(0, tuple(dims))
    pieces = _pieces(use.node, 0, features_form, hides) or [features_form]
    if use.form is None or use.rows == 0 or not is_readable or (hides and len(pieces) == 1):
        return None, bool(hides)
    ((count, stride),) = rows
    first = use.form.offset // stride % use.rows
    if len(pieces) > _MOST_PARTS:
        return frozenset({(first, ((count, 1),))}), bool(hides)
    return frozenset((first + piece.offset, piece.atoms()) for piece in pieces), bool(hides)


def _pieces(node: Node, number: int, form: Form, hides: list[Node], deep: int = 0) -> list[Form]:
    """Return the parts into which an output of a node is cut, itself if it is not; add nodes that may hide parts.

    What is only written into a state that the model returns has no parts: nothing is computed from it.
    """
    users = node.readers.get(number, [])
    whole, parts = not users, dict[Any, Form]()
    for user, position in users:
        if user.kind in _CUTS:
            inner = _parts(user, form, hides, deep)
        elif user.kind in _WRITES and not user.users:
            inner = []
        else:
            after = _after(user, position, form) if deep < 60 else None
            inner = None if after is None else _pieces(user, 0, after, hides, deep + 1)
        if inner is None:  # it reads all features
            whole = True
            may_cut = user.kind in _VIEWS | _CUTS or _picks(user, form) or _is_cut_again(user)
            if user.is_opaque or may_cut or deep >= 60:
                hides.append(user)
        parts |= {(part.offset, part.atoms()): part for part in inner or ()}
    if not whole and not parts:
        return []
    cuts = [user for user, _ in users if user.kind in _CUTS]
    if whole or len(parts) < 2 or (form.offset, form.atoms()) in parts or _joined(cuts):
        return [form]
    return list(parts.values())


def _parts(cut: Node, form: Form, hides: list[Node], deep: int) -> list[Form] | None:
    """Return the parts of all outputs of a node that cuts; None if they are unknown."""
    gated = cut.kind == "Glu"
    pieces: list[Form] = []
    for number in range(2 if gated else len(cut.outputs)):
        part = _through(form, cut, number)
        if part is None:
            return None
        pieces += [part] if gated else _pieces(cut, number, part, hides, deep + 1)
    return pieces


def _is_cut_again(node: Node) -> bool:
    """Whether a node joins features with others and the result is cut, so that its parts are not seen."""
    if node.kind != "Cat":
        return False
    dim, rank = _dim(node.fn._saved_dim), len(node.shape())
    return any(user.kind in _CUTS and (_dim(user.fn._saved_dim) - dim) % rank == 0 for user, *_ in node.users)


def _picks(node: Node, form: Form) -> bool:
    """Whether a node picks features by indices, which may be a cut; its shape tells, because indices may be packed."""
    sizes = [prod(size for size, _ in dim) for dim in form.dims]
    features = [i for i, dim in enumerate(form.dims) if any(stride for _, stride in dim)]
    behind = sizes[features[0] :] if features and node.kind in ("Index", "IndexSelect", "Gather") else []
    return bool(behind) and list(node.shape()[-len(behind) :]) != behind


def _after(node: Node, position: int, form: Form) -> Form | None:
    """Return the form behind a view, a function of each element, or what keeps channels apart; None behind others."""
    if node.kind in _VIEWS - _CUTS:
        return _through(form, node, 0)
    shape = node.shape()
    if node.kind == "Cat" and len(shape) == len(form.dims):
        dim = _dim(node.fn._saved_dim) % len(shape)
        apart = all(not stride for _, stride in form.dims[dim])  # tokens of several experts, and no features
        return form._replace(dims=(*form.dims[:dim], ((shape[dim], 0),), *form.dims[dim + 1 :])) if apart else None
    if node.kind == "Convolution" and position == 0 and shape[1] == node.fn._saved_groups > 1:  # depthwise
        return form._replace(dims=tuple(form.dims[1] if i == 1 else ((n, 0),) for i, n in enumerate(shape)))
    if node.kind not in _EACH or shape != tuple(prod(size for size, _ in dim) for dim in form.dims):
        return None
    source, others = node.below[position], [other for other, _ in node.others(position) if other.live]
    if not others:
        return form
    if source is None or node.kind not in ("Add", "Sub"):
        return None
    return form if all(_sums_products(other, source[0]) for other in others) else None


def _sums_products(other: Node, term: Node) -> bool:
    """Whether two terms are both products of weights, and neither is computed from the other: no residual stream."""
    start = _source((other, 0))
    return start is not None and bool(start[0].uses) and not start[0].is_below(term) and not term.is_below(start[0])


def _joined(cuts: list[Node]) -> bool:
    """Whether all parts are joined again side by side, before any product: the two halves of a rotary embedding.

    Parts also count as joined if each is the same operand of a product of the same kind, and the results of these
    products are joined. The parts are then values of different heads.
    """
    reached = [_joins(cut, number) for cut in cuts for number in cut.readers]
    if len(reached) < 2:
        return False
    before = [{join for join, _, products in steps if not products} for steps in reached]
    behind = [{(join, products) for join, _, products in steps if products} for steps in reached]
    places = {position for steps in reached for _, position, products in steps if products}
    side_by_side = len(places) == len(reached) and bool(set.intersection(*behind))
    return side_by_side or bool(set.intersection(*before))


def _joins(cut: Node, number: int) -> set[_Step]:
    """Return the nodes that join an output of a cut with other tensors before a product with a weight reads it."""
    todo: list[_Step] = [(user, position, ()) for user, position in cut.readers[number]]
    met, joins = set[Node](), set[_Step]()
    while todo and len(met) < 50:
        node, position, products = todo.pop(0)
        if node in met or node.uses:
            continue
        met.add(node)
        if node.kind in _JOINS:
            joins.add((node, position, products))
        passed = (*products, (node.kind, position)) if node.is_product else products
        todo += [(user, at, passed) for user, at, _ in node.users if not (products and node.kind in _JOINS)]
    return joins


@cache
def _as_matrices(pieces: _Parts, out: int) -> Matrices | None:
    """Return the entry of "matrices" for parts of ``out`` rows; None if no entry says it."""
    if pieces == {(0, ((out, 1),))}:
        return "whole"
    owner: dict[int, int] = {}
    for i, (offset, atoms) in enumerate(sorted(pieces)):
        places = product(*(range(0, size * stride, stride) for size, stride in atoms))
        for strides in places:
            if owner.setdefault(offset + sum(strides), i) != i:  # one product cuts what another does not
                return None
    rows = [owner.get(row, -1) for row in range(out)]
    if len(pieces) == 1:
        return "whole" if set(rows) == {0} else None
    period = next(size for size in range(1, out + 1) if out % size == 0 and rows == rows[:size] * (out // size))
    order, runs = zip(*((i, len(list(run))) for i, run in groupby(rows[:period])), strict=True)
    if order != tuple(range(len(pieces))):
        return None
    if period == out:
        return ("rows", *runs)
    if len(set(runs)) > 1:
        return ("interleaved", runs, 0)
    return ("interleaved", len(runs), 0) if runs[0] == 1 else ("interleaved", len(runs), 0, runs[0])


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
