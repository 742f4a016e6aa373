"""What each weight of a model influences, seen from below: an oracle of roles that looks at no graph and no name.

`Influence` runs a forward and looks at every operation of torch: which weights took part in what each product reads,
and which products and outputs each weight reaches. `reached` changes some rows of a weight and runs the forward again:
rows of one matrix change the same operands of the products that read them, and rows of q, k and v do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.support.reference import split

EMBEDDINGS, HEADS = "adamw.embeddings", "adamw.head"
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution", "_grouped_mm", "linear", "mv", "addmv", "dot"}
_KEEPS = {"t", "transpose", "permute", "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"}
_KEEPS |= {"expand", "_to_copy", "clone", "alias", "select", "slice", "split", "split_with_sizes", "unbind", "detach"}
_KEEPS |= {"copy_", "lift_fresh", "contiguous", "chunk", "as_strided", "unsafe_split"}
_LOOK_UP = {"embedding", "index", "index_select", "gather", "_embedding_bag"}

Slot = tuple[int, int]
"""The number of an operation of a forward, and that of one of its operands."""


class _Past(Exception):
    """Nothing after this operation can change."""


class Influence(TorchDispatchMode):
    """One forward of a model, with what each operation reads.

    Attributes:
        reads: For each weight, which weights took part in what its products read; None if no input did either.
        readers: For each weight, the weights whose products read something that it took part in.
        looked_up: The weights whose rows are looked up.
        uses: The weights that multiply, and how often.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any] = (), numbers: bool = True) -> None:
        super().__init__()
        self.names = [name for name, _ in model.named_parameters()]
        self.numbers = numbers
        self.reads: dict[str, set[str]] = defaultdict(set)
        self.data: set[str] = set()
        self.readers: dict[str, set[str]] = defaultdict(set)
        self.looked_up: set[str] = set()
        self.uses: dict[str, int] = defaultdict(int)
        self.operands: dict[int, list[Tensor]] = {}
        self.results: dict[int, list[Tensor]] = {}
        self.weights: dict[Slot, str] = {}
        self._labels: dict[int, int] = {}
        self._pure: dict[int, str] = {}
        self._alive: list[Any] = []
        self.number = 0
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() > 1:
                self._pure[self._storage(parameter)] = name
                self._labels[self._storage(parameter)] = 1 << i
        self._input = 1 << len(self.names)
        for value in inputs:
            if isinstance(value, Tensor):
                self._labels[self._storage(value)] = self._input

    def _storage(self, tensor: Tensor) -> int:
        self._alive.append(tensor.untyped_storage())
        return int(tensor.untyped_storage()._cdata)

    def of(self, tensor: Tensor) -> set[str]:
        """The weights that a tensor depends on."""
        return self._names(self._labels.get(self._storage(tensor), 0))

    def _names(self, labels: int) -> set[str]:
        return {name for i, name in enumerate(self.names) if labels >> i & 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        storages = [self._storage(tensor) for tensor in tensors]
        labels = [self._labels.get(storage, 0) for storage in storages]
        pure = [self._pure.get(storage) for storage in storages]
        product = kind in _PRODUCTS or kind.startswith("_scaled_dot") or "rnn" in kind or "lstm" in kind
        active = [
            i for i, (label, weight_name) in enumerate(zip(labels, pure, strict=True)) if label and weight_name is None
        ]
        meets = product or (kind in ("mul", "div", "mul_", "div_") and len(active) > 1) or kind == "glu"
        if kind == "convolution" and args[8] > 1:
            meets = False
        number, self.number = self.number, self.number + 1
        if meets and self.numbers:
            self.operands[number] = [tensor.detach().clone() for tensor in tensors]
            self.weights |= {(number, i): weight_name for i, weight_name in enumerate(pure) if weight_name is not None}
        output = func(*args, **kwargs)
        results = _tensors(output)
        if meets and self.numbers:
            self.results[number] = [tensor.detach().clone() for tensor in results]
        weights = {weight_name for weight_name in pure if weight_name is not None}
        all_labels = 0
        for label in labels:
            all_labels |= label
        if (product and kind != "dot") and weights:
            others = 0
            for i in active:
                others |= labels[i]
            for weight in weights if active or len(weights) < 2 else ():
                self.uses[weight] += 1
                self.reads[weight] |= self._names(others)
                if others & self._input:
                    self.data.add(weight)
                for below in self._names(others):
                    self.readers[below].add(weight)
        elif kind in _LOOK_UP and pure and pure[0] is not None:
            self.looked_up.add(pure[0])
        keeps = kind in _KEEPS and len(weights) == 1 and not active
        for tensor in results:
            storage = self._storage(tensor)
            if keeps and storage not in self._labels:
                (self._pure[storage],) = weights
            elif not keeps and storage in self._pure and all_labels & ~self._labels[storage]:
                del self._pure[storage]
            numbers = tensor.is_floating_point() or tensor.is_complex()  # a choice by numbers is no value
            self._labels[storage] = self._labels.get(storage, 0) | (all_labels if numbers else all_labels & self._input)
        return output


class _Changed(TorchDispatchMode):
    """A forward with changed rows, which go no further than the products that read them; those are noted."""

    def __init__(self, before: Influence, weight: str, until: int) -> None:
        super().__init__()
        self.before, self.weight, self.until = before, weight, until
        self.number = 0
        self.changed: set[Slot] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, self.number = self.number, self.number + 1
        if number > self.until:
            raise _Past
        slots: list[int] = []
        if (operands := self.before.operands.get(number)) is not None:
            tensors = _tensors((args, kwargs))
            slots = [i for i, (a, b) in enumerate(zip(tensors, operands, strict=True)) if not _same(a, b)]
            slots = [i for i in slots if self.before.weights.get((number, i)) != self.weight]
            if slots and func.overloadpacket.__name__ == "glu":
                halves = zip(tensors[0].chunk(2, args[1]), operands[0].chunk(2, args[1]), strict=True)
                slots = [i for i, (a, b) in enumerate(halves) if not _same(a, b)]
        output = func(*args, **kwargs)
        if slots:
            self.changed |= {(number, slot) for slot in slots}
            for changed, old in zip(_tensors(output), self.before.results[number], strict=True):
                changed.detach().copy_(old)
        return output


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def reached(
    before: Influence, name: str, weight: Tensor, rows: Iterable[Any], forward: Callable[[], Any]
) -> list[frozenset[Slot] | None]:
    """Which operands of products some parts of a weight reach, behind the weight's own product.

    ``before`` is the same forward with nothing changed; ``rows`` are indices of the weight. None: what the forward does
    depends on its numbers.
    """
    changed_slots: list[frozenset[Slot] | None] = []
    old, until = weight.detach().clone(), 1 << 60
    with torch.no_grad():
        for index in (..., *rows):
            weight[index] = weight[index] * 1.25 + 0.01
            mode = _Changed(before, name, until)
            try:
                with torch.enable_grad(), mode:
                    forward()
                ran = mode.number == before.number
            except _Past:
                ran = True
            except Exception:  # another number of operations, or shapes
                ran = False
            weight.copy_(old)
            changed_slots.append(frozenset(mode.changed) if ran else None)
            if index is ... and ran:
                until = max((number for number, _ in mode.changed), default=0)
    return changed_slots[1:]


def differences(
    model: nn.Module,
    groups: Any,
    before: Influence,
    results: Iterable[Tensor],
    forward: Callable[[], Any] | None = None,
    examined: set[Any] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield what the groups of a model say otherwise than its influences: a kind of difference, and a weight's name.

    "first" and "last" layers that are Muon's, "not first" and "not last", which are taken for such; "cut" whose parts
    are trained as one matrix, "joined" whose matrices are one part.

    Args:
        model: The model.
        groups: What `split_params` made of it.
        before: A forward of it.
        results: The outputs that count as results.
        forward: Runs the same forward again, to look at rows; None: rows are not looked at.
        known: Owners of weights whose rows have been looked at, of any model; they are not looked at again.
    """
    reaches = set().union(*map(before.of, results))
    last = {name for name in before.uses if name in reaches and not before.readers[name]}
    first = {name for name in before.uses if not before.reads[name] and name in before.data}
    last, first = ({groups.shared.get(name, name) for name in names} for names in (last, first))
    modules = dict(model.named_modules())
    for group in groups:
        for i, name in enumerate(group["param_names"]):
            parameter, kind, muons = group["params"][i], group["name"], group["algorithm"] == "muon"
            if parameter.dim() < 2 or (name not in before.uses and name not in before.looked_up):
                continue
            if muons and name in first - last:
                yield "first", name
            if muons and name in last:
                yield "last", name
            if kind.startswith(EMBEDDINGS) and name not in first | before.looked_up:
                yield "not first", name
            if kind.startswith(HEADS) and name not in last:
                yield "not last", name
            if muons and forward is not None and name in before.uses:
                spec, around = group["matrices"][i], modules[name.rpartition(".")[0].rpartition(".")[0]]
                key = (type(around), *name.rsplit(".", 2)[-2:], spec[0] if isinstance(spec, tuple) else spec)
                if examined is None or key not in examined:
                    set() if examined is None else examined.add(key)
                    yield from ((wrong, name) for wrong in _misfits(before, name, parameter, spec, forward))


def _misfits(before: Influence, name: str, weight: Tensor, spec: Any, forward: Callable[[], Any]) -> Iterator[str]:
    """Yield "cut" if rows of one matrix reach other places than its others, "joined" if two matrices' rows do not."""
    stacked, inner = weight.dim() == 3 and "flatten" not in (spec, spec[0]), spec  # or the kernel of a convolution
    if stacked:
        inner = spec[1] if isinstance(spec, tuple) else "whole"
    if isinstance(inner, tuple) and inner[0] == "flatten":
        inner = inner[1]
    inside = isinstance(inner, tuple) and inner[0] == "transposed"
    inner = inner[1] if inside else "whole" if inner == "flatten" else inner
    rows = torch.arange(weight.shape[int(stacked) + int(inside)])[:, None]
    parts = [part.flatten().tolist() for part in split(rows, inner)]
    pairs = [
        (k, part[x * (len(part) - 1) // n])
        for k, part in enumerate(parts)
        for n in (9 if len(parts) == 1 else 2,)
        for x in range(n + 1)
    ]
    lead: tuple[int, ...] = ()
    if stacked:
        reach = reached(before, name, weight, [(expert,) for expert in range(weight.shape[0])], forward)
        lead = next(((expert,) for expert, places in enumerate(reach) if places), ())
        if not lead:
            return
    index = [(*lead, slice(None), row) if inside else (*lead, row) for _, row in pairs]
    of: dict[int, set[frozenset[Slot]]] = defaultdict(set)
    for (k, _), places in zip(pairs, reached(before, name, weight, index, forward), strict=True):
        if places:  # none: a dead unit, or the numbers decide what is run
            of[k].add(places)
    if any(len(places) > 1 for places in of.values()):
        yield "cut"
    elif len({next(iter(places)) for places in of.values()}) < len(of):
        yield "joined"
