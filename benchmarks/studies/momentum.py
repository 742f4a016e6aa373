"""Record the momentum of models that learn the standard library byte by byte, for iterations.py and criteria.py.

    python -m benchmarks.studies.momentum --out momentum.safetensors       # four kinds of models, steps 4, 16 and 48
    python -m benchmarks.studies.momentum --out FILE --kinds gpt2 --width 768 --blocks 0 1 --at 21 159

What is written are the directions that Muon orthogonalizes, fp32, fused parameters cut into their matrices, of the last
block or of those asked for, under names such as gpt2.48.transformer.h.1.attn.c_attn.weight.0. Needs transformers and
safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.studies.byte_models import KINDS, build, loss, text, windows
from safetensors.torch import save_file
from tests.support.reference import split
from torch import Tensor, nn

import muonmesh as mm

MOMENTUM, BATCH, SHOWN = 0.95, 4, 2


def directions(model: nn.Module, optimizer: mm.Muon, block: str) -> dict[str, Tensor]:
    """Nesterov's directions of the matrices of a block, before a step; of a stack of experts the first two."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen = {}
    for group in optimizer.param_groups:
        specs = group.get("matrices") or [None] * len(group["params"])
        for parameter, spec in zip(group["params"], specs, strict=True):
            if group["algorithm"] == "muon" and f".{block}." in names[parameter]:
                assert parameter.grad is not None
                momentum = optimizer.state[parameter]["momentum_buffer"]
                direction = momentum.lerp(parameter.grad, 1 - MOMENTUM).lerp(parameter.grad, 1 - MOMENTUM)
                matrices = split(direction, spec or ("stack" if parameter.ndim == 3 else "whole"))
                experts = len(parameter) if len(matrices) % len(parameter) == 0 else 0
                shown = matrices[: SHOWN * len(matrices) // experts] if experts else matrices
                chosen |= {f"{names[parameter]}.{n}": matrix.contiguous() for n, matrix in enumerate(shown)}
    return chosen


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", nargs="+", help="numbers from 0 on (default: the last)")
    parser.add_argument("--at", type=int, nargs="+", default=[4, 16, 48], help="steps, from 2 on")
    options = parser.parse_args()
    data, tensors = text(), dict[str, Tensor]()
    for kind in options.kinds:
        model = build(kind, width=options.width, layers=options.layers)
        optimizer = mm.from_model(model, lr=3e-3, momentum=MOMENTUM, process_group="local")
        for step in range(1, max(options.at) + 1):
            value = loss(model, windows(data, BATCH))
            optimizer.zero_grad()
            value.backward()
            if step in options.at:
                blocks = options.blocks or [str(options.layers - 1)]
                of_blocks = {name: x for block in blocks for name, x in directions(model, optimizer, block).items()}
                tensors |= {f"{kind}.{step}.{name}": direction for name, direction in of_blocks.items()}
                print(f"{kind}, step {step}: loss {value.item():.2f}, {len(of_blocks)} matrices", flush=True)
            optimizer.step()
    save_file(tensors, options.out)


if __name__ == "__main__":
    main()
