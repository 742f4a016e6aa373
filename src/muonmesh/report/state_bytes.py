"""State bytes: how many bytes of state a rank keeps of each parameter, told from the plan before there is any."""

from __future__ import annotations

import math

from torch import Tensor

from muonmesh.comm.storage import Storage, local_of, this_rank
from muonmesh.step.members import Member
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision

_FP32 = 4


def state_bytes_of(planned: Planned, precision: Precision) -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank keeps of each parameter once a step has been taken, by name.

    They are all of them, and those that ``state_device`` keeps away from a device.

    The padding and the neighbors of a flat buffer are left out. Scales of int8 blocks that several parameters of a
    flat buffer share are counted with the first of them.
    """
    found = dict[str, tuple[int, int]]()
    coded = set[Tensor]()
    for member in planned.members:
        local = local_of(member.tensor)
        master = precision.master if precision.master not in (None, local.dtype) else None
        each = _elements(member, member.storage)
        # `shaped`: bytes of what has a number for each element; `few`: of what has one for a row, a matrix or less
        shaped, few = each * master.itemsize if master is not None else 0, 0
        # The count of steps, or the running norms.
        few += _FP32 * 2 * len(planned.matrices_of[member.tensor]) if member.tensor in planned.matrices_of else _FP32
        for state_layout in member.state_layouts.values():
            size = _elements(member, state_layout.storage) * state_layout.kept_dtype(precision).itemsize
            shaped, few = (shaped + size, few) if state_layout.companion is None else (shaped, few + size)
            if state_layout.kept_dtype(precision) != state_layout.saved_dtype(precision) and member.tensor not in coded:
                coded.add(member.tensor)
                few += _FP32 * planned.blocks.size(member.tensor)
        found[member.name] = shaped + few, shaped if precision.leaves(local.device) else 0
    return found


def _elements(member: Member, storage: Storage) -> int:
    """Return how many elements this rank stores of what lives there."""
    if storage.layout is None:
        return local_of(member.tensor).numel()
    return sum(math.prod(block.region.shape) for block in storage.layout.blocks(this_rank()))
