"""CPU: one batched product per entry; bf16 ones in fp32 where there are no bf16 instructions, and for tiny matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls, Number, Operand


def multiply(
    a: Tensor, b: Operand, c: Operand, out: Tensor, alpha: float, factor: Number, scale: Number, symmetric: bool
) -> Tensor:
    """See `Matmuls.multiply`; all of a result is multiplied."""
    if b is None or c is None:
        torch.bmm(a, a.mT, out=out)
    elif isinstance(factor, Tensor):
        for one, other, number, target in zip(a, b, factor.flatten(), out, strict=True):
            add_multiple(one, other, other, number, 1.0, target)  # multiplied in before rounding
    else:
        torch.baddbmm(c, a, b, beta=factor, alpha=alpha, out=out)
    return scaled(out, scale)


def scaled(out: Tensor, s: float | Tensor) -> Tensor:
    """Multiply in place by a number, or by one number a matrix."""
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

    def multiply(a: Tensor, b: Tensor | None, c: Tensor | None, out: Tensor, **options: Any) -> Tensor:
        wide = dict[int, Tensor]()  # by identity, since an operand may be given twice
        for number, narrow in enumerate((a, b, c)):
            if narrow is not None and id(narrow) not in wide:
                found = wide[id(narrow)] = memory(f"{number}" if narrow.shape[1] == narrow.shape[2] else "x", narrow)
                if found.shape != narrow.shape:
                    found.zero_()
                found[:, : narrow.shape[1], : narrow.shape[2]].copy_(narrow)
        operands = (None if narrow is None else wide[id(narrow)] for narrow in (a, b, c))
        result = exact.multiply(*operands, memory("result", out), **options)
        return out.copy_(result[:, : out.shape[1], : out.shape[2]])

    return replace(exact, multiply=multiply, one_thread=exact.together)
