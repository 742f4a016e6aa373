"""Points of the pull requests in docs/internals/references.md that no other test shows and that need several ranks."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.integrations.megatron import declared_layouts
from muonmesh.numerics.coefficients import coefficient_schedule
from tests.support import layouts, problem
from tests.support.meshes import mesh_of
from tests.support.reference import reference_step
from tests.support.stamps import groups_of, shard, stamped
from tests.support.tensors import random

# ------------------------------------------------------------------ Transformer Engine: tensor-parallel shards

COLUMN = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
ROW = {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1}
NONE = {"tensor_model_parallel": True, "partition_dim": -1, "partition_stride": 1}
# name: (whole shape, dim that is cut or None, pieces in each shard, attributes, matrices or "adamw")
BLOCK: dict[str, tuple[tuple[int, ...], int | None, int, dict[str, Any], Any]] = {
    "qkv": ((32, 10), 0, 1, COLUMN, ("interleaved", (4, 2, 2), 0)),
    "proj": ((10, 32), 1, 1, ROW, "whole"),
    "fc1": ((24, 10), 0, 2, {**COLUMN, "partition_stride": 2}, ("rows", 12, 12)),
    "fc2": ((10, 12), 1, 1, ROW, "whole"),
    "position": ((6, 10), None, 1, NONE, "whole"),
    "router": ((4, 10), None, 1, {"tensor_model_parallel": False, "partition_dim": 0}, "whole"),
    "bias": ((32,), 0, 1, COLUMN, "adamw"),
    "norm": ((10,), None, 1, {}, "adamw"),
}
MATRICES = 3 + 1 + 2 + 1 + 1 + 1


def optimizer_of(parameters: dict[str, nn.Parameter], **settings: Any) -> mm.Muon:
    muon = [name for name in parameters if BLOCK[name][4] != "adamw"]
    adamw = [name for name in parameters if name not in muon]
    groups = [
        {"params": [(name, parameters[name]) for name in muon], "matrices": [BLOCK[name][4] for name in muon]},
        {"params": [(name, parameters[name]) for name in adamw], "algorithm": "adamw"},
    ]
    return mm.Muon(groups, lr=0.02, compute_dtype=torch.float32, **settings)


def tensor_parallel_block(grid: list[list[int]] | None) -> tuple[list[str], int]:
    """A block whose parameters say themselves how they are cut, each in its own way, under one optimizer."""
    data, tensor, column = (None, None, 0) if grid is None else groups_of(grid)
    count = 1 if grid is None else len(grid[0])

    def cut(name: str, whole: Tensor) -> Tensor:
        _, dim, pieces, _, _ = BLOCK[name]
        return whole if dim is None else shard(whole, dim, pieces, column, count)

    values = {name: random(*entry[0], seed=i) for i, (name, entry) in enumerate(BLOCK.items())}
    shards = {name: stamped(cut(name, value), BLOCK[name][3]) for name, value in values.items()}
    whole = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    declared = declared_layouts(shards.items(), tensor_parallel=tensor, data_parallel=data)
    optimizer = optimizer_of(shards, layouts=declared, process_group="local" if grid is None else None)
    alone = optimizer_of(whole, process_group="local")
    for step in range(3):
        for i, name in enumerate(BLOCK):
            gradient = random(*BLOCK[name][0], seed=100 * step + i + 50)
            shards[name].grad, whole[name].grad = cut(name, gradient).clone(), gradient
        optimizer.step()
        alone.step()
    differing = [name for name in BLOCK if not torch.equal(shards[name], cut(name, whole[name].detach()))]
    return differing, optimizer.counts.orthogonalized


@pytest.mark.parametrize("grid", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_a_tensor_parallel_block_steps_as_its_attributes_say(workers, grid: list[list[int]]) -> None:
    ranks = sum(map(len, grid))
    outcomes = workers(ranks).run(tensor_parallel_block, grid)
    assert [differing for differing, _ in outcomes] == [[]] * ranks
    assert sum(count for _, count in outcomes) == MATRICES


def test_the_same_lines_run_in_one_process() -> None:
    assert tensor_parallel_block(None) == ([], MATRICES)


SCALED = {"even": (96, 128), "unequal": (97, 30), "fewer rows than ranks": (1, 40)}


def scaled() -> dict[str, float]:
    """The largest relative error of an update against the oracle, which has never seen a shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    coefficients = list(coefficient_schedule("polar_express", 5))
    errors = {}
    for mode in ("spectral", "unit_rms_norm", "match_rms_adamw", "original"):
        for kind, shape in SCALED.items():
            for dim in (0, 1):
                start, gradient = torch.zeros(shape), random(*shape, seed=1)
                weight = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(dim)], src_data_rank=None))
                settings: dict[str, Any] = {"lr": 1.0, "scale_mode": mode, "weight_decay": 0.0}
                optimizer = mm.Muon([weight], compute_dtype=torch.float32, **settings)
                weight.grad = distribute_tensor(gradient, mesh, [Shard(dim)], src_data_rank=None)
                optimizer.step()
                options = {"algorithm": "muon", "coefficients": coefficients, **settings}
                expected, _ = reference_step({"w": start}, {"w": gradient}, {}, {"w": options})
                error = (problem.whole(weight).double() - expected["w"]).norm() / expected["w"].norm()
                errors[f"{mode}, {kind}, dim {dim}"] = float(error)
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_scale_is_that_of_the_whole_matrix(workers, ranks: int) -> None:
    """The example of the review, 96 × 128 cut along dim 1, among others: counted twice it would be √2 too large."""
    for errors in workers(ranks).run(scaled):
        assert {case: error for case, error in errors.items() if not error < 1e-3} == {}


