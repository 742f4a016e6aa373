"""The host's time of a step on CUDA, up to the driver, without a GPU: muonmesh beside torch.optim.Muon.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --cases gpt2 --rounds 9 --json benchmarks/results/host_time.json

The step runs by what runs on CUDA. Triton's own driver and launcher run over a libcuda that returns at once
(`tests/support/launch_driver.c`), so each of our kernels is looked up, bound and started as on a GPU. Tensors lie in
the memory of the CPU and are the case's shapes divided by `Case.shrunk`, with memory limits divided by its square, so
that batches and launches are those of the real shapes, while an operation of torch takes little beside its dispatch. A
product of torch's is one dispatch of another operation of one element, as little as a product can cost.

"With other gradients" is a loop that frees its gradients: each step finds all of them where they have not been before.

What is reported is processor time of one thread, the least over the rounds, in turns. The driver's own time for each
launch (about 2 µs on the host) is left out for both; launches are printed beside.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """Matrices of one process.

    Attributes:
        title: What the table calls them.
        shapes: Of the real matrices.
        shrunk: Both lengths are divided by this.
    """

    title: str
    shapes: Sequence[tuple[int, int]]
    shrunk: int


ANEW = "muonmesh, with other gradients"
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
CASES = {
    "gpt2": Case("3 layers of GPT-2 small", [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 3, 48),
    "small": Case("1,000 of 64 × 64", [(64, 64)] * 1000, 8),
    "llama": Case("Llama 8B", LLAMA, 64),
}


def library(folder: Path) -> None:
    """Make the libcuda in a folder."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise SystemExit("host_time.py: found no C compiler; needed one for tests/support/launch_driver.c. Install gcc")
    flags = ["-O2", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *flags, str(ROOT / "tests/support/launch_driver.c")], check=True)


