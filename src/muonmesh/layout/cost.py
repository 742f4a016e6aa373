"""The one model of what an orthogonalisation costs."""

from __future__ import annotations

from collections.abc import Sequence


def cost(rows: int, cols: int, *, degrees: Sequence[int], gram: bool) -> int:
    """Return the floating-point operations of one orthogonalisation (a multiply-add counts 2).

    Args:
        rows, cols: Size of the whole matrix, either orientation.
        degrees: Number of coefficients of each step's odd polynomial (2 cubic, 3 quintic, 5 degree 9).
        gram: Whether Newton–Schulz runs on the Gram matrix (restarts before steps 2 and 4, last step direct).

    Products with a symmetric result count half: only one block triangle is computed.
    """
    m, n = min(rows, cols), max(rows, cols)
    square, wide = 2 * m * m * m, 2 * m * m * n

    def polynomial(degree: int) -> int:  # bA + cA² and on: one symmetric product per further coefficient
        return max(0, degree - 2) * square // 2

    if not gram:
        return sum(wide // 2 + polynomial(degree) + wide for degree in degrees)
    total = 0
    for step, degree in enumerate(degrees):
        last = step == len(degrees) - 1
        starts = step in (0, 2, 4)
        total += (wide // 2 if starts else 0) + polynomial(degree)
        if last and (starts or len(degrees) == 1):
            total += wide  # applied to X directly
        else:
            total += 0 if starts else square  # Q ← QZ + aQ; at a start Q is Z + aI
            ends = last or step + 1 in (2, 4)
            total += wide if ends else square + square // 2  # X ← QX, or R ← (Z + a)R(Z + a)
    return total
