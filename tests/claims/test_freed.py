"""An optimizer that is not needed any more is freed at once, with its state, its plan and its exchange's memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests.support.problem import SETTINGS, gradients, groups, hold, initial, placed_like

LAYOUTS = ["local", "ddp", "fsdp", "hsdp", "rows-cols"]


def left_behind(layout: str, settings: dict[str, Any]) -> list[str]:
    """Step, clip, measure and save; then drop the optimizer and say what of it is still alive without a collection."""
    if layout == "wrapped":
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)))
        optimizer = mm.from_model(model, **settings)
    else:
        model, group = hold(layout, initial())
        optimizer = mm.Muon(groups(model), process_group=group, **{**SETTINGS, **settings})
    gc.collect()
    gc.disable()
    try:
        for step in range(2):
            if layout == "wrapped":
                model(torch.ones(2, 8)).sum().backward()
            else:
                for name, parameter in model.named_parameters():
                    parameter.grad = placed_like(parameter, gradients(step)[name])
            optimizer.clip_grad_norm_(1.0, skip_above="4x")
            optimizer.step()
            optimizer.metrics()
            optimizer.zero_grad()
        optimizer.explain()
        optimizer.state_dict()
        runtime = optimizer._runtime
        planned = runtime.planned
        assert planned is not None
        watched = {
            "optimizer": weakref.ref(optimizer),
            "kept": weakref.ref(runtime),
            "plan": weakref.ref(planned),
            "exchange": weakref.ref(planned.exchange),
            **{f"state {n}": weakref.ref(v) for n, s in enumerate(optimizer.state.values()) for v in s.values()},
            **{name: weakref.ref(parameter) for name, parameter in model.named_parameters()},
        }
        del optimizer, runtime, planned
        names = [name for name in list(watched)[:4] if watched[name]() is not None]
        names += [name for name in watched if name.startswith("state") and watched[name]() is not None]
        return names
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", [{}, {"shard_state": True}, {"memory_budget_mb": 0.016}], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "wrapped"])
def test_an_optimizer_is_freed_without_a_collection(workers, layout: str, settings: dict[str, Any]) -> None:
    assert workers(4).run(left_behind, layout, settings) == [[]] * 4
