"""Communicator: what arrives is what was sent, whatever is under way beside it, and nothing is sent for nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonmesh.comm.communicator import AllToAll, Communicator
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.communicator.Communicator",
    "comm.communicator.AllToAll",
)

RANKS = 4


class Called(TorchDispatchMode):
    """Counts the operators of c10d by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def elements(seed: int, of: int, to: int) -> Tensor:
    """What one rank sends to another: of a length that may be 0, and nothing to itself."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * of + to)
    count = int(torch.randint(0, 3, (), generator=generator)) * 40_000 if of != to else 0
    return torch.randint(0, 100, (count,), generator=generator).to(torch.bfloat16)


def wires(count: int) -> list[Communicator]:
    return [Communicator(tuple(range(RANKS)), dist.group.WORLD) for _ in range(count)]


def begin(communicator: Communicator, seed: int) -> tuple[Any, Tensor, Tensor]:
    """Start an all-to-all; with it come what arrives and what should."""
    me = dist.get_rank()
    leaving = [elements(seed, me, peer) for peer in range(RANKS)]
    expected = [elements(seed, peer, me) for peer in range(RANKS)]
    received = [len(part) for part in expected]
    receive = torch.full((sum(received),), -1.0, dtype=torch.bfloat16)
    sent = [len(part) for part in leaving]
    transfer = communicator.start(AllToAll(f"swap {seed}", torch.cat(leaving), receive, sent, received))
    return transfer, receive, torch.cat(expected)


@on_ranks(RANKS)
def test_swaps_of_one_wire_may_be_under_way_together_and_end_in_any_order() -> None:
    (communicator,) = wires(1)
    begun = [begin(communicator, seed) for seed in range(5)]
    for transfer, receive, expected in reversed(begun):
        communicator.finish(transfer)
        assert torch.equal(receive, expected)
        assert not transfer.works, "what is over holds nothing"
        assert not transfer.memory, "what is over holds nothing"


@on_ranks(RANKS)
def test_two_wires_of_one_group_need_not_begin_in_one_order() -> None:
    pair = wires(2)
    order = (0, 1) if dist.get_rank() % 2 else (1, 0)
    begun = {number: begin(pair[number], 100 + number) for number in order}
    for number in (0, 1):
        pair[number].finish(begun[number][0])
    assert all(torch.equal(receive, expected) for _, receive, expected in begun.values())


@on_ranks(RANKS)
def test_there_is_one_message_for_each_rank_that_elements_go_to_or_come_from() -> None:
    (communicator,), rank = wires(1), dist.get_rank()
    with Called() as called:
        transfer, receive, expected = begin(communicator, 7)
    communicator.finish(transfer)
    assert torch.equal(receive, expected)
    leaving = [len(elements(7, rank, peer)) for peer in range(RANKS)]
    arriving = [len(elements(7, peer, rank)) for peer in range(RANKS)]
    assert called.names["send"] == sum(map(bool, leaving))
    assert called.names["recv_"] == sum(map(bool, arriving))
    assert set(called.names) <= {"send", "recv_"}
    counts = communicator.counts
    assert (counts.collectives, counts.bytes_sent, counts.bytes_received) == (1, 2 * sum(leaving), 2 * sum(arriving))
