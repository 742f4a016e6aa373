"""Whether what devices compute may be their default: Polar Express in fp16 against bf16, and `deflated` against it.

    python -m benchmarks.studies.device_forms --part ranks
    python -m benchmarks.studies.device_forms --part plateaus
    python -m benchmarks.studies.device_forms --part stress
    python -m benchmarks.studies.device_forms --part momentum --momentum FILE       # of momentum.py
    python -m benchmarks.studies.device_forms --part magnitudes
    python -m benchmarks.studies.device_forms --part PART --forms fp16 deflated --all-shapes --json FILE
    python -m benchmarks.studies.device_forms --part "large momentum" --forms fp16 deflated --json FILE

The last two wrote benchmarks/results/device_deflation.json; its parts "large momentum" and "large" are matrices of
4,096 rows (`large_matrices`), which take minutes each.

Figures of all parts go into one JSON file (--json); matrices that it has are not computed again. No device is needed:
`DeviceIteration` runs with products that add up in fp32 and round once, as Triton's do. "bf16" is what devices did
before, Polar Express of 2 + 1 + 2 steps by torch's products; "fp16" is Polar Express of 3 + 2 steps, and "deflated"
what numerics/device_deflation.py says. Bounds, beside the first of --forms: on momentum no further from the polar
factor, and no singular value above 1.15; elsewhere an error of at most 1.1 times as much, or .1, and no singular value
above 1.3. Errors are those of criteria.py, to the polar factor of the bf16 matrix in fp64. The command fails where a
bound is broken.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies import criteria, large_matrices
from benchmarks.studies.stress import with_values
from torch import Tensor

from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.newton_schulz import Orthogonalizer, orthogonalize

OUT = Path(__file__).parents[1] / "results" / "device_forms.json"
CHECKED_ROWS = 384
"""Of so many rows a matrix is computed in a batch too."""
PARTS = ("ranks", "plateaus", "stress", "momentum", "magnitudes", "large momentum", "large")


def multiply(
    a: Tensor,
    b: Tensor | None,
    terms: Any,
    out: Tensor,
    alpha: float = 1.0,
    scale: float | Tensor = 1.0,
    symmetric: bool = True,
    identity: float = 0.0,
) -> Tensor:
    """Do `Matmuls.multiply` as Triton's kernel: all in fp32, rounded once, one triangle mirrored."""
    result = alpha * (a.float() @ (a.mT if b is None else b).float())
    for c, factor in terms:
        result += factor * c.float()
    if identity:
        result.diagonal(dim1=-2, dim2=-1).add_(identity)
    result = scale * result
    return out.copy_(result.triu() + result.triu(1).mT if symmetric else result)


PRODUCTS = Matmuls(multiply=multiply, batch_limit=1)


def on_device(x: Tensor, coefficients: str) -> Tensor:
    """Orthogonalize a bf16 matrix as a device does."""
    form = Orthogonalizer.of(
        *x.shape,
        coefficients=coefficients,
        steps=None,
        method="auto",
        dtype=torch.bfloat16,
        kernels="torch",
        device=torch.device("cuda"),
    )
    out = torch.empty_like(x)[None]
    form.iteration(PRODUCTS).run([x[None]], [out], overwrite=False)
    if len(x) == CHECKED_ROWS:
        assert torch.equal(out[0], _in_a_batch(form, x)), "the bits of a matrix depend on its batch"
    return out[0]


def _in_a_batch(form: Orthogonalizer, x: Tensor) -> Tensor:
    pair = torch.stack([x.flip(0) * 3, x])
    out = torch.empty_like(pair)
    form.iteration(PRODUCTS).run([pair], [out], overwrite=True)
    return out[1]


CONTENDERS = {
    "bf16": functools.partial(orthogonalize, coefficients="polar_express", kernels="torch"),
    "fp16": functools.partial(on_device, coefficients="polar_express"),
    "deflated": functools.partial(on_device, coefficients="deflated"),
}


