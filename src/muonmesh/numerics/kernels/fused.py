"""Fused: the elementwise parts of a step on a device, each in one launch for all pieces.

`mark_nonzero` finds gradients of zero, `fold` turns gradients into directions, and `apply` writes weights. They are
operators of torch in ``muonmesh::``, so dispatch modes and fake tensors see one operator for each launch. All tensors
of one argument have the same dtype. The results have the bits of Muon's rule (`numerics.rules.muon`) on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import PieceRows
from muonmesh.numerics.kernels.triton_launch import operator


def mark_nonzero(pieces: PieceRows, gradients: Sequence[Tensor], nonzero: Tensor) -> None:
    """Write True to the entry of each piece that has an element other than zero; NaN is other than zero.

    The entries of other pieces stay as they are.

    Args:
        pieces: The pieces, at least one; several may share an entry.
        gradients: The tensors that hold them, of one of `toolchain.DTYPES`, on one device.
        nonzero: Contiguous bool (n,) on that device.
    """
    _mark_nonzero(gradients, pieces.number, nonzero)


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
        buffers: The tensors that receive the directions, each rounded once from the dtype of the momentum. Empty: no
            directions are written.
        active: Whether each piece is active, 1-D bool on the device. A piece reads its entry (`Place.entry`); several
            pieces may share an entry.
        momentum: μ.
        nesterov: Whether the direction looks ahead.
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
        masters: Master weights, in the same order; written. An element whose weight is not the rounded master first
            takes the weight. The master is then updated, and rounded to the weight. Empty: there are no masters.
        buffers: The tensors that hold the updates u, read only.
        active: Whether each piece is active, 1-D bool on the device, by `Place.entry` as in `fold`.
        keep: The factor of the weights, 1 − lr·wd, 1-D fp32, with the same entries.
        size: The factor of the updates, learning rate times scale, 1-D fp32, with the same entries.
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
