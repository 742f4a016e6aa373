"""Dtypes: what weights and gradients may be held in, and what Newton–Schulz is computed in. One list for all."""

from __future__ import annotations

import torch

HELD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What parameters, gradients, states, masters and the input of `orthogonalize` may be. fp8 and fp4 are formats to
multiply in, on their way to a kernel: they have no arithmetic of their own."""

COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""What matrices may be orthogonalized in. Not fp16: its largest number is 65504, its smallest normal one 6e-5, too
little for the products of a matrix whose singular values span four decades."""

NEEDED_HELD = "one of " + ", ".join(map(str, HELD_DTYPES))
"""For messages."""

NEEDED_COMPUTE = f"one of {', '.join(map(str, COMPUTE_DTYPES))}, the dtypes that Newton–Schulz is computed in"
"""For messages."""
