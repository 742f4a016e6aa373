"""Reading: reads from the code of a module how it cuts the output of one of its linear layers.

Only unambiguous forms are read, such as `self.qkv(x).reshape(B, N, 3, heads, dim)`, `self.c_attn(x).split(n, 2)` or
`gate, up = self.up(x).chunk(2, -1)`. If two methods cut differently, or do anything unknown, there is no result.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

_SHAPES = ("view", "reshape", "unflatten")
_CUTS = ("chunk", "split", "tensor_split", "unbind")
_ORDERED = ("transpose", "contiguous", "movedim", "clamp", "to", "type_as")  # do not change the rows
_Step = tuple[str, list[ast.expr]]


def cut_by_code(owner: nn.Module, attribute: str, out: int, convolution: bool) -> tuple[Any, ...] | None:
    """Return the split of the `out` rows of the layer `owner.attribute`, as the owner's code cuts its output.

    None if there is no source code, or if the code does not cut the output or cuts it in an unknown way.
    """
    found: set[tuple[Any, ...] | None] = set()
    kind: Any = type(owner)
    for method in _methods(kind):
        found.update(_order(owner, steps, out, convolution) for steps in _chains(method, attribute))
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=1024)
def _methods(kind: Any) -> tuple[ast.FunctionDef, ...]:
    """Return the syntax trees of the methods of a module's class, each from the nearest base class.

    The first argument is renamed to self.
    """
    methods: dict[str, ast.FunctionDef] = {}
    for base in kind.__mro__:
        if not issubclass(base, nn.Module) or base.__module__.split(".")[0] == "torch":
            continue
        try:
            (written,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError, SyntaxError):  # typed at a prompt, or made by a function
            continue
        for node in written.body if isinstance(written, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef):
                own = node.args.args[0].arg if node.args.args else "self"
                for name in ast.walk(node) if own != "self" else ():
                    if isinstance(name, ast.Name) and name.id == own:
                        name.id = "self"
                methods.setdefault(node.name, node)
    return tuple(methods.values())


def _chains(method: ast.FunctionDef, attribute: str) -> Iterator[list[_Step]]:
    """Yield the chain of calls on the output of `self.attribute`, up to the call that cuts it."""
    held: dict[str, list[_Step]] = {}
    assigned = [node for node in ast.walk(method) if isinstance(node, ast.Assign)]
    for node in sorted(assigned, key=lambda node: node.lineno):
        steps = _steps(node.value, attribute, held)
        (target,) = node.targets[:1]
        if steps is not None and any(name in _CUTS for name, _ in steps):
            yield steps
        elif isinstance(target, ast.Name):
            held.pop(target.id, None)
            if steps is not None:
                held[target.id] = steps
        elif steps is not None and isinstance(target, ast.Tuple):
            yield [*steps, ("unbind", [])]


def _steps(value: ast.expr, attribute: str, held: dict[str, list[_Step]]) -> list[_Step] | None:
    """Return the calls that compute a value from the output of `self.attribute`; None for any other value."""
    if isinstance(value, ast.Name):
        return held.get(value.id)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    name, base = value.func.attr, value.func.value
    if isinstance(base, ast.Name) and base.id == "self":
        return [] if name == attribute else None
    arguments = [*value.args, *(word.value for word in value.keywords)]
    if isinstance(base, ast.Name) and base.id in ("torch", "F"):  # torch.chunk(x, 3, dim=-1)
        if name == "linear":
            return [] if any(ast.unparse(a) == f"self.{attribute}.weight" for a in arguments) else None
        base, arguments = (arguments[0], arguments[1:]) if arguments else (base, arguments)
    before = _steps(base, attribute, held)
    return None if before is None else [*before, (name, arguments)]


def _order(owner: nn.Module, steps: list[_Step], out: int, convolution: bool) -> tuple[Any, ...] | None:
    turn: int | None = out
    place, rank = (1, 4) if convolution else (-1, 3)  # the dim of the rows, and the number of dims
    for name, arguments in steps:
        if name in _SHAPES:
            last = arguments[-1:] if name == "unflatten" else arguments
            shape = list(last[0].elts) if len(last) == 1 and isinstance(last[0], ast.Tuple) else last
            if (order := _counted(owner, shape[:-1] if convolution else shape, out)) is not None:
                return order
            place, rank = -2 if convolution else -1, len(shape)
            turn = _number(owner, shape[place]) if len(shape) > 1 else None
        elif name == "permute":
            dims = [_number(owner, dim) for dim in arguments]
            if len(dims) > 2 and place % len(dims) in dims:
                place, rank = dims.index(place % len(dims)), len(dims)
        elif name in _CUTS:
            along = _number(owner, arguments[1]) if len(arguments) > 1 else 0
            if turn is None or turn <= 0 or out % turn or along is None or along % rank != place % rank:
                return None
            runs = _runs(owner, name, arguments[0] if arguments else None, turn)
            if runs is None:
                return None
            return ("rows", *runs) if turn == out else ("interleaved", runs, 0)
        elif name not in _ORDERED:
            return None
    return None


def _counted(owner: nn.Module, shape: list[ast.expr], out: int) -> tuple[Any, ...] | None:
    """Return the split for a shape with a literal 2 or 3: (…, 3, heads, dim) or (…, heads, 3, dim); else None."""
    for place in (len(shape) - 3, len(shape) - 2):
        count = _number(owner, shape[place]) if place > 0 and isinstance(shape[place], ast.Constant) else None
        if count in (2, 3) and out % count == 0:
            if place == len(shape) - 3:
                return ("rows", *[out // count] * count)
            block = _number(owner, shape[-1])
            if block is not None and block > 0 and out % (count * block) == 0:
                return ("rows", *[block] * count) if count * block == out else ("interleaved", count, 0, block)
    return None


def _runs(owner: nn.Module, name: str, sizes: ast.expr | None, turn: int) -> tuple[int, ...] | None:
    if isinstance(sizes, ast.List | ast.Tuple):
        runs = [_number(owner, size) for size in sizes.elts]
        whole = [run for run in runs if run is not None and run > 0]
        return tuple(whole) if len(whole) == len(runs) > 1 and sum(whole) == turn else None
    number = None if sizes is None else _number(owner, sizes)
    if number is None or number <= 0 or turn % number:
        return None
    count = turn // number if name == "split" else number
    return (turn // count,) * count if count > 1 else None


def _number(owner: nn.Module, value: ast.expr) -> int | None:
    """Return the value of an expression of numbers and module attributes; None if it is unknown without running."""
    match value:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            negated = _number(owner, operand)
            return None if negated is None else -negated
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            found = getattr(owner, name, None)
            return found if isinstance(found, int) else None
        case ast.BinOp(left=left, op=ast.Mult() | ast.FloorDiv() as operator, right=right):
            a, b = _number(owner, left), _number(owner, right)
            if a is None or not b:
                return None
            return a * b if isinstance(operator, ast.Mult) else a // b
    return None
