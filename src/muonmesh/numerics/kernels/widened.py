"""CPU without bf16 instructions: products in fp32, each result rounded once.

oneDNN multiplies bf16 on such CPUs in a loop that takes twenty to sixty times as long as fp32 [measured, AVX2]. What
CPUs with these instructions compute is the same but for the order of the fp32 sums: products of bf16 numbers are exact
in fp32, sums are fp32, and each element is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.table import Matmuls


def widened(exact: Matmuls) -> Matmuls:
    """Return the table that computes bf16 products by the fp32 table ``exact``."""

    def gram(x: Tensor, s: Tensor, out: Tensor) -> Tensor:
        return out.copy_(exact.gram(_wide("x", x), s, _result(out)))

    def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
        return out.copy_(exact.polynomial(_wide("a", a), b, c, _result(out)))

    def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        return out.copy_(exact.product(_wide("a", a), _wide("b", b), _wide("c", c), factor, _result(out)))

    def full(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        return out.copy_(exact.full(_wide("a", a), _wide("b", b), _wide("c", c), factor, _result(out)))

    def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
        return out.copy_(exact.apply(_wide("x", x), _wide("b", b), a, s, _result(out)))

    return Matmuls(gram, polynomial, product, full, apply, at_once=exact.at_once, together=exact.together)


def _wide(role: str, narrow: Tensor) -> Tensor:
    memory = scratch(f"wide {role}", narrow.shape, dtype=torch.float32, device=narrow.device)
    return memory.copy_(narrow)


def _result(out: Tensor) -> Tensor:
    return scratch("wide result", out.shape, dtype=torch.float32, device=out.device)
