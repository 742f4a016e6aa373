"""Launches: counts the kernels that torch's operations would launch on a device, and the bytes that they move."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muonmesh.numerics.kernels.rows import COLS, ROWS, rows_of
from muonmesh.tools.forecasts.device_rates import DeviceRates

_NOTHING = re.compile(
    "(new_)?empty(_like|_strided)?|resize_|set_"  # memory
    "|_unsafe_view|device|is_pinned|is_same_size|record_stream"
)
"""Operations that run nothing on the device and are no views: allocations and queries."""

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Torch's marks of operations whose result needs a number from the device."""

_PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
_COLLECTIVES = ("c10d", "_c10d_functional")

# Limits of one launch of torch's multi-tensor kernels (ATen/native/cuda/MultiTensorApply.cuh): elements of a block,
# blocks, and tensors, by the number of lists.
_CHUNK, _BLOCKS = 65536, 320
_TENSORS = (110, 64, 48, 36, 30)
_CONCATENATED = 128  # tensors that one launch of torch.cat takes


class HostSync(RuntimeError):
    """An operation would make the CPU wait for the device."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the work of a device while it is active, in attributes that `DryRun` describes.

    A multi-tensor operation (``torch._foreach_*``) counts as many launches as its kernel takes for these tensors;
    ``operations`` counts it once. Matrix products count their FLOPs, everything else the bytes that it reads and
    writes: each tensor as many bytes as it has elements of its own, so that an expanded dim counts once.

    Raises:
        HostSync: the CPU would wait for the device; the operation that would wait raises this error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.operations = self.kernels = self.views = self.collectives = self.messages = 0
        self.elementwise_bytes = self.flops = self.bytes_to_device = self.bytes_to_host = self.peak_bytes = 0
        self.slow_flops = 0.0
        self.live_bytes = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        space, name = func.namespace, func._schema.name.split("::")[1]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name == "_local_scalar_dense":
            return self._number(inputs[0])
        if any(t.is_cuda for t in inputs) and waits(func, args):
            raise HostSync(f"{func} of a tensor on the device")
        result = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self._look_at_copy(name, args, kwargs, inputs, outputs)
        for tensor in outputs:
            self._account(tensor)
        launches_nothing = func.is_view or _NOTHING.fullmatch(name) is not None
        if launches_nothing or not any(t.is_cuda for t in inputs + outputs):
            self.views += launches_nothing
            return result
        if space in _COLLECTIVES:
            self.collectives += 1
            splits = [value for value in args if isinstance(value, list) and value and isinstance(value[0], int)]
            self.messages += max((sum(map(bool, sizes)) for sizes in splits), default=0)
            return result
        self.operations += 1
        count = _launches(name, args, kwargs)
        self.launches += count
        self.kernels += count * (space == "muonmesh")
        if space == "muonmesh" and name == "multiply":
            one_triangle = 2 if args[8] else 1  # of a symmetric product
            self._multiplied(2 * args[0].numel() * args[1].shape[-1] // one_triangle, args[9], by_triton=True)
        elif space == "muonmesh" and name == "orthogonalize":
            matrices, rows, cols = args[0].shape
            grams, steps = rows * rows * cols, len(args[2]) // 3  # no triangles here, and one X Xᵀ more
            self._multiplied(2 * matrices * (steps * (2 * grams + rows**3) + grams), args[1], by_triton=True)
        elif name in _PRODUCTS:
            first, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self._multiplied(2 * first.numel() * right.shape[-1], outputs[0], by_triton=False)
            adds = name in ("addmm", "baddbmm") and kwargs.get("beta", 1) != 0
            self.launches += adds and kwargs.get("out") is not args[0]  # a copy of the summand: cuBLAS adds in place
        else:
            self.elementwise_bytes += sum(_bytes(func, args, kwargs, outputs))
        return result

    def _multiplied(self, flops: int, out: Tensor, *, by_triton: bool) -> None:
        self.flops += flops
        self.slow_flops += flops * DeviceRates.weight_of(out.numel(), by_triton=by_triton)

    def _number(self, tensor: Tensor) -> Any:
        """Return a number in place of the value of a fake tensor on the CPU, such as 1 for a step count."""
        if tensor.is_cuda:
            raise HostSync("a number is read from the device")
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 0

    def _look_at_copy(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Raise a HostSync for a copy between CPU and device for which the CPU would wait."""
        if name not in ("_to_copy", "copy_"):
            return
        source, target = (args[1], args[0]) if name == "copy_" else (inputs[0], outputs[0])
        if not isinstance(source, Tensor) or source.is_cuda == target.is_cuda:
            return
        waits_not = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if not waits_not:
            raise HostSync(f"a copy from {source.device} to {target.device} without non_blocking=True")
        if target.is_cuda:
            self.bytes_to_device += _size(source)
        else:
            self.bytes_to_host += _size(target)

    def _account(self, tensor: Tensor) -> None:
        """Count the memory of a new tensor until it is freed."""
        if not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._released, key)

    def _released(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key, 0)

    def knows(self, tensors: Sequence[Tensor]) -> None:
        """Leave out the memory of tensors that existed before."""
        for tensor in tensors:
            self._storages.setdefault(tensor.untyped_storage()._cdata, 0)


