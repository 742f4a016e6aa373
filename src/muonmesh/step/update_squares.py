"""UpdateSquares: the squares of the updates of one step, added up by group for `Muon.metrics`, and singular values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import matrix_norm
from torch.nn.functional import normalize

from muonmesh.numerics.deflation import probe

_PROBES, _PRODUCTS = 32, 12
"""Number of rows of random signs that results are multiplied by; products with M Mᵀ to find a largest singular
value."""

SPECTRUM = ("momentum_spectral", "momentum_stable_rank", "update_effective_rank", "polar_error")


class UpdateSquares:
    """Sums of squares of one step's updates by group, for `Muon.metrics`.

    Args:
        spectrum: Whether the step also collects singular values of the matrices that this rank orthogonalizes.
    """

    def __init__(self, *, spectrum: bool = False) -> None:
        self._squares: dict[int, list[Tensor]] = {}
        self._spectra: dict[int, list[Tensor]] = {}
        self.spectrum = spectrum

    def add(self, group: int, squares: Tensor) -> None:
        """Add squares to the sum of a group. Any thread may call this."""
        self._squares.setdefault(group, []).append(squares)

    def of(self, group: int) -> Tensor | None:
        """Return a group's sum, 0-d fp64, or None if nothing was added."""
        squares = self._squares.get(group)
        return torch.stack(squares).sort().values.sum() if squares else None  # threads add in any order

    def add_spectra(self, group: int, momenta: Tensor, results: Tensor, times: Tensor | None) -> None:
        """Add matrices to the figures of a group. Any thread may call this.

        Let Y = V X Xᵀ for a result X and rows V of random signs. Then ‖V − Y‖² / ‖V‖² estimates the mean of (σ² − 1)²,
        and ‖X‖² ‖V X‖² / ‖Y‖² estimates (Σσ²)² / Σσ⁴. If X has few rows, V is the identity and both are exact.

        Args:
            group: Number of the group.
            momenta: `largest_of` the matrices before orthogonalization.
            results: The orthogonalized matrices, (n, rows, cols).
            times: The factors that the results contain, (n,); 0 for matrices that do not count. None: no factors.
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
        """Return the sum of each figure of `SPECTRUM` over a group's non-zero matrices, and their number, (4, 2).

        None if this rank orthogonalized no matrix of the group.
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
