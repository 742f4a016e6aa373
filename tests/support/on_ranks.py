"""on_ranks: a test whose body every rank of a pool runs.

::

    @on_ranks(2)
    def test_the_largest_is_known_to_all() -> None:
        largest = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert largest == 1

What compares ranks with each other gathers it, or returns values to a test by `Pool.run`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.workers import Pool

Test = Callable[..., None]


def on_ranks(*counts: int, timeout: float = 60.0) -> Callable[[Test], Test]:
    """Make a test of a function that every rank calls; of several counts of ranks, a test for each.

    Its arguments are those of any test, and reach the ranks pickled. Without counts, ``ranks`` is one that
    `pytest.mark.parametrize` gives, which the function does not take.
    """

    def decorate(function: Test) -> Test:
        @functools.wraps(function)
        def test(workers: Callable[[int], Pool], ranks: int = counts[0] if counts else 0, **arguments: Any) -> None:
            __tracebackhide__ = True
            workers(ranks).run(_run, function.__module__, function.__name__, arguments, timeout=timeout)

        names = [*inspect.signature(function).parameters, "workers", *(["ranks"] if len(counts) != 1 else [])]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", counts)(test) if len(counts) > 1 else test

    return decorate


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
