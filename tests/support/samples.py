"""Some cases in `make test`, all of them in `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test, of which `make test` runs the first of every ``step``."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if number % step == 0 else pytest.mark.soak))
    return marked


def pairs_of(*factors: Sequence[Any]) -> list[Any]:
    """Return the product of factors, of which `make test` runs cases that have every two values of two factors."""
    numbers = [*itertools.product(*(range(len(values)) for values in factors))]
    pairs = {case: {*itertools.combinations(enumerate(case), 2)} for case in numbers}
    missing, chosen = set().union(*pairs.values()), set[tuple[int, ...]]()
    while missing:
        chosen.add(best := max(numbers, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[best]
    return [
        pytest.param(
            *(values[number] for values, number in zip(factors, case, strict=True)),
            marks=() if case in chosen else pytest.mark.soak,
        )
        for case in numbers
    ]