def nothing_to_divide_by() -> list[bool]:
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
    return right


def test_no_rank_divides_by_a_norm_of_zero(workers) -> None:
    assert workers(4).run(nothing_to_divide_by) == [[True] * 8] * 4


# ------------------------------------------------------------------ Transformer Engine: teardown


def collected_after_its_group() -> tuple[list[str], bool]:
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
    return unraised, weak_reference() is None


def test_an_optimizer_is_collected_silently_after_its_group(workers) -> None:
    assert workers(2).run(collected_after_its_group) == [([], True)] * 2


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


def only_adamw() -> bool:
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
    return torch.equal(partition, twin)


def test_a_model_without_matrices_needs_no_layout_and_no_group(workers) -> None:
    assert workers(2).run(only_adamw) == [True] * 2


def saved_and_loaded(folder: str) -> list[str]:
    """Momentum of flat partitions goes through a file; training goes on as if it had not stopped."""

    def build() -> tuple[layouts.Held, mm.Muon]:
        flat = layouts.flat(problem.PARAMETERS, problem.initial())
        return flat, mm.Muon(flat.groups, compute_dtype=torch.float32, **flat.settings, **problem.SETTINGS)

    sharded, optimizer = build()
    path = Path(folder) / f"{dist.get_rank()}.pt"
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
    return problem.differing(again.whole(other), sharded.whole(optimizer))


def test_state_of_flat_partitions_continues_bit_for_bit(workers, tmp_path: Path) -> None:
    assert workers(2).run(saved_and_loaded, str(tmp_path)) == [[], []]


# ------------------------------------------------------------------ Megatron-LM: norms


def norms_over_groups() -> tuple[list[float], list[float]]:
    """Dense weights on four ranks, experts on pairs, AdamW's half sharded and replicated: each element once."""
    rank = dist.get_rank()
    mesh = mesh_of((2, 2), names=("data", "expert"))
    dense, table, norm = random(12, 10, seed=0), random(9, 5, seed=1), random(7, seed=2)
    experts = [random(8, 6, seed=3 + i) for i in range(2)]
    gradients = {"dense": dense, "expert": experts[rank % 2], "table": table.chunk(2)[rank % 2], "norm": norm}
    parameters = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    replicated = [Replicate(), Replicate()]
    declared = {
        "dense": (mesh, replicated),
        "expert": (mesh["data"], [Replicate()]),
        "table": (mesh, [Replicate(), Shard(0)], (9, 5)),
        "norm": (mesh, replicated),
    }
    groups = [
        {"params": [(name, parameters[name]) for name in ("dense", "expert")]},
        {"params": [(name, parameters[name]) for name in ("table", "norm")], "algorithm": "adamw"},
    ]
    optimizer = mm.Muon(groups, layouts=declared)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.clone()
    norms = optimizer.clip_grad_norm_(1.0)

    def true(*parts: Tensor) -> float:
        return math.sqrt(sum(float(part.double().square().sum()) for part in parts))

    expected = [true(dense, *experts, table, norm), true(dense, *experts), true(table, norm)]
    assert norms.total is not None
    assert norms.muon is not None
    assert norms.adamw is not None
    return [float(norms.total), float(norms.muon), float(norms.adamw)], expected


def test_norms_of_parameters_on_different_groups_count_each_element_once(workers) -> None:
    for norms, expected in workers(4).run(norms_over_groups):
        assert norms == pytest.approx(expected, rel=1e-12)
