"""State bytes: the bytes of state that a rank keeps for each parameter, computed from the plan."""

from __future__ import annotations

from torch import Tensor

from muonmesh.comm.storage import Storage, local_of, this_rank
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision

_FP32 = 4


def state_bytes_of(planned: Planned, precision: Precision) -> dict[str, tuple[int, int]]:
    """Return the bytes of state that this rank keeps for each parameter after the first step, by name.

    The two numbers are all bytes, and the bytes that ``state_device`` keeps in CPU memory.

    Padding and other parameters of a flat buffer are left out. Scales of int8 blocks that several parameters of a flat
    buffer share are counted for the first of them.
    """
    found = dict[str, tuple[int, int]]()
    coded = set[Tensor]()
    for member in planned.members:
        local = local_of(member.tensor)
        master = precision.master if precision.master not in (None, local.dtype) else None
        # `shaped`: bytes of per-element state; `few`: bytes of state by row, column, matrix or parameter
        shaped = _elements(member, member.storage) * master.itemsize if master is not None else 0
        few = 0 if member.tensor in planned.matrices_of else _FP32  # the count of steps
        for state_layout in member.state_layouts.values():
            size = _elements(member, state_layout.storage) * state_layout.kept_dtype(precision).itemsize
            shaped, few = (shaped + size, few) if state_layout.companion is None else (shaped, few + size)
            if state_layout.kept_dtype(precision) != state_layout.saved_dtype(precision) and member.tensor not in coded:
                coded.add(member.tensor)
                few += _FP32 * planned.blocks.size(member.tensor)
        found[member.name] = shaped + few, shaped if precision.leaves(local.device) else 0
    return found


def _elements(member: OptimizedParameter, storage: Storage) -> int:
    """Return the number of elements of a storage that this rank holds."""
    if storage.layout is None:
        return local_of(member.tensor).numel()
    return sum(block.region.numel for block in storage.layout.blocks(this_rank()))
