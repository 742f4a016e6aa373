"""A step driven by an executor, phase by phase, as torch plans it: the bits of `Muon.step`.

The types are those of pytorch #191670 as of 2026-07-31, which no release has, and the executor does what the one of
torchtitan #3986 does: it hands out shards to `prepare` and `apply_updates`, and whole parameters to `compute`.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import muonmesh as mm
from muonmesh.errors import StateError
from muonmesh.integrations.step_ops import ScheduledMuon
from muonmesh.numerics.rules import RULES, Rule
from tests import problem

STEPS = 4
SERVED = ["dynmuon", "muon", "muon_plus", "muoneq", "scion_row_norm", "scion_sign"]
BEYOND = ["adamuon", "hyperball", "normuon", "soap"]
HALF = {"master_dtype": torch.float32}


# ------------------------------------------------------------------ what torch plans


@dataclass(frozen=True)
class OptimizationUnit:
    parameter: Tensor
    parameter_group: Mapping[str, Any]
    state: Mapping[str, Any]
    gradient: Tensor | None
    name: str | None = None
    metadata: Any = None
    compute_requirements: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class OptimizerStepOps(Protocol):
    def optimization_units(self, optimizer: Any) -> tuple[OptimizationUnit, ...]: ...
    def begin_step(self, optimizer: Any) -> Any: ...
    def prepare(self, unit: OptimizationUnit, *, out: dict[str, Tensor]) -> None: ...
    def compute(self, unit_metadata: Any, inputs: Mapping[str, Tensor], *, out: dict[str, Tensor]) -> None: ...
    def apply_updates(self, unit: OptimizationUnit, updates: Mapping[str, Tensor]) -> None: ...
    def end_step(self, context: Any) -> None: ...


@dataclass(frozen=True)
class Owned:
    """What an executor is told: the last dims, so many, are whole where it calls `compute`."""

    trailing_dims: int


@contextmanager
def planned() -> Iterator[None]:
    """Torch with what it plans."""
    torch.optim.OptimizationUnit = OptimizationUnit
    try:
        yield
    finally:
        del torch.optim.OptimizationUnit


# ------------------------------------------------------------------ the executor


@dataclass
class Moving:
    """A unit under way: with what this rank stores, its part of each value, and the whole where this rank owns it."""

    held: Tensor
    unit: OptimizationUnit
    owner: int
    part: dict[str, Tensor]
    whole: dict[str, Tensor]


class Executor:
    """Takes the units of each step in another order, two under way at a time; each has an owner that computes it.

    Shards travel to the owner and back, by Shard(0) on a mesh of one axis. Of a tensor that every rank holds whole,
    the owner's result is broadcast.
    """

    def __init__(self, optimizer: ScheduledMuon, dtype: torch.dtype | None = None) -> None:
        self.names = [unit.name for unit in optimizer._step_ops.optimization_units(optimizer)]
        self.random, self.dtype = random.Random(7), dtype  # the same order on all ranks, since they meet for each
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.leaves_out: str | None = None
        self.kept: dict[str, set[str]] = {}

    def execute(self, optimizer: ScheduledMuon, ops: OptimizerStepOps, closure: Callable[[], Any] | None = None) -> Any:
        assert isinstance(ops, OptimizerStepOps)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        context = ops.begin_step(optimizer)
        try:
            units = ops.optimization_units(optimizer)
            assert [unit.name for unit in units] == self.names
            units = [unit for unit in units if unit.gradient is not None and unit.name != self.leaves_out]
            self.random.shuffle(units)
            under_way: list[Moving] = []
            for number, unit in enumerate(units):
                under_way.append(self.send(ops, unit, number % self.world))
                if len(under_way) == 2:
                    self.receive(ops, under_way.pop(0))
            for moving in under_way:
                self.receive(ops, moving)
        finally:
            ops.end_step(context)
        return loss

    def send(self, ops: OptimizerStepOps, unit: OptimizationUnit, owner: int) -> Moving:
        held, state = unit.parameter, {key: stored(value) for key, value in unit.state.items()}
        assert all(isinstance(value, DTensor) == isinstance(held, DTensor) for value in unit.state.values())
        local = replace(unit, parameter=stored(held), gradient=stored(unit.gradient), state=state)
        requires = unit.compute_requirements
        if requires:  # state is there before the first unit, and of the same tensors in each step
            assert self.kept.setdefault(str(unit.name), set(state)) == set(state) != set()
        assert list(requires.values()) == [Owned(held.ndim)] * len(requires)
        part = {key: torch.full_like(local.parameter, float("nan"), dtype=self.dtype) for key in requires}
        ops.prepare(local, out=part)
        whole = {key: self.gathered(held, value, owner) for key, value in part.items()}
        if owner == self.rank:
            ops.compute(unit.metadata, whole, out=whole)
        return Moving(held, local, owner, part, whole)

    def receive(self, ops: OptimizerStepOps, moving: Moving) -> None:
        for key, part in moving.part.items():
            self.scattered(moving.held, moving.whole[key], moving.owner, part)
        ops.apply_updates(moving.unit, moving.part)

    def splits(self, held: Tensor, owner: int) -> tuple[list[int], list[int]]:
        """What the owner has of each rank, and what this rank has of each owner."""
        rows = [Shard.local_shard_size_and_offset(len(held), self.world, rank)[0] for rank in range(self.world)]
        sizes = [int(some) * (held.numel() // len(held)) for some in rows]
        whole = sizes if owner == self.rank else [0] * self.world
        return whole, [sizes[self.rank] if rank == owner else 0 for rank in range(self.world)]

    def gathered(self, held: Tensor, part: Tensor, owner: int) -> Tensor:
        if not sharded(held):
            return part.clone()
        whole, own = self.splits(held, owner)
        found = part.new_empty(sum(whole))
        dist.all_to_all_single(found, part.flatten(), whole, own)
        return found.view(held.shape) if owner == self.rank else found

    def scattered(self, held: Tensor, whole: Tensor, owner: int, part: Tensor) -> None:
        if sharded(held):
            sizes, own = self.splits(held, owner)
            dist.all_to_all_single(part.view(-1), whole.flatten(), own, sizes)
            return
        if self.world > 1:
            dist.broadcast(whole, owner)
        part.copy_(whole)


def stored(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


# ------------------------------------------------------------------ what is stepped


def grouped(model: nn.Module, algorithm: str) -> list[dict[str, Any]]:
    muon, adamw = problem.groups(model)
    return [{**muon, "algorithm": algorithm}, adamw]


def made(layout: str, dtype: torch.dtype, algorithm: str = "muon", **settings: Any) -> tuple[nn.Module, ScheduledMuon]:
    model, group = problem.hold(layout, {name: value.to(dtype) for name, value in problem.initial().items()})
    chosen = {**problem.SETTINGS, "process_group": group, **settings}
    return model, ScheduledMuon(grouped(model, algorithm), requires=Owned, **chosen)


def give(model: nn.Module, step: int) -> None:
    for name, gradient in problem.zeroed(step).items():
        parameter = model.get_parameter(name)
        parameter.grad = None if gradient is None else problem.placed_like(parameter, gradient)


def stepped(model: nn.Module, optimizer: mm.Muon, steps: int = STEPS) -> dict[str, Tensor]:
    for step in range(steps):
        give(model, step)
        optimizer.step()
    return problem.result(model, optimizer)


def scheduled(layout: str, dtype: torch.dtype, algorithm: str, settings: dict[str, Any]) -> list[str]:
    """What differs between a step of `Muon` in one process and an executor's step in a layout."""
    expected = stepped(*made("local", dtype, algorithm, **settings))
    with planned():
        model, optimizer = made(layout, dtype, algorithm, **settings)
        optimizer._step_executor = Executor(optimizer)
        return problem.differing(stepped(model, optimizer), expected)


