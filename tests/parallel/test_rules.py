"""Rules with a part on whole matrices: the same bits whatever holds the matrix, state that travels and reshards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.step.slots import RUNNING
from tests import layouts, problem
from tests.meshes import mesh_of
from tests.parallel.test_every_layout import MESHES
from tests.parallel.test_same_update import LAYOUTS

STEPS = 4
RULES: dict[str, dict[str, Any]] = {
    "normuon": {"algorithm": "normuon", "normuon_side": "longer", "normuon_beta2": 0.8},
    "rows": {"algorithm": "normuon"},
    "cautious": {"decay_mode": "cautious", "weight_decay": 3.0},
    "both": {"algorithm": "normuon", "decay_mode": "cautious", "weight_decay": 3.0},
}
EXAMPLES = int(os.environ.get("FUZZ", "2000")) // 50
"""Generated layouts a rule; `make fuzz N=` sets it."""


def ruled(groups: list[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """The same groups under a rule; AdamW's decay cautiously where it does."""
    settings = RULES[rule]
    own = {key: value for key, value in settings.items() if not key.startswith(("algorithm", "normuon"))}
    return [{**group, **(own if group["algorithm"] == "adamw" else settings)} for group in groups]


def stepped(groups: list[dict[str, Any]], give: Any, rule: str, settings: dict[str, Any]) -> mm.Muon:
    optimizer = mm.Muon(ruled(groups, rule), **{**problem.SETTINGS, **settings})
    for step in range(STEPS):
        give(problem.gradients(step))
        optimizer.step()
    return optimizer


def alone(rule: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and state of one process, by name."""
    model = problem.Bag(problem.initial())

    def give(gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            model.get_parameter(name).grad = gradient

    settings = {key: value for key, value in settings.items() if key != "shard_state"}
    optimizer = stepped(problem.groups(model), give, rule, {**settings, "process_group": "local"})
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    return {name: p.detach() for name, p in model.named_parameters()}, state


def differing(optimizer: mm.Muon, rule: str, settings: dict[str, Any]) -> list[str]:
    """What this rank stores of weights and state, by the layouts' own blocks, against one process."""
    weights, state = alone(rule, settings)
    wrong = []
    for member in optimizer.members:
        found = {"weights": member.tensor.detach(), **optimizer.state[member.tensor]}
        expected = {"weights": weights[member.name], **state[member.name]}
        assert found.keys() == expected.keys()
        for key, value in found.items():
            if key in RUNNING or key == "step":  # neither sharded nor of a rule
                continue
            layout = (member.homes[key].storage if key in member.homes else member.storage).layout
            assert layout is not None
            whole, local = expected[key].reshape(layout.shape), local_of(value)
            for block in layout.blocks(dist.get_rank()):
                region = block.region
                box = tuple(slice(low, low + size) for low, size in zip(region.offset, region.shape, strict=True))
                if not torch.equal(local.as_strided(region.shape, block.strides, block.start), whole[box]):
                    wrong.append(f"{member.name}.{key}")
    return wrong


def promised(optimizer: mm.Muon) -> bool:
    """Whether a step did what explain() says."""
    told, did = optimizer.explain(), optimizer.counts
    return (told.orthogonalizations, told.collectives, told.bytes_sent, told.bytes_received) == (
        did.orthogonalized,
        did.collectives,
        did.bytes_sent,
        did.bytes_received,
    )


def in_a_module(layout: str, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    model, group = problem.hold(layout, problem.initial())

    def give(gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = model.get_parameter(name)
            parameter.grad = problem.placed_like(parameter, gradient)

    optimizer = stepped(problem.groups(model), give, rule, {**settings, "process_group": group})
    return differing(optimizer, rule, settings), promised(optimizer)


def on_mesh(name: str, how: str, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    sizes, place = MESHES[name]
    hold = layouts.declared if how == "declared" else layouts.dtensors

    def placements(_: str, shape: tuple[int, ...]) -> Sequence[Placement]:
        return place(len(shape))

    held = hold(problem.PARAMETERS, problem.initial(), mesh_of(sizes), placements)
    optimizer = stepped(held.groups, held.give, rule, {**settings, **held.settings})
    return differing(optimizer, rule, settings), promised(optimizer)


def flat(tensor_parallel: int, seed: int, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    held = layouts.flat(problem.PARAMETERS, problem.initial(), tensor_parallel=tensor_parallel, seed=seed)
    optimizer = stepped(held.groups, held.give, rule, {**settings, **held.settings})
    return differing(optimizer, rule, settings), promised(optimizer)


FP32: dict[str, Any] = {"compute_dtype": torch.float32}


def check(outcomes: Sequence[tuple[list[str], bool]]) -> None:
    assert outcomes == [([], True)] * len(outcomes)


@pytest.mark.parametrize("rule", ["normuon", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bit_for_bit(workers, ranks: int, layout: str, rule: str) -> None:
    check(workers(ranks).run(in_a_module, layout, rule, FP32))


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
def test_bit_for_bit_in_bf16(workers, layout: str) -> None:
    check(workers(4).run(in_a_module, layout, "normuon", {"bucket_cap_mb": 0.005}))


@pytest.mark.parametrize("layout", ["fsdp", "shard1"])
@pytest.mark.parametrize("dtype", ["compute_dtype", "state_dtype"])
def test_bit_for_bit_in_fp64(workers, layout: str, dtype: str) -> None:
    check(workers(2).run(in_a_module, layout, "rows", {**FP32, dtype: torch.float64}))


def test_cautious_decay_is_bit_for_bit_too(workers) -> None:
    for layout in ("ddp", "fsdp", "shard-last"):
        check(workers(4).run(in_a_module, layout, "cautious", {}))


@pytest.mark.parametrize("how", ["dtensor", "declared"])
@pytest.mark.parametrize("name", MESHES)
def test_bit_for_bit_on_any_mesh(workers, name: str, how: str) -> None:
    check(workers(4).run(on_mesh, name, how, "both", FP32))


@pytest.mark.parametrize("name", ["hsdp", "hsdp, shard 1", "replicate inside", "all replicated", "three axes"])
def test_bit_for_bit_where_replicas_share_the_state(workers, name: str) -> None:
    check(workers(4).run(on_mesh, name, "dtensor", "normuon", {**FP32, "shard_state": True}))


def test_bit_for_bit_where_ddp_shares_the_state(workers) -> None:
    check(workers(4).run(in_a_module, "ddp", "both", {**FP32, "shard_state": True}))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_bit_for_bit_in_flat_buffers(workers, ranks: int, seed: int) -> None:
    check(workers(ranks).run(flat, 1, seed, "normuon", FP32))


def test_bit_for_bit_in_flat_buffers_of_tensor_parallel_shards(workers) -> None:
    for seed in range(2):
        check(workers(4).run(flat, 2, seed, "normuon", FP32))
