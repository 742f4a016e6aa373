"""The first minute on a GPU: what the model of time takes for granted, measured beside it, as a table to paste.

python -m tests.gpu.first
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from muonmesh.numerics.kernels.triton import triton_products
from muonmesh.tools.forecasts.device_rates import DeviceRates
from tests.device.dry_run import dry_run
from tests.figures import GPT2, bag, ours

SIDES = (768, 1024, 2048, 4096, 8192)
MESSAGE = 1 << 24
"""Bytes that a rank sends in the all-to-all whose bandwidth counts."""


class Line(NamedTuple):
    """One figure: what it is, what the model says, what was measured, both in one unit."""

    what: str
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
    out, table = torch.empty_like(x), triton_products(at_once=1)
    calls = {
        "a product by Triton": (lambda: table.multiply(x, x, [(x, 1.0)], out, alpha=1.0), rates.kernel),
        "an operation of torch": (lambda: torch.add(x, x), rates.operation),
        "a view": (lambda: x[0], rates.view),
    }
    for what, (call, modelled) in calls.items():
        took, _ = seconds(call, device, times=times)
        yield Line(f"host, {what}, µs", f"{modelled * 1e6:.1f}", f"{took * 1e6:.1f}")


def products(device: torch.device, sides: Iterable[int] = SIDES, times: int = 20) -> Iterator[Line]:
    """TFLOP/s of X Xᵀ, whose triangle counts for Triton and all of it for cuBLAS."""
    rates, table = DeviceRates(), triton_products(at_once=1)
    one = torch.ones(1, 1, 1, device=device)
    for side in sides:
        x = torch.randn(1, side, side, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        ways: list[tuple[str, Callable[[], Any], int]] = [
            ("Triton", lambda x=x, out=out: table.multiply(x, None, [], out, scale=one), side**3),
            ("cuBLAS", lambda x=x, out=out: torch.bmm(x, x.mT, out=out), 2 * side**3),
        ]
        for name, call, flops in ways:
            _, took = seconds(call, device, times=times)
            least = rates.published / rates.weight_of(side**2, by_triton=name == "Triton")
            modelled = f"{least / 1e12:.0f} to {rates.flops / 1e12:.0f}"
            yield Line(f"X Xᵀ, {side} rows, {name}, TFLOP/s", modelled, f"{flops / took / 1e12:.3g}")


def steps(device: torch.device, shapes: Sequence[tuple[int, int]] = GPT2) -> Iterator[Line]:
    """A step of muonmesh and of torch.optim.Muon, over the matrices of three layers of GPT-2 small."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    for name, make in {"muonmesh": ours, "torch.optim.Muon": torchs}.items():
        run = dry_run(bag(*shapes), make)
        model = bag(*shapes).to_empty(device=device)
        for parameter in model.parameters():
            parameter.data.normal_()
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(model)
        took, together = seconds(optimizer.step, device, times=10)
        modelled = f"{run.best_seconds * 1e3:.2f} to {run.seconds * 1e3:.2f}"
        yield Line(f"3 layers of GPT-2, {name}, step, ms", modelled, f"{together * 1e3:.2f}")
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
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, port, device.type, found), nprocs=ranks)  # type: ignore[no-untyped-call]
    small, large, taken = found.get()
    rates = DeviceRates()
    begun = rates.collective + rates.message * (ranks - 1)
    yield Line(f"all-to-all, {ranks} ranks, 4 bytes, µs", f"{begun * 1e6:.0f}", f"{small * 1e6:.0f}")
    sent = MESSAGE * (ranks - 1) / ranks
    modelled = f"{sent / (sent / rates.wire + begun) / 1e9:.1f}"
    if ranks > 1:
        yield Line(f"all-to-all, {ranks} ranks, 16 MiB, GB/s sent", modelled, f"{sent / large / 1e9:.1f}")
    yield Line(f"all-to-all, {ranks} ranks, memory of the library, GB", f"{3.28 * min(7, ranks - 1) / 7:.2f}", taken)


def _rank(rank: int, ranks: int, port: int, kind: str, found: Any) -> None:
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
    taken = f"{(free - torch.cuda.mem_get_info(device)[0]) / 1e9:.2f}" if kind == "cuda" else "no device"
    times = [seconds(call, device)[1] for call in calls]
    if rank == 0:
        found.put((*times, taken))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Print every figure as soon as it is there; 1 if one could not be measured, which is told and goes on."""
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was measured.")
        return 0
    device = torch.device("cuda", 0)
    return report(device, torch.cuda.device_count())


def report(device: torch.device, ranks: int, **sizes: Any) -> int:
    """Print the table for a device."""
    begin, failed = time.perf_counter(), 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(
        f"The first minute on {name}, torch {torch.__version__}.\n\n| | modelled, one H100 | measured |\n|---|--:|--:|"
    )
    parts: dict[str, Callable[[], Iterable[Line]]] = {
        "host": lambda: host(device, sizes.get("times", 100)),
        "products": lambda: products(device, sizes.get("sides", SIDES), sizes.get("times", 20)),
        "steps": lambda: steps(device, sizes.get("shapes", GPT2)),
        **{f"exchange {n}": lambda n=n: exchange(device, n) for n in sorted({1, ranks})},
    }
    for part, lines in parts.items():
        try:
            for line in lines():
                print("| " + " | ".join(line) + " |", flush=True)
        except Exception:
            failed = 1
            print(f"| {part} | | FAILED, see below |", flush=True)
            traceback.print_exc()
    print(f"\n{time.perf_counter() - begin:.0f} s.", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
