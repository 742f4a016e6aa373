"""Nothing silent, among ranks: what differs or goes wrong on one of them is an error on all, soon, and nobody hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import muonmesh as mm
from muonmesh.comm import rendezvous
from muonmesh.comm.storage import local_of
from muonmesh.layout import FlatShards
from muonmesh.step.runtime import Driver
from tests.support import meshes, problem
from tests.support.on_ranks import on_ranks
from tests.support.tensors import same_bits
from tests.support.workers import RankFailure

SOON = 20.0
"""Seconds within which every rank must have ended; the ranks' collectives wait for minutes."""

COVERS = (
    "comm.rendezvous.announcing_failure",
    "comm.gather_objects.gather_objects",
    "comm.rendezvous.naming_missing_ranks",
    "step.flag_vector.Flags",
    "step.replicas.said_of_settings",
)


class Two(nn.Module):
    """A matrix and a vector, whole on every rank, or the matrix cut over the ranks."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        value = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
        if layout == "fsdp":
            mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
            value = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        self.matrix = nn.Parameter(value)
        self.vector = nn.Parameter(torch.ones(5))


def two_and_optimizer(layout: str = "ddp", **settings: Any) -> tuple[Two, mm.Muon]:
    model = Two(layout)
    groups = [
        {"params": [model.matrix], "param_names": ["matrix"], "name": "muon"},
        {"params": [model.vector], "param_names": ["vector"], "name": "adamw", "algorithm": "adamw"},
    ]
    return model, mm.Muon(groups, lr=0.1, **{"process_group": "world", **settings})


def give_drawn(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        parameter.grad = problem.placed_like(parameter, gradient)


def copies_of(model: nn.Module) -> list[Tensor]:
    return [problem.whole(p) for p in model.parameters()]


# ------------------------------------------------------------------ what one rank does otherwise

FIRST, LATER, UNWAITED = "in the first step", "in a later step", "where the host does not wait"


class Mistake(NamedTuple):
    """What rank 1 alone does before a step.

    Attributes:
        make: Does it.
        message: What the step then says on both ranks.
        raises: What rank 1 raises, whose words rank 0 repeats; None: the ranks are compared, and both tell of it.
        when: The steps before which it is made.
        layout: That of the matrix.
        settings: Of rank 1's optimizer alone.
    """

    make: Callable[[Two, mm.Muon], object]
    message: str
    raises: type[Exception] | None = None
    when: tuple[str, ...] = (FIRST, LATER)
    layout: str = "ddp"
    settings: dict[str, Any] | None = None


def differently(message: str, make: Any = lambda model, optimizer: None, **settings: Any) -> Mistake:
    return Mistake(make, message, when=(FIRST,), settings=settings)


def unusable(raises: type[Exception], message: str, make: Any) -> Mistake:
    return Mistake(make, message, raises, (LATER,), "fsdp")


def set_in_groups(**entries: Any) -> Any:
    return lambda model, optimizer: [group.update(entries) for group in optimizer.param_groups]


def set_in_state(name: str, make: Callable[[], Tensor]) -> Any:
    return lambda model, optimizer: optimizer.state[model.get_parameter(name)].update(exp_avg=make())


def put(make: Callable[[Tensor], Tensor]) -> Any:
    """Put another tensor in place of the vector's."""

    def replace(model: Two, optimizer: mm.Muon) -> None:
        gradient, model.vector.grad = model.vector.grad, None
        model.vector.data = make(model.vector.data)
        if model.vector.untyped_storage().nbytes():
            model.vector.grad = gradient.to(model.vector.dtype)

    return replace


def with_freed_memory(vector: Tensor) -> Tensor:
    vector.untyped_storage().resize_(0)
    return vector


