"""Schedule: what one rank does each step, worked out once from the plan and the rank.

Which leg is read into which memory, what is copied where, what is orthogonalised and what is written from where is the
same at every step. So it is worked out when the first step begins and kept as lists of legs and views, and a step is a
walk over these lists.

The memory is kept too: by role, such as "the send buffer of a gather", twice, for buckets that take turns, each time as
large as the largest of these buckets needs. What lies in the user's tensors has no views here, since their memory may
change from step to step; the legs say where in it (`muonmesh.layout.Piece`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.comm.views import memory_of, place
from muonmesh.comm.work import Ends, Local
from muonmesh.layout import Plan, Routes
from muonmesh.layout.plan import Leg
from muonmesh.layout.region import row_major

Copies = tuple[tuple[Tensor, Tensor], ...]
"""What is copied, (to, of), both of one shape."""


@dataclass(frozen=True)
class Way:
    """What moves for one bucket in one direction.

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


@dataclass(frozen=True)
class Stage:
    """One bucket as this rank sees it, in the order in which it happens.

    Attributes:
        moving: The assignments of the bucket of which something moves.
        summed: Those of them over which sums are taken before they are written, see `Plan.summed`.
        reads: What this rank stores of them, and where it goes: into the send buffer, or straight into its matrices.
        gather: The way to the owners; None if nothing travels on it.
        arriving: From the receive buffer into the matrices.
        batches: What this rank orthogonalises: see `Work.orthogonalize`.
        owned: How many matrices that is.
        leaving: From the results into the send buffer.
        scatter: The way back; None likewise.
        local: Matrices that are this rank's alone, those of one shape and setting together; computed while results
            travel.
        staying: What is written straight from the results.
        arrived: What is written from the receive buffer.
    """

    moving: tuple[int, ...]
    summed: Mapping[int, int]
    reads: Ends
    gather: Way | None
    arriving: Copies
    batches: tuple[tuple[Tensor, Tensor, tuple[int, ...]], ...]
    owned: int
    leaving: Copies
    scatter: Way | None
    local: tuple[tuple[Local, ...], ...]
    staying: Ends
    arrived: Ends


