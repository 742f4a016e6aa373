"""ScheduledMuon: a Muon whose step is driven, phase by phase, by one of the executors that torch plans.

Names and arguments are those of pytorch #191670 as of 2026-07-31, as torchtitan #3986 calls them (commit 8741b514). No
release of torch has them, and their author has gone on to calls for torch.optim.Muon alone since (torchtitan #4138).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonmesh.comm.to_owners import ToOwners
from muonmesh.comm.views import view_in_matrix, view_in_storage
from muonmesh.comm.work import Ends
from muonmesh.errors import explain_error
from muonmesh.layout import MeshLayout
from muonmesh.layout.routes import Leg, pieces
from muonmesh.numerics.precision import plain_modes
from muonmesh.numerics.rules import Rule, rule_of
from muonmesh.optimizer import Muon
from muonmesh.step.muon_step import MuonStep

VALUE = "update"
"""What `StepOps` calls the only thing that travels."""


class StepOps:
    """The phases of a step: `begin_step`, for each unit with a gradient `prepare` to `apply_updates`, and `end_step`.

    Ranks agree in `begin_step`, by one small all-reduce, so that all of them call it together. Units may then come in
    any order. `prepare` and `apply_updates` work on what this rank stores, and `compute` on a whole parameter.

    Args:
        requires: Makes what the executor wants to be told of a parameter whose last dims, so many, must be whole.
    """

    def __init__(self, requires: Callable[[int], object]) -> None:
        self.requires = requires
        self._work: MuonStep | None = None  # None outside of steps, and where a step changes nothing
        self._matrices: Mapping[Tensor, Sequence[int]] = {}
        self._left = set[Tensor]()

    def optimization_units(self, optimizer: Muon) -> tuple[Any, ...]:
        """Return torch's ``OptimizationUnit`` of each parameter, in order; one of AdamW's requires nothing.

        Raises:
            ValueError: a rule sums over matrices, or keeps more than momentum and weights; or momentum is elsewhere
                than its parameter, or in int8.
        """
        units, runtime, unit = [], optimizer._runtime, torch.optim.OptimizationUnit  # type: ignore[attr-defined]
        apart = runtime.shard_state or runtime.precision.on_host or isinstance(runtime.source, ToOwners)
        for group in optimizer.param_groups:
            rule, requires = rule_of(group), isinstance(rule_of(group), Rule)
            more = requires and (rule.asks_for_sums() or not {*rule.keeps().values()} <= {"momentum", "weights"})
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if requires and (more or apart or runtime.precision.int8):
                    found = f"{group['algorithm']!r} with these settings"
                    needed = "a rule without sums, with state for each element alone, where the parameter is"
                    raise ValueError(explain_error(name, found, needed, "Set no step executor"))
                state, gradient = optimizer.state.get(parameter, {}), optimizer.gradients.gradient(parameter)
                kept = {key: state[key] for key in (*rule.keeps(), "master") if key in state}
                wanted = {VALUE: self.requires(parameter.ndim)} if requires else {}
                units.append(
                    unit(
                        parameter=parameter,
                        parameter_group=group,
                        state=kept,
                        gradient=gradient,
                        name=name,
                        metadata=parameter,
                        compute_requirements=wanted,
                    )
                )
        return tuple(units)

    @plain_modes()
    def begin_step(self, optimizer: Muon) -> Any:
        """Agree with all ranks before anything is written, and create the state; raises on all what `Muon.step` does.

        Raises:
            ValueError: as `optimization_units`.
        """
        units, context = self.optimization_units(optimizer), optimizer._agreed_step(None)
        self._left = set()
        if (agreed := context.__enter__()) is not None:
            planned, _, self._work = agreed
            self._work.companions.ready.collect(range(len(planned.plan.assignments)))
            self._matrices = planned.matrices_of
            self._left = {unit.parameter for unit in units if unit.gradient is not None}
        return context

    @plain_modes()
    def prepare(self, unit: Any, *, out: Mapping[str, Tensor]) -> None:
        """Fold the gradient into the momentum, and write the direction: of what this rank stores, in its shape."""
        if self._work is not None and (numbers := self._matrices.get(unit.metadata)):
            self._work.read(numbers, _ends(self._work, unit, numbers, out[VALUE]))

    @plain_modes()
    def compute(self, unit_metadata: Tensor, inputs: Mapping[str, Tensor], *, out: Mapping[str, Tensor]) -> None:
        """Orthogonalize the matrices of a whole parameter; ``out`` may be ``inputs``."""
        if self._work is None or unit_metadata not in self._matrices:
            return
        ready, whole = self._work.companions.ready, MeshLayout.replicated(tuple(inputs[VALUE].shape), (0,))
        for alike in ready.plan.alike(self._matrices[unit_metadata]):
            size = len(alike), *ready.matrix(alike[0]).shape
            x, y = (torch.empty(size, dtype=ready.precision.compute, device=ready.device) for _ in range(2))
            places = [(n, piece) for n, number in enumerate(alike) for piece in pieces(whole, 0, ready.matrix(number))]
            for n, piece in places:
                view_in_matrix(piece, x[n]).copy_(view_in_storage(inputs[VALUE], piece))
            self._work.orthogonalize([(x, y, alike)])
            for n, piece in places:
                view_in_storage(out[VALUE], piece).copy_(view_in_matrix(piece, y[n]))

    @plain_modes()
    def apply_updates(self, unit: Any, updates: Mapping[str, Tensor]) -> None:
        """Decay and update what this rank stores of a parameter. The first of AdamW's is stepped with all others."""
        if self._work is not None and (numbers := self._matrices.get(unit.metadata)):
            self._work.write(_ends(self._work, unit, numbers, updates[VALUE]))
            self._left.remove(unit.metadata)
        elif self._work is not None and unit.metadata in self._left:
            self._work.step_elementwise()
            self._left &= self._matrices.keys()

    @plain_modes()
    def end_step(self, context: Any) -> None:
        """End the step; while a unit has not been updated, it counts as interrupted, and the next step raises."""
        self._work = None
        if not self._left:
            context.__exit__(None, None, None)


