"""Saved under any layout, loaded under any other: training goes on bit for bit as if one process had never stopped."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Placement, Shard

import muonmesh as mm
import tests.support.workers  # noqa: F401 - says what the process that ranks are copies of imports
from muonmesh.comm.storage import local_of
from muonmesh.integrations import fsdp1
from muonmesh.step.connection import placed_members
from tests.support import gathered, layouts, problem
from tests.support.in_copies import work_in_copies
from tests.support.layouts import R, S, strided
from tests.support.meshes import machines, mesh_of

# Split into rows, interleaved, stored in × out, stacked; tall and wide, smaller than the ranks, uneven; AdamW's half.
NAMES = ("few", "qkv", "neox", "conv1d", "expert_gate_up", "embedding", "bias")
PARAMETERS = {name: problem.PARAMETERS[name] for name in NAMES}
FIRST, LAST = 1, 3  # steps before the checkpoint, and at the end
RULES: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"algorithm": "normuon", "normuon_side": "longer", "normuon_beta2": 0.8},  # state by row or by column
    "hyperball": {"algorithm": "hyperball"},  # by matrix
    "adamuon": {"algorithm": "adamuon", "adamuon_beta2": 0.8},  # by element
}


@dataclass
class Case:
    """A model and its optimizer on this rank.

    Attributes:
        give: Sets all gradients from whole ones.
        whole: Returns parameters and state, whole, by name.
    """

    model: nn.Module
    optimizer: mm.Muon
    give: Callable[[dict[str, Tensor | None]], None]
    whole: Callable[[], dict[str, Tensor]]

    def advance(self, first: int, last: int) -> None:
        for step in range(first, last):
            gradients = problem.gradients(step % 5)  # which grow tenfold from one to the next
            self.give({name: gradients[name] for name in NAMES})
            self.optimizer.clip_grad_norm_(1e30, policy="separate", skip_above="1e9x")  # counts norms, skips nothing
            self.optimizer.step()
        self.optimizer.zero_grad()


def values_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    values = problem.initial(seed)
    return {name: values[name].to(dtype) for name in NAMES}


def optimizer_of(
    groups: list[dict[str, Any]], rule: str = "muon", *, in_copies: bool = False, **settings: Any
) -> mm.Muon:
    """An optimizer; ``in_copies`` works on its state as on that of the host (`test_offload.py`)."""
    for group in groups:
        if group["algorithm"] == "muon":
            group.update(RULES[rule])
    optimizer = mm.Muon(groups, **settings)
    if in_copies:
        work_in_copies(optimizer)
    return optimizer


def of_model(layout: str, seed: int, dtype: torch.dtype = torch.float32, machine: int = 0, **settings: Any) -> Case:
    model, group = problem.hold(layout, values_of(seed, dtype))
    with machines(machine) if machine else nullcontext():
        optimizer = optimizer_of(problem.groups(model), process_group=group, **settings)

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            parameter = model.get_parameter(name)
            parameter.grad = None if gradient is None else problem.placed_like(parameter, gradient)

    return Case(model, optimizer, give, lambda: problem.result(model, optimizer))


def of_held(layout: layouts.Held, **settings: Any) -> Case:
    optimizer = optimizer_of(layout.groups, **layout.settings, **settings)
    model = nn.Module()
    for name, tensor in layout.tensors.items():
        model.register_parameter(name, tensor)  # type: ignore[arg-type]
    return Case(model, optimizer, layout.give, lambda: layout.whole(optimizer))


def on_mesh(
    hold: Any, sizes: tuple[int, ...], placements_for: Callable[[str, int], list[Placement]], values: dict[str, Tensor]
) -> layouts.Held:
    def placements(name: str, shape: tuple[int, ...]) -> Sequence[Placement]:
        return placements_for(name, len(shape))

    layout: layouts.Held = hold(PARAMETERS, values, mesh_of(sizes), placements)
    return layout


def alternating(name: str, dims: int) -> list[Placement]:
    """As tensor parallelism cuts: one weight by rows, the next by columns."""
    return [Shard(NAMES.index(name) % 2 % dims)]


def strided_rows(name: str, dims: int) -> list[Placement]:
    """FSDP2 over tensor parallelism, by rows and by columns."""
    return [strided(0, 2), S(0)] if NAMES.index(name) % 2 else [S(0), S(dims - 1)]


def experts(name: str, dims: int) -> list[Placement]:
    return [S(0), S(1)] if dims == 3 else [R, R]


def whole_of(optimizer: mm.Muon) -> dict[str, Tensor]:
    """Parameters and state, whole, by name, wherever they live."""
    parts, shapes, counts = {}, {}, {}
    for member in placed_members(optimizer):
        for key, value in {"": member.tensor, **optimizer.state[member.tensor]}.items():
            layout = member.state_layouts.get(key, member).storage.layout
            name = f"{member.name}.{key}" if key else member.name
            if key == "step":
                counts[name] = value.clone()
            else:
                parts[name], shapes[name] = layouts.elements(local_of(value).detach().clone(), layout), layout.shape
    return {**gathered.join(parts, shapes), **counts}


def to_owners(*, sharded: bool = False) -> Make:
    """Replicas that add gradients up at owners, plain or of FSDP2's shards; each gradient is one replica's, times R."""

    def make(seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
        model, group = problem.Bag(values_of(seed, dtype)), dist.group.WORLD
        if sharded:
            mesh = mesh_of((2, dist.get_world_size() // 2), names=("replicate", "shard"))
            fully_shard(model, mesh=mesh["shard"])
            group = mesh["replicate"].get_group()
        groups = problem.groups(model)
        optimizer = optimizer_of(groups, process_group=group, gradients="to_owners", memory_budget_mb=0.064, **settings)
        replica, copies = dist.get_rank(group), dist.get_world_size(group)

        def give(gradients: dict[str, Tensor | None]) -> None:
            for number, (name, gradient) in enumerate(gradients.items()):
                parameter = model.get_parameter(name)
                parameter.grad = None
                if gradient is not None and number % copies == replica:
                    parameter.grad = problem.placed_like(parameter, gradient * copies)  # copies are a power of 2

        return Case(model, optimizer, give, lambda: whole_of(optimizer))

    return make


def of_fsdp1(seed: int, **settings: Any) -> Case:
    model = problem.Bag(values_of(seed))
    groups = problem.groups(model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    declared: Any = fsdp1.declared_layouts(wrapped)
    optimizer = optimizer_of(groups, layouts=declared, **settings)
    parameters = dict(zip(declared, (p for p in wrapped.parameters()), strict=True))

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            assert gradient is not None
            parameters[name].grad = layouts.cut(gradient, declared[name], dist.get_rank())

    return Case(wrapped, optimizer, give, lambda: whole_of(optimizer))


Make = Callable[..., Case]


def model_in(layout: str, **settings: Any) -> Make:
    return functools.partial(of_model, layout, **settings)


def held_on(hold: Any, sizes: tuple[int, ...], placements_for: Callable[[str, int], list[Placement]]) -> Make:
    def make(seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
        return of_held(on_mesh(hold, sizes, placements_for, values_of(seed, dtype)), **settings)

    return make


def flat(tensor_parallel: int = 1) -> Make:
    def make(seed: int, **settings: Any) -> Case:
        layout = layouts.flat(PARAMETERS, values_of(seed), tensor_parallel=tensor_parallel, seed=tensor_parallel)
        return of_held(layout, **settings)

    return make


# name: (ranks, how it is made). The order is that in which `make test` goes round.
LAYOUTS: dict[str, tuple[int, Make]] = {
    "one process": (1, model_in("local")),
    "ddp 2": (2, model_in("ddp")),
    "fsdp 4": (4, model_in("fsdp")),
    "shard 1 on 2": (2, model_in("shard1")),
    "hsdp": (4, model_in("hsdp")),
    "tp 2": (2, held_on(layouts.dtensors, (2,), alternating)),
    "fsdp over tp": (4, held_on(layouts.dtensors, (2, 2), strided_rows)),
    "flat 2": (2, flat()),
    "experts": (4, held_on(layouts.dtensors, (2, 2), experts)),
    "declared 2": (2, held_on(layouts.declared, (2,), alternating)),
    "flat over tp": (4, flat(2)),
    "fsdp 2": (2, model_in("fsdp")),
    "hsdp, shared state": (4, model_in("hsdp", shard_state=True)),
    "ddp 4": (4, model_in("ddp")),
    "declared over tp": (4, held_on(layouts.declared, (2, 2), strided_rows)),
    "fsdp1": (2, of_fsdp1),
    "ddp, shared state": (4, model_in("ddp", shard_state=True)),
    "shard 0 on 2": (2, model_in("shard0")),
    "ddp 4 to owners": (4, to_owners()),
    "ddp 2 to owners": (2, to_owners()),
    "hsdp to owners": (4, to_owners(sharded=True)),
    "ddp on two machines": (4, model_in("ddp", machine=2)),
}


def build(layout: str, seed: int = 0, **settings: Any) -> Case:
    return LAYOUTS[layout][1](seed, **{**problem.SETTINGS, "compute_dtype": torch.float32, **settings})


def save(layout: str, path: str, settings: dict[str, Any]) -> None:
    case = build(layout, **settings)
    case.advance(0, FIRST)
    mm.checkpoint.save(path, case.model, case.optimizer)


def load(layout: str, path: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    case = build(layout, seed=7, **settings)  # other weights than those that were saved
    mm.checkpoint.load(path, case.model, case.optimizer)
    case.advance(FIRST, LAST)
    case.optimizer.finish()
    assert {group["norm_means"][1] for group in case.optimizer.param_groups} == {(LAST, LAST, LAST)}
    return case.whole()


@functools.cache
def uninterrupted(**settings: Any) -> dict[str, Tensor]:
    case = build("one process", **settings)
    case.advance(0, LAST)
    return case.whole()


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Where the checkpoint of a layout is; each is saved once, and loaded by many."""

    @functools.cache
    def path_of(layout: str, **settings: Any) -> Path:
        path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
        workers(LAYOUTS[layout][0]).run(save, layout, str(path), settings)
        return path

    return path_of


