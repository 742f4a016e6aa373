"""The steps that a simulated device runs, on the real one: the numbers of a CPU."""

from __future__ import annotations

from math import isqrt

import pytest
import torch

from tests.device import stepping
from tests.device.stepping import CASES, Found, differing, steps
from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest

IGNORED = ("ignore:.*without masters", "ignore:.*lr_scheduler")
NAMES = [name for name, case in CASES.items() if case.device == "cuda:0"]
AMBIGUOUS = ("soap",)
"""Rules whose state is not determined where a covariance has not full rank: any basis of its null space will do."""


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_has_the_numbers_of_a_cpu(name: str) -> None:
    case = CASES[name]
    on_device = steps(case, DEVICE)[0]
    if name not in AMBIGUOUS:
        assert differing(case, Found(on_device, [], set(), {})) == []
        return
    numbers = stepping.expected(case)
    for key, value in on_device.items():
        assert value.isfinite().all(), key
        if key.endswith(("momentum_buffer", "_gram")):
            torch.testing.assert_close(value, numbers[key], rtol=1e-4, atol=1e-5)
        if key in ("tall/row_basis", "tall/col_basis"):
            basis = value.double().view(-1, isqrt(len(value)))
            torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)).double(), atol=1e-5, rtol=0)
