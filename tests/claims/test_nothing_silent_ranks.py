"""Nothing silent, among ranks: what differs or goes wrong on one of them is an error on all, soon, and nobody hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import muonmesh as mm
from muonmesh.comm import rendezvous
from muonmesh.comm.storage import local_of
from muonmesh.layout import FlatShards
from muonmesh.step.runtime import Driver
from tests.support import meshes, problem
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


def build(layout: str = "ddp", **settings: Any) -> tuple[Two, mm.Muon]:
    model = Two(layout)
    groups = [
        {"params": [model.matrix], "param_names": ["matrix"], "name": "muon"},
        {"params": [model.vector], "param_names": ["vector"], "name": "adamw", "algorithm": "adamw"},
    ]
    return model, mm.Muon(groups, lr=0.1, **{"process_group": "world", **settings})


def give(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        parameter.grad = problem.placed_like(parameter, gradient)


def values(model: nn.Module) -> list[Tensor]:
    return [problem.whole(p) for p in model.parameters()]


# ------------------------------------------------------------------ parameters and state that cannot be used


def freed(model: Two, optimizer: mm.Muon) -> None:
    model.vector.untyped_storage().resize_(0)


def overlapping(model: Two, optimizer: mm.Muon) -> None:
    model.vector.data = torch.ones(1).expand(5)


def of_inference(model: Two, optimizer: mm.Muon) -> None:
    with torch.inference_mode():
        value = torch.ones(5)
    model.vector.data = value


def foreign(model: Two, optimizer: mm.Muon) -> None:
    optimizer.state[model.matrix]["exp_avg"] = torch.zeros(model.matrix.shape)


def resized(model: Two, optimizer: mm.Muon) -> None:
    optimizer.state[model.vector]["exp_avg"] = torch.zeros(6)


def elsewhere(model: Two, optimizer: mm.Muon) -> None:
    optimizer.state[model.vector]["exp_avg"] = torch.zeros(5, device="meta")


UNUSABLE: dict[Any, tuple[str, type[Exception]]] = {
    freed: ("has freed the memory", mm.LayoutError),
    overlapping: ("several elements share memory", mm.LayoutError),
    of_inference: ("an inference tensor", TypeError),
    foreign: ("exp_avg, state of adamw, in a group of muon", mm.StateError),
    resized: (r"exp_avg a plain tensor of shape \(6,\)", mm.StateError),
    elsewhere: ("exp_avg on meta", mm.StateError),
}


def unusable(spoil: Any, message: str, kind: type[Exception]) -> list[str]:
    """Spoil a parameter or its state on rank 1 alone, mend it after the step has raised, and go on."""
    model, optimizer = build("fsdp")
    twin, other = build("fsdp")
    for trained, trainer in ((model, optimizer), (twin, other)):
        give(trained, 0)
        trainer.step()
    stored, vector = model.vector.data, model.vector.detach().clone()
    state = {p: dict(entries) for p, entries in optimizer.state.items()}
    give(model, 1)
    matrix = problem.whole(model.matrix)
    entries = {key: problem.whole(value).clone() for key, value in state[model.matrix].items()}
    if dist.get_rank() == 1:
        model.vector.grad = None
        spoil(model, optimizer)
        model.vector.grad = None if spoil is freed else torch.ones(5)
    began = time.monotonic()
    with pytest.raises(kind if dist.get_rank() == 1 else mm.PlanError, match=message):
        optimizer.step()
    assert time.monotonic() - began < SOON
    assert torch.equal(problem.whole(model.matrix), matrix)
    assert all(torch.equal(problem.whole(optimizer.state[model.matrix][key]), value) for key, value in entries.items())
    model.vector.grad = None
    if spoil is freed:
        stored.untyped_storage().resize_(stored.numel() * 4)
    model.vector.data = stored.copy_(vector)
    for parameter, whole in state.items():
        optimizer.state[parameter].clear()
        optimizer.state[parameter].update(whole)
    for trained, trainer in ((model, optimizer), (twin, other)):
        give(trained, 1)
        trainer.step()
    return [
        name
        for name, value in model.named_parameters()
        if not torch.equal(*map(problem.whole, (value, twin.get_parameter(name))))
    ]


@pytest.mark.parametrize("spoil", UNUSABLE, ids=lambda spoil: spoil.__name__)
def test_a_parameter_that_one_rank_cannot_use_is_an_error_on_all_and_changes_nothing(workers, spoil: Any) -> None:
    assert workers(2).run(unusable, spoil, *UNUSABLE[spoil]) == [[], []]


# ------------------------------------------------------------------ settings that differ

DIFFERENT: dict[str, Any] = {
    "lr": 0.2,
    "momentum": 0.5,
    "nesterov": False,
    "weight_decay": 0.0,
    "scale_mode": "spectral",
    "extra_scale_factor": 2.0,
    "adamw_betas": (0.9, 0.6),
    "adamw_eps": 1e-3,
}


def different_setting(key: str, value: Any, waits: bool) -> bool:
    """Set a hyperparameter otherwise on rank 1 only, after a step; return whether anything was written."""
    model, optimizer = build()
    optimizer._runtime.driver = Driver(waits)
    give(model, 0)
    optimizer.step()
    if dist.get_rank() == 1:
        for group in optimizer.param_groups:
            group[key] = value
    before = values(model)
    give(model, 1)
    name = "vector" if key.startswith("adamw") else "matrix"
    if not waits:
        optimizer.step()  # the next step says it; AdamW's half is masked on CUDA only
    message = rf"{name}: found (\w+=).* on rank 0 and \1.* on rank 1.*alike on every rank"
    with pytest.raises(mm.PlanError, match=message):
        optimizer.step()
    return same_bits(before if waits else before[:1], values(model) if waits else values(model)[:1])


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("key", DIFFERENT)
def test_a_setting_that_differs_on_one_rank_is_an_error_on_all(workers, key: str, waits: bool) -> None:
    assert workers(2).run(different_setting, key, DIFFERENT[key], waits, timeout=SOON) == [True, True]


def mended(cause: str, waits: bool) -> tuple[list[int], bool]:
    """Make an error on rank 1 only, mend it, and go on; return what is counted, and whether the bits are as without."""
    results = []
    for wrong in (False, True):
        model, optimizer = build(stochastic_rounding=3)
        model.bfloat16()
        optimizer._runtime.driver = Driver(waits)
        for step in range(4):
            if wrong and step == 2:
                give(model, 0)
                if dist.get_rank() == 1:
                    optimizer.param_groups[0]["lr"] = -1.0 if cause == "setting" else 0.1
                    model.matrix.grad = model.matrix.grad.to_sparse() if cause == "gradient" else model.matrix.grad
                if not waits:
                    before = values(model)[:1]
                    optimizer.step()  # the next step says it; AdamW's half is masked on CUDA only
                    assert same_bits(before, values(model)[:1])
                with pytest.raises((mm.PlanError, ValueError, TypeError), match=r"lr|sparse"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
            give(model, step)
            optimizer.step()
        optimizer._runtime.hear()
        results.append((values(model)[:1], [group["steps_taken"] for group in optimizer.param_groups]))
    return results[1][1], same_bits(results[0][0], results[1][0])


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("cause", ["setting", "gradient"])
def test_a_step_that_raised_is_counted_on_no_rank(workers, cause: str, waits: bool) -> None:
    assert workers(2).run(mended, cause, waits, timeout=SOON) == [([4, 4], True)] * 2


def different_dtype(kind: str) -> None:
    odd = dist.get_rank() == 1
    settings: dict[str, Any] = {}
    if kind == "state" and odd:
        settings["state_dtype"] = torch.float64
    if kind == "master" and odd:
        settings["master_dtype"] = torch.float64
    model, optimizer = build(**settings)
    if kind == "parameter" and odd:
        model.vector.data = model.vector.data.double()
    if kind == "tensor lr" and odd:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.11)
    give(model, 0)
    before = values(model)
    with pytest.raises(mm.PlanError, match=r"(matrix|vector): found .* on rank 0 and .* on rank 1"):
        optimizer.step()
    assert same_bits(before, values(model))


@pytest.mark.parametrize("kind", ["state", "master", "parameter", "tensor lr"])
def test_a_dtype_that_differs_on_one_rank_is_an_error_on_all(workers, kind: str) -> None:
    workers(2).run(different_dtype, kind, timeout=SOON)


def equal_in_other_words() -> bool:
    """A tensor and a number, a list and a tuple, groups in another order: the same settings."""
    model = Two("ddp")
    odd = dist.get_rank() == 1
    groups: list[dict[str, Any]] = [
        {"params": [model.matrix], "param_names": ["matrix"], "name": "muon", "lr": 0.25},
        {"params": [model.vector], "param_names": ["vector"], "name": "adamw", "algorithm": "adamw", "lr": 0.25},
    ]
    if odd:
        groups[0]["lr"] = torch.tensor(0.25)
        groups[1]["adamw_betas"] = [0.9, 0.95]
        groups[1]["name"] = "other"
    optimizer = mm.Muon(groups, process_group="world")
    for step in range(2):
        give(model, step)
        optimizer.step()
    return True


def test_the_same_settings_in_other_words_are_the_same(workers) -> None:
    assert workers(2).run(equal_in_other_words, timeout=SOON) == [True, True]


def different_clip(key: str, waits: bool) -> None:
    model, optimizer = build()
    optimizer._runtime.driver = Driver(waits)
    arguments: dict[str, Any] = {"max_norm": 1.0, "policy": "all", "skip_above": 50.0}
    if dist.get_rank() == 1:
        arguments[key] = {"max_norm": 2.0, "policy": "separate", "skip_above": 60.0}[key]
    give(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    if waits:
        with pytest.raises(mm.PlanError, match=f"clip_grad_norm_: found .*{key}.* other arguments on other ranks"):
            optimizer.clip_grad_norm_(**arguments)
    else:
        assert bool(optimizer.clip_grad_norm_(**arguments).skipped)
    assert same_bits(before, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("key", ["max_norm", "policy", "skip_above"])
def test_clipping_that_differs_on_one_rank_scales_nothing(workers, key: str, waits: bool) -> None:
    workers(2).run(different_clip, key, waits, timeout=SOON)


# ------------------------------------------------------------------ plans that change on one rank


def changed(how: str, call: str, waits: bool, algorithm: str = "muon") -> str:
    """Change the plan on rank 1 only, after the first step; return what the next call says."""
    # Under DDP only the first rank would count in the sums that AdaMuon asks for.
    model, optimizer = build("fsdp" if how == "swap" or algorithm == "adamuon" else "ddp")
    optimizer.param_groups[0]["algorithm"] = algorithm
    optimizer._runtime.driver = Driver(waits)
    give(model, 0)
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
    give(model, 1)
    before = values(model)
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
        assert same_bits(before[unwritten], values(model)[unwritten]), "something was written"
        return f"{type(error).__name__}: {error}"
    assert not same_bits(before[:1], values(model)[:1])
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


def changed_and_mended(others: str, call: str) -> list[str]:
    """Change the plan on rank 1 only, and nothing or something else on the others; undo it when all have been told."""
    model, optimizer = build()
    optimizer._runtime.driver = Driver(False)
    group, messages = optimizer.param_groups[0], []
    odd = dist.get_rank() == 1
    for step in range(6):
        group["ns_steps"] = 3 if odd and step in (1, 2) else 5
        group["lr"] = -1.0 if others == "broken" and not odd and step in (1, 2) else 0.1
        give(model, step)
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
    return messages


@pytest.mark.parametrize("call", ["step", "metrics"])
@pytest.mark.parametrize("others", ["as they were", "broken"])
def test_ranks_stay_in_step_when_the_plan_changed_on_one_of_them(workers, others: str, call: str) -> None:
    for messages in workers(2).run(changed_and_mended, others, call, timeout=SOON):
        assert [message == "stepped" for message in messages] == [True, True, False, True, True, True], messages
        assert ("lr" if others == "broken" else "changed their param groups") in messages[2], messages


def changed_everywhere(waits: bool) -> list[str]:
    """All ranks add a group between two steps: the same bits as one process."""
    results = []
    for group in ("world", "local"):
        model, optimizer = build(process_group=group)
        optimizer._runtime.driver = Driver(waits)
        for step in range(4):
            if step == 2:
                model.new_matrix = nn.Parameter(torch.ones(6, 4))
                added = {"params": [model.new_matrix], "param_names": ["late"], "algorithm": "muon", "name": "late"}
                optimizer.add_param_group(added)
            give(model, step)
            optimizer.clip_grad_norm_(1.0, policy="separate")
            optimizer.step()
        results.append(problem.result(model, optimizer))
    return problem.differing(*results)


@pytest.mark.parametrize("waits", [True, False], ids=["host-waits", "host-does-not-wait"])
def test_a_plan_that_changes_everywhere_goes_on(workers, waits: bool) -> None:
    assert workers(2).run(changed_everywhere, waits, timeout=SOON) == [[], []]


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
        give(model, 0)
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


def caught_and_made_anew() -> None:
    """Who catches the error and makes another optimizer goes on with the others."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="nothing"):
            mm.from_model(model, overrides={"nothing": "adamw"}, process_group="world")
        time.sleep(0.3)
    optimizer = mm.from_model(model, process_group="world")
    give(model, 0)
    optimizer.step()