@dataclass(frozen=True)
class Schedule:
    """What one rank does each step for the matrices that have owners.

    Attributes:
        stages: One for each bucket of which something moves, the local matrices of other buckets among them; or one
            with local matrices alone.
        memory: What the stages work in, by role; kept from step to step.
    """

    stages: tuple[Stage, ...]
    memory: Mapping[str, Tensor]

    @staticmethod
    def of(plan: Plan, rank: int, peers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Schedule:
        """Work it out.

        Args:
            plan: Whose.
            rank: This one.
            peers: All ranks of the plan, in the order of their process group.
            dtype: Of wire and matrices.
            device: Where the memory is.
        """
        drafts = _drafts(plan, rank, peers)
        numels: dict[str, int] = {}
        for number, draft in enumerate(drafts):
            for role, numel in draft.numels().items():
                slot = f"{role}.{number % 2}"
                numels[slot] = max(numel, numels.get(slot, 0))
        memory = memory_of(numels, dtype, device)
        return Schedule(tuple(draft.stage(number, memory) for number, draft in enumerate(drafts)), memory)

    @property
    def local_count(self) -> int:
        """How many matrices are this rank's alone."""
        return sum(len(alike) for stage in self.stages for alike in stage.local)


# ------------------------------------------------------------------ how it is worked out


@dataclass(frozen=True, slots=True)
class _Copy:
    """One strided copy between an assembled matrix and a wire buffer."""

    shape: tuple[int, ...]
    matrix_start: int
    matrix_strides: tuple[int, ...]
    wire_start: int
    wire_strides: tuple[int, ...]


class _Draft:
    """A stage before there is memory for it."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        peers: Sequence[int],
        moving: tuple[int, ...],
        local: tuple[tuple[Local, ...], ...],
        ways: tuple[Routes, Routes],
        moves: tuple[bool, bool],
    ) -> None:
        self._rank, self._peers = rank, peers
        self._moving, self._local, self._ways, self._moves = moving, local, ways, moves
        self._summed = plan.summed(moving)
        owned = [number for number in moving if plan.assignments[number].owner == rank]
        self._batches = _alike(plan, owned)
        self._shapes = [plan.assignments[batch[0]].matrix.shape for batch in self._batches]
        gather, scatter = ways
        self._segments = {
            "gather.send": self._sizes(gather.held),
            "gather.receive": self._sizes(gather.owned),
            "scatter.send": self._sizes(scatter.owned),
            "scatter.receive": self._sizes(scatter.held),
        }

    def _sizes(self, legs: Mapping[int, Sequence[Leg]]) -> list[int]:
        """Return the elements of each rank's segment of a wire buffer."""
        return [
            0 if peer == self._rank or peer not in legs else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self._peers
        ]

    def numels(self) -> dict[str, int]:
        """Return how much memory the stage needs for each role."""
        matrices = sum(len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True))
        wires = {role: sum(sizes) for role, sizes in self._segments.items() if self._moves[role.startswith("scatter")]}
        return {"matrices": matrices, "results": matrices} | wires

    def stage(self, number: int, memory: Mapping[str, Tensor]) -> Stage:
        """Return the stage with its views of the memory."""
        mine = {role: memory[f"{role}.{number % 2}"] for role in self.numels()}
        gather, scatter = self._ways
        matrices, results = self._assembled(mine["matrices"]), self._assembled(mine["results"])
        of_matrix, of_result = _by_assignment(self._batches, matrices), _by_assignment(self._batches, results)
        to_owners, back = self._way("gather", number, mine), self._way("scatter", number, mine)
        reads = [(leg, place(leg.piece, of_matrix[leg.assignment])) for leg in gather.held.get(self._rank, ())]
        staying = [(leg, place(leg.piece, of_result[leg.assignment])) for leg in scatter.held.get(self._rank, ())]
        arrived: Ends = ()
        arriving: Copies = ()
        leaving: Copies = ()
        if to_owners is not None:
            reads += self._on_wire(gather.held, to_owners.send, "gather.send")
            arriving = self._copies(gather.owned, of_matrix, to_owners.receive, "gather.receive")
        if back is not None:
            arrived = tuple(self._on_wire(scatter.held, back.receive, "scatter.receive"))
            pairs = self._copies(scatter.owned, of_result, back.send, "scatter.send")
            leaving = tuple((wire, matrix) for matrix, wire in pairs)
        return Stage(
            self._moving,
            self._summed,
            tuple(reads),
            to_owners,
            arriving,
            tuple((x, out, some) for some, x, out in zip(self._batches, matrices, results, strict=True)),
            len(of_matrix),
            leaving,
            back,
            self._local,
            tuple(staying),
            arrived,
        )

    def _assembled(self, memory: Tensor) -> list[Tensor]:
        """Return the batches, each (b, rows, cols), one after the other in memory."""
        sizes = [len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True)]
        parts = torch.split(memory[: sum(sizes)], sizes)
        return [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _way(self, name: str, number: int, memory: Mapping[str, Tensor]) -> Way | None:
        if not self._moves[name == "scatter"]:
            return None
        sent, received = self._segments[f"{name}.send"], self._segments[f"{name}.receive"]
        send, receive = memory[f"{name}.send"][: sum(sent)], memory[f"{name}.receive"][: sum(received)]
        return Way(f"the {name} of bucket {number}", send, receive, sent, received)

    def _starts(self, role: str) -> dict[int, int]:
        """Return where the segment of each rank begins."""
        return dict(zip(self._peers, itertools.accumulate(self._segments[role], initial=0), strict=False))

    def _on_wire(self, legs: Mapping[int, Sequence[Leg]], buffer: Tensor, role: str) -> list[tuple[Leg, Tensor]]:
        """Return the legs that leave or reach this rank's storage, with their elements in a wire buffer."""
        starts = self._starts(role)
        return [
            (leg, buffer[starts[peer] + leg.start :][: leg.piece.numel].view(leg.piece.shape))
            for peer, some in legs.items()
            if peer != self._rank
            for leg in some
        ]

    def _copies(
        self, legs: Mapping[int, Sequence[Leg]], matrices: Mapping[int, Tensor], buffer: Tensor, role: str
    ) -> Copies:
        """Return the elements of matrices that travel, each time in the matrix and in a wire buffer."""
        starts = self._starts(role)
        found: dict[int, list[_Copy]] = {}
        for peer in self._peers:
            for leg in legs.get(peer, ()) if peer != self._rank else ():
                piece = leg.piece
                copy = _Copy(
                    piece.shape,
                    piece.matrix_start,
                    piece.matrix_strides,
                    starts[peer] + leg.start,
                    row_major(piece.shape),
                )
                found.setdefault(leg.assignment, []).append(copy)
        pairs = []
        for number, some in found.items():
            matrix = matrices[number]
            for copy in _joined(some):
                start = matrix.storage_offset() + copy.matrix_start
                on_wire = buffer.as_strided(copy.shape, copy.wire_strides, copy.wire_start)
                pairs.append((matrix.as_strided(copy.shape, copy.matrix_strides, start), on_wire))
        return tuple(pairs)


def _joined(copies: Sequence[_Copy]) -> list[_Copy]:
    """Return the same copies as fewer: equal ones at even distances in both memories are one with another dim.

    So the rows that all ranks of FSDP hold of a matrix arrive in one copy and not in one for each rank.
    """
    joined: list[_Copy] = []
    first = 0
    while first < len(copies):
        one, end = copies[first], first + 1
        if end < len(copies):
            matrix_step = copies[end].matrix_start - one.matrix_start
            wire_step = copies[end].wire_start - one.wire_start
            while (
                end < len(copies)
                and (copies[end].shape, copies[end].matrix_strides) == (one.shape, one.matrix_strides)
                and copies[end].matrix_start == one.matrix_start + (end - first) * matrix_step
                and copies[end].wire_start == one.wire_start + (end - first) * wire_step
                and matrix_step >= 0  # 0 where each replica is sent the same; as_strided knows no steps back
            ):
                end += 1
        if end == first + 1:
            joined.append(one)
        else:
            shape = (end - first, *one.shape)
            strides = (matrix_step, *one.matrix_strides), (wire_step, *one.wire_strides)
            joined.append(_Copy(shape, one.matrix_start, strides[0], one.wire_start, strides[1]))
        first = end
    return joined


def _drafts(plan: Plan, rank: int, peers: Sequence[int]) -> list[_Draft]:
    """Return a draft for each bucket that moves; local matrices wait for the next of them, or for one of their own."""
    drafts, waiting = list[_Draft](), list[Local]()

    def taken() -> tuple[tuple[Local, ...], ...]:
        of = {local.assignment: local for local in waiting}
        waiting.clear()
        return tuple(tuple(of[number] for number in alike) for alike in _alike(plan, list(of)))

    for number, bucket in enumerate(plan.buckets):
        gather, scatter = (plan.routes(number, rank, gather=there) for there in (True, False))
        staying = {index for index in bucket if not plan.moves(index)}
        reads, writes = (_legs_by_assignment(routes.held.get(rank, ())) for routes in (gather, scatter))
        waiting += [Local(i, reads[i], writes[i]) for i in bucket if i in staying and i in reads]
        if len(staying) < len(bucket):
            moving = tuple(index for index in bucket if index not in staying)
            ways = _without(gather, staying), _without(scatter, staying)
            moves = plan.gathers(number), plan.scatters(number)
            drafts.append(_Draft(plan, rank, peers, moving, taken(), ways, moves))
    if waiting:
        nothing = Routes({}, {})
        drafts.append(_Draft(plan, rank, peers, (), taken(), (nothing, nothing), (False, False)))
    return drafts


def _alike(plan: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return assignments sorted into those of one shape and setting, which may be orthogonalised together."""
    groups: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for number in numbers:
        assignment = plan.assignments[number]
        settings = plan.parameters[assignment.parameter].settings
        groups.setdefault((settings, assignment.matrix.shape), []).append(number)
    return [tuple(some) for some in groups.values()]


def _by_assignment(batches: Sequence[tuple[int, ...]], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
    return {
        number: matrix
        for batch, buffer in zip(batches, buffers, strict=True)
        for number, matrix in zip(batch, buffer.unbind(), strict=True)
    }


def _legs_by_assignment(legs: Sequence[Leg]) -> dict[int, tuple[Leg, ...]]:
    found: dict[int, list[Leg]] = {}
    for leg in legs:
        found.setdefault(leg.assignment, []).append(leg)
    return {assignment: tuple(some) for assignment, some in found.items()}


def _without(routes: Routes, assignments: set[int]) -> Routes:
    held, owned = (
        {peer: tuple(leg for leg in legs if leg.assignment not in assignments) for peer, legs in ends.items()}
        for ends in (routes.held, routes.owned)
    )
    return Routes({p: legs for p, legs in held.items() if legs}, {p: legs for p, legs in owned.items() if legs})
