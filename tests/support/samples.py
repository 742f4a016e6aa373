"""Some cases in `make test`, all of them in `make soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test, of which `make test` runs the first of every ``step``."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if number % step == 0 else pytest.mark.soak))
    return marked
