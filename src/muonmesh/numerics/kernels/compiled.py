"""CPU: bf16 products in C (products.c), compiled when the package is built.

They are faster than torch's products for three reasons. Of a symmetric result, little more than the upper triangle is
computed, and mirrored while it is in the cache. Other terms are added before the result is rounded. A batch of small
matrices is one call. The rounding error can be kept too. Each sum has a fixed order, so the bits do not depend on
threads or on other matrices.

The variant "amx" has another order of sums than all others, so it is taken by name alone (`kernels="amx"`).
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from muonmesh.numerics.kernels.product_table import Exact, Matmuls, Number, Operand, Small, Terms
from muonmesh.numerics.kernels.threads import scratch, thread_count

ORDER_OF_SUMS = {"compiled": 1, "amx": 2}
"""The version of the order of sums of each ``kernels``. Take a new number if you change an order, and so the bits.
Ranks compare it."""

_WORTH_A_THREAD = 1 << 24
"""From this number of multiplications on, all threads share one product."""

_WORTH_A_CALL = 3 << 23
"""From this number of multiplications in a product on, each product is a call from Python, so that threads share it.
With fewer, as of 256 × 256, two threads lose more at the end of each product than they gain (measured)."""

_PART = 64
"""Columns of a part that one thread computes. Parts that are narrower than what is packed at once are empty."""


class NoLibrary(RuntimeError):
    """The package has no library of products that runs on this machine; the message says why."""

    mend = "build the package where there is a C compiler (pip install . in a clone)"


class NotHere(NoLibrary):
    """The processor, its kernel or the thread cannot run the products, whichever library the package has."""

    mend = ""


class _Matrix(ctypes.Structure):
    """`matrix` of products.c."""

    _fields_ = (("at", ctypes.c_void_p), ("ld", ctypes.c_long), ("step", ctypes.c_long))


_Operands = _Matrix * 6
_NONE = _Matrix(None, 0, 0)


def _address(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the address of a contiguous tensor. C gets addresses only from this function and from `_matrix`."""
    if tensor.dtype != dtype or not (tensor.is_cpu and tensor.is_contiguous()):
        raise _unfit(tensor)
    return tensor.data_ptr()


def _matrix(batch: Tensor, shape: tuple[int, ...], *, transposed: bool = False) -> _Matrix:
    """Return address and strides of matrices (count, rows, cols), or of their transposes; rows may be apart."""
    step, ld, along = batch.mT.stride() if transposed else batch.stride()
    adjacent = along == 1 or shape[1 if transposed else 2] == 1
    if batch.dtype != torch.bfloat16 or not (batch.is_cpu and batch.shape == shape and adjacent):
        raise _unfit(batch)
    return _Matrix(batch.data_ptr(), ld, step)


def _unfit(tensor: Tensor) -> AssertionError:
    """Return the error that is raised before C reads or writes outside a tensor; ``python -O`` removes an `assert`."""
    description = f"{tuple(tensor.shape)} with strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
    return AssertionError(f"compiled products were given a tensor of another kind than they take: {description}")


@cache
def library(variant: str = "") -> SimpleNamespace:
    """Return the functions of products.c.

    Args:
        variant: The set of instructions; "": the best that this processor has, except "amx".

    Raises:
        NoLibrary: the package was built without a C compiler, or for other processors; or "amx" was asked for, and the
            processor or its kernel has no registers of AMX for this process.
    """
    path = Path(__file__).with_name("products.so")
    try:
        _check_whole(path.read_bytes())
        shared_library = ctypes.CDLL(str(path))
        shared_library.muonmesh_variant.restype = shared_library.muonmesh_tiles.restype = ctypes.c_char_p
        variant = variant or shared_library.muonmesh_variant().decode()
        if not variant:
            raise NotHere("a processor without AVX2 and FMA")
        if variant == "amx" and (refused := shared_library.muonmesh_tiles().decode(errors="replace")):
            raise (NoLibrary if refused.startswith("a library") else NotHere)(refused)
        long, pointer, flag = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
        functions = SimpleNamespace(variant=variant)
        for name, takes, returns in (
            ("room", (long, long), long),
            ("multiply", (long, long, long, long, _Operands, flag, pointer, flag, long, long, pointer), None),
            ("row_products", (long, long, pointer, pointer, pointer), None),
            ("transpose", (long, long, long, pointer, pointer), None),
            ("load", (long, long, long, pointer, pointer, pointer), None),
            ("room_of_all", (long, long), long),
            ("orthogonalize", (long, long, long, pointer, pointer, long, pointer, pointer), None),
        ):
            function = shared_library[f"muonmesh_{name}_{variant}"]
            function.argtypes, function.restype = takes, returns
            setattr(functions, name, function)
        functions.address = ctypes.cast(functions.multiply, pointer).value
        functions.share = shared_library.muonmesh_share
        multiply = ctypes.c_void_p, long, long, long, long, _Operands, flag, pointer, flag
        functions.share.argtypes, functions.share.restype = (*multiply, long, long, pointer, long), None
    except (OSError, AttributeError) as error:  # the latter: a function is missing, in a library of another version
        raise NoLibrary(f"no {path.name} in the package that can be loaded ({error})") from error
    return functions


