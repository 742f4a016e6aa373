"""Coefficients: the published sets of the Newton–Schulz iteration, each with its source, and sets of your own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, cycle, islice, repeat
from math import inf
from typing import Any, Literal, TypeAlias, get_args

import torch

from muonmesh.errors import explain_error
from muonmesh.numerics.deflation import FROM_ROWS, Deflation
from muonmesh.numerics.setting import LARGEST

CoefficientName: TypeAlias = Literal["simple", "quintic", "polar_express", "cans", "deepseekv4", "deflated"]
"""The published sets of Newton–Schulz coefficients, by the names that their authors or first users gave them."""

Polynomial: TypeAlias = tuple[float, ...]
"""(a, b, c, ...) is the odd polynomial a·x + b·x³ + c·x⁵ + ..."""

Coefficients: TypeAlias = CoefficientName | str | Sequence[Sequence[float]]
"""A set by name, published or registered by `register_coefficients`, "auto" for one of two of these (see `choose`), or
one odd polynomial a step; the last polynomial of such a sequence is repeated."""


MOST_STEPS = 100
"""The most steps. Every set has converged long before, and a checkpoint's settings must not take all memory."""


@dataclass(frozen=True)
class CoefficientSet:
    """A set of Newton–Schulz coefficients: the polynomials, and whether deflation precedes them.

    Attributes:
        polynomials: One odd polynomial for each step.
        past_end: What follows the last polynomial: "cycle" starts again with the first, "repeat_last" repeats the last.
        deflation: How the largest singular values are reduced before the first polynomial, a
            `muonmesh.numerics.deflation.Deflation`; None: they are not.
        steps: The number of steps if ``ns_steps`` is None.
        gram_steps: The numbers of steps for which the method "gram" is as accurate in bf16 as "standard", as tests
            show. With other numbers each step amplifies singular values near 1 and their rounding errors.
    """

    polynomials: tuple[Polynomial, ...]
    past_end: Literal["cycle", "repeat_last"]
    deflation: Deflation | None = None
    steps: int = 5
    gram_steps: range = range(0)


_JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)