def inputs(part: str, momentum: Path | None, *, all_shapes: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The named matrices of a part, wide."""
    if not all_shapes:
        criteria.PLATEAU_SHAPES, criteria.STRESS_SHAPES = ((384, 800), (512, 600)), ((384, 400), (384, 800))
    if part == "ranks":
        for rows, cols in ((384, 800), (512, 512)):
            for rank in (1, 2, 4, 8, 16, 32):
                values = torch.where(torch.arange(rows) < rank, 1.0, 0.0).double()
                yield f"rank {rank}, {rows}×{cols}", with_values(values, rows, cols)
                yield f"rank {rank} and 1e-4, {rows}×{cols}", with_values(values.clamp_min(1e-4), rows, cols)
    elif part == "magnitudes":
        for name, x in (("four decades", with_values(torch.logspace(0, -4, 384, dtype=torch.float64), 384, 800)),):
            for exponent in (-30, -10, 0, 10, 30):
                yield f"{name} · 1e{exponent}", x * 10.0**exponent
    else:
        yield from criteria.inputs(part, momentum)


Judge = Callable[[Mapping[str, Callable[[Tensor], Tensor]]], dict[str, dict[str, float]]]
"""Returns the figures of contenders, by name, for one matrix."""


def cases(part: str, momentum: Path | None, *, all_shapes: bool) -> Iterator[tuple[str, list[int], Judge]]:
    """The matrices of a part: name, shape, and what finds the figures of contenders."""
    if part.startswith("large"):
        for name, known in large_matrices.inputs(part):
            yield name, list(known.x.shape), functools.partial(large_matrices.judged, known)
        return
    directions = 1 / 2000 if part in ("stress", "ranks") else 0
    for name, x in inputs(part, momentum, all_shapes=all_shapes):
        narrow = x.bfloat16().contiguous()
        if narrow.any() and math.isfinite(float(narrow.abs().max())):
            yield name, list(x.shape), functools.partial(criteria.judged, narrow, directions=directions)


def broken(row: dict[str, Any], part: str, name: str, before: str) -> list[str]:
    """Say which bounds a matrix breaks, beside what was the default before."""
    usual, judged_row, label = row[before], row[name], f"{row['input']}, {name}"
    momentum = part.endswith("momentum")
    bound = usual["polar"] * 1.0005 if momentum else max(1.1 * usual["polar"], 0.1)
    wrong = []
    if not judged_row["polar"] <= bound:
        wrong.append(f"{label}: error {judged_row['polar']:.4f}, {before}'s {usual['polar']:.4f}")
    if not judged_row["largest"] <= (1.15 if momentum else 1.3):
        wrong.append(f"{label}: largest singular value {judged_row['largest']:.3f}")
    return wrong


def main() -> None:
    """Print what was found, and end with 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--momentum", type=Path, help="what momentum.py has written")
    parser.add_argument("--forms", nargs="+", choices=CONTENDERS, default=["bf16", "fp16"], help="what is compared")
    parser.add_argument("--all-shapes", action="store_true", help="the four shapes of criteria.py instead of two")
    parser.add_argument("--json", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.json.read_text()) if options.json.exists() else {}
    table: list[dict[str, Any]] = record.get(options.part, {}).get("table", [])
    known = {row["input"] for row in table}
    contenders = {name: CONTENDERS[name] for name in options.forms}
    first, *judged = options.forms
    for name, shape, judge in cases(options.part, options.momentum, all_shapes=options.all_shapes):
        if name in known:
            continue
        row = {"input": name, "shape": shape, **judge(contenders)}
        table.append(row)
        lines = (line for contender in judged for line in broken(row, options.part, contender, first))
        print(*lines, sep="\n", end="", flush=True)
        record |= {"torch": torch.__version__, options.part: {"table": table}}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    summary: dict[str, Any] = {"matrices": len(table)}
    for name in options.forms:
        summary[name] = {
            "middle error": statistics.median(row[name]["polar"] for row in table),
            f"middle over {first}": statistics.median(row[name]["polar"] / row[first]["polar"] for row in table),
            f"most over {first}": max(row[name]["polar"] / row[first]["polar"] for row in table),
            "largest": max(row[name]["largest"] for row in table),
            "broken": [line for row in table if name != first for line in broken(row, options.part, name, first)],
        }
        numbers = {key: round(value, 4) for key, value in summary[name].items() if key != "broken"}
        print(
            f"\n{options.part}, {len(table)} matrices, {name}: {numbers}, {len(summary[name]['broken'])} bounds broken"
        )
    record |= {"torch": torch.__version__, options.part: summary | {"table": table}}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(any(summary[name]["broken"] for name in options.forms))


if __name__ == "__main__":
    main()
