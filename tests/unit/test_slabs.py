"""Slabs: going through the steps in slabs of columns gives what the whole matrix gives, judged by fp64."""

from __future__ import annotations

import math

import pytest
import torch

from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.newton_schulz import gram_factor, gram_segments
from muonmesh.numerics.slabs import added, divide, gram_of, multiply, norms_of


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("rows", "widths"), [(24, (30, 31, 0, 29)), (400, (300, 400)), (1, (1, 2))])
def test_the_steps_on_slabs_are_the_steps_on_the_matrix(rows: int, widths: tuple[int, ...], scale: float) -> None:
    whole = torch.randn(rows, sum(widths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    expected = s / s.norm()
    for polynomial in coefficient_schedule("polar_express", 5):
        expected = sum(c * expected ** (2 * k + 1) for k, c in enumerate(polynomial))
    slabs = [part.float().contiguous() * scale for part in torch.split(whole, widths, dim=1)]
    norm = norms_of(added(torch.stack([slab.double().square().sum() for slab in slabs])[:, None]))[0]
    for slab in slabs:
        divide(slab, norm)
    for segment in gram_segments("polar_express", 5):
        grams = torch.empty(len(slabs), rows, rows)
        for slab, gram in zip(slabs, grams, strict=True):
            gram_of(slab, gram)
        factor = gram_factor(added(grams), segment)
        for number, slab in enumerate(slabs):
            if slab.numel():
                slabs[number] = torch.empty_like(slab)
                multiply(factor, slab, slabs[number])
    found = torch.cat(slabs, dim=1).double()
    assert (found - (u * expected) @ v).norm() < 1e-3 * expected.norm()


def test_norms_of_zeros_and_of_what_is_not_finite() -> None:
    norms = norms_of(torch.tensor([0.0, 4.0, math.inf, math.nan], dtype=torch.float64))
    assert norms[:2].tolist() == [1.0, 2.0]
    assert norms[2:].isnan().all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 64])
def test_a_sum_depends_on_nothing_but_its_parts_in_their_order(count: int) -> None:
    parts = torch.randn(count, 1000, generator=torch.Generator().manual_seed(count))
    total = added(parts)
    assert (total.double() - parts.double().sum(0)).abs().max() < 1e-5 * count
    for begin, end in ((0, 1), (7, 24), (3, 1000)):  # wherever an element stands
        assert torch.equal(added(parts[:, begin:end].contiguous()), total[begin:end])
