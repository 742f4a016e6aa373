"""Megatron-FSDP: its DTensors cut whole buffers, and the update is that of one process, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

import muonmesh as mm
from muonmesh.errors import StateError
from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.megatron.oracle import Oracle
from tests.megatron.shapes import MOE, ONE_LAYER

BF16 = torch.bfloat16
FULL = Shape(fsdp="optim_grads_params")
OUTER = "outer_fsdp_dp"


def hybrid(outer: str) -> Shape:
    """Two sets of ranks; the outer axis of the mesh cuts the optimizer's state ("optim"), or nothing."""
    return FULL.but(ddp=(("num_distributed_optimizer_instances", 2), ("outer_dp_sharding_strategy", outer)))


def whole(parameters: dict[str, Any], *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole parameters, or gradients, of the pieces that the ranks hold. All ranks call it.

    The inner axis of a hybrid mesh cuts a buffer first. If the outer axis does not cut it, it has copies.
    """
    local_pieces = {}
    for name, parameter in parameters.items():
        value = parameter.grad if gradients else parameter
        local = parameter.to_local()[:0] if value is None else value.to_local()
        mesh = parameter.device_mesh
        coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
        placement = dict(zip(mesh.mesh_dim_names, parameter.placements, strict=True))
        outer = coordinate.get(OUTER, 0)
        if outer == 0 or isinstance(placement[OUTER], Shard):
            local_pieces[name] = coordinate["dp_cp"], outer, local.detach().reshape(-1).clone(), tuple(parameter.shape)
    pieces_of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(pieces_of_ranks, local_pieces)
    shapes = {name: shape for pieces in pieces_of_ranks for name, (*_, shape) in pieces.items()}
    in_order = {
        name: sorted((pieces[name] for pieces in pieces_of_ranks if name in pieces), key=lambda piece: piece[:2])
        for name in shapes
    }
    return {name: torch.cat([piece[2] for piece in in_order[name]]).view(shape) for name, shape in shapes.items()}


def train(shape: Shape, **settings: Any) -> tuple[dict[str, float], list[list[float]], list[float | None], list[float]]:
    """Three steps: by how much parameters differ from those of one process, losses, norms, and those expected."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    config = host.optimizer_config(shape)
    optimizer = get_megatron_optimizer(config, chunks, **settings)
    parameters = gathered.named(chunks)
    oracle = Oracle(
        whole(parameters),
        lr=config.lr,
        weight_decay=config.weight_decay,
        adamw_betas=(config.adam_beta1, config.adam_beta2),
        adamw_eps=config.adam_eps,
        muon=settings.get("muon"),
    )
    losses, norms, expected = [], [], []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(host.backward(shape, chunks, optimizer, step))
        reduced = whole(parameters, gradients=True)
        stepped, norm, _ = optimizer.step()
        assert stepped
        norms.append(norm)
        expected.append(oracle.step(reduced, config.clip_grad))
    return oracle.differing(whole(parameters)), losses, norms, expected


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, FULL),
        (4, FULL.but(dtype=BF16)),
        (2, FULL.but(tied=True)),
        (4, FULL.but(ep=2, model=MOE + ONE_LAYER)),
        (2, Shape(fsdp="optim_grads")),
        (2, Shape(fsdp="optim", dtype=BF16)),
        (4, hybrid("no_shard")),
        (4, hybrid("optim")),
    ],
    ids=[
        *("FSDP 2", "FSDP 4, bf16", "FSDP 2, tied", "EP 2 x FSDP 4", "gradients and state", "state, bf16"),
        *("hybrid", "hybrid, state over both axes"),
    ],
)
def test_the_update_is_that_of_one_process(workers, ranks: int, shape: Shape) -> None:
    """The model computes with the updated weights: its losses are those of DistributedDataParallel."""
    plain = workers(ranks).run(losses_of, shape.but(fsdp=None, ddp=()))
    for (differing, losses, norms, expected), others in zip(workers(ranks).run(train, shape), plain, strict=True):
        assert differing == {}
        assert norms == pytest.approx(expected, rel=1e-6)
        assert losses == [pytest.approx(other, rel=1e-2 if shape.dtype == BF16 else 1e-5) for other in others]


def losses_of(shape: Shape) -> list[list[float]]:
    host.begin(shape)
    chunks = host.chunks_of(shape)
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(host.backward(shape, chunks, optimizer, step))
        optimizer.step()
    return losses


def resumed(path: Path, shape: Shape) -> tuple[bool, list[list[float]]]:
    """Save after a step, go on; load into a new run, go on as the first did."""
    runs = []
    for seed in (7, 8):
        host.begin(shape)
        chunks = host.chunks_of(shape, seed=seed)
        optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks)
        if seed == 7:
            with pytest.raises(StateError, match=r"sharded_state_dict: found a model in Megatron-FSDP; .*muonmesh.ch"):
                optimizer.sharded_state_dict()
            host.backward(shape, chunks, optimizer, 0)
            optimizer.step()
            mm.checkpoint.save(path, chunks[0], optimizer)
        else:
            mm.checkpoint.load(path, chunks[0], optimizer)
        parameters = {name: p for name, p in chunks[0].module.param_and_grad_buffer.optimizer_named_parameters}
        optimizer.zero_grad()
        losses = host.backward(shape, chunks, optimizer, 1)
        optimizer.step()
        runs.append((whole(parameters), losses))
    (first, losses), (second, again) = runs
    return all(torch.equal(first[name], second[name]) for name in first), [losses, again]


def test_a_checkpoint_continues(workers, tmp_path: Path) -> None:
    for same, (losses, again) in workers(2).run(resumed, tmp_path / "saved", FULL.but(dtype=BF16)):
        assert same
        assert losses == again


def refused(field: str, value: Any) -> None:
    host.begin(FULL)
    chunks = host.chunks_of(FULL)
    if field == "gathered":
        chunks[0].start_param_sync()
    else:
        setattr(chunks[0].config, field, value)
    get_megatron_optimizer(host.optimizer_config(FULL), chunks)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensor_model_parallel_size", 2, "found tensor_model_parallel_size=2; needed 1. Set it to 1: Megatron-FSDP"),
        ("pipeline_model_parallel_size", 2, "found pipeline_model_parallel_size=2; needed 1"),
        ("qk_clip", True, "found qk_clip=True; needed False"),
        ("gathered", None, "found whole parameters that a forward pass has gathered; .*before the first forward pass"),
    ],
)
def test_what_has_not_run_is_refused(workers, field: str, value: Any, message: str) -> None:
    for outcome in workers(2).run_expecting_errors(refused, field, value):
        assert outcome.error is ValueError
        assert re.search(message, outcome.message)
