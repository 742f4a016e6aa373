"""UpdateSquares: the squares of the updates of one step, added up by group for `Muon.metrics`, and singular values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import matrix_norm
from torch.nn.functional import normalize

from muonmesh.numerics.deflation import probe

_PROBES, _PRODUCTS = 32, 12
"""Rows of random signs by which results are multiplied, and products with M Mᵀ that find a largest singular value."""

SPECTRUM = ("momentum_spectral", "momentum_stable_rank", "update_effective_rank", "polar_error")


class UpdateSquares:
    """Sums of squares of one step's updates by group, for `Muon.metrics`.

    Args:
        spectrum: Whether the step takes singular values too, of the matrices that this rank orthogonalizes.
    """

    def __init__(self, *, spectrum: bool = False) -> None:
        self._squares: dict[int, list[Tensor]] = {}
        self._spectra: dict[int, list[Tensor]] = {}
        self.spectrum = spectrum

    def add(self, group: int, squares: Tensor) -> None:
        """Add to a group's sum, from any thread."""
        self._squares.setdefault(group, []).append(squares)

    def of(self, group: int) -> Tensor | None:
        """Return a group's sum, 0-d fp64, or None if nothing was added."""
        squares = self._squares.get(group)
        return torch.stack(squares).sort().values.sum() if squares else None  # threads add in any order

    def add_spectra(self, group: int, momenta: Tensor, results: Tensor, times: Tensor | None) -> None:
        """Add matrices to a group's figures, from any thread.

        Let Y = V X Xᵀ for a result X and rows V of random signs. Then ‖V − Y‖² / ‖V‖² estimates the mean of (σ² − 1)²,
        and ‖X‖² ‖V X‖² / ‖Y‖² estimates (Σσ²)² / Σσ⁴. If X has few rows, V is the identity and both are exact.

        Args:
            group: Number of the group.
            momenta: `largest_of` what was orthogonalized.
            results: What became of it, (n, rows, cols).
            times: By what results are multiplied too, (n,); 0 for those that do not count.
        """
        x = results.to(momenta.dtype)
        if times is not None:
            x, momenta = x / times.abs().to(x.dtype)[:, None, None], momenta * (times != 0)[:, None]
        rows = x.shape[-2]
        v = probe(x, _PROBES) if rows > 2 * _PROBES else torch.eye(rows, dtype=x.dtype, device=x.device)
        across = v @ x if rows > 2 * _PROBES else x
        seen = across @ x.mT
        effective = (matrix_norm(x) * matrix_norm(across) / matrix_norm(seen)).square()
        figures = [*momenta.unbind(1), effective, matrix_norm(seen - v) / matrix_norm(v)]
        self._spectra.setdefault(group, []).extend(torch.stack(figures, dim=1).unbind())

    def spectra_of(self, group: int) -> Tensor | None:
        """Return the sum of each figure of `SPECTRUM` over a group's matrices that are not zero, and how many, (4, 2).

        None if this rank orthogonalized none.
        """
        if not (found := self._spectra.get(group)):
            return None
        figures = torch.stack(found)
        counted = figures[:, :1] != 0
        sums = figures.where(counted, 0.0).sort(dim=0).values.sum(0)  # threads add in any order
        return torch.stack([sums, counted.sum().expand(len(SPECTRUM))], dim=1)


def largest_of(matrices: Tensor) -> Tensor:
    """Return the largest singular value σ of wide matrices M (n, rows, cols), and ‖M‖² / σ², fp32 or fp64 (n, 2).

    By power iteration on M Mᵀ, so σ is too small where many values are near it, by 3 % for normal entries.
    """
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    scale = x.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    x = x / scale  # so that no square overflows or vanishes
    vector = probe(x, 1).expand(len(x), 1, -1)
    for _ in range(_PRODUCTS):
        across = normalize(vector, dim=-1) @ x
        vector = across @ x.mT
    largest = matrix_norm(across)
    return torch.stack([largest * scale[:, 0, 0], (matrix_norm(x) / largest).square()], dim=1)
