"""The learning rates that `muonmesh train` compares: a sweep of each optimizer's peak rate.

    python benchmarks/adamw_sweep.py
    python benchmarks/adamw_sweep.py --adamw 1e-3 3e-3 --muon 3e-3 -- --steps 50 --parallel ddp

Every figure is a whole training with its own schedule from the same weights and data; what follows `--` goes to
`muonmesh train` as it is. Prints a table, and writes JSON after each training: a sweep can be cut short and goes on
where it was, or be widened later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from muonmesh.tools.cli.report import summarise
from muonmesh.tools.cli.run_settings import load_config

ADAMW_RATES = (1e-3, 2e-3, 3e-3, 5e-3, 1e-2)
MUON_RATES = (3e-3, 6e-3, 9e-3, 1.2e-2, 2.4e-2)


def train(optimizer: str, rate: float, options: list[str], directory: Path) -> dict[str, object]:
    run = directory / f"{optimizer}-{rate:g}"
    command = [sys.executable, "-c", "from muonmesh.tools.cli import main; main()", "train"]
    option = "--lr" if optimizer == "muon" else "--adamw-lr"
    command += ["--optimizer", optimizer, option, str(rate), "--out", str(run), "--checkpoint-every", "0", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (summary,) = summarise(run)
    return {
        "optimizer": optimizer,
        "lr": rate,
        "validation_loss": summary.final_validation_loss,
        "train_loss": summary.final_train_loss,
        "steps": summary.last_step,
        "seconds": summary.seconds,
    }


def table(results: list[dict[str, object]]) -> str:
    losses = {(row["optimizer"], row["lr"]): row["validation_loss"] for row in results}
    rates = sorted({float(str(row["lr"])) for row in results})
    lines = ["| peak learning rate | " + " | ".join(f"{rate:g}" for rate in rates) + " |"]
    lines.append("|---|" + "---|" * len(rates))
    for optimizer, label in (("adamw", "AdamW"), ("muon", "Muon")):
        found = [loss for (name, _), loss in losses.items() if name == optimizer]
        if found:
            best = min(found)
            cells = [losses.get((optimizer, rate)) for rate in rates]
            shown = ("–" if c is None else f"**{c:.3f}**" if c == best else f"{c:.3f}" for c in cells)
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adamw", type=float, nargs="*", default=ADAMW_RATES, help="peak learning rates of AdamW")
    parser.add_argument("--muon", type=float, nargs="*", default=MUON_RATES, help="peak learning rates of Muon")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "adamw_sweep.json")
    parser.add_argument("options", nargs="*", help="options of `muonmesh train`, after --")
    arguments = parser.parse_args()

    content: dict[str, object] = {"date": datetime.now(UTC).date().isoformat(), "options": arguments.options}
    results: list[dict[str, object]] = []
    if arguments.json.is_file():
        earlier = json.loads(arguments.json.read_text())
        if earlier["options"] != arguments.options:
            parser.error(f"{arguments.json} was made with the options {earlier['options']}; give another --json")
        results = earlier["results"]
    done = {(row["optimizer"], row["lr"]) for row in results}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for optimizer, rates in (("adamw", arguments.adamw), ("muon", arguments.muon)):
            for rate in (rate for rate in rates if (optimizer, rate) not in done):
                results.append(train(optimizer, rate, arguments.options, Path(folder)))
                print(json.dumps(results[-1]), flush=True)
                environment = load_config(Path(folder) / f"{optimizer}-{rate:g}")["environment"]
                content |= {"torch": environment["torch"], "machine": environment["machine"], "results": results}
                arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
