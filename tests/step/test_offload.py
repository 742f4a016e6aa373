"""`state_device="cpu"`: state that lies on the host is worked on in copies, and has the bits of state that stays.

No device is needed to show it: told to work in copies, a CPU brings them and gives them back by the same code, bucket
by bucket. `tests/tools/test_dry_run.py` shows what of that a device would hold and copy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import muonmesh as mm
from tests.support import problem
from tests.support.in_copies import step_as_on_a_device, work_in_copies
from tests.support.on_ranks import on_ranks

COVERS = ("step.offload.Offload",)

BF16 = {"param_dtype": torch.bfloat16, "master_dtype": torch.float32}
FP32 = {"param_dtype": torch.float32}


def in_copies_on_a_device(optimizer: mm.Muon) -> None:
    work_in_copies(optimizer)
    step_as_on_a_device(optimizer)


EVERY = ["local", "ddp", "fsdp", "hsdp", "rows-cols"]
SHARED: dict[str, Any] = {**BF16, "shard_state": True, "decay_mode": "cautious"}


@pytest.mark.parametrize(
    ("device", "layouts", "settings"),
    [
        pytest.param(True, ["ddp", "hsdp"], SHARED, id="as on a device"),
        pytest.param(True, EVERY, SHARED, id="as on a device, every layout", marks=pytest.mark.soak),
        pytest.param(True, EVERY, FP32, id="as on a device, without masters", marks=pytest.mark.soak),
        pytest.param(False, EVERY, FP32, id="as on a cpu", marks=pytest.mark.soak),
    ],
)
@pytest.mark.filterwarnings("ignore:.*without masters")
@on_ranks(4)
def test_state_in_copies_is_bit_for_bit_state_that_stays(
    device: bool, layouts: list[str], settings: dict[str, Any]
) -> None:
    param_dtype = settings["param_dtype"]
    values = {name: value.to(param_dtype) for name, value in problem.initial().items()}
    copies, plain = (in_copies_on_a_device, step_as_on_a_device) if device else (work_in_copies, None)
    options = {"compute_dtype": torch.float32, "memory_budget_mb": 0.08, **settings}
    del options["param_dtype"]
    alone = problem.alone(3, problem.zeroed, plain, param_dtype, **options)
    for layout in layouts:
        *_, (model, optimizer) = problem.steps(layout, 3, values, problem.zeroed, copies, **options, state_device="cpu")
        assert problem.differing(problem.result(model, optimizer), alone) == [], layout