def waits(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the CPU waits for an operation. Indexing makes the CPU wait only if the indices are masks."""
    if func._schema.name == "aten::index":
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(args[1]))
    return not _WAITS.isdisjoint(func.tags)


def _launches(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of kernels that one call launches."""
    if name.startswith(("_foreach", "_fused")):
        lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
        return _multi_tensor(lists) if lists else 1
    if name == "cat":
        return math.ceil(len(args[0]) / _CONCATENATED)
    return 1


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Tensor) for item in value)


def _multi_tensor(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the launches of a multi-tensor kernel, or one for each tensor if torch takes its slow path."""
    first = lists[0]
    for others in lists[1:]:
        if any(a.shape != b.shape or a.stride() != b.stride() for a, b in zip(first, others, strict=False)):
            return len(first)
    launches = tensors = blocks = 0
    at_most = _TENSORS[min(len(lists), len(_TENSORS)) - 1]
    for tensor in first:
        chunks = math.ceil(tensor.numel() / _CHUNK)
        tensors += 1
        while chunks:
            launched = min(chunks, _BLOCKS - blocks)
            chunks, blocks = chunks - launched, blocks + launched
            if blocks == _BLOCKS:
                launches, tensors, blocks = launches + 1, 1 if chunks else 0, 0
        if tensors == at_most:
            launches, tensors, blocks = launches + 1, 0, 0
    return launches + (blocks > 0)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's own elements."""
    count = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return count * tensor.element_size()


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield each argument of an operation in its schema, its value, and whether it is written."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield argument, value, argument.alias_info is not None and argument.alias_info.is_write


def _bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> Iterator[int]:
    """Yield the bytes that an operation reads and writes of each tensor on the device.

    The work of two operators depends on the elements: `rescale` does not change matrices that are neither tiny nor
    huge, and `mark_nonzero` stops at the first elements of a gradient's part that are not all zero. The count assumes
    these cases, which occur in nearly every training step.
    """
    if func._schema.name == "muonmesh::rescale":
        return
    if func._schema.name in ("muonmesh::fold", "muonmesh::apply"):
        numel, folds = sum(rows_of(args[3]).numels), func._schema.name == "muonmesh::fold"
        first, second, buffer = (sum(t.element_size() for t in column[:1]) for column in args[:3])
        yield numel * (first + 2 * second + buffer if folds else 2 * (first + second) + buffer)
        return
    if func._schema.name == "muonmesh::mark_nonzero":
        pieces, block, size = rows_of(args[1]), ROWS * COLS, args[0][0].element_size()
        yield from (math.ceil(n / (pieces.blocks * block)) * min(n, block) * size for n in pieces.numels)
        return
    name, written = func._schema.name.split("::")[1], set()
    for argument, value, writes in arguments(func, args, kwargs):
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_cuda]
        is_overwritten = argument.name in _OURS or _OVERWRITES.fullmatch(name) is not None
        overwrites = writes and (argument.is_out or is_overwritten)
        for tensor in tensors:
            if writes:
                written.add(id(tensor))
            yield _size(tensor) * (writes + (not overwrites))
    for tensor in outputs:
        if tensor.is_cuda and id(tensor) not in written:
            yield _size(tensor)


_OURS = ("diagonal", "exponents", "found", "inverse", "inverse_square", "mean", "out", "power", "squares")
"""Arguments of muonmesh's own operators that are written without being read."""

_OVERWRITES = re.compile(r"(_foreach_)?(copy|zero)_|(fill|random|normal|uniform)_")
"""Operations that write a tensor without reading its old values."""
