"""Points of the pull requests in docs/internals/references.md that no other test shows.

Also that pages name tests that are there.
"""

from __future__ import annotations

import gc
import inspect
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm
from muonmesh.settings import SETTINGS
from tests.support import layouts, problem
from tests.support.on_ranks import on_ranks
from tests.support.tensors import random

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "least"), [("how-we-know.md", 60), ("internals/hosts-decide-by.md", 36)])
def test_every_test_that_the_page_names_is_in_the_file_it_names(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > least
    wrong = [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text()]
    assert wrong == []
    named += [("", name) for name in re.findall(r"`(test_\w+)", text)]
    assert all(file for file, _ in named), "write tests/path.py::test_name"


# ------------------------------------------------------------------ the public face


@pytest.mark.parametrize("public", [mm.Muon, mm.from_model, mm.orthogonalize, mm.split_params, mm.update_scale])
def test_every_argument_is_described(public: Any) -> None:
    described = re.search(r"Args:\n(.*?)(\n\n|\Z)", inspect.getdoc(public) or "", re.DOTALL)
    assert described is not None
    rare = re.search(r"Other Parameters:\n(.*?)(\n\n|\Z)", inspect.getdoc(public) or "", re.DOTALL)
    sections = described[1] + "\n" + (rare[1] if rare else "")
    entries = set(re.findall(r"^ {4}(\w+): ", sections, re.MULTILINE))
    arguments = set(inspect.signature(public).parameters)
    if public is mm.from_model:  # which describes its own, and hands those of Muon on
        arguments = arguments - SETTINGS.keys() | {"settings"}
        assert "`Muon`" in described[1]
    assert entries == arguments


def test_a_usual_step_warns_of_nothing_and_returns_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        optimizer = mm.from_model(model, lr=0.01)
        for _ in range(2):
            model(random(3, 6)).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            assert optimizer.step() is None
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())


# ------------------------------------------------------------------ one step


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_step_is_what_the_public_functions_make(shape: tuple[int, int], nesterov: bool) -> None:
    """Whoever wants an optimizer of their own gets the same bits from `orthogonalize` and `update_scale`."""
    weight = nn.Parameter(random(*shape))
    start, gradient = weight.detach().clone(), random(*shape, seed=1)
    optimizer = mm.Muon([weight], lr=0.5, nesterov=nesterov, momentum=0.9, weight_decay=0.1, extra_scale_factor=0.7)
    weight.grad = gradient.clone()
    optimizer.step()
    momentum = torch.zeros(shape).lerp_(gradient, 1 - 0.9)
    direction = torch.lerp(gradient, momentum, 0.9) if nesterov else momentum
    update = mm.orthogonalize(direction.bfloat16(), dtype=torch.bfloat16).float()
    expected = start * (1 - 0.5 * 0.1) - update * (0.5 * (0.7 * mm.update_scale(*shape, "match_rms_adamw")))
    assert torch.equal(weight, expected)


def test_groups_step_with_their_own_settings() -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "momentum": 0.9, "scale_mode": "spectral"},
        {"lr": 0.02, "nesterov": False, "weight_decay": 0.0, "ns_coefficients": "quintic"},
        {"lr": 0.02, "ns_steps": 8, "extra_scale_factor": 0.3, "ns_method": "standard"},
    ]
    in_groups = [nn.Parameter(random(12, 20)) for _ in settings]
    apart = [nn.Parameter(random(12, 20)) for _ in settings]
    optimizers = [
        mm.Muon([{"params": [p], **group_settings} for p, group_settings in zip(in_groups, settings, strict=True)])
    ]
    optimizers += [mm.Muon([p], **group_settings) for p, group_settings in zip(apart, settings, strict=True)]
    for step in range(3):
        for p in (*in_groups, *apart):
            p.grad = random(12, 20, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(in_groups, apart, strict=True))
    assert len({p.detach().norm().item() for p in in_groups}) == len(settings)


# ------------------------------------------------------------------ divisions


