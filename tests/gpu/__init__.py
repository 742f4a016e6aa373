"""Tests that need a CUDA device: `make test-gpu`. Everything else leaves them out."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was tested"),
]
