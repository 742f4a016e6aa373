"""Traffic of one rank in a step, read off its schedule, and the bytes of state that it keeps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.factored_exchange import directions_of
from muonmesh.comm.schedule import Stage, stages_of
from muonmesh.comm.step_callbacks import Batching
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.layout import Plan
from muonmesh.layout.factored_plan import FactoredPlan
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import Precision


class Carried(NamedTuple):
    """The traffic of one rank for state by row, column or matrix: collectives, and elements in both directions."""

    collectives: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in a step.

    Attributes:
        stages: The buckets with transfers.
        staying: The assignments that the rank owns and that need no transfer.
        sent: Elements that the rank sends, in both directions, by number of the parameter.
        received: The number of elements that it receives.
        collectives: Number of collectives in which the rank takes part, including the sums that rules need.
        messages: Number of ranks that it sends to or receives from, summed over the collectives.
        carried: The traffic of state by row, column or matrix, which the other attributes leave out.
    """

    stages: Sequence[Stage]
    staying: tuple[int, ...]
    sent: Counter[int]
    received: int
    collectives: int
    messages: int
    carried: Carried


def traffic(plan: Plan, rank: int) -> Traffic:
    """Return the traffic of ``rank`` in a step."""
    stages, trailing = stages_of(plan, rank, plan.ranks, Batching())
    packed_all = [packed for stage in stages for packed in (stage.to_owners, *stage.back)]
    sent = Counter[int]()
    for row in itertools.chain.from_iterable(packed.leaving for packed in packed_all):
        sent[row.parameter] += row.piece.numel
    sums = 2 * sum(bool(stage.summed) for stage in stages)  # the largest exponents, and the integers
    return Traffic(
        stages,
        tuple(
            number
            for batches in (*(stage.local for stage in stages), trailing)
            for batch in batches
            for number in batch.assignments
        ),
        sent,
        sum(packed.receives for packed in packed_all),
        sum(stage.gathers + len(stage.back) for stage in stages) + sums,
        sum(max(sum(map(bool, packed.sent)), sum(map(bool, packed.received))) for packed in packed_all),
        _carried(plan, rank),
    )


def _carried(plan: Plan, rank: int) -> Carried:
    """Return the traffic of state that travels in addition to the matrices of a plan; see `FactoredPlan`."""
    beside = FactoredPlan.beside(plan)
    directions = () if beside is None else directions_of(beside.plan, rank, plan.ranks).values()
    return Carried(
        *map(sum, zip(*((moves, packed.sends, packed.receives) for packed, moves in directions), strict=True))
    )


def state_bytes_of(planned: StepPlan, precision: Precision) -> dict[str, tuple[int, int]]:
    """Return the bytes of state that this rank keeps for each parameter after the first step, by name.

    The two numbers are all bytes, and the bytes that ``state_device`` keeps in CPU memory.

    Padding and other parameters of a flat buffer are left out. Scales of int8 blocks that several parameters of a flat
    buffer share are counted for the first of them.
    """
    bytes_by_name = dict[str, tuple[int, int]]()
    coded = set[Tensor]()
    for member in planned.members:
        local, total, host = local_of(member.tensor), 0, 0
        for form in member.forms(precision):
            stored = form.layout.storage.layout
            blocks = () if stored is None else stored.blocks(this_rank())
            elements = math.prod(form.shape) if stored is None else sum(block.region.numel for block in blocks)
            total += elements * form.dtype.itemsize
            if form.layout.side == "element" and form.device != local.device:
                host += elements * form.dtype.itemsize
            if form.dtype == torch.int8 and member.tensor not in coded:
                coded.add(member.tensor)
                total += torch.float32.itemsize * planned.blocks.size(member.tensor)
        bytes_by_name[member.name] = total, host
    return bytes_by_name
