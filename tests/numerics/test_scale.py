"""Update scales: the factors as their papers give them, and what they do to an orthogonal matrix."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from muonmesh.numerics.scale import ScaleMode, update_scale

COVERS = ("numerics.scale.update_scale",)


@pytest.mark.parametrize(
    ("mode", "tall", "wide", "square"),
    [
        ("original", 2.0, 1.0, 1.0),  # 3072 × 768, 768 × 3072, 768 × 768
        ("shape_scaling", 2.0, 1.0, 1.0),
        ("match_rms_adamw", 0.2 * sqrt(3072), 0.2 * sqrt(3072), 0.2 * sqrt(768)),
        ("spectral", sqrt(3072), sqrt(3072), sqrt(768)),
        ("unit_rms_norm", 2.0, 0.5, 1.0),
        ("none", 1.0, 1.0, 1.0),
    ],
)
def test_factors(mode: ScaleMode, tall: float, wide: float, square: float) -> None:
    assert update_scale(3072, 768, mode) == pytest.approx(tall, rel=1e-15)
    assert update_scale(768, 3072, mode) == pytest.approx(wide, rel=1e-15)
    assert update_scale(768, 768, mode) == pytest.approx(square, rel=1e-15)


def orthogonal(rows: int, cols: int) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(max(rows, cols), min(rows, cols), dtype=torch.float64))
    return q if rows >= cols else q.mT


@pytest.mark.parametrize(("rows", "cols"), [(24, 60), (60, 24), (31, 31), (1, 7)])
def test_what_the_modes_promise(rows: int, cols: int) -> None:
    direction = orthogonal(rows, cols)

    def rms(mode: ScaleMode) -> float:
        return float((direction * update_scale(rows, cols, mode)).square().mean().sqrt())

    assert rms("match_rms_adamw") == pytest.approx(0.2)
    assert rms("spectral") == pytest.approx(1.0)
    # RMS-to-RMS operator norm: ‖W‖₂ · √(cols / rows).
    scaled = direction * update_scale(rows, cols, "unit_rms_norm")
    assert float(torch.linalg.matrix_norm(scaled, 2)) * sqrt(cols / rows) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "cols", "mode", "error", "says"),
    [
        (4, 4, "muon", ValueError, "mode: found 'muon'; needed one of 'original'"),
        (0, 4, "original", ValueError, "rows: found 0; needed at least 1"),
        (4, 0, "original", ValueError, "cols: found 0"),
        (4, -1, "none", ValueError, "cols: found -1"),
        (4.0, 4, "none", TypeError, r"rows: found 4\.0 \(float\)"),
        (True, 4, "none", TypeError, "rows: found True"),
    ],
)
def test_what_is_refused(rows: Any, cols: Any, mode: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        update_scale(rows, cols, mode)
