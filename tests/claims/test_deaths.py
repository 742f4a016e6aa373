"""A rank that vanishes inside `step`: the others end in time, name it, and save nothing that is half written."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from typing import get_args

import numpy as np
import pytest

from tests.support.deaths import LAST_WHOLE, STEPS, How, Moment, Told, give, left_behind, make, optimizer_of

SHARPEST = {("before the scatter", "killed")}
TO_OWNERS = ("before a bucket of gradients", "before the averages of AdamW's")
TIMEOUT = 6.0  # of the ranks' collectives


@cache
def weights_after(steps: int) -> dict[str, np.ndarray]:
    """Those of one process."""
    model = make()
    optimizer = optimizer_of(model)
    for step in range(steps):
        give(model, step)
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def check_reports(reports: dict[int, Told], victim: int, *, patience: float = 30.0, alone: bool = True) -> None:
    """``alone``: whether nobody else is named, such as ranks that have ended because of the victim."""
    for rank, report in reports.items():
        assert report.error, f"rank {rank} finished {STEPS} steps without rank {victim}"
        missing = report.error.partition("Missing: ")[2].partition(".")[0].split(", ")
        assert missing == [str(victim)] if alone else str(victim) in missing, report.error
        assert report.seconds < TIMEOUT + patience
        if not report.refused:
            assert report.whole >= LAST_WHOLE
            expected = weights_after(report.whole)
            assert all(np.array_equal(report.weights[name], expected[name]) for name in expected), (rank, report.whole)
        else:
            assert "interrupted while it wrote" in report.refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param(moment, how, marks=() if (moment, how) in SHARPEST else pytest.mark.soak)
        for moment in get_args(Moment)
        for how in get_args(How)
        if moment != "before passing on" and moment not in TO_OWNERS
    ],
)
def test_a_rank_that_vanishes_inside_a_step_is_named_and_nothing_torn_is_saved(moment: Moment, how: How) -> None:
    reports = left_behind(moment, how)
    assert sorted(reports) == [0, 2]
    check_reports(reports, 1)
    if moment not in ("before the flags", "at the end"):
        assert all(report.refused for report in reports.values()), "the step had begun to write"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["killed", *(pytest.param(how, marks=pytest.mark.soak) for how in ("exited", "stopped"))]
)
def test_the_rank_that_keeps_the_store_is_named_too(how: How) -> None:
    """Without torchrun rank 0 keeps the store, so that nobody can look there who is missing."""
    reports = left_behind("before the scatter", how, victim=0, keeps=True)
    for report in reports.values():
        assert "The store of the ranks, in the process of rank 0" in report.error, report.error
        assert report.seconds < TIMEOUT + 30
        assert report.refused


@pytest.mark.soak
@pytest.mark.parametrize("how", get_args(How))
def test_a_rank_that_vanishes_before_it_passes_results_on_is_named(how: How) -> None:
    """Four ranks on two machines. A rank that is sent nothing more may finish the step, and waits in the next one."""
    reports = left_behind("before passing on", how, ranks=4, machine=2)
    assert sorted(reports) == [0, 2, 3]
    check_reports(reports, 1, alone=False)
    assert any(report.refused for report in reports.values()), "the step had begun to write"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("machine", [0, 2])
@pytest.mark.parametrize("how", get_args(How))
@pytest.mark.parametrize("moment", [*TO_OWNERS, "before the flags", "at the end"])
def test_a_rank_that_vanishes_while_gradients_travel_to_owners_is_named(moment: Moment, how: How, machine: int) -> None:
    """Whether in a backward pass or in a step, on one machine and on two."""
    reports = left_behind(moment, how, ranks=4, machine=machine, to_owners=True)
    assert sorted(reports) == [0, 2, 3]
    check_reports(reports, 1, alone=False)
    if moment in TO_OWNERS:
        assert not any(report.refused for report in reports.values()), "no rank has written anything yet"
        assert {report.whole for report in reports.values()} == {LAST_WHOLE}


# ------------------------------------------------------------------ ranks that leave


@pytest.mark.soak
def test_threads_of_gloo_let_go_before_the_end() -> None:
    """On CPython 3.11, 5 to 8 of 48 of plain torch's ranks abort: `python -m tests.support.exits torch 48 2,4 keep`."""
    ends_well("muonmesh", 9, "keep")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "end"), [("torch", "destroy"), ("muonmesh", "keep"), ("muonmesh", "destroy")])
def test_200_ranks_leave_under_load(kind: str, end: str) -> None:
    """After a few steps of Muon, and after plain torch's collectives to compare: an abort of both would be torch's."""
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        ends_well(kind, 200, end)


def ends_well(kind: str, exits: int, end: str) -> None:
    command = [sys.executable, "-m", "tests.support.exits", kind, str(exits), "2,3,4", end]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1800.0, check=False)
    print(process.stdout)
    assert process.returncode == 0, process.stdout + process.stderr
    assert " exits of [2, 3, 4] ranks" in process.stdout, process.stdout
    assert "ended with" not in process.stdout, process.stdout
