"""OfMuon: what `muonmesh.checkpoint` asks of a `Muon`, read off its groups and its runtime."""

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
    """A `Muon` as what can be saved (`Recorded`)."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.runtime: Runtime = optimizer._runtime

    def refuse_if_interrupted(self) -> None:
        """Raise StateError if a step or a load was interrupted while it wrote, and no state has been loaded since."""
        self.runtime.refuse_if_interrupted()

    @plain_modes()
    def checkpoint_records(self) -> list[Record]:
        """Return every parameter of this rank with its state.

        No communication, unless owners are to keep something of their matrices and no step has told who they are.

        Raises:
            StateError: there is state that nobody reads.
            LayoutError, ValueError, TypeError: no plan can be made.
        """
        optimizer, runtime = self.optimizer, self.runtime
        optimizer.finish()
        planned = plan(optimizer.param_groups, runtime)
        if planned.exchange is None and planned.plan.keepers:
            planned, _ = connect(optimizer.param_groups, runtime)
        if runtime.precision.int8:
            widen_state(optimizer.state, planned, runtime.wrote)
        return records_of(planned, optimizer, runtime.precision)

    def checkpoint_changing(self) -> None:
        """Take note that `muonmesh.checkpoint.load` begins to write."""
        self.runtime.interrupted = "a load of a checkpoint"

    def checkpoint_restored(self) -> None:
        """Take note that `muonmesh.checkpoint.load` has written weights, state and settings."""
        self.runtime.interrupted, self.runtime.loaded, self.runtime.clip = None, True, Clip()

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return what a checkpoint calls otherwise than the model does: nothing, its names hold on all ranks."""
        return {}

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which parameters that nobody trains are whole, which here they always are.

        Before the first step, what is saved is saved with the copies that ranks find of it, by its weights alone. The
        first step looks for them anew, since then there are gradients too.

        Raises:
            LayoutError, PlanError: on every rank: no plan can be made, or plain parameters of one name differ.
        """
        if write or self.runtime.connected is not None:
            yield
            return
        connect(self.optimizer.param_groups, self.runtime)
        try:
            yield
        finally:
            forget(self.runtime)
