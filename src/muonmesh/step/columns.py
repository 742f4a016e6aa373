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
from muonmesh.step.planning import Planned
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


class Kind(NamedTuple):
    """What matrices of one group and size have in common in a step.

    Attributes:
        rule: The snapshot of their rule.
        orthogonalizer: Orthogonalizes them.
        scale: The update scale of the whole matrix.
        sums: Whether the rule needs sums over a matrix before its weights are written.
        rounds_to_nearest: Whether weights are rounded as casts round them.
        balances, changes: Whether the rule changes whole matrices before they are orthogonalized, and afterwards.
    """

    rule: Rule
    orthogonalizer: Orthogonalizer
    scale: float
    sums: bool
    rounds_to_nearest: bool
    balances: bool
    changes: bool


class MatrixStep(NamedTuple):
    """A matrix in one step, of which this rank stores something.

    Attributes:
        number: The number of its assignment.
        matrix: The matrix.
        entry: Its parameter.
        kind: What it shares with others.
        nonzero: Whether its gradient is not zero; a 0-d bool tensor if only the device knows.
        mask: The same if only the device knows; else None.
        changes: Whether its elements may change: there is state, and the gradient is not known to be zero.
    """

    number: int
    matrix: Matrix
    entry: ParameterStep
    kind: Kind
    nonzero: bool | Tensor
    mask: Tensor | None
    changes: bool

    @property
    def rule_in_turn(self) -> Rule:
        """The rule with the phase of the matrix, by which `Rule.turn` decides whether this step is its turn."""
        rule, matrix = self.kind.rule, self.matrix
        return replace(rule, phase=phase_of(matrix.parameter, matrix.index)) if rule.takes_turns else rule

    def gradient(self, piece: Piece) -> Tensor:
        """Return a view of the gradient of a piece."""
        assert self.entry.gradient is not None
        return view_in_storage(self.entry.gradient, piece)

    def momenta(self, piece: Piece) -> dict[str, Tensor]:
        """Return the momenta of a piece by key: views, or what a codec reads."""
        found = {}
        for key, kept in (self.entry.momenta or {}).items():
            found[key] = view_in_storage(kept, piece) if isinstance(kept, Tensor) else kept.read(self.number, piece)
        return found

    def weights(self, piece: Piece) -> WeightViews:
        """Return the weights of a piece."""
        entry = self.entry
        weights = view_in_storage(entry.weights, piece)
        beside = {key: view_in_storage(kept, piece) for key, kept in entry.beside.items()}
        if entry.master is not None:
            return WeightViews(view_in_storage(entry.master, piece), weights, beside, None)
        if self.kind.rounds_to_nearest or weights.dtype != torch.bfloat16:
            return WeightViews(weights, None, beside, None)
        exact = weights.float()

        def write() -> None:
            rounding = rounding_of(entry.member.name, entry.member.storage, self.kind.rule, piece)
            assert rounding is not None
            rounding.write(exact, weights)

        return WeightViews(exact, None, beside, write)


class Matrices:
    """The matrices of a step by their numbers in the plan, each made when it is first asked for.

    Args:
        planned: The plan.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
    """

    def __init__(self, planned: Planned, entries: Sequence[ParameterStep | None]) -> None:
        self._assignments, self._orthogonalizers = planned.plan.assignments, planned.orthogonalizers
        self._entries = entries
        self._rules: Sequence[Rule | None] = ()
        self._nonzero: Sequence[bool] | Tensor = ()
        self._known: dict[int, MatrixStep] = {}
        self._kinds: dict[tuple[int, int, int], Kind] = {}

    def begin(self, rules: Sequence[Rule | None], nonzero: Sequence[bool] | Tensor) -> None:
        """Begin a step.

        Args:
            rules: For each param group the snapshot of its rule.
            nonzero: For each matrix whether its gradient is not zero.
        """
        on_device = isinstance(nonzero, Tensor) or isinstance(self._nonzero, Tensor)
        if on_device or rules is not self._rules or nonzero != self._nonzero:
            self._known.clear()
            self._kinds.clear()
        self._rules, self._nonzero = rules, nonzero

    def find(self, number: int) -> MatrixStep | None:
        """Return a matrix; None if this rank stores nothing of it."""
        return None if self._entries[self._assignments[number].parameter] is None else self.of(number)

    def of(self, number: int) -> MatrixStep:
        """Return a matrix of which this rank stores something."""
        if (known := self._known.get(number)) is not None:
            return known
        assignment, nonzero = self._assignments[number], self._nonzero[number]
        entry, matrix = self._entries[assignment.parameter], assignment.matrix
        assert entry is not None
        place = entry.member.group, matrix.rows, matrix.cols
        if (kind := self._kinds.get(place)) is None:
            rule = self._rules[entry.member.group]
            assert rule is not None
            facts = rule.scale(matrix.rows, matrix.cols), rule.asks_for_sums(), rounds_to_nearest(rule)
            whole = rule.balances(), rule.changes_matrices()
            kind = Kind(rule, self._orthogonalizers[entry.member.group, matrix.shape], *facts, *whole)
            self._kinds[place] = kind
        mask = nonzero if isinstance(nonzero, Tensor) else None
        found = MatrixStep(number, matrix, entry, kind, nonzero, mask, nonzero is not False and entry.created)
        self._known[number] = found
        return found


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
    """How a step reads and writes state that is kept otherwise than it is computed with."""

    def bind(self, entry: ParameterStep) -> None:
        """Let a parameter step with its state, if it can be bound before the step begins."""

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
