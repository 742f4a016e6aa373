"""Iterations against each other: how near each comes to the polar factor in bf16, and how long it takes.

    python -m benchmarks.studies.iterations --momentum FILE --json benchmarks/results/iterations_deflated.json
    python -m benchmarks.studies.iterations --only speed --rounds 9

Contenders: sets by name with torch's products, two with compiled ones too where the package has them ("one Gram matrix"
is method="gram"), and "O": the 16 largest singular values brought down to the 16th, the matrix divided by a Schatten
norm, then four quintics. O is only simulated, with its norm known from the fp64 singular values; "deflated" is what has
become of it.

Errors are relative, in the Frobenius norm, to U Vᵀ of the singular value decomposition in fp64, so they hold what the
polynomials leave and what rounding adds. Times are processor times of one thread in rounds that take turns; what is
reported are ratios to Polar Express with torch's products.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Coefficients, coefficient_schedule
from muonmesh.numerics.kernels import check_kernels, threads
from muonmesh.numerics.newton_schulz import orthogonalize

# For singular values from 5e-3 on, each nearest to 1 on at least the upper 95 % of what is left, at x / 1.01.
O_QUINTICS = (
    (6.685520323471969, -17.81127044544858, 12.619541719282964),
    (4.016121217840283, -3.8610879612024416, 0.98719189189406),
    (3.5464231663231236, -3.213492859949354, 0.8060008256449542),
    (2.204423775764702, -1.5544103387175046, 0.39157908730073404),
)
DEFLATED, FLOOR = 16, 1 / 32
SHAPES = ((768, 3072), (768, 2304), (768, 768), (1024, 1024), (1024, 4096), (384, 768))
SPECTRA = ("Gaussian", "two decades", "four decades", "rank m/4", "peaked 1e2", "peaked 1e3", "columns 1e2")


def spectrum(name: str, rows: int, cols: int) -> Tensor:
    """A bf16 matrix with random singular vectors and singular values of a kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    if name == "columns 1e2":
        x[:, : max(1, cols // 15)] *= 100
    elif name != "Gaussian":
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        along = torch.linspace(0, 1, rows, dtype=torch.float64)
        noise = 1 + torch.rand(rows, dtype=torch.float64, generator=generator)
        s = {
            "two decades": 10 ** (-2 * along),
            "four decades": 10 ** (-4 * along),
            "rank m/4": torch.where(along < 0.25, noise, 0.0),
            "peaked 1e2": torch.where(along == 0, 1.0, 1e-2 * noise),
            "peaked 1e3": torch.where(along == 0, 1.0, 1e-3 * noise),
        }[name]
        x = (u * s) @ vh
    return x.bfloat16()


def inputs(momentum: Path | None, shapes: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Named wide matrices."""
    for shape in shapes:
        rows, cols = map(int, shape.split("x"))
        for name in SPECTRA:
            yield f"{name} {rows}×{cols}", spectrum(name, rows, cols)
    if momentum is not None:
        from safetensors.torch import load_file

        for name, x in load_file(momentum).items():
            yield name, (x if x.shape[0] <= x.shape[1] else x.mT).bfloat16().contiguous()


def deflate(x: Tensor) -> Tensor:
    """Bring the largest singular values down to the 16th, or to 1/32 of the largest, found by one power iteration."""
    wide = x.float()
    probe = torch.randn(x.shape[1], DEFLATED, generator=torch.Generator().manual_seed(7))
    basis, _ = torch.linalg.qr(wide @ (wide.mT @ (wide @ probe)))
    small = basis.mT @ wide
    values, vectors = torch.linalg.eigh(small @ small.mT)
    s = values.clamp_min(1e-30).sqrt()
    keep = (1 - torch.maximum(s[0], s[-1] * FLOOR) / s).clamp_min(0)
    return torch.addmm(wide, (basis @ vectors) * keep, vectors.mT @ small, alpha=-1).bfloat16()


def o(x: Tensor, *, deflated: bool) -> Tensor:
    """Four quintics of X divided by ‖(X Xᵀ)²‖^¼ in place of the Frobenius norm."""
    x = deflate(x) if deflated else x
    s = torch.linalg.svdvals(x.double())
    wider = float(s.norm() / (s**8).sum() ** 0.125)
    first = tuple(value * wider ** (2 * k + 1) for k, value in enumerate(O_QUINTICS[0]))
    return usual(x, coefficients=[first, *O_QUINTICS[1:]])


usual = functools.partial(orthogonalize, kernels="torch")
CONTENDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "simple": functools.partial(usual, coefficients="simple"),
    "polar_express": usual,
    "polar_express, standard": functools.partial(usual, method="standard"),
    "deflated": functools.partial(usual, coefficients="deflated"),
    "O": lambda x: o(x, deflated=True),
    "O without deflation": lambda x: o(x, deflated=False),
}
TIMED = ["simple", "polar_express", "polar_express, standard", "deflated"]
try:
    check_kernels("compiled", device=torch.device("cpu"), dtype=torch.bfloat16)
    compiled = functools.partial(orthogonalize, kernels="compiled")
    CONTENDERS["polar_express, compiled"] = compiled
    CONTENDERS["deflated, compiled"] = functools.partial(compiled, coefficients="deflated")
    CONTENDERS["deflated, one Gram matrix"] = functools.partial(compiled, coefficients="deflated", method="gram")
    TIMED += ["polar_express, compiled", "deflated, compiled"]
except ValueError as error:
    print(error)


def accuracy(momentum: Path | None, shapes: list[str]) -> list[dict[str, Any]]:
    """Error to the polar factor, error to the set's own function, and the largest singular value."""
    table = []
    print("\nerror to U Vᵀ / largest singular value, bf16\n\n| input | " + " | ".join(CONTENDERS) + " |")
    print("|---" * (len(CONTENDERS) + 1) + "|")
    for name, x in inputs(momentum, shapes):
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        row: dict[str, Any] = {"input": name, "shape": list(x.shape)}
        for contender, run in CONTENDERS.items():
            result = run(x).double()
            row[contender] = {
                "polar": float((result - u @ vh).norm() / (u @ vh).norm()),
                "largest": float(torch.linalg.matrix_norm(result, 2)),
            }
        function_of_x = (u * polynomials_of(s / s.norm(), "polar_express")) @ vh
        row["polar_express"]["own"] = float((usual(x).double() - function_of_x).norm() / function_of_x.norm())
        table.append(row)
        cells = (f"{row[contender]['polar']:.3f} / {row[contender]['largest']:.2f}" for contender in CONTENDERS)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return table


def polynomials_of(s: Tensor, coefficients: Coefficients) -> Tensor:
    """What a set of polynomials makes of singular values, without rounding."""
    for polynomial in coefficient_schedule(coefficients):
        s = sum((c * s ** (2 * k + 1) for k, c in enumerate(polynomial)), torch.zeros_like(s))
    return s


def speed(rounds: int) -> list[dict[str, Any]]:
    """Time of Polar Express with torch's products over that of each, one thread."""
    table = []
    print("\ntime of polar_express over that of each, processor time of one thread\n\n| matrix | " + " | ".join(TIMED))
    print("|---" * (len(TIMED) + 1) + "|")
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in TIMED}
        for number in range(rounds + 1):
            for name in TIMED:
                start = time.process_time()
                CONTENDERS[name](x)
                if number:  # the first allocates
                    times[name].append(time.process_time() - start)
        of_one = times["polar_express"]
        ratios = {name: statistics.median(a / b for a, b in zip(of_one, times[name], strict=True)) for name in TIMED}
        table.append({"shape": [rows, cols], "ms": 1e3 * statistics.median(of_one), "ratios": ratios})
        print(f"| {rows}×{cols} | " + " | ".join(f"{ratios[name]:.2f}" for name in TIMED) + " |", flush=True)
    return table


def kept_memory() -> list[dict[str, Any]]:
    """MiB that a thread keeps to work on one matrix after the other of a shape, beside the matrix and its result."""
    table = []
    for rows, cols in SHAPES:
        row: dict[str, Any] = {"shape": [rows, cols]}
        for name in TIMED:
            threads._thread_local.__dict__.pop("scratch", None)
            CONTENDERS[name](torch.randn(rows, cols))
            row[name] = sum(views[None].nbytes for views in threads._thread_local.scratch.values()) / 2**20
        table.append(row)
        print(f"{rows}×{cols}, MiB kept: " + ", ".join(f"{name} {row[name]:.1f}" for name in TIMED), flush=True)
    return table


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("accuracy", "speed", "memory"))
    parser.add_argument("--momentum", type=Path, help="what momentum.py has written")
    parser.add_argument("--shapes", nargs="+", default=["768x768", "768x3072"], help="of the matrices of known spectra")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    figures: dict[str, Any] = {
        "command": "python -m benchmarks.studies.iterations --momentum FILE --json FILE",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, bf16 instructions: {'yes' if bf16 else 'no'}",
    }
    if options.only in (None, "memory"):
        figures["memory"] = kept_memory()
    if options.only in (None, "accuracy"):
        figures["accuracy"] = accuracy(options.momentum, options.shapes)
    if options.only in (None, "speed"):
        figures["speed"] = speed(options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
