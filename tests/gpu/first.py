"""Figures of a GPU as tables to paste, beside what the model of time takes for granted where it has the figure.

python -m tests.gpu.first [ceilings host products orthogonalizations steps exchange]
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics.kernels.product_table import TORCH_FROM
from muonmesh.numerics.kernels.triton import by_triton, triton_products
from muonmesh.tools.forecasts.device_rates import DeviceRates
from tests.device.dry_run import dry_run
from tests.support.figures import GPT2, bag, optimizer_of

PARTS = ("ceilings", "host", "products", "orthogonalizations", "steps", "exchange")
SIDES = (768, 1024, 2048, 4096, 8192)
MESSAGE = 1 << 24
"""Bytes that a rank sends in the all-to-all whose bandwidth counts."""


class Line(NamedTuple):
    """One figure: what it is, what the model says, what was measured, both in one unit."""

    figure: str
    modelled: str
    measured: str


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, *, times: int = 20) -> tuple[float, float]:
    """Return a call's seconds: of the host until it returns, from an idle device on, and in all, of some in a row."""
    for _ in range(3):
        call()
    hosts = 0.0
    for _ in range(times):  # else a full queue would make the host wait
        wait(device)
        begin = time.perf_counter()
        call()
        hosts += time.perf_counter() - begin
    wait(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return hosts / times, (time.perf_counter() - begin) / times


def host(device: torch.device, times: int = 100) -> Iterator[Line]:
    """The host's time of a small product by Triton, of an operation of torch and of a view."""
    rates, x = DeviceRates(), torch.randn(1, 64, 64, device=device, dtype=torch.bfloat16)
    out, table = torch.empty_like(x), triton_products(batch_limit=1)
    calls = {
        "a product by Triton": (lambda: table.multiply(x, x, [(x, 1.0)], out, alpha=1.0), rates.kernel),
        "an operation of torch": (lambda: torch.add(x, x), rates.operation),
        "a view": (lambda: x[0], rates.view),
    }
    for name, (call, modelled) in calls.items():
        took, _ = seconds(call, device, times=times)
        yield Line(f"host, {name}, µs", f"{modelled * 1e6:.1f}", f"{took * 1e6:.1f}")


def products(device: torch.device, sides: Iterable[int] = SIDES, times: int = 20) -> Iterator[Line]:
    """TFLOP/s of X Xᵀ, whose triangle counts for Triton and all of it for cuBLAS, and of full products Q X."""
    rates, table = DeviceRates(), triton_products(batch_limit=1)
    unit_scale = torch.ones(1, 1, 1, device=device)
    for side in sides:
        x = torch.randn(1, side, side, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        by_library: list[tuple[str, Callable[[], Any], int]] = [
            ("Triton", lambda x=x, out=out: table.multiply(x, None, [], out, scale=unit_scale), side**3),
            ("cuBLAS", lambda x=x, out=out: torch.bmm(x, x.mT, out=out), 2 * side**3),
        ]
        for name, call, flops in by_library:
            _, took = seconds(call, device, times=times)
            least = rates.published / rates.weight_of(side**2, by_triton=name == "Triton")
            modelled = f"{least / 1e12:.0f} to {rates.flops / 1e12:.0f}"
            yield Line(f"X Xᵀ, {side} rows, {name}, TFLOP/s", modelled, f"{flops / took / 1e12:.3g}")
        for dtype in (torch.bfloat16, torch.float16):
            q, y = (torch.randn(1, side, n * side, device=device).to(dtype) for n in (1, 2))
            out = torch.empty_like(y)
            full: dict[str, Callable[[], Any]] = {
                "Triton, a·X + Q X": lambda q=q, y=y, out=out: by_triton(q, y, [(y, 2.0)], out, symmetric=False),
                "Triton, Q X": lambda q=q, y=y, out=out: by_triton(q, y, [], out, symmetric=False),
                "cuBLAS, Q X": lambda q=q, y=y, out=out: torch.mm(q[0], y[0], out=out[0]),
            }
            for name, call in full.items():
                _, took = seconds(call, device, times=times)
                measured = f"{4 * side**3 / took / 1e12:.3g}"
                yield Line(f"{name}, {side}×{2 * side}, {dtype}, TFLOP/s", f"{rates.flops / 1e12:.0f}", measured)


def ceilings(device: torch.device, side: int = 8192, sustained: float = 3.0) -> Iterator[Line]:
    """TFLOP/s of a full product in bf16 and fp16: at once, and after some seconds, when the clock has settled."""
    rates = DeviceRates()
    for dtype in (torch.bfloat16, torch.float16):
        x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(x)
        for when, until in (("at once", 0.1), (f"after {sustained:g} s", sustained)):
            begin, took = time.perf_counter(), 0.0
            while time.perf_counter() - begin < until:
                _, took = seconds(lambda x=x, y=y, out=out: torch.mm(x, y, out=out), device, times=5)
            measured = f"{2 * side**3 / took / 1e12:.3g}"
            yield Line(f"product of {side}², {dtype}, {when}, TFLOP/s", f"{rates.flops / 1e12:.0f}", measured)
    if device.type == "cuda":
        command = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active",
            "--format=csv,noheader",
        ]
        rows = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()
        yield Line("clock, power, throttled by", "", rows[0] if rows else "unknown")


SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda i: torch.ones_like(i),
    "4 decades": lambda i: 10 ** (-4 * i / i.max()),
    "rank one and noise": lambda i: torch.where(i == 0, 1.0, 1e-3),
    "a sixteenth at 1, rest .01": lambda i: torch.where(i < len(i) / 16, 1.0, 0.01),
}
"""Singular values from their numbers."""
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "deflated": {"coefficients": "deflated"},
    "fp32": {"dtype": torch.float32},
}
"""Ways to orthogonalize, as arguments of `muonmesh.orthogonalize`."""
JUDGED = ((768, 3072), (2048, 2048))
"""Shapes whose error is measured, which takes an SVD in fp64."""
BATCHES = ((12, 768, 768), (6, 768, 3072), (8, 2048, 2048), (3, 2048, 8192), (4, 4096, 4096), (3, 4096, 14336))