def alone(method: str) -> tuple[str, float]:
    """Rank 0 calls what rank 1 does not."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    rendezvous.PATIENCE = 1.0
    model, optimizer = build(process_group=group)
    give(model, 0)
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
    (message, seconds), _ = workers(2).run(alone, method, timeout=SOON)
    assert f"The ranks 0, 1 did not meet in {meeting}. Missing: 1." in message, message
    assert message.startswith("step "), message
    assert seconds < 10


def dies_in_the_step(file: str) -> None:
    """Rank 1 agrees to the step and then dies; rank 0 says so, and does not build upon what is half written."""
    model, optimizer = build("fsdp")
    rendezvous.PATIENCE = 1.0
    give(model, 0)
    optimizer.step()
    give(model, 1)
    if dist.get_rank() == 1:
        exchange = optimizer._runtime.planned.exchange
        exchange.run = lambda work: os._exit(9)
    messages = {}
    try:
        optimizer.step()
    except mm.PlanError as error:
        messages["step"] = str(error)
    for name in ("step", "state_dict"):
        try:
            getattr(optimizer, name)()
        except mm.StateError as error:
            messages[f"then {name}"] = str(error)
    Path(file).write_text(json.dumps(messages))


def test_a_rank_that_dies_inside_a_step_is_named_and_the_torn_state_is_not_saved(workers, tmp_path: Path) -> None:
    file = tmp_path / "told.json"
    with pytest.raises(RankFailure):
        workers(2).run(dies_in_the_step, str(file), timeout=SOON)
    for _ in range(100):
        if file.exists():
            break
        time.sleep(0.1)
    messages = json.loads(file.read_text())
    assert "did not meet in the gather of bucket 0. Missing: 1." in messages["step"], messages
    for name in ("then step", "then state_dict"):
        assert "interrupted while it wrote" in messages[name]


# ------------------------------------------------------------------ their like

MUTATIONS: list[tuple[str, Any]] = [
    ("lr", -1.0),
    ("lr", float("nan")),
    ("lr", None),
    ("momentum", 7),
    ("scale_mode", "big"),
    ("ns_steps", "five"),
    ("algorithm", "sgd"),
    ("name", None),
    ("matrices", [("rows", 3, 3)]),
    ("param_names", []),
    ("maximize", True),
    ("nobody_reads", 1),
]


def mutated(key: str, value: Any, missing: bool, first: bool) -> tuple[str, bool]:
    model, optimizer = build()
    if not first:
        give(model, 0)
        optimizer.step()
    if dist.get_rank() == 1:
        if missing:
            optimizer.param_groups[0].pop(key, None)
        else:
            optimizer.param_groups[0][key] = value
    give(model, 1)
    before = values(model)
    try:
        optimizer.step()
    except (mm.PlanError, ValueError, TypeError) as error:
        return str(error), same_bits(before, values(model))
    return "stepped", True


@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
@pytest.mark.parametrize(("key", "value"), MUTATIONS, ids=str)
def test_a_field_that_is_wrong_on_one_rank_is_an_error_on_all(workers, key: str, value: Any, first: bool) -> None:
    (other, unchanged), (culprit, untouched) = workers(2).run(mutated, key, value, False, first, timeout=SOON)
    assert key in culprit or "param_names" in culprit or "add up" in culprit, culprit
    assert other == f"rank 1: {culprit}"
    assert unchanged
    assert untouched


@pytest.mark.parametrize("key", ["lr", "momentum", "algorithm", "param_names", "name", "ns_coefficients"])
def test_a_field_that_is_missing_on_one_rank_is_an_error_on_all(workers, key: str) -> None:
    (other, unchanged), (culprit, untouched) = workers(2).run(mutated, key, None, True, False, timeout=SOON)
    assert f"found no {key!r}" in culprit, culprit
    assert other == f"rank 1: {culprit}"
    assert unchanged
    assert untouched


# ------------------------------------------------------------------ replicas that differ


def replicas_differ(difference: str) -> None:
    model, optimizer = build()
    if difference == "weights" and dist.get_rank() == 1:
        with torch.no_grad():
            model.vector[3] += 1e-6
    if difference != "weights":
        give(model, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        if dist.get_rank() == 1 and difference in ("momentum_buffer", "exp_avg"):
            entry = saved["state"][0 if difference == "momentum_buffer" else 1]
            entry[difference] = entry[difference].flip(0)  # the same sum
        if dist.get_rank() == 1 or difference != "loaded on one":
            optimizer.load_state_dict(saved)
    give(model, 1)
    before = values(model)
    named = {
        "weights": "vector: found weights with the checksum .*the same weights and state.*Seed alike before you build",
        "exp_avg": "vector: found exp_avg",
        "loaded on one": "state loaded=.*Load state on every rank",
    }
    with pytest.raises(mm.PlanError, match=named.get(difference, f"matrix: found {difference}")):
        optimizer.step()
    assert same_bits(before, values(model))


@pytest.mark.parametrize("difference", ["weights", "momentum_buffer", "exp_avg", "loaded on one"])
def test_replicas_that_differ_are_an_error_on_all(workers, difference: str) -> None:
    workers(2).run(replicas_differ, difference, timeout=SOON)


def gradients_of_own_batches(how: str) -> bool:
    """Step with the gradient of each rank's own batch, averaged or not; return whether replicas stay equal."""
    model, optimizer = build(process_group="local" if how == "local" else "world")
    give(model, dist.get_rank())
    if how == "averaged":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    if how == "rounded":  # as on a device that adds in no fixed order
        give(model, 0)
        model.vector.grad *= 1 + 1e-4 * dist.get_rank()
    if how == "one":  # only the matrix is averaged
        model.vector.grad = model.vector.grad * 3
        dist.all_reduce(model.matrix.grad)
    if how == "mirrored" and dist.get_rank():  # norms and sums are equal
        give(model, 0)
        model.matrix.grad = model.matrix.grad.flip(0)
    before = values(model)
    if how in ("own", "one", "mirrored"):
        name = {"own": "(matrix|vector)", "one": "vector", "mirrored": "matrix"}[how]
        message = rf"^{name}: The ranks 0 and 1 hold replicas of this parameter, but their gradients differ \("
        with pytest.raises(mm.LayoutError, match=message):
            optimizer.step()
        return same_bits(before, values(model))
    optimizer.step()
    return not same_bits(before, values(model))


