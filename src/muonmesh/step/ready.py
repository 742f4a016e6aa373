"""ReadyParameters: the local tensors of a step, contiguous, so that the pieces of matrices can index them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.comm.views import view_in_matrix, view_in_storage
from muonmesh.layout import Layout, Matrix
from muonmesh.layout.piece_table import PieceTable, Row
from muonmesh.layout.region import overlap
from muonmesh.names import phase_of
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import Rule
from muonmesh.step.blocks import Blocks, Momentum
from muonmesh.step.device_copies import DeviceCopies
from muonmesh.step.flag_vector import Flags
from muonmesh.step.offload import Offload
from muonmesh.step.parameter_steps import ParameterStep, prepare_state
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision


class ReadyParameters:
    """The parameters of one step on this rank, each prepared when the step first works on one of its matrices.

    Missing state is created at this time. State in CPU memory is copied to the device, and copied back as soon as
    nothing on the device needs it.

    Args:
        planned: The plan of the step.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
        rules: For each param group the snapshot of its rule.
        flags: The flags that all ranks agreed on.
        precision: The optimizer's dtypes.
        offload: Copies state from CPU memory and back; None if state is on the device of the parameters.

    Attributes:
        plan: The plan with the owner of each matrix.
        holdings: For each Matrix the pieces whose momentum this rank stores (`Planned.momentum_holdings`).
        device: The device of the parameters.
        blocks: The blocks of momentum in int8; None if momentum is kept in a floating-point dtype.
        nonzero: `Flags.nonzero`: for each matrix whether its gradient is not zero.
        kept_factors, graphs, at_once: See `Planned`.
        copies: Device copies of state in CPU memory; None if state is on the device of the parameters.
    """

    def __init__(
        self,
        planned: Planned,
        entries: Sequence[ParameterStep | None],
        rules: Sequence[Rule | None],
        flags: Flags,
        precision: Precision,
        offload: Offload | None = None,
    ) -> None:
        self.plan, self.holdings, self.device = planned.plan, planned.momentum_holdings, planned.device
        self.entries, self.rules, self.flags, self.precision = entries, rules, flags, precision
        self.blocks = planned.blocks if precision.int8 else None
        self._steps: dict[int, ParameterStep] = planned.steps
        self._orthogonalizers, self.kept_factors = planned.orthogonalizers, planned.factors
        self.graphs, self.at_once = planned.graphs, planned.at_once
        self.nonzero: Sequence[bool] | Tensor = flags.nonzero
        self.copies = None if offload is None else DeviceCopies(offload, self.plan, self.holdings, entries)
        self._coded: dict[tuple[Tensor, str], Momentum] = {}  # a flat tensor has one for all its parameters

    # ---------------------------------------------------------------- by the number of a matrix

    def matrix(self, number: int) -> Matrix:
        """Return a matrix by its number in the plan."""
        return self.plan.assignments[number].matrix

    def entry(self, number: int) -> ParameterStep | None:
        """Return the parameter that a matrix is part of; None if this rank stores nothing of it."""
        return self.entries[self.plan.assignments[number].parameter]

    def here(self, number: int) -> ParameterStep:
        """Return the parameter of a matrix of which this rank stores something."""
        entry = self.entry(number)
        assert entry is not None
        return entry

    def group(self, number: int) -> int:
        """Return the number of the param group of a matrix of which this rank stores something."""
        return self.here(number).member.group

    def rule(self, number: int) -> Rule:
        """Return the rule of a matrix of which this rank stores something."""
        rule = self.rules[self.group(number)]
        assert rule is not None
        return rule

    def rule_in_turn(self, number: int) -> Rule:
        """Return the rule with the phase of a matrix, by which `Rule.turn` decides whether this step is its turn."""
        rule, matrix = self.rule(number), self.matrix(number)
        return replace(rule, phase=phase_of(matrix.parameter, matrix.index)) if rule.takes_turns else rule

    def orthogonalizer(self, number: int) -> Orthogonalizer:
        """Return the orthogonalizer of a matrix of which this rank stores something."""
        return self._orthogonalizers[self.group(number), self.matrix(number).shape]

    def scale(self, number: int) -> float:
        """Return the update scale of a whole matrix."""
        matrix = self.matrix(number)
        return self.rule(number).scale(matrix.rows, matrix.cols)

    def changes(self, row: Row) -> bool:
        """Whether a row's elements may change: there is state, and the gradient is not known to be zero."""
        return self.nonzero[row.assignment] is not False and self.here(row.assignment).created

    def weights(self, row: Row) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return views of a row's weights, of the weights that they are rounded to, and of the state beside them.

        The weights are the master weights if there are any; they are rounded to the weights of lower precision.
        """
        entry, piece = self.here(row.assignment), row.piece
        weights, beside = view_in_storage(entry.weights, piece), entry.beside.items()
        state = {key: view_in_storage(kept, piece) for key, kept in beside}
        return (
            (weights, None, state) if entry.master is None else (view_in_storage(entry.master, piece), weights, state)
        )

    def mask(self, number: int) -> Tensor | None:
        """Return whether a matrix is written, a 0-d bool tensor; None if the CPU knows that it is written."""
        flag = self.nonzero[number]
        return flag if isinstance(flag, Tensor) else None

    # ---------------------------------------------------------------- making them ready

    def collect(self, numbers: Iterable[int]) -> None:
        """Prepare the parameters of some matrices; each parameter is prepared once in a step.

        Matrices of which this rank stores nothing are ignored. State from CPU memory may still be on its way when this
        method returns; `arrive` waits for it.
        """
        wanted = dict.fromkeys([self.plan.assignments[number].parameter for number in numbers])
        fresh = {n: entry for n in wanted if (entry := self.entries[n]) is not None and not entry.ready}
        for entry in fresh.values():
            if not entry.in_form:
                self.prepare(entry)
        if self.copies is not None:
            self.copies.take(fresh.values())
        for entry in fresh.values():
            self._make_ready(entry)

    def arrive(self, numbers: Sequence[int]) -> None:
        """Call `collect`, and make later computations wait for the state that is on its way to the device."""
        self.collect(numbers)
        if self.copies is not None:
            self.copies.arrive(entry for entry in map(self.entry, numbers) if entry is not None)

    def prepare(self, entry: ParameterStep) -> None:
        """Prepare the state of a parameter; create it unless the CPU knows that no rank has a gradient."""
        prepare_state(entry, self.precision, create=entry.present is not False)

    def _make_ready(self, entry: ParameterStep) -> None:
        here: Mapping[str, Tensor] = {} if self.copies is None else self.copies.values(entry)
        master = here.get("master", entry.state.get("master"))
        held: dict[str, dict[str, Tensor]] = {"momentum": {}, "weights": {}}
        for key, state_layout in entry.member.state_layouts.items():
            if key in entry.state and state_layout.kept_as in held:
                held[state_layout.kept_as][key] = here[key] if key in here else local_of(entry.state[key])
        if entry.created:
            entry.momenta = held["momentum"]
            if self.blocks is not None:
                entry.momenta = {key: self._momentum(entry, key, self.blocks) for key in held["momentum"]}
            if entry.gradient is None:  # missing on this shard only: counts as zero
                shape = local_shape(entry.member.momentum_storage)
                entry.gradient = torch.zeros(shape, dtype=self.precision.state, device=self.device)
            elif entry.member.momentum_storage is not entry.member.gradient_storage:
                entry.gradient = _restricted(entry.gradient, entry.member.storage, entry.member.momentum_storage)
        entry.weights = entry.local if entry.local.is_contiguous() else entry.local.contiguous()
        entry.beside, entry.master = held["weights"], None if master is None else local_of(master)
        entry.ready = True

    def _momentum(self, entry: ParameterStep, key: str, blocks: Blocks) -> Momentum:
        """Return the int8 momentum under a key. Momentum that was loaded in another dtype is encoded in this step."""
        place = entry.member.tensor, key
        if place not in self._coded:
            local = local_of(entry.state[key])
            found = Momentum.of(blocks, entry.member.tensor, key, local, entry.state)
            if found.codes is not local:
                entry.state[key] = entry.member.state_layouts[key].storage.wrap(found.codes)
            self._coded[place] = found
        return self._coded[place]

    # ---------------------------------------------------------------- when they are not needed any more

    def have_read(self, numbers: Iterable[int]) -> None:
        """Note that the momentum of these matrices has been read, so that it can be copied back to CPU memory."""
        if self.copies is not None:
            self.copies.have_read(numbers)

    def have_written(self, table: PieceTable) -> None:
        """Note that these rows have been written, so that the other state can be copied back to CPU memory."""
        if self.copies is not None:
            self.copies.have_written(table.rows)

    def finish(self) -> None:
        """Write back contiguous copies of weights, and create the state of parameters that the step did not work on.

        A rank may hold an empty shard, so that it has nothing to fold or to write. The state of this shard is empty
        too, but checkpoints look for it on every rank.
        """
        for entry in filter(None, self.entries):
            if entry.ready and entry.weights is not entry.local:
                entry.local.copy_(entry.weights)
            elif not entry.ready:
                self.prepare(entry)
            elif not entry.last and self._lasts(entry):
                entry.remember()
                self._steps[id(entry.member)] = entry
        if self.copies is not None:
            self.copies.finish()

    def _lasts(self, entry: ParameterStep) -> bool:
        """Whether the next step may use a ready parameter again: it has no tensors but its own and its state's."""
        member, alone = entry.member, self.blocks is None and self.copies is None
        whole = member.momentum_storage is member.gradient_storage and not member.at_momentum
        return alone and whole and entry.lasts


def _layout(storage: Storage) -> Layout:
    assert storage.layout is not None  # only AdamW steps parameters without a known layout
    return storage.layout


def _restricted(local: Tensor, storage: Storage, place: Storage) -> Tensor:
    """Return the elements of a local tensor whose momentum this rank stores, in the order of the momentum.

    If replicas share the momentum (``shard_state``), each replica has the whole gradient of its shard and keeps the
    momentum of a part of this shard.

    Args:
        local: The gradient in the layout of ``storage``, contiguous.
        storage: The storage of the parameter.
        place: The storage of its momentum. On this rank its elements are a part of the elements of ``storage``.
    """
    rank = this_rank()
    own = torch.zeros(local_shape(place), dtype=local.dtype, device=local.device)
    for target in _layout(place).blocks(rank):
        for block in _layout(storage).blocks(rank):
            shared = overlap(block, target)  # ``matrix_*`` of this Piece are places in the momentum
            if shared is not None:
                view_in_matrix(shared, own).copy_(view_in_storage(local, shared))
    return own
