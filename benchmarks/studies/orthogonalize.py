"""orthogonalize: how exact, at which magnitudes, how fast against torch.optim.Muon's iteration.

    python -m benchmarks.studies.orthogonalize                                    # the three tables
    python -m benchmarks.studies.orthogonalize --only accuracy --momentum CHECKPOINT
    python -m benchmarks.studies.orthogonalize --only speed --threads 1 --rounds 15 --json speed.json

`CHECKPOINT` is a folder of `muonmesh train`, such as runs/NAME/checkpoints/muon/step-00000600. Errors are relative, in
the Frobenius norm, to the polynomials applied to fp64 singular values. Speeds are ratios of rounds that take turns,
A B A B; with one thread they are of processor time, so that other work on the machine disturbs them least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim._muon import _zeropower_via_newtonschulz

from muonmesh.numerics.coefficients import CoefficientName, coefficient_schedule
from muonmesh.numerics.newton_schulz import Method, orthogonalize, resolve_method

JORDAN = (3.4445, -4.7750, 2.0315)
NORMS = (1e7, 1e-4, 1e-6, 1e-8, 1e-10, 1e-14, 1e-18, 1e-30, 0.0)
# (matrices, rows, cols): the three GPT-2-small layers by shape, larger squares, heads, experts.
SHAPES = (
    (3, 768, 2304),
    (3, 768, 768),
    (6, 768, 3072),
    (3, 1024, 1024),
    (1, 2048, 2048),
    (8, 512, 1024),
    (24, 256, 1024),
    (300, 128, 128),
)
Row = dict[str, Any]


def torch_muon(x: Tensor) -> Tensor:
    """The iteration of torch.optim.Muon: Jordan's coefficients, 5 steps, bf16, one matrix."""
    return _zeropower_via_newtonschulz(x, JORDAN, 5, 1e-7)


def decaying(rows: int, cols: int, decades: float) -> Tensor:
    """fp64, random singular vectors, singular values falling evenly over so many decades."""
    generator = torch.Generator().manual_seed(0)
    u, s, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64, generator=generator), full_matrices=False)
    s = 10 ** (-decades * torch.linspace(0, 1, len(s), dtype=torch.float64))
    return (u * s) @ vh


def exact(x: Tensor, schedule: tuple[tuple[float, ...], ...]) -> Tensor:
    """The polynomials on the singular values of x / ‖x‖ in fp64."""
    u, s, vh = torch.linalg.svd(x.double() / x.double().norm(), full_matrices=False)
    for polynomial in schedule:
        s = sum((c * s ** (2 * k + 1) for k, c in enumerate(polynomial)), torch.zeros_like(s))
    return (u * s) @ vh


def momenta(checkpoint: Path) -> dict[str, Tensor]:
    """The momenta in a checkpoint of `muonmesh train` by parameter, whole, whatever ranks wrote it."""
    reader, begin, end = FileSystemReader(checkpoint), "optimizer.state.", ".momentum_buffer"
    entries: Any = reader.read_metadata().state_dict_metadata
    names = [name for name in entries if name.startswith(begin) and name.endswith(end)]
    tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
    load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(begin).removesuffix(end): tensor for name, tensor in tensors.items()}


