"""ParameterStep: the local part of a parameter in one step, with gradient and state. MatrixStep: a matrix of it.

A `StateCodec` is for state that is kept otherwise than it is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.storage import Storage, is_freed, local_of, shares_memory, this_rank
from muonmesh.comm.views import view_in_storage
from muonmesh.errors import LayoutError, StateError, about, explain_error
from muonmesh.layout import Matrix, Piece
from muonmesh.layout.piece_table import PieceTable
from muonmesh.layout.region import Block, Region, number_in_whole, row_major
from muonmesh.names import stagger_of
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import Hyperparameters, Rule
from muonmesh.numerics.stochastic import Rounding, keys_of
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.state_layout import Refused, StateForm, check_state

Momenta = Mapping[str, Any]
"""The state that a rule keeps as "momentum", by key: tensors, or `muonmesh.step.int8_momentum.Momentum`."""


_RESIZED = "Write del optimizer.state[parameter] after resizing a parameter, which needs fresh state"
REFUSED: Refused = {
    "shape": _RESIZED,
    "owned": "Load it with muonmesh.checkpoint, since each rank keeps that of its own matrices",
    "device": "Move it back, or load the state again",
}
"""What a step refuses of a state, and what to write; what is missing begins anew."""


@dataclass(slots=True)
class ParameterStep:
    """One parameter in one step.

    Attributes:
        member: The parameter in the plan.
        local: The part of the parameter that this rank stores.
        state: The parameter's entry in the optimizer's state.
        gradients: The gradients of all parameters of the step, which hold them: see ``gradient``.
        number: The place of its own among them.
        forms: The forms of its state (`OptimizedParameter.forms`).
        in_form: Whether all of its state was found in these forms.
        present: Whether any rank has a gradient for the tensor; `preflight` asks the ranks of the plan. A 0-d bool
            tensor if only the device knows, because the gradient could only be on another rank.
        places: Where parameters lie in a flat buffer that has more than them, such as padding; None if they fill it.
            Only elementwise rules read it, which step all parameters of a buffer at once.
        weights, momenta, beside, master: Set by `ReadyParameters`, from then on local and contiguous, so that pieces
            can index them. ``gradient`` then has the elements whose momentum this rank stores; it is zero if only this
            rank has no gradient.
        weights: The parameter, or a contiguous copy that `ReadyParameters.finish` writes back.
        momenta: The state that the rule keeps as "momentum", by key. Gradients are folded into it in place, or into the
            decoded int8 codes. None if there is no state, because no rank has ever had a gradient. If the CPU does
            not wait for the flags, None if this rank has had no gradient and no other shard can have one.
        beside: The state that the rule keeps as "weights", by key, written in place together with the weights.
        master: The master weights, written in place and then rounded to the weights; None if there are none.
    """

    member: OptimizedParameter
    local: Tensor
    state: dict[str, Any]
    gradients: list[Tensor | None]
    number: int
    forms: tuple[StateForm, ...]
    in_form: bool = False
    present: bool | Tensor = False
    places: Sequence[slice] | None = None
    weights: Tensor = field(init=False)
    momenta: Momenta | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None

    def bind(self, moved: Mapping[str, Tensor]) -> None:
        """Take the state to step with, or tensors that are given in place of some of it, by key."""
        bound: dict[str, dict[str, Tensor]] = {"momentum": {}, "weights": {}}
        for key, state_layout in self.member.state_layouts.items():
            if key in self.state and state_layout.kept_as in bound:
                bound[state_layout.kept_as][key] = moved[key] if key in moved else local_of(self.state[key])
        master = moved.get("master", self.state.get("master"))
        self.momenta = bound["momentum"] if self.created else None
        self.beside, self.master = bound["weights"], None if master is None else local_of(master)

    @property
    def gradient(self) -> Tensor | None:
        """Local part of the gradient, contiguous, or None. A partial gradient stays a DTensor."""
        return self.gradients[self.number]

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self.gradients[self.number] = gradient

    @property
    def created(self) -> bool:
        """Whether all state of the parameter's rule exists; true for a rule without state."""
        return self.member.state_layouts.keys() <= self.state.keys()


def prepare_state(entry: ParameterStep, *, create: bool = True) -> None:
    """Bring the state of a parameter into the form in which a step uses it, after the ranks have agreed on the step.

    State that is missing begins as zeros, master weights as a copy. A user, a checkpoint or ``model.to(dtype)`` may
    have left state with another dtype or strides; it is copied. Momentum that is to be int8 stays: the step encodes
    it.

    Args:
        entry: The parameter.
        create: Whether to create what is missing.
    """
    state = entry.state
    for form in entry.forms:
        key = form.key
        if (stored := state.get(key)) is None:
            state.pop(key, None)
            if create:
                state[key] = form.fresh()
            if create and key == "master":
                local_of(state[key]).copy_(entry.local, non_blocking=True)
            continue
        local = local_of(stored)
        target_form = form._replace(dtype=local.dtype) if form.dtype == torch.int8 else form
        state[key] = stored if _has(target_form, stored) else target_form.fresh()
        if state[key] is not stored and local.shape == form.shape:
            local_of(state[key]).copy_(local)
    entry.in_form = create