def _ends(work: MuonStep, unit: Any, numbers: Sequence[int], local: Tensor) -> Ends:
    """Return the legs of a parameter's matrices, with their views of a tensor that is laid out as it is stored."""
    ready, stored = work.companions.ready, work.companions.ready.entry(numbers[0])
    assert stored is not None
    compute, needed = ready.precision.compute, tuple(stored.local.shape)
    if torch.promote_types(local.dtype, compute) != local.dtype or tuple(local.shape) != needed:
        found = f"a value of shape {tuple(local.shape)} in {local.dtype}"
        raise ValueError(explain_error(unit.name, found, f"{needed}, which holds numbers of {compute} exactly"))
    legs = (Leg(n, ready.plan.assignments[n].parameter, piece, 0) for n in numbers for piece in ready.holdings[n])
    return tuple((leg, view_in_storage(local, leg.piece)) for leg in legs)


class ScheduledMuon(Muon):
    """A `Muon` whose step an executor takes once it is set, by torch's ``set_step_executor``; the bits are the same.

    Args:
        params: As of `Muon`.
        requires: As of `StepOps`; for FlexShard, its class ``Owned``.
        settings: As of `Muon`.
    """

    def __init__(self, params: Iterable[Any], *, requires: Callable[[int], object], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._step_ops = StepOps(requires)

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, **settings: Any) -> Any:
        """Take one step, as `Muon.step`."""
        if (executor := getattr(self, "_step_executor", None)) is None:
            return super().step(closure, **settings)
        return executor.execute(self, self._step_ops, closure, **settings)

    def __getstate__(self) -> dict[str, Any]:
        """As of `Muon`; a copy has no executor."""
        return {**super().__getstate__(), "_step_ops": StepOps(self._step_ops.requires)}
