"""A step that an executor drives, unit by unit, as torch plans it: the bits of `Muon.step`.

No release of torch has executors. The one here is ours, and keeps to the order of calls that pytorch #191670 lays down
and torchtitan #3986 follows: shards to `prepare` and `apply_updates`, and whole parameters to `compute`.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import muonmesh as mm
from muonmesh.errors import StateError
from muonmesh.integrations.step_ops import VALUE, ScheduledMuon, Unit
from muonmesh.numerics.rules import RULES, Rule
from tests import problem

STEPS = 4
SERVED = ["dynmuon", "muon", "muon_plus", "muoneq", "scion_row_norm", "scion_sign"]
BEYOND = ["adamuon", "hyperball", "normuon", "soap"]
HALF = {"master_dtype": torch.float32}


@dataclass(frozen=True)
class Whole:
    """What the executor is told: the last dims, so many, are whole where it calls `compute`."""

    dims: int


class Executor:
    """Takes the units of each step in another order, two under way at a time; each has an owner, which computes it.

    Shards travel to the owner and back, by Shard(0) on a mesh of one axis. Of a tensor that every rank holds whole,
    the owner's result is broadcast.
    """

    def __init__(self, optimizer: ScheduledMuon, dtype: torch.dtype | None = None) -> None:
        self.names = [unit.name for unit in optimizer._step_ops.optimization_units(optimizer)]
        self.random, self.dtype = random.Random(7), dtype  # the same order on all ranks, since they meet for each
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.leaves_out: str | None = None
        optimizer.requires = Whole
        optimizer.set_step_executor(self)

    def execute(self, optimizer: ScheduledMuon, ops: ScheduledMuon, closure: Callable[[], Any] | None = None) -> Any:
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
            under_way: list[Callable[[], None]] = []
            for number, unit in enumerate(units):
                under_way.append(self.send(ops, unit, number % self.world))
                if len(under_way) == 2:
                    under_way.pop(0)()
            for receive in under_way:
                receive()
        finally:
            ops.end_step(context)
        return loss

    def send(self, ops: ScheduledMuon, unit: Unit, owner: int) -> Callable[[], None]:
        """Send a unit on its way to its owner; return what receives it."""
        held, state = unit.parameter, {key: stored(value) for key, value in unit.state.items()}
        assert unit.compute_requirements == {VALUE: Whole(held.ndim)}
        assert state_lies_beside(unit)
        local = replace(unit, parameter=stored(held), gradient=stored(unit.gradient), state=state)
        part = torch.full_like(local.parameter, float("nan"), dtype=self.dtype)
        ops.prepare(local, out={VALUE: part})
        whole = {VALUE: self.gathered(held, part, owner)}
        if owner == self.rank:
            ops.compute(unit.metadata, whole, out=whole)

        def receive() -> None:
            self.scattered(held, whole[VALUE], owner, part)
            ops.apply_updates(local, {VALUE: part})

        return receive

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


def state_lies_beside(unit: Unit) -> bool:
    """Whether there is state, all of it laid out as the parameter is, before the first unit is prepared."""
    layouts = [(value.placements if isinstance(value, DTensor) else None) for value in unit.state.values()]
    placed = unit.parameter.placements if isinstance(unit.parameter, DTensor) else None
    return bool(layouts) and layouts == [placed] * len(layouts)


# ------------------------------------------------------------------ the bits


def made(layout: str, dtype: torch.dtype, algorithm: str = "muon", **settings: Any) -> tuple[nn.Module, ScheduledMuon]:
    model, group = problem.hold(layout, {name: value.to(dtype) for name, value in problem.initial().items()})
    muon, adamw = problem.groups(model)
    chosen = {**problem.SETTINGS, "process_group": group, **settings}
    return model, ScheduledMuon([{**muon, "algorithm": algorithm}, adamw], **chosen)


def give(model: nn.Module, step: int) -> None:
    for name, gradient in problem.zeroed(step).items():
        parameter = model.get_parameter(name)
        parameter.grad = None if gradient is None else problem.placed_like(parameter, gradient)


def stepped(model: nn.Module, optimizer: mm.Muon, clip: float | None = None) -> dict[str, Tensor]:
    for step in range(STEPS):
        give(model, step)
        if clip is not None:
            optimizer.clip_grad_norm_(clip, policy="all")
        optimizer.step()
    return problem.result(model, optimizer)


def scheduled(
    layout: str, dtype: torch.dtype, algorithm: str, settings: dict[str, Any], clip: float | None = None
) -> list[str]:
    """What differs between a step of `Muon` in one process and an executor's step in a layout."""
    expected = stepped(*made("local", dtype, algorithm, **settings), clip)
    model, optimizer = made(layout, dtype, algorithm, **settings)
    Executor(optimizer)
    return problem.differing(stepped(model, optimizer, clip), expected)


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


