"""Columns: what one matrix has in a step, as views that rules read and write; and codecs of state kept otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_storage
from muonmesh.comm.wire import Wire
from muonmesh.layout import Matrix, Piece
from muonmesh.layout.piece_table import PieceTable
from muonmesh.names import phase_of
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import Rule
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.stochastic_rounding import rounding_of


class WeightViews(NamedTuple):
    """The weights of some elements in one step, and what lies beside them.

    Attributes:
        values: The weights to step: the master weights if there are any.
        rounded: The weights that master weights are rounded to; None if there are none.
        beside: The state that the rule keeps as "weights", by key.
        write: Writes ``values`` back when they are stepped; None if they are the weights.
    """

    values: Tensor
    rounded: Tensor | None
    beside: dict[str, Tensor]
    write: Callable[[], None] | None


class MatrixStep(NamedTuple):
    """A matrix in one step, of which this rank stores something.

    Attributes:
        number: The number of its assignment.
        matrix: The matrix.
        entry: Its parameter.
        rule: The snapshot of its rule.
        orthogonalizer: Orthogonalizes it.
        nonzero: Whether its gradient is not zero; a 0-d bool tensor if only the device knows.
    """

    number: int
    matrix: Matrix
    entry: ParameterStep
    rule: Rule
    orthogonalizer: Orthogonalizer
    nonzero: bool | Tensor

    @property
    def changes(self) -> bool:
        """Whether its elements may change: there is state, and the gradient is not known to be zero."""
        return self.nonzero is not False and self.entry.created

    @property
    def mask(self) -> Tensor | None:
        """Whether it is written, a 0-d bool tensor; None if the CPU knows that it is."""
        return self.nonzero if isinstance(self.nonzero, Tensor) else None

    @property
    def scale(self) -> float:
        """The update scale of the whole matrix."""
        return self.rule.scale(self.matrix.rows, self.matrix.cols)

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether its weights are rounded as casts round them."""
        return rounds_to_nearest(self.rule)

    @property
    def rule_in_turn(self) -> Rule:
        """The rule with the phase of the matrix, by which `Rule.turn` decides whether this step is its turn."""
        rule, matrix = self.rule, self.matrix
        return replace(rule, phase=phase_of(matrix.parameter, matrix.index)) if rule.takes_turns else rule

    def gradient(self, piece: Piece) -> Tensor:
        """Return a view of the gradient of a piece."""
        assert self.entry.gradient is not None
        return view_in_storage(self.entry.gradient, piece)

    def momenta(self, piece: Piece) -> dict[str, Tensor]:
        """Return the momenta of a piece by key: views, or what a codec reads."""
        return {
            key: view_in_storage(kept, piece) if isinstance(kept, Tensor) else kept.read(self.number, piece)
            for key, kept in (self.entry.momenta or {}).items()
        }

    def weights(self, piece: Piece) -> WeightViews:
        """Return the weights of a piece."""
        entry, seed = self.entry, self.rule.stochastic_rounding
        weights = view_in_storage(entry.weights, piece)
        beside = {key: view_in_storage(kept, piece) for key, kept in entry.beside.items()}
        if entry.master is not None:
            return WeightViews(view_in_storage(entry.master, piece), weights, beside, None)
        if seed is None or weights.dtype != torch.bfloat16:
            return WeightViews(weights, None, beside, None)
        exact = weights.float()

        def write() -> None:
            rounding = rounding_of(entry.member.name, entry.member.storage, self.rule, piece)
            assert rounding is not None
            rounding.write(exact, weights)

        return WeightViews(exact, None, beside, write)


def rounds_to_nearest(rule: Rule) -> bool:
    """Whether weights are rounded as casts round them."""
    return rule.stochastic_rounding is None


def bind(entry: ParameterStep, here: Mapping[str, Tensor]) -> None:
    """Let a parameter step with its state, or with the tensors that are given in place of some of it, by key."""
    held: dict[str, dict[str, Tensor]] = {"momentum": {}, "weights": {}}
    for key, state_layout in entry.member.state_layouts.items():
        if key in entry.state and state_layout.kept_as in held:
            held[state_layout.kept_as][key] = here[key] if key in here else local_of(entry.state[key])
    master = here.get("master", entry.state.get("master"))
    entry.momenta = held["momentum"] if entry.created else None
    entry.beside, entry.master = held["weights"], None if master is None else local_of(master)


class StateCodec:
    """How a step reads and writes state that is kept otherwise than it is computed with.

    This base class is for state that is computed with as it is kept.

    Attributes:
        lasts: Whether a parameter keeps the tensors that it is bound to until the next step.
    """

    lasts = True

    def bind(self, entry: ParameterStep) -> None:
        """Let a parameter step with its state; called before the step begins."""
        bind(entry, {})

    def begin(self, wire: Wire) -> None:
        """Begin the step, when all parameters are bound. All ranks call this."""

    def arrive(self, numbers: Sequence[int], ahead: Sequence[int]) -> None:
        """Let computations that follow have the state of matrices, and begin to bring that of the next ones."""

    def fold(self, table: PieceTable) -> bool:
        """Fold the gradients of the matrices of a table, if momentum is not kept in floating point.

        Returns:
            Whether this was done; if not, the parts of the rule do it.
        """
        return False

    def have_read(self, numbers: Sequence[int]) -> None:
        """Note that the momentum of these matrices has been read for the last time in this step."""

    def have_written(self, table: PieceTable) -> None:
        """Note that the weights of these rows have been written."""

    def finish(self) -> None:
        """Bring all state to where it is kept."""
