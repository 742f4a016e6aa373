"""Int8Codec: decodes momentum in int8, folds gradients, agrees with other ranks on the scales, and encodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.storage import local_of
from muonmesh.layout import Piece
from muonmesh.layout.piece_table import PieceTable
from muonmesh.numerics.rules import parts
from muonmesh.step.blocks import Blocks, Momentum
from muonmesh.step.parameter_steps import MatrixStep, ParameterStep, StateCodec


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
        place = entry.member.tensor, key
        if place not in self._coded:
            local = local_of(entry.state[key])
            found = Momentum.of(self._blocks, entry.member.tensor, key, local, entry.state)
            if found.codes is not local:
                entry.state[key] = entry.member.state_layouts[key].storage.wrap(found.codes)
            self._coded[place] = found
        return self._coded[place]

    def begin(self, communicator: Communicator) -> None:
        """Agree on the scales of the blocks that several pieces share, as they will be after this step."""
        self._agreed = self._blocks.agree(communicator, self._measure)

    def _measure(self, into: Tensor) -> None:
        for number in self._blocks.shared:
            one = self._of(number)
            if one is None or one.entry.momenta is None:
                continue
            for piece in self._pieces(one):
                values = self._folded(one, piece)
                for key, kept in _kept(one).items():
                    kept.measure(number, piece, values[key], into)

    def fold(self, table: PieceTable) -> bool:
        """Fold the gradients of the matrices of a table into their codes, from which directions are computed."""
        for number in dict.fromkeys(row.assignment for row in table.rows):
            one = self._of(number)
            kept = {} if one is None else _kept(one)
            if one is None or not kept or (one.nonzero is False and all(each.loaded is None for each in kept.values())):
                continue  # no gradient is folded in, and no loaded momentum is encoded
            # Read all pieces before any is written: pieces may share a block, whose old scale a write replaces.
            for piece, values in [(piece, self._folded(one, piece)) for piece in self._pieces(one)]:
                for key, each in kept.items():
                    each.write(number, piece, values[key], self._agreed)
        return True

    def _pieces(self, one: MatrixStep) -> Sequence[Piece]:
        return self._blocks.holdings[one.entry.member.tensor][one.number]

    def _folded(self, one: MatrixStep, piece: Piece) -> Mapping[str, Tensor]:
        """Return the momenta of a piece, decoded and with the gradient folded in."""
        state = one.momenta(piece)
        if one.nonzero is not False:
            parts.fold(one.kind.rule, one.gradient(piece), state, active=one.mask)
        return state


def _kept(one: MatrixStep) -> dict[str, Momentum]:
    return {key: kept for key, kept in (one.entry.momenta or {}).items() if isinstance(kept, Momentum)}
