"""CPU: bf16 products in fp32, each result rounded once; where there are no bf16 instructions, and for tiny matrices.

Without such instructions oneDNN multiplies bf16 in a loop that takes twenty to sixty times as long as fp32 [measured,
AVX2], and with them torch multiplies tiny matrices in a loop of its own. What is computed here is the same but for the
order of the fp32 sums: products of bf16 numbers are exact in fp32, sums are fp32, and each element is rounded once.

The bits of an fp32 product depend on where its operands begin within 64 bytes, so in a batch every matrix must begin at
a multiple of 64: rows and columns are filled up with zeros to multiples of four. They also depend on how many threads
share a small product, and a batch is shared otherwise than one matrix. So these have one thread, and then the same
bits alone and in any batch (`test_bits_of_a_matrix_do_not_depend_on_its_surroundings`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.table import Matmuls
from muonmesh.numerics.kernels.threads import run_on_one_thread


def widened(exact: Matmuls) -> Matmuls:
    """Return the table that computes bf16 products by the fp32 table ``exact``."""

    def rounded(multiply: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        _, rows, cols = out.shape

        def task() -> None:
            out.copy_(multiply(_memory("wide result", out))[:, :rows, :cols])

        if exact.together:
            run_on_one_thread(task, device=out.device)
        else:
            task()
        return out

    def gram(x: Tensor, s: Tensor, out: Tensor) -> Tensor:
        return rounded(lambda result: exact.gram(_wide("x", x), s, result), out)

    def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
        return rounded(lambda result: exact.polynomial(_wide("a", a), b, c, result), out)

    def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        return rounded(lambda result: exact.product(_wide("a", a), _wide("b", b), _wide("c", c), factor, result), out)

    def full(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        return rounded(lambda result: exact.full(_wide("a", a), _wide("b", b), _wide("c", c), factor, result), out)

    def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
        return rounded(lambda result: exact.apply(_wide("x", x), _wide("b", b), a, s, result), out)

    return Matmuls(gram, polynomial, product, full, apply, at_once=exact.at_once, together=exact.together)


def _wide(role: str, narrow: Tensor) -> Tensor:
    _, rows, cols = narrow.shape
    wide = _memory(f"wide {role}", narrow)
    if wide.shape != narrow.shape:
        wide.zero_()
    wide[:, :rows, :cols].copy_(narrow)
    return wide


def _memory(role: str, like: Tensor) -> Tensor:
    batch, rows, cols = like.shape
    filled = (batch, -(-rows // 4) * 4, -(-cols // 4) * 4)
    return scratch(role, filled, dtype=torch.float32, device=like.device)
