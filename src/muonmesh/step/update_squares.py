"""UpdateSquares: the squares of the updates of one step, added up by group for `Muon.metrics`, and singular values."""

from __future__ import annotations

import torch
from torch import Tensor

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

        Args:
            group: Number of the group.
            momenta: `squared_singular_values` of what was orthogonalized.
            results: What became of it, (n, rows, cols).
            times: By what results are multiplied too, (n,); 0 for those that do not count.
        """
        values, largest = squared_singular_values(results).sqrt(), momenta[:, -1]
        if times is not None:
            values, largest = values / times.abs().to(values.dtype)[:, None], largest.where(times != 0, 0.0)
        effective = torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1).exp()
        figures = [largest.sqrt(), momenta.sum(-1) / largest, effective, (values - 1).square().mean(-1).sqrt()]
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


def squared_singular_values(matrices: Tensor) -> Tensor:
    """Return the squares of the singular values of wide matrices (n, rows, cols), ascending, fp64 (n, rows).

    They are the eigenvalues of Gram matrices; NaN where a matrix is not finite.
    """
    wide = matrices.double()
    gram = wide @ wide.mT
    finite = gram.isfinite().all(-1).all(-1)[:, None]
    values: Tensor = torch.linalg.eigvalsh(gram.where(finite[..., None], 0.0))
    return values.clamp(min=0).where(finite, torch.nan)
