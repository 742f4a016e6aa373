"""QK-clip under DeepSpeed's engine: the masters of all stages, which no parameter of the model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import muonmesh as mm
from muonmesh.integrations.deepspeed import initialize
from tests.hosts import deepspeed_engine as ds
from tests.hosts.deepspeed_engine import zero
from tests.support import models
from tests.support.workers import Pool

BF16 = {"bf16": {"enabled": True}}
NAME = "model.layers.1.self_attn"
LARGEST = torch.tensor([400.0, 1.0, 100.0, 144.0, 2.0, -5.0, 900.0, 99.0])


def clip_in_deepspeed(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Take steps at rate 0, so that nothing but the clip changes; return what is changed, and what is wrong."""
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    ds.as_launchers_do()
    settings = {"lr": 0.0, "adamw": {"lr": 0.0}}
    engine = initialize(model=models.build("llama"), config=config, optimizer=settings)[0]
    clip = mm.QKClip(engine.module, threshold=100.0, optimizer=engine.optimizer)
    before = ds.weights(engine)
    for _ in range(2):
        loss = engine(input_ids=models.tokens(dist.get_rank(), 1, 6), use_cache=False).logits.float().square().mean()
        engine.backward(loss)
        clip._largest.fill_(-torch.inf)  # what this pass has noted
        half = LARGEST if dist.get_rank() else LARGEST.clamp(max=150.0)  # the other rank has seen the largest
        clip.record(engine.module.get_submodule(NAME), half)
        engine.step()
    after = ds.weights(engine)
    factors = (100.0 / LARGEST.double()).clamp(max=1.0) ** 2  # two steps; keys are shared, so queries take all of it
    factors[LARGEST <= 100] = 1.0
    expected = before[f"{NAME}.q_proj.weight"].double() * factors.repeat_interleave(8)[:, None]
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    wrong = [] if within_tolerance(after[f"{NAME}.q_proj.weight"], expected) else ["master"]
    wrong += [] if within_tolerance(ds.computed_with(engine)[f"{NAME}.q_proj.weight"], expected, 2**-8) else ["module"]
    engine.destroy()
    return changed, wrong


def within_tolerance(values: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return bool(((values.double() - expected).abs() <= tolerance * expected.abs()).all())


@pytest.mark.parametrize(
    "config",
    [zero(0), zero(0) | BF16, zero(1), zero(2) | BF16, zero(3), zero(3, sub_group_size=3000) | BF16],
    ids=["0", "0 bf16", "1", "2 bf16", "3", "3 bf16, small groups"],
)
def test_the_masters_of_every_stage_are_clipped(pools: dict[int, Pool], config: dict[str, Any]) -> None:
    assert pools[2].run(clip_in_deepspeed, config) == [([f"{NAME}.q_proj.weight"], [])] * 2


def message_without_optimizer(config: dict[str, Any]) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    ds.as_launchers_do()
    engine = initialize(model=models.build("llama"), config=config, optimizer={"lr": 0.0, "adamw": {"lr": 0.0}})[0]
    try:
        mm.QKClip(engine.module, threshold=100.0).step()
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("config", [zero(1) | BF16, zero(2), zero(3) | BF16], ids=["1 bf16", "2", "3 bf16"])
def test_weights_that_deepspeed_overwrites_are_refused(pools: dict[int, Pool], config: dict[str, Any]) -> None:
    """The next step copied the weights from their masters, which were not clipped, so the clip was undone."""
    for message in pools[2].run(message_without_optimizer, config):
        assert "found a weight that DeepSpeed copies from its master weight" in message
        assert message.endswith("Write mm.QKClip(engine.module, optimizer=engine.optimizer)")
