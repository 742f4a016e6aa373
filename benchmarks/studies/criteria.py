"""Whether `deflated` may be the default on CPUs: its errors against those of Polar Express, bf16, with every product.

    python -m benchmarks.studies.criteria --part plateaus --json benchmarks/results/criteria_plateaus.json
    python -m benchmarks.studies.criteria --part stress --json benchmarks/results/criteria_stress.json
    python -m benchmarks.studies.criteria --part momentum --momentum FILE --json FILE

On momentum (of momentum.py) it has to be nearer to the polar factor on every matrix, with singular values up to 1.15.
On spectra of plateaus and on the matrices of stress.py its error may be 1.1 times that of Polar Express, or .1, and the
largest singular value 1.3. Both are orthogonalized as a step does it: with the products that "auto" takes, and with
torch's, and compared with Polar Express by the same products. Errors are relative in the Frobenius norm, to U Vᵀ in
fp64, with U from the eigenvectors of X Xᵀ, which is as good as a singular value decomposition to some 10⁻⁹; on the
matrices of stress.py as it says. The command fails where a bound is broken.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies.stress import stress, with_values
from torch import Tensor

from muonmesh.numerics.kernels import told_products
from muonmesh.numerics.newton_schulz import orthogonalize

PLATEAU_SHAPES = ((384, 800), (512, 1024), (768, 768), (1024, 1024))
STRESS_SHAPES = ((384, 400), (384, 800), (768, 768), (512, 2048))
PRODUCTS = ("auto", "torch")
# How many singular values are at which height, and the height of the rest.
PLATEAUS = (
    (((64, 1.0),), 0.1),
    (((64, 1.0),), 0.05),
    (((64, 1.0),), 0.03),
    (((64, 1.0),), 0.01),
    (((60, 1.0),), 0.1),
    (((32, 1.0),), 0.3),
    (((72, 1.0),), 0.1),
    (((100, 1.0),), 0.01),
    (((100, 1.0),), 0.003),
    (((256, 1.0),), 0.01),
    (((256, 1.0),), 0.3),
    (((1, 1.0),), 0.003),
    (((64, 1.0), (64, 0.1)), 0.01),
    (((64, 1.0), (100, 0.3)), 0.1),
    (((30, 1.0), (34, 0.3)), 0.05),
    (((16, 1.0), (48, 0.1)), 0.03),
    (((8, 1.0), (192, 0.03)), 0.003),
)

CONTENDERS = {
    f"{name}, {products}": functools.partial(orthogonalize, coefficients=name, kernels=products)
    for name in ("polar_express", "deflated")
    for products in PRODUCTS
}


def plateaus() -> Iterator[tuple[str, Tensor]]:
    """Named matrices of two and three plateaus, fp64."""
    for rows, cols in PLATEAU_SHAPES:
        for steps, rest in PLATEAUS:
            values = torch.cat([torch.full((count,), height) for count, height in steps]).double()
            values = torch.cat([values, torch.full((rows - len(values),), rest, dtype=torch.float64)])
            label = ", ".join(f"{count} at {height}" for count, height in steps)
            yield f"{label}, rest {rest}, {rows}×{cols}", with_values(values, rows, cols)


def inputs(part: str, momentum: Path | None) -> Iterator[tuple[str, Tensor]]:
    """The named matrices of a part, wide."""
    if part == "plateaus":
        yield from plateaus()
    elif part == "stress":
        for rows, cols in STRESS_SHAPES:
            yield from ((f"{name}, {rows}×{cols}", x) for name, x in stress(rows, cols))
    else:
        from safetensors.torch import load_file

        for name, x in load_file(momentum or "").items():
            yield name, x if x.shape[0] <= x.shape[1] else x.mT


def judged(
    x: Tensor, contenders: Mapping[str, Callable[[Tensor], Tensor]], *, directions: float
) -> dict[str, dict[str, float]]:
    """Error to the polar factor and largest singular value of what each contender makes of x, bf16 (rows, cols).

    Args:
        x: rows ≤ cols.
        contenders: Iterations by name.
        directions: Singular values below this times the largest have no part in the error.
    """
    wide = x.double()
    wide = wide / wide.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    squares, u = (errors.flip(-1) for errors in torch.linalg.eigh(wide @ wide.mT))
    s = squares.clamp_min(0).sqrt()
    count = int((s > s[0] * directions).sum())
    u = u[:, :count]
    vh = u.mT @ wide / s[:count, None]
    errors = {}
    for name, run in contenders.items():
        result = run(x).double()
        wrong = u.mT @ result @ vh.mT - torch.eye(count, dtype=torch.float64) if directions else result - u @ vh
        largest = torch.linalg.eigvalsh((result @ result.mT).nan_to_num(math.inf, math.inf))[-1].clamp_min(0).sqrt()
        errors[name] = {"polar": float(wrong.norm()) / max(1, count) ** 0.5, "largest": float(largest)}
    return errors


def broken(row: dict[str, Any], part: str) -> list[str]:
    """Say which bounds a matrix breaks."""
    faults = []
    for products in PRODUCTS:
        usual, judged_row = row[f"polar_express, {products}"], row[f"deflated, {products}"]
        bound = usual["polar"] if part == "momentum" else max(1.1 * usual["polar"], 0.1)
        if not judged_row["polar"] <= bound:
            faults.append(
                f"{row['input']}, {products}: error {judged_row['polar']:.4f}, Polar Express's {usual['polar']:.4f}"
            )
        if not judged_row["largest"] <= (1.15 if part == "momentum" else 1.3):
            faults.append(f"{row['input']}, {products}: largest singular value {judged_row['largest']:.3f}")
    return faults


def main() -> None:
    """Print what was found, and end with 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("momentum", "stress", "plateaus"), required=True)
    parser.add_argument("--momentum", type=Path, help="what momentum.py has written")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    wrong: list[str] = []
    for name, x in inputs(options.part, options.momentum):
        row = {"input": name, "shape": list(x.shape)}
        row |= judged(x.bfloat16().contiguous(), CONTENDERS, directions=1 / 2000 if options.part == "stress" else 0)
        faults = broken(row, options.part)
        print(*faults, sep="\n", end="\n" if faults else "", flush=True)
        table.append(row)
        wrong += faults
    for products in PRODUCTS:
        ratios = [row[f"deflated, {products}"]["polar"] / row[f"polar_express, {products}"]["polar"] for row in table]
        largest = max(row[f"deflated, {products}"]["largest"] for row in table)
        print(
            f"{products}: {len(table)} matrices, error over Polar Express's {min(ratios):.2f} to {max(ratios):.2f}, "
            f"middle {statistics.median(ratios):.2f}; largest singular value {largest:.3f}; {len(wrong)} bounds broken"
        )
    if options.json is not None:
        facts = {
            "command": f"python -m benchmarks.studies.criteria --part {options.part} --json FILE",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "products": told_products("auto", device=torch.device("cpu"), dtype=torch.bfloat16),
        }
        options.json.write_text(json.dumps(facts | {"broken": wrong, "matrices": table}, indent=1) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
