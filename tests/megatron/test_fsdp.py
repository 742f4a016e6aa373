"""Megatron-FSDP: its DTensors cut whole buffers, and the update is that of one process, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import muonmesh as mm
from muonmesh.errors import StateError
from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.megatron.shapes import MOE, ONE_LAYER
from tests.megatron.training import train

BF16 = torch.bfloat16
FULL = Shape(fsdp="optim_grads_params")


def hybrid(outer: str) -> Shape:
    """Two sets of ranks; the outer axis of the mesh cuts the optimizer's state ("optim"), or nothing."""
    return FULL.but(ddp=(("num_distributed_optimizer_instances", 2), ("outer_dp_sharding_strategy", outer)))


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
    """The model computes with the updated weights: its losses and norms are those of DistributedDataParallel."""
    plain = workers(ranks).run(train, shape.but(fsdp=None, ddp=()))
    for trained, others in zip(workers(ranks).run(train, shape), plain, strict=True):
        assert trained.differing == {}
        assert trained.norms == pytest.approx(trained.expected, rel=1e-6)
        assert trained.norms == pytest.approx(others.norms, rel=1e-2 if shape.dtype == BF16 else 1e-5)
        assert trained.losses == [
            pytest.approx(other, rel=1e-2 if shape.dtype == BF16 else 1e-5) for other in others.losses
        ]


def resumed_in_fsdp(path: Path, shape: Shape) -> tuple[bool, list[list[float]]]:
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
        runs.append((gathered.sharded(parameters), losses))
    (first, losses), (second, again) = runs
    return all(torch.equal(first[name], second[name]) for name in first), [losses, again]


def test_a_checkpoint_continues(workers, tmp_path: Path) -> None:
    for same, (losses, again) in workers(2).run(resumed_in_fsdp, tmp_path / "saved", FULL.but(dtype=BF16)):
        assert same
        assert losses == again


def make_with_field(field: str, value: Any) -> None:
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
    for outcome in workers(2).run_expecting_errors(make_with_field, field, value):
        assert outcome.error is ValueError
        assert re.search(message, outcome.message)


def summed() -> tuple[float, str | None]:
    """Gradients of Megatron itself, in multiples of those of DistributedDataParallel, and the refusal of ours."""
    norms, message = [], None
    for shape in (Shape(), hybrid("optim")):
        host.begin(shape)
        chunks = host.chunks_of(shape)
        try:
            get_megatron_optimizer(host.optimizer_config(shape), chunks)
        except ValueError as error:
            message = str(error)
        parameters = gathered.named(chunks)
        host.backward(shape, chunks, None, 0)
        if shape.fsdp is None:
            reduced = gathered.gather(gathered.local_values(parameters, gathered.gradients(chunks)))
        else:
            reduced = gathered.sharded(parameters, gradients=True)
        norms.append(float(torch.stack([gradient.norm() for gradient in reduced.values()]).norm()))
    return norms[1] / norms[0], message


def test_gradients_that_megatron_sums_are_refused(workers) -> None:
    """A version that averages them is accepted: the average over four ranks is a quarter of the sum."""
    for times, message in workers(4).run(summed):
        if message is None:
            assert times == pytest.approx(1, rel=1e-5)
        else:
            assert times == pytest.approx(4, rel=1e-5)
            assert re.search(
                "found outer_dp_sharding_strategy='optim', .* sums gradients; needed .*'no_shard'", message
            )
