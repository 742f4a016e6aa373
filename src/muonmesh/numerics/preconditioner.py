"""Preconditioner: the two hooks of a coefficient set, before and after its polynomials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Iterates(Protocol):
    """What the hooks may read and change of an iteration: `Iteration` or `DeviceIteration`.

    Attributes:
        x: The matrices times a power of two, and later the iterates; (batch, rows, cols), rows ≤ cols, compute dtype.
        loaded_norm: The Frobenius norms of the loaded matrices, (batch, 1, 1); only if `Preconditioner.reads_values`.
        norm: What ``x`` is divided by in the polynomials, likewise.
    """

    x: Tensor
    loaded_norm: Tensor

    @property
    def norm(self) -> Tensor:
        """Return what ``x`` is divided by."""

    def gram(self) -> Tensor:
        """Return X Xᵀ of the matrices divided by their norm, (batch, rows, rows)."""

    def take_more(self, polynomials: tuple[tuple[float, ...], ...]) -> None:
        """Apply further polynomials to the result, whose singular values are at most near 1."""


@dataclass(frozen=True)
class Preconditioner:
    """What is done to matrices before the first polynomial and after the last; this class does nothing.

    A subclass is a frozen dataclass too, because ranks compare its text.

    Attributes:
        from_rows: Matrices with fewer rows use the set "polar_express" and two more steps instead.
        reads_values: Whether the CPU reads numbers of a matrix, so that other kernels may start for other values.
        bounds_closer: Whether matrices are divided by ‖(X Xᵀ)²‖^¼ (Frobenius), a closer bound of the largest singular
            value than the norm. The first polynomial must then be a quintic, which uses the products of this bound.
    """

    from_rows: ClassVar[int] = 0
    reads_values: ClassVar[bool] = False
    bounds_closer: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """The width of its five thin products with a matrix, for `layout.cost`."""
        return 0

    def on(self, device: torch.device, *, shortened: bool) -> Preconditioner:
        """Return what is done on a device; ``shortened`` says that the steps are not the number that the set is for."""
        return self

    def before(self, iteration: Iterates) -> None:
        """Change `Iterates.x` in place: the loaded matrices, times a power of two."""

    def after(self, iteration: Iterates) -> None:
        """Change the result, for example by more polynomials (`Iterates.take_more`)."""


NO_PRECONDITIONER = Preconditioner()