def of_inference(vector: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.ones(5)


def place_otherwise(model: Two, optimizer: mm.Muon) -> None:
    mesh = model.matrix.device_mesh
    model.matrix.grad = distribute_tensor(torch.ones(8, 12), mesh, [Shard(1)], src_data_rank=None)


def sum_up(model: Two, optimizer: mm.Muon) -> None:
    """What a rank holds of it has another shape than the part of the parameter that it stores."""
    model.matrix.grad = DTensor.from_local(torch.ones(8, 12), model.matrix.device_mesh, [Partial()])


def put_wider(model: Two, optimizer: mm.Muon) -> None:
    """Gradients differ too, which is not what is wrong."""
    optimizer.param_groups[0]["params"][0] = model.matrix = nn.Parameter(torch.randn(8, 14))
    model.matrix.grad = torch.randn(8, 14)


def put_partial(model: Two, optimizer: mm.Muon) -> None:
    partial = DTensor.from_local(torch.ones(8, 12), model.matrix.device_mesh, [Partial()])
    optimizer.param_groups[0]["params"][0] = partial


APART = r"(matrix|vector): found .* on rank 0 and .* on rank 1"
DIFFERENT = {"lr": 0.2, "momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "scale_mode": "spectral"}
DIFFERENT |= {"extra_scale_factor": 2.0, "adamw_betas": (0.9, 0.6), "adamw_eps": 1e-3}
WRONG: list[tuple[str, Any, str]] = [
    *(("lr", value, "lr") for value in (-1.0, float("nan"), None)),
    *((key, value, key) for key, value in (("momentum", 7), ("scale_mode", "big"), ("ns_steps", "five"))),
    *((key, value, key) for key, value in (("algorithm", "sgd"), ("name", None), ("maximize", True), ("unread", 1))),
    *(("matrices", [("rows", 3, 3)], "add up"), ("param_names", [], "found 0 param_names for 1 parameters")),
]
PLACED = r"matrix: found a gradient placed \(Shard\(dim=1\),\); needed the parameter's placements"
PARTIAL = PLACED.replace(r"Shard\(dim=1\)", r"Partial\(sum\)")
DRIFTED = "vector: found weights with the checksum .*the same weights and state.*Seed alike before you build"
THIRD = {"params": [("third", nn.Parameter(torch.ones(4, 4)))], "algorithm": "muon"}
MISTAKES: dict[str, Mistake] = {
    "a rate as a tensor": differently(APART, set_in_groups(lr=torch.tensor(0.11))),
    "another dtype": differently(APART, put(Tensor.double)),
    "another dtype of state": differently(APART, state_dtype=torch.float64),
    "another dtype of masters": differently(APART, master_dtype=torch.float64),
    "another number of steps": differently("4 steps", ns_steps=4),
    "other products": differently("kernels torch", kernels="torch"),
    "another width": differently(r"Rank 0 has 'matrix: shape \(8, 12\).* where rank 1 has 'matrix: shape", put_wider),
    "one matrix more": differently(r"third: shape \(4, 4\)", lambda _, optimizer: optimizer.add_param_group(THIRD)),
    "another replica": differently(DRIFTED, lambda model, _: model.vector.data[3].add_(1e-6)),
    "no gradient": Mistake(lambda model, _: setattr(model.matrix, "grad", None), "matrix: Some of the ranks"),
    "a sparse gradient": Mistake(
        lambda model, _: setattr(model.vector, "grad", model.vector.grad.to_sparse()), "sparse=False", TypeError
    ),
    "a gradient elsewhere": Mistake(place_otherwise, PLACED, mm.LayoutError, (LATER, UNWAITED), "fsdp"),
    "a summand": Mistake(sum_up, PARTIAL, mm.LayoutError, (LATER, UNWAITED), "fsdp"),
    "a parameter of summands": Mistake(
        put_partial, r"matrix: found placement Partial\(sum\)", mm.LayoutError, (FIRST,), "fsdp"
    ),
    "freed memory": unusable(mm.LayoutError, "has freed the memory", put(with_freed_memory)),
    "overlapping": unusable(mm.LayoutError, "elements share memory", put(lambda _: torch.ones(1).expand(5))),
    "inference": unusable(TypeError, "an inference tensor", put(of_inference)),
    "foreign state": unusable(
        mm.StateError,
        "exp_avg, state of adamw, in a group of muon.*del optimizer",
        set_in_state("matrix", lambda: torch.zeros(8, 12)),
    ),
    "state of another shape": unusable(
        mm.StateError, r"exp_avg a plain tensor of shape \(6,\)", set_in_state("vector", lambda: torch.zeros(6))
    ),
    "state on another device": unusable(
        mm.StateError,
        "found exp_avg on meta; needed it on cpu, as its .* Move it back",
        set_in_state("vector", lambda: torch.zeros(5, device="meta")),
    ),
}
for key, value in DIFFERENT.items():
    half = "vector" if key.startswith("adamw") else "matrix"
    message = rf"{half}: found (\w+=).* on rank 0 and \1.* on rank 1.*alike on every rank"
    MISTAKES[f"another {key}"] = Mistake(set_in_groups(**{key: value}), message, when=(LATER, UNWAITED))
for key, value, message in WRONG:
    wrong = lambda _, optimizer, key=key, value=value: optimizer.param_groups[0].update({key: value})  # noqa: E731
    MISTAKES[f"{key}={value}"] = Mistake(wrong, message, ValueError)
for key in ("lr", "momentum", "algorithm", "param_names", "name", "ns_coefficients"):
    lost = lambda _, optimizer, key=key: optimizer.param_groups[0].pop(key)  # noqa: E731
    MISTAKES[f"no {key}"] = Mistake(lost, f"found no {key!r}", ValueError, (LATER,))


def undoing(model: Two, optimizer: mm.Muon) -> Callable[[], None]:
    """Return what puts groups, weights and state back as they are now."""
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    state = {weight: dict(entries) for weight, entries in optimizer.state.items()}
    memory, value = model.vector.data, model.vector.detach().clone()

    def undo() -> None:
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(entries)
        for weight, entries in state.items():
            optimizer.state[weight] = entries
        model.vector.grad = None
        memory.untyped_storage().resize_(memory.nbytes)
        model.vector.data = memory.copy_(value)

    return undo


def mistaken(name: str, when: str) -> tuple[str, str, list[str]]:
    """Make a mistake on rank 1; return what the step raises, and what of it was written or differs afterwards."""
    mistake, odd = MISTAKES[name], dist.get_rank() == 1
    settings = mistake.settings if odd and mistake.settings else {}
    trainings = two_and_optimizer(mistake.layout, **settings), two_and_optimizer(mistake.layout)
    (model, optimizer), (twin, other) = trainings
    optimizer._runtime.driver = Driver(when != UNWAITED)
    if when != FIRST:
        step_both(trainings, 0)
    give_drawn(model, 1)
    undo, matrix = undoing(model, optimizer), model.matrix
    before = copies_of_matrix(matrix, optimizer), model.vector.detach().clone()
    if odd:
        mistake.make(model, optimizer)
    intact = mistake.layout == "ddp" and when != UNWAITED and model.vector.dtype == torch.float32
    drifted = model.vector.detach().clone() if intact else before[1]
    began = time.monotonic()
    with pytest.raises((mm.MuonMeshError, ValueError, TypeError)) as error:
        step_times(optimizer, 1 + (when == UNWAITED))  # the next step says it; AdamW's half is masked on CUDA only
    assert time.monotonic() - began < SOON
    changed = [] if same_bits(before[0], copies_of_matrix(matrix, optimizer)) else ["the matrix was written"]
    changed += ["the vector was written"] * (intact and not same_bits(drifted, model.vector.detach()))
    if when == LATER:
        undo()
        step_both(trainings, 1)
        changed += problem.differing(problem.result(model, optimizer), problem.result(twin, other))
    return type(error.value).__name__, str(error.value), changed


def step_times(optimizer: mm.Muon, times: int) -> None:
    for _ in range(times):
        optimizer.step()


def step_both(trainings: tuple[tuple[Two, mm.Muon], ...], step: int) -> None:
    for model, optimizer in trainings:
        give_drawn(model, step)
        optimizer.step()


def copies_of_matrix(matrix: nn.Parameter, optimizer: mm.Muon) -> list[Tensor]:
    """Copies of a matrix and its momentum, as this rank stores them."""
    momentum = optimizer.state[matrix].get("momentum_buffer", matrix)
    return [local_of(tensor).detach().clone() for tensor in (matrix, momentum)]


@pytest.mark.parametrize(("name", "when"), [(name, when) for name, entry in MISTAKES.items() for when in entry.when])
def test_what_one_rank_does_wrong_is_an_error_on_all_and_changes_nothing(workers, name: str, when: str) -> None:
    """Mended, all go on as if the step had not been tried."""
    mistake, outcomes = MISTAKES[name], workers(2).run(mistaken, name, when)
    for kind, message, changed in outcomes:
        assert kind == "PlanError" or mistake.raises is not None, outcomes
        assert re.search(mistake.message, message), outcomes
        assert changed == [], outcomes
    if mistake.raises is not None:
        (other, repeated, _), (culprit, message, _) = outcomes
        assert (other, culprit) == ("PlanError", mistake.raises.__name__)
        assert repeated == f"rank 1: {message}"


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("cause", ["setting", "gradient"])
@on_ranks(2, timeout=SOON)
def test_a_step_that_raised_is_counted_on_no_rank(cause: str, waits: bool) -> None:
    """Make an error on rank 1 only, mend it, and go on: the counts and the bits are as without."""
    results = []
    for wrong in (False, True):
        model, optimizer = two_and_optimizer(stochastic_rounding=3)
        model.bfloat16()
        optimizer._runtime.driver = Driver(waits)
        for step in range(4):
            if wrong and step == 2:
                give_drawn(model, 0)
                if dist.get_rank() == 1:
                    optimizer.param_groups[0]["lr"] = -1.0 if cause == "setting" else 0.1
                    model.matrix.grad = model.matrix.grad.to_sparse() if cause == "gradient" else model.matrix.grad
                if not waits:
                    before = copies_of(model)[:1]
                    optimizer.step()  # the next step says it; AdamW's half is masked on CUDA only
                    assert same_bits(before, copies_of(model)[:1])
                with pytest.raises((mm.PlanError, ValueError, TypeError), match=r"lr|sparse"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
            give_drawn(model, step)
            optimizer.step()
        optimizer._runtime.hear()
        results.append((copies_of(model)[:1], [group["steps_taken"] for group in optimizer.param_groups]))
    assert results[1][1] == [4, 4]
    assert same_bits(results[0][0], results[1][0])


@on_ranks(2, timeout=SOON)
def test_the_same_settings_in_other_words_are_the_same() -> None:
    """A tensor and a number, a list and a tuple, another name of a group: the same settings."""
    model, optimizer = two_and_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        optimizer.param_groups[1].update(adamw_betas=[0.9, 0.95], name="other")
    for step in range(2):
        give_drawn(model, step)
        optimizer.step()


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("key", ["max_norm", "policy", "skip_above"])
@on_ranks(2, timeout=SOON)
def test_clipping_that_differs_on_one_rank_scales_nothing(key: str, waits: bool) -> None:
    model, optimizer = two_and_optimizer()
    optimizer._runtime.driver = Driver(waits)
    arguments: dict[str, Any] = {"max_norm": 1.0, "policy": "all", "skip_above": 50.0}
    if dist.get_rank() == 1:
        arguments[key] = {"max_norm": 2.0, "policy": "separate", "skip_above": 60.0}[key]
    give_drawn(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    if waits:
        with pytest.raises(mm.PlanError, match=f"clip_grad_norm_: found .*{key}.* other arguments on other ranks"):
            optimizer.clip_grad_norm_(**arguments)
    else:
        assert bool(optimizer.clip_grad_norm_(**arguments).skipped)
    assert same_bits(before, [p.grad for p in model.parameters()])


# ------------------------------------------------------------------ plans that change on one rank


def changed(how: str, call: str, waits: bool, algorithm: str = "muon") -> str:
    """Change the plan on rank 1 only, after the first step; return what the next call says."""
    # Under DDP only the first rank would count in the sums that AdaMuon asks for.
    model, optimizer = two_and_optimizer("fsdp" if how == "swap" or algorithm == "adamuon" else "ddp")
    optimizer.param_groups[0]["algorithm"] = algorithm
    optimizer._runtime.driver = Driver(waits)
    give_drawn(model, 0)
    optimizer.step()
    if dist.get_rank() == 1:
        if how == "add":
            new_matrix = nn.Parameter(torch.randn(24))
            optimizer.layouts = {"own": FlatShards.cut((6, 4), (1,), [0, 24])}
            group = {"params": [new_matrix], "param_names": ["own"], "algorithm": "muon", "name": "own"}
            optimizer.add_param_group(group)
            model.new_matrix = new_matrix
        elif how == "swap":
            state = optimizer.state.pop(model.matrix)
            model.matrix = nn.Parameter(model.matrix.detach().clone())
            optimizer.param_groups[0]["params"][0] = model.matrix
            optimizer.state[model.matrix] = state
        else:
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.randn(3, 3)))
        if call == "explain" and how != "broken":
            optimizer.explain()
    give_drawn(model, 1)
    before = copies_of(model)
    try:
        if call == "clip":
            optimizer.clip_grad_norm_(1.0)
        elif call == "metrics":
            optimizer.metrics()
        optimizer.step()
        if not waits:
            optimizer.step()
    except (mm.PlanError, ValueError) as error:
        unwritten = slice(None) if waits else slice(1)  # AdamW's half is masked on CUDA only
        assert same_bits(before[unwritten], copies_of(model)[unwritten]), "something was written"
        return f"{type(error).__name__}: {error}"
    assert not same_bits(before[:1], copies_of(model)[:1])
    return "stepped"


@pytest.mark.parametrize("call", ["step", "explain", "clip", "metrics"])
@pytest.mark.parametrize("how", ["add", "swap"])
def test_a_plan_that_changes_on_one_rank_is_made_anew_by_all(workers, how: str, call: str) -> None:
    assert workers(2).run(changed, how, call, True, timeout=SOON) == ["stepped", "stepped"]


@pytest.mark.parametrize("call", ["step", "clip"])
@pytest.mark.parametrize("algorithm", ["muon", "adamuon"])
def test_where_the_host_does_not_wait_a_changed_plan_is_an_error_on_all(workers, algorithm: str, call: str) -> None:
    """The rank that has changed takes part in what the others wait for: gathers, sums over matrices, scatters."""
    for message in workers(2).run(changed, "add", call, False, algorithm, timeout=SOON):
        assert message.startswith("PlanError: the groups: Some ranks changed their param groups or parameters"), message


@pytest.mark.parametrize("call", ["step", "clip", "metrics"])
@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
def test_a_group_that_breaks_on_one_rank_is_an_error_on_all(workers, call: str, waits: bool) -> None:
    if call == "metrics" and not waits:
        call = "step"
    other, culprit = workers(2).run(changed, "broken", call, waits, timeout=SOON)
    assert "found 1 param_names for 2 parameters" in culprit
    assert other.startswith("PlanError: rank 1"), other


@pytest.mark.parametrize("call", ["step", "metrics"])
@pytest.mark.parametrize("others", ["as they were", "broken"])
@on_ranks(2, timeout=SOON)
def test_ranks_stay_in_step_when_the_plan_changed_on_one_of_them(others: str, call: str) -> None:
    """Change the plan on rank 1 only, and nothing or something else on the others; undo it when all have been told."""
    model, optimizer = two_and_optimizer()
    optimizer._runtime.driver = Driver(False)
    group, messages = optimizer.param_groups[0], []
    odd = dist.get_rank() == 1
    for step in range(6):
        group["ns_steps"] = 3 if odd and step in (1, 2) else 5
        group["lr"] = -1.0 if others == "broken" and not odd and step in (1, 2) else 0.1
        give_drawn(model, step)
        if call == "metrics":
            figures = optimizer.metrics()
            assert step not in (1, 2) or all(math.isnan(figure) for figure in figures.values()), figures
        try:
            optimizer.step()
            messages.append("stepped")
        except (mm.PlanError, ValueError) as error:
            messages.append(str(error))
        meeting_of_all = torch.tensor([step])  # what a backward pass sends; it must meet that of the same step
        dist.all_reduce(meeting_of_all, op=dist.ReduceOp.MIN)
        assert meeting_of_all.item() == step
    assert [message == "stepped" for message in messages] == [True, True, False, True, True, True], messages
    assert ("lr" if others == "broken" else "changed their param groups") in messages[2], messages


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@on_ranks(2, timeout=SOON)
def test_a_plan_that_changes_everywhere_goes_on(waits: bool) -> None:
    """All ranks add a group between two steps: the same bits as one process."""
    results = []
    for group in ("world", "local"):
        model, optimizer = two_and_optimizer(process_group=group)
        optimizer._runtime.driver = Driver(waits)
        for step in range(4):
            if step == 2:
                model.new_matrix = nn.Parameter(torch.ones(6, 4))
                added = {"params": [model.new_matrix], "param_names": ["late"], "algorithm": "muon", "name": "late"}
                optimizer.add_param_group(added)
            give_drawn(model, step)
            optimizer.clip_grad_norm_(1.0, policy="separate")
            optimizer.step()
        results.append(problem.result(model, optimizer))
    assert problem.differing(*results) == []


# ------------------------------------------------------------------ ranks that do not come


def construction_fails(how: str) -> tuple[str, float]:
    """Rank 1 cannot make its optimizer; the others learn of it when they come to their first step."""
    rank, stages = dist.get_rank(), how.startswith("stage")
    rendezvous.GRACE = 0.5
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    overrides = {"nothing.of.this.name": "adamw"} if rank == 1 else None
    group: Any = "world"
    if stages:  # pipeline stages share nothing
        mesh = DeviceMesh.from_group(groups[rank], "cpu")
        for layer in model:
            for name, parameter in list(layer.named_parameters()):
                placed = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                layer.register_parameter(name, nn.Parameter(placed))
        group = None
    begin = time.monotonic()
    try:
        if how.endswith("split"):
            optimizer = mm.Muon(mm.split_params(model, overrides=overrides), process_group=group)
        elif how.endswith("override"):
            optimizer = mm.from_model(model, overrides=overrides, process_group=group)
        else:
            optimizer = mm.Muon(mm.split_params(model), process_group=group, lr=-1.0 if rank == 1 else 0.1)
        if rank == 1:
            return "made", 0.0
        time.sleep(0.5)  # forward and backward
        give_drawn(model, 0)
        optimizer.step()
    except (mm.PlanError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "stepped", 0.0


@pytest.mark.parametrize("how", ["override", "split", "setting", "stage override", "stage split", "stage setting"])
def test_an_optimizer_that_one_rank_could_not_make_is_an_error_on_all(workers, how: str) -> None:
    (other, seconds), (culprit, _) = workers(2).run(construction_fails, how, timeout=SOON)
    assert culprit.startswith("ValueError"), culprit
    assert other.startswith("PlanError: rank 1: "), other
    assert other.removeprefix("PlanError: rank 1: ") == culprit.removeprefix("ValueError: ")
    assert seconds < 10
    workers(2).run(caught_and_made_anew, timeout=SOON)


def read_while_withdrawn() -> None:
    """Rank 1 fails and makes another optimizer many times, while rank 0 looks for failures."""
    store, rounds = rendezvous.shared_store(), 3000
    for number in range(rounds if dist.get_rank() == 1 else 0):
        with contextlib.suppress(ValueError), rendezvous.announcing_failure():
            raise ValueError(str(number))
        rendezvous.withdraw_failure()
    if dist.get_rank() == 1:
        store.set("all withdrawn", "1")
    while dist.get_rank() == 0 and not store.check(["all withdrawn"]):
        rendezvous._notes()
    dist.barrier()
    store.delete_key("all withdrawn")


def test_a_note_that_is_taken_back_while_it_is_read_is_no_note(workers) -> None:
    """A deleted note was read as nothing, which is no JSON, or waited for."""
    workers(2).run(read_while_withdrawn, timeout=SOON)
    workers(2).run(caught_and_made_anew, timeout=SOON)


def caught_and_made_anew() -> None:
    """Who catches the error and makes another optimizer goes on with the others."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="nothing"):
            mm.from_model(model, overrides={"nothing": "adamw"}, process_group="world")
        time.sleep(0.3)
    optimizer = mm.from_model(model, process_group="world")
    give_drawn(model, 0)
    optimizer.step()


def calls_alone(method: str) -> tuple[str, float]:
    """Rank 0 calls what rank 1 does not."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    rendezvous.PATIENCE = 1.0
    model, optimizer = two_and_optimizer(process_group=group)
    give_drawn(model, 0)
    optimizer.step()
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(mm.PlanError) as error:
            getattr(optimizer, method)(*([1.0] if method == "clip_grad_norm_" else []))
        message = str(error.value)
    else:
        time.sleep(4)
        message = ""
    return message, time.monotonic() - begin


@pytest.mark.parametrize(
    ("method", "meeting"), [("step", "the agreement before the step"), ("clip_grad_norm_", "the sum of the norms")]
)
def test_a_rank_that_steps_alone_says_in_what_and_who_is_missing(workers, method: str, meeting: str) -> None:
    (message, seconds), _ = workers(2).run(calls_alone, method, timeout=SOON)
    assert f"The ranks 0, 1 did not meet in {meeting}. Missing: 1." in message, message
    assert message.startswith("step "), message
    assert seconds < 10


# ------------------------------------------------------------------ replicas that differ


@pytest.mark.parametrize("difference", ["momentum_buffer", "exp_avg", "loaded on one"])
@on_ranks(2, timeout=SOON)
def test_replicas_that_differ_are_an_error_on_all(difference: str) -> None:
    model, optimizer = two_and_optimizer()
    give_drawn(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    if dist.get_rank() == 1 and difference in ("momentum_buffer", "exp_avg"):
        entry = saved["state"][0 if difference == "momentum_buffer" else 1]
        entry[difference] = entry[difference].flip(0)  # the same sum
    if dist.get_rank() == 1 or difference != "loaded on one":
        optimizer.load_state_dict(saved)
    give_drawn(model, 1)
    before = copies_of(model)
    named = {
        "exp_avg": "vector: found exp_avg",
        "loaded on one": "state loaded=.*Load state on every rank",
    }
    with pytest.raises(mm.PlanError, match=named.get(difference, f"matrix: found {difference}")):
        optimizer.step()
    assert same_bits(before, copies_of(model))


@pytest.mark.parametrize("how", ["own", "one", "mirrored", "averaged", "rounded", "local"])
@on_ranks(2, timeout=SOON)
def test_replicas_whose_gradients_nothing_averaged_are_an_error_on_all(how: str) -> None:
    """Step with the gradient of each rank's own batch, averaged or not."""
    model, optimizer = two_and_optimizer(process_group="local" if how == "local" else "world")
    give_drawn(model, dist.get_rank())
    if how == "averaged":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    if how == "rounded":  # as on a device that adds in no fixed order
        give_drawn(model, 0)
        model.vector.grad *= 1 + 1e-4 * dist.get_rank()
    if how == "one":  # only the matrix is averaged
        model.vector.grad = model.vector.grad * 3
        dist.all_reduce(model.matrix.grad)
    if how == "mirrored" and dist.get_rank():  # norms and sums are equal
        give_drawn(model, 0)
        model.matrix.grad = model.matrix.grad.flip(0)
    before = copies_of(model)
    name = {"own": "(matrix|vector)", "one": "vector", "mirrored": "matrix"}.get(how)
    message = rf"^{name}: The ranks 0 and 1 hold replicas of this parameter, but their gradients differ \("
    with pytest.raises(mm.LayoutError, match=message) if name else contextlib.nullcontext():
        optimizer.step()
    assert same_bits(before, copies_of(model)) == (name is not None)


@pytest.mark.parametrize("how", ["own", "averaged"])
@on_ranks(4, timeout=SOON)
def test_replicas_of_shards_whose_gradients_nothing_averaged_are_an_error_on_all(how: str) -> None:
    """The replicas had stepped with gradients of their own, and drifted apart: only whole copies were compared."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Two("ddp")
    fully_shard(model, mesh=mesh["shard"])
    optimizer = mm.from_model(model, process_group="world", overrides={"matrix": "muon"})
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + number)
        local = torch.randn(parameter.to_local().shape, generator=generator)
        if how == "averaged":
            dist.all_reduce(local, group=mesh["replicate"].get_group())
        layout = {"shape": parameter.shape, "stride": parameter.stride()}
        parameter.grad = DTensor.from_local(local, mesh["shard"], parameter.placements, **layout)
    message = r"^(matrix|vector): The ranks 0 and 2 hold replicas of this parameter, but their gradients differ \("
    with pytest.raises(mm.LayoutError, match=message) if how == "own" else contextlib.nullcontext():
        optimizer.step()


def save_replicas(path: str, how: str) -> tuple[str, bool]:
    """What a save warns of, and whether it saved; after a step whose gradients some ranks had for themselves."""
    model, optimizer = two_and_optimizer()
    frozen = torch.ones(3) + (dist.get_rank() if how == "frozen" else 0)
    model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
    model.register_buffer("buffer", torch.full((2,), float(dist.get_rank())))  # may differ, as BatchNorm's do
    for step in range(2):
        give_drawn(model, step + (10 * dist.get_rank() if how == "vector" and step else 0))
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mm.checkpoint.save(path, model, optimizer)
    fresh, other = two_and_optimizer()
    fresh.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    fresh.register_buffer("buffer", torch.zeros(2))
    mm.checkpoint.load(path, fresh, other)
    return " ".join(str(warning.message) for warning in caught), same_bits(
        *([v] for v in gathered_from_all(fresh.vector.detach()))
    )


def gathered_from_all(tensor: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


@pytest.mark.parametrize("how", ["alike", "vector", "frozen"])
def test_a_save_warns_of_replicas_that_have_drifted_apart(workers, tmp_path: Path, how: str) -> None:
    (message, equal), (nothing, equal_there) = workers(2).run(save_replicas, str(tmp_path / "saved"), how, timeout=SOON)
    assert equal
    assert equal_there
    assert not nothing
    named = [name for name in ("vector", "frozen", "buffer") if f"{name}: The ranks 0 and 1 hold replicas" in message]
    assert named == ([] if how == "alike" else [how]), message


class Reading(mm.GradientSource):
    """A source that raises what no source should."""

    raises = False

    def gradient(self, parameter: Tensor) -> Tensor | None:
        if self.raises:
            raise KeyError("forgotten")
        return parameter.grad


@pytest.mark.parametrize("how", ["saved", "missing", "raised", "measured"])
@on_ranks(2, timeout=SOON)
def test_the_check_of_gradients_hides_no_other_error_and_refuses_no_save(tmp_path: Path, how: str) -> None:
    """Gradients are read before they are averaged, or where a rank has none or raises."""
    source, culprit = Reading(), dist.get_rank() == 1
    model, optimizer = two_and_optimizer(gradients=source if how in ("raised", "measured") else None)
    give_drawn(model, dist.get_rank() if how == "saved" else 0)
    if how == "measured":
        optimizer.step()
    source.raises = culprit
    if how == "saved":
        mm.checkpoint.save(tmp_path / "saved", model, optimizer)
        give_drawn(model, 0)
        optimizer.step()
        return
    if how == "missing":
        model.third = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [model.third], "param_names": ["third"], "algorithm": "adamw"})
        give_drawn(model, 0)
        (model.third if culprit else model.vector).grad = None
        error, message = mm.PlanError, r"^vector: Some of the ranks \(0, 1\) have a gradient and others have none"
    else:
        error, message = (KeyError, "^'forgotten'$") if culprit else (mm.PlanError, "^rank 1: KeyError: 'forgotten'$")
    with pytest.raises(error, match=message):
        optimizer.metrics() if how == "measured" else optimizer.step()


# ------------------------------------------------------------------ parameters that are replaced


class Layers(nn.Module):
    """Two linear layers, of which the second need not be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        hidden: Tensor = self.norm(self.up(x))
        return self.down(hidden) if whole else hidden


def replace_parameters(model: Layers, by: str) -> None:
    """Shard it, on all ranks, or give rank 1 alone another parameter."""
    if by == "fully_shard":
        fully_shard(model, mesh=meshes.mesh_of((2,)))
    elif by == "parallelize_module":
        parallelize_module(model, meshes.mesh_of((2,)), {"up": ColwiseParallel(output_layouts=Replicate())})
    elif dist.get_rank() == 1:
        model.up.weight = nn.Parameter(model.up.weight.detach().clone())


def train_replaced(by: str, order: str, waits: bool) -> str | None:
    """Two steps of an optimizer made before or after the parameters were replaced; return what it raises."""
    model, alone = Layers(), Layers()
    settings: dict[str, Any] = {"lr": 0.02, "compute_dtype": torch.float32}
    if order == "after":
        replace_parameters(model, by)
    optimizer = mm.from_model(model, process_group="world", **settings)
    optimizer._runtime.driver = Driver(waits)
    if order == "before":
        replace_parameters(model, by)
    other = mm.from_model(alone, process_group="local", **settings)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    before = copies_of(model)
    for _ in range(2):
        for module in (model, alone):
            module(x).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        other.clip_grad_norm_(1.0)
        try:
            optimizer.step()
        except mm.MuonMeshError as error:
            unchanged = [same_bits([old], [new]) for old, new in zip(before, copies_of(model), strict=True)]
            assert all(unchanged) or (
                not waits and unchanged[0] and unchanged[3]
            )  # AdamW's half is masked on CUDA only
            return f"{type(error).__name__}: {error}"
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    for value, expected in zip(copies_of(model), copies_of(alone), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)  # sums over ranks round otherwise
    return None


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("by", ["fully_shard", "parallelize_module", "hand"])
def test_an_optimizer_made_before_its_parameters_were_replaced_says_so_at_the_first_step(
    workers, by: str, waits: bool
) -> None:
    messages = workers(2).run(train_replaced, by, "before", waits, timeout=SOON)
    assert "has no gradient, and the model now holds another parameter" in messages[1]
    assert "Make the optimizer after fully_shard" in messages[1]
    assert messages[1].startswith("LayoutError: up.weight"), messages
    assert messages[0] == messages[1] or (by == "hand" and messages[0].startswith("PlanError: ")), messages


@pytest.mark.parametrize("by", ["fully_shard", "parallelize_module"])
def test_an_optimizer_made_after_its_parameters_were_replaced_trains(workers, by: str) -> None:
    assert workers(2).run(train_replaced, by, "after", True, timeout=SOON) == [None, None]


@on_ranks(2, timeout=SOON)
def test_a_parameter_that_is_whole_in_its_module_and_unused_is_not_taken_for_another() -> None:
    """After a backward that does not reshard a module holds whole parameters; one without a gradient is no other."""
    model = Layers()
    for layer in (model.down, model):
        fully_shard(layer, mesh=meshes.mesh_of((2,)))
    optimizer = mm.from_model(model, lr=0.02, watch=False)
    for step in range(3):
        model.set_reshard_after_backward(step == 2)
        model.down.unshard()
        model(torch.ones(5, 6), whole=False).square().mean().backward()
        assert step == 2 or model.down.weight is not optimizer.param_groups[0]["params"][1]
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------ memory that one rank lacks


class Lacks(TorchDispatchMode):
    """A rank on which memory runs out in the operations of one name."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.operation in str(func):
            raise MemoryError("no memory here")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("operation", "steps"), [("dot", 0), ("clone", 0), ("clone", 1)])
@on_ranks(2)
def test_memory_that_one_rank_lacks_before_anything_is_written_is_an_error_on_all(operation: str, steps: int) -> None:
    """In the comparison of replicas at a first step, and where gradients are read. The next step goes on."""
    model, optimizer = two_and_optimizer()
    for step in range(steps):
        give_drawn(model, step)
        optimizer.step()
    give_drawn(model, steps)
    model.matrix.grad = problem.whole(model.matrix.grad).mT.contiguous().mT  # so that a step needs a copy of it
    before, began = copies_of(model), time.monotonic()
    with (
        Lacks(operation) if dist.get_rank() == 1 else contextlib.nullcontext(),
        pytest.raises((MemoryError, mm.PlanError), match="no memory here") as error,
    ):
        optimizer.step()
    assert isinstance(error.value, MemoryError if dist.get_rank() == 1 else mm.PlanError)
    assert time.monotonic() - began < SOON
    assert same_bits(before, copies_of(model))
    optimizer.step()


def local_values(model: nn.Module) -> list[Tensor]:
    return [local_of(parameter).detach().clone() for parameter in model.parameters()]


def lacking_while_it_writes(file: str) -> list[str]:
    """Let memory run out on rank 1 after AdamW has written its moments; that rank then ends, as by an error."""
    model, optimizer = two_and_optimizer("fsdp")
    rendezvous.PATIENCE = 1.0
    for step in range(2):
        give_drawn(model, step)
        if step == 0:
            optimizer.step()
    before, messages = local_values(model), list[str]()
    with Lacks("addcdiv") if dist.get_rank() == 1 else contextlib.nullcontext():
        for name in ("step", "step", "state_dict"):
            with pytest.raises((MemoryError, mm.PlanError, mm.StateError)) as error:
                getattr(optimizer, name)()
            messages.append(f"{type(error.value).__name__}: {error.value} {getattr(error.value, '__notes__', '')}")
            if dist.get_rank() == 1 and name == "state_dict":
                Path(f"{file}.1").write_text(json.dumps([messages, same_bits(before, local_values(model))]))
                os._exit(1)
    Path(f"{file}.0").write_text(json.dumps([messages, same_bits(before, local_values(model))]))
    return messages


def test_memory_that_one_rank_lacks_while_it_writes_is_an_error_on_all(workers, tmp_path: Path) -> None:
    """What is half written is neither saved nor built upon, on no rank."""
    file = tmp_path / "told"
    with pytest.raises(RankFailure):
        workers(2).run(lacking_while_it_writes, str(file), timeout=SOON)
    for _ in range(100):
        if Path(f"{file}.0").exists():
            break
        time.sleep(0.1)
    for rank, first in enumerate(("PlanError: step 2: The ranks 0, 1 did not meet in ", "MemoryError: no memory here")):
        messages, unchanged = json.loads(Path(f"{file}.{rank}").read_text())
        assert messages[0].startswith(first), messages
        assert "some weights and their state are of another step than others" in messages[0], messages
        for message in messages[1:]:
            assert message.startswith("StateError: "), message
            assert "Load model and optimizer from a checkpoint" in message
        assert rank == 0 or not unchanged  # else there was nothing to tell of


# ------------------------------------------------------------------ warnings


def warnings_of_rounding() -> int:
    layers = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).bfloat16())
    optimizer = mm.from_model(model, lr=1e-6, overrides={"2.weight": "muon"})
    model(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return sum("without masters" in str(warning.message) for warning in caught)


def test_one_replica_warns_of_what_rounding_loses_on_all(workers) -> None:
    assert workers(2).run(warnings_of_rounding, timeout=SOON) == [2, 0]
