"""A process in which Triton's own driver and launcher run over a driver that only writes down what it is told.

`python -m tests.support.launches` prints a line of JSON for each launch of `LAUNCHES`: what the driver was told by
`Launch.run`, and by Triton's own way to start a kernel. `--again` prints what its launcher was given when a whole
orthogonalization was worked out, and when it was started again; `--time` the host's µs of each launch.
LD_LIBRARY_PATH and TRITON_LIBCUDA_PATH name the folder of the driver, made of launch_driver.c.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from muonmesh.numerics import newton_schulz
from muonmesh.numerics.kernels import norms, small, tiles, triton_launch
from muonmesh.numerics.kernels.triton import triton_products
from muonmesh.numerics.kernels.triton_launch import Launch
from muonmesh.numerics.newton_schulz import Orthogonalizer

STUB = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
DEVICE = torch.device("cuda:1")
BF16 = torch.bfloat16


class Launcher(nvidia.CudaLauncher):
    """Triton's launcher, which also notes what each launch is given."""

    log: ClassVar[list[Any]] = []

    def __call__(self, *call: Any) -> None:
        programs, _, _, stream, function, _, _, _, _, *arguments = call
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        Launcher.log.append((programs, stream, function, addresses))
        super().__call__(*call)


class Driver(nvidia.CudaDriver):
    """Triton's driver of an H100, but for what it asks torch about devices that are not there."""

    current = 0

    def __init__(self, launcher: type[nvidia.CudaLauncher] = nvidia.CudaLauncher) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = launcher
        self.get_current_device = lambda: Driver.current
        self.get_current_stream = lambda device: 1000 + device
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    before, Driver.current = Driver.current, device.index
    yield
    Driver.current = before


def products(
    rows: int, cols: int, batch: int = 2, dtype: torch.dtype = BF16, of_numbers: torch.dtype = torch.float32
) -> dict[str, Callable[[], Launch]]:
    x, a = torch.zeros(batch, rows, cols, dtype=dtype), torch.zeros(batch, rows, rows, dtype=dtype)
    out, wide = torch.zeros_like(a), torch.zeros_like(x)
    number, numbers = torch.ones(1, dtype=of_numbers), torch.ones(batch, 1, 1, dtype=of_numbers)

    def gram() -> Launch:
        return tiles.multiplication(x, x.mT, None, 1.0, 0.0, numbers, out, symmetric=True)

    def polynomial() -> Launch:
        return tiles.multiplication(a, a, a, 2.0, 3.0, 1.0, out, symmetric=True)

    def apply() -> Launch:
        return tiles.multiplication(a, x, x, 1.0, 2.0, number, wide, symmetric=False)

    def join() -> Launch:
        more = {"d": a, "delta": 2.0, "identity": 3.0}
        return tiles.multiplication(a, a, a, 1.0, 2.0, 1.0, out, symmetric=True, **more)

    makers: list[Callable[[], Launch]] = [gram, polynomial, apply, join]
    return {f"{make.__name__} {batch}×{rows}×{cols} {dtype} {of_numbers}": make for make in makers}


def shifted() -> Callable[[], Launch]:
    """A product whose result does not begin at a multiple of 16 bytes, beside one of the same shape that does."""
    x, out = torch.zeros(1, 64, 64, dtype=BF16), torch.zeros(64 * 64 + 1, dtype=BF16)[1:].view(1, 64, 64)
    return lambda: tiles.multiplication(x, x.mT, None, 1.0, 0.0, 1.0, out, symmetric=True)


