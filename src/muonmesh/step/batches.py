"""Batches: how many of the matrices that a rank owns are computed together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from muonmesh.comm.step_callbacks import Batching, SharedLayout
from muonmesh.layout import Plan
from muonmesh.layout.plan import Shapes
from muonmesh.numerics.kernels.threads import thread_count
from muonmesh.numerics.newton_schulz import Orthogonalizer

_WORTH_A_THREAD = 1 << 18
"""From this number of elements on, threads share a set of equal matrices. For fewer elements, waiting for the Python
code of other threads costs more time than it saves (measured)."""


@dataclass(frozen=True)
class Batches(Batching):
    """How many matrices of a plan are computed together on this rank, which owns them.

    It does not hold the `StepPlan`, which holds the exchange, which holds this: a cycle would keep memory of the device
    until Python looks for cycles.

    Attributes:
        plan: The plan.
        device: The device of the matrices.
        orthogonalizers: The orthogonalizers of the matrices that this rank owns, by their numbers.
        on_host: Whether state is kept in CPU memory, so that the device has the state of few matrices at a time.
    """

    plan: Plan
    device: torch.device
    orthogonalizers: Mapping[int, Orthogonalizer]
    on_host: bool

    @property
    def on_device(self) -> bool:
        """Whether memory limits a batch, and not the number of threads."""
        return self.device.type != "cpu"

    def batch_size(self, number: int, count: int, *, stays: bool = False) -> int:
        """Return how many matrices like matrix ``number`` one task computes, if ``count`` may be together."""
        plan, orthogonalizer = self.plan, self.orthogonalizers[number]
        numel = plan.assignments[number].matrix.numel
        if not self.on_device:
            threads = 1 if count * numel < _WORTH_A_THREAD else thread_count()
            # Tasks of each thread, so that all threads have equally many.
            turns = -(-count // (threads * orthogonalizer.products.batch_limit))
            return max(1, -(-count // (threads * turns)))
        size = plan.batch_size(number, count, orthogonalizer.needs)
        return min(size, max(1, plan.budget.elements_on_device // numel)) if stays and self.on_host else size

    def fits(self, number: int, shapes: Shapes, *, stays: bool = False) -> bool:
        """Return whether one task may compute matrices of several shapes, among them matrix ``number``."""
        state = sum(map(math.prod, shapes)) if stays and self.on_host else 0
        fits = state <= self.plan.budget.elements_on_device
        return fits and self.plan.fits_together(number, shapes, self.orthogonalizers[number].needs)

    def shared_layout(self, number: int, shapes: Shapes) -> SharedLayout | None:
        """Return where matrices that stay lie with their results, if both may share one memory."""
        layout = self.orthogonalizers[number].needs.layout(shapes)
        return None if layout is None else SharedLayout(layout.numel, layout.matrices(0), layout.results)

    def joins(self, number: int, shape: tuple[int, int]) -> Hashable:
        """Return what is equal for matrices that one task may compute, if their settings are."""
        return self.orthogonalizers[number].joins or shape