def test_no_epsilon_is_asked_for_and_nothing_is_divided_by_zero() -> None:
    """A gradient that is zero in the first step, where the norm of the momentum is zero too."""
    assert not {"eps", "ns_eps"} & {
        *inspect.signature(mm.Muon).parameters,
        *inspect.signature(mm.orthogonalize).parameters,
    }
    with pytest.raises(ValueError, match="found the key 'eps'"):
        mm.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "eps": 0.0}])
    for shape in ((6, 9), (1, 1), (3, 4, 5)):
        weight = nn.Parameter(random(*shape))
        start = weight.detach().clone()
        optimizer = mm.Muon([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.zeros(shape)
            optimizer.step()
        assert torch.equal(weight, start)
        assert not optimizer.state[weight]["momentum_buffer"].any()
        weight.grad = random(*shape)
        optimizer.step()
        assert weight.isfinite().all()
        assert not torch.equal(weight, start)


# ------------------------------------------------------------------ clipping


def matrix_and_vector() -> tuple[nn.Parameter, nn.Parameter, mm.Muon]:
    matrix, vector = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.ones(5))
    groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
    return matrix, vector, mm.Muon(groups, lr=1.0, scale_mode="none", weight_decay=0.0)


@pytest.mark.parametrize("policy", ["adamw_only", "all", "separate"])
def test_no_policy_crushes_a_matrix_below_a_floor(policy: Any) -> None:
    """A huge norm elsewhere makes the coefficient about 1e-20; the matrix still moves at full strength."""
    matrix, vector, optimizer = matrix_and_vector()
    matrix.grad, vector.grad = random(24, 40) * 1e-3, torch.full((5,), 1e17)
    optimizer.clip_grad_norm_(1e-3, policy=policy)
    optimizer.step()
    assert 0.9 < torch.linalg.svdvals(matrix.detach().double()).mean() < 1.1


# ------------------------------------------------------------------ on ranks


# ------------------------------------------------------------------ Transformer Engine: norms of zero


@on_ranks(4)
def test_no_rank_divides_by_a_norm_of_zero() -> None:
    """Zero gradients from the first step on, of a whole matrix and of one in a stack; then one that is not zero."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    right = []
    for shape, dim in (((90, 24), 0), ((24, 90), 1), ((3, 8, 40), 2), ((2, 40), 0)):
        start, gradient = random(*shape, seed=0), torch.zeros(shape)
        if len(shape) == 3:
            gradient[1] = random(*shape[1:], seed=1)
        weight = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(dim)], src_data_rank=None))
        optimizer = mm.Muon([weight], lr=0.1)
        for _ in range(2):
            weight.grad = distribute_tensor(gradient, mesh, [Shard(dim)], src_data_rank=None)
            optimizer.step()
        untouched = [0, 2] if len(shape) == 3 else slice(None)
        right.append(torch.equal(problem.whole(weight)[untouched], start[untouched]))
        weight.grad = distribute_tensor(random(*shape, seed=2), mesh, [Shard(dim)], src_data_rank=None)
        optimizer.step()
        moved = problem.whole(weight)
        right.append(bool(moved.isfinite().all()) and not torch.equal(moved, start))
    assert right == [True] * 8


# ------------------------------------------------------------------ Transformer Engine: teardown


@on_ranks(2)
def test_an_optimizer_is_collected_silently_after_its_group() -> None:
    """What Python could not raise while it collected the optimizer, and whether it did collect it."""
    unraised: list[str] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda error: unraised.append(repr(error.exc_value))
    try:
        group = dist.new_group([0, 1])
        weight = nn.Parameter(torch.ones(4, 6))
        optimizer = mm.Muon([("w", weight)], process_group=group)
        weight.grad = random(4, 6, seed=0)
        optimizer.step()
        weak_reference = weakref.ref(optimizer)
        dist.destroy_process_group(group)
        del optimizer
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert unraised == []
    assert weak_reference() is None


AT_EXIT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import muonmesh as mm

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
sharded = nn.Parameter(distribute_tensor(torch.ones(8, 6), init_device_mesh("cpu", (2,)), [Shard(0)]))
plain = nn.Parameter(torch.ones(6, 4))
kept = []
for parameter, group in ((sharded, None), (plain, "world")):
    optimizer = mm.Muon([parameter], process_group=group)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept.append(optimizer)
dist.destroy_process_group()
del optimizer, kept[0]  # one is collected now, the other by the interpreter on its way out
print("done")
"""


def test_a_program_ends_well_after_destroy_process_group(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", AT_EXIT, str(tmp_path / "store"), str(rank)] for rank in range(2)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out == "done\n"
            assert not any(word in err for word in ("Traceback", "Exception ignored", "terminate", "Error")), err
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ------------------------------------------------------------------ DeepSpeed: flat partitions


@on_ranks(2)
def test_a_model_without_matrices_needs_no_layout_and_no_group() -> None:
    """Elementwise, so a partition of unequal size that nobody has declared is stepped as it is."""
    size = 7 + 4 * dist.get_rank()
    partition = nn.Parameter(random(size, seed=0))
    twin = nn.Parameter(partition.detach().clone())
    groups = {"params": [partition], "algorithm": "adamw"}
    optimizer = mm.Muon([groups], lr=0.1, weight_decay=0.1)
    other = torch.optim.AdamW([twin], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for step in range(3):
        partition.grad = random(size, seed=1 + step)
        twin.grad = partition.grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(partition, twin)


@on_ranks(2)
def test_state_of_flat_partitions_continues_bit_for_bit(tmp_path: Path) -> None:
    """Momentum of flat partitions goes through a file; training goes on as if it had not stopped."""

    def build() -> tuple[layouts.Held, mm.Muon]:
        flat = layouts.flat(problem.PARAMETERS, problem.initial())
        return flat, mm.Muon(flat.groups, compute_dtype=torch.float32, **flat.settings, **problem.SETTINGS)

    sharded, optimizer = build()
    path = tmp_path / f"{dist.get_rank()}.pt"
    for step in range(4):
        if step == 2:
            tensors = {name: tensor.detach().clone() for name, tensor in sharded.tensors.items()}
            torch.save({"model": tensors, "optimizer": optimizer.state_dict()}, path)
        sharded.give(problem.gradients(step))
        optimizer.step()
    again, other = build()
    saved = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, tensor in again.tensors.items():
            tensor.copy_(saved["model"][name])
    other.load_state_dict(saved["optimizer"])
    for step in (2, 3):
        again.give(problem.gradients(step))
        other.step()
    assert problem.differing(again.whole(other), sharded.whole(optimizer)) == []