def of_spectrum(rows: int, cols: int, spectrum: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix (rows ≤ cols) with known singular values, in bf16, and its polar factor in fp64."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"device": device, "generator": generator, "dtype": torch.float64}
    u, _ = torch.linalg.qr(torch.randn(rows, rows, **options))
    v, _ = torch.linalg.qr(torch.randn(cols, rows, **options))
    x = ((u * SPECTRA[spectrum](torch.arange(rows, device=device, dtype=torch.float64))) @ v.mT).bfloat16()
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return x, u @ vh


def orthogonalizations(
    device: torch.device,
    judged: Sequence[tuple[int, int]] = JUDGED,
    batches: Sequence[tuple[int, int, int]] = BATCHES,
    times: int = 10,
) -> Iterator[Line]:
    """Each way's error to the polar factor (fp64, of ‖·‖_F), largest singular value, bits in batches, and time."""
    for rows, cols in judged:
        for spectrum in SPECTRA:
            x, exact = of_spectrum(rows, cols, spectrum, device)
            for name, settings in WAYS.items():
                try:
                    out = mm.orthogonalize(x, **settings)
                    batch = mm.orthogonalize(torch.stack([x, -x, x]), **settings)
                except (TypeError, ValueError, RuntimeError) as error:
                    yield Line(f"{rows}×{cols}, {spectrum}, {name}", "", f"{type(error).__name__}: {str(error)[:80]}")
                    continue
                error = float((out.double() - exact).norm() / exact.norm())
                largest = float(torch.linalg.matrix_norm(out.double(), 2))
                same = torch.equal(batch[2], out) and torch.equal(batch[1], -out)
                accuracy = f"{error:.3f}, {largest:.3f}, {'the same bits' if same else 'OTHER BITS'}"
                yield Line(f"{rows}×{cols}, {spectrum}, {name}: error, largest, in a batch", "", accuracy)
    for number, rows, cols in batches:
        x = torch.randn(number, rows, cols, device=device).bfloat16()
        for name, call in calls(x).items():
            try:
                _, took = seconds(call, device, times=times)
            except (TypeError, ValueError, RuntimeError) as error:
                yield Line(f"{number} of {rows}×{cols}, {name}, µs", "", f"{type(error).__name__}: {str(error)[:80]}")
                continue
            yield Line(f"{number} of {rows}×{cols}, {name}, µs", "", f"{took * 1e6:.0f}")


def calls(x: Tensor) -> dict[str, Callable[[], Any]]:
    """Our ways to orthogonalize a batch, and gram-newton-schulz's where it is installed."""
    callables: dict[str, Callable[[], Any]] = {
        name: lambda settings=settings: mm.orthogonalize(x, **settings) for name, settings in WAYS.items()
    }

    def by_triton_alone() -> Tensor:
        with mock.patch.dict(TORCH_FROM, clear=True):
            return mm.orthogonalize(x)

    callables["default, all products by Triton"] = by_triton_alone
    with contextlib.suppress(ImportError):
        callables["gram-newton-schulz"] = partial(importlib.import_module("gram_newton_schulz").GramNewtonSchulz(), x)
    return callables


def steps(device: torch.device, shapes: Sequence[tuple[int, int]] = GPT2) -> Iterator[Line]:
    """A step of muonmesh and of torch.optim.Muon, over the matrices of three layers of GPT-2 small."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    for name, make in {"muonmesh": optimizer_of, "torch.optim.Muon": torchs}.items():
        run = dry_run(bag(*shapes), make)
        model = bag(*shapes).to_empty(device=device)
        for parameter in model.parameters():
            parameter.data.normal_()
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(model)
        took, step_seconds = seconds(optimizer.step, device, times=10)
        modelled = f"{run.best_seconds * 1e3:.2f} to {run.seconds * 1e3:.2f}"
        yield Line(f"3 layers of GPT-2, {name}, step, ms", modelled, f"{step_seconds * 1e3:.2f}")
        yield Line(f"3 layers of GPT-2, {name}, host, ms", f"{run.parts()['host'] * 1e3:.2f}", f"{took * 1e3:.2f}")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            optimizer.step()
            wait(device)
            peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
            yield Line(f"3 layers of GPT-2, {name}, peak, MiB", f"{run.peak_bytes / 2**20:.0f}", f"{peak:.0f}")


def torchs(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(model.parameters()), lr=0.02)


def exchange(device: torch.device, ranks: int) -> Iterator[Line]:
    """The all-to-all of as many ranks as there are GPUs: until it begins, its bandwidth, and what NCCL takes for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, port, device.type, results), nprocs=ranks)  # type: ignore[no-untyped-call]
    small, large, memory = results.get()
    rates = DeviceRates()
    begun = rates.collective + rates.message * (ranks - 1)
    yield Line(f"all-to-all, {ranks} ranks, 4 bytes, µs", f"{begun * 1e6:.0f}", f"{small * 1e6:.0f}")
    sent = MESSAGE * (ranks - 1) / ranks
    modelled = f"{sent / (sent / rates.wire + begun) / 1e9:.1f}"
    if ranks > 1:
        yield Line(f"all-to-all, {ranks} ranks, 16 MiB, GB/s sent", modelled, f"{sent / large / 1e9:.1f}")
    yield Line(f"all-to-all, {ranks} ranks, memory of the library, GB", f"{3.28 * min(7, ranks - 1) / 7:.2f}", memory)


