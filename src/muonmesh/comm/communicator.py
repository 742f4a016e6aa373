"""Communicator: runs the collectives of a step among ranks that share parameters, counts them, and names failed ones.

Three kinds of communication do not use it: the sum of a partial gradient, which DTensor sends over its own mesh
(`gradients`); the norms of other pipeline stages (`muonmesh.clip.squares`); and the messages between ranks once for
each plan, or after an error (`gather_objects`, `rendezvous`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import Agreed, Agreement, Said
from muonmesh.comm.rendezvous import naming_missing_ranks

_communicator_counts: Counter[tuple[int, ...]] = Counter()
"""Number of communicators that this process has made for each set of ranks. The ranks of a set make them together."""

_TAGS = 2**16
"""Number of message tags of each communicator."""


@functools.cache
def _let_threads_go() -> None:
    """Make this process wait a moment at its end, so that gloo's threads can free the tensors of past collectives.

    A thread of gloo needs the interpreter's lock to free them, after the collective is over. If it gets the lock when
    the interpreter is already shutting down, CPython before 3.14 ends the thread, and C++ calls `std::terminate`: the
    process aborts after its last line. `destroy_process_group` waits for these threads, except for threads of a group
    that another object holds, such as FSDP2 or an optimizer's plan.
    """
    atexit.register(time.sleep, 0.05)


@dataclass
class Counts:
    """Work and traffic of the last step on this rank.

    Attributes:
        orthogonalized: Number of matrices that this rank orthogonalized.
        collectives: Number of collectives in which this rank took part.
        bytes_sent: Bytes sent to other ranks; small reductions of flags and sums are not counted.
        bytes_received: Bytes received from other ranks; small reductions are not counted.
    """

    orthogonalized: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class AllToAll:
    """One collective that moves elements between all ranks, for one bucket in one direction.

    Attributes:
        name: The name of the collective in errors.
        send: The send buffer, with a segment for each rank in the order of the group; this rank's segment is empty.
        receive: The receive buffer, with a segment from each rank; this rank's segment is empty.
        sent: Number of elements of each segment of ``send``.
        received: Number of elements of each segment of ``receive``.
    """

    name: str
    send: Tensor
    receive: Tensor
    sent: list[int]
    received: list[int]


@dataclass
class PendingCollective:
    """A collective under way. It keeps the buffers that it reads and writes; ``works`` is empty when it is over."""

    name: str
    memory: tuple[Tensor, ...]
    works: list[dist.Work]


class Communicator:
    """The collectives of one connected set of ranks.

    Attributes:
        ranks: The connected set.
        group: Its process group; None for one rank.
        rank, peers: This rank, and all ranks in the order of the process group.
        counts: Work and traffic of the current or the last step.
        steps: Number of steps that have begun, for messages.
    """

    def __init__(self, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self.ranks, self.group = ranks, group
        self.rank = ranks[0] if group is None else dist.get_rank()
        self.peers = ranks if group is None else tuple(dist.get_process_group_ranks(group))
        self.counts = Counts()
        self.steps = 0
        self._key = f"waited/{ranks}/{_communicator_counts[ranks]}"
        _communicator_counts[ranks] += 1
        self._gloo = group is not None and "cpu:gloo" in dist.get_backend_config(group)
        if self._gloo:
            _let_threads_go()
        first = _TAGS * (_communicator_counts[ranks] % 2**14)
        self._tags = itertools.cycle(range(first, first + _TAGS))

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, name: str, *, counted: bool = True) -> Tensor:
        """Reduce a small vector over all ranks elementwise and in place, and return it.

        Args:
            values: The vector.
            op: The operation, such as the maximum.
            name: The name of the reduction in errors.
            counted: Whether ``counts`` counts it as a collective of a step.
        """
        if self.group is not None:
            with self._naming_missing_ranks(name):
                dist.all_reduce(values, op=op, group=self.group)
            self.counts.collectives += counted
        return values

    def begin_step(self) -> None:
        """Count a new step, and reset ``counts``."""
        self.steps += 1
        self.counts = Counts()

    def ask(self, agreement: Agreement, answers: Mapping[str, Said], device: torch.device, name: str) -> Agreed:
        """Return what all ranks say; ``answers`` is what this rank says, and ``name`` names the reduction in errors."""
        return Agreed(agreement, self.reduce(agreement.vector(answers, device), dist.ReduceOp.MAX, name))

    def agree(self, agreement: Agreement, answers: Mapping[str, Said], device: torch.device) -> Agreed:
        """Begin a step: return what all ranks say before it."""
        self.begin_step()
        return self.ask(agreement, answers, device, "the agreement before the step")

    def start(self, move: AllToAll) -> PendingCollective:
        """Start to move elements between all ranks of the connected set. All these ranks call this.

        This is one ``all_to_all_single``. With gloo on a CPU, single messages to and from each rank are started at once
        instead, because in gloo's own collective one direction of a link waits for the other.
        """
        send, receive = move.send, move.receive
        with self._naming_missing_ranks(move.name):
            if self._gloo and send.device.type == "cpu":
                works = self._messages(move)
            else:
                works = [
                    dist.all_to_all_single(receive, send, move.received, move.sent, group=self.group, async_op=True)
                ]
        self.counts.collectives += 1
        self.counts.bytes_sent += send.numel() * send.element_size()
        self.counts.bytes_received += receive.numel() * receive.element_size()
        return PendingCollective(move.name, (send, receive), [work for work in works if work is not None])

    def _messages(self, move: AllToAll) -> list[dist.Work | None]:
        tag = next(self._tags)
        arriving, leaving = torch.split(move.receive, move.received), torch.split(move.send, move.sent)
        return [
            *(dist.irecv(p, group=self.group, group_src=r, tag=tag) for r, p in enumerate(arriving) if p.numel()),
            *(dist.isend(p, group=self.group, group_dst=r, tag=tag) for r, p in enumerate(leaving) if p.numel()),
        ]

    def finish(self, transfer: PendingCollective | None) -> None:
        """Wait for a transfer, if there is one."""
        if transfer is not None:
            with self._naming_missing_ranks(transfer.name):
                for work in transfer.works:
                    work.wait()
            transfer.works, transfer.memory = [], ()

    def _naming_missing_ranks(self, name: str) -> AbstractContextManager[None]:
        return naming_missing_ranks(self.ranks, self._key, f"step {self.steps}", name)
