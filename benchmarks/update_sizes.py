"""How large one update of torch.optim.Muon is beside one with each coefficient set, at equal rate and scale.

    python benchmarks/momentum.py --width 256 --out momentum.safetensors
    python benchmarks/update_sizes.py momentum.safetensors --json benchmarks/results/update_sizes.json

For each recorded matrix the root mean square of torch's update is divided by that of ours. The factor by which a rate
found with torch.optim.Muon is multiplied, where the step shall stay as large, is this ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import muonmesh as mm

SETS = ("simple", "quintic", "polar_express", "deflated")


def size(x: Tensor) -> float:
    """Return the root mean square of a tensor."""
    return float(x.double().square().mean().sqrt())


def torchs_update(direction: Tensor) -> Tensor:
    """Return what torch.optim.Muon makes of a direction, without its scale."""
    weight = torch.nn.Parameter(torch.zeros_like(direction))
    weight.grad = direction
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    optimizer.step()
    return weight.detach() / (0.2 * max(direction.shape) ** 0.5)


def main() -> None:
    """Print the ratio of each set, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("momentum", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ratios: dict[str, dict[str, float]] = {name: {} for name in SETS}
    for matrix, direction in load_file(options.momentum).items():
        theirs = size(torchs_update(direction))
        for name in SETS:
            ours = size(mm.orthogonalize(direction.bfloat16(), coefficients=name))
            ratios[name][matrix] = theirs / ours
    means = {name: statistics.fmean(found.values()) for name, found in ratios.items()}
    for name, found in ratios.items():
        print(f"{name}: {means[name]:.3f} ({min(found.values()):.3f} to {max(found.values()):.3f})")
    if options.json is not None:
        written = {"torch": torch.__version__, "mean": means, "ratios": ratios}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
