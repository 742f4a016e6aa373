"""Graph: the nodes of autograd's graph behind the outputs of a forward, each with what its operation does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cache, cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

# What the operations behind autograd's nodes do. One that no line has computes new numbers of all that it reads.
_EFFECTS = {
    "multiplies": "Bmm GroupedMm Mm",
    "multiplies and adds": "Addbmm Addmm Baddbmm",
    # A layer: its second operand is its weight, out × in. The last is nn.Linear under ZeRO-3, a function of DeepSpeed.
    "applies": "Convolution Linear MkldnnLinear LinearFunctionForZeroStage3",
    "reshapes": "Alias Clone Contiguous Expand Flatten ReshapeAlias Squeeze ToCopy Unflatten UnsafeView Unsqueeze View",
    "turns": "Permute T Transpose",
    # A DTensor becomes its local shard, a shard a DTensor, and a DTensor is laid out anew: the numbers stay.
    "moves": "FromTorchTensor Redistribute ToTorchTensor",
    "cuts": "Select Slice Split SplitWithSizes Unbind UnsafeSplit UnsafeSplitWithSizes",
    "gates": "Glu",
    "joins": "Cat Stack",
    "looks up": "Embedding EmbeddingBag Gather Index IndexSelect",
    "writes": "torch::autograd::Copy torch::autograd::CopySlices",  # also into states that a model returns
    # These keep every feature apart, if the other operand is no activation.
    "adds": "Add Sub Where",
    "acts on each": "Clamp ClampMax ClampMin CudnnBatchNorm Div Elu Exp FusedDropout Gelu Hardsigmoid Hardswish"
    " Hardtanh LeakyRelu LogSigmoid MaskedFill MiopenBatchNorm Mish Mul NativeBatchNorm NativeDropout Neg Pow Prelu"
    " Relu Sigmoid Silu Softplus Tanh",
    "normalizes": "FusedRmsNorm NativeLayerNorm",
    # Functions of FSDP2 and ZeRO-3 that mark when a module is over, and return the tensors that they are given.
    "marks": "PostBackwardFunctionModule PreBackwardFunctionForModule RegisterPostBackwardFunction",
}
_EFFECT_OF = {kind: effect for effect, kinds in _EFFECTS.items() for kind in kinds.split()}

VIEWS = ("reshapes", "turns", "moves", "cuts")
"""What shows elements of one tensor and computes nothing."""
CUTS = ("cuts", "gates")
EACH = ("adds", "acts on each")


class Past(Flag):
    """What took part in a value."""

    DATA = auto()
    """Inputs."""
    LIVE = auto()
    """Inputs, tables, products, or what hides what it computes, and not parameters alone."""
    WEIGHED = auto()
    """Weights that multiply, or tables."""
    LEARNED = auto()
    """These, or other matrices that are parameters."""
    HIDDEN = auto()
    """Something that hides what it computes."""
    DEEP = auto()
    """A weight that itself reads what another weight has made."""


NOTHING = Past(0)


@dataclass(eq=False)
class Node:
    """A node of autograd's graph with all that a walk has shown of it, so that autograd is asked once.

    Attributes:
        fn: The node itself.
        kind: The name of its operation.
        effect: What the operation does, see `_EFFECTS`; empty for others.
        number: Its place in an order in which each node comes after those that it reads.
        below: For each of its inputs, the node and the output that it comes from; None for inputs without a graph.
        users: The nodes that read it, with the place among their inputs and the number of the output that they read.
        leaf: The parameter that it stands for.
        products: Each `Product` with a weight that it is.
        past: What took part in its value.
        is_input: Whether it is an input itself.
    """

    fn: Any
    kind: str
    effect: str = ""
    number: int = 0
    below: list[Edge | None] = field(default_factory=list)
    users: list[tuple[Node, int, int]] = field(default_factory=list)
    leaf: Tensor | None = None
    products: list[Any] = field(default_factory=list)
    past: Past = NOTHING
    is_input: bool = False

    @cached_property
    def outputs(self) -> Sequence[Any]:
        """What autograd knows of its outputs; it makes the list anew at each look, which takes long for thousands."""
        return cast(Sequence[Any], self.fn._input_metadata)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return bool(self.operands) or self.kind.startswith("ScaledDotProduct")

    @property
    def operands(self) -> list[Edge | None]:
        """Where the two operands of a product come from; empty for others."""
        if self.effect == "multiplies and adds":
            return self.below[1:3]
        return self.below[:2] if self.effect in ("multiplies", "applies") else []

    @property
    def is_opaque(self) -> bool:
        """Whether it hides what it computes: a checkpoint, a compiled or a custom function."""
        custom = isinstance(self.fn, torch._C._FunctionBase) or "CppNode" in self.kind
        return custom and self.effect not in ("moves", "applies")

    @property
    def sources(self) -> list[Node]:
        """The nodes that it reads."""
        return [edge[0] for edge in self.below if edge is not None]

    @property
    def readers(self) -> list[Node]:
        """The nodes that read it."""
        return [user for user, *_ in self.users]

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """Return the shape of one of its outputs."""
        return tuple(int(size) for size in self.outputs[number].shape)

    def dim(self, name: str, rank: int) -> int:
        """Return a dim that it has saved; negative ones are shown as unsigned numbers of 64 bits."""
        return signed(getattr(self.fn, f"_saved_{name}")) % rank

    def others(self, position: int) -> list[Edge]:
        """Return where its inputs come from, but for one."""
        return [edge for i, edge in enumerate(self.below) if i != position and edge is not None]

    def adds(self, position: int) -> bool:
        """Whether it is a product, and this input is what it adds."""
        return position == 0 and self.effect == "multiplies and adds"

    def is_below(self, top: Node) -> bool:
        """Whether the value of ``top`` is computed from that of this node."""
        return self in reached([top], lambda node: [source for source in node.sources if source.number >= self.number])


Edge = tuple[Node, int]
"""A node of the graph and the number of one of its outputs."""

_T = TypeVar("_T")


def reached(starts: Iterable[_T], onward: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield some things and all to which they lead, each once, the nearest first."""
    todo = deque(dict.fromkeys(starts))
    met = set(todo)
    while todo:
        yield (current := todo.popleft())
        new = [neighbor for neighbor in dict.fromkeys(onward(current)) if neighbor not in met]
        met.update(new)
        todo += new


def signed(saved: int) -> int:
    """Return a number that a node has saved as an unsigned number of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


@cache
def _kind(name: str) -> str:
    """Return the name of the operation behind a node: "Addmm" for AddmmBackward0."""
    return name.partition("Backward")[0].strip("_")


def nodes_behind(
    outputs: Iterable[Tensor], names: Mapping[int, str], inputs: Collection[int]
) -> tuple[list[Node], set[Node]]:
    """Return the nodes behind some outputs, each after those that it reads, and those of the outputs.

    Args:
        outputs: The outputs.
        names: The names of parameters by their ids.
        inputs: The ids of the inputs.
    """
    nodes: dict[Any, Node] = {}

    def behind(fn: Any, number: int) -> tuple[Any, int]:
        while fn is not None and _EFFECT_OF.get(fn.name().removesuffix("Backward")) == "marks":
            fn, number = fn.next_functions[number]
        return fn, number

    def node_of(fn: Any) -> Node:
        if fn not in nodes:
            kind = _kind(fn.name())
            node = nodes[fn] = Node(fn, kind, _EFFECT_OF.get(kind, ""))
            if (variable := getattr(fn, "variable", None)) is not None:
                node.leaf = variable if id(variable) in names else None
                node.is_input = id(variable) in inputs
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