@pytest.mark.parametrize("how", ["own", "one", "mirrored", "averaged", "rounded", "local"])
def test_replicas_whose_gradients_nothing_averaged_are_an_error_on_all(workers, how: str) -> None:
    assert workers(2).run(gradients_of_own_batches, how, timeout=SOON) == [True, True]


def other_widths(layer: str) -> None:
    """Each rank builds a model of another width; gradients differ too, which is not what is wrong."""
    hidden, out = {"hidden": (6 + 2 * dist.get_rank(), 4), "out": (6, 4 + dist.get_rank())}[layer]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.Linear(hidden, out))
    optimizer = mm.from_model(model, process_group="world")
    model(torch.ones(2, 8)).square().mean().backward()
    before = values(model)
    with pytest.raises(mm.PlanError, match=r"Rank 0 has '[01]\.weight: shape .* where rank 1 has '[01]\.weight: shape"):
        optimizer.step()
    assert same_bits(before, values(model))


@pytest.mark.parametrize("layer", ["hidden", "out"])
def test_models_of_other_widths_are_told_by_their_shapes(workers, layer: str) -> None:
    workers(2).run(other_widths, layer, timeout=SOON)


def save_replicas(path: str, how: str) -> tuple[str, bool]:
    """What a save warns of, and whether it saved; after a step whose gradients some ranks had for themselves."""
    model, optimizer = build()
    for step in range(2):
        give(model, step + (10 * dist.get_rank() if how == "drifted" and step else 0))
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mm.checkpoint.save(path, model, optimizer)
    fresh, other = build()
    mm.checkpoint.load(path, fresh, other)
    return " ".join(str(warning.message) for warning in caught), same_bits(
        *([v] for v in gathered(fresh.vector.detach()))
    )


