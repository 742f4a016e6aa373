"""The matrix products of Newton–Schulz: a table, chosen for the hardware by `select`."""

from __future__ import annotations

from functools import cache
from typing import Literal, TypeAlias, get_args

import torch

from muonmesh.numerics.kernels.blocked import BLOCKED
from muonmesh.numerics.kernels.compiled import NoLibrary, compiled_products, library
from muonmesh.numerics.kernels.dense import dense
from muonmesh.numerics.kernels.device import torch_products
from muonmesh.numerics.kernels.table import Exact, Matmuls
from muonmesh.numerics.kernels.toolchain import DTYPES, is_installed, is_interpreted, is_usable
from muonmesh.numerics.kernels.triton import triton_products
from muonmesh.numerics.kernels.widened import widened

KernelName: TypeAlias = Literal["auto", "torch", "triton", "compiled"]
"""Who multiplies: "auto" is what is expected to be the fastest on the device of what is installed, "torch" needs
nothing but torch, "compiled" a package that was built where there is a C compiler, and bf16 on a CPU."""

__all__ = [
    "Exact",
    "KernelName",
    "Matmuls",
    "check_kernels",
    "multiplies_bf16",
    "select",
]

# From here on column blocks save more than they cost [measured].
_BLOCKED_FROM_ROWS = 384
# Up to 16³ multiplications (the whole batch counted) torch does not call oneDNN for bf16 but a slow loop of its own,
# which adds in another order; larger bf16 products have the same bits alone and in a batch.
_NARROW_FROM_ROWS = 17
# X of one batch together: enough that Python does not show, little enough for a core's cache [measured].
_CPU_BYTES_AT_ONCE = 3 << 18
_DEVICE_BYTES_AT_ONCE = 1 << 30


def select(
    kernels: KernelName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    cols: int,
) -> Matmuls:
    """Choose the products for matrices of one shape; the only function that looks at the hardware.

    On the CPU a matrix is multiplied in the same way whatever comes with it: in fp32 and fp64 alone, because the
    bits of a batched product differ there, in bf16 with others of its shape, if it is small.

    Args:
        kernels: "auto", or the name of one implementation.
        device: Where the matrices are.
        dtype: The compute dtype.
        rows: Rows of one matrix, the smaller side.
        cols: Columns of one matrix.

    Returns:
        The table.

    Raises:
        ValueError: `kernels` is unknown, or "triton" or "compiled" where it cannot be.
    """
    check_kernels(kernels, device=device, dtype=dtype)
    matrix_bytes = rows * cols * dtype.itemsize
    cpu_at_once = max(2, _CPU_BYTES_AT_ONCE // matrix_bytes) if dtype == torch.bfloat16 else 1
    if kernels == "compiled":
        return compiled_products(at_once=1 if rows >= _BLOCKED_FROM_ROWS else cpu_at_once)
    by_triton = kernels == "auto" and device.type == "cuda" and dtype == torch.bfloat16
    if kernels == "triton" or (by_triton and _has_tensor_cores(device) and is_usable(device)):
        return triton_products(at_once=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes))
    if device.type != "cpu":
        return torch_products(at_once=max(1, _DEVICE_BYTES_AT_ONCE // matrix_bytes))
    table = BLOCKED if rows >= _BLOCKED_FROM_ROWS else dense(at_once=cpu_at_once)
    narrow = multiplies_bf16() and rows >= _NARROW_FROM_ROWS
    return widened(table) if dtype == torch.bfloat16 and not narrow else table


def check_kernels(kernels: KernelName, *, device: torch.device, dtype: torch.dtype) -> None:
    """Check that matrices on a device can be multiplied by an implementation.

    Raises:
        ValueError: as `select`.
    """
    if kernels not in get_args(KernelName):
        known = ", ".join(repr(name) for name in get_args(KernelName))
        raise ValueError(f'kernels: found {kernels!r}; needed one of {known}. Write kernels="auto"')
    if kernels == "triton":
        _check_triton(device, dtype)
    if kernels == "compiled":
        _check_compiled(device, dtype)


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32, or at least as fast; oneDNN says so from AVX-512 on."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _check_compiled(device: torch.device, dtype: torch.dtype) -> None:
    needed, write = "", 'kernels="auto"'
    if device.type != "cpu":
        found, needed = f"a matrix on {device.type}", "one on a CPU"
    elif dtype != torch.bfloat16:
        found, needed = f"{dtype}", "bf16"
    else:
        try:
            library()
        except NoLibrary as error:
            found, needed = str(error), "the library of products, on a processor with AVX2 and FMA or on 64-bit ARM"
            write = (
                'kernels="auto", or build the package where there is a C compiler (pip install --no-binary muonmesh)'
            )
    if needed:
        raise ValueError(f"kernels='compiled': found {found}; needed {needed}. Write {write}")


def _check_triton(device: torch.device, dtype: torch.dtype) -> None:
    needed, write = "", 'kernels="auto"'
    if not is_installed():
        found, needed, write = "no package triton", "that package", 'pip install "muonmesh[triton]", or kernels="auto"'
    elif device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        found, needed = f"a matrix on {device.type}", "one on a CUDA or ROCm device"
    elif dtype not in DTYPES:
        found, needed = f"{dtype}", "bf16 or fp32"
    if needed:
        raise ValueError(f"kernels='triton': found {found}; needed {needed}. Write {write}")


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether bf16 has hardware, or the device is one that torch knows by name only, as in a dry run."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
