"""Stages: what one rank does for one bucket of matrices: it gathers them, computes, and scatters the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from muonmesh.comm.wire import Swap
from muonmesh.comm.work import Ends, Local
from muonmesh.layout.rounds import Rounds

Copies = tuple[tuple[Tensor, Tensor], ...]
"""What is copied, (to, of), both of one shape."""


@dataclass(frozen=True)
class Gather:
    """The pieces of one bucket on their way to the owners, as this rank sees them, in the order in which it happens.

    Attributes:
        moving: The assignments of the bucket of which something moves.
        reads: What this rank stores of them, and where it goes: into the send buffer, or straight into its matrices.
        swap: What travels; None if nothing does.
        arriving: From the receive buffer into the matrices.
        matrices: What this rank orthogonalizes, equal ones together: (b, rows, cols) each.
        late: Whether nothing is gathered, on a device: then nothing is read before it is computed (`Portion`).
    """

    moving: tuple[int, ...]
    reads: Ends
    swap: Swap | None
    arriving: Copies
    matrices: tuple[Tensor, ...]
    late: bool = False


@dataclass(frozen=True)
class Portion:
    """Equal matrices that are all here, as they are read and computed together.

    Attributes:
        moving: The assignments whose gradients are folded in now, these and others that this rank does not own.
        reads: What is read of these, and where it goes.
        batch: See `Work.orthogonalize`; None where this rank owns none of the bucket.
    """

    moving: tuple[int, ...]
    reads: Ends
    batch: tuple[Tensor, Tensor, tuple[int, ...]] | None


@dataclass(frozen=True)
class Compute:
    """One bucket at its owners, as this rank sees it: what it computes, and which results stay here.

    Attributes:
        batches: What this rank orthogonalizes: see `Work.orthogonalize`.
        local: Matrices that are this rank's alone, those of one shape and setting together; computed while results
            travel.
        summed: Assignments over which sums are taken before they are written, see `Plan.summed`.
        staying: What is written straight from the results.
        rounds: In which rounds the results travel.
        results: Those of each batch, (b, rows, cols).
    """

    batches: tuple[tuple[Tensor, Tensor, tuple[int, ...]], ...]
    local: tuple[tuple[Local, ...], ...]
    summed: Mapping[int, int]
    staying: Ends
    rounds: Rounds
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Scatter:
    """Results of one bucket on their way from the owners to those that hold it, or a part of them.

    Attributes:
        leaving: From the results into the send buffer; and from the receive buffer of the exchange before, if any.
        swap: What travels.
        arrived: What is written from the receive buffer.
        passes: Whether anything leaves that has arrived in the exchange before.
    """

    leaving: Copies
    swap: Swap
    arrived: Ends
    passes: bool = False