def pretend_device(shrunk: int) -> None:
    """Let the package start Triton's kernels over the libcuda, for tensors of the CPU."""
    import torch
    from tests.support import launches
    from triton.runtime.driver import driver

    from muonmesh.numerics import iteration, kernels, newton_schulz
    from muonmesh.numerics.kernels import triton_launch
    from muonmesh.numerics.kernels.triton import triton_products
    from muonmesh.step import batches, by_kernel, planning

    driver.set_active(launches.Driver())
    torch.cuda.device = launches.on  # type: ignore[assignment,misc]
    triton_launch.device_of = lambda tensor: torch.device("cuda:0")

    def products(kernels: Any, *, rows: int, cols: int, **others: Any) -> Any:
        rows, cols = rows * shrunk, cols * shrunk
        return triton_products(batch_limit=max(1, (1 << 30) // (rows * cols * 2)), rows=rows, cols=cols)

    resolve_method = newton_schulz.resolve_method

    def method(rows: int, cols: int, **others: Any) -> Any:
        return resolve_method(rows * shrunk, cols * shrunk, **others)

    def symmetric_part(x: Any, spare: Any, out: Any) -> Any:  # as on a device
        return torch.lerp(x, x.mT, 0.5, out=out)

    newton_schulz.select, newton_schulz.resolve_method = products, method  # type: ignore[assignment]
    iteration.symmetric_part = symmetric_part

    batches.Batches.on_device = True  # type: ignore[assignment,method-assign]
    newton_schulz.ONE_BY_ONE_FROM //= shrunk
    planning.check_kernels = lambda *_, **__: None  # "triton" asks for the form of devices, fp16
    for module in (kernels, by_kernel):
        module.is_usable = lambda device: True  # type: ignore[attr-defined]


def leave_out_products() -> None:
    """Let torch's products be a dispatch that computes one element."""
    import torch

    scalar, into = torch.ones(1), torch.ones(1)

    def product(*operands: Any, out: Any = None, **options: Any) -> Any:
        torch.mul(scalar, scalar, out=into)
        return operands[0] if out is None else out

    for name in ("bmm", "baddbmm", "mm", "addmm"):
        setattr(torch, name, product)


def step_of(case: Case, who: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what comes before a step of one optimizer over the case's matrices, and the step."""
    import torch
    from torch import nn

    import muonmesh as mm
    from muonmesh.layout import Budget, MeshLayout
    from muonmesh.step.runtime import Driver
    from muonmesh.tools.forecasts.forecast import muon_parameter

    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(*(length // case.shrunk for length in shape))) for shape in case.shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    if who == "torch":
        return _nothing, torch.optim.Muon(weights, lr=0.02).step
    parameters = [muon_parameter(str(n), MeshLayout.replicated(s, (0,)), None) for n, s in enumerate(case.shapes)]
    budget = Budget.of(parameters, None, itemsize=2, host=False).bytes / 2**20
    optimizer = mm.Muon(
        weights, ns_coefficients="polar_express", kernels="triton", memory_budget_mb=budget / case.shrunk**2
    )
    optimizer._runtime.driver = Driver(False)

    def move_gradients() -> None:
        for weight in weights:
            assert weight.grad is not None
            weight.grad = weight.grad.clone()  # before the other one is freed, so it lies elsewhere

    return move_gradients if who == ANEW else _nothing, optimizer.step


def _nothing() -> None:
    """Leave everything as it is."""


def least(call: Callable[[], Any], times: int, before: Callable[[], Any] = _nothing) -> float:
    """Return the least microseconds of this thread's processor time that a call took, each time after ``before``."""
    seconds = []
    for _ in range(times):
        before()
        begun = time.thread_time_ns()
        call()
        seconds.append(time.thread_time_ns() - begun)
    return min(seconds) / 1e3


def serve(name: str) -> None:
    """Step whenever a line comes in; answer with the microseconds of each."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from muonmesh.numerics.kernels.triton import triton_products

    case = CASES[name]
    torch.set_num_threads(1)
    pretend_device(case.shrunk)
    leave_out_products()
    steps = {who: step_of(case, who) for who in ("muonmesh", ANEW, "torch")}
    stub = ctypes.CDLL("libcuda.so.1")

    def launched() -> int:
        return ctypes.c_uint64.in_dll(stub, "launches").value

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts what torch dispatches."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.calls = Counter[str]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls[f"{func.namespace}.{func.overloadpacket.__name__}"] += 1
            return func(*args, **(kwargs or {}))

    counted = {}
    for who, (prepare, step) in steps.items():
        for _ in range(3):
            prepare()
            step()
        before = launched()
        with Seen() as counter:
            step()
        counted[who] = {"triton": launched() - before, "calls": dict(counter.calls.most_common())}
    print(json.dumps(counted), flush=True)
    scalar, matrix = torch.ones(1), torch.ones(1, 8, 8, dtype=torch.bfloat16)
    into, table = torch.empty_like(matrix), triton_products(batch_limit=1)
    single = {
        "a product by Triton": lambda: table.multiply(matrix, matrix, [(matrix, 1.0)], into, alpha=1.0),
        "an operation of torch": lambda: torch.add(scalar, scalar),
        "a view": lambda: matrix[0],
    }
    for _ in sys.stdin:
        seconds = {}
        for action, start in single.items():
            seconds[action] = least(start, 200)
        for who, (prepare, step) in steps.items():
            seconds[who] = least(step, 5, prepare)
        print(json.dumps(seconds), flush=True)


def measured(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    places = {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "OMP_NUM_THREADS": "1"}
    # Memory that is given back is taken again where it was, as torch's allocator on CUDA does it.
    places |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    path = {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.host_time", "--serve", name],
        env={**os.environ, **places, **path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    for _ in range(rounds):
        process.stdin.write("go\n")
        process.stdin.flush()
        lines.append(process.stdout.readline())
    process.stdin.close()
    process.wait()
    if not all(lines):
        raise SystemExit("a process that measures has ended; its error is above")
    counted, *times = map(json.loads, lines)
    return {
        who: {"us": min(times_of_round[who] for times_of_round in times), **counted.get(who, {})} for who in times[0]
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from benchmarks.contenders import Entries
    from benchmarks.report import print_rows, write_json

    with tempfile.TemporaryDirectory() as folder:
        library(Path(folder))
        tables = {name: measured(name, arguments.rounds, Path(folder)) for name in arguments.cases}
    for name, figures in tables.items():
        rows = [
            [
                who,
                f"{figure.get('triton', '')}",
                f"{sum(figure.get('calls', {}).values()) or ''}",
                f"{figure['us']:,.1f}",
            ]
            for who, figure in figures.items()
        ]
        ratio = figures["muonmesh"]["us"] / figures["torch"]["us"]
        print_rows(f"{CASES[name].title}: muonmesh / torch {ratio:.3f}", ["", "Triton", "dispatched", "host µs"], rows)
    if arguments.json:
        write_json(arguments.json, "benchmarks/host_time.py", Entries((), (), {}), tables, {"rounds": arguments.rounds})


if __name__ == "__main__":
    main()
