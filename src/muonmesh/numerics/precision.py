"""Precision: makes products independent of what the user has set for the model.

With `torch.set_float32_matmul_precision("high")`, tensor cores multiply fp32 as TF32, which has the mantissa of fp16.
This is good enough for models, but an optimizer step in fp32 should be exact. Likewise
`torch.backends.cuda.matmul.allow_fp16_accumulation` adds up fp16 in fp16, where sums of an iteration overflow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = ("ieee", "none")  # none: nothing is set, and torch multiplies exactly
_lock = threading.Lock()
_inside = 0
_before: list[Any] = []


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Multiply fp32 as such, and add up fp16 in fp32, inside a block; restore torch's settings after the last thread.

    These settings are global in the process. So the first thread that enters changes them, and the last thread that
    leaves restores them. Products of other threads are exact too meanwhile.

    Args:
        dtype: The compute dtype; nothing is done unless it is fp32 or fp16.
    """
    global _inside
    if dtype not in (torch.float32, torch.float16):
        yield
        return
    with _lock:
        _inside += 1
        if _inside == 1:
            _before[:] = [backend.fp32_precision for backend in _backends()]
            for backend, level in zip(_backends(), _before, strict=True):
                if level not in _EXACT:
                    backend.fp32_precision = "ieee"
            matmul = torch.backends.cuda.matmul
            split_k = getattr(matmul, "allow_fp16_reduced_precision_reduction_split_k", True)  # not in every torch
            reduced = matmul.allow_fp16_reduced_precision_reduction
            _before.append((reduced if split_k else (reduced, split_k), matmul.allow_fp16_accumulation))
            matmul.allow_fp16_reduced_precision_reduction = matmul.allow_fp16_accumulation = False
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                matmul = torch.backends.cuda.matmul
                matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_accumulation = _before.pop()
                for backend, level in zip(_backends(), _before, strict=True):
                    if level not in _EXACT:
                        backend.fp32_precision = "none"  # the setting for all backends, torch.backends.fp32_precision
                        if backend.fp32_precision != level:
                            backend.fp32_precision = level


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
