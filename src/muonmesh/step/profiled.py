"""Profiled: the work of a step whose parts have names in torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

NAMES = {
    "prepare": "gradients into matrices",
    "compute": "orthogonalization",
    "finalize": "updates into weights",
    "step_elementwise": "AdamW and other elementwise rules",
}
"""The parts of a step, and their names in the profile after the prefix "muonmesh: "."""


class Profiled:
    """A wrapper of a step's work that gives its parts names while torch's profiler runs.

    Args:
        work: The object that does the work, such as a `MuonStep`.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        part: Callable[..., Any] = getattr(self._work, name)
        if name not in NAMES:
            return part

        def named(*given: Any) -> Any:
            with record_function(f"muonmesh: {NAMES[name]}"):
                return part(*given)

        return named
