"""The whole step on a simulated device: real numbers, streams in any order, and no races."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.testing import RaceError, SimulatedDevice
from tests.device.stepping import CASES, Case, simulated, steps

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor", "ignore:.*without masters", "ignore:.*lr_scheduler"
)

RULES = ["muon", "normuon", "adamuon", "muonsphere", "hyperball"]
SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 100))]


def rounding(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, as a part of its norm."""
    assert found.keys() == expected.keys()
    wide = {name: (value.double(), expected[name].double()) for name, value in found.items()}
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in wide.values())


@pytest.mark.parametrize("name", CASES)
def test_a(name):
    import time
    t=time.time()
    e = steps(CASES[name], "cpu"); t2=time.time()
    f = simulated(CASES[name], 0)
    print(name, t2-t, time.time()-t2, rounding(f.tensors, e), [n for n in e if not torch.equal(e[n], f.tensors[n])], f.races[:3], f.waits)
