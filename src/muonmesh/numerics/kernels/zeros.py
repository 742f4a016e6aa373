"""Finds which of many gradients are exactly zero, in one launch: the operator `muonmesh::mark_nonzero`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import pinned
from muonmesh.numerics.kernels.portions import LOOKED
from muonmesh.numerics.kernels.triton_launch import Launch, operator


def _nonzero(gradients: Sequence[Tensor], entries: Sequence[int], found: Tensor) -> Iterator[Launch]:
    from muonmesh.numerics.kernels import lines

    tables: dict[torch.dtype, tuple[array[int], int]] = {}
    for gradient, entry in zip(gradients, entries, strict=True):
        if count := gradient.numel():
            rows, programs = tables.get(dtype := gradient.dtype) or (array("q"), 0)
            rows.extend((gradient.data_ptr(), entry, programs, count))
            tables[dtype] = rows, programs - -count // LOOKED
    for dtype, (rows, programs) in tables.items():
        table = pinned(torch.frombuffer(rows, dtype=torch.int64), found.device)
        yield lines.finding_nonzero(table, len(rows) // 4, programs, found, dtype)


mark_nonzero = operator("mark_nonzero(Tensor[] gradients, int[] entries, Tensor(a!) found)", _nonzero)
"""Write 1 to the entry of each gradient with an element that is not zero, or is NaN; leave the other entries.

Args:
    gradients: Contiguous; of `toolchain.DTYPES`; on one device.
    entries: The entry of each; several may share one.
    found: int32 (n,) on that device.
"""
