"""What a forward does with each weight, read off autograd's graph on `meta`: an oracle that knows no module's class.

`flow` reads the graph, `differences` compares it with what `split_params` makes of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonmesh.groups import ParamGroups
from tests.support.reference import split

_PRODUCTS = ("MmBackward", "AddmmBackward", "BmmBackward", "BaddbmmBackward", "ConvolutionBackward", "LinearBackward")
_PRODUCTS += ("GroupedMm",)
_VIEWS = ("TBackward", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Expand", "ToCopy", "Unsqueeze")
_SAME = (
    "NativeBatchNorm",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Clone",
    "ToCopy",
    "AddBackward",
    "Squeeze",
    "Unsqueeze",
    "NativeDropout",
)
_CUTS = ("SplitBackward", "SplitWithSizes", "UnsafeSplit", "UnbindBackward", "SelectBackward", "SliceBackward")


class Flow(NamedTuple):
    """Names of weights: of products that read data, of those that make the output, and of all that took part.

    `cut` are those whose output is cut into parts that do not come together again, with the outputs in each part.
    """

    first: set[str]
    last: set[str]
    used: set[str]
    cut: dict[str, list[set[int]]]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def flow(model: nn.Module, outputs: Any) -> Flow:
    """Follow the graph behind some outputs of a model that has run."""
    names = {id(p): name for name, p in model.named_parameters()}
    roots = [t.grad_fn for t in tensors(outputs) if t.grad_fn is not None]
    users: dict[Any, list[Any]] = {root: [] for root in roots}
    todo: list[Any] = list(users)
    while todo:
        node = todo.pop()
        for before, _ in node.next_functions:
            if before is not None:
                if before not in users:
                    todo.append(before)
                users.setdefault(before, []).append(node)

    def weight(node: Any) -> str | None:
        while node is not None and node.name().startswith(_VIEWS):
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return None if variable is None or variable.ndim < 2 else names.get(id(variable))

    feeding_nodes: dict[Any, list[str]] = {}
    for node in users:
        if node.name().startswith(_PRODUCTS):
            feeding_weights = [name for before, _ in node.next_functions if (name := weight(before)) is not None]
            if feeding_weights:
                feeding_nodes[node] = feeding_weights

    def behind(starts: list[Any]) -> Iterator[Any]:
        """Nodes that the starts are made of, up to and with the first that multiply by weights."""
        visited, stack = set(), [node for node in starts if node is not None]
        while stack:
            node = stack.pop()
            if node not in visited:
                visited.add(node)
                yield node
                if node not in feeding_nodes:
                    stack += [before for before, _ in node.next_functions if before is not None]

    def learned(node: Any) -> bool:
        variable = getattr(node, "variable", None)
        return (
            node in feeding_nodes or node.name().startswith("Embedding") or (variable is not None and variable.ndim > 1)
        )

    first = {
        name
        for node, feeding_weights in feeding_nodes.items()
        if not any(map(learned, behind([b for b, _ in node.next_functions if weight(b) is None])))
        for name in feeding_weights
    }
    last = {name for node in behind(list(roots)) if node in feeding_nodes for name in feeding_nodes[node]}
    cut: dict[str, list[set[int]]] = {}
    for node, feeding_weights in feeding_nodes.items():
        for name in feeding_weights:
            if name not in cut and (parts := _parts(node, users)):
                cut[name] = parts
    return Flow(first, last, {name for feeding_weights in feeding_nodes.values() for name in feeding_weights}, cut)


def _parts(product: Any, users: dict[Any, list[Any]]) -> list[set[int]]:
    """Which outputs of a product are in which part of it, where it is cut: the graph's views, done with numbers."""
    shape = torch.Size(product._input_metadata[0].shape)
    along = 1 if product.name().startswith("Convolution") else len(shape) - 1
    numbers = torch.arange(shape[along]).view([-1 if dim == along else 1 for dim in range(len(shape))]).expand(shape)
    node = product
    while len(users[node]) == 1 and not users[node][0].name().startswith(_CUTS):
        (node,) = users[node]
        kind, shape = node.name(), torch.Size(node._input_metadata[0].shape)
        if kind.startswith("Transpose"):
            numbers = numbers.transpose(_dim(node._saved_dim0), _dim(node._saved_dim1))
        elif kind.startswith("Permute"):
            numbers = numbers.permute([_dim(dim) for dim in node._saved_dims])
        elif kind.startswith(_SAME) and shape.numel() == numbers.numel():
            numbers = numbers.reshape(shape)
        else:
            return []
    cuts = users[node]
    if not cuts or not all(after.name().startswith(_CUTS) for after in cuts):
        return []
    pieces: list[Tensor] = []
    for after in cuts:
        kind, dim = after.name(), _dim(after._saved_dim)
        if kind.startswith("Unbind"):
            pieces += numbers.unbind(dim)
        elif kind.startswith("Select"):
            pieces.append(numbers.select(dim, _dim(after._saved_index)))
        elif kind.startswith("Slice"):
            selected = slice(_dim(after._saved_start), _dim(after._saved_end), after._saved_step)
            pieces.append(numbers.movedim(dim, 0)[selected])
        else:
            sizes = getattr(after, "_saved_split_sizes", None) or after._saved_split_size
            pieces += numbers.split(list(sizes) if isinstance(sizes, tuple) else sizes, dim)
    parts = list(map(set, {frozenset(piece.unique().tolist()) for piece in pieces}))
    apart = len(parts) > 1 and sum(map(len, parts)) == len(set().union(*parts))
    return parts if apart and not _joined(cuts, users) else []


