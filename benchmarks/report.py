"""Tables and JSON: ratios first, then milliseconds, then whether the update was what it should be."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.contenders import OURS, TORCH, Entries


@dataclass(frozen=True)
class Result:
    """One contender in one contest.

    Attributes:
        name: The contender.
        milliseconds: Of each round.
        singular_values: 5 % and 95 % quantile of the update's singular values, relative to their mean, over
            all whole matrices; None for an update that is not meant to be orthogonal.
        problem: Why there are no figures.
    """

    name: str
    milliseconds: Sequence[float] = ()
    singular_values: tuple[float, float] | None = None
    problem: str = ""

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds)


def print_table(title: str, results: Sequence[Result]) -> None:
    """Print one contest; the base of the ratios is ours, or torch.optim.Muon where ours did not run."""
    base = base_of(results)
    header = ["", "ratio", "median ms", "middle half", "singular values"]
    rows = [_row(result, base) for result in results]
    title = f"{title} (ratio: time over that of {base.name})" if base else title
    print_rows(title, header, rows)
    for result in results:
        if result.problem:
            print(f"{result.name}: {result.problem}")


def print_rows(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    else:
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console().print(table)


def _row(result: Result, base: Result | None) -> list[str]:
    values = "{:.2f} – {:.2f}".format(*result.singular_values) if result.singular_values else ""
    if not result.milliseconds:
        return [result.name, "", "", "", values]
    low, _, high = quartiles(result.milliseconds)
    ratio = f"{result.median / base.median:.2f}" if base else ""
    return [result.name, ratio, f"{result.median:.1f}", f"{low:.1f} – {high:.1f}", values]


def problems_of_ours(title: str, results: Sequence[Result]) -> list[str]:
    """What must not be."""
    return [f"{title}: {r.name}: {r.problem}" for r in results if r.name.startswith(OURS) and r.problem]


def base_of(results: Sequence[Result]) -> Result | None:
    """What the others are divided by."""
    measured = {result.name: result for result in results if result.milliseconds}
    return measured.get(OURS) or measured.get(TORCH)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles; of a single value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def record(results: Sequence[Result]) -> dict[str, Any]:
    """One table's part of the JSON."""
    base = base_of(results)
    return {
        result.name: {
            "ratio": round(result.median / base.median, 4) if base and result.milliseconds else None,
            "median_ms": round(result.median, 3) if result.milliseconds else None,
            **asdict(result),
        }
        for result in results
    }


def write_json(path: str, script: str, entries: Entries, tables: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write what was measured, where, when and with which versions; paths of this machine are left out."""
    written = {
        "command": " ".join(["python", script, *_without_paths(sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "commit": _commit(Path(__file__).parent),
        "peers": {name: _commit(Path(path)) for name, path in entries.peers.items()},
        **facts,
        "tables": tables,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(written, indent=1) + "\n")


def _without_paths(words: Sequence[str]) -> list[str]:
    remaining = []
    for previous, word in zip(["", *words], words, strict=False):
        if previous == "--peer":
            word = f"{word.partition('=')[0]}=PATH"
        elif previous == "--against":
            word = "PATH"
        elif previous == "--json":
            word = "FILE"
        remaining.append(word)
    return remaining


def _commit(checkout: Path) -> str:
    """The commit, with a + if files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def cpu() -> str:
    """The processor of this machine, and the instructions that torch uses of it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"
