"""`make test-gpu` measures, goes on after a failure, keeps what it prints; here on a CPU, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import first
from tests.gpu.run import run
from tests.interpreter import interpreting


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    with pytest.MonkeyPatch.context() as patch, interpreting() as call:
        patch.setattr("tests.interpreter.SECONDS", 500.0)  # it starts three ranks, each of which imports torch
        yield call


def reported(sides: tuple[int, ...]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        failed = first.report(torch.device("cpu"), 2, times=1, sides=sides, shapes=[(16, 16), (16, 32)])
    return failed, shown.getvalue()


@pytest.mark.slow
def test_every_figure_stands_beside_its_model_and_a_failure_is_told(interpreter: Callable[..., Any]) -> None:
    failed, text = interpreter(reported, (16, -1))  # there is no matrix of -1 rows
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    figures = {what: (modelled, measured) for what, modelled, measured in rows[1:]}
    assert failed
    assert figures.pop("products") == ("", "FAILED, see below")
    assert "Traceback" in text
    assert len(figures) == 3 + 2 + 4 + 2 + 3, text  # one rank sends nothing
    for what, (modelled, measured) in figures.items():
        assert all(float(number) >= 0 for number in modelled.split(" to ")), what
        assert "library" in what or float(measured) > 0, what
    assert "all-to-all, 2 ranks, 4 bytes, µs" in figures


def test_what_is_printed_is_kept_and_nothing_stops_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [[sys.executable, "-c", f"print({code}); raise SystemExit({code})"] for code in (0, 3, 4, 0)]
    assert run(commands, tmp_path / "report.txt") == 3
    assert (tmp_path / "report.txt").read_text() == "0\n3\n4\n0\n"
    assert capsys.readouterr().out.startswith("0\n3\n4\n0\n")
