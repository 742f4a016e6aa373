"""CompanionExchange: brings the numbers that rules keep by row, column or matrix to the owners, and back after a step.

These numbers are few beside the elements of the matrices, so all of them travel at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.views import view_in_matrix
from muonmesh.comm.wire import Wire
from muonmesh.comm.work import CompanionState
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.layout.routes import Leg, Routes


class CompanionExchange:
    """Gathers the numbers of each matrix to its owner, and scatters them to all ranks that store them.

    One `Wire.swap` each way with unequal splits, unless nothing leaves its rank.

    Args:
        carried: The plan by which these numbers travel.
        wire: To the other ranks.
        rank: This one.
        peers: All ranks, in the order of their process group.
        dtype: Dtype of all that travels.
        device: Where it is.
    """

    def __init__(
        self,
        carried: CompanionPlan,
        wire: Wire,
        *,
        rank: int,
        peers: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._carried = carried
        self._wire = wire
        self._rank, self._peers = rank, peers
        self._dtype, self._device = dtype, device

    @cached_property
    def _routes(self) -> tuple[Routes, Routes]:
        """The routes to the owners, and those back."""
        plan = self._carried.plan
        return plan.routes(0, self._rank, gather=True), plan.routes(0, self._rank, gather=False)

    @cached_property
    def _moves(self) -> tuple[bool, bool]:
        """Whether anything travels to the owners, and back."""
        return self._carried.plan.gathers(0), self._carried.plan.scatters(0)

    @cached_property
    def _owned(self) -> dict[int, Tensor]:
        """The numbers of each matrix that this rank owns, by their assignment; zeros until something arrives."""
        assignments = self._carried.plan.assignments
        return {
            number: torch.zeros(assignment.matrix.numel, dtype=self._dtype, device=self._device)
            for number, assignment in enumerate(assignments)
            if assignment.owner == self._rank
        }

    def gather(self, state: CompanionState) -> None:
        """Bring what is kept to the owners, and give it to their state; all ranks call it."""
        to_owners, _ = self._routes
        stored, owned = to_owners.stored, to_owners.assembled
        for leg in stored.get(self._rank, ()):
            self._read(state, leg, view_in_matrix(leg.piece, self._owned[leg.assignment]))
        if self._moves[0]:
            send, sent = self._segments(stored)
            for leg, view in self._travelling(stored, send, sent):
                self._read(state, leg, view)
            receive, received = self._segments(owned)
            transfer = self._wire.swap("the gather of what rules keep", send, receive, sent=sent, received=received)
            self._wire.finish(transfer)
            for leg, view in self._travelling(owned, receive, received):
                view_in_matrix(leg.piece, self._owned[leg.assignment]).copy_(view)
        kept: dict[int, dict[str, Tensor]] = {}
        for number, numbers in self._owned.items():
            assignment, companion = self._carried.of[number]
            kept.setdefault(assignment, {})[companion.key] = numbers
        state.take(kept)

    def scatter(self, state: CompanionState) -> None:
        """Bring what the owners have made of it to all ranks that store it; all ranks call it."""
        _, back = self._routes
        stored, owned = back.stored, back.assembled
        for leg in stored.get(self._rank, ()):
            self._write(state, leg, view_in_matrix(leg.piece, self._owned[leg.assignment]))
        if self._moves[1]:
            send, sent = self._segments(owned)
            for leg, view in self._travelling(owned, send, sent):
                view.copy_(view_in_matrix(leg.piece, self._owned[leg.assignment]))
            receive, received = self._segments(stored)
            transfer = self._wire.swap("the scatter of what rules keep", send, receive, sent=sent, received=received)
            self._wire.finish(transfer)
            for leg, view in self._travelling(stored, receive, received):
                self._write(state, leg, view)

    def _read(self, state: CompanionState, leg: Leg, into: Tensor) -> None:
        assignment, companion = self._carried.of[leg.assignment]
        state.read(assignment, companion.key, leg.piece, into)

    def _write(self, state: CompanionState, leg: Leg, numbers: Tensor) -> None:
        assignment, companion = self._carried.of[leg.assignment]
        state.write(assignment, companion.key, leg.piece, numbers)

    def _segments(self, legs: Mapping[int, Sequence[Leg]]) -> tuple[Tensor, list[int]]:
        """Return a buffer for what travels, and the elements of each rank's segment of it; this rank's is empty."""
        sizes = [
            0 if peer == self._rank or peer not in legs else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self._peers
        ]
        return torch.empty(sum(sizes), dtype=self._dtype, device=self._device), sizes

    def _travelling(
        self, legs: Mapping[int, Sequence[Leg]], buffer: Tensor, sizes: Sequence[int]
    ) -> list[tuple[Leg, Tensor]]:
        """Return the legs that leave or reach this rank, each with its elements of a buffer."""
        segments = dict(zip(self._peers, torch.split(buffer, list(sizes)), strict=True))
        return [
            (leg, segments[peer][leg.start :][: leg.piece.numel].view(leg.piece.shape))
            for peer, some in legs.items()
            if peer != self._rank
            for leg in some
        ]
