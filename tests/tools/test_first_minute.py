"""`make test-gpu` measures, goes on after a failure, keeps what it prints; here on a CPU, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import first
from tests.gpu.run import REPOSITORY, Part, parts, run
from tests.support.interpreter import interpreting


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    with pytest.MonkeyPatch.context() as patch, interpreting() as call:
        patch.setattr("tests.support.interpreter.SECONDS", 500.0)  # it starts three ranks, each of which imports torch
        yield call


def reported(sides: tuple[int, ...]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        tiny = {
            "side": 16,
            "sustained": 0.01,
            "judged": [(16, 32)],
            "batches": [(2, 16, 16)],
            "shapes": [(16, 16), (16, 32)],
        }
        failed = first.report(torch.device("cpu"), 2, times=1, sides=sides, **tiny)
    return failed, shown.getvalue()


@pytest.mark.slow
def test_every_figure_stands_beside_its_model_and_a_failure_is_told(interpreter: Callable[..., Any]) -> None:
    failed, text = interpreter(reported, (16, -1))  # there is no matrix of -1 rows
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    figures = {figure: (modelled, measured) for figure, modelled, measured in rows[1:]}
    assert failed
    assert figures.pop("products") == ("", "FAILED, see below")
    assert "Traceback" in text
    judged = {figure: measured for figure, (_, measured) in figures.items() if "error, largest" in figure}
    assert len(judged) == len(first.SPECTRA) * len(first.WAYS), text
    for measured in judged.values():
        error, largest, bits = measured.split(", ")
        assert float(error) < 1.0
        assert float(largest) < 2.0
        assert bits == "the same bits"
    counted = {figure: pair for figure, pair in figures.items() if figure not in judged}
    # ceilings, host, products of one side, ways, steps, messages; one rank sends nothing
    assert len(counted) == 4 + 3 + (2 + 6) + (len(first.WAYS) + 1) + 4 + 2 + 3, text
    for figure, (modelled, measured) in counted.items():
        assert not modelled or all(float(number) >= 0 for number in modelled.split(" to ")), figure
        assert "library" in figure or float(measured) > 0, figure
    assert "all-to-all, 2 ranks, 4 bytes, µs" in figures


def test_what_is_printed_is_kept_and_nothing_stops_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that fails, one that takes too long with all that it has started, one that nothing is left for."""
    ends = [
        Part(f"part {code}", 60, [sys.executable, "-c", f"print({code}); raise SystemExit({code})"])
        for code in (0, 3, 4)
    ]
    waits = Part("slow", 2, ["sh", "-c", "echo begun; sleep 300 & sleep 300"])
    began = time.monotonic()
    assert run([*ends, waits], tmp_path / "report.txt", seconds=100) == 3
    assert time.monotonic() - began < 60
    report = (tmp_path / "report.txt").read_text()
    assert [line for line in report.splitlines() if line] == [
        *("## part 0", "0", "## part 3", "3", "## part 4", "4", "## slow", "begun"),
        "Not finished: slow: ended after 2 s",
    ]
    assert report in capsys.readouterr().out
    assert run([ends[0]], tmp_path / "report.txt", seconds=1) == 0
    assert (tmp_path / "report.txt").read_text().strip() == "Not finished: part 0: not begun"


def test_every_part_names_what_there_is() -> None:
    """A misspelt file or figure would cost minutes of a device."""
    for part in parts(Path("figures.json"), []):
        files = [word for word in part.command if word.startswith("tests/") and word.endswith(".py")]
        modules = [
            word for flag, word in pairwise(part.command) if flag == "-m" and word.startswith(("tests", "bench"))
        ]
        files += [f"{module.replace('.', '/')}.py" for module in modules]
        assert all((REPOSITORY / file).exists() for file in files), part
        if "tests.gpu.first" in part.command:
            assert set(part.command[3:]) <= set(first.PARTS), part
    assert sum(part.seconds for part in parts(Path("figures.json"), [])[:5]) < 11 * 60
