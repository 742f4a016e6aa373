"""Dtypes: the allowed dtypes of weights and gradients, and of the Newton–Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

HELD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The allowed dtypes of parameters, gradients, state, master weights and the input of `orthogonalize`. fp8 and fp4 are
only formats for products: torch has no other arithmetic for them."""

COMPLEX_DTYPES = (torch.complex64, torch.complex128)
"""The complex dtypes of parameters that elementwise rules step, by real and imaginary parts as torch does."""

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes in which matrices may be orthogonalized. fp16 on devices only, whose bf16 it replaces inside an iteration
(`numerics.device_iteration`): its range is too small for what is sent, which is bf16 then."""

NEEDED_HELD = "one of " + ", ".join(map(str, HELD_DTYPES))
"""For messages."""

NEEDED_COMPUTE = f"one of {', '.join(map(str, COMPUTE_DTYPES))}, the dtypes that Newton–Schulz is computed in"
"""For messages."""


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_named(name: object) -> torch.dtype | None:
    """Return the dtype that a string names, such as "bf16" or "torch.float32"; None for anything else. For messages."""
    plain = name.removeprefix("torch.").lower() if isinstance(name, str) else ""
    candidate = getattr(torch, _SHORT.get(plain, plain), None)
    return candidate if isinstance(candidate, torch.dtype) else None


def real_of(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor as (..., 2) real numbers; any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def master_for(dtype: torch.dtype, master: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of the master weights of a parameter of this dtype; None if it needs none."""
    if master is not None and dtype.is_complex:
        master = master.to_complex()
    return None if master == dtype else master
