"""The two elementwise parts of a step, each in one launch for all pieces: gradient to direction, result to weight.

Both are operators of torch, `muonmesh::fold` and `muonmesh::apply`, so dispatch modes and fake tensors see one launch
each. The tensors of a column have one dtype. The formulas are those of Muon's rule, with the same results as its
operations on each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import PieceRows, rows_of
from muonmesh.numerics.kernels.toolchain import DTYPES, is_usable
from muonmesh.numerics.kernels.triton_launch import Launch, are_aligned, operator

_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options without fused multiply-add, so that the bits of an element do not depend on the memory layout."""


def can_fuse(device: torch.device, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether `fold` and `apply` take tensors of these dtypes there; in fp64, for one, they do not compute."""
    return all(dtype in DTYPES for dtype in dtypes) and is_usable(device)


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


def _folding(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    buffers: Sequence[Tensor],
    pieces: int,
    active: Tensor,
    momentum: float,
    nesterov: bool,
) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import pieces as kernels

    table, bases, count, programs = rows_of(pieces).of(gradients, momenta, buffers=buffers or momenta)
    dtypes = gradients[0].dtype, momenta[0].dtype, (buffers or momenta)[0].dtype
    numbers = (table, bases, count, _contiguous(active), float(1 - momentum), float(momentum))
    choices = (len(buffers) > 0, nesterov, torch.finfo(dtypes[1]).tiny)
    arguments = (*numbers, *choices, *(kernels.TYPES[dtype] for dtype in dtypes))
    code = "fold", dtypes, choices, are_aligned(table, bases, numbers[3])
    yield Launch(kernels.fold, programs, arguments, _OPTIONS, code)


def _applying(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    pieces: int,
    active: Tensor,
    keep: Tensor,
    size: Tensor,
) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import pieces as kernels

    table, bases, count, programs = rows_of(pieces).of(weights, masters or weights, buffers=buffers)
    dtypes = weights[0].dtype, (masters or weights)[0].dtype, buffers[0].dtype
    numbers = (table, bases, count, _contiguous(active), _contiguous(keep), _contiguous(size))
    choices = (len(masters) > 0,)
    arguments = (*numbers, *choices, *(kernels.TYPES[dtype] for dtype in dtypes))
    code = "apply", dtypes, choices, are_aligned(table, bases, *numbers[3:])
    yield Launch(kernels.apply, programs, arguments, _OPTIONS, code)


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


def _contiguous(vector: Tensor) -> Tensor:
    vector = vector.contiguous()
    return vector.view(torch.uint8) if vector.dtype == torch.bool else vector