def check(workers: Any, path: Path, after: str, **settings: Any) -> None:
    expected = uninterrupted(**settings)
    for result in workers(LAYOUTS[after][0]).run(load, after, str(path), settings):
        assert problem.differing(result, expected) == []


@pytest.mark.soak
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_checkpoint_of_any_layout_loads_into_any_other(workers, saved, before: str, after: str) -> None:
    check(workers, saved(before), after)


def go_on(layout: str, step: int, before: str, after: str) -> dict[str, Tensor]:
    """Load what another layout saved, take a step, and save."""
    case = build(layout, seed=7)
    mm.checkpoint.load(before, case.model, case.optimizer)
    case.advance(step, step + 1)
    mm.checkpoint.save(after, case.model, case.optimizer)
    return case.whole()


def test_a_training_moves_through_all_layouts_and_back(workers, saved, tmp_path: Path) -> None:
    """Each layout once as what is saved and once as what it is loaded into; the bits are those of one process."""
    first, *others = LAYOUTS
    path = saved(first)
    alone = build(first)
    alone.advance(0, FIRST)
    for step, layout in enumerate([*others, first], FIRST):
        alone.advance(step, step + 1)
        after = tmp_path / str(step)
        for result in workers(LAYOUTS[layout][0]).run(go_on, layout, step, str(path), str(after)):
            assert (layout, problem.differing(result, alone.whole())) == (layout, [])
        path = after


