"""The Python of a step: what the host does beside the arithmetic, for many small matrices.

    python benchmarks/python_time.py
    python benchmarks/python_time.py --against ../muonmesh-before --rounds 9 --json python_time.json

Three cases, each one rank on one thread:

- ``local``: 1,000 matrices of 64 × 64 in one process; nothing moves.
- ``legs``: 300 matrices of 64 × 64, a row of each on this rank, one of 64 under FSDP2. It holds 300 legs and owns about
  as many, each way, to 64 peers. The process group is torch's ``fake`` one, which sends nothing.
- ``device``: those of ``local``, by what runs on CUDA: pieces together, flags unread, Triton's kernels. The tensors are
  on the CPU; tables for the kernels are written, but no kernel is started.

What is reported is the processor time of this thread in one step minus that of the step's arithmetic alone. For the
latter, one step's calls of torch functions that read or write elements are recorded with their arguments, and repeated
from a list. So Python, and views and questions about a tensor's shape or dtype, count as Python time; the calls of
``lerp_`` or ``copy_`` do not. Matrix products are left out of both (``torch.bmm`` and the like return at once): they
would be most of the time, and no Python is in them. Of what is timed, the rounds' least counts, since whatever else the
machine does only adds.

``--against PATH`` measures the checkout at PATH too, in a process of its own, in turns with this one. Only the ratio
says something about another machine: the median over the rounds, each of which is a difference of two times, so on a
busy machine it takes many. That of the two least Python times in the table is steadier.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

COUNT, SIZE = 1000, 64
LEGS, PEERS = 300, 64
STEPS = 5
"""Steps timed in a round; the fastest one counts."""

CASES = {"local": COUNT, "legs": LEGS, "device": COUNT}
"""Matrices of each case."""

PRODUCTS = ("bmm", "baddbmm", "mm", "addmm")

VIEWS = """
    __get__ __getitem__ as_strided data_ptr detach diagonal element_size expand flatten is_contiguous is_floating_point
    narrow numel permute reshape size split split_with_sizes squeeze storage_offset stride t transpose unbind unsqueeze
    untyped_storage view
"""
"""Functions of torch that touch no element."""


class Recorder(TorchFunctionMode):
    """Keeps the calls that touch elements."""

    def __init__(self) -> None:
        super().__init__()
        self._views = set(VIEWS.split())
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call and pass it on."""
        ours = "muonmesh" in str(func)  # writes a table and starts nothing
        if getattr(func, "__name__", "") not in self._views and not ours:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def repeat(self) -> None:
        """Call them again, as they were called."""
        with torch.no_grad():
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)


def leave_out_products() -> None:
    """Let matrix products return at once, with whatever is in the memory of their result."""

    def product(*operands: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        return operands[0] if out is None else out

    for name in PRODUCTS:
        setattr(torch, name, product)


def local() -> torch.optim.Optimizer:
    """Matrices of one process."""
    import muonmesh as mm

    weights = [nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(COUNT)]
    for weight in weights:
        weight.grad = torch.randn(SIZE, SIZE)
    return mm.Muon(weights)


def device() -> torch.optim.Optimizer:
    """Matrices of one process, as on a device."""
    os.environ["TRITON_INTERPRET"] = "1"  # so the kernels' operators take tensors of a CPU
    optimizer = local()
    from muonmesh.numerics import newton_schulz
    from muonmesh.numerics.kernels import triton_launch
    from muonmesh.numerics.kernels.triton import triton_products
    from muonmesh.step.runtime import Driver

    triton_launch.Launch.run = lambda self, device: None
    torch.ops.muonmesh.multiply = lambda *arguments: None  # the launch's arguments are a few for all matrices
    newton_schulz.select = lambda *arguments, **options: triton_products(at_once=1 << 18)
    optimizer._runtime.driver = Driver(False)
    return optimizer


def legs() -> torch.optim.Optimizer:
    """Rows of matrices, on the first of many ranks that are not there."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    import muonmesh as mm

    dist.init_process_group("fake", rank=0, world_size=PEERS, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (PEERS,))

    def row() -> Tensor:
        values = torch.randn(SIZE // PEERS, SIZE)
        whole = torch.Size((SIZE, SIZE))
        return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=whole, stride=(SIZE, 1))

    weights = [nn.Parameter(row()) for _ in range(LEGS)]
    for weight in weights:
        weight.grad = row()
    return mm.Muon(weights)


def serve(case: str) -> None:
    """Step whenever a line comes in; answer with the microseconds a matrix."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    optimizer = {"local": local, "legs": legs, "device": device}[case]()
    leave_out_products()
    for _ in range(3):
        optimizer.step()
    recorder = Recorder()
    with recorder:
        optimizer.step()
    for _ in sys.stdin:
        step, arithmetic = (_least(function) for function in (optimizer.step, recorder.repeat))
        print(json.dumps({"step": step / CASES[case], "arithmetic": arithmetic / CASES[case]}), flush=True)


def _least(function: Callable[[], Any]) -> float:
    """Microseconds of this thread's processor time."""
    found = []
    for _ in range(STEPS):
        begin = time.thread_time()
        function()
        found.append(1e6 * (time.thread_time() - begin))
    return min(found)


class Measured:
    """A process that steps with the package of one checkout."""

    def __init__(self, checkout: Path, case: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", case]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> dict[str, float]:
        """Time some steps; microseconds a matrix."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process that measures has ended; its error is above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(case: str, checkouts: dict[str, Path], rounds: int) -> dict[str, Any]:
    """The figures of each checkout, whose processes take turns."""
    processes = {name: Measured(path, case) for name, path in checkouts.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, process in processes.items():
            found[name].append(process.round())
    for process in processes.values():
        process.close()
    figures: dict[str, Any] = {}
    for name, some in found.items():
        step, arithmetic = (min(figure[part] for figure in some) for part in ("step", "arithmetic"))
        figures[name] = {"step_us": step, "arithmetic_us": arithmetic, "python_us": step - arithmetic}
    if len(found) > 1:
        ratios = [
            (before["step"] - before["arithmetic"]) / (now["step"] - now["arithmetic"])
            for now, before in zip(*found.values(), strict=True)
        ]
        figures["ratio"] = statistics.median(ratios)
        figures["ratios"] = ratios
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in turns")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.rounds < 1:
        parser.error("--rounds: found less than 1; needed at least 1")
    checkouts = {"here": Path(__file__).resolve().parents[1]}
    if arguments.against is not None:
        if not (arguments.against / "src" / "muonmesh").is_dir():
            parser.error(f"--against: found no src/muonmesh in {arguments.against}; needed a checkout of muonmesh")
        checkouts["against"] = arguments.against.resolve()
    from report import print_rows, write_json

    tables = {case: compared(case, checkouts, arguments.rounds) for case in arguments.cases}
    for case, figures in tables.items():
        rows = [
            [name, *(f"{figures[name][column]:.1f}" for column in ("python_us", "arithmetic_us", "step_us"))]
            for name in checkouts
        ]
        ratio = f"; Python against / here: {figures['ratio']:.2f}" if "ratio" in figures else ""
        title = f"{case}: µs a matrix and step{ratio}"
        print_rows(title, ["", "Python", "arithmetic", "step without products"], rows)
    if arguments.json:
        from contenders import Entries

        write_json(
            arguments.json, "benchmarks/python_time.py", Entries((), (), {}), tables, {"rounds": arguments.rounds}
        )


if __name__ == "__main__":
    main()
