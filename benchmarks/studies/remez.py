"""The coefficients of the set "deflated", derived in high precision.

    python -m benchmarks.studies.remez
    python -m benchmarks.studies.remez --smallest 0.02 --degrees 5 9

The polynomials are taken one after the other, as The Polar Express does (arXiv 2505.16932). The ones before have made
[a, b] of [l, 1]; the next has the least largest |1 − p(x)| on [max(a, b·cushion), b], and is then scaled, so that what
it makes of all of [a, b] has its middle at 1. Without the cushion the first ones would be made for the smallest values
alone. Remez' algorithm finds each: as many points as there are coefficients plus one, at which the error has one size
and alternating signs, are moved to where it is largest until they stay. It is then taken at x / safety, since rounding
leaves singular values above 1, where p falls or rises without bound.

Needs mpmath, which torch brings along.
"""

from __future__ import annotations

import argparse
import json

from mpmath import fsum, lu_solve, matrix, mp, mpf

GRID = 4000
"""Points on which extrema of the error are sought, before a parabola through three of them says where one is."""


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
    options = parser.parse_args()
    mp.dps = 60
    numbers = (mpf(number) for number in (options.cushion, options.safety, options.last_safety))
    polynomials, ends = composed(mpf(options.smallest), options.degrees, *numbers)
    rows = [[float(value) for value in polynomial] for polynomial in polynomials]
    print(json.dumps({"polynomials": rows, "maps to": [float(end) for end in ends]}, indent=1))


if __name__ == "__main__":
    main()