def gathered(tensor: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


@pytest.mark.parametrize("how", ["alike", "drifted"])
def test_a_save_warns_of_replicas_that_have_drifted_apart(workers, tmp_path: Path, how: str) -> None:
    (message, equal), (nothing, equal_there) = workers(2).run(save_replicas, str(tmp_path / "saved"), how, timeout=SOON)
    assert equal
    assert equal_there
    assert not nothing
    assert ("vector: The ranks 0 and 1 hold replicas of this parameter" in message) == (how == "drifted"), message


def gradients_of_some(how: str, folder: str) -> str:
    """Read gradients before they are averaged, or where a rank has none or raises; return what the step says."""
    source = Reading()
    model, optimizer = build(gradients=source if how in ("raised", "measured") else None)
    give(model, dist.get_rank() if how == "saved" else 0)
    if how == "measured":
        optimizer.step()
    source.raises = dist.get_rank() == 1
    if how == "saved":
        mm.checkpoint.save(folder, model, optimizer)
        give(model, 0)
    if how == "missing":
        model.third = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [model.third], "param_names": ["third"], "algorithm": "adamw"})
        give(model, 0)
        (model.third if dist.get_rank() else model.vector).grad = None
    try:
        optimizer.metrics() if how == "measured" else optimizer.step()
    except (mm.PlanError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"


class Reading(mm.GradientSource):
    """A source that raises what no source should."""

    raises = False

    def gradient(self, parameter: Tensor) -> Tensor | None:
        if self.raises:
            raise KeyError("forgotten")
        return parameter.grad


@pytest.mark.parametrize("how", ["saved", "missing", "raised", "measured"])
def test_the_check_of_gradients_hides_no_other_error_and_refuses_no_save(workers, tmp_path: Path, how: str) -> None:
    messages = workers(2).run(gradients_of_some, how, str(tmp_path / "saved"), timeout=SOON)
    if how in ("raised", "measured"):
        assert messages == ["PlanError: rank 1: KeyError: 'forgotten'", "KeyError: 'forgotten'"]
    elif how == "missing":
        assert all(
            "vector: Some of the ranks (0, 1) have a gradient and others have none" in message for message in messages
        )
    else:
        assert messages == ["stepped", "stepped"]


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
    before = values(model)
    for _ in range(2):
        for module in (model, alone):
            module(x).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        other.clip_grad_norm_(1.0)
        try:
            optimizer.step()
        except mm.MuonMeshError as error:
            unchanged = [same_bits([old], [new]) for old, new in zip(before, values(model), strict=True)]
            assert all(unchanged) or (
                not waits and unchanged[0] and unchanged[3]
            )  # AdamW's half is masked on CUDA only
            return f"{type(error).__name__}: {error}"
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    for value, expected in zip(values(model), values(alone), strict=True):
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


def unused_while_unsharded() -> None:
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


def test_a_parameter_that_is_whole_in_its_module_and_unused_is_not_taken_for_another(workers) -> None:
    workers(2).run(unused_while_unsharded, timeout=SOON)


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


def lacking(operation: str, steps: int) -> bool:
    """Let memory run out on rank 1, in a step after so many others; return whether anything was written."""
    model, optimizer = build()
    for step in range(steps):
        give(model, step)
        optimizer.step()
    give(model, steps)
    model.matrix.grad = problem.whole(model.matrix.grad).mT.contiguous().mT  # so that a step needs a copy of it
    before, began = values(model), time.monotonic()
    with (
        Lacks(operation) if dist.get_rank() == 1 else contextlib.nullcontext(),
        pytest.raises((MemoryError, mm.PlanError), match="no memory here") as error,
    ):
        optimizer.step()
    assert isinstance(error.value, MemoryError if dist.get_rank() == 1 else mm.PlanError)
    assert time.monotonic() - began < SOON
    written = not same_bits(before, values(model))
    optimizer.step()
    return written


@pytest.mark.parametrize(("operation", "steps"), [("dot", 0), ("clone", 0), ("clone", 1)])
def test_memory_that_one_rank_lacks_before_anything_is_written_is_an_error_on_all(
    workers, operation: str, steps: int
) -> None:
    """In the comparison of replicas at a first step, and where gradients are read. The next step goes on."""
    assert workers(2).run(lacking, operation, steps) == [False, False]


def local_values(model: nn.Module) -> list[Tensor]:
    return [local_of(parameter).detach().clone() for parameter in model.parameters()]


def lacking_while_it_writes(file: str) -> list[str]:
    """Let memory run out on rank 1 after AdamW has written its moments; that rank then ends, as by an error."""
    model, optimizer = build("fsdp")
    rendezvous.PATIENCE = 1.0
    for step in range(2):
        give(model, step)
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