def test_the_same_bits_with_clipped_gradients(workers) -> None:
    """Clipping decides before the step, and the step divides; so it is right whoever drives the step."""
    assert scheduled("local", torch.float32, "muon", {}, 0.5) == []
    assert workers(2).run(scheduled, "shard0", torch.float32, "muon", {}, 0.5) == [[]] * 2


# ------------------------------------------------------------------ what is skipped, interrupted and refused


def skips() -> tuple[bool, list[str], list[str]]:
    """An overflow that one rank alone has found: no rank changes anything, and the next step goes on."""
    model, optimizer = made("shard0", torch.float32)
    Executor(optimizer)
    before = stepped(model, optimizer)
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))
    give(model, 1)
    assert optimizer.step(lambda: 3.0 if torch.is_grad_enabled() else None) == 3.0
    skipped, same = optimizer.skipped, problem.differing(problem.result(model, optimizer), before)
    del optimizer.found_inf
    optimizer.step()
    reference, alone = made("local", torch.float32)
    stepped(reference, alone)
    give(reference, 1)
    alone.step()
    return skipped, same, problem.differing(problem.result(model, optimizer), problem.result(reference, alone))


def test_all_ranks_skip(workers) -> None:
    assert workers(2).run(skips) == [(True, [], [])] * 2


def test_a_step_with_a_unit_left_out_is_interrupted() -> None:
    model, optimizer = made("local", torch.float32)
    Executor(optimizer).leaves_out = "even"
    give(model, 0)
    optimizer.step()
    with pytest.raises(StateError, match="interrupted while it wrote"):
        optimizer.step()


def test_what_an_executor_cannot_do_is_refused() -> None:
    """By rule and parameter; every rule is either served or refused."""
    ours = {name for name, rule in RULES.items() if issubclass(rule, Rule) and rule.__module__.startswith("muonmesh.n")}
    assert ours == {*SERVED, *BEYOND}
    settings: list[tuple[str, dict[str, Any]]] = [(rule, {}) for rule in BEYOND]
    settings += [("muon", wrong) for wrong in ({"state_dtype": "int8"}, {"gradients": "to_owners"})]
    settings += [("muon", wrong) for wrong in ({"shard_state": True}, {"state_device": "cpu"})]
    for algorithm, wrong in settings:
        _, optimizer = made("local", torch.float32, algorithm, **wrong)
        with pytest.raises(
            ValueError, match=f"^group 'muon': found '{algorithm}' with these settings; needed a rule without"
        ):
            Executor(optimizer)


def test_a_value_that_would_round_otherwise_is_refused() -> None:
    settings = {"compute_dtype": torch.float32, **HALF}
    model, optimizer = made("local", torch.bfloat16, **settings)
    Executor(optimizer)
    give(model, 0)
    with pytest.raises(ValueError, match=r"in torch\.bfloat16; needed .*holds numbers of torch\.float32 exactly\. Let"):
        optimizer.step()
    model, optimizer = made("local", torch.bfloat16, **settings)
    Executor(optimizer, torch.float32)
    expected = stepped(*made("local", torch.bfloat16, **settings))
    assert problem.differing(stepped(model, optimizer), expected) == []


def test_without_an_executor_and_copied() -> None:
    """It is `Muon` then; a copy and a pickle have no executor, and may be given one."""
    model = problem.Bag(problem.initial())
    expected = stepped(model, mm.Muon(problem.groups(model), **problem.SETTINGS, process_group="local"))
    model, optimizer = made("local", torch.float32)
    Executor(optimizer)
    twins = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert [twin._step_executor for twin in twins] == [None, None]
    for twin in twins:
        Executor(twin)
    for one in (made("local", torch.float32)[1], *twins):
        held = nn.Module()
        for group in one.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                held.register_parameter(name, parameter)
        assert problem.differing(stepped(held, one), expected) == []
