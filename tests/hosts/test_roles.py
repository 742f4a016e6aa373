"""What a forward shows of a model that ZeRO-3 has partitioned: an example, and the first training forward."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import muonmesh as mm
from muonmesh.integrations.deepspeed import initialize
from tests.hosts import deepspeed_engine as ds
from tests.hosts.deepspeed_engine import zero
from tests.support.workers import Pool

CONFIG = {"train_micro_batch_size_per_gpu": 1, **zero(3)}
FUSED, SPLIT = "transformer.h.0.attn.c_attn.weight", ("transposed", ("rows", 16, 16, 16))


def build_gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def decided_roles(groups: Any) -> dict[str, Any]:
    """The group, the split and the reason of each parameter."""
    return {
        name: (group["name"], group.get("matrices", [None] * (i + 1))[i], group["reasons"][i])
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


def shown_roles() -> tuple[bool, list[int], Any, str]:
    """Whether a partitioned model has the roles of a whole one; what this rank has of a weight; how it is split."""
    ds.as_launchers_do()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = build_gpt2()
    example = {"input_ids": torch.ones(1, 6, dtype=torch.int64)}
    whole = mm.split_params(build_gpt2(), example=example)
    roles = decided_roles(whole.held_by(model))
    try:
        mm.split_params(model, example=example)
    except ValueError as error:
        message = str(error)
    return roles == decided_roles(whole), list(model.get_parameter(FUSED).shape), roles[FUSED][1], message


class Gates(nn.Module):
    """Two matrices in one weight, which nothing but a forward shows; ZeRO-3 has a function of its own for nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(31, 16), nn.LayerNorm(16)
        self.gates, self.more, self.head = Conv1D(32, 16), nn.Linear(16, 32), nn.Linear(16, 31)

    def forward(self, tokens: Any) -> Any:
        first, second = self.gates(self.embed(tokens)).chunk(2, dim=-1)
        first, second = self.more(first.sigmoid() * second).chunk(2, dim=-1)
        return self.head(self.norm(first.sigmoid() * second))


def warned_roles() -> str:
    """What the first step says of a weight whose split was guessed."""
    ds.as_launchers_do()
    engine = initialize(model=Gates(), config=CONFIG, optimizer={"lr": 0.01, "adamw": {"lr": 0.01}})[0]
    engine.backward(engine(torch.ones(1, 6, dtype=torch.int64)).float().square().mean())
    with pytest.warns(UserWarning, match="first training forward") as caught:
        engine.step()
    engine.destroy()
    return next(str(warning.message) for warning in caught if "first training forward" in str(warning.message))


def test_an_example_shows_what_a_partitioned_model_is(pools: dict[int, Pool]) -> None:
    for same, local, split, message in pools[2].run(shown_roles):
        assert (same, local, split) == (True, [0], SPLIT)
        assert "example= for a model that is sharded: this process has a part of transformer.wte.weight" in message


def test_the_first_training_forward_of_a_partitioned_model_is_read(pools: dict[int, Pool]) -> None:
    for message in pools[2].run(warned_roles):
        assert "gates.weight is split as ('transposed', 'whole')" in message
        assert '("transposed", ("rows", 16, 16))' in message
        assert "more.weight is split as 'whole'" in message
