"""What a forward does with each weight, read off autograd's graph on `meta`: an oracle that knows no module's class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

_PRODUCTS = ("MmBackward", "AddmmBackward", "BmmBackward", "BaddbmmBackward", "ConvolutionBackward", "LinearBackward")
_VIEWS = ("TBackward", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Expand", "ToCopy", "Unsqueeze")
_CUTS = ("SplitBackward", "SplitWithSizes", "UnbindBackward")


class Flow(NamedTuple):
    """Names of weights: of products that read data, of those that make the output, and whose output is cut."""

    first: set[str]
    last: set[str]
    cut: set[str]


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

    held: dict[Any, list[str]] = {}
    for node in users:
        if node.name().startswith(_PRODUCTS):
            found = [name for before, _ in node.next_functions if (name := weight(before)) is not None]
            if found:
                held[node] = found

    def behind(starts: list[Any]) -> Iterator[Any]:
        """Nodes that the starts are made of, up to and with the first that multiply by weights."""
        seen, stack = set(), [node for node in starts if node is not None]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                yield node
                if node not in held:
                    stack += [before for before, _ in node.next_functions if before is not None]

    def learned(node: Any) -> bool:
        variable = getattr(node, "variable", None)
        return node in held or node.name().startswith("Embedding") or (variable is not None and variable.ndim > 1)

    first = {
        name
        for node, found in held.items()
        if not any(map(learned, behind([b for b, _ in node.next_functions if weight(b) is None])))
        for name in found
    }
    last = {name for node in behind(list(roots)) if node in held for name in held[node]}
    cut = set()
    for node, found in held.items():
        while len(users[node]) == 1 and users[node][0].name().startswith((*_VIEWS, "AddBackward")):
            node = users[node][0]
        if len(users[node]) == 1 and users[node][0].name().startswith(_CUTS):
            cut.update(found)
    return Flow(first, last, cut)
