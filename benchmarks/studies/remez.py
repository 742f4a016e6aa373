"""The coefficients of the set "deflated", derived in high precision.

    python -m benchmarks.studies.remez
    python -m benchmarks.studies.remez --smallest 0.02 --degrees 5 9
    python -m benchmarks.studies.remez --table          # of devices, `TABLE` of numerics/device_deflation.py

The polynomials are taken one after the other, as The Polar Express does (arXiv 2505.16932). The ones before have made
[a, b] of [l, 1]; the next has the least largest |1 − p(x)| on [max(a, b·cushion), b], and is then scaled, so that what
it makes of all of [a, b] has its middle at 1. Without the cushion the first ones would be made for the smallest values
alone. Remez' algorithm finds each: as many points as there are coefficients plus one, at which the error has one size
and alternating signs, are moved to where it is largest until they stay. It is then taken at x / safety, since rounding
leaves singular values above 1, where p falls or rises without bound.

The table of devices is of polynomials of degree 5, 9 and 9 for 12 smallest values from .005 to .012. Each is divided by
its slope p₀, and its Gram matrix multiplied so that t of `factored` is the same number in all rows, since kernels take
it from the CPU.

Needs mpmath, which torch brings along.
"""

from __future__ import annotations

import argparse
import json

from mpmath import fsum, lu_solve, matrix, mp, mpf

GRID = 4000
"""Points on which extrema of the error are sought, before a parabola through three of them says where one is."""


TABLE_ROWS, TABLE_LOW, TABLE_HIGH = 12, mpf("0.005"), mpf("0.012")
TABLE_T_2, TABLE_T_3 = mpf("-0.3"), mpf("-0.9")


def nearest_to_one(low: mpf, high: mpf, terms: int) -> tuple[list[mpf], mpf]:
    """Return the odd polynomial of so many terms that is nearest to 1 on [low, high], and its largest error."""
    count = terms + 1
    points = [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * i / terms) for i in range(count)]
    grid = [low + (high - low) * i / GRID for i in range(GRID + 1)]
    for _ in range(100):
        system, ones = matrix(count, count), matrix([1] * count)
        for i, x in enumerate(points):
            for j in range(terms):
                system[i, j] = x ** (2 * j + 1)
            system[i, terms] = (-1) ** i
        *coefficients, level = lu_solve(system, ones)

        def error(x: mpf, coefficients: list[mpf] = coefficients) -> mpf:
            return 1 - fsum(value * x ** (2 * j + 1) for j, value in enumerate(coefficients))

        moved = _extrema(grid, [error(x) for x in grid], count)
        worst = max(abs(error(x)) for x in moved)
        if worst - abs(level) < mpf(10) ** -25:
            return coefficients, worst
        points = moved
    raise ArithmeticError("Remez' algorithm has not converged")


def composed(
    smallest: mpf, degrees: list[int], cushion: mpf, safety: mpf, last: mpf
) -> tuple[list[list[mpf]], tuple[mpf, mpf]]:
    """Return one polynomial for each degree, and where they bring [smallest, 1] before they are made safe.

    Each is then taken at x / safety, the last one at x / last.
    """
    low, high = mpf(smallest), mpf(1)
    polynomials = []
    for number, degree in enumerate(degrees, 1):
        start = max(low, cushion * high)
        polynomial, worst = nearest_to_one(start / high, mpf(1), (degree + 1) // 2)
        polynomial = [value / high ** (2 * j + 1) for j, value in enumerate(polynomial)]
        lowest = min(1 - worst, fsum(value * low ** (2 * j + 1) for j, value in enumerate(polynomial)))
        middle = (lowest + 1 + worst) / 2
        low, high = lowest / middle, (1 + worst) / middle
        margin = last if number == len(degrees) else safety
        polynomials.append([value / middle / margin ** (2 * j + 1) for j, value in enumerate(polynomial)])
    return polynomials, (low, high)


def table_row(number: int) -> tuple[list[float], list[float]]:
    """Return p₁/p₂ and p₂/p₀ of the first polynomial of a row of the table of devices, and the numbers of the others.

    For the second and the last these are the growth before it, and its u, w and lead; then comes the slope of all three
    at 0.
    """
    smallest = TABLE_LOW * (TABLE_HIGH / TABLE_LOW) ** (mpf(number) / (TABLE_ROWS - 1))
    (p, *nines), _ = composed(smallest, [5, 9, 9], mpf("0.05"), mpf("1.03"), mpf("1.04"))
    slope, before, row = p[0], mpf(1), []
    growth = p[0] ** 2
    for q, t in zip(nines, (TABLE_T_2, TABLE_T_3), strict=True):
        lead, u = q[4], q[3] / (2 * q[4])
        w = q[2] / lead - u * u
        scale = mp.cbrt(t / (q[1] / lead - u * w))  # of the Gram matrix
        row += [growth * scale / before, u * scale, w * scale**2, lead / q[0] / scale**4]
        slope, growth, before = slope * q[0], q[0] ** 2, scale
    return [float(p[1] / p[2]), float(p[2] / p[0])], [float(value) for value in (*row, slope)]


def _extrema(grid: list[mpf], errors: list[mpf], count: int) -> list[mpf]:
    """Return where the error is extreme, at both ends and inside, with alternating signs."""
    points = [grid[0]]
    for i in range(1, len(grid) - 1):
        before, middle, after = errors[i - 1 : i + 2]
        if (middle - before) * (after - middle) <= 0:
            points.append(grid[i] + (grid[i + 1] - grid[i]) / 2 * (before - after) / (before - 2 * middle + after))
    points.append(grid[-1])
    assert len(points) == count, points  # so it is for every polynomial of the best kind
    return points


def main() -> None:
    """Print the coefficients as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", default="0.012", help="smallest singular value that the set is made for")
    parser.add_argument("--degrees", type=int, nargs="+", default=[5, 5, 9])
    parser.add_argument("--safety", default="1.01")
    parser.add_argument("--last-safety", default="1.04", help="of the last one")
    parser.add_argument("--cushion", default="0.05")
    parser.add_argument("--table", action="store_true", help="the table of devices instead")
    options = parser.parse_args()
    mp.dps = 60
    if options.table:
        for number in range(TABLE_ROWS):
            print(*table_row(number))
        return
    numbers = (mpf(number) for number in (options.cushion, options.safety, options.last_safety))
    polynomials, ends = composed(mpf(options.smallest), options.degrees, *numbers)
    rows = [[float(value) for value in polynomial] for polynomial in polynomials]
    print(json.dumps({"polynomials": rows, "maps to": [float(end) for end in ends]}, indent=1))


if __name__ == "__main__":
    main()
