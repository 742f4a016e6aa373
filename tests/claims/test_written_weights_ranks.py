"""Weights that other code writes between steps are respected under every layout, as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import gathered, problem, writers

MASTERS = {"master_dtype": torch.float32}


def trained(layout: str, how: str, **settings: Any) -> dict[str, Tensor]:
    """Weights and state after steps of bf16 weights that are written after the second and the third step."""
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    result: dict[str, Tensor] = {}
    first: writers.Saved = {}
    for step, (model, optimizer) in enumerate(problem.steps(layout, 4, values, problem.zeroed, **settings)):
        first = first or writers.copied(model)
        if step in (1, 2):
            writers.write(how, model, first)
        result = problem.result(model, optimizer)
    return result


@functools.cache
def in_one_process(how: str, **settings: Any) -> dict[str, Tensor]:
    return trained("local", how, **settings)


def differing(layout: str, writing: list[str], **settings: Any) -> dict[str, list[str]]:
    """What differs from one process, by what was written; ``shard_state`` and the like matter to ranks alone."""
    alone = {key: value for key, value in settings.items() if key in (*MASTERS, "stochastic_rounding")}
    return {how: problem.differing(trained(layout, how, **settings), in_one_process(how, **alone)) for how in writing}


@pytest.mark.parametrize(
    ("ranks", "layout", "settings"),
    [
        (2, "ddp", MASTERS),
        (2, "ddp", {**MASTERS, "shard_state": True}),
        (2, "fsdp", MASTERS),
        (2, "shard1", MASTERS),
        (2, "fsdp", {"stochastic_rounding": 3}),
        (4, "hsdp", {**MASTERS, "shard_state": True}),
        (4, "rows-cols", MASTERS),
    ],
)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_what_is_written_is_respected_as_in_one_process(
    workers, ranks: int, layout: str, settings: dict[str, Any]
) -> None:
    """One process is held against weights in fp32 and the oracle in tests/claims/test_written_weights.py."""
    writing = ["load_state_dict", "set_model_state_dict", "normalize"] if settings == MASTERS else ["average"]
    for differences in workers(ranks).run(differing, layout, writing, **settings):
        assert differences == {how: [] for how in writing}


def after_writing(layout: str, how: str) -> dict[str, float]:
    """How far a step of tiny size takes weights from what was written, as a share of the largest weight."""
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    steps = problem.steps(layout, 3, values, **MASTERS)
    model, _ = next(steps)
    first = writers.copied(model)
    model, optimizer = next(steps)
    writers.write(how, model, first)
    written = gathered.whole(dict(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    model, _ = next(steps)
    return {
        name: float((value.float() - written[name].float()).abs().max() / written[name].float().abs().max())
        for name, value in gathered.whole(dict(model.named_parameters())).items()
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_tiny_step_stays_at_what_was_written(workers, layout: str) -> None:
    """Without the mend it returns to the master weights."""
    for how in ("load_state_dict", "clamp"):
        for distances in workers(2).run(after_writing, layout, how):
            assert {name: far for name, far in distances.items() if far > 2.0**-8} == {}