# Among layouts of each kind: cut by rows and by columns, replicas that share state, flat.
STATES = (
    "fsdp over tp",
    "flat 2",
    "hsdp, shared state",
    "declared over tp",
    "one process",
    "flat over tp",
    "shard 1 on 2",
    "hsdp to owners",
)
TRIED = {("normuon", "fsdp over tp", "flat 2"), ("hyperball", "declared over tp", "one process")}


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        pytest.param(rule, a, b, marks=() if (rule, a, b) in TRIED else pytest.mark.soak)
        for rule in RULES
        if rule != "muon"
        for a in STATES
        for b in STATES
    ],
)
def test_what_rules_keep_goes_along(workers, saved, rule: str, before: str, after: str) -> None:
    """By element, row, column and matrix."""
    check(workers, saved(before, rule=rule), after, rule=rule)


MASTERS = {"dtype": torch.bfloat16, "master_dtype": torch.float32}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp 2", "hsdp, shared state"),
        pytest.param("one process", "declared over tp", marks=pytest.mark.soak),
        pytest.param("tp 2", "one process", marks=pytest.mark.soak),
    ],
)
def test_masters_go_along_as_the_weights(workers, saved, before: str, after: str) -> None:
    """Weights are saved as they are trained, so a model in fp32 takes them too, to the last bit."""
    path = saved(before, **MASTERS)
    check(workers, path, after, **MASTERS)
    for weights in workers(1).run(loaded_in_full, str(path), MASTERS):
        assert weights == []


IN_COPIES = {"in_copies": True, "state_device": "cpu"}


