"""The coefficients of the sets "qdwh" and "deflated", derived in high precision.

    python benchmarks/remez.py                         # "qdwh": one rational step, then the polynomial nearest to 1
    python benchmarks/remez.py --smallest 2e-3 --degree 5
    python benchmarks/remez.py --compose 5 5 9         # "deflated": polynomials, each nearest to 1 on what is left

The rational step x (a + b·x²) / (1 + c·x²) is the best of its kind for singular values in [l, 1]: QDWH's, Nakatsukasa,
Bai and Gygi 2010 (doi 10.1137/090774999), in closed form. It maps them into [l′, 1]. The polynomial p of the degree
asked for has the least largest |1 − p(x)| there. Remez' algorithm finds it: as many points as there are coefficients
plus one, at which the error has one size and alternating signs, are moved to where it is largest until they stay. It is
then taken at x / safety, since rounding leaves singular values above 1, where p falls or rises without bound.

`composed` takes one polynomial after the other, as The Polar Express does (arXiv 2505.16932). The ones before have made
[a, b] of [l, 1]; the next is nearest to 1 on [max(a, b·cushion), b], and then scaled, so that what it makes of all of
[a, b] has its middle at 1. Without the cushion the first ones would be made for the smallest values alone.

Needs mpmath, which torch brings along.
"""

from __future__ import annotations

import argparse
import json

from mpmath import fsum, lu_solve, matrix, mp, mpf, sqrt

GRID = 4000
"""Points on which extrema of the error are sought, before a parabola through three of them says where one is."""


def rational(smallest: mpf) -> tuple[tuple[mpf, mpf, mpf], mpf]:
    """Return (a, b, c) of QDWH's step for singular values in [smallest, 1], and the smallest one after it."""
    square = smallest**2
    d = mpf(4 * (1 - square) / square**2) ** (mpf(1) / 3)
    a = sqrt(1 + d) + sqrt(8 - 4 * d + 8 * (2 - square) / (square * sqrt(1 + d))) / 2
    b = (a - 1) ** 2 / 4
    c = a + b - 1
    return (a, b, c), smallest * (a + b * square) / (1 + c * square)


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
        *found, level = lu_solve(system, ones)

        def error(x: mpf, found: list[mpf] = found) -> mpf:
            return 1 - fsum(value * x ** (2 * j + 1) for j, value in enumerate(found))

        moved = _extrema(grid, [error(x) for x in grid], count)
        worst = max(abs(error(x)) for x in moved)
        if worst - abs(level) < mpf(10) ** -25:
            return found, worst
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
        found, worst = nearest_to_one(start / high, mpf(1), (degree + 1) // 2)
        found = [value / high ** (2 * j + 1) for j, value in enumerate(found)]
        lowest = min(1 - worst, fsum(value * low ** (2 * j + 1) for j, value in enumerate(found)))
        middle = (lowest + 1 + worst) / 2
        low, high = lowest / middle, (1 + worst) / middle
        margin = last if number == len(degrees) else safety
        polynomials.append([value / middle / margin ** (2 * j + 1) for j, value in enumerate(found)])
    return polynomials, (low, high)


def _extrema(grid: list[mpf], errors: list[mpf], count: int) -> list[mpf]:
    """Return where the error is extreme, at both ends and inside, with alternating signs."""
    found = [grid[0]]
    for i in range(1, len(grid) - 1):
        before, here, after = errors[i - 1 : i + 2]
        if (here - before) * (after - here) <= 0:
            found.append(grid[i] + (grid[i + 1] - grid[i]) / 2 * (before - after) / (before - 2 * here + after))
    found.append(grid[-1])
    assert len(found) == count, found  # so it is for every polynomial of the best kind
    return found


def main() -> None:
    """Print the coefficients as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--smallest", default=None, help="smallest singular value that the set is made for: 1e-3, composed 0.012"
    )
    parser.add_argument("--degree", type=int, default=9)
    parser.add_argument("--safety", default=None, help="1.04, with --compose 1.01")
    parser.add_argument("--compose", type=int, nargs="+", metavar="DEGREE", help="without a rational step")
    parser.add_argument("--cushion", default="0.05")
    parser.add_argument("--last-safety", default="1.04", help="of the last one composed")
    options = parser.parse_args()
    mp.dps = 60
    if options.compose:
        smallest, safety = mpf(options.smallest or "0.012"), mpf(options.safety or "1.01")
        last = mpf(options.last_safety)
        polynomials, ends = composed(smallest, options.compose, mpf(options.cushion), safety, last)
        found = [[float(value) for value in polynomial] for polynomial in polynomials]
        print(json.dumps({"polynomials": found, "maps to": [float(end) for end in ends]}, indent=1))
        return
    step, low = rational(mpf(options.smallest or "1e-3"))
    best, worst = nearest_to_one(low, mpf(1), (options.degree + 1) // 2)
    safe = [value / mpf(options.safety or "1.04") ** (2 * j + 1) for j, value in enumerate(best)]
    print(
        json.dumps(
            {
                "rational": [float(value) for value in step],
                "maps to": [float(low), 1.0],
                "polynomial": [float(value) for value in safe],
                "largest error before safety": float(worst),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
