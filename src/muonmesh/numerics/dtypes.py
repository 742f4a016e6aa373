"""Dtypes: the allowed dtypes of weights and gradients, and of the Newton–Schulz iteration."""

from __future__ import annotations

import torch

HELD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The allowed dtypes of parameters, gradients, state, master weights and the input of `orthogonalize`. fp8 and fp4 are
only formats for products: torch has no other arithmetic for them."""

COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""The dtypes in which matrices may be orthogonalized. Not fp16: its largest number is 65504, and its smallest normal
number is 6e-5. This range is too small for products of a matrix whose singular values span four decades."""

NEEDED_HELD = "one of " + ", ".join(map(str, HELD_DTYPES))
"""For messages."""

NEEDED_COMPUTE = f"one of {', '.join(map(str, COMPUTE_DTYPES))}, the dtypes that Newton–Schulz is computed in"
"""For messages."""
