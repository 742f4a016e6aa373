"""The elementwise parts of a step, each in one launch for all pieces: zero gradients, gradient to direction, result to
weight.

They are operators of torch, `muonmesh::mark_nonzero`, `fold` and `apply`, so dispatch modes and fake tensors see one
launch each. The tensors of a column have one dtype. The formulas are those of Muon's rule, with the same results as its
operations on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import PieceRows, rows_of
from muonmesh.numerics.kernels.triton_launch import Launch, are_aligned, operator

_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options without fused multiply-add, so that the bits of an element do not depend on the memory layout."""


def mark_nonzero(pieces: PieceRows, gradients: Sequence[Tensor], found: Tensor) -> None:
    """Write 1 to the entry of each piece with an element that is not zero, or is NaN; leave the other entries.

    Args:
        pieces: The pieces, at least one; several may share an entry.
        gradients: The tensors that hold them, of one of `toolchain.DTYPES`, on one device.
        found: Contiguous int32 (n,) on that device.
    """
    _mark_nonzero(gradients, pieces.number, found)


def fold(
    pieces: PieceRows,
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    buffers: Sequence[Tensor],
    active: Tensor,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """Fold gradients into momenta and write the directions.

    Where a piece is active, ``m ← lerp(m, g, 1 − μ)`` with denormals flushed to zero, and the direction is
    ``lerp(g, m, μ)`` with Nesterov, else ``m``. Where it is not, ``m`` stays as it is and the direction is ``m``,
    whatever the gradient is.

    Args:
        pieces: The pieces, at least one.
        gradients: The tensors that hold them; bf16, fp16 or fp32; read only.
        momenta: Likewise, in the same order; written, and computed as its dtype says.
        buffers: Where directions are written, rounded once from the momentum's dtype. Empty: none are wanted.
        active: 1-D bool on the device, one entry a piece or one that several pieces share.
        momentum: μ.
        nesterov: See above.
    """
    _fold(gradients, momenta, buffers, pieces.number, active, momentum, nesterov)
    torch.autograd.graph.increment_version(momenta)


def apply(
    pieces: PieceRows,
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    active: Tensor,
    *,
    keep: Tensor,
    size: Tensor,
) -> None:
    """Decay and update weights: ``w ← w·keep − size·u`` in fp32, where a piece is active.

    Args:
        pieces: The pieces, at least one.
        weights: The tensors that hold them; bf16, fp16 or fp32; written, rounded once.
        masters: Master weights, in the same order; they take their weight where this is not the rounded master, are
            updated, and then rounded to the weight. Empty: there are none.
        buffers: Where the updates u are, read only.
        active: 1-D bool on the device, one entry a piece or one that several pieces share.
        keep: What remains of a weight, 1 − lr·wd: 1-D fp32, likewise.
        size: What an update is multiplied by before it is subtracted, learning rate times scale, likewise.
    """
    _apply(weights, masters, buffers, pieces.number, active, keep, size)
    torch.autograd.graph.increment_version([*weights, *masters])


def _launch(
    kernel: str,
    pieces: int,
    columns: Sequence[Sequence[Tensor]],
    buffers: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *numbers: float,
    choices: tuple[Any, ...] = (),
) -> list[Launch]:
    """Return the launch of one of the kernels for pieces.

    Args:
        kernel: Its name.
        pieces: `PieceRows.number`.
        columns: The tensors of each column but the last.
        buffers: Those of the last column.
        vectors: The kernel's vectors with one entry for each matrix.
        numbers: Its numbers.
        choices: What it is compiled for, besides the dtypes of the columns.
    """
    from muonmesh.numerics.kernels import pieces as kernels

    rows = rows_of(pieces)
    table, bases, count, programs = rows.of(*columns, buffers=buffers)
    whole = [vector.contiguous() for vector in vectors]
    vectors = [vector.view(torch.uint8) if vector.dtype == torch.bool else vector for vector in whole]
    dtypes, choices = tuple([column[0].dtype for column in (*columns, buffers) if column]), (rows.blocks, *choices)
    arguments = (table, bases, count, *vectors, *numbers, *choices, *(kernels.TYPES[dtype] for dtype in dtypes))
    code = kernel, dtypes, choices, are_aligned(table, bases, *vectors)
    return [Launch(getattr(kernels, kernel), programs, arguments, _OPTIONS, code)]


def _finding(gradients: Sequence[Tensor], pieces: int, found: Tensor) -> list[Launch]:
    return _launch("nonzero", pieces, [gradients], (), [found])


def _folding(*given: Any) -> list[Launch]:
    gradients, momenta, buffers, pieces, active, momentum, nesterov = given
    choices = len(buffers) > 0, nesterov, torch.finfo(momenta[0].dtype).tiny
    columns, numbers = (gradients, momenta), (float(1 - momentum), float(momentum))
    return _launch("fold", pieces, columns, buffers or momenta, [active], *numbers, choices=choices)


def _applying(*given: Any) -> list[Launch]:
    weights, masters, buffers, pieces, active, keep, size = given
    columns, choices = (weights, masters or weights), (len(masters) > 0,)
    return _launch("apply", pieces, columns, buffers, [active, keep, size], choices=choices)


_mark_nonzero = operator("mark_nonzero(Tensor[] gradients, int pieces, Tensor(a!) found)", _finding)
_fold = operator(
    "fold(Tensor[] gradients, Tensor(a!)[] momenta, Tensor(b!)[] buffers, int pieces, Tensor active, float momentum, "
    "bool nesterov)",
    _folding,
)
_apply = operator(
    "apply(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] buffers, int pieces, Tensor active, Tensor keep, "
    "Tensor size)",
    _applying,
)
