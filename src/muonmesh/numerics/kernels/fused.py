"""The two elementwise parts of a step, each in one launch for all pieces: gradient to direction, result to weight.

Both are operators of torch, `muonmesh::fold` and `muonmesh::apply`, so dispatch modes and fake tensors see one launch
each. Each combination of dtypes needs its own launch; most models have one combination. The formulas are those of
Muon's rule, with the same results as its operations on each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import Rows, on_device
from muonmesh.numerics.kernels.toolchain import DTYPES, is_usable
from muonmesh.numerics.kernels.triton_launch import Launch, are_aligned, operator

_Dtypes: TypeAlias = tuple[torch.dtype, torch.dtype, torch.dtype]
_Piece: TypeAlias = tuple[int, int, Tensor, Tensor, Tensor]

_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options without fused multiply-add, so that the bits of an element do not depend on the memory layout."""


def can_fuse(device: torch.device, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether `fold` and `apply` take tensors of these dtypes there; in fp64, for one, they do not compute."""
    return all(dtype in DTYPES for dtype in dtypes) and is_usable(device)


def fold(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    directions: Sequence[Tensor],
    active: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    entries: Sequence[int],
) -> None:
    """Fold gradients into momenta and write the directions.

    Where a piece is active, ``m ← lerp(m, g, 1 − μ)`` with denormals flushed to zero, and the direction is
    ``lerp(g, m, μ)`` with Nesterov, else ``m``. Where it is not, ``m`` stays as it is and the direction is ``m``,
    whatever the gradient is.

    Of pieces of one size the tensors may hold several each, one after the other, contiguous, if ``entries`` says how
    many pieces there are.

    Args:
        gradients: One a piece, any strides of at most 3 dims, or contiguous; bf16, fp16 or fp32; read only.
        momenta: Likewise, each of its gradient's shape; written, and computed as its dtype says.
        directions: Likewise; written, rounded once from the momentum's dtype. Empty: none are wanted.
        active: 1-D bool on the device, one entry a piece or one that several pieces share.
        momentum: μ.
        nesterov: See above.
        entries: The entry of each piece.

    Raises:
        ValueError: The tensors of a piece differ in shape, or have more than 3 dims, or a dtype cannot be computed in.
    """
    if not gradients:
        return  # without a tensor torch would not know the device
    _fold(gradients, momenta, directions, entries, active, momentum, nesterov)
    torch.autograd.graph.increment_version([*momenta, *directions])


def apply(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    updates: Sequence[Tensor],
    active: Tensor,
    *,
    keep: Tensor,
    size: Tensor,
    entries: Sequence[int],
) -> None:
    """Decay and update weights: ``w ← w·keep − size·u`` in fp32, where a piece is active.

    A tensor may hold several pieces as in `fold`.

    Args:
        weights: One a piece, any strides of at most 3 dims, or contiguous; bf16, fp16 or fp32; written, rounded once.
        masters: Master weights, each of its weight's shape; they take their weight where this is not the rounded
            master, are updated, and then rounded to the weight. Empty: there are none.
        updates: Likewise, read only.
        active: 1-D bool on the device, one entry a piece or one that several pieces share.
        keep: What remains of a weight, 1 − lr·wd: 1-D fp32, likewise.
        size: What an update is multiplied by before it is subtracted, likewise: learning rate times scale, or −1 where
            updates arrive as finished steps.
        entries: The entry of each piece.

    Raises:
        ValueError: The tensors of a piece differ in shape, or have more than 3 dims, or a dtype cannot be computed in.
    """
    if not weights:
        return
    _apply(weights, masters, updates, entries, active, keep, size)
    torch.autograd.graph.increment_version([*weights, *masters])


def _folding(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    directions: Sequence[Tensor],
    entries: Sequence[int],
    active: Tensor,
    momentum: float,
    nesterov: bool,
) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import pieces

    for dtypes, count, programs, table in _grouped("fold", entries, gradients, momenta, directions or momenta):
        numbers = (table, count, _contiguous(active), float(1 - momentum), float(momentum))
        choices = (len(directions) > 0, nesterov, torch.finfo(dtypes[1]).tiny)
        arguments = (*numbers, *choices, *(pieces.TYPES[dtype] for dtype in dtypes))
        code = "fold", dtypes, choices, are_aligned(table, numbers[2])
        yield Launch(pieces.fold, programs, arguments, _OPTIONS, code)


def _applying(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    updates: Sequence[Tensor],
    entries: Sequence[int],
    active: Tensor,
    keep: Tensor,
    size: Tensor,
) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import pieces

    for dtypes, count, programs, table in _grouped("apply", entries, weights, masters or weights, updates):
        numbers = (table, count, _contiguous(active), _contiguous(keep), _contiguous(size))
        choices = (len(masters) > 0,)
        arguments = (*numbers, *choices, *(pieces.TYPES[dtype] for dtype in dtypes))
        code = "apply", dtypes, choices, are_aligned(table, *numbers[2:])
        yield Launch(pieces.apply, programs, arguments, _OPTIONS, code)


_fold = operator(
    "fold(Tensor[] gradients, Tensor(a!)[] momenta, Tensor(b!)[] directions, int[] entries, Tensor active, "
    "float momentum, bool nesterov)",
    _folding,
)
_apply = operator(
    "apply(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] updates, int[] entries, Tensor active, Tensor keep, "
    "Tensor size)",
    _applying,
)


def _contiguous(vector: Tensor) -> Tensor:
    vector = vector.contiguous()
    return vector.view(torch.uint8) if vector.dtype == torch.bool else vector


def _grouped(
    what: str, entries: Sequence[int], *columns: Sequence[Tensor]
) -> Iterator[tuple[_Dtypes, int, int, Tensor]]:
    """Yield for pieces of the same dtypes these, how many they are, their programs, and their table on the device."""
    groups = _rows_by_dtypes(what, entries, *columns)
    filled = {dtypes: rows for dtypes, rows in groups.items() if rows.pieces}
    tables = on_device(list(filled.values()), columns[0][0].device) if filled else ()
    for (dtypes, rows), table in zip(filled.items(), tables, strict=True):
        yield dtypes, rows.pieces, rows.programs, table


def _rows_by_dtypes(
    what: str, entries: Sequence[int], a: Sequence[Tensor], b: Sequence[Tensor], c: Sequence[Tensor]
) -> dict[_Dtypes, Rows]:
    if not len(a) == len(b) == len(c) == len(entries):
        kinds = [{tensor.dtype for tensor in some} for some in (a, b, c)]
        size = _size_of_pieces(what, entries, a, b, c)
        if size and all(len(kind) == 1 and kind <= set(DTYPES) for kind in kinds):
            rows = Rows.in_order(entries, a, b, c)
            if rows is not None:
                return {(a[0].dtype, b[0].dtype, c[0].dtype): rows}
        a, b, c = ([piece for tensor in some for piece in tensor.view(-1, size)] for some in (a, b, c))
    pieces: dict[_Dtypes, list[_Piece]] = {}
    last, some = None, list[_Piece]()
    for piece in zip(range(len(a)), entries, a, b, c, strict=True):
        dtypes = piece[2].dtype, piece[3].dtype, piece[4].dtype
        if dtypes != last:  # most are those of the piece before
            if any(dtype not in DTYPES for dtype in dtypes):
                needed, has = "bf16, fp16 or fp32", ", ".join(map(str, dtypes))
                raise ValueError(f"piece {piece[0]} of {what}: found {has}; needed {needed}. Write a loop over pieces")
            last, some = dtypes, pieces.setdefault(dtypes, [])
        some.append(piece)
    found = {dtypes: Rows() for dtypes in pieces}
    for dtypes, group in found.items():
        group.add(pieces[dtypes])
    return found


def _size_of_pieces(what: str, entries: Sequence[int], *columns: Sequence[Tensor]) -> int:
    """Return the size of pieces that lie one after the other in tensors, several in some of them."""
    lengths = [[*map(Tensor.numel, some)] for some in columns]
    totals = {*map(sum, lengths)}
    size = max(totals) // len(entries)
    multiples = size and not any(length % size for length in set().union(*lengths))
    whole = multiples and all(all(map(Tensor.is_contiguous, some)) for some in columns)
    if totals != {size * len(entries)} or not whole:
        shapes = ", ".join(str([tuple(tensor.shape) for tensor in some]) for some in columns)
        needed = f"{len(entries)} pieces of one size in contiguous tensors each"
        raise ValueError(f"pieces of {what}: found shapes {shapes}; needed {needed}. Cut them alike")
    return size
