"""Whether momentum in 4 bits trains as well as in int8 and in fp32: models that learn bytes, three seeds each.

    python -m benchmarks.studies.four_bits --json benchmarks/results/four_bits.json

The package has no momentum in 4 bits (docs/decisions/0045). Its numbers are those of int8 momentum with the 15 codes of
three decades instead of 255, and blocks of 128 elements instead of 256, which `four_bits` puts in their place. Codes
lie in bytes here, so neither memory nor time is that of 4 bits. Trainings that are in the JSON are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.studies.byte_models import KINDS, build, trained
from benchmarks.studies.trainings import Trainings

import muonmesh as mm
from muonmesh.layout import line_segments
from muonmesh.numerics import blockwise
from muonmesh.step import int8_momentum

FORMS = ["fp32", "int8", "4 bits"]
LR, BATCH, HELD_OUT, WIDTH, LAYERS = 3e-3, 4, 32, 192, 2


@contextmanager
def four_bits() -> Iterator[None]:
    """Let int8 momentum in this block have the codes of 4 bits: three decades, and 128 elements for each scale."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(blockwise, "_DECADES", 3))
        for module in (line_segments, int8_momentum):
            stack.enter_context(mock.patch.object(module, "BLOCK", 128))
        yield


def train(kind: str, form: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: the final loss on what is held out, in nats a byte."""
    model = build(kind, width=WIDTH, layers=LAYERS, seed=seed)
    state_dtype: Any = torch.float32 if form == "fp32" else "int8"
    with four_bits() if form == "4 bits" else nullcontext():
        optimizer = mm.from_model(model, lr=LR, state_dtype=state_dtype, kernels="torch", process_group="local")
        return trained(model, optimizer, seed=seed, steps=steps, lr=LR, batch=BATCH, held_out=HELD_OUT)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["gpt2", "llama", "convolutions"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path, help="keep each training in this file, and go on with what it has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    same = {"steps": options.steps, "lr": LR, "batch": BATCH, "width": WIDTH, "layers": LAYERS}
    trainings = Trainings(options.json, same)
    print("| model | momentum | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " | mean |")
    print("|---" * (len(options.seeds) + 3) + "|")
    for kind in options.kinds:
        losses_by_form: dict[str, list[float]] = {form: [] for form in FORMS}
        for seed in options.seeds:
            for form in FORMS:
                key = {"kind": kind, "form": form, "seed": seed}
                run = trainings.get(lambda: train(**key, steps=options.steps), **key)  # noqa: B023 - called at once
                losses_by_form[form].append(run["validation"])
        for form, losses in losses_by_form.items():
            cells = " | ".join(f"{value:.4f}" for value in losses)
            print(f"| {kind} | {form} | {cells} | {statistics.mean(losses):.4f} |", flush=True)


if __name__ == "__main__":
    main()
