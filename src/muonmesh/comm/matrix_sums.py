"""Matrix sums: the sums over whole matrices that some rules need before they write weights.

The ranks that hold a matrix add up its elements. Where several ranks hold copies, the copy of the owner counts. The
sums are exact (`muonmesh.numerics.exact`), so every layout gives the same bits. They take two small all-reduces for
each bucket: one of the largest exponents, and one of the integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.step_callbacks import SumCallbacks
from muonmesh.layout import Plan
from muonmesh.layout.piece_table import Row
from muonmesh.numerics.exact import total_of
from muonmesh.numerics.kernels.threads import run_all


class MatrixSums:
    """Computes the sums over matrices of a plan that rules need.

    Args:
        plan: The plan of these matrices.
        rank: The rank of this process.
        device: The device of the matrices.
    """

    def __init__(self, plan: Plan, *, rank: int, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._counts = cache(partial(plan.counts, rank=rank))

    def take(
        self,
        counts: Mapping[int, int],
        updates: Iterable[tuple[Row, Tensor]],
        summands: SumCallbacks,
        communicator: Communicator | None = None,
        *,
        name: str = "a matrix",
    ) -> None:
        """Compute sums over some matrices, and pass them to ``summands``.

        Args:
            counts: `Plan.summed` of the matrices, at least one.
            updates: The updates of the pieces that this rank stores. Pieces that do not count (`Plan.counts`), and
                pieces of other matrices, are ignored.
            summands: Computes this rank's contributions, and receives the sums.
            communicator: Sends to the other ranks, which all call this for the same matrices. None if only this rank
                holds the matrices.
            name: The name of the matrices in errors.
        """
        counted = [end for end in updates if end[0].assignment in counts and self._counts(end[0].assignment)]
        sizes, total = list(counts.values()), sum(counts.values())

        def of_each(shape: tuple[int, ...], write: Callable[[Row, Tensor, Tensor], None]) -> list[tuple[Row, Tensor]]:
            """Return each counted row with the int64 tensor (sums, *shape) that ``write`` fills for it."""
            rows = [row for row, _ in counted]
            outputs = [
                torch.zeros(counts[row.assignment], *shape, dtype=torch.int64, device=self._device) for row in rows
            ]
            tasks = [partial(write, *end, into) for end, into in zip(counted, outputs, strict=True)]
            run_all(tasks, device=self._device)
            return list(zip(rows, outputs, strict=True))

        # The sums over all matrices are one vector; each matrix has a view of it.
        exponents = torch.zeros(total, dtype=torch.int64, device=self._device)
        exponents_of = dict(zip(counts, torch.split(exponents, sizes), strict=True))
        for row, output in of_each((), summands.exponents):
            largest = exponents_of[row.assignment]
            torch.maximum(largest, output, out=largest)
        if communicator is not None:
            communicator.reduce(exponents, dist.ReduceOp.MAX, f"the largest numbers in the sums over {name}")

        # One vector again: two limbs for each sum, and then the one-number state that owners keep for their matrices.
        lengths = [len(self._plan.keys_with_sums(number)) for number in counts]
        numbers = torch.zeros(2 * total + sum(lengths), dtype=torch.int64, device=self._device)
        limbs, bits = numbers[: 2 * total].view(total, 2), numbers[2 * total :]
        limbs_of = dict(zip(counts, torch.split(limbs, sizes), strict=True))
        # The state of owners travels as the bits of fp64 numbers, to which the other ranks add zeros.
        state_of = dict(zip(counts, torch.split(bits.view(torch.float64), lengths), strict=True))
        for number, state in state_of.items():
            summands.tell(number, state)

        def add(row: Row, update: Tensor, into: Tensor) -> None:
            summands.limbs(row, update, exponents_of[row.assignment], into)

        for row, output in of_each((2,), add):
            limbs_of[row.assignment].add_(output)
        if communicator is not None:
            communicator.reduce(numbers, dist.ReduceOp.SUM, f"the sums over {name}")

        for number, state in state_of.items():
            count = self._plan.assignments[number].matrix.numel
            summands.take(number, total_of(limbs_of[number], exponents_of[number], count=count), state)
