"""Polynomials: Newton–Schulz coefficients that several packages run."""

from __future__ import annotations

from collections.abc import Sequence

from muonmesh.numerics.coefficients import Polynomial

JORDAN = (3.4445, -4.7750, 2.0315)


def named(polynomial: Sequence[float]) -> str | list[Polynomial]:
    """Return "simple" for Jordan's polynomial, any other as a sequence."""
    return "simple" if tuple(polynomial) == JORDAN else [tuple(polynomial)]


def polar_express_102(steps: int) -> list[Polynomial]:
    """Return Polar Express for five steps with a safety factor of 1.02, as nanochat, dion and muonium run it.

    arXiv 2505.16932, algorithm 1, with another cushion and safety factor than in its listing. These packages divide
    the matrix by the factor once more, which is written into the first polynomial here.
    """
    polynomials: list[Polynomial] = [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ]
    first = tuple(value / 1.02 ** (2 * power + 1) for power, value in enumerate(polynomials[0]))
    return [first, *polynomials[1:]][:steps]