def check_parameter(entry: ParameterStep) -> None:
    """Check that a step can write a parameter and use its state. Writes nothing.

    Raises:
        LayoutError: the parameter's memory has been freed, or several of its elements share memory.
        TypeError: the parameter is not dense, or an inference tensor.
        StateError: an entry is no tensor of numbers, its shape is not the shape on this rank, or it is on the wrong
            device; or the state belongs to the other algorithm (Muon or AdamW).
    """
    local, state = entry.local, entry.state
    name = entry.member.name
    if local.layout is not torch.strided or local.is_inference():
        problem = "an inference tensor" if local.is_inference() else f"a parameter with layout {local.layout}"
        needed = "a dense tensor made outside of torch.inference_mode, which a step can write"
        write = "Write parameter.data = parameter.data.to_dense().clone() outside of torch.inference_mode"
        raise TypeError(explain_error(name, problem, needed, write))
    if not local.is_contiguous() and shares_memory(local):
        problem = f"shape {tuple(local.shape)} with strides {local.stride()}, so that several elements share memory"
        write = "Write parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)"
        raise LayoutError(explain_error(name, problem, "memory for each element", write))
    if is_freed(local):
        text = "FSDP or ZeRO has freed the memory of this parameter. Reshard it before the step: module.reshard()"
        raise LayoutError(about(name, text))
    foreign = "exp_avg" if entry.member.is_matrix else "momentum_buffer"
    if foreign in state:
        algorithm, other = ("muon", "adamw") if entry.member.is_matrix else ("adamw", "muon")
        problem = f"{foreign}, state of {other}, in a group of {algorithm}"
        write = "Write del optimizer.state[parameter] to begin with fresh state, or set the group back"
        raise StateError(explain_error(name, problem, f"state of {algorithm}", write))
    entry.in_form = all([_has(form, state.get(form.key)) for form in entry.forms])
    if not entry.in_form:
        check_state(name, entry.forms, state, REFUSED)


def _has(form: StateForm, value: object) -> bool:
    """Return whether a step can use a value of the state as it is."""
    if not isinstance(value, Tensor):
        return False
    local = value if type(value) is Tensor else local_of(value)
    alike = local.dtype == form.dtype and local.shape == form.shape and local.device == form.device
    if not (alike and local.layout is torch.strided and local.is_contiguous() and not local.is_inference()):
        return False
    return not is_freed(local)


# ---------------------------------------------------------------- matrices of parameters


WEIGHTS, ROUNDED = "", "/rounded"
"""Keys of weights: those to step, which are the master weights if there are any; and those that master weights are then
rounded to."""


class Views(NamedTuple):
    """Momenta or weights of some elements in one step.

    Attributes:
        tensors: Views by key, or what a codec reads.
        write: Writes a copy of the weights back when it is stepped; None if they are not a copy.
    """

    tensors: dict[str, Tensor]
    write: Callable[[], None] | None = None


class Kind:
    """What matrices of one group and size have in common in a step.

    Args:
        rule: The snapshot of their rule.
        orthogonalizer: Orthogonalizes them.
        matrix: One of them.

    Attributes:
        rule, orthogonalizer: As given.
        scale: The update scale of the whole matrix.
        sums: Whether the rule needs sums over a matrix before its weights are written.
        rounds_to_nearest: Whether weights are rounded as casts round them.
        balances, changes: Whether the rule changes whole matrices before they are orthogonalized, and afterwards.
    """

    def __init__(self, rule: Rule, orthogonalizer: Orthogonalizer, matrix: Matrix) -> None:
        self.rule, self.orthogonalizer = rule, orthogonalizer
        self.scale, self.sums = rule.scale(matrix.rows, matrix.cols), rule.overrides("summands")
        self.rounds_to_nearest = rule.stochastic_rounding is None
        self.balances, self.changes = rule.overrides("balance"), rule.overrides("whole")


