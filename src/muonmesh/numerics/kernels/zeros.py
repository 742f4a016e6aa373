"""Finds which of many gradients are exactly zero, in one launch: the operator `muonmesh::mark_nonzero`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from muonmesh.numerics.kernels.portions import LOOKED
from muonmesh.numerics.kernels.rows import FlatRows, rows_of
from muonmesh.numerics.kernels.triton_launch import Launch, operator


def flat_rows(places: Sequence[tuple[int, int, int, int]]) -> FlatRows:
    """Return the rows of pieces for `mark_nonzero`."""
    return FlatRows(places, LOOKED)


def mark_nonzero(pieces: FlatRows, gradients: Sequence[Tensor], found: Tensor) -> None:
    """Write 1 to the entry of each piece with an element that is not zero, or is NaN; leave the other entries.

    Args:
        pieces: The pieces, at least one; several may share an entry.
        gradients: The tensors that hold them, of one of `toolchain.DTYPES`, on one device.
        found: int32 (n,) on that device.
    """
    _mark_nonzero(gradients, pieces.number, found)


def _nonzero(gradients: Sequence[Tensor], pieces: int, found: Tensor) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import lines

    table, bases, count, programs = rows_of(pieces).of(gradients)
    yield lines.finding_nonzero(table, bases, count, programs, found, gradients[0].dtype)


_mark_nonzero = operator("mark_nonzero(Tensor[] gradients, int pieces, Tensor(a!) found)", _nonzero)
