"""Whether a step has become slower: the ratios of a recorded run beside those of a fresh one.

    python -m benchmarks.guard                              # against benchmarks/results/guard*.json
    python -m benchmarks.guard --recorded FILE --rounds 15 --tolerance 0.1

A recorded run is what `step.py --json` has written. Its matrices are stepped again in its layouts, by ours and by
torch.optim.Muon in turns, and the median over the rounds of its time over ours is compared.
A ratio is worse if it is below the recorded one by more than the tolerance; a layout in which one is worse is measured
a second time, and the better run counts. Milliseconds are not compared: they are another machine's, or another day's.

It ends with 1 if a ratio is worse, and with 2 if there is nothing to compare with, or only a run of another processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import OURS, Entries
from benchmarks.report import cpu, print_rows
from benchmarks.step import Options, measure
from benchmarks.workload import LAYOUTS, parse_shapes

RECORDED = sorted((Path(__file__).parent / "results").glob("guard*.json"))
TOLERANCE = 0.25
"""Of a ratio. Below that of a busy machine a quiet one has been by 15 % (`benchmarks/README.md`)."""

Times = Mapping[str, Sequence[float]]
"""Milliseconds of each round, by contender."""


@dataclass(frozen=True)
class Verdict:
    """How many times ours an opponent took in one layout, recorded and now."""

    layout: str
    opponent: str
    recorded: float
    fresh: float

    def is_worse(self, tolerance: float) -> bool:
        """Whether ours has become slower against this opponent."""
        return self.fresh < self.recorded * (1 - tolerance)


def ratios(times: Times) -> dict[str, float]:
    """The median over the rounds of each opponent's time over ours."""
    reference = times[OURS]
    return {
        name: statistics.median(
            other_time / reference_time for other_time, reference_time in zip(seconds, reference, strict=True)
        )
        for name, seconds in times.items()
        if seconds and not name.startswith(OURS)
    }


def compare(layout: str, recorded: Times, fresh: Times) -> list[Verdict]:
    """The verdicts on all opponents that both runs have."""
    before, after = ratios(recorded), ratios(fresh)
    return [Verdict(layout, name, before[name], after[name]) for name in before if name in after]


def judge(title: str, record: dict[str, Any], rounds: int, tolerance: float) -> list[Verdict]:
    """Step what a recorded run has stepped; a layout in which a ratio is worse twice, of which the better counts."""
    shapes, verdicts = parse_shapes(",".join(record["shapes"])), []
    for name, table in record["tables"].items():
        recorded = {contender: figures["milliseconds"] for contender, figures in table["contenders"].items()}

        def run(name: str = name, recorded: Times = recorded) -> list[Verdict]:
            entries = Entries(("ours", "torch"), (), {})
            results = measure(LAYOUTS[name], Options(shapes, record["layers"], rounds, 2, entries))
            return compare(f"{title}, {name}", recorded, {result.name: result.milliseconds for result in results})

        pairs = run()
        if any(verdict.is_worse(tolerance) for verdict in pairs):
            pairs = [max(pair, key=lambda verdict: verdict.fresh) for pair in zip(pairs, run(), strict=True)]
        verdicts += pairs
    return verdicts


def main() -> None:
    """Measure, print, and end with 1 if something is worse."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recorded", type=Path, nargs="+", default=RECORDED, help="files of step.py (guard*.json)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"of a ratio (default {TOLERANCE})")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default 15)")
    chosen = parser.parse_args()
    verdicts: list[Verdict] = []
    for path in chosen.recorded:
        if not path.exists():
            parser.error(f"{path}: found no file; needed one of a recorded run. Write step.py --json FILE")
        record = json.loads(path.read_text())
        if record["cpu"] != cpu():
            message = f"{path.name}: found figures of {record['cpu']!r}; needed those of {cpu()!r}. "
            parser.error(message + f"Write {record['command']} here, on a commit to compare with")
        verdicts += judge(path.stem, record, chosen.rounds, chosen.tolerance)
    rows = [
        [f"{v.layout}, {v.opponent}", f"{v.recorded:.2f}", f"{v.fresh:.2f}", f"{v.fresh / v.recorded - 1:+.0%}"]
        for v in verdicts
    ]
    print_rows("Time of an opponent over ours", ["", "recorded", "now", ""], rows)
    worse = [f"{v.layout}: {v.opponent}" for v in verdicts if v.is_worse(chosen.tolerance)]
    sys.exit(f"slower than recorded by more than {chosen.tolerance:.0%} against {'; '.join(worse)}" if worse else 0)


if __name__ == "__main__":
    main()
