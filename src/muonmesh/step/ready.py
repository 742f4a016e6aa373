"""ReadyParameters: the parameters of a step with local tensors that pieces can index, and their matrices.

A `MatrixStep` gives rules views of what its elements have. A `StateCodec` is for state that is kept otherwise than it
is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.sharing import restricted
from muonmesh.comm.storage import local_shape
from muonmesh.comm.views import view_in_storage
from muonmesh.comm.wire import Wire
from muonmesh.layout import Matrix, Piece
from muonmesh.layout.piece_table import PieceTable
from muonmesh.names import phase_of
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import Rule
from muonmesh.step.flag_vector import Flags
from muonmesh.step.parameter_steps import ParameterStep, prepare_state
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
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
        rounding = rounding_of(entry.member.name, entry.member.storage, self.kind.rule, piece)
        return WeightViews(exact, None, beside, partial(rounding.write, exact, weights))


def rounds_to_nearest(rule: Rule) -> bool:
    """Whether weights are rounded as casts round them."""
    return rule.stochastic_rounding is None


class StateCodec:
    """How a step reads and writes state that is kept otherwise than it is computed with."""

    def bind(self, entry: ParameterStep) -> None:
        """Let a parameter step with its state, if that can be done before the step begins."""

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

    def have_read(self, table: PieceTable) -> None:
        """Note that the momentum of these rows has been read for the last time in this step."""

    def have_written(self, table: PieceTable) -> None:
        """Note that the weights of these rows have been written."""

    def finish(self) -> None:
        """Bring all state to where it is kept."""


class ReadyParameters:
    """The parameters of one step on this rank, and their matrices by their numbers in the plan.

    Args:
        planned: The plan of the step.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
        precision: The optimizer's dtypes.

    Attributes:
        plan: The plan with the owner of each matrix.
        device: The device of the parameters.
        vectors: See `Planned`.
        rules, nonzero, squares, version: See `begin`.
        codec: Reads and writes state that is kept otherwise than it is computed with; None if there is no such state.
    """

    def __init__(self, planned: Planned, entries: Sequence[ParameterStep | None], precision: Precision) -> None:
        self.plan, self.device = planned.plan, planned.device
        self.vectors = planned.vectors
        self.entries, self.precision, self._orthogonalizers = entries, precision, planned.orthogonalizers
        self.codec: StateCodec | None = None
        self._fresh = [entry for entry in entries if entry is not None]
        self.rules: Sequence[Rule | None] = ()
        self.nonzero: Sequence[bool] | Tensor = ()
        self.squares: dict[int, list[Tensor]] | None = None
        self.version: object = None
        self._known: dict[int, MatrixStep] = {}
        self._kinds: dict[tuple[int, int, int], Kind] = {}

    # ---------------------------------------------------------------- before and after the step

    def begin(
        self,
        wire: Wire,
        rules: Sequence[Rule | None],
        flags: Flags,
        squares: dict[int, list[Tensor]] | None,
        version: object,
    ) -> None:
        """Create missing state, bring all state into its form, and let its codec begin. All ranks call this.

        Args:
            wire: Sends to the other ranks.
            rules: For each param group the snapshot of its rule.
            flags: The flags that all ranks agreed on. ``flags.nonzero`` says of each matrix whether its gradient is not
                zero.
            squares: The squares of the updates by group, to which the step adds; None if no metrics are wanted.
            version: `Snapshot.version`, if all tensors but gradients are those of the last step; else None.
        """
        on_device = isinstance(flags.nonzero, Tensor) or isinstance(self.nonzero, Tensor)
        if on_device or rules is not self.rules or flags.nonzero != self.nonzero:
            self._known.clear()
            self._kinds.clear()
        self.rules, self.nonzero, self.squares, self.version = rules, flags.nonzero, squares, version
        for entry in self._fresh:
            self._make_ready(entry)
        if self.codec is not None:
            self.codec.begin(wire)

    def _make_ready(self, entry: ParameterStep) -> None:
        member = entry.member
        if not entry.in_form:  # state is created unless the CPU knows that no rank has a gradient
            prepare_state(entry, self.precision, create=entry.present is not False)
        if self.codec is None:
            entry.bind({})
        else:
            self.codec.bind(entry)
        if entry.created:
            if entry.gradient is None:  # missing on this shard only: counts as zero
                shape = local_shape(member.momentum_storage)
                entry.gradient = torch.zeros(shape, dtype=self.precision.state, device=self.device)
            elif member.momentum_storage is not member.gradient_storage:
                entry.gradient = restricted(entry.gradient, member.storage, member.momentum_storage)
        entry.weights = entry.local if entry.local.is_contiguous() else entry.local.contiguous()

    def finish(self) -> None:
        """Write back contiguous copies of weights, and bring state to where it is kept."""
        for entry in self._fresh:
            if entry.weights is not entry.local:
                entry.local.copy_(entry.weights)
        self._fresh = []
        if self.codec is not None:
            self.codec.finish()

    @property
    def lasts(self) -> bool:
        """Whether the next step may use these parameters again: their tensors are their own and those of the state."""
        entries = [entry for entry in self.entries if entry is not None]
        whole = all([entry.member.momentum_storage is entry.member.storage for entry in entries])
        return self.codec is None and whole and all([entry.weights is entry.local for entry in entries])

    # ---------------------------------------------------------------- matrices, each made when it is first asked for

    def find(self, number: int) -> MatrixStep | None:
        """Return a matrix; None if this rank stores nothing of it."""
        return None if self.entries[self.plan.assignments[number].parameter] is None else self.of(number)

    def of(self, number: int) -> MatrixStep:
        """Return a matrix of which this rank stores something."""
        if (known := self._known.get(number)) is not None:
            return known
        assignment, nonzero = self.plan.assignments[number], self.nonzero[number]
        entry, matrix = self.entries[assignment.parameter], assignment.matrix
        assert entry is not None
        place = entry.member.group, matrix.rows, matrix.cols
        if (kind := self._kinds.get(place)) is None:
            rule = self.rules[entry.member.group]
            assert rule is not None
            facts = rule.scale(matrix.rows, matrix.cols), rule.asks_for_sums(), rounds_to_nearest(rule)
            whole = rule.balances(), rule.changes_matrices()
            kind = Kind(rule, self._orthogonalizers[entry.member.group, matrix.shape], *facts, *whole)
            self._kinds[place] = kind
        mask = nonzero if isinstance(nonzero, Tensor) else None
        found = MatrixStep(number, matrix, entry, kind, nonzero, mask, nonzero is not False and entry.created)
        self._known[number] = found
        return found
