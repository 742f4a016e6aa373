"""The cost model of an orthogonalization, in FLOPs."""

from __future__ import annotations

from collections.abc import Sequence


def cost(rows: int, cols: int, *, degrees: Sequence[int], gram: bool, at_once: bool = False, deflated: int = 0) -> int:
    """Return the floating-point operations of one orthogonalization (a multiply-add counts 2).

    Args:
        rows, cols: Size of the whole matrix, either orientation.
        degrees: Number of coefficients of each step's odd polynomial (2 cubic, 3 quintic, 5 degree 9).
        gram: Whether Newton–Schulz runs on the Gram matrix, for two steps, one, two, ... at a time.
        at_once: Whether all steps run on a single Gram matrix (`numerics.gram_form`).
        deflated: How many singular values are reduced first, by five thin products (`numerics.deflation`).

    Products with a symmetric result count half, because only one block triangle is computed. A polynomial of degree 9
    takes two such products of squares, as many as a polynomial of degree 7.
    """
    m, n = min(rows, cols), max(rows, cols)
    half_square, wide = m * m * m, 2 * m * m * n
    thin = 10 * deflated * m * n
    powers = thin + half_square * sum(max(0, degree - 2 - (degree == 5)) for degree in degrees)  # bA + cA² and on
    if at_once:  # each step after the first: Z R, once in full, Z R Z, and the factor in full
        return powers + wide // 2 + wide + ((len(degrees) - 1) * 4 + (len(degrees) > 1)) * half_square
    if not gram:
        return powers + len(degrees) * (wide // 2 + wide)
    pairs = (len(degrees) + 1) // 3
    applications = len(degrees) - pairs  # each XXᵀ and a product with X; a pair adds PA, PAP and the factor
    return powers + applications * (wide // 2 + wide) + pairs * 3 * half_square
