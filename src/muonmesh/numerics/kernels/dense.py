"""CPU: one batched product per entry; bf16 ones in fp32 where there are no bf16 instructions, and for tiny matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls, Number, Operand, Terms


def multiply(
    a: Tensor, b: Operand, terms: Terms, out: Tensor, alpha: float = 1.0, scale: Number = 1.0, symmetric: bool = True
) -> Tensor:
    """Do `Matmuls.multiply`; both triangles of a symmetric result are computed."""
    if b is None:
        return scaled(torch.bmm(a, a.mT, out=out), scale)
    ((c, factor),) = terms
    if isinstance(factor, Tensor):
        for one, other, number, target in zip(a, b, factor.flatten(), out, strict=True):
            add_multiple(one, other, other, number, 1.0, target)  # multiplied in before rounding
    else:
        torch.baddbmm(c, a, b, beta=factor, alpha=alpha, out=out)
    return scaled(out, scale)


def scaled(out: Tensor, s: float | Tensor) -> Tensor:
    """Multiply in place by a number, or by one number for each matrix."""
    if not isinstance(s, Tensor):
        return out if s == 1 else out.mul_(s)
    if len(out) == 1:
        out.mul_(s.squeeze())  # by a scalar, which a CPU does ten times faster than by a 1 × 1 matrix
    elif out.device.type != "cpu" or torch.promote_types(out.dtype, s.dtype) == out.dtype:
        out.mul_(s)
    else:  # torch would take fresh memory for both in the wider dtype, and each page of it would be a fault
        wide = scratch("scaled", out.shape, dtype=s.dtype, device=out.device)
        out.copy_(wide.copy_(out).mul_(s))
    return out


def dense(*, at_once: int) -> Matmuls:
    """The table for batches of at most `at_once` matrices."""
    return Matmuls(multiply=multiply, at_once=at_once, together=at_once > 1)


def widened(exact: Matmuls) -> Matmuls:
    """Return a table that computes bf16 products by the fp32 table ``exact``, each result rounded once.

    Without bf16 instructions oneDNN multiplies bf16 in a loop that takes twenty to sixty times as long as fp32
    [measured, AVX2], and with them torch multiplies tiny matrices in a loop of its own. What is computed here is the
    same but for the order of the fp32 sums: products of bf16 numbers are exact in fp32, sums are fp32, and each element
    is rounded once.

    The bits of an fp32 product depend on where its operands begin within 64 bytes, so in a batch every matrix must
    begin at a multiple of 64: rows and columns are filled up with zeros to multiples of four. They also depend on how
    many threads share a small product, and a batch is shared otherwise than one matrix. So batches have one thread, and
    then the same bits alone and in any batch (`test_bits_of_a_matrix_do_not_depend_on_its_surroundings`).
    """

    def memory(role: str, like: Tensor) -> Tensor:
        batch, rows, cols = like.shape
        filled = (batch, -(-rows // 4) * 4, -(-cols // 4) * 4)
        kind = "square" if rows == cols else "long"
        return scratch(f"wide {kind} {role}", filled, dtype=torch.float32, device=like.device)

    def multiply(a: Tensor, b: Operand, terms: Terms, out: Tensor, *numbers: Any, **named: Any) -> Tensor:
        kept = dict[int, Tensor]()  # by identity, since an operand may be given twice

        def wide(number: int, narrow: Tensor) -> Tensor:
            _, rows, cols = narrow.shape
            if id(narrow) not in kept:
                found = kept[id(narrow)] = memory(f"{number}" if rows == cols else "x", narrow)
                if found.shape != narrow.shape:
                    found.zero_()
                found[:, :rows, :cols].copy_(narrow)
            return kept[id(narrow)]

        first, second = wide(0, a), None if b is None else wide(1, b)
        added = [(wide(2, c), factor) for c, factor in terms]
        result = exact.multiply(first, second, added, memory("result", out), *numbers, **named)
        return out.copy_(result[:, : out.shape[1], : out.shape[2]])

    return replace(exact, multiply=multiply, one_thread=exact.together)
