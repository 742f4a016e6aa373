"""What the dry run models, measured on the device that is there; both are written beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.support.figures import CASES, Case, Row, row, table

WRITTEN = Path(__file__).parents[2] / "benchmarks" / "results" / "modelled-and-measured.md"
STEPS = 10


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, tuple[Row, Row | None]]]:
    """The figures so far; written in the end, also where a test has failed."""
    row_pairs: dict[str, tuple[Row, Row | None]] = {}
    yield row_pairs
    title = f"# Modelled and measured, one step\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n"
    WRITTEN.write_text(title + table(row_pairs) + "\n")
    print(f"\n{table(row_pairs)}\nWritten to {WRITTEN}.")


def figures_of_case(case: Case) -> Row:
    """Launches by the profiler, peak memory by torch's allocator, the median time by events."""
    optimizer = case.optimizer(DEVICE)
    for _ in range(3):
        case.step(optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    case.step(optimizer)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before
    times = []
    for _ in range(STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        case.step(optimizer)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.step(optimizer)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum(not event.name.lower().startswith(("memcpy", "memset")) for event in kernels)
    return Row(launches, peak / 2**20, median(times))


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_dry_run_says(name: str, rows: dict[str, tuple[Row, Row | None]]) -> None:
    """Time is written, not judged: the model's rates are those of an H100."""
    modelled = row(CASES[name].modelled())
    rows[name] = modelled, None
    measured_row = figures_of_case(CASES[name])
    rows[name] = modelled, measured_row
    assert 0 < measured_row.launches <= 1.25 * modelled.launches + 10
    assert measured_row.peak_mib <= 1.25 * modelled.peak_mib + 32