def beside(rows: int, cols: int) -> dict[str, Callable[[], Launch]]:
    x, power = torch.zeros(2, rows, cols, dtype=BF16), torch.ones(2, dtype=torch.int32)
    parts = -(-rows * cols // norms.MEASURED)
    exponents, squares = torch.zeros(2, parts, dtype=torch.int32), torch.zeros(2, parts)
    return {
        f"measure {rows}×{cols}": lambda: norms.measuring(x, exponents, squares),
        f"rescale {rows}×{cols}": lambda: norms.rescaling(x, x.view(torch.float16), power),
    }


def whole() -> Callable[[], Launch]:
    x, out = torch.zeros(2, 3, 48, 64, dtype=BF16)
    return lambda: small.orthogonalizing(x, out, (3.4445, -4.775, 2.0315) * 5)


LAUNCHES: dict[str, Callable[[], Launch]] = {
    **products(64, 64, 1),
    **products(768, 3072),
    **products(100, 33),
    **dict([*products(100, 33, dtype=torch.float32).items()][:1]),
    **dict([*products(64, 64, 1, of_numbers=BF16).items()][:1]),
    "shifted": shifted(),
    **beside(64, 64),
    **beside(100, 33),
    **beside(1, 1),
    "orthogonalize": whole(),
}


def again(method: str) -> dict[str, Any]:
    """Return what launches of an orthogonalization were given: worked out each time, and started again elsewhere.

    Addresses in what is given are told by their distance from its start, and the others only as addresses.
    """
    options = {"coefficients": "polar_express", "steps": 5, "method": method, "dtype": BF16, "kernels": "triton"}
    orthogonalizer = Orthogonalizer.of(64, 160, **options, device=torch.device("cpu"))
    memory = torch.zeros(4, 2, 64, 160, dtype=BF16)
    calls = []
    for half in (0, 0, 0, 1, 0):  # the second is recorded, those after it are started again
        matrices = [memory[2 * half], memory[2 * half + 1]]
        Launcher.log = log = list[Any]()
        orthogonalizer(matrices[0], out=matrices[1], overwrite=True)

        def location(address: object, operands: list[torch.Tensor] = matrices) -> object:
            if not isinstance(address, int) or address < 1 << 32:
                return str(address)
            for number, tensor in enumerate(operands):
                if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.numel() * tensor.element_size():
                    return f"{number}: {address - tensor.data_ptr()}"
            return "own"  # of which some are freed and taken again where each call is worked out

        calls.append([(*call, list(map(location, arguments))) for *call, arguments in log])
    return {
        "launches": calls,
        "kept": [type(recording).__name__ for recording in (orthogonalizer._recordings or {}).values()],
    }


def driver_report(start: Callable[[], Any], types: list[str]) -> dict[str, Any]:
    """Return what the driver was told by the one launch that this makes."""
    size = {"i32": 4, "fp32": 4, "i64": 8, "i1": 1}
    sizes = [8 if kind.startswith("*") else size[kind] for kind in types]
    parameters = (ctypes.c_ubyte * 512).in_dll(STUB, "parameters")
    ctypes.memset(parameters, 0, 512)
    ctypes.c_int.in_dll(STUB, "watched").value = len(sizes)
    before = number("launches")
    start()
    ctypes.c_int.in_dll(STUB, "watched").value = 0
    assert number("launches") == before + 1
    raw = bytes(parameters)
    values = [raw[8 * slot : 8 * slot + size].hex() for slot, size in enumerate(sizes)]
    names = ("last_programs", "last_threads", "last_function", "last_stream")
    return {"given": values, **{name: number(name) for name in names}}


def number(name: str) -> int:
    return ctypes.c_uint64.in_dll(STUB, name).value


def microseconds(start: Callable[[], Any]) -> float:
    """Return the host's µs of one call: the middle of 500, of this thread's processor time."""
    times = []
    for _ in range(550):
        begun = time.thread_time_ns()
        start()
        times.append(time.thread_time_ns() - begun)
    return statistics.median(times[50:]) / 1e3


def main() -> None:
    driver.set_active(Driver())
    torch.cuda.device = on  # type: ignore[assignment,misc]
    if "--again" in sys.argv:
        driver.set_active(Driver(Launcher))
        triton_launch.device_of = lambda tensor: DEVICE
        newton_schulz.select = lambda *sizes, **options: triton_products(batch_limit=8)
        print(json.dumps([again(method) for method in ("standard", "gram")]))
        return
    for name, make in LAUNCHES.items():
        launch = make()

        def of_triton(launch: Launch = launch) -> Any:
            with on(DEVICE):
                return launch.kernel[(launch.programs,)](*launch.arguments, **launch.options)

        if "--time" in sys.argv:
            by_package = microseconds(lambda make=make: make().run(DEVICE))
            start = {"run": microseconds(lambda launch=launch: launch.run(DEVICE)), "triton": microseconds(of_triton)}
            print(json.dumps({"name": name, "made and run": by_package, **start}))
            continue
        types = [kind for kind in of_triton().src.signature.values() if kind != "constexpr"]
        expected = driver_report(of_triton, types)
        reports = [
            driver_report(lambda make=make: make().run(DEVICE), types) for _ in range(2)
        ]  # the second has it looked up
        print(json.dumps({"name": name, "expected": expected, "found": reports}))


if __name__ == "__main__":
    main()
