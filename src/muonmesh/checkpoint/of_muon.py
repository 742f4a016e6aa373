"""OfMuon: gives `muonmesh.checkpoint` the records of a `Muon`, from its groups and its runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from muonmesh.checkpoint.record import Record, records_of
from muonmesh.checkpoint.state import widen_state
from muonmesh.numerics.precision import plain_modes
from muonmesh.step.connection import connect, forget, plan
from muonmesh.step.runtime import Clip, Runtime


class OfMuon:
    """Adapts a `Muon` to the protocol `Recorded`, so that `muonmesh.checkpoint` can save and load it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.runtime: Runtime = optimizer._runtime

    def refuse_if_interrupted(self) -> None:
        """Raise StateError if a step or a load was interrupted while it wrote, and no state has been loaded since."""
        self.runtime.refuse_if_interrupted()

    @plain_modes()
    def checkpoint_records(self) -> list[Record]:
        """Return a `Record` of every parameter of this rank, with its state.

        The ranks communicate only if a rule keeps state at the owner of a matrix (the rank that orthogonalizes it), and
        no step has assigned the owners yet.

        Raises:
            StateError: a parameter has state that the optimizer does not read.
            LayoutError, ValueError, TypeError: no plan can be made.
        """
        optimizer, runtime = self.optimizer, self.runtime
        optimizer.finish()
        planned = plan(optimizer.param_groups, runtime)
        if planned.exchange is None and planned.plan.keepers:
            planned, _ = connect(optimizer.param_groups, runtime, gradients=False)
        if runtime.precision.int8:
            widen_state(optimizer.state, planned, runtime.last.blocks)
        return list(records_of(planned, optimizer, runtime.precision))

    def checkpoint_changing(self) -> None:
        """Mark the state as incomplete, because `muonmesh.checkpoint.load` begins to write."""
        self.runtime.interrupted = "a load of a checkpoint"

    def checkpoint_restored(self) -> None:
        """Mark the state as complete, because `muonmesh.checkpoint.load` has written weights, state and settings."""
        self.runtime.interrupted, self.runtime.loaded, self.runtime.clip = None, True, Clip()

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return an empty dict: checkpoints use the names of the model."""
        return {}

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which frozen parameters are whole; here, they always are.

        For a save before the first step, the ranks find in this context which of their plain parameters are copies, by
        comparing weights. The first step repeats this, since gradients are then known too.

        Raises:
            LayoutError, PlanError: on every rank: no plan can be made, or plain parameters of one name differ.
        """
        if self.runtime.connected is not None:
            yield
            return
        if not write:
            connect(self.optimizer.param_groups, self.runtime, gradients=False)
        try:
            yield
        finally:
            forget(self.runtime)
