"""ScheduledMuon: a `Muon` whose step an executor runs phase by phase, through an interface that torch plans.

Names, arguments and their order follow pytorch #191670, as torchtitan #3986 calls them (commit 8741b514). No release of
torch has this interface. docs/decisions/0022 describes the planned interface and the data that an executor moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonmesh.comm.to_owners import ToOwners
from muonmesh.comm.views import view_in_matrix, view_in_storage
from muonmesh.comm.work import LegViews
from muonmesh.errors import explain_error
from muonmesh.layout import MeshLayout
from muonmesh.layout.routes import Leg, pieces
from muonmesh.numerics.precision import plain_modes
from muonmesh.numerics.rules import Rule, rule_of
from muonmesh.optimizer import Muon
from muonmesh.step.muon_step import MuonStep

VALUE = "update"
"""The name of the only value that an executor moves.

On the way to the rank that computes, the value is the direction of the momentum. On the way back, it is the
orthogonalized direction.
"""


@dataclass(frozen=True)
class Unit:
    """The work of one step for one parameter, with the fields of torch's planned ``OptimizationUnit``.

    An executor passes copies of a unit in which local tensors replace DTensors.
    """

    parameter: Tensor
    parameter_group: Mapping[str, Any]
    state: Mapping[str, Any]
    gradient: Tensor | None
    name: str
    metadata: Tensor
    compute_requirements: Mapping[str, object]


class ScheduledMuon(Muon):
    """A `Muon` whose steps an executor can run, with bitwise the same results as `Muon.step`.

    Call `set_step_executor` to set an executor; a copy of the optimizer has none. The optimizer implements torch's
    planned ``OptimizerStepOps`` itself. For one step, an executor makes these calls:

    1. `begin_step`. The ranks agree on the step, and update AdamW's parameters, which have no units.
    2. `prepare`, `compute` and `apply_updates` for each unit that has a gradient, with the units in any order.
       `compute` works on a whole parameter, on a rank that the executor chooses. `prepare` and `apply_updates` work on
       the shard that each rank stores.
    3. `end_step`.

    Attributes:
        requires: A function of a number n. It returns the executor's object for the requirement that the last n
            dimensions of a parameter are whole on the rank that computes. For FlexShard, set its class ``Owned``.
    """

    requires: Callable[[int], object] = int
    _step_executor: Any = None
    _work: MuonStep | None = None  # None outside of steps, and where a step changes nothing
    _step_ops = property(lambda self: self)  # where executors look

    def set_step_executor(self, executor: Any) -> None:
        """Let ``executor.execute(optimizer, optimizer, closure)`` run the steps; None means `Muon.step`."""
        self._step_executor = executor

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, **settings: Any) -> Any:
        """Take one step, as `Muon.step`."""
        if self._step_executor is None:
            return super().step(closure, **settings)
        return self._step_executor.execute(self, self, closure, **settings)

    def optimization_units(self, optimizer: Muon) -> tuple[Unit, ...]:
        """Return a unit for each of Muon's parameters, in the order of the param groups.

        Raises:
            ValueError: a rule needs sums over matrices, or has state other than momentum and weights; or the momentum
                is not stored as its parameter is (other ranks or another device), or is stored in int8.
        """
        units, runtime, precision = [], optimizer._runtime, optimizer._runtime.precision
        apart = runtime.shard_state or precision.on_host or precision.int8 or isinstance(runtime.source, ToOwners)
        for group in optimizer.param_groups:
            if not isinstance(rule := rule_of(group), Rule):
                continue
            if apart or rule.asks_for_sums() or not {*rule.keeps().values()} <= {"momentum", "weights"}:
                found = f"{group['algorithm']!r} with these settings"
                needed = "a rule without sums, with state for each element alone, where the parameter is"
                raise ValueError(explain_error(f"group {group['name']!r}", found, needed, "Set no step executor"))
            for name, one in zip(group["param_names"], group["params"], strict=True):
                held, gradient = optimizer.state.get(one, {}), optimizer.gradients.gradient(one)
                state = {key: held[key] for key in (*rule.keeps(), "master") if key in held}
                units.append(Unit(one, group, state, gradient, name, one, {VALUE: self.requires(one.ndim)}))
        return tuple(units)

    @plain_modes()
    def begin_step(self, optimizer: Muon) -> Any:
        """Agree with all ranks on the step, create state, and update AdamW's parameters.

        Raises:
            Exception: on all ranks, the errors of `Muon.step`.
        """
        units, context = self.optimization_units(optimizer), optimizer._agreed_step()
        self._left: set[Tensor] = set()
        if (agreed := context.__enter__()) is not None:
            planned, _, self._work = agreed
            self._work.companions.ready.collect(range(len(planned.plan.assignments)))
            self._work.step_elementwise()
            self._numbers: Mapping[Tensor, Sequence[int]] = planned.matrices_of
            self._left = {unit.parameter for unit in units if unit.gradient is not None}
        return context

    @plain_modes()
    def prepare(self, unit: Unit, *, out: Mapping[str, Tensor]) -> None:
        """Add the gradient to the momentum, and write the direction to ``out``, in the shape of this rank's shard."""
        if self._work is not None:
            self._work.read(self._numbers[unit.metadata], self._legs(self._work, unit, out[VALUE]))

    @plain_modes()
    def compute(self, unit_metadata: Tensor, inputs: Mapping[str, Tensor], *, out: Mapping[str, Tensor]) -> None:
        """Orthogonalize the matrices of a whole parameter. ``out`` may be the same tensors as ``inputs``."""
        if self._work is None:
            return
        ready, whole = self._work.companions.ready, MeshLayout.replicated(tuple(inputs[VALUE].shape), (0,))
        for alike in ready.plan.alike(self._numbers[unit_metadata]):
            size = len(alike), *ready.matrix(alike[0]).shape
            x, y = (torch.empty(size, dtype=ready.precision.compute, device=ready.device) for _ in range(2))
            places = [(n, piece) for n, number in enumerate(alike) for piece in pieces(whole, 0, ready.matrix(number))]
            for n, piece in places:
                view_in_matrix(piece, x[n]).copy_(view_in_storage(inputs[VALUE], piece))
            self._work.orthogonalize([(x, y, alike)])
            for n, piece in places:
                view_in_storage(out[VALUE], piece).copy_(view_in_matrix(piece, y[n]))

    @plain_modes()
    def apply_updates(self, unit: Unit, updates: Mapping[str, Tensor]) -> None:
        """Apply weight decay and the update to this rank's shard of a parameter."""
        if self._work is not None:
            self._work.write(self._legs(self._work, unit, updates[VALUE]))
            self._left.discard(unit.metadata)

    @plain_modes()
    def end_step(self, context: Any) -> None:
        """End the step. If the executor left out a unit, the step counts as interrupted, and the next step raises
        `StateError`.
        """
        self._work = None
        if not self._left:
            context.__exit__(None, None, None)

    def _legs(self, work: MuonStep, unit: Unit, local: Tensor) -> LegViews:
        """Return the legs of a parameter's matrices, each with its view of ``local``.

        Args:
            work: The step that is running.
            unit: The unit of the parameter.
            local: A contiguous tensor in the shape of this rank's shard of the parameter.

        Raises:
            ValueError: ``local`` has another shape or is not contiguous, or its dtype cannot hold the compute dtype
                exactly.
        """
        ready, numbers = work.companions.ready, self._numbers[unit.metadata]
        compute, shape = ready.precision.compute, ready.here(numbers[0]).local.shape
        exact = torch.promote_types(local.dtype, compute) == local.dtype
        if not (exact and local.shape == shape and local.is_contiguous()):
            needed = f"a contiguous {tuple(shape)}, which holds numbers of {compute} exactly"
            write = f"Let the executor pass torch.empty({tuple(shape)}, dtype={compute})"
            raise ValueError(explain_error(unit.name, f"{tuple(local.shape)} in {local.dtype}", needed, write))
        legs = (Leg(n, ready.plan.assignments[n].parameter, piece, 0) for n in numbers for piece in ready.holdings[n])
        return tuple((leg, view_in_storage(local, leg.piece)) for leg in legs)