@pytest.mark.parametrize("rule", ["muon", pytest.param("adamuon", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp 2", "flat 2"),
        *(
            pytest.param(a, b, marks=pytest.mark.soak)
            for a in ("hsdp, shared state", "declared over tp", "one process")
            for b in ("flat over tp", "fsdp over tp")
        ),
    ],
)
def test_state_on_the_host_goes_along_and_so_does_state_that_was_not_there(
    workers, saved, rule: str, before: str, after: str
) -> None:
    check(workers, saved(before, rule=rule, **IN_COPIES), after, rule=rule)
    check(workers, saved(before, rule=rule), after, rule=rule, **IN_COPIES)


def loaded_in_full(path: str, settings: dict[str, Any]) -> list[str]:
    """Load what has masters into a model in fp32, and return which weights are not the masters."""
    local_case = build("one process", seed=7)
    mm.checkpoint.load(path, local_case.model, local_case.optimizer)
    trained = build("one process", **settings)
    trained.advance(0, FIRST)
    whole, loaded = trained.whole(), local_case.whole()
    return [name for name in NAMES if not torch.equal(loaded[name], whole[f"{name}.master"])]


# ------------------------------------------------------------------ killed at random moments

# One training goes through these, one after the other and again.
ORDER = (
    "ddp 4 to owners",
    "one process",
    "hsdp to owners",
    "fsdp 2",
    "ddp on two machines",
    "ddp 2 to owners",
    "hsdp to owners",
    "fsdp 4",
)
KEPT = 3  # checkpoints


def newest(folder: Path) -> int:
    """The last step of which there is a whole checkpoint."""
    return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)


def trained(folder: str, layout: str, last: int, rank: int, port: int) -> None:
    """What each rank does: go on from the newest checkpoint, and save after every step."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks, checkpoints = LAYOUTS[layout][0], Path(folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    first = newest(checkpoints)
    case = build(layout, seed=7 if first else 0)
    if first:
        mm.checkpoint.load(checkpoints / str(first), case.model, case.optimizer)
    dist.barrier()  # none saves before all have looked
    for step in range(first, last):
        case.advance(step, step + 1)
        mm.checkpoint.save(checkpoints / str(step + 1), case.model, case.optimizer)
        if rank == 0 and step >= KEPT:
            shutil.rmtree(checkpoints / str(step + 1 - KEPT))
    os._exit(0)


def started(folder: Path, layout: str, last: int) -> tuple[list[BaseProcess], dist.TCPStore]:
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    for rank in range(LAYOUTS[layout][0]):
        process = context.Process(target=trained, args=(str(folder), layout, last, rank, store.port), daemon=True)
        process.start()
        processes.append(process)
    return processes, store


def ended(processes: list[BaseProcess]) -> None:
    """As torchrun does once a rank is gone."""
    for process in processes:
        process.kill()
        process.join()


def killed_run(folder: Path, *, kills: int, seed: int, seconds: float) -> tuple[Counter[str], int]:
    """Kill a random rank at a random moment, again and again; how often which layout was, and the steps there are."""
    chance, counted, until = random.Random(seed), Counter[str](), time.monotonic() + seconds
    far, starts = 10**6, 0
    while sum(counted.values()) < kills and time.monotonic() < until:
        layout, before = ORDER[starts % len(ORDER)], newest(folder)
        processes, store = started(folder, layout, far)
        starts += 1
        while newest(folder) < before + 1 and all(process.is_alive() for process in processes):
            time.sleep(0.002)
        assert all(process.is_alive() for process in processes), f"{layout}: a rank ended by itself"
        time.sleep(chance.uniform(0.0, 0.3))
        victim = chance.choice(processes)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        if chance.random() < 0.5:  # the others find out by themselves for a while
            time.sleep(chance.uniform(0.0, 0.3))
        ended(processes)
        del store
        counted[layout] += 1
    return counted, newest(folder)


@pytest.mark.slow
@pytest.mark.soak
def test_kills_and_other_layouts_change_no_bit(workers, tmp_path: Path) -> None:
    """Three minutes on two busy cores. Gradients to owners and results passed on between machines are among them."""
    counted, steps = killed_run(tmp_path, kills=40, seed=0, seconds=400)
    print(dict(counted), steps)
    assert sum(counted.values()) >= len(ORDER), "each layout was killed"
    alone = build("one process")
    alone.advance(0, steps)
    for layout in ORDER:
        for result in workers(LAYOUTS[layout][0]).run(read, layout, str(tmp_path / str(steps))):
            assert problem.differing(result, alone.whole()) == [], layout


def read(layout: str, path: str) -> dict[str, torch.Tensor]:
    case = build(layout, seed=7)
    mm.checkpoint.load(path, case.model, case.optimizer)
    return case.whole()
