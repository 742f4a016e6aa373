"""Precision: what is computed does not depend on modes that the user has set for the model.

`torch.set_float32_matmul_precision("high")` lets tensor cores multiply fp32 as TF32, which has the mantissa of fp16.
Models bear that; whoever computes an optimizer's step in fp32 wants it exact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_EXACT = ("ieee", "none")  # none: nobody has set anything, and torch multiplies exactly
_lock = threading.Lock()
_inside = 0
_before: list[str] = []


@contextmanager
def plain_modes() -> Iterator[None]:
    """Compute inside without the caller's autocast, inference mode and gradients; also a decorator.

    Autocast would multiply in another dtype than the code names, and only on the thread that has entered it. Tensors
    that are made in inference mode could not be written outside of it.
    """
    kinds = {"cpu", "cuda", current.type if (current := torch.accelerator.current_accelerator()) else "cpu"}
    with ExitStack() as modes:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        modes.enter_context(torch.inference_mode(False))  # turns gradients on
        modes.enter_context(torch.no_grad())
        yield


@contextmanager
def exact_fp32(dtype: torch.dtype) -> Iterator[None]:
    """Multiply exactly inside, and set what was set before when the last thread has left.

    Settings of torch are those of the process. So the first thread that enters changes them and the last one that
    leaves restores them; what other threads multiply meanwhile is exact too.

    Args:
        dtype: What is computed in; nothing is done unless it is fp32.
    """
    global _inside
    if dtype != torch.float32:
        yield
        return
    with _lock:
        _inside += 1
        if _inside == 1:
            _before[:] = [backend.fp32_precision for backend in _backends()]
            for backend, level in zip(_backends(), _before, strict=True):
                if level not in _EXACT:
                    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            for backend, level in zip(_backends(), _before, strict=True):
                if _inside == 0 and level not in _EXACT:
                    backend.fp32_precision = "none"  # what is set for all backends, torch.backends.fp32_precision
                    if backend.fp32_precision != level:
                        backend.fp32_precision = level


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
