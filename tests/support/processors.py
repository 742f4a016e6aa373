"""One of two ranks, on what this processor can do or a part of it: python -m tests.support.processors FILE RANK

Which part, its environment says (`tests.support.pretended`). It prints what was warned of, which products "auto" takes,
whether torch multiplies bf16 as such, and which weights differ after three steps: from rank 0's, and from those by
torch's products.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm
from muonmesh.numerics import kernels

SHAPES = {"small": (20, 30), "middle": (128, 130), "deflated": (400, 900), "bias": (70,)}


def step(kernels_asked: str) -> dict[str, nn.Parameter]:
    """Three steps from the same weights with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    matrices = [item for item in weights.items() if item[1].ndim == 2]
    rest = {"params": [("bias", weights["bias"])], "algorithm": "adamw"}
    groups = [{"params": matrices, "algorithm": "muon"}, rest]
    optimizer = mm.Muon(groups, lr=0.1, process_group="world", kernels=kernels_asked)
    for number in range(3):
        for n, weight in enumerate(weights.values()):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * number + n))
        optimizer.step()
    return weights


def main() -> None:
    """Step as one of two ranks that hold the same weights."""
    file, rank = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_weights, by_torch = step("auto"), step("torch")
    differing = []
    for name, weight in step_weights.items():
        of_first = weight.detach().clone()
        dist.broadcast(of_first, 0)
        differing += [] if torch.equal(weight, of_first) else [name]
    report = {
        "told": [str(warning.message) for warning in caught if "kernels" in str(warning.message)],
        "takes": str(kernels.auto_takes()),
        "bf16": kernels.multiplies_bf16(),
        "differing": differing,
        "not torch's": [name for name, weight in step_weights.items() if not torch.equal(weight, by_torch[name])],
    }
    print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
