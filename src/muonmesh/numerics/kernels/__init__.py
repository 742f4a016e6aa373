"""Kernels: the matrix products of Newton–Schulz, as a table that `select` chooses for the hardware.

`README.md` in this folder says what each file is for. Nothing here knows ranks, plans or rules.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch

from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.kernels.blocked import BLOCKED
from muonmesh.numerics.kernels.compiled import ORDER_OF_SUMS, NoLibrary, compiled_products, library
from muonmesh.numerics.kernels.dense import dense, widened
from muonmesh.numerics.kernels.product_table import ALIGNMENT
from muonmesh.numerics.kernels.product_table import Exact as Exact
from muonmesh.numerics.kernels.product_table import Matmuls as Matmuls
from muonmesh.numerics.kernels.toolchain import DTYPES, is_installed, is_interpreted, is_usable
from muonmesh.numerics.kernels.triton import triton_products

KernelName: TypeAlias = Literal["auto", "torch", "triton", "compiled", "amx"]
"""The code that multiplies matrices. "auto" takes the code that should be the fastest on the device, if all ranks can
run it. "torch" needs nothing else. "triton" needs triton. "compiled" needs bf16 on a CPU, and a package that was built
with a C compiler. "amx" also needs a CPU with AMX; it has never run on one, so "auto" does not take it."""

# Numbers of rows for which compiled products are faster than torch's, by instruction set (measured; not on ARM). With
# AMX, torch's may be faster as soon as a product takes longer than its call (20 µs, about 15 of them a matrix). Where
# kernels="amx" gains, nobody has measured: benchmarks/studies/processor.py does.
_GAIN = {
    "amx": range(1, 97),
    "avx512bf16": range(1, sys.maxsize),
    "avx512": range(1, sys.maxsize),
    "avx2": range(1, 512),
}

# From here on column blocks save more than they cost (measured).
_BLOCKED_FROM_ROWS = 384
# With fewer rows a call of oneDNN takes longer than the product, and longer than one of MKL in fp32 (measured).
_NARROW_FROM_ROWS = 96
# Size of X of a whole batch: large enough to hide the time of Python, small enough for a core's cache (measured).
_CPU_BYTES_AT_ONCE = 3 << 18
_DEVICE_BYTES_AT_ONCE = 1 << 30


def select(
    kernels: KernelName, *, device: torch.device, dtype: torch.dtype, rows: int, cols: int, whole: bool = False
) -> Matmuls:
    """Choose the products for matrices of one shape.

    On the CPU, the bits of a matrix do not depend on other matrices, nor on the number of threads.

    Args:
        kernels: "auto", or the name of one implementation.
        device: The device of the matrices.
        dtype: The compute dtype.
        rows: Rows of one matrix, the smaller side.
        cols: Columns of one matrix.
        whole: See `resolve`.

    Returns:
        The table.

    Raises:
        ValueError: `kernels` is unknown, or it is "triton", "compiled" or "amx" and this code cannot run here.
    """
    check_kernels(kernels, device=device, dtype=dtype)
    matrix_bytes = rows * cols * dtype.itemsize
    cpu_batch_limit = max(2, _CPU_BYTES_AT_ONCE // matrix_bytes)
    resolved = resolve(kernels, device=device, dtype=dtype, rows=rows, whole=whole)
    if is_compiled(resolved):
        limit = 1 if rows >= _BLOCKED_FROM_ROWS else cpu_batch_limit
        return compiled_products(rows=rows, cols=cols, batch_limit=limit, variant="amx" if resolved == "amx" else "")
    if resolved == "triton":
        return triton_products(batch_limit=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes), rows=rows, cols=cols)
    if device.type != "cpu":
        return torch_products(batch_limit=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes))
    widens = dtype == torch.bfloat16 and not (multiplies_bf16() and rows >= _NARROW_FROM_ROWS)
    # A matrix that does not fill its last 64 bytes would shift the next one; wider copies begin where they should.
    begin_alike = widens or not (matrix_bytes % ALIGNMENT or rows * rows * dtype.itemsize % ALIGNMENT)
    table = BLOCKED if rows >= _BLOCKED_FROM_ROWS else dense(batch_limit=cpu_batch_limit if begin_alike else 1)
    return widened(table) if widens else table


def resolve(
    kernels: KernelName, *, device: torch.device, dtype: torch.dtype, rows: int, whole: bool = False
) -> KernelName:
    """Return the implementation that "auto" stands for; other names are returned unchanged.

    Only this function looks at the hardware.

    Args:
        kernels: "auto", or the name of one implementation.
        device: The device of the matrices.
        dtype: The compute dtype.
        rows: Rows of one matrix, the smaller side.
        whole: Whether all steps could use a single Gram matrix. This needs the compiled products, and saves more than
            these products lose on large matrices.
    """
    if kernels != "auto":
        return kernels
    if device.type == "cpu" and dtype == torch.bfloat16:
        _, gain = auto_takes()
        return "compiled" if rows in gain or (whole and gain.stop > _BLOCKED_FROM_ROWS) else "torch"
    by_triton = device.type == "cuda" and dtype.itemsize == 2
    return "triton" if by_triton and _has_tensor_cores(device) and is_usable(device) else "torch"


def is_compiled(kernels: KernelName) -> bool:
    """Whether an implementation is products.c, whose products can keep what rounding leaves."""
    return kernels in ORDER_OF_SUMS


@cache
def auto_takes() -> tuple[int, range]:
    """Return for which matrices "auto" uses the compiled products on this CPU in bf16; ranks compare the result.

    Returns:
        The version of the products' order of sums (0 if they are not used), and the numbers of rows with a gain.
    """
    try:
        variant = library().variant
    except NoLibrary:
        return 0, range(0)
    gain = _GAIN.get("amx" if torch.cpu._is_amx_tile_supported() else variant, range(0))
    return (ORDER_OF_SUMS["compiled"] if gain else 0), gain


def told_products(kernels: KernelName, *, device: torch.device, dtype: torch.dtype) -> str:
    """Return a short text about the products in use; equal texts mean equal bits."""
    order, gain = auto_takes()
    if kernels == "auto" and device.type == "cpu" and dtype == torch.bfloat16 and order:
        below = f" to {gain[-1]}" if gain.stop < sys.maxsize else ""
        return f"compiled {order} from {gain.start} rows{below}"
    resolved = resolve(kernels, device=device, dtype=dtype, rows=1)
    return f"{resolved} {ORDER_OF_SUMS[resolved]}" if resolved in ORDER_OF_SUMS else resolved


def check_kernels(kernels: KernelName, *, device: torch.device, dtype: torch.dtype) -> None:
    """Check that matrices on a device can be multiplied by an implementation.

    Raises:
        ValueError: as `select`.
    """
    if kernels not in get_args(KernelName):
        names = ", ".join(repr(name) for name in get_args(KernelName))
        raise ValueError(f'kernels: found {kernels!r}; needed one of {names}. Write kernels="auto"')
    fault = _triton_fault(device, dtype) if kernels == "triton" else _compiled_fault(kernels, device, dtype)
    if fault is not None:
        actual, needed, write = fault
        raise ValueError(f"kernels={kernels!r}: found {actual}; needed {needed}. Write {write}")


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32, or at least as fast.

    oneDNN says from AVX-512 on that it multiplies bf16. Without bf16 instructions it takes two to three times as long
    there as in fp32.
    """
    x86 = platform.machine() in ("x86_64", "AMD64")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (not x86 or torch.cpu._is_avx512_bf16_supported())


