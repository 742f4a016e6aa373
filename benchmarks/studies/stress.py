"""Matrices made to break an iteration: how far its largest singular value and its own function are missed in bf16.

    python -m benchmarks.studies.stress --json benchmarks/results/stress.json
    python -m benchmarks.studies.stress --kinds peaked --sets deflated

Six shapes of each kind. An iteration promises a function of the singular values; every one of them has to end near 1
or below. What is reported for each set of coefficients, from the singular value decomposition in fp64 of the bf16
input: the largest singular value of the result; the relative error to the set's own function in the Frobenius norm
("deflated" has none, since it lowers the largest values first); and the relative error to the polar factor, Uᵀ R V
against the identity in the Frobenius norm, with U and V of the singular values that are above 1/2000 of the largest.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import print_rows
from benchmarks.studies.iterations import polynomials_of
from torch import Tensor

from muonmesh.numerics.coefficients import COEFFICIENT_SETS, coefficient_schedule
from muonmesh.numerics.newton_schulz import orthogonalize

SHAPES = ((1, 64), (16, 1024), (24, 100), (64, 64), (128, 512), (384, 400))

# Cubics for singular values that need not come near 1, from arXiv 2606.00371.
CUBIC5 = (
    (3.3656576, -3.3420992),
    (2.5744352, -1.4957376),
    (2.5368962, -1.4312570),
    (2.4418906, -1.2764040),
    (2.2230472, -0.9630650),
)
SETS: dict[str, Any] = {**{name: name for name in COEFFICIENT_SETS}, "cubic5": CUBIC5}


def with_values(s: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """A matrix (rows, cols) with random singular vectors and the singular values s (rows,), fp64."""
    u, vh = _vectors(rows, cols, seed)
    return (u * s) @ vh


@functools.cache
def _vectors(rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64, generator=generator), full_matrices=False)
    return u, vh


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of signs of at least this size, whose rows are orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def stress(rows: int, cols: int) -> Iterator[tuple[str, Tensor]]:
    """Yield named matrices (rows, cols), rows ≤ cols, fp64."""
    generator = torch.Generator().manual_seed(1)
    along = torch.linspace(0, 1, rows, dtype=torch.float64)
    count = torch.arange(1, rows + 1, dtype=torch.float64)
    gaussian = torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    yield "Gaussian", gaussian
    for decades in range(1, 9):
        yield f"decades {decades}", with_values(10.0 ** (-decades * along), rows, cols)
    for power in (0.5, 1.0, 2.0):
        yield f"power {power}", with_values(count**-power, rows, cols)
    for part in (2, 4, 16, rows):
        yield f"rank m/{part if part < rows else 'm'}", with_values((count <= rows / part).double(), rows, cols)
    for exponent in range(1, 7):
        yield f"peaked 1e{exponent}", with_values(torch.where(count == 1, 1.0, 10.0**-exponent), rows, cols)
    for peaks in (2, 8):
        yield f"{peaks} peaks 1e3", with_values(torch.where(count <= peaks, 1.0, 1e-3), rows, cols)
    yield "rows twice", gaussian[torch.arange(rows) // 2]
    yield "rows alike", gaussian[:1].expand(rows, cols)
    for size in (1e3, 1e6):
        outlier = gaussian.clone()
        outlier[rows // 2, cols // 3] = size
        yield f"one entry {size:.0e}", outlier
    yield "orthogonal", with_values(torch.ones(rows, dtype=torch.float64), rows, cols)
    yield "identity", torch.eye(rows, cols, dtype=torch.float64)
    yield "signs", gaussian.sign()
    yield "Hadamard", hadamard(cols)[:rows, :cols]
    yield "rows of subnormal numbers", gaussian * torch.where(count % 2 == 0, 1e-39, 1.0)[:, None]
    yield (
        "two blocks",
        gaussian
        * torch.block_diag(
            torch.ones(rows // 2, cols // 2, dtype=torch.float64),
            torch.full((rows - rows // 2, cols - cols // 2), 1e-3, dtype=torch.float64),
        ),
    )
    for scale in (1e-30, 1e30):
        yield f"scale {scale:.0e}", gaussian * scale
    yield "zero rows", gaussian * (count % 2)[:, None]
    yield "three diagonals", gaussian.tril(1).triu(-1)
    yield "Hilbert", 1 / (count[:, None] + torch.arange(cols, dtype=torch.float64))
    yield "heavy tails", gaussian / torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    yield "columns 1e2", gaussian * torch.where(torch.arange(cols) < cols // 15, 100.0, 1.0).double()
    yield "rank 8 and noise", with_values(torch.where(count <= 8, 1.0, 0.0), rows, cols) + 1e-2 * gaussian / cols**0.5


def own_function(name: str, s: Tensor) -> Tensor:
    """What a set makes of singular values (rows,) without rounding."""
    return polynomials_of(s / s.norm(), SETS[name])


def judged(name: str, x: Tensor, **how: Any) -> dict[str, float]:
    """The figures of one set for one bf16 matrix, orthogonalized as `how` says."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    result = orthogonalize(x, coefficients=SETS[name], **how).double()
    figures = {"largest": float(torch.linalg.matrix_norm(result, 2))}
    if name != "deflated":  # whose function is not of singular values alone
        expected = (u * own_function(name, s)) @ vh
        figures["own"] = float((result - expected).norm() / expected.norm())
    count = int((s > s[0] / 2000).sum())
    inner = u[:, :count].mT @ result @ vh[:count].mT
    figures["polar"] = float((inner - torch.eye(count, dtype=torch.float64)).norm() / count**0.5)
    return figures


def rows_of(table: list[dict[str, Any]], sets: list[str]) -> list[list[str]]:
    """A line for each set: the worst matrix, and the middle of all."""
    lines = []
    for name in sets:
        row_cells = [name, str(sum(map(len, coefficient_schedule(SETS[name]))))]
        for key in ("largest", "own", "polar"):
            values = [(row[name][key], row["input"]) for row in table if key in row[name]]
            if values:
                value, matrix_name = max(values)
                row_cells += [f"{value:.3f} ({matrix_name})", f"{statistics.median(value for value, _ in values):.4f}"]
            else:
                row_cells += ["", ""]
        lines.append(row_cells)
    return lines


def main() -> None:
    """Print the table, and write all figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--kinds", nargs="+", help="only names that contain one of these")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    for rows, cols in SHAPES:
        for kind, matrix in stress(rows, cols):
            if options.kinds is None or any(part in kind for part in options.kinds):
                x = matrix.bfloat16()
                row: dict[str, Any] = {"input": f"{kind}, {rows}×{cols}"}
                table.append(row | {name: judged(name, x) for name in options.sets})
    header = ["", "cost", "largest singular value", "middle", "error to its own function", "middle"]
    header += ["error to the polar factor", "middle"]
    print_rows(f"{len(table)} matrices", header, rows_of(table, options.sets))
    if options.json is not None:
        facts = {
            "command": "python -m benchmarks.studies.stress --json FILE",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        options.json.write_text(json.dumps(facts | {"matrices": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
