"""Triton's toolchain: whether it is installed, whether it can run a kernel, and the dtypes of its kernels."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the tensors that kernels in Triton read and write."""


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, as TRITON_INTERPRET=1 asks for before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def is_usable(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: one is tried, once. If it does not run, a warning says why.

    Triton can be imported without a compiler, a driver or headers that it needs for its first kernel. On a CUDA device
    that is not there, as in a dry run, nothing can be tried; what is installed counts as usable.
    """
    if not is_installed() or device.type not in ("cuda", "cpu") or (device.type == "cpu" and not is_interpreted()):
        return False
    if device.type == "cuda" and not torch.cuda.is_available():
        return True
    try:
        from muonmesh.numerics.kernels.fused import mark_nonzero
        from muonmesh.numerics.kernels.rows import PieceRows, Place
        from muonmesh.numerics.kernels.threads import keep

        trial, nonzero = (torch.ones(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.bool))
        mark_nonzero(keep("trial", lambda: PieceRows([Place(0, 0, 0, (1,), 0, (1,), 0, (1,))])), [trial], nonzero)
    except Exception as error:  # compilers, drivers and loaders each raise their own
        warnings.warn(
            f"triton: found a package that runs no kernel on {device} ({type(error).__name__}: {error}); needed one "
            "that does, so torch's operations are used, which take longer. Repair its toolchain, or uninstall triton",
            stacklevel=2,
        )
        return False
    return True


@cache
def is_installed() -> bool:
    """Whether Triton can be imported; it is not imported here."""
    return importlib.util.find_spec("triton") is not None
