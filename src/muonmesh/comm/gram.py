"""The Gram exchange: matrices that are cut along their long dim stay where they are, and X Xᵀ is added up.

What is added up, and why that is another result than an owner's, is told in `muonmesh.layout.gram`. Each rank adds up a
share of the numbers of all ranks, always in the order of the layout, and gives the sum to the others: as many bytes as
an all-reduce sends, and the same bits on every replica and whatever else is in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import group_of
from muonmesh.comm.views import memory_of, view_in_matrix
from muonmesh.comm.wire import Wire
from muonmesh.comm.work import Ends, Work
from muonmesh.layout import Plan
from muonmesh.layout.gram import GramBucket, aligned, gram_buckets, slab
from muonmesh.layout.routes import Leg
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.numerics.slabs import added, divide, gram_of, multiply, norms_of


@dataclass(frozen=True)
class _Slab:
    """The columns of a matrix that this rank stores.

    Attributes:
        assignment: The matrix.
        segments: How often its Gram matrix is summed; between two sums there are one or two steps.
        x: Two memories (rows, width). Each segment reads the columns from one and writes what becomes of them to the
            other.
        gram: X Xᵀ, (rows, rows): first that of this rank's columns, then the sum over the ranks.
    """

    assignment: int
    segments: int
    x: tuple[Tensor, Tensor]
    gram: Tensor


@dataclass(frozen=True)
class _Stage:
    """One bucket as this rank sees it, with memory for it.

    Attributes:
        what: Names it in errors.
        bucket: Which bucket of the plan it is.
        group: The ranks that hold one copy.
        order: The places of these ranks in the group, in the order of the layout.
        stored: Assignments of which this rank stores something.
        slabs: In the order of the bucket.
        reads: The legs of ``stored``, each with its place in the slab where the steps begin.
        writes: The same legs, each with its place in the memory in which the steps leave the slab.
        whole: The Gram matrices one after the other, and what pads the last share of them.
        parts: As large as ``whole``. First the share of the Gram matrices that this rank adds up, as each rank has it;
            then the sum of that share, once for each rank that it is sent to.
    """

    what: str
    bucket: GramBucket
    group: dist.ProcessGroup
    order: Tensor
    stored: tuple[int, ...]
    slabs: tuple[_Slab, ...]
    reads: Ends
    writes: Ends
    whole: Tensor
    parts: Tensor


class GramExchange:
    """Takes the matrices of a plan that have no owner through a step, in fp32 or, if asked for, fp64.

    Two buckets are worked on at a time: while one travels, the other is computed.

    Args:
        plan: The plan of these matrices.
        wire: To the other ranks.
        rank: This one.
        dtype: Of the wire of an owner exchange; here it is at least fp32.
        device: Where the slabs are.
        meshes: See `Exchange`. Process groups are made here, so all ranks of the plan make this together.
    """

    def __init__(
        self,
        plan: Plan,
        wire: Wire,
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        meshes: Callable[[int], Sequence[dist.ProcessGroup]],
    ) -> None:
        self._plan, self._wire, self._rank, self._device = plan, wire, rank, device
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._buckets = gram_buckets(plan, rank)
        self.memory: dict[str, Tensor] = {}  # by role; taken at the first step and kept, on a CPU (`Schedule` says why)
        self._kept: dict[int, _Stage] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for bucket in self._buckets:  # in the same order on all ranks, so none waits for one that waits for it
            if bucket.ranks not in self._groups:
                group = group_of(bucket.ranks, meshes(plan.assignments[bucket.numbers[0]].parameter))
                assert group is not None  # `fits` takes matrices that several ranks share
                self._groups[bucket.ranks] = group

    def run(self, work: Work, meanwhile: Callable[[], None]) -> None:
        """Take every bucket once; ``meanwhile`` is called while the first norms travel."""
        for pair in self._pairs:
            # The two stages of a pair take turns, and a turn ends when the stage has sent something. All ranks take
            # them in the order of the plan, so two ranks that have both buckets send alike,
            # and neither waits for what the other would only send later.
            walks = [self._walk(self._stage(draft), work) for draft in pair]
            while walks:
                walks = [walk for walk in walks if next(walk, False)]
                meanwhile()
                meanwhile = _nothing
        meanwhile()

    @cached_property
    def _pairs(self) -> list[list[_Draft]]:
        """The drafts in pairs that follow each other in the plan; takes the memory that is kept."""
        pairs: dict[int, list[_Draft]] = {}
        numels: dict[str, int] = {}
        for draft in (_Draft(self._plan, bucket, self._rank) for bucket in self._buckets):
            pairs.setdefault(draft.bucket.turn // 2, []).append(draft)
            for role, numel in draft.numels().items():
                name = f"{role}.{draft.bucket.turn % 2}"
                numels[name] = max(numel, numels.get(name, 0))
        if self._device.type == "cpu":
            self.memory = memory_of(numels, self._dtype, self._device)
        return list(pairs.values())

    def _stage(self, draft: _Draft) -> _Stage:
        """Return a stage with memory for it."""
        turn, group = draft.bucket.turn, self._groups[draft.bucket.ranks]
        if not self.memory:
            return draft.stage(group, memory_of(draft.numels(), self._dtype, self._device))
        if turn not in self._kept:
            self._kept[turn] = draft.stage(group, {role: self.memory[f"{role}.{turn % 2}"] for role in draft.numels()})
        return self._kept[turn]

    def _walk(self, stage: _Stage, work: Work) -> Iterator[bool]:
        """Orthogonalise the matrices of one bucket; yields True whenever something is under way."""
        work.prepare(stage.stored)
        for one in stage.slabs:
            one.x[0].zero_()  # a shard may lack what a matrix has
        work.read(stage.reads)
        norms = yield from self._norms(stage)
        for one, norm in zip(stage.slabs, norms.unbind(), strict=True):
            divide(one.x[0], norm)
        for segment in range(stage.slabs[0].segments):
            active = stage.slabs[: stage.bucket.active(segment)]
            for one in active:
                gram_of(one.x[segment % 2], one.gram)
            yield from self._add_up(stage, segment)
            for one in active:
                x, out = one.x[segment % 2], one.x[1 - segment % 2]
                if x.numel():
                    multiply(work.factor(one.assignment, segment, one.gram), x, out)
        work.write(stage.writes)

    def _norms(self, stage: _Stage) -> Generator[bool, None, Tensor]:
        """Return the norms of the matrices, fp64 (n,)."""
        squares = sums_of_squares([one.x[0] for one in stage.slabs])
        sent = squares.repeat(len(stage.order), 1)
        received = torch.empty_like(sent)
        transfer = self._wire.swap_parts(f"the norms of {stage.what}", sent, received, stage.group, stage.bucket.ranks)
        yield True
        self._wire.finish(transfer)
        return norms_of(added(received[stage.order]))

    def _add_up(self, stage: _Stage, segment: int) -> Iterator[bool]:
        """Replace the Gram matrices by their sums over the ranks: each rank adds up its share, and sends it to all."""
        share, ranks = stage.bucket.share(segment), len(stage.order)
        whole, parts = stage.whole[: ranks * share], stage.parts[: ranks * share]
        transfer = self._wire.swap_parts(
            f"{stage.what}, segment {segment}", whole, parts, stage.group, stage.bucket.ranks
        )
        yield True
        self._wire.finish(transfer)
        of_each = parts.view(ranks, share)
        of_each.copy_(added(of_each[stage.order]))  # to each rank the same
        transfer = self._wire.swap_parts(
            f"{stage.what}, segment {segment}, summed", parts, whole, stage.group, stage.bucket.ranks
        )
        yield True
        self._wire.finish(transfer)


class _Draft:
    """A stage before there is memory for it."""

    def __init__(self, plan: Plan, bucket: GramBucket, rank: int) -> None:
        self.bucket = bucket
        self._legs: list[tuple[Leg, ...]] = []
        self._widths: list[int] = []
        for number in bucket.numbers:
            assignment = plan.assignments[number]
            found = slab(plan.parameters[assignment.parameter].target, rank, assignment.matrix)
            assert found is not None  # `fits` has seen to it
            width, parts = found
            self._widths.append(width)
            self._legs.append(tuple(Leg(number, assignment.parameter, piece, 0) for piece in parts))

    def numels(self) -> dict[str, int]:
        """Return how much memory the stage needs for each role."""
        columns = sum(aligned(rows * width) for rows, width in zip(self.bucket.rows, self._widths, strict=True))
        squares = len(self.bucket.ranks) * self.bucket.share(0)
        return {"x": columns, "next x": columns, "whole": squares, "parts": squares}

    def stage(self, group: dist.ProcessGroup, memory: Mapping[str, Tensor]) -> _Stage:
        """Return the stage with its views of the memory."""
        mine = {role: memory[role][:numel] for role, numel in self.numels().items()}
        shapes = list(zip(self.bucket.rows, self._widths, strict=True))
        x, after = (_laid_out(mine[role], shapes) for role in ("x", "next x"))
        grams = _laid_out(mine["whole"], [(rows, rows) for rows in self.bucket.rows])
        slabs = tuple(
            _Slab(number, segments, (one, other), gram)
            for number, segments, one, other, gram in zip(
                self.bucket.numbers, self.bucket.segments, x, after, grams, strict=True
            )
        )
        peers = dist.get_process_group_ranks(group)
        return _Stage(
            f"sum {self.bucket.turn} of Gram matrices",
            self.bucket,
            group,
            upload([peers.index(rank) for rank in self.bucket.ranks], dtype=torch.int64, device=mine["x"].device),
            tuple(number for number, legs in zip(self.bucket.numbers, self._legs, strict=True) if legs),
            slabs,
            self._ends(slabs, lambda one: one.x[0]),
            self._ends(slabs, lambda one: one.x[one.segments % 2]),
            mine["whole"],
            mine["parts"],
        )

    def _ends(self, slabs: Sequence[_Slab], which: Callable[[_Slab], Tensor]) -> Ends:
        return tuple(
            (leg, view_in_matrix(leg.piece, which(one)))
            for one, legs in zip(slabs, self._legs, strict=True)
            for leg in legs
        )


def _laid_out(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return matrices that lie one after the other, each aligned."""
    found, start = [], 0
    for rows, cols in shapes:
        found.append(memory[start : start + rows * cols].view(rows, cols))
        start += aligned(rows * cols)
    return found


def _nothing() -> None:
    return
