"""How much a layer's output changes in a few steps, at widths from 256 to 4,096: the coordinate check of μP.

    python benchmarks/coordinates.py --json benchmarks/results/coordinates.json
    python benchmarks/coordinates.py --widths 256 512 1024 --seeds 3 --json benchmarks/results/coordinates_seeds.json

The model is an input layer, two hidden matrices and an output layer. The rate is that of the smallest width. "carried"
sets the rates of docs/learning-rates.md for wider models, and initial weights ∝ min(1, √(rows/cols))/√cols; "as it is"
keeps rate and decay, and torch's initial weights. An output whose change depends on the width is a rate that does not
carry over.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import muonmesh as mm

WIDTHS = (256, 512, 1024, 2048, 4096)
INPUTS, CLASSES, BATCH, STEPS = 64, 10, 256, 3
RATE = 3e-3
CASES: dict[str, dict[str, Any]] = {
    "match_rms_adamw": {"scale_mode": "match_rms_adamw"},
    "unit_rms_norm": {"scale_mode": "unit_rms_norm", "muon": {"lr": 0.05}},
    "AdamW": {"overrides": {"hidden": "adamw"}},
}


class Net(nn.Module):
    """A residual network of two matrices, which gives all of its outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(INPUTS, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the features after each layer, and the logits."""
        x = self.table(tokens).mean(1) * tokens.shape[1] ** 0.5
        found = {"input": x}
        for number, layer in enumerate(self.hidden, 1):
            x = x + layer(torch.relu(x))
            found[f"hidden {number}"] = x
        return {**found, "logits": self.head(x)}


def run(case: str, width: int, seed: int, *, carried: bool) -> dict[str, float]:
    """Return the RMS of the change of each output."""
    settings = {"lr": RATE, **CASES[case]}
    torch.manual_seed(seed)
    tokens, labels = torch.randint(INPUTS, (BATCH, 8)), torch.randint(CLASSES, (BATCH,))
    model = Net(width)
    optimizer = mm.from_model(model, **settings)
    if carried:
        wider, small = width / WIDTHS[0], dict(Net(WIDTHS[0]).named_parameters())
        matrices = {"match_rms_adamw": wider**0.5, "unit_rms_norm": 1.0, "AdamW": wider}[case]
        for group in optimizer.param_groups:
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                kind = name.partition(".")[0]
                initial = float(small[name].detach().square().mean().sqrt())
                with torch.no_grad():
                    weight.normal_(0, initial / {"table": 1.0, "hidden": wider**0.5, "head": wider}[kind])
            slower = {"table": 1.0, "hidden": matrices, "head": wider}[kind]
            group["lr"], group["weight_decay"] = group["lr"] / slower, group["weight_decay"] * slower
    with torch.no_grad():
        before = model(tokens)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens)["logits"], labels).backward()
        optimizer.step()
    with torch.no_grad():
        after = model(tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def main() -> None:
    """Print a line for each width, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    began = time.perf_counter()
    for width in options.widths:
        for case in CASES:
            for carried in (False, True):
                each = [run(case, width, seed, carried=carried) for seed in range(options.seeds)]
                mean = {name: math.fsum(one[name] for one in each) / len(each) for name in each[0]}
                runs.append({"case": case, "carried": carried, "width": width, "change": mean, "each": each})
                told = ", ".join(f"{name} {value:.3g}" for name, value in mean.items())
                print(f"{width} {case} {'carried' if carried else 'as it is'}: {told}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json is not None:
        written = {"torch": torch.__version__, "steps": STEPS, "seeds": options.seeds, "lr": RATE, "runs": runs}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
