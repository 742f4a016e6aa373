"""AOL: the almost-orthogonal-layer rescaling of rows, before the polynomials of the set "aol" (Turbo-Muon)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.preconditioner import Iterates, Preconditioner


@dataclass(frozen=True)
class RowRescaling(Preconditioner):
    """Rescales the rows first, so that the result is the polar factor of the rescaled matrix."""

    def before(self, iteration: Iterates) -> None:
        """Rescale the rows."""
        rescale_rows(iteration.x, iteration.gram())


def rescale_rows(x: Tensor, gram: Tensor) -> None:
    """Divide each row in place by the root of its absolute sum in X Xᵀ: almost-orthogonal-layer (AOL) rescaling.

    The result has spectral norm at most 1 and, where the rows are nearly orthogonal, singular values near 1.
    Turbo-Muon, arXiv 2512.04632; the rescaling is from arXiv 2208.03160.

    Args:
        x: Shape (batch, rows, cols), rows ≤ cols.
        gram: X Xᵀ, shape (batch, rows, rows). If it has been divided by ν², the result is ν times as large.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    sums = gram.abs().sum(-1, keepdim=True, dtype=exact)
    x.div_(torch.where(sums == 0, 1.0, sums).sqrt())
