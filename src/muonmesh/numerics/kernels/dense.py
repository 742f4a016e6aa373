"""CPU: one batched product per entry; bf16 ones in fp32 where there are no bf16 instructions, and for tiny matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls


def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale·X Xᵀ."""
    return scaled(torch.bmm(x, x.mT, out=out), scale)


def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
    """b·A + c·A²."""
    return torch.baddbmm(a, a, a, beta=b, alpha=c, out=out)


def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B."""
    return torch.baddbmm(c, a, b, beta=factor, out=out)


def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """s·(a·X + B X)."""
    if isinstance(a, Tensor):
        for x2, b2, number, target in zip(x, b, a.flatten(), out, strict=True):
            add_multiple(x2, b2, number, 1.0, target)  # multiplied in before rounding
    else:
        torch.baddbmm(x, b, x, beta=a, out=out)
    return scaled(out, s)


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
    together = at_once > 1
    return Matmuls(
        gram=gram, polynomial=polynomial, product=product, full=product, apply=apply, at_once=at_once, together=together
    )


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

    The table keeps its memory, that of the thread that calls it. So each thread makes one of its own.
    """
    kept: dict[tuple[str, torch.Size], Tensor] = {}

    def memory(role: str, like: Tensor) -> Tensor:
        place = role, like.shape
        if place not in kept:
            batch, rows, cols = like.shape
            filled = (batch, -(-rows // 4) * 4, -(-cols // 4) * 4)
            kept[place] = scratch(f"wide {role}", filled, dtype=torch.float32, device=like.device)
        return kept[place]

    def wide(role: str, narrow: Tensor) -> Tensor:
        found = memory(role, narrow)
        if found.shape == narrow.shape:
            return found.copy_(narrow)
        _, rows, cols = narrow.shape
        found.zero_()[:, :rows, :cols].copy_(narrow)
        return found

    def rounded(result: Tensor, out: Tensor) -> Tensor:
        _, rows, cols = out.shape
        return out.copy_(result[:, :rows, :cols])

    def widen(function: Callable[..., Tensor], roles: str) -> Callable[..., Tensor]:
        """Return an entry of the table whose first operands, one for each role, are matrices in bf16."""

        def entry(*given: Any) -> Tensor:
            *operands, out = given
            matrices = [wide(role, narrow) for role, narrow in zip(roles, operands, strict=False)]
            return rounded(function(*matrices, *operands[len(roles) :], memory("result", out)), out)

        return entry

    return replace(
        exact,
        gram=widen(exact.gram, "x"),
        polynomial=widen(exact.polynomial, "a"),
        product=widen(exact.product, "abc"),
        full=widen(exact.full, "abc"),
        apply=widen(exact.apply, "xb"),
        one_thread=exact.together,
    )
