"""CPU: a call for each matrix; bf16 ones in fp32 where there are no bf16 instructions, and for small matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.product_table import ALIGNMENT, Matmuls, Number, Operand, Terms
from muonmesh.numerics.kernels.threads import scratch

_ALIGNED = ALIGNMENT // torch.float32.itemsize
"""Number of fp32 elements from one place where a matrix may begin to the next."""


def multiply(
    a: Tensor, b: Operand, terms: Terms, out: Tensor, alpha: float = 1.0, scale: Number = 1.0, symmetric: bool = True
) -> Tensor:
    """Do `Matmuls.multiply`, a call for each matrix; both triangles of a symmetric result are computed."""
    if b is None:
        for first, target in zip(a.unbind(), out.unbind(), strict=True):
            torch.mm(first, first.mT, out=target)
        return scaled(out, scale)
    ((c, factor),) = terms
    factors = factor.flatten() if isinstance(factor, Tensor) else [factor] * len(a)
    batches = (batch.unbind() for batch in (a, b, c, out))
    for first, second, added, target, number in zip(*batches, factors, strict=True):
        if isinstance(number, Tensor):
            add_multiple(first, second, added, number, 1.0, target)  # multiplied in before rounding
        else:
            torch.addmm(added, first, second, beta=number, alpha=alpha, out=target)
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


def dense(*, batch_limit: int) -> Matmuls:
    """Return the table for batches of at most `batch_limit` matrices, each of which begins at a multiple of 64 bytes.

    Bits of a torch product depend on the number of matrices in the call, on strides, on the address modulo 64 bytes and
    on the number of threads. oneDNN chooses by all of these how it sums, most of all where it has AMX, and says of none
    that it makes no difference. So each matrix has a call of its own, on one thread, whatever is beside it. All other
    operations take the whole batch.
    """
    return Matmuls(multiply=multiply, batch_limit=batch_limit, one_thread=True)


def widened(exact: Matmuls) -> Matmuls:
    """Return a table that computes bf16 products by the fp32 table ``exact``, each result rounded once.

    Without bf16 instructions oneDNN multiplies bf16 in a loop that takes twenty to sixty times as long as fp32
    [measured, AVX2], and with them torch multiplies tiny matrices in a loop of its own. What is computed here is the
    same but for the order of the fp32 sums: products of bf16 numbers are exact in fp32, sums are fp32, and each element
    is rounded once.
    """

    def memory(role: str, like: Tensor) -> Tensor:
        batch, rows, cols = like.shape
        apart = -(-rows * cols // _ALIGNED) * _ALIGNED
        kind = "square" if rows == cols else "long"
        buffer = scratch(f"wide {kind} {role}", (batch, apart), dtype=torch.float32, device=like.device)
        return buffer[:, : rows * cols].view(like.shape)

    def multiply(a: Tensor, b: Operand, terms: Terms, out: Tensor, *numbers: Any, **named: Any) -> Tensor:
        wide_by_id = dict[int, Tensor]()  # by identity, since an operand may be given twice

        def wide(number: int, narrow: Tensor) -> Tensor:
            if id(narrow) not in wide_by_id:
                role = f"{number}" if narrow.shape[1] == narrow.shape[2] else "x"
                wide_by_id[id(narrow)] = memory(role, narrow).copy_(narrow)
            return wide_by_id[id(narrow)]

        first, second = wide(0, a), None if b is None else wide(1, b)
        added = [(wide(2, c), factor) for c, factor in terms]
        return out.copy_(exact.multiply(first, second, added, memory("result", out), *numbers, **named))

    return replace(exact, multiply=multiply)