def _dim(saved: int) -> int:
    """A negative number, which the graph shows as one of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


def _joined(cuts: list[Any], users: dict[Any, list[Any]]) -> bool:
    """Whether what is cut comes together again, side by side: the turned and the other part of a query."""
    starts: dict[Any, list[Any]] = {}
    for cut in cuts:
        for after in users[cut]:
            for before, number in after.next_functions:
                if before is cut:
                    starts.setdefault((cut, number), []).append(after)
    joints = []
    for todo in starts.values():
        visited: set[Any] = set()
        while todo:
            node = todo.pop(0)
            if node not in visited and len(visited) < 50:
                visited.add(node)
                if not node.name().startswith(("ScaledDotProduct", *_PRODUCTS)):
                    todo += users[node]
        joints.append({node for node in visited if node.name().startswith("CatBackward")})
    return bool(set.intersection(*joints)) if joints else False


def differences(
    model: nn.Module, groups: ParamGroups, outputs: Any, results: Any, heads: bool = True
) -> set[tuple[str, str]]:
    """What `split_params` makes of a model otherwise than its graph shows.

    Each is a kind and a name, in which a star stands for a number: "first" and "last" layers that are Muon's, "not
    first" and "not last", which are taken for such, and "cut", whose parts are trained as one matrix.

    Args:
        model: has run.
        groups: what `split_params` makes of it, with an example.
        outputs: all that it returned.
        results: those of its outputs that are results and not hidden states.
        heads: whether it has output layers.
    """
    whole_flow, last = flow(model, outputs), flow(model, results).last
    last = {groups.shared.get(name, name) for name in last}
    first = {groups.shared.get(name, name) for name in whole_flow.first}
    misjudged = set()
    for group in groups:
        for i, name in enumerate(group["param_names"]):
            muons, reason = "matrices" in group, group["reasons"][i]
            if name in first and muons and name not in last:
                misjudged.add(("first", name))
            if heads and name in last and muons:
                misjudged.add(("last", name))
            if name in whole_flow.used and "input layer" in reason and name not in first:
                misjudged.add(("not first", name))
            if name in whole_flow.used and heads and "output layer" in reason and name not in last:
                misjudged.add(("not last", name))
            if muons and name in whole_flow.cut:
                spec, shape = group["matrices"][i], group["params"][i].shape
                outside = spec[0] == "transposed"
                rows = torch.arange(shape[int(outside)])[:, None]
                matrices = split(rows, spec[1] if outside else spec) if len(shape) != 3 else []  # a stack of experts
                if any(
                    sum(not part.isdisjoint(m.flatten().tolist()) for part in whole_flow.cut[name]) > 1
                    for m in matrices
                ):
                    misjudged.add(("cut", name))
    return {(kind, ".".join("*" if p.isdecimal() else p for p in name.split("."))) for kind, name in misjudged}
