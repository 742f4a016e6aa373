"""ReadyParameters: the local tensors of a step, contiguous, so that the pieces of matrices can index them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.comm.storage import Storage, local_shape, this_rank
from muonmesh.comm.views import view_in_storage
from muonmesh.comm.wire import Wire
from muonmesh.layout import Layout
from muonmesh.layout.region import overlap
from muonmesh.numerics.rules import Rule
from muonmesh.step.columns import Matrices, StateCodec, bind
from muonmesh.step.device_copies import DeviceCopies
from muonmesh.step.flag_vector import Flags
from muonmesh.step.int8_codec import Int8Codec
from muonmesh.step.offload import Offload
from muonmesh.step.parameter_steps import ParameterStep, prepare_state
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.update_squares import UpdateSquares


class ReadyParameters:
    """The parameters of one step on this rank, and their matrices.

    Args:
        planned: The plan of the step.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
        precision: The optimizer's dtypes.
        offload: Copies state from CPU memory and back; None if state is on the device of the parameters.

    Attributes:
        plan: The plan with the owner of each matrix.
        device: The device of the parameters.
        blocks: The blocks of momentum in int8; None if momentum is kept in a floating-point dtype.
        vectors: See `Planned`.
        rules, nonzero, squares, version: See `begin`.
        of, find: See `Matrices`.
        codec: Reads and writes state that is kept otherwise than it is computed with; None if there is no such state.
    """

    def __init__(
        self,
        planned: Planned,
        entries: Sequence[ParameterStep | None],
        precision: Precision,
        offload: Offload | None = None,
    ) -> None:
        self.plan, self.device = planned.plan, planned.device
        self.vectors = planned.vectors
        self.entries, self.precision = entries, precision
        self.blocks = planned.blocks if precision.int8 else None
        self._matrices, self._steps = Matrices(planned, entries), planned.steps
        self.of, self.find = self._matrices.of, self._matrices.find
        self.codec: StateCodec | None = None
        if self.blocks is not None:
            self.codec = Int8Codec(self.blocks, self.find)
        elif offload is not None:
            self.codec = DeviceCopies(offload, self.plan, planned.momentum_holdings, entries)
        self._fresh = [entry for entry in entries if entry is not None and not entry.ready]
        self.rules: Sequence[Rule | None] = ()
        self.nonzero: Sequence[bool] | Tensor = ()
        self.squares: UpdateSquares | None = None
        self.version: object = None

    # ---------------------------------------------------------------- before and after the step

    def begin(
        self,
        wire: Wire,
        rules: Sequence[Rule | None],
        flags: Flags,
        squares: UpdateSquares | None,
        version: object,
    ) -> None:
        """Create missing state, bring all state into its form, and let its codec begin. All ranks call this.

        Args:
            wire: Sends to the other ranks.
            rules: For each param group the snapshot of its rule.
            flags: The flags that all ranks agreed on. ``flags.nonzero`` says of each matrix whether its gradient is not
                zero.
            squares: Adds up the squares of the updates; None if no metrics are wanted.
            version: `Snapshot.version`, if all tensors but gradients are those of the last step; else None.
        """
        self.rules, self.nonzero, self.squares, self.version = rules, flags.nonzero, squares, version
        self._matrices.begin(rules, flags.nonzero)
        for entry in self._fresh:
            self._make_ready(entry)
        if self.codec is not None:
            self.codec.begin(wire)

    def _make_ready(self, entry: ParameterStep) -> None:
        if not entry.in_form:  # state is created unless the CPU knows that no rank has a gradient
            prepare_state(entry, self.precision, create=entry.present is not False)
        if self.codec is None:
            bind(entry, {})
        else:
            self.codec.bind(entry)
        if entry.created:
            if entry.gradient is None:  # missing on this shard only: counts as zero
                shape = local_shape(entry.member.momentum_storage)
                entry.gradient = torch.zeros(shape, dtype=self.precision.state, device=self.device)
            elif entry.member.momentum_storage is not entry.member.gradient_storage:
                entry.gradient = _restricted(entry.gradient, entry.member.storage, entry.member.momentum_storage)
        entry.weights = entry.local if entry.local.is_contiguous() else entry.local.contiguous()
        entry.ready = True

    def finish(self) -> None:
        """Write back contiguous copies of weights, and bring state to where it is kept."""
        for entry in self._fresh:
            if entry.weights is not entry.local:
                entry.local.copy_(entry.weights)
            elif self.codec is None and _lasts(entry):
                entry.remember()
                self._steps[id(entry.member)] = entry
        self._fresh = []
        if self.codec is not None:
            self.codec.finish()


def _lasts(entry: ParameterStep) -> bool:
    """Whether the next step may use a ready parameter again: it has no tensors but its own and its state's."""
    member = entry.member
    whole = member.momentum_storage is member.gradient_storage and not member.at_momentum
    return whole and entry.lasts


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
                into = own.as_strided(shared.shape, shared.matrix_strides, shared.matrix_start)
                into.copy_(view_in_storage(local, shared))
    return own