def cases(few: list[tuple[Any, ...]], every: list[tuple[Any, ...]]) -> list[Any]:
    """Cases of `make test`, and all others for `make soak`."""
    return [pytest.param(*case, marks=[] if case in few else pytest.mark.soak) for case in every]


ALONE = [(rule, *held) for rule in SERVED for held in [(torch.float32, {}), (torch.bfloat16, HALF)]]
RANKS = [(layout, rule) for layout in ("shard0", "ddp") for rule in SERVED]
OTHERS: list[tuple[Any, ...]] = [
    (layout, *held)
    for layout in ("fsdp", "replicate")
    for held in [
        (torch.bfloat16, HALF),
        (torch.bfloat16, {"stochastic_rounding": 3}),
        (torch.float32, {"compute_dtype": torch.float32, "decay_mode": "cautious"}),
    ]
]


@pytest.mark.parametrize(("algorithm", "dtype", "settings"), cases([ALONE[2], ALONE[7]], ALONE))
def test_the_same_bits_in_one_process(algorithm: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    assert scheduled("local", dtype, algorithm, settings) == []


@pytest.mark.parametrize(("layout", "algorithm"), cases([("shard0", "muoneq"), ("ddp", "muon")], RANKS))
def test_the_same_bits_on_two_ranks(workers, layout: str, algorithm: str) -> None:
    assert workers(2).run(scheduled, layout, torch.float32, algorithm, {}) == [[]] * 2


@pytest.mark.parametrize(("layout", "dtype", "settings"), cases([OTHERS[0]], OTHERS))
def test_the_same_bits_with_other_settings(workers, layout: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    assert workers(2).run(scheduled, layout, dtype, "muon", settings) == [[]] * 2


# ------------------------------------------------------------------ what does not go through


def test_what_an_executor_cannot_do_is_refused() -> None:
    """By rule and parameter; every rule is either served or refused."""
    known = {
        name for name, rule in RULES.items() if issubclass(rule, Rule) and rule.__module__.startswith("muonmesh.n")
    }
    assert known == {*SERVED, *BEYOND}
    settings: list[tuple[str, dict[str, Any]]] = [(rule, {}) for rule in BEYOND]
    settings += [
        ("muon", {"state_dtype": "int8"}),
        ("muon", {"gradients": "to_owners"}),
        ("muon", {"shard_state": True}),
    ]
    for algorithm, wrong in settings:
        with planned():
            _, optimizer = made("local", torch.float32, algorithm, **wrong)
            with pytest.raises(
                ValueError, match=rf"^one: found '{algorithm}' with these settings; needed a rule without"
            ):
                Executor(optimizer)


def test_a_value_that_would_round_otherwise_is_refused() -> None:
    with planned():
        model, optimizer = made("local", torch.bfloat16, compute_dtype=torch.float32, **HALF)
        optimizer._step_executor = Executor(optimizer)
        give(model, 0)
        with pytest.raises(ValueError, match=r"in torch\.bfloat16; needed \(.*holds numbers of torch\.float32 exactly"):
            optimizer.step()
        model, optimizer = made("local", torch.bfloat16, compute_dtype=torch.float32, **HALF)
        optimizer._step_executor = Executor(optimizer, torch.float32)
        found = stepped(model, optimizer)
    expected = stepped(*made("local", torch.bfloat16, compute_dtype=torch.float32, **HALF))
    assert problem.differing(found, expected) == []


def skips() -> tuple[bool, list[str], list[str]]:
    """An overflow that one rank alone has found: no rank changes anything, and the next step goes on."""
    with planned():
        model, optimizer = made("shard0", torch.float32)
        optimizer._step_executor = Executor(optimizer)
        before = stepped(model, optimizer, 1)
        optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))
        give(model, 1)
        assert optimizer.step(lambda: 3.0 if torch.is_grad_enabled() else None) == 3.0
        skipped, same = optimizer.skipped, problem.differing(problem.result(model, optimizer), before)
        del optimizer.found_inf
        optimizer.step()
    model, alone = made("local", torch.float32)
    stepped(model, alone, 1)
    give(model, 1)
    alone.step()
    return skipped, same, problem.differing(problem.result(*_held(optimizer)), problem.result(model, alone))


def _held(optimizer: mm.Muon) -> tuple[nn.Module, mm.Muon]:
    model = nn.Module()
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            model.register_parameter(name, parameter)
    return model, optimizer


def test_all_ranks_skip(workers) -> None:
    assert workers(2).run(skips) == [(True, [], [])] * 2


def test_a_step_with_a_unit_left_out_is_interrupted() -> None:
    with planned():
        model, optimizer = made("local", torch.float32)
        executor = optimizer._step_executor = Executor(optimizer)
        executor.leaves_out = "even"
        give(model, 0)
        optimizer.step()
        with pytest.raises(StateError, match="interrupted while it wrote"):
            optimizer.step()


def test_without_an_executor_and_copied() -> None:
    """It is `Muon` then; a copy and a pickle have no executor, and may be given one."""
    expected = stepped(*made("local", torch.float32))
    model = problem.Bag(problem.initial())
    plain = mm.Muon(problem.groups(model), **problem.SETTINGS, process_group="local")
    assert problem.differing(stepped(model, plain), expected) == []
    _, optimizer = made("local", torch.float32)
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        twin = copied(optimizer)
        with planned():
            twin._step_executor = Executor(twin)
            assert problem.differing(stepped(*_held(twin)), expected) == []