# YouJiacheng, gist 393c90cbdc23b09d5688815ba382288b: five polynomials optimized together.
_YOU: tuple[Polynomial, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# The Polar Express, arXiv 2505.16932, listing 1: degree 5, lower bound 1e-3 on the singular values.
_POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_EXPRESS_LIMIT: Polynomial = (1.875, -1.25, 0.375)

_CANS: tuple[Polynomial, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def _with_safety_factor(polynomial: Polynomial, factor: float) -> Polynomial:
    """Return p(x / factor): rounding may push a singular value above 1, where an unsafe p would diverge."""
    return tuple(value / factor ** (2 * k + 1) for k, value in enumerate(polynomial))


COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    # K. Jordan, kellerjordan.github.io/posts/muon: steep at 0, never converges; 0.68 to 1.13 by design.
    "simple": CoefficientSet((_JORDAN,), "cycle"),
    "quintic": CoefficientSet(_YOU, "cycle", gram_steps=range(3, 6)),
    # arXiv 2505.16932: every polynomial but the limit is taken at x / 1.01, as the paper's listing does.
    "polar_express": CoefficientSet(
        (*(_with_safety_factor(polynomial, 1.01) for polynomial in _POLAR_EXPRESS), _POLAR_EXPRESS_LIMIT),
        "repeat_last",
        gram_steps=range(3, 11),
    ),
    # CANS, arXiv 2506.10935: Chebyshev-optimal polynomials found by Remez' algorithm, each at x / 1.01. As published
    # they end exactly at 1 and rise there, the first with a slope of 26: rounding a singular value of 1 up makes it any
    # size whatever. The factor is that of The Polar Express (arXiv 2505.16932).
    "cans": CoefficientSet(tuple(_with_safety_factor(polynomial, 1.01) for polynomial in _CANS), "repeat_last"),
    # DeepSeek-V4's hybrid: eight fast steps of Jordan's polynomial, then two that converge to 1; made for 10 steps.
    "deepseekv4": CoefficientSet(
        (*(_JORDAN,) * 8, *((2.0, -1.5, 0.5),) * 2), "repeat_last", steps=10, gram_steps=range(10, 11)
    ),
    # Ours: deflation (numerics/deflation.py), then polynomials for singular values in [0.012, 1], composed as those of
    # The Polar Express, at x / 1.01, the last, steep above 1, at x / 1.04: benchmarks/studies/remez.py.
    "deflated": CoefficientSet(
        (
            (7.659556113825762, -20.40625391574778, 14.4581249682999),
            (3.5210636546292013, -2.578932307847841, 0.502336821301721),
            (3.2784323795346313, -5.624890236425774, 4.818415571298513, -1.7923858898263332, 0.2374608704344986),
            _POLAR_EXPRESS_LIMIT,
        ),
        "repeat_last",
        Deflation(64, finish=(_POLAR_EXPRESS_LIMIT, _POLAR_EXPRESS_LIMIT), has_table=True),
        steps=3,
        gram_steps=range(3, 4),
    ),
}


_EXAMPLE = "Write coefficients=[(3.4445, -4.7750, 2.0315)]"


_AUTO_DEFLATES_FROM = {"cpu": (0, 0), "device": (4096, 45 << 20)}
"""From how many rows and elements on "auto" is "deflated" (on a CPU `for_rows` has a bound). For other matrices, thin
products and launches take a device longer than deflation saves (measured on an H200)."""


def choose(
    coefficients: Coefficients,
    steps: int | None,
    rows: int = 0,
    cols: int = 0,
    *,
    form: Literal["cpu", "device"] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Coefficients:
    """Return the coefficients that "auto" stands for; all others are returned unchanged.

    "auto" is "deflated" for matrices that are computed in bf16 or fp16, if ``steps`` is None: on a CPU for all, which
    `for_rows` replaces for small matrices, on a device from 4,096 rows and 45 · 2²⁰ elements on. Otherwise,
    and if it is unknown where they are computed, "auto" is "polar_express": fp32 and fp64 are chosen for exactness.

    Args:
        coefficients: The coefficients, as for `orthogonalize`.
        steps: The number of steps or None, as for `orthogonalize`.
        rows, cols: The size of the matrices, rows ≤ cols.
        form: Whose form the iteration has (`newton_schulz.form_of`); None if unknown.
        dtype: The compute dtype.
    """
    if not isinstance(coefficients, str) or coefficients != "auto":
        return coefficients
    if form is None or dtype.itemsize != 2 or steps is not None:
        return "polar_express"
    rows_from, elements_from = _AUTO_DEFLATES_FROM[form]
    return "deflated" if rows >= rows_from and rows * cols >= elements_from else "polar_express"


def for_rows(coefficients: Coefficients, steps: int | None, rows: int) -> tuple[Coefficients, int | None]:
    """Return the coefficients and steps for a matrix with this number of rows.

    They are the given ones, except for a set whose deflation costs more than it saves for so few rows. Then the matrix
    takes two steps more with "polar_express" instead.
    """
    if not isinstance(coefficients, str) or rows >= FROM_ROWS or coefficient_set(coefficients).deflation is None:
        return coefficients, steps
    return "polar_express", len(coefficient_schedule(coefficients, steps)) + 2


def register_coefficients(name: str, chosen: CoefficientSet) -> None:
    """Register a coefficient set under a name for ``ns_coefficients`` and `orthogonalize`.

    Register the set in every process before it steps groups with the set or loads their state. Ranks compare the
    polynomials.

    Args:
        name: The name. You may register a name of your own again.
        chosen: The set.

    Raises:
        ValueError: a published set has this name, a polynomial is invalid, or after a deflation the first polynomial
            is no quintic, or a later one neither of degree 5 nor of degree 9.
    """
    if name in ("auto", *get_args(CoefficientName)):
        write = f'Write register_coefficients("my-{name}", ...)'
        raise ValueError(explain_error("name", f"{name!r}, a published set", "a name of its own", write))
    polynomials = coefficient_set(chosen.polynomials).polynomials
    for number, polynomial in enumerate(polynomials if chosen.deflation is not None else (), 1):
        # The first uses the products of the closer bound, and all may share one Gram matrix.
        if len(polynomial) != 3 and (number == 1 or len(polynomial) != 5):
            actual = f"{polynomial} as number {number}, after {chosen.deflation}"
            needed = "three numbers, (a, b, c), and after the first three or five"
            raise ValueError(explain_error("polynomials", actual, needed, "Leave out deflation, or change this one"))
    COEFFICIENT_SETS[name] = replace(chosen, polynomials=polynomials)


def _as_float(value: Any) -> float:
    """Return a number as a float; infinity for a whole number that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return inf


def coefficient_set(coefficients: Coefficients) -> CoefficientSet:
    """Look up a published or registered set by name, or check and wrap a sequence of polynomials.

    Args:
        coefficients: The name of a set, or one tuple (a, b, ...) a step; tuples may differ in length.

    Returns:
        The set with plain float tuples.

    Raises:
        ValueError: The name is unknown, the sequence is empty, a polynomial has fewer than two coefficients, or
            a coefficient is not finite, or above 1e9 in size.
        TypeError: `coefficients` is neither a name nor a sequence of sequences of numbers.
    """
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            set_names = ", ".join(map(repr, ("auto", *COEFFICIENT_SETS)))
            actual, needed = f"{coefficients!r}", f"one of {set_names} or a sequence of polynomials"
            write = 'Write coefficients="polar_express"'
            raise ValueError(explain_error("coefficients", actual, needed, write))
        return COEFFICIENT_SETS[coefficients]
    try:
        polynomials = tuple(tuple(map(_as_float, polynomial)) for polynomial in coefficients)
    except (TypeError, ValueError) as error:
        needed = "the name of a published set, or a sequence with one tuple of numbers a step"
        raise TypeError(explain_error("coefficients", f"{coefficients!r}", needed, _EXAMPLE)) from error
    if not polynomials:
        raise ValueError(explain_error("coefficients", "an empty sequence", "at least one polynomial", _EXAMPLE))
    for polynomial in polynomials:
        if len(polynomial) < 2 or not all(-LARGEST <= value <= LARGEST for value in polynomial):
            actual = f"the polynomial {polynomial}"
            needed = f"two or more numbers of at most {LARGEST:g} in size, the factors of x, x³, …"
            raise ValueError(explain_error("coefficients", actual, needed, "Write for example (1.5, -0.5)"))
    return CoefficientSet(polynomials, "repeat_last", steps=len(polynomials))


def coefficient_schedule(coefficients: Coefficients, steps: int | None = None) -> tuple[Polynomial, ...]:
    """Return the polynomial of every step, past the end of the set by the set's own rule.

    Args:
        coefficients: The name of a set, or a sequence of polynomials.
        steps: Number of iterations, at least 1. None: `CoefficientSet.steps` of a set by name, or as many as a sequence
            has polynomials.

    Returns:
        `steps` tuples (a, b, ...), the odd polynomials a·x + b·x³ + ...

    Raises:
        ValueError: As `coefficient_set`, or `steps` is smaller than 1 or larger than `MOST_STEPS`.
        TypeError: As `coefficient_set`, or `steps` is not an int.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        actual = f"{steps!r} ({type(steps).__name__})"
        raise TypeError(explain_error("steps", actual, "an int or None", "Write steps=5"))
    chosen = coefficient_set(coefficients)
    steps = chosen.steps if steps is None else steps
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(explain_error("steps", f"{steps}", f"at least 1 and at most {MOST_STEPS}", "Write steps=5"))
    polynomials = chosen.polynomials
    endless = cycle(polynomials) if chosen.past_end == "cycle" else chain(polynomials, repeat(polynomials[-1]))
    return tuple(islice(endless, steps))


def segments_of(
    schedule: tuple[Polynomial, ...], method: Literal["standard", "gram"], *, half: bool = False
) -> Iterator[tuple[Polynomial, ...]]:
    """Cut the schedule into single steps and, for Gram, pairs: two steps through A, one direct, two through A, ...

    In bf16 the rounding error of A grows by a² with every step on A itself, until it exceeds the small singular values.
    Two steps are harmless, and a direct step between two pairs keeps their errors from adding up: 5 steps as 2 + 1 + 2
    are more accurate than as 2 + 2 + 1 on every decaying spectrum (docs/internals/numerics.md). fp16 has three bits
    more than bf16, so with ``half`` three steps, the last two or three fewer, go through one A: 3 + 2, 3 + 3 + 2.
    """
    length = {"standard": 1, "gram": 3 if half else 2}[method]
    while schedule:
        yield schedule[:length]
        schedule = schedule[length:]
        length = 3 - length if method == "gram" and not half else length


def factored(p: Polynomial) -> tuple[float, float, float, float]:
    """Return l, u, w and t so that p₁·A + … + p₄·A⁴ = l·(H² + w·H + t·A) with H = A² + u·A.

    This takes two products instead of three, and its numbers have the size of the result. The powers of A have much
    larger factors, which would multiply their rounding errors.
    """
    lead, u = p[4], p[3] / (2 * p[4])
    w = p[2] / lead - u * u
    return lead, u, w, p[1] / lead - u * w


@cache
def height(p: Polynomial) -> float:
    """Return the largest size of p₀ + p₁A + …, with and without its constant, for A from 0 to 1."""
    powers = [sum(c * (n / 64) ** k for k, c in enumerate(p)) for n in range(65)]
    return max(max(abs(value), abs(value - p[0])) for value in powers) or 1.0
