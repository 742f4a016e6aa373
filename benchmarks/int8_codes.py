"""Which int8 format momentum is kept in: error of the momentum and of the direction after steps, by codes and rounding.

    python -m benchmarks.int8_codes

Gradients are made as training makes them: a slowly turning part of low rank under noise five times as large, with rows
and columns whose sizes spread over a decade. "linear" codes are k/127 of the largest number of a block of 256,
"dynamic" codes those of 8-bit optimizers (Dettmers et al., arXiv 2110.02861): a sign, a decade and a fraction.
"stochastic" rounds up as often as the number is nearer to the upper code. The error of a direction is that of the
orthogonalized matrix, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import muonmesh as mm

BLOCK = 256


def linear_codes() -> Tensor:
    """Return the 255 values k/127, sorted."""
    return torch.arange(-127, 128) / 127


def dynamic_codes() -> Tensor:
    """Return the 255 values of the dynamic tree: seven decades, with one bit less of fraction for each decade down."""
    values = [0.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2**decade + 1)
        values += (10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2).tolist()
    positive = torch.tensor(sorted([*values[1:], 1.0]))
    return torch.cat([-positive.flip(0), torch.zeros(1), positive])


def rounded(values: Tensor, codes: Tensor, *, stochastic: bool, generator: torch.Generator) -> Tensor:
    """Return what values (rows, cols) become in blocks of `BLOCK` along rows."""
    blocks = values.unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    x = (blocks / torch.where(scale == 0, 1.0, scale)).contiguous()
    upper = torch.searchsorted(codes, x).clamp_(1, len(codes) - 1)
    low, high = codes[upper - 1], codes[upper]
    part = (x - low) / (high - low)
    limit = torch.rand(x.shape, generator=generator) if stochastic else torch.full(x.shape, 0.5)
    return (torch.where(part > limit, high, low) * scale).flatten(1)


def study(rows: int, cols: int, steps: int, momentum: float, seed: int) -> dict[str, dict[str, float]]:
    """Return for each format the mean errors of momentum and direction over the last hundred steps, each tenth."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    left, right = random(rows, 8), random(8, cols)
    sizes = 10 ** (random(rows, 1) / 2) * 10 ** (random(1, cols) / 2)
    exact = torch.zeros(rows, cols)
    formats = {
        f"{name}, {'stochastic' if stochastic else 'nearest'}": (codes, stochastic, torch.zeros(rows, cols))
        for name, codes in (("linear", linear_codes()), ("dynamic", dynamic_codes()))
        for stochastic in (False, True)
    }
    brain = torch.zeros(rows, cols, dtype=torch.bfloat16)
    found: dict[str, list[tuple[float, float]]] = {}
    for step in range(steps):
        left = 0.99 * left + 0.14 * random(rows, 8)
        gradient = (left @ right / 8**0.5 + 5 * random(rows, cols)) * sizes
        exact.lerp_(gradient, 1 - momentum)
        brain.lerp_(gradient.bfloat16(), 1 - momentum)
        for codes, stochastic, kept in formats.values():
            kept.lerp_(gradient, 1 - momentum)
            kept.copy_(rounded(kept, codes, stochastic=stochastic, generator=generator))
        if step >= steps - 100 and step % 10 == 0:
            wanted = mm.orthogonalize(exact, dtype=torch.float32)
            for name, kept in (("bf16", brain.float()), *((name, held) for name, (*_, held) in formats.items())):
                direction = mm.orthogonalize(kept, dtype=torch.float32)
                errors = [float((a - b).norm() / b.norm()) for a, b in ((kept, exact), (direction, wanted))]
                found.setdefault(name, []).append((errors[0], errors[1]))
    means = {name: torch.tensor(some).mean(0).tolist() for name, some in found.items()}
    return {name: {"momentum": both[0], "direction": both[1]} for name, both in means.items()}


def main() -> None:
    """Print a table and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = study(given.rows, given.cols, given.steps, 0.95, given.seed)
    print(f"{'format':20s} {'momentum':>9s} {'direction':>9s}")
    for name, errors in found.items():
        print(f"{name:20s} {errors['momentum']:9.4f} {errors['direction']:9.4f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"steps": given.steps, "rows": given.rows, "cols": given.cols, **found}))


if __name__ == "__main__":
    main()
