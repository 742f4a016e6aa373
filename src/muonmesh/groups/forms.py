"""Forms: which elements of a tensor a view of it has, followed through the views of autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from muonmesh.groups.graph import VIEWS, Node, signed

Atoms = tuple[tuple[int, int], ...]
"""(size, stride) pairs, the outermost first."""


class Form(NamedTuple):
    """The elements of a tensor that a view shows: an offset, and (size, stride) pairs for each dim of the view.

    A stride of 0 repeats the same elements. ``ranks`` are the pairs that lead from this rank's shard to the shards of
    other ranks, which have the same view.
    """

    offset: int
    dims: tuple[Atoms, ...]
    ranks: Atoms = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the view."""
        return tuple(prod(size for size, _ in dim) for dim in self.dims)

    @property
    def repeats(self) -> bool:
        """Whether numbers occur several times."""
        return any(size > 1 and not stride for dim in self.dims for size, stride in dim)

    def atoms(self) -> Atoms:
        """Return the (size, stride) pairs that tell numbers apart, the largest stride first, merged where they join."""
        every = [*self.ranks, *(atom for dim in self.dims for atom in dim)]
        return tuple(_merged(sorted((atom for atom in every if atom[0] > 1 and atom[1]), key=lambda atom: -atom[1])))

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
        atoms = self.dims[dim]
        if count == self.sizes[dim]:
            return self
        inner = prod(size for size, _ in atoms[1:])
        if not atoms or (len(atoms) > 1 and (step != 1 or start % inner or count % inner)):
            return None
        stride = atoms[0][1]
        part = ((count // inner, stride * step), *atoms[1:])
        return self._replace(offset=self.offset + start // inner * stride, dims=_replaced(self.dims, dim, part))

    def sharded(self, shape: tuple[int, ...]) -> Form | None:
        """Return the form of the first rank's shard of this shape; None if ranks have other shards."""
        form = self
        for i, (size, whole, atoms) in enumerate(zip(shape, self.sizes, self.dims, strict=True)):
            if size == whole:
                continue
            if len(atoms) != 1 or size < 1 or whole % size:
                return None
            stride = atoms[0][1]
            ranks = (*form.ranks, (whole // size, size * stride))
            form = form._replace(dims=_replaced(form.dims, i, ((size, stride),)), ranks=ranks)
        return form

    def expanded(self, shape: tuple[int, ...]) -> Form:
        """Return the form whose dims of size 1 repeat."""
        missing = len(shape) - len(self.dims)
        old = zip(shape, (1,) * missing + self.sizes, ((),) * missing + self.dims, strict=True)
        return self._replace(dims=tuple(dim if size == before else ((size, 0),) for size, before, dim in old))


def _merged(atoms: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) pairs, with one for each run of pairs that step on through the same numbers."""
    runs: list[tuple[int, int]] = []
    for size, stride in atoms:
        if runs and runs[-1][1] == size * stride:  # also of two strides of 0
            size *= runs.pop()[0]
        runs.append((size, stride))
    return runs


def _replaced(dims: tuple[Atoms, ...], dim: int, *parts: Atoms) -> tuple[Atoms, ...]:
    return (*dims[:dim], *parts, *dims[dim + 1 :])


def through(form: Form, node: Node, number: int) -> Form | None:
    """Return the form of output ``number`` of a view, given the form of its input; None if it is unknown."""
    kind, fn, dims, rank = node.kind, node.fn, form.dims, len(form.dims)
    if kind == "T":
        return form._replace(dims=dims[::-1])
    if kind == "Transpose":
        order = list(dims)
        a, b = node.dim("dim0", rank), node.dim("dim1", rank)
        order[a], order[b] = order[b], order[a]
        return form._replace(dims=tuple(order))
    if kind == "Permute":
        return form._replace(dims=tuple(dims[signed(i) % rank] for i in fn._saved_dims))
    if node.effect == "gates":
        dim = node.dim("dim", rank)
        half = form.sizes[dim] // 2
        return form.sliced(dim, number * half, half)
    if node.effect not in VIEWS:
        return None
    shape = node.shape(number)
    if node.effect == "moves":
        return form.sharded(shape)
    if kind == "Expand":
        return form.expanded(shape)
    if node.effect == "reshapes":
        return form.viewed(shape)
    dim = node.dim("dim", rank)
    if kind in ("Select", "Unbind"):
        part = form.sliced(dim, number if kind == "Unbind" else node.dim("index", form.sizes[dim]), 1)
        return part and part._replace(dims=_replaced(part.dims, dim))
    if kind == "Slice":
        start = slice(signed(fn._saved_start), signed(fn._saved_end)).indices(form.sizes[dim])[0]
        return form.sliced(dim, start, shape[dim], fn._saved_step)
    return form.sliced(dim, sum(node.shape(before)[dim] for before in range(number)), shape[dim])