class MatrixStep:
    """A matrix in one step, of which this rank stores something.

    Args:
        number: The number of its assignment.
        matrix: The matrix.
        entry: Its parameter.
        kind: What it shares with others.
        nonzero: Whether its gradient is not zero; a 0-d bool tensor if only the device knows.

    Attributes:
        number, matrix, entry, kind, nonzero: As given.
        mask: The same as ``nonzero`` if only the device knows; else None.
        changes: Whether its elements may change: there is state, and the gradient is not known to be zero.
    """

    def __init__(self, number: int, matrix: Matrix, entry: ParameterStep, kind: Kind, nonzero: bool | Tensor) -> None:
        self.number, self.matrix, self.entry, self.kind, self.nonzero = number, matrix, entry, kind, nonzero
        self.mask = nonzero if isinstance(nonzero, Tensor) else None
        self.changes = nonzero is not False and entry.created

    @property
    def rule_in_turn(self) -> Rule:
        """The rule with the number of the matrix, by which `Rule.is_due` decides whether the matrix is due."""
        rule, matrix = self.kind.rule, self.matrix
        return replace(rule, stagger=stagger_of(matrix.parameter, matrix.index)) if rule.takes_turns else rule

    def gradient(self, piece: Piece) -> Tensor:
        """Return a view of the gradient of a piece."""
        assert self.entry.gradient is not None
        return view_in_storage(self.entry.gradient, piece)

    def momenta(self, piece: Piece) -> Views:
        """Return the momenta of a piece by key."""
        views = {}
        for key, stored in (self.entry.momenta or {}).items():
            views[key] = (
                view_in_storage(stored, piece) if isinstance(stored, Tensor) else stored.read(self.number, piece)
            )
        return Views(views)

    def weights(self, piece: Piece) -> Views:
        """Return the weights of a piece by `WEIGHTS`, by `ROUNDED`, and the state that is kept as "weights" by key."""
        entry = self.entry
        weights = view_in_storage(entry.weights, piece)
        beside = {key: view_in_storage(stored, piece) for key, stored in entry.beside.items()}
        if entry.master is not None:
            return Views({WEIGHTS: view_in_storage(entry.master, piece), ROUNDED: weights, **beside})
        if self.kind.rounds_to_nearest or weights.dtype != torch.bfloat16:
            return Views({WEIGHTS: weights, **beside})
        exact = weights.float()
        rounding = rounding_of(entry.member.name, entry.member.storage, self.kind.rule, piece)
        return Views({WEIGHTS: exact, **beside}, partial(rounding.write, exact, weights))


class StateCodec:
    """How a step reads and writes state that is kept otherwise than it is computed with.

    A step makes these calls, all but `begin` for what this rank stores:

    1. `bind` for each parameter, and then `begin` once, on every rank.
    2. For each table of gradients `arrive`, `fold` and, when directions are written, `have_read`.
    3. For each table of updates `have_written`, when weights are written.
    4. `finish` once.

    On a CPU, the calls of 2 and 3 may come from several threads at a time.
    """

    def bind(self, entry: ParameterStep) -> None:
        """Let a parameter step with its state, if that can be done before the step begins."""

    def begin(self, communicator: Communicator) -> None:
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


# ---------------------------------------------------------------- stochastic rounding


def rounding_of(name: str, storage: Storage, rule: Hyperparameters, piece: Piece) -> Rounding:
    """Return the stochastic rounding of a piece of a local shard in this step.

    Args:
        name: The name of the parameter, or of a tensor of its state.
        storage: The storage of this tensor.
        rule: The rule of the parameter's group; its ``stochastic_rounding`` must be a seed.
        piece: Elements of the local storage.
    """
    assert rule.stochastic_rounding is not None
    start, strides = number_in_whole(piece, _blocks(storage), storage.shape)
    return Rounding(keys_of(rule.stochastic_rounding, rule.steps_taken, name), start, strides)


def round_stored(name: str, storage: Storage, rule: Hyperparameters, exact: Tensor, into: Tensor) -> None:
    """Round this rank's part of a parameter, or of a tensor of its state, stochastically to bf16.

    Args:
        name: The name of the parameter, or of the tensor of its state.
        storage: The storage of this tensor.
        rule: The rule of the parameter's group; its ``stochastic_rounding`` must be a seed.
        exact: The values: fp32, contiguous, in the order of the local storage.
        into: The rounded values: bf16, of the same shape, written.
    """
    rounded = into.contiguous()
    for block in _blocks(storage):
        piece = Piece(block.region.shape, block.start, block.strides, 0, block.strides)
        rounding = rounding_of(name, storage, rule, piece)
        rounding.write(view_in_storage(exact, piece), view_in_storage(rounded, piece))
    if rounded is not into:
        into.copy_(rounded)


def _blocks(storage: Storage) -> tuple[Block, ...]:
    if storage.layout is None:
        whole = Region.box((0,) * len(storage.shape), tuple(storage.shape))
        return (Block(whole, 0, row_major(tuple(storage.shape))),)
    return tuple(block for block in storage.layout.blocks(this_rank()) if block.region.numel)
