"""Communicator: what arrives is what was sent, whatever is under way beside it, and nothing is sent for nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonmesh.comm.communicator import AllToAll, Communicator

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


def several_under_way() -> list[bool]:
    (communicator,) = wires(1)
    begun = [begin(communicator, seed) for seed in range(5)]
    right = []
    for transfer, receive, expected in reversed(begun):
        communicator.finish(transfer)
        right.append(torch.equal(receive, expected))
        assert not transfer.works, "what is over holds nothing"
        assert not transfer.memory, "what is over holds nothing"
    return right


def test_swaps_of_one_wire_may_be_under_way_together_and_end_in_any_order(workers) -> None:
    assert workers(RANKS).run(several_under_way) == [[True] * 5] * RANKS


def two_wires() -> list[bool]:
    pair = wires(2)
    order = (0, 1) if dist.get_rank() % 2 else (1, 0)
    begun = {number: begin(pair[number], 100 + number) for number in order}
    for number in (0, 1):
        pair[number].finish(begun[number][0])
    return [torch.equal(receive, expected) for _, receive, expected in begun.values()]


def test_two_wires_of_one_group_need_not_begin_in_one_order(workers) -> None:
    assert workers(RANKS).run(two_wires) == [[True] * 2] * RANKS


def messages() -> tuple[dict[str, int], int, int, int]:
    (communicator,) = wires(1)
    with Called() as called:
        transfer, receive, expected = begin(communicator, 7)
    communicator.finish(transfer)
    assert torch.equal(receive, expected)
    counts = communicator.counts
    return dict(called.names), counts.collectives, counts.bytes_sent, counts.bytes_received


def test_there_is_one_message_for_each_rank_that_elements_go_to_or_come_from(workers) -> None:
    for rank, (names, swaps, sent, received) in enumerate(workers(RANKS).run(messages)):
        leaving = [len(elements(7, rank, peer)) for peer in range(RANKS)]
        arriving = [len(elements(7, peer, rank)) for peer in range(RANKS)]
        assert names.get("send", 0) == sum(map(bool, leaving))
        assert names.get("recv_", 0) == sum(map(bool, arriving))
        assert set(names) <= {"send", "recv_"}
        assert (swaps, sent, received) == (1, 2 * sum(leaving), 2 * sum(arriving))
