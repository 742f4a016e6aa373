"""The whole step on a simulated device: real numbers, streams in any order, and no races."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muonmesh.testing import RaceError, SimulatedDevice
from tests.device.stepping import CASES, simulated, steps
from tests.samples import one_in

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor", "ignore:.*without masters", "ignore:.*lr_scheduler"
)


def rounding(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, as a part of its norm."""
    assert found.keys() == expected.keys()
    wide = {name: (value.double(), expected[name].double()) for name, value in found.items()}
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in wide.values())


@pytest.mark.parametrize("name", one_in(3, list(CASES)))
def test_a_step_gives_the_numbers_of_a_cpu(name: str) -> None:
    """Within rounding, with no race, and the host does not wait within a step."""
    case = CASES[name]
    expected = steps(case, "cpu")
    for seed in (list(CASES).index(name) % 3,):
        found = simulated(case, seed)
        assert not found.races
        assert not found.waits
        assert rounding(found.tensors, expected) < (0.02 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_orders(name: str, seed: int) -> None:
    """Each gives the same bits as the first."""
    first, found = simulated(CASES[name], 1000), simulated(CASES[name], seed)
    assert not found.races
    assert all(torch.equal(value, found.tensors[key]) for key, value in first.tensors.items())


def test_a_race_is_told_with_both_lines() -> None:
    def add_on_another_stream() -> None:
        with SimulatedDevice():
            x = torch.zeros(4, device="cuda:0")
            with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
                x.add_(1)

    with pytest.raises(RaceError, match=r"zeros at .*test_simulated.*\n.*add_ at .*test_simulated"):
        add_on_another_stream()
