"""Two iterations that the package does not have, on the matrices of criteria.py: 5-9-9 by a table, and MUD.

    python benchmarks/tried.py --json benchmarks/results/tried.json --momentum FILE     # FILE of momentum.py

"5-9-9" is for devices, where reading a number from a matrix would make the host wait, so that the guard of "deflated"
cannot run. After deflation come always three polynomials, of degree 5, 9 and 9, for singular values in [l, 1]. l is
.001 g, rounded down to one of 12 values from .005 to .012, where g = ‖X‖ / (Σσ⁸)^⅛, with σ of what deflation leaves.
Deflation goes on to max(min(τ, 1.5 r), τ/3, σ₁/32) with r the root mean square of the values it has not found. "soft"
goes without a decomposition: S becomes S / (1 + S²/t²)^½, by products of 64 × 64. "pairs" is the Gram form of two steps
for matrices of twice as many columns as rows, with degree 9 as a product of two quadratics instead of by Horner's
scheme. "fixed" is 5-9-9 with l = .0065 whatever the matrix, after the deflation of "deflated": no table.

"MUD" (arXiv 2603.17970) makes rows decorrelated instead of the polar factor: rows are divided by their norms, Q becomes
tril(Q Qᵀ)⁻¹ Q, and rows are divided by their norms once more. Here in fp32, once and three times.

Bounds, errors and largest singular values are those of criteria.py; products are torch's, in bf16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from criteria import inputs, judged
from mpmath import mp, mpf
from remez import composed
from torch import Tensor

from muonmesh.layout import cost
from muonmesh.numerics import deflation, newton_schulz
from muonmesh.numerics.coefficients import COEFFICIENT_SETS, CoefficientSet, Polynomial, factored
from muonmesh.numerics.deflation import Deflation
from muonmesh.numerics.iteration import CpuIteration
from muonmesh.numerics.newton_schulz import Method, orthogonalize

VECTORS, FLOOR, FURTHER = 64, 1 / 32, 3
LEAST, MOST, COUNT = 0.005, 0.012, 12
FIXED = 0.0065
SHAPES = ((768, 768), (768, 3072))


@cache
def polynomials(low: float) -> list[list[float]]:
    """Polynomials of degree 5, 9 and 9 for singular values in [low, 1], with the safety factor 1.03."""
    mp.dps = 40
    found, _ = composed(mpf(low), [5, 9, 9], mpf("0.05"), mpf("1.03"), mpf("1.04"))
    return [[float(value) for value in polynomial] for polynomial in found]


def deflated(x: Tensor, *, soft: bool) -> Tensor:
    """X with its 64 largest singular values brought down, by its right vectors, as numerics/deflation.py does."""
    y = x @ (deflation.signs(VECTORS, len(x)).to(x.dtype) @ x).mT
    basis, _ = torch.linalg.qr(y.float())
    inside = (basis.to(x.dtype).mT @ x).float()
    gram = inside @ inside.mT
    trace = gram.trace()
    left_over = ((x.float().square().sum() - trace).clamp_min(0) / (len(x) - VECTORS)).sqrt()
    if soft:
        target = torch.maximum(
            1.5 * left_over, torch.maximum((trace / VECTORS).sqrt() / 10, gram.norm().sqrt() * FLOOR)
        )
        # 1 − (1 + S²/t²)^-½, divided by S²: with R = (1 + S²/t²)^-½ it is R² / (1 + R) / t².
        root, eye = inverse_root(torch.eye(VECTORS) + gram / target**2), torch.eye(VECTORS)
        middle = torch.linalg.solve(eye + root, root @ root) / target**2
        small = inside.to(x.dtype)
        return x.addmm(((x @ small.mT).float() @ middle).to(x.dtype), small, alpha=-1)
    squares, turn = torch.linalg.eigh(gram)
    squares = squares.clamp_min(torch.finfo(torch.float32).tiny)
    values = squares.sqrt()
    target = torch.maximum(torch.minimum(values[0], 1.5 * left_over), values[0] / FURTHER)
    target = torch.maximum(target, values[-1] * FLOOR)
    small = (turn.mT @ inside).to(x.dtype)
    left = (x @ small.mT).float() * ((1 - target / values).clamp_min(0) / squares)
    return x.addmm(left.to(x.dtype), small, alpha=-1)


def inverse_root(b: Tensor) -> Tensor:
    """B^-½ of a positive definite matrix by products (coupled Newton–Schulz)."""
    scale, eye = b.norm(), torch.eye(len(b))
    y, z = b / scale, eye
    for _ in range(18):
        t = (3 * eye - z @ y) / 2
        y, z = y @ t, t @ z
    return z / scale.sqrt()


class ByQuadratics(CpuIteration):
    """Degree 9 in pairs too as p₄(H² + wH + tA), H = A² + uA: without powers of A, whose factors are large."""

    def _without_constant(self, p: Polynomial, a: Tensor, out: str, spare: str) -> Tensor:
        if len(p) != 5:
            return super()._without_constant(p, a, out, spare)
        lead, u, w, t = factored(p)
        h = self._matmuls.multiply(a, a, [(a, u)], self._square(spare), alpha=1.0)
        return self._matmuls.multiply(h, h, [(h, lead * w)], self._square(out), alpha=lead).add_(a, alpha=lead * t)


def by_table(x: Tensor, *, soft: bool, pairs: bool = False) -> Tensor:
    """5-9-9 of a matrix that deflation has begun, divided by its Schatten norm."""
    x = (x.float() / 2.0 ** torch.frexp(x.float().abs().max()).exponent.float()).bfloat16()  # exact
    d = deflated(x, soft=soft)
    wide = d.float()
    a = wide @ wide.mT
    schatten = float((a @ a).norm() ** 0.25)
    if not 0 < schatten < math.inf:
        return torch.zeros_like(x)
    at = math.log(1e-3 * float(x.float().norm()) / schatten / LEAST) / math.log(MOST / LEAST) * (COUNT - 1)
    at = max(0, min(COUNT - 1, math.floor(at)))
    first, *rest = polynomials(LEAST * (MOST / LEAST) ** (at / (COUNT - 1)))
    wider = float(wide.norm()) / schatten  # orthogonalize divides by the Frobenius norm
    first = [value * wider ** (2 * k + 1) for k, value in enumerate(first)]
    kept = newton_schulz.CpuIteration
    try:
        newton_schulz.CpuIteration = ByQuadratics  # type: ignore[misc]
        method: Method = "gram" if pairs and x.shape[1] >= 2 * x.shape[0] else "standard"
        return orthogonalize(d, coefficients=[tuple(first), *map(tuple, rest)], kernels="torch", method=method)
    finally:
        newton_schulz.CpuIteration = kept  # type: ignore[misc]


def mud(x: Tensor, passes: int) -> Tensor:
    """MUD's direction, fp32; a row of zeros stays so."""
    q = x.float()
    q = q / q.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    for _ in range(passes):
        q = torch.nn.functional.normalize(q, dim=1, eps=1e-30)
        lower = (q @ q.mT).tril_()
        lower.diagonal().clamp_(min=1e-30)
        q = torch.nn.functional.normalize(torch.linalg.solve_triangular(lower, q, upper=False), dim=1, eps=1e-30)
    return q