def _rank(rank: int, ranks: int, port: int, kind: str, results: Any) -> None:
    """Put the seconds of a small and of a large all-to-all into a queue, and the memory that the first one took."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)

    def exchanged(elements: int) -> Callable[[], Any]:
        source = torch.zeros(ranks * elements, device=device)
        target = torch.empty_like(source)
        return lambda: dist.all_to_all_single(target, source)

    calls = [exchanged(1), exchanged(MESSAGE // 4 // ranks)]
    free = torch.cuda.mem_get_info(device)[0] if kind == "cuda" else 0
    calls[0]()
    wait(device)
    memory = f"{(free - torch.cuda.mem_get_info(device)[0]) / 1e9:.2f}" if kind == "cuda" else "no device"
    times = [seconds(call, device)[1] for call in calls]
    if rank == 0:
        results.put((*times, memory))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Print every figure as soon as it is there; 1 if one could not be measured, which is told and goes on."""
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was measured.")
        return 0
    return report(torch.device("cuda", 0), torch.cuda.device_count(), sys.argv[1:])


def report(device: torch.device, ranks: int, chosen: Sequence[str] = (), **sizes: Any) -> int:
    """Print the table of all parts, or of those that are chosen, for a device."""
    begin, failed = time.perf_counter(), 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(f"Figures of {name}, torch {torch.__version__}.\n\n| | modelled, one H100 | measured |\n|---|--:|--:|")
    times = sizes.get("times")
    parts: dict[str, Callable[[], Iterable[Line]]] = {
        "ceilings": lambda: ceilings(device, sizes.get("side", 8192), sizes.get("sustained", 3.0)),
        "host": lambda: host(device, times or 100),
        "products": lambda: products(device, sizes.get("sides", SIDES), times or 20),
        "orthogonalizations": lambda: orthogonalizations(
            device, sizes.get("judged", JUDGED), sizes.get("batches", BATCHES), times or 10
        ),
        "steps": lambda: steps(device, sizes.get("shapes", GPT2)),
        "exchange": lambda: itertools.chain.from_iterable(exchange(device, n) for n in sorted({1, ranks})),
    }
    for part in chosen or PARTS:
        try:
            for line in parts[part]():
                print("| " + " | ".join(line) + " |", flush=True)
        except Exception:
            failed = 1
            print(f"| {part} | | FAILED, see below |", flush=True)
            traceback.print_exc()
    print(f"\n{time.perf_counter() - begin:.0f} s.", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
