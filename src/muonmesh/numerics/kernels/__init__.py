"""The matrix products of Newton–Schulz: a table, chosen for the hardware by `select`."""

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
from muonmesh.numerics.kernels.table import Exact, Matmuls
from muonmesh.numerics.kernels.toolchain import DTYPES, is_installed, is_interpreted, is_usable
from muonmesh.numerics.kernels.triton import triton_products

KernelName: TypeAlias = Literal["auto", "torch", "triton", "compiled"]
"""The code that multiplies matrices. "auto" takes the code that should be the fastest on the device, if all ranks can
run it. "torch" needs nothing else. "triton" needs triton. "compiled" needs bf16 on a CPU, and a package that was built
with a C compiler."""

__all__ = [
    "Exact",
    "KernelName",
    "Matmuls",
    "auto_takes",
    "check_kernels",
    "multiplies_bf16",
    "resolve",
    "select",
    "told_products",
]

# Matrices of how many rows compiled products multiply faster than torch's, by the instructions that they have
# (measured). On ARM nobody has measured it. Up to 16 rows torch's are faster everywhere.
_GAIN = {"avx512bf16": range(17, sys.maxsize), "avx512": range(17, sys.maxsize), "avx2": range(96, 512)}

# From here on column blocks save more than they cost (measured).
_BLOCKED_FROM_ROWS = 384
# Up to 16³ multiplications (the whole batch counted) torch does not call oneDNN for bf16 but a slow loop of its own,
# which adds in another order; larger bf16 products have the same bits alone and in a batch.
_NARROW_FROM_ROWS = 17
# X of one batch together: enough that Python does not show, little enough for a core's cache (measured).
_CPU_BYTES_AT_ONCE = 3 << 18
_DEVICE_BYTES_AT_ONCE = 1 << 30


def select(
    kernels: KernelName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    cols: int,
    whole: bool = False,
) -> Matmuls:
    """Choose the products for matrices of one shape.

    On the CPU a matrix is multiplied in the same way whatever comes with it: in fp32 and fp64 alone, because the
    bits of a batched product differ there, in bf16 with others of its shape, if it is small.

    Args:
        kernels: "auto", or the name of one implementation.
        device: Where the matrices are.
        dtype: The compute dtype.
        rows: Rows of one matrix, the smaller side.
        cols: Columns of one matrix.
        whole: See `resolve`.

    Returns:
        The table.

    Raises:
        ValueError: `kernels` is unknown, or "triton" or "compiled" where it cannot be.
    """
    check_kernels(kernels, device=device, dtype=dtype)
    matrix_bytes = rows * cols * dtype.itemsize
    cpu_at_once = max(2, _CPU_BYTES_AT_ONCE // matrix_bytes) if dtype == torch.bfloat16 else 1
    taken = resolve(kernels, device=device, dtype=dtype, rows=rows, whole=whole)
    if taken == "compiled":
        return compiled_products(at_once=1 if rows >= _BLOCKED_FROM_ROWS else cpu_at_once)
    if taken == "triton":
        return triton_products(at_once=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes), rows=rows, cols=cols)
    if device.type != "cpu":
        return torch_products(at_once=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes))
    table = BLOCKED if rows >= _BLOCKED_FROM_ROWS else dense(at_once=cpu_at_once)
    narrow = multiplies_bf16() and rows >= _NARROW_FROM_ROWS
    return widened(table) if dtype == torch.bfloat16 and not narrow else table


def resolve(
    kernels: KernelName, *, device: torch.device, dtype: torch.dtype, rows: int, whole: bool = False
) -> KernelName:
    """Return who multiplies where "auto" was asked for; the only function that looks at the hardware.

    Args:
        kernels: As for `select`.
        device: As for `select`.
        dtype: As for `select`.
        rows: As for `select`.
        whole: Whether all steps would be taken on one Gram matrix, which needs the compiled products and saves more
            than they lose on large matrices.
    """
    if kernels != "auto":
        return kernels
    if device.type == "cpu" and dtype == torch.bfloat16:
        order, gain = auto_takes()
        return "compiled" if order and (rows in gain or (whole and rows >= gain.start)) else "torch"
    by_triton = device.type == "cuda" and dtype == torch.bfloat16
    return "triton" if by_triton and _has_tensor_cores(device) and is_usable(device) else "torch"


@cache
def auto_takes() -> tuple[int, range]:
    """Return what "auto" leaves to the compiled products on this CPU in bf16; ranks compare it.

    Returns:
        The number of their order of sums, 0 for none, and the rows of matrices that gain.
    """
    try:
        gain = _GAIN.get(library().variant, range(0))
    except NoLibrary:
        gain = range(0)
    # torch's products use AMX and these do not: torch's are preferred until somebody has measured.
    return (ORDER_OF_SUMS, gain) if gain and not torch.cpu._is_amx_tile_supported() else (0, range(0))


def told_products(kernels: KernelName, *, device: torch.device, dtype: torch.dtype) -> str:
    """Say in a few words which products multiply, the same words for the same bits."""
    order, gain = auto_takes()
    if kernels == "auto" and device.type == "cpu" and dtype == torch.bfloat16 and order:
        below = f" to {gain[-1]}" if gain.stop < sys.maxsize else ""
        return f"compiled {order} from {gain.start} rows{below}"
    taken = resolve(kernels, device=device, dtype=dtype, rows=1)
    return f"compiled {ORDER_OF_SUMS}" if taken == "compiled" else taken


def check_kernels(kernels: KernelName, *, device: torch.device, dtype: torch.dtype) -> None:
    """Check that matrices on a device can be multiplied by an implementation.

    Raises:
        ValueError: as `select`.
    """
    if kernels not in get_args(KernelName):
        known = ", ".join(repr(name) for name in get_args(KernelName))
        raise ValueError(f'kernels: found {kernels!r}; needed one of {known}. Write kernels="auto"')
    faults = {"triton": _triton_fault, "compiled": _compiled_fault}
    if kernels in faults and (fault := faults[kernels](device, dtype)):
        found, needed, write = fault
        raise ValueError(f"kernels={kernels!r}: found {found}; needed {needed}. Write {write}")


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32, or at least as fast.

    oneDNN says from AVX-512 on that it multiplies bf16. Without bf16 instructions it takes two to three times as long
    there as in fp32.
    """
    x86 = platform.machine() in ("x86_64", "AMD64")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (not x86 or torch.cpu._is_avx512_bf16_supported())


_INSTEAD = 'kernels="auto"'


def _compiled_fault(device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """Return what was found where the compiled products cannot be, what is needed, and what to write."""
    if device.type != "cpu":
        return f"a matrix on {device.type}", "one on a CPU", _INSTEAD
    if dtype != torch.bfloat16:
        return f"{dtype}", "bf16", _INSTEAD
    try:
        library()
    except NoLibrary as error:
        needed = "the library of products, on a processor with AVX2 and FMA or on 64-bit ARM"
        return str(error), needed, f"{_INSTEAD}, or {error.mend}"
    return None


def _triton_fault(device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """Return the same of Triton's products."""
    if not is_installed():
        return "no package triton", "that package", f'pip install "muonmesh[triton]", or {_INSTEAD}'
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"a matrix on {device.type}", "one on a CUDA or ROCm device", _INSTEAD
    return None if dtype in DTYPES else (f"{dtype}", "bf16 or fp32", _INSTEAD)


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether bf16 has hardware, or the device is one that torch knows by name only, as in a dry run."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
