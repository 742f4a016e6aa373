"""A mixture of experts under Muon and AdamW: eight experts, of which two see each byte; learning rates swept alike.

    python -m benchmarks.studies.mixture --json benchmarks/results/mixture.json        # an hour on one core

A Mixtral of `byte_models.py` learns bytes of Python's standard library. Each way runs at the same learning rates with
the first seed, and at its best one with all seeds. The weights of a layer's experts are one tensor, of which each
expert is a matrix. "Muon, experts by AdamW" says what the experts gain of Muon. Trainings that are in the JSON already
are not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies.byte_models import build, loss, text, windows
from benchmarks.studies.sweep import final, rate_at
from benchmarks.studies.trainings import Trainings

import muonmesh as mm

EXPERTS, BATCH, HELD_OUT = 8, 8, 64
WAYS: dict[str, dict[str, str]] = {
    "AdamW": {".*": "adamw"},
    "Muon": {},
    "Muon, experts by AdamW": {r".*\.experts\..*": "adamw"},
}


def train(variant: str, lr: float, seed: int, *, steps: int, width: int, layers: int) -> dict[str, Any]:
    """One training: validation losses by step, nats a byte."""
    model = build("experts", width=width, layers=layers, seed=seed, experts=EXPERTS)
    optimizer = mm.from_model(model, lr=lr, overrides=WAYS[variant], process_group="local")
    data, generator = text(), torch.Generator().manual_seed(seed)
    held_out = windows(text(held_out=True), HELD_OUT, torch.Generator().manual_seed(0))
    validation: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_at(step - 1, steps)
        loss(model, windows(data, BATCH, generator)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            with torch.no_grad():
                validation.append((step, float(loss(model, held_out))))
            if not math.isfinite(validation[-1][1]):
                break
    return {"validation": validation}


def main() -> None:
    """Sweep each way, and print its losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = {"steps": arguments.steps, "width": arguments.width, "layers": arguments.layers}
    trainings = Trainings(arguments.json, {**sizes, "experts": EXPERTS, "batch": BATCH})

    def validation(variant: str, lr: float, seed: int) -> float:
        return final(trainings.get(lambda: train(variant, lr, seed, **sizes), way=variant, lr=lr, seed=seed))

    for variant in WAYS:
        losses = {rate: validation(variant, rate, 0) for rate in arguments.rates}
        rate = min(losses, key=losses.__getitem__)
        seeds = [validation(variant, rate, seed) for seed in range(arguments.seeds)]
        print(variant, {rate: round(value, 4) for rate, value in losses.items()}, flush=True)
        print(f"{variant}: {rate:g} {statistics.mean(seeds):.4f} of {[round(value, 4) for value in seeds]}", flush=True)


if __name__ == "__main__":
    main()