_INSTEAD = 'kernels="auto"'

_NEEDED = {
    "compiled": "the library of products, on a processor with AVX2 and FMA or on 64-bit ARM",
    "amx": "a processor with AMX-BF16, Linux 5.16, and a package that GCC 11 or clang 12 or a later one has built",
}


def _compiled_fault(kernels: KernelName, device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """Return the parts (found, needed, write) of the error if products of products.c cannot run; None for others."""
    if kernels not in _NEEDED:
        return None
    if device.type != "cpu":
        return f"a matrix on {device.type}", "one on a CPU", _INSTEAD
    if dtype != torch.bfloat16:
        return f"{dtype}", "bf16", _INSTEAD
    try:
        library("amx" if kernels == "amx" else "")
    except NoLibrary as error:
        return str(error), _NEEDED[kernels], ", or ".join(filter(None, (_INSTEAD, error.mend)))
    return None


def _triton_fault(device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """Return the parts (found, needed, write) of the error if Triton's products cannot run; None if they can."""
    if not is_installed():
        return "no package triton", "that package", f'pip install "muonmesh[triton]", or {_INSTEAD}'
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"a matrix on {device.type}", "one on a CUDA or ROCm device", _INSTEAD
    return None if dtype in DTYPES else (f"{dtype}", "bf16, fp16 or fp32", _INSTEAD)


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether bf16 has hardware, or the device is one that torch knows by name only, as in a dry run."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
