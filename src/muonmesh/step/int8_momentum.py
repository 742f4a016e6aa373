"""Momentum in int8, with one fp32 scale for every 256 elements that follow each other in a line of a matrix (a block).

`Blocks` are those of a plan, `Momentum` has the codes and scales of one tensor, and `Int8Codec` lets a step fold into
them.

The scale is the largest magnitude of the *whole* block. Where ranks hold parts of a block, they agree on it in one
reduction by maximum before they write. The maximum does not depend on the order of the ranks, so codes and scales are
the same in every layout of a matrix (docs/decisions/0017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_storage
from muonmesh.errors import StateError, explain_error
from muonmesh.layout import Piece, Plan
from muonmesh.layout.line_segments import BLOCK, LineSegment, grid_of, line_segments_of, shares_blocks
from muonmesh.layout.piece_table import PieceTable
from muonmesh.numerics import blockwise
from muonmesh.numerics.rules import parts
from muonmesh.step.parameter_steps import MatrixStep, ParameterStep, StateCodec

SCALE = "_scale"
"""Suffix of a state key: the scales of the codes under ``key`` are stored under ``key + SCALE``."""


class _MatrixBlocks(NamedTuple):
    """The blocks of one matrix whose scales this rank stores: ``blocks`` blocks in each of ``lines`` lines.

    Attributes:
        line, block: The first line, and the first block in this line.
        start: The place of the first scale of these blocks among the scales of the tensor.
    """

    line: int
    block: int
    lines: int
    blocks: int
    start: int

    def of(self, scales: Tensor, segment: LineSegment) -> Tensor:
        """Return a view of the scales that belong to the blocks of a segment."""
        grid = scales[self.start : self.start + self.lines * self.blocks].view(self.lines, self.blocks)
        line, block = segment.line - self.line, segment.blocks.start - self.block
        return grid[line : line + segment.lines, block : block + len(segment.blocks)]


@dataclass(frozen=True)
class Blocks:
    """The blocks of int8 momentum in a plan, and the places of their scales on this rank.

    Attributes:
        plan: The plan that has the matrices.
        holdings: For each tensor its matrices by number, in order, with the pieces whose momentum this rank stores.
        device: The device of the momentum.
    """

    plan: Plan
    holdings: Mapping[Tensor, Mapping[int, Sequence[Piece]]]
    device: torch.device

    @cached_property
    def codes(self) -> blockwise.Codes:
        """The table of the values that int8 codes stand for, on the device."""
        return blockwise.Codes.on(self.device)

    @cached_property
    def shared(self) -> dict[int, _MatrixBlocks]:
        """The matrices with blocks that span several pieces, and the place of *all* their blocks in one vector.

        The result is the same on every rank. It is empty if every rank stores whole blocks only.
        """
        grids, start = dict[int, _MatrixBlocks](), 0
        for number, assignment in enumerate(self.plan.assignments):
            if shares_blocks(self.plan.parameters[assignment.parameter].momentum_storage, assignment.matrix):
                lines, length = grid_of(assignment.matrix)
                blocks = -(-length // BLOCK)
                grids[number] = _MatrixBlocks(0, 0, lines, blocks, start)
                start += lines * blocks
        return grids

    @cached_property
    def count(self) -> int:
        """The number of blocks whose scales the ranks agree on in a step."""
        return sum(grid.lines * grid.blocks for grid in self.shared.values())

    def agree(self, communicator: Communicator, measure: Callable[[Tensor], None] = lambda _: None) -> Tensor | None:
        """Return the largest momentum of each block that several pieces share, over all ranks, which all call this.

        Args:
            communicator: Sends to the other ranks.
            measure: Writes what this rank has (`Momentum.measure`) into int32 (blocks,), zeros before.

        Returns:
            None if there are no such blocks.
        """
        if not self.count:
            return None
        largest = torch.zeros(self.count, dtype=torch.int32, device=self.device)
        measure(largest)
        communicator.reduce(largest, dist.ReduceOp.MAX, "the agreement on blocks of momentum")
        return largest

    @cached_property
    def _grids_and_sizes(self) -> tuple[dict[int, _MatrixBlocks], dict[Tensor, int]]:
        """The grid of each matrix of which this rank stores a part, and the number of scales of each tensor here."""
        grids, sizes = dict[int, _MatrixBlocks](), dict[Tensor, int]()
        for tensor, matrices in self.holdings.items():
            start = 0
            for number, pieces in matrices.items():
                segments = [segment for piece in pieces for segment in self.segments(number, piece)]
                if segments:
                    line = min(segment.line for segment in segments)
                    block = min(segment.blocks.start for segment in segments)
                    lines = max(segment.line + segment.lines for segment in segments) - line
                    blocks = max(segment.blocks.stop for segment in segments) - block
                    grids[number] = _MatrixBlocks(line, block, lines, blocks, start)
                    start += lines * blocks
            sizes[tensor] = start
        return grids, sizes

    def grid(self, number: int) -> _MatrixBlocks:
        """Return the grid of blocks of a matrix of which this rank stores a part."""
        return self._grids_and_sizes[0][number]

    def size(self, tensor: Tensor) -> int:
        """Return how many scales a tensor has on this rank."""
        return self._grids_and_sizes[1][tensor]

    def segments(self, number: int, piece: Piece) -> tuple[LineSegment, ...]:
        """Return the segments of a piece of a matrix."""
        return line_segments_of(self.plan.assignments[number].matrix, piece)

    def check(self, wrote: Blocks | None, name: str, tensor: Tensor, state: Mapping[str, Any]) -> None:
        """Check that the stored codes of a tensor fit these blocks, before the codes are read or written.

        Args:
            wrote: The blocks of the plan under which codes were last written; None if no step has written any.
            name: The name of the parameter, for messages.
            tensor: The parameter.
            state: The state of the parameter.

        Raises:
            StateError: the parameter was resharded, or split differently, after the codes were written.
        """
        for key in [key for key in state if key + SCALE in state and local_of(state[key]).dtype == torch.int8]:
            count, size = state[key + SCALE].numel(), self.size(tensor)
            other = wrote is not None and wrote is not self and wrote._form(tensor) not in (None, self._form(tensor))
            if other or count != size:
                problem = f"{count} scales of {key}" + (
                    ", of the matrices that it was split into before" if other else ""
                )
                needed = f"{size}, one for each block that this rank stores"
                write = "Reshard or split a parameter otherwise after optimizer.state_dict(), or load the state again, "
                write += "since both keep the momentum in fp32 until the next step"
                raise StateError(explain_error(name, problem, needed, write))

    def _form(self, tensor: Tensor) -> object:
        """Return the grids and segments that map codes of a tensor to scales; None for a tensor outside the plan."""
        if tensor not in self.holdings:
            return None
        pieces = [(number, piece) for number, pieces_there in self.holdings[tensor].items() for piece in pieces_there]
        return [(self.grid(number), self.segments(number, piece)) for number, piece in pieces if piece.numel]

    def wide(self, name: str, tensor: Tensor, key: str, state: Mapping[str, Any]) -> Tensor:
        """Return the state of a tensor under a key, decoded to fp32 if it is int8, in the shape of the local state.

        Raises:
            StateError: the number of scales does not fit the blocks that this rank stores.
        """
        stored = local_of(state[key])
        if stored.dtype != torch.int8:
            return stored
        self.check(None, name, tensor, state)
        momentum = Momentum.of(self, tensor, key, stored, dict(state))
        decoded = torch.zeros(stored.shape, dtype=torch.float32, device=stored.device)
        for number, pieces in self.holdings[tensor].items():
            for piece in pieces:
                view_in_storage(decoded, piece).copy_(momentum.read(number, piece))
        return decoded


@dataclass
class Momentum:
    """One int8 momentum tensor of one parameter on this rank: its codes and its scales.

    Attributes:
        blocks: The blocks of the plan.
        codes: int8, contiguous, in the shape of the local state.
        scales: fp32 (`Blocks.size`,).
        loaded: Loaded momentum that this step encodes, in the same shape, fp32 or another dtype; None if there is none.
        encoded: The numbers of the matrices whose loaded momentum has been encoded.
    """

    blocks: Blocks
    codes: Tensor
    scales: Tensor
    loaded: Tensor | None = None
    encoded: set[int] = field(default_factory=set)

    @staticmethod
    def of(blocks: Blocks, tensor: Tensor, key: str, stored: Tensor, state: dict[str, Any]) -> Momentum:
        """Return the momentum under a key of a parameter's state; create its scales if they are missing.

        `Blocks.check` must have checked the state.

        Args:
            blocks: The blocks of the plan.
            tensor: The parameter.
            key: The key of the momentum in the state.
            stored: The local part of the state under the key.
            state: The whole state of the parameter, written.
        """
        loaded = None
        if stored.dtype != torch.int8:
            stored, loaded = torch.zeros(stored.shape, dtype=torch.int8, device=stored.device), stored
            state.pop(key + SCALE, None)
        if key + SCALE not in state:
            state[key + SCALE] = torch.zeros(blocks.size(tensor), dtype=torch.float32, device=stored.device)
        return Momentum(blocks, stored, state[key + SCALE], loaded)

    def read(self, number: int, piece: Piece) -> Tensor:
        """Return the momentum of a piece of a matrix, or of a part of a piece: fp32, contiguous, of its shape."""
        if self.loaded is not None and number not in self.encoded:
            view = view_in_storage(self.loaded, piece)
            return view.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        values = torch.empty(piece.shape, dtype=torch.float32, device=self.codes.device)
        for segment, elements in self._segments(number, piece, values):
            scales = self.blocks.grid(number).of(self.scales, segment)
            elements.copy_(
                blockwise.decode(self._codes(segment), scales, self.blocks.codes, first=segment.first, size=BLOCK)
            )
        return values

    def measure(self, number: int, piece: Piece, values: Tensor, into: Tensor) -> None:
        """Write the largest magnitude of each block into ``into``, the vector that the ranks reduce by maximum.

        The bits of each magnitude are written as int32. For numbers that are not negative, the bits have the same order
        as the numbers, and NaN is the largest.
        """
        for segment, elements in self._segments(number, piece, values):
            magnitudes = blockwise.largest(elements, first=segment.first, size=BLOCK).view(torch.int32)
            shared_blocks = self.blocks.shared[number].of(into, segment)
            torch.maximum(shared_blocks, magnitudes, out=shared_blocks)

    def write(self, number: int, piece: Piece, values: Tensor, agreed: Tensor | None) -> None:
        """Encode the momentum of a whole piece of a matrix, and store codes and scales.

        Args:
            number: The number of the matrix.
            piece: One of the holdings.
            values: The momentum of the piece, as `read` returns it.
            agreed: The reduced vector of `measure`, needed if ranks share blocks of the matrix.
        """
        shared = self.blocks.shared.get(number)
        self.encoded.add(number)
        for segment, elements in self._segments(number, piece, values):
            scales = self.blocks.grid(number).of(self.scales, segment)
            if shared is None:
                scales.copy_(blockwise.largest(elements, first=segment.first, size=BLOCK))
            else:
                assert agreed is not None
                scales.copy_(shared.of(agreed, segment).view(torch.float32))
            self._codes(segment).copy_(
                blockwise.encode(elements, scales, self.blocks.codes, first=segment.first, size=BLOCK)
            )

    def _codes(self, segment: LineSegment) -> Tensor:
        return self.codes.as_strided(
            (segment.lines, segment.width), segment.strides, self.codes.storage_offset() + segment.start
        )

    def _segments(self, number: int, piece: Piece, values: Tensor) -> Iterator[tuple[LineSegment, Tensor]]:
        """Yield each segment of a piece with a (lines, width) view of its elements in contiguous ``values``."""
        for segment in self.blocks.segments(number, piece):
            start = values.storage_offset() + segment.piece_start
            yield segment, values.as_strided((segment.lines, segment.width), segment.piece_strides, start)


class Int8Codec(StateCodec):
    """The codec of momentum in int8, whose blocks have one scale each.

    Args:
        blocks: The blocks of the plan.
        of: Returns a matrix of this step by its number; None if this rank stores nothing of it.
    """

    def __init__(self, blocks: Blocks, of: Callable[[int], MatrixStep | None]) -> None:
        self._blocks, self._of = blocks, of
        self._agreed: Tensor | None = None  # the largest momenta of the blocks that several pieces share
        self._coded: dict[tuple[Tensor, str], Momentum] = {}  # a flat tensor has one for all its parameters

    def bind(self, entry: ParameterStep) -> None:
        """Let a parameter step with its codes. Momentum that was loaded in another dtype is encoded in this step."""
        entry.bind({})
        if entry.momenta is not None:
            entry.momenta = {key: self._momentum(entry, key) for key in entry.momenta}

    def _momentum(self, entry: ParameterStep, key: str) -> Momentum:
        identity = entry.member.tensor, key
        if identity not in self._coded:
            local = local_of(entry.state[key])
            momentum = Momentum.of(self._blocks, entry.member.tensor, key, local, entry.state)
            if momentum.codes is not local:
                entry.state[key] = entry.member.state_layouts[key].storage.wrap(momentum.codes)
            self._coded[identity] = momentum
        return self._coded[identity]

    def begin(self, communicator: Communicator) -> None:
        """Agree on the scales of the blocks that several pieces share, as they will be after this step."""
        self._agreed = self._blocks.agree(communicator, self._measure)

    def _measure(self, into: Tensor) -> None:
        for number in self._blocks.shared:
            matrix_step = self._of(number)
            if matrix_step is None or matrix_step.entry.momenta is None:
                continue
            for piece in self._pieces(matrix_step):
                values = self._folded(matrix_step, piece)
                for key, momentum in matrix_step.entry.momenta.items():
                    momentum.measure(number, piece, values[key], into)

    def fold(self, table: PieceTable) -> bool:
        """Fold the gradients of the matrices of a table into their codes, from which directions are computed."""
        for number in dict.fromkeys(row.assignment for row in table.rows):
            step = self._of(number)
            momenta: Mapping[str, Momentum] = {} if step is None else step.entry.momenta or {}
            loaded = [codes for codes in momenta.values() if codes.loaded is not None]
            if step is None or not (loaded or (momenta and step.nonzero is not False)):
                continue  # no gradient is folded in, and no loaded momentum is encoded
            # Read all pieces before any is written: pieces may share a block, whose old scale a write replaces.
            for piece, values in [(piece, self._folded(step, piece)) for piece in self._pieces(step)]:
                for key, codes in momenta.items():
                    codes.write(number, piece, values[key], self._agreed)
        return True

    def _pieces(self, matrix_step: MatrixStep) -> Sequence[Piece]:
        return self._blocks.holdings[matrix_step.entry.member.tensor][matrix_step.number]

    def _folded(self, matrix_step: MatrixStep, piece: Piece) -> Mapping[str, Tensor]:
        """Return the momenta of a piece, decoded and with the gradient folded in."""
        state = matrix_step.momenta(piece).tensors
        if matrix_step.nonzero is not False:
            parts.fold(matrix_step.kind.rule, matrix_step.gradient(piece), state, active=matrix_step.mask)
        return state
