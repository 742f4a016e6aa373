"""Wire: runs the collectives of a step among the ranks that share parameters, counts them, and names one that fails.

Three things are sent past the wire: the sum of a partial gradient, which DTensor sends over its own mesh (`gradients`);
the norms of other pipeline stages (`muonmesh.clip.squares`); and what ranks tell each other once for each plan, or
after an error (`agreement`, `meeting`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.meeting import meeting

_made: Counter[tuple[int, ...]] = Counter()
"""How many wires of these ranks this process has made; they make them together."""

_TAGS = 2**16
"""How many tags of messages each wire has."""


@functools.cache
def _let_threads_go() -> None:
    """Make the end of this process wait a moment, in which threads of gloo let go of the tensors of past collectives.

    A thread of gloo needs the interpreter's lock for that, after the collective is over. If it gets the lock when the
    interpreter is already shutting down, CPython before 3.14 ends the thread, and C++ answers by `std::terminate`:
    the process aborts after its last line. `destroy_process_group` waits for the threads, but not for those of a group
    that something else holds, as FSDP2 and an optimizer's plan do.
    """
    atexit.register(time.sleep, 0.05)


@dataclass
class Counts:
    """What the last step did on this rank; `Plan` and routes say what it should have been.

    Attributes:
        orthogonalized: Matrices that this rank has orthogonalized.
        collectives: Collectives that this rank took part in.
        bytes_sent: Bytes to other ranks; flags and sums of `reduce` are not counted.
        bytes_received: Bytes from other ranks, likewise.
    """

    orthogonalized: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Swap:
    """One collective: what moves between all ranks for one bucket in one direction.

    Attributes:
        what: Names it in errors.
        send: What is sent, a segment for each rank in the order of the group; this rank's own is empty.
        receive: What is received, likewise.
        sent: Elements of the segments of ``send``.
        received: Of those of ``receive``.
    """

    what: str
    send: Tensor
    receive: Tensor
    sent: list[int]
    received: list[int]


@dataclass
class Transfer:
    """An exchange under way, which holds the memory that it reads and writes; ``works`` is empty when it is over."""

    what: str
    memory: tuple[Tensor, ...]
    works: list[dist.Work]


class Wire:
    """The collectives of one connected set of ranks.

    Attributes:
        ranks: The connected set.
        group: Its process group; None for one rank.
        rank, peers: This rank, and all of them in the order of the process group.
        counts: What the step under way, or the last one, has done.
        steps: How many steps have begun, for messages.
    """

    def __init__(self, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self.ranks, self.group = ranks, group
        self.rank = ranks[0] if group is None else dist.get_rank()
        self.peers = ranks if group is None else tuple(dist.get_process_group_ranks(group))
        self.counts = Counts()
        self.steps = 0
        self._key = f"waited/{ranks}/{_made[ranks]}"
        _made[ranks] += 1
        self._gloo = group is not None and "cpu:gloo" in dist.get_backend_config(group)
        if self._gloo:
            _let_threads_go()
        first = _TAGS * (_made[ranks] % 2**14)
        self._tags = itertools.cycle(range(first, first + _TAGS))

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str, *, counted: bool = True) -> Tensor:
        """Return the elementwise reduction of a small vector over all ranks, in place.

        Args:
            values: The vector.
            op: Such as the maximum.
            what: Names it in errors.
            counted: Whether it is part of a step.
        """
        if self.group is not None:
            with self._meeting(what):
                dist.all_reduce(values, op=op, group=self.group)
            self.counts.collectives += counted
        return values

    def begin_step(self) -> None:
        """Begin to count anew."""
        self.steps += 1
        self.counts = Counts()

    def agree(self, flags: Tensor) -> Tensor:
        """Begin a step: return the elementwise maximum of small integer flags over all ranks."""
        self.begin_step()
        return self.reduce(flags, dist.ReduceOp.MAX, "the agreement before the step")

    def swap(self, swap: Swap) -> Transfer:
        """Start to move elements between all ranks of the connected set; all of them call it.

        One ``all_to_all_single``, but on gloo, whose own lets one direction of a link wait for the other: there a
        message from each rank and to each rank that any elements come from and go to, all of them at once.
        """
        send, receive = swap.send, swap.receive
        with self._meeting(swap.what):
            if self._gloo and send.device.type == "cpu":
                works = self._messages(swap)
            else:
                works = [
                    dist.all_to_all_single(receive, send, swap.received, swap.sent, group=self.group, async_op=True)
                ]
        self.counts.collectives += 1
        self.counts.bytes_sent += send.numel() * send.element_size()
        self.counts.bytes_received += receive.numel() * receive.element_size()
        return Transfer(swap.what, (send, receive), [work for work in works if work is not None])

    def _messages(self, swap: Swap) -> list[dist.Work | None]:
        tag = next(self._tags)
        arriving, leaving = torch.split(swap.receive, swap.received), torch.split(swap.send, swap.sent)
        return [
            *(dist.irecv(p, group=self.group, group_src=r, tag=tag) for r, p in enumerate(arriving) if p.numel()),
            *(dist.isend(p, group=self.group, group_dst=r, tag=tag) for r, p in enumerate(leaving) if p.numel()),
        ]

    def finish(self, transfer: Transfer | None) -> None:
        """Wait for a transfer, if there is one."""
        if transfer is not None:
            with self._meeting(transfer.what):
                for work in transfer.works:
                    work.wait()
            transfer.works, transfer.memory = [], ()

    def _meeting(self, what: str) -> AbstractContextManager[None]:
        return meeting(self.ranks, self._key, f"step {self.steps}", what)