def _check_whole(library: bytes) -> None:
    """Raise an OSError for an ELF file that ends before its section headers: the loader would die of SIGBUS."""
    start, size, count = (int.from_bytes(library[at], "little") for at in (slice(40, 48), slice(58, 60), slice(60, 62)))
    if library[:4] == b"\x7fELF" and len(library) < start + size * count:
        raise OSError(f"it ends after {len(library):,} bytes of {start + size * count:,}")


def compiled_products(*, rows: int, cols: int, batch_limit: int = 1, variant: str = "") -> Matmuls:
    """Return the table for batches of at most ``batch_limit`` matrices of a shape, rows ≤ cols.

    The bits of a matrix are the same in a batch, alone, and on any number of threads.

    Args:
        rows: The smaller side.
        cols: The larger side.
        batch_limit: See `Matmuls`.
        variant: See `library`. What is not a product is computed by the best variant, with the same bits.
    """
    small = Small(partial(_orthogonalize, variant), (torch.bfloat16,))
    return Matmuls(
        multiply=partial(_multiply, variant),
        batch_limit=batch_limit,
        exact=Exact(row_products=_row_products, load=_load, store=_store),
        small=small if rows * rows * cols < _WORTH_A_CALL else None,
    )


def _for_each(number: Number, count: int) -> list[float]:
    """Return a number for each matrix. On a CPU reading a tensor does not wait."""
    return number.flatten().tolist() if isinstance(number, Tensor) else [number] * count


def _multiply(
    variant: str,
    a: Tensor,
    b: Operand,
    terms: Terms,
    out: Tensor,
    alpha: float = 1.0,
    scale: Number = 1.0,
    symmetric: bool = True,
    low: Operand = None,
) -> Tensor:
    """Do `Matmuls.multiply`, with ``low`` as in `Exact`; rows of a matrix may be apart."""
    count, rows, depth = a.shape
    cols = out.shape[2]
    shape = count, rows, cols
    b = a.mT if b is None else b
    # A single column may have any stride: a vector is read as its rows lie, whichever way it is turned.
    transposed = b.stride(2) != 1 and cols != 1
    scales = _for_each(scale, count)
    factors = [[of_matrix * alpha for of_matrix in scales]]
    operands = [_matrix(a, (count, rows, depth)), _matrix(b, (count, depth, cols), transposed=transposed)]
    for term, factor in terms:
        numbers = [of_matrix * number for of_matrix, number in zip(scales, _for_each(factor, count), strict=True)]
        # Not by whether the products are 0: it would depend on the other matrices whether 0 times ∞ is added.
        operands.append(_matrix(term, shape) if isinstance(factor, Tensor) or factor else _NONE)
        factors.append(numbers)
    operands += [_NONE] * (2 - len(terms))
    factors += [[0.0] * count] * (2 - len(terms))
    low_matrix = _NONE if low is None else _matrix(low, shape)
    functions, operand_array = library(variant), _Operands(*operands, _matrix(out, shape), low_matrix)
    factor_array = (ctypes.c_float * (3 * count))(*chain.from_iterable(zip(*factors, strict=True)))

    threads = 1 if rows * cols * depth < _WORTH_A_THREAD else thread_count()
    apart = functions.room(rows, depth)
    room = scratch("products", (threads * apart,), dtype=torch.uint8, device=out.device).data_ptr()
    arguments = count, rows, depth, cols, operand_array, transposed, factor_array, symmetric
    if threads == 1:
        functions.multiply(*arguments, 0, 1, room)
    else:
        functions.share(functions.address, *arguments, -(-cols // _PART), threads, room, apart)
    return out


def _row_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x·y over each row: (batch, rows), fp32."""
    batch, rows, cols = x.shape
    if x.shape != y.shape:
        raise _unfit(y)
    out = torch.empty(batch, rows, dtype=torch.float32, device=x.device)
    library().row_products(batch * rows, cols, _address(x), _address(y), _address(out, torch.float32))
    return out


def _load(x: Tensor, out: Tensor) -> Tensor:
    """Copy a batch to ``out``, transposed if the shapes say so; return the norm of each matrix: (batch, 1, 1), fp32."""
    norms = torch.empty(len(out), 1, 1, dtype=torch.float32, device=out.device)
    if x.shape != out.shape:
        _store(x, out)
        x = out
    library().load(*out.shape, _address(x), _address(out), _address(norms, torch.float32))
    return norms


def _store(x: Tensor, out: Tensor) -> None:
    """Copy a batch to ``out``, transposed if the shapes say so."""
    if x.shape == out.shape:
        out.copy_(x)
    else:
        if x.mT.shape != out.shape:
            raise _unfit(out)
        library().transpose(*x.shape, _address(x), _address(out))


@cache  # since the coefficients are the same in every step
def _in_memory(numbers: tuple[float, ...]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(numbers))(*numbers)


@cache
def _room_of_all(variant: str, rows: int, cols: int) -> int:
    return int(library(variant).room_of_all(rows, cols))


def _orthogonalize(variant: str, x: Tensor, out: Tensor, polynomials: tuple[float, ...]) -> None:
    """Do `Matmuls.small`: one call for all products, since a call from Python takes longer than a small product."""
    (batch, *shape), x = x.shape, x.contiguous()
    if x.shape != out.shape:
        raise _unfit(x)
    functions, numbers = library(variant), _in_memory(polynomials)
    room = scratch("products", (_room_of_all(variant, *shape),), dtype=torch.uint8, device=out.device).data_ptr()
    functions.orthogonalize(batch, *shape, _address(x), _address(out), len(numbers) // 3, numbers, room)