def by_set(x: Tensor, name: str) -> Tensor:
    """A set of the package or one of ours, by torch's products."""
    return orthogonalize(x, coefficients=name, kernels="torch")


def add_set() -> None:
    """Make "fixed" known."""
    made = tuple(map(tuple, polynomials(FIXED)))
    COEFFICIENT_SETS["fixed"] = CoefficientSet(made, "repeat_last", Deflation(VECTORS), steps=3)


CONTENDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "polar_express": lambda x: by_set(x, "polar_express"),
    "deflated": lambda x: by_set(x, "deflated"),
    "5-9-9": lambda x: by_table(x, soft=False),
    "5-9-9, soft": lambda x: by_table(x, soft=True),
    "5-9-9, soft, pairs": lambda x: by_table(x, soft=True, pairs=True),
    "5-9-9, fixed": lambda x: by_set(x, "fixed"),
    "MUD": lambda x: mud(x, 1),
    "MUD, 3 times": lambda x: mud(x, 3),
}


def is_broken(part: str, usual: dict[str, float], found: dict[str, float]) -> bool:
    """Whether a bound of criteria.py is."""
    bound = usual["polar"] if part == "momentum" else max(1.1 * usual["polar"], 0.1)
    return not (found["polar"] <= bound and found["largest"] <= (1.15 if part == "momentum" else 1.3))


def units(rows: int, cols: int) -> dict[str, float]:
    """Operations in units of 2 rows³, torch's products; without decompositions of 64 × 64."""
    unit = 2 * rows**3

    def grouped(*degrees: int) -> list[tuple[int, ...]]:
        """Two steps on one Gram matrix, one, two, ... where that is cheaper, as on a CPU."""
        sizes = (2, 1, 2) if cols >= 2 * rows else (1,) * len(degrees)
        left = iter(degrees)
        return [group for size in sizes if (group := tuple(itertools.islice(left, size)))]

    return {
        "polar_express": cost(rows, cols, degrees=grouped(3, 3, 3, 3, 3)) / unit,
        "deflated": cost(rows, cols, degrees=grouped(3, 3, 5), deflated=VECTORS) / unit,
        "5-9-9": cost(rows, cols, degrees=grouped(3, 5, 5), deflated=VECTORS) / unit,
        "MUD": 2 * rows * rows * cols / unit,  # a triangle of Q Qᵀ, and a triangular solve
    }


def main() -> None:
    """Print a table for each part, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(parts := ("momentum", "plateaus", "stress")), default=parts)
    parser.add_argument("--momentum", type=Path, help="what momentum.py has written")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    add_set()
    facts: dict[str, Any] = {
        "command": "python benchmarks/tried.py --momentum FILE --json FILE",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 1),
        "units": {f"{rows}x{cols}": units(rows, cols) for rows, cols in SHAPES},
    }
    print(json.dumps(facts["units"], indent=1))
    for part in options.parts:
        table: list[dict[str, Any]] = []
        for name, x in inputs(part, options.momentum):
            found = judged(x.bfloat16().contiguous(), CONTENDERS, directions=1 / 2000 if part == "stress" else 0)
            broken = [one for one in found if is_broken(part, found["polar_express"], found[one])]
            table.append({"input": name, "broken": broken, **found})
        facts[part] = {"matrices": table, "summary": {}}
        for name in CONTENDERS:
            ratios = [row[name]["polar"] / row["polar_express"]["polar"] for row in table]
            facts[part]["summary"][name] = {
                "ratio": [min(ratios), statistics.median(ratios), max(ratios)],
                "error": statistics.median(row[name]["polar"] for row in table),
                "largest": max(row[name]["largest"] for row in table),
                "broken": sum(name in row["broken"] for row in table),
            }
            print(part, name, len(table), facts[part]["summary"][name], flush=True)
        for row in table:
            for name in row["broken"]:
                if not name.startswith("MUD"):
                    print("  ", name, row["input"], row["polar_express"], row[name], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