def inputs(momentum: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Named matrices for the accuracy table."""
    yield "Gaussian 768×3072", torch.randn(768, 3072, generator=torch.Generator().manual_seed(0))
    yield "two decades 768×3072", decaying(768, 3072, 2)
    yield "four decades 768×3072", decaying(768, 3072, 4)
    yield "four decades 768×768", decaying(768, 768, 4)
    if momentum is not None:
        for name, matrix in momenta(momentum).items():
            if matrix.ndim == 2:
                yield f"{name} {matrix.shape[0]}×{matrix.shape[1]}", matrix


def accuracy(momentum: Path | None, coefficients: CoefficientName, steps: int) -> list[Row]:
    """Relative error and largest singular value, by method, for bf16 matrices as an optimizer sends them."""
    rows = []
    for name, matrix in inputs(momentum):
        x = matrix.bfloat16()
        contenders: dict[str, tuple[Tensor, Tensor]] = {}
        expected = exact(x, coefficient_schedule(coefficients, steps))
        for method in ("standard", "gram"):
            result = orthogonalize(x.float(), coefficients=coefficients, steps=steps, method=method)
            contenders[method] = (result, expected)
        contenders["torch.optim.Muon"] = (torch_muon(x), exact(x, (JORDAN,) * 5))
        row: Row = {"input": name, "auto": resolve_method(*x.shape, coefficients=coefficients, steps=steps)}
        for contender, (result, reference) in contenders.items():
            row[contender] = float((result.double() - reference).norm() / reference.norm())
            row[f"{contender} largest"] = float(torch.linalg.matrix_norm(result.double(), 2))
        rows.append(row)
    print("\nrelative error / largest singular value, bf16\n")
    columns = ("standard", "gram", "torch.optim.Muon")
    print(f"| input | {' | '.join(columns)} | auto |\n|---|---|---|---|---|")
    for row in rows:
        cells = (f"{row[column]:.4f} / {row[f'{column} largest']:.2f}" for column in columns)
        print(f"| {row['input']} | {' | '.join(cells)} | {row['auto']} |")
    return rows


def magnitudes() -> list[Row]:
    """Mean singular value of the result for a 64×256 Gaussian of each Frobenius norm."""
    x = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "torch.optim.Muon": torch_muon,
        "muonmesh, bf16": orthogonalize,
        "muonmesh, fp32": lambda y: orthogonalize(y, dtype=torch.float32),
        "muonmesh, gram": lambda y: orthogonalize(y, method="gram"),
    }
    rows: list[Row] = []
    for name, run in contenders.items():
        row: Row = {"": name}
        for norm in NORMS:
            result = run((x / x.norm() * norm).float())
            row[f"{norm:g}"] = float(torch.linalg.svdvals(result.double()).mean())
        rows.append(row)
    print("\nmean singular value of the result by ‖G‖\n")
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row.values()) + " |")
    return rows


def speed(rounds: int) -> list[Row]:
    """Time of torch.optim.Muon's iteration over that of ours; medians of rounds that take turns."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    methods: tuple[Method, ...] = ("auto", "standard", "gram")
    table: list[Row] = []
    print(f"\ntime of torch.optim.Muon's iteration over ours, bf16, {torch.get_num_threads()} thread(s)\n")
    print("| matrices | torch, ms each | auto | standard | gram | auto is |\n|---|---|---|---|---|---|")
    for count, rows, cols in SHAPES:
        x = torch.randn(count, rows, cols).bfloat16()
        runs: dict[str, Callable[[], object]] = {"torch": lambda x=x: [torch_muon(matrix) for matrix in x]}
        for method in methods:
            runs[method] = lambda x=x, method=method: orthogonalize(x, method=method)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(rounds + 1):
            for name, run in runs.items():
                start = clock()
                run()
                if round_ > 0:  # the first allocates and compiles
                    times[name].append(clock() - start)
        ratio = {
            method: statistics.median(a / b for a, b in zip(times["torch"], times[method], strict=True))
            for method in methods
        }
        row: Row = {"matrices": count, "rows": rows, "cols": cols, "auto is": resolve_method(rows, cols)}
        row |= {"torch ms": statistics.median(times["torch"]) / count * 1e3, "ratios": ratio}
        table.append(row)
        figures = " | ".join(f"{ratio[method]:.2f}" for method in methods)
        print(f"| {count} × {rows}×{cols} | {row['torch ms']:.2f} | {figures} | {row['auto is']} |", flush=True)
    layers = [row for row in table[:3]]
    total = sum(row["torch ms"] * row["matrices"] for row in layers)
    milliseconds = sum(row["torch ms"] * row["matrices"] / row["ratios"]["auto"] for row in layers)
    print(f"\nthree GPT-2-small layers together: {total / milliseconds:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("accuracy", "magnitudes", "speed"), help="one table instead of three")
    parser.add_argument("--momentum", type=Path, help="a checkpoint of `muonmesh train`, for the accuracy table")
    parser.add_argument("--coefficients", default="polar_express", help="set for the accuracy table")
    parser.add_argument("--steps", type=int, default=5, help="steps for the accuracy table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9, help="for the speed table")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    figures: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    figures["threads"] = options.threads
    if options.only in (None, "accuracy"):
        figures["accuracy"] = accuracy(options.momentum, options.coefficients, options.steps)
    if options.only in (None, "magnitudes"):
        figures["magnitudes"] = magnitudes()
    if options.only in (None, "speed"):
        figures["speed"] = speed(options.rounds)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
