"""ScheduledMuon: a Muon whose step an executor drives, phase by phase, as torch plans it.

Names, arguments and their order are those of pytorch #191670, as torchtitan #3986 calls them (commit 8741b514). No
release of torch has them. docs/decisions/0022 says what else is planned, and what moves.
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
"""The name of the one value that travels: the momentum's direction on the way there, its orthogonal factor back."""


@dataclass(frozen=True)
class Unit:
    """One parameter's work in a step, as torch's ``OptimizationUnit``; an executor passes copies with local tensors."""

    parameter: Tensor
    parameter_group: Mapping[str, Any]
    state: Mapping[str, Any]
    gradient: Tensor | None
    name: str
    metadata: Tensor
    compute_requirements: Mapping[str, object]


class ScheduledMuon(Muon):
    """A `Muon` whose step an executor drives, once an executor is set, with the same bits. A copy has no executor.

    The object is its own ``OptimizerStepOps``. An executor calls `begin_step`, then `prepare`, `compute` and
    `apply_updates` for each unit that has a gradient, in any order of the units, and finally `end_step`. In
    `begin_step` the ranks agree on the step and update AdamW's parameters, which have no units. `compute` works on a
    whole parameter, on the rank that the executor chooses. `prepare` and `apply_updates` work on the shard of each
    rank.

    Attributes:
        requires: A function that returns the requirement for a parameter from the number of its last dims that must be
            whole; for FlexShard its class ``Owned``.
    """

    requires: Callable[[int], object] = int
    _step_executor: Any = None
    _work: MuonStep | None = None  # None outside of steps, and where a step changes nothing
    _step_ops = property(lambda self: self)  # where executors look

    def set_step_executor(self, executor: Any) -> None:
        """Let ``executor.execute(optimizer, optimizer, closure)`` take the steps; None for `Muon.step`."""
        self._step_executor = executor

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, **settings: Any) -> Any:
        """Take one step, as `Muon.step`."""
        if self._step_executor is None:
            return super().step(closure, **settings)
        return self._step_executor.execute(self, self, closure, **settings)

    def optimization_units(self, optimizer: Muon) -> tuple[Unit, ...]:
        """Return a unit for each parameter of Muon's half, in order.

        Raises:
            ValueError: a rule sums over matrices, or keeps more than momentum and weights; or momentum is elsewhere
                than its parameter, or in int8.
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
        """Agree with all ranks, create state and update AdamW's parameters; raise as `Muon.step` does, on all ranks."""
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
        """Fold the gradient into the momentum, and write the direction: of what this rank stores, in its shape."""
        if self._work is not None:
            self._work.read(self._numbers[unit.metadata], self._legs(self._work, unit, out[VALUE]))

    @plain_modes()
    def compute(self, unit_metadata: Tensor, inputs: Mapping[str, Tensor], *, out: Mapping[str, Tensor]) -> None:
        """Orthogonalize the matrices of a whole parameter; ``out`` may be ``inputs``."""
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
        """Decay and update what this rank stores of a parameter."""
        if self._work is not None:
            self._work.write(self._legs(self._work, unit, updates[VALUE]))
            self._left.discard(unit.metadata)

    @plain_modes()
    def end_step(self, context: Any) -> None:
        """End the step; if a unit was left out, it counts as interrupted, and the next one raises `StateError`."""
        self._work = None
        if not self._left:
            context.__exit__(None, None, None)

    def _legs(self, work: MuonStep, unit: Unit, local: Tensor) -> LegViews:
        """Return the legs of a parameter's matrices, with their views of a tensor that is laid out as it is stored."""
        ready, numbers = work.companions.ready, self._numbers[unit.metadata]
        compute, shape = ready.precision.compute, ready.here(numbers[0]).local.shape
        exact = torch.promote_types(local.dtype, compute) == local.dtype
        if not (exact and local.shape == shape and local.is_contiguous()):
            needed = f"a contiguous {tuple(shape)}, which holds numbers of {compute} exactly"
            write = f"Let the executor pass torch.empty({tuple(shape)}, dtype={compute})"
            raise ValueError(explain_error(unit.name, f"{tuple(local.shape)} in {local.dtype}", needed, write))
        legs = (Leg(n, ready.plan.assignments[n].parameter, piece, 0) for n in numbers for piece in ready.holdings[n])
        return tuple((leg, view_in_storage(local, leg.piece)) for leg in legs)
