"""The elementwise parts of a step, each in one launch for all pieces: zero gradients, gradient to direction, result to
weight.

They are operators of torch, `muonmesh::mark_nonzero`, `fold` and `apply`, so dispatch modes and fake tensors see one
launch each. The tensors of a column have one dtype. The formulas are those of Muon's rule, with the same results as its
operations on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import PieceRows
from muonmesh.numerics.kernels.triton_launch import operator


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


_mark_nonzero = operator("mark_nonzero(Tensor[] gradients, int pieces, Tensor(a!) found)", "pieces.finding")
_fold = operator(
    "fold(Tensor[] gradients, Tensor(a!)[] momenta, Tensor(b!)[] buffers, int pieces, Tensor active, float momentum, "
    "bool nesterov)",
    "pieces.folding",
)
_apply = operator(
    "apply(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] buffers, int pieces, Tensor active, Tensor keep, "
    "Tensor size)",
    "pieces.applying",
)
