"""Whether a coefficient set trains as well as another: models that learn bytes, with each set and several seeds.

    python -m benchmarks.studies.sets --json benchmarks/results/sets.json         # GPT-2, Llama and convolutions
    python -m benchmarks.studies.sets --kinds experts --seeds 0 --steps 20
    python -m benchmarks.studies.sets --sets polar_express "polar_express in fp16" --json FILE

What counts is the loss in nats on windows of files that are not trained on. Each model is trained with the same batches
and the same learning rate by every set, in fp32, with a linear schedule down to a tenth. Trainings that are in the JSON
already are not repeated.

"in fp16" behind a set's name is the form of devices, without one: `DeviceIteration` with products that add up in fp32
and round once, as Triton's do, of momentum in bf16. Without these words it is a CPU's, in bf16 between products.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.studies.byte_models import KINDS, build, trained
from benchmarks.studies.device_forms import PRODUCTS
from benchmarks.studies.trainings import Trainings

import muonmesh as mm
from muonmesh.numerics.newton_schulz import Orthogonalizer

IN_FP16 = " in fp16"
LR, BATCH, HELD_OUT, WIDTH, LAYERS = 3e-3, 4, 32, 384, 2


class AsOnDevice(Orthogonalizer):
    """The form of devices on the CPU."""

    on_device, products = True, PRODUCTS


@contextmanager
def as_on_device() -> Iterator[None]:
    """Let optimizers that plan in this block compute as on devices, in fp16."""
    resolve = Orthogonalizer.of

    def of(*shape: int, device: torch.device, **options: Any) -> AsOnDevice:
        resolved = replace(resolve(*shape, device=torch.device("cuda"), **options), device=device)
        assert resolved.dtype == torch.float16, "devices compute in another dtype now"
        return AsOnDevice(**{field.name: getattr(resolved, field.name) for field in fields(resolved) if field.init})

    with mock.patch.object(Orthogonalizer, "of", of):
        yield


def train(kind: str, coefficients: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: the final loss on what is held out."""
    form = as_on_device() if coefficients.endswith(IN_FP16) else nullcontext()
    with form:
        return _train(kind, coefficients.removesuffix(IN_FP16), seed, steps)


def _train(kind: str, coefficients: str, seed: int, steps: int) -> dict[str, Any]:
    model = build(kind, width=WIDTH, layers=LAYERS, seed=seed)
    optimizer = mm.from_model(model, lr=LR, ns_coefficients=coefficients, kernels="torch", process_group="local")
    return trained(model, optimizer, seed=seed, steps=steps, lr=LR, batch=BATCH, held_out=HELD_OUT)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["gpt2", "llama", "convolutions"])
    parser.add_argument("--sets", nargs="+", default=["polar_express", "deflated"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", type=Path, help="keep each training in this file, and go on with what it has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    same = {"steps": options.steps, "lr": LR, "batch": BATCH, "width": WIDTH, "layers": LAYERS}
    trainings = Trainings(options.json, same)
    print("| model | set | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " | mean |")
    print("|---" * (len(options.seeds) + 3) + "|")
    for kind in options.kinds:
        losses_by_set: dict[str, list[float]] = {name: [] for name in options.sets}
        for seed in options.seeds:
            for name in options.sets:
                key = {"kind": kind, "coefficients": name, "seed": seed}
                run = trainings.get(lambda: train(**key, steps=options.steps), **key)  # noqa: B023 - called at once
                losses_by_set[name].append(run["validation"])
        for name, losses in losses_by_set.items():
            cells = " | ".join(f"{value:.4f}" for value in losses)
            print(f"| {kind} | {name} | {cells} | {statistics.mean(losses):.4f} |", flush=True)


if __name__ == "__main__":
    main()
