"""The cost model of an orthogonalization, in FLOPs."""

from __future__ import annotations

from collections.abc import Sequence


def cost(
    rows: int,
    cols: int,
    *,
    degrees: Sequence[Sequence[int]],
    one_gram: bool = False,
    deflated: int = 0,
    on_device: bool = False,
) -> int:
    """Return the floating-point operations of one orthogonalization (a multiply-add counts 2).

    Args:
        rows, cols: Size of the whole matrix, either orientation.
        degrees: Number of coefficients of each step's odd polynomial (2 cubic, 3 quintic, 5 degree 9), for each group
            of steps that run on one Gram matrix.
        one_gram: Whether all steps run on a single Gram matrix (`CpuIteration.all_steps`; on a device by a table).
        deflated: How many singular values are reduced first, by five thin products (`numerics.deflation`).
        on_device: Whether this is `DeviceIteration`.

    Products with a symmetric result count half, because only one block triangle is computed. A polynomial of degree 9
    takes two such products of squares, as many as a polynomial of degree 7.
    """
    m, n = min(rows, cols), max(rows, cols)
    half_square, wide = m * m * m, 2 * m * m * n
    steps = [degree for group in degrees for degree in group]
    powers = sum(max(0, degree - 2 - (degree == 5)) for degree in steps)  # bA + cA² and on
    # Each step after the first of a group: Z R, Z R Z and the factor; at once, Z R once in full and the factor in full,
    # on a device the last factor in full.
    more = (len(steps) - len(degrees)) * 3
    if one_gram:
        more = more + 1 if on_device else (len(steps) - 1) * 4 + (len(steps) > 1)
    more += on_device and deflated > 0  # A² for the bound, which a CPU keeps for the first step
    return 10 * deflated * m * n + (powers + more) * half_square + len(degrees) * (wide // 2 + wide)
