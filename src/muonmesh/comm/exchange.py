"""Exchange: runs a Plan, which says which rank orthogonalizes each matrix."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.companions import CompanionExchange
from muonmesh.comm.owner import OwnerExchange
from muonmesh.comm.storage import this_rank
from muonmesh.comm.wire import Counts, Wire
from muonmesh.comm.work import Work
from muonmesh.layout import Plan
from muonmesh.layout.companion_plan import CompanionPlan


class Exchange:
    """Runs a Plan over a process group, by one `Wire`, and keeps the memory in which matrices travel.

    Matrices are moved by the `OwnerExchange`. What rules keep by row, column or matrix travels before them and after
    them, by the `CompanionExchange`. Flags, sums and counts are the same for both.

    Args:
        plan: The same on every rank of the group.
        group: Process group of exactly ``plan.ranks``; None when that is one rank.
        dtype: Dtype of the wire and of the orthogonalization.
        companion_dtype: Dtype of what rules keep by row, column or matrix, which travels too.
        device: Where the buffers live.
        blocks: How many blocks of momentum in int8 the ranks agree on.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        companion_dtype: torch.dtype = torch.float32,
        device: torch.device,
        blocks: int = 0,
    ) -> None:
        if group is None and len(plan.ranks) > 1:
            raise ValueError(f"group: found None for ranks {plan.ranks}; needed their process group")
        self.plan = plan
        self.group = group
        rank = this_rank() if group is not None else plan.ranks[0]
        peers = tuple(dist.get_process_group_ranks(group)) if group is not None else plan.ranks
        self._wire = Wire(plan.ranks, group)
        self._blocks, self._device = blocks, device
        self._owners = OwnerExchange(plan, self._wire, rank=rank, peers=peers, dtype=dtype, device=device)
        beside = CompanionPlan.beside(plan)
        self._carried: CompanionExchange | None = None
        if beside is not None:
            self._carried = CompanionExchange(
                beside, self._wire, rank=rank, peers=peers, dtype=companion_dtype, device=device
            )

    @property
    def counts(self) -> Counts:
        """What the last step did."""
        return self._wire.counts

    @property
    def steps(self) -> int:
        """How many steps have begun, for messages."""
        return self._wire.steps

    @property
    def memory(self) -> list[Tensor]:
        """What is kept from step to step."""
        return list(self._owners.memory.values())

    def reduce_flags(self, flags: Tensor) -> Tensor:
        """Begin a step: return the elementwise maximum of small integer flags over all ranks."""
        self._wire.steps += 1
        self._wire.counts = Counts()
        return self._wire.reduce(flags, dist.ReduceOp.MAX, "the agreement before the step")

    def reduce_sums(self, sums: Tensor, *, what: str = "the sum of the norms") -> Tensor:
        """Return the elementwise sum of an fp64 vector over all ranks; ``what`` names it in errors."""
        return self._wire.reduce(sums, dist.ReduceOp.SUM, what, counted=False)

    def run(self, work: Work) -> None:
        """Take every matrix of the plan through one step; all ranks of the group call it."""
        if self._blocks:
            largest = torch.zeros(self._blocks, dtype=torch.int32, device=self._device)
            work.measure_blocks(largest)
            self._wire.reduce(largest, dist.ReduceOp.MAX, "the agreement on blocks of momentum")
        if self._carried is not None:
            self._carried.gather(work.companions)
        self._owners.run(work, work.step_elementwise)
        if self._carried is not None:
            self._carried.scatter(work.companions)
