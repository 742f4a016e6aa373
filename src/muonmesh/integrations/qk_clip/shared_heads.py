"""SharedHeads: which heads of attention modules ranks have in common, and which of them a rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from muonmesh.comm.gather_objects import first_difference, gather_objects
from muonmesh.errors import explain_error
from muonmesh.integrations.qk_clip.rows import Attention


class SharedHeads:
    """The heads of all attention modules that the ranks of a group have, by the modules' names.

    Ranks may have other modules: stages of a pipeline. So they tell each other theirs here, once. All ranks make it.

    Args:
        group: The ranks.
        heads_by_name: The number of heads of each attention module of this rank, in the order of its logits.
        device: The device of the logits.

    Raises:
        ValueError: the numbers of heads of a module differ; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, heads_by_name: Mapping[str, int], device: torch.device) -> None:
        self.group = group
        of_ranks = gather_objects(dict(heads_by_name), group=group)
        if (difference := first_difference(of_ranks)) is not None:
            name, *ranks = difference
            problem = " and ".join(f"{of_ranks[rank][name]} heads on rank {rank} of the group" for rank in ranks)
            needed, write = "the same module on all ranks", "Pass process_group= with the ranks that share the model"
            raise ValueError(explain_error(name, problem, needed, write))
        of_all = {name: heads for names in of_ranks for name, heads in names.items()}
        starts = dict(zip(of_all, accumulate(of_all.values(), initial=0), strict=False))
        indices = [starts[name] + head for name, heads in heads_by_name.items() for head in range(heads)]
        self._total, self._indices = sum(of_all.values()), torch.tensor(indices, dtype=torch.int64, device=device)

    def largest(self, largest: Tensor) -> Tensor:
        """Return the largest logit of each head of this rank over all ranks of the group, by one all-reduce.

        Args:
            largest: The largest logit of each head on this rank, fp32 (heads,).
        """
        of_all = largest.new_full((self._total,), -torch.inf)
        of_all[self._indices] = largest
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=self.group)
        return of_all[self._indices]


def first_head(attention: Attention, count: int) -> int:
    """Return the index of the first head that this rank computes; with tensor parallelism, from its query weight.

    Raises:
        ValueError: the query weight does not show which heads this rank computes.
    """
    if count == attention.heads:
        return 0
    if parts_of_heads(attention) * count == attention.heads:
        mesh = getattr(*attention.queries).device_mesh
        return int(mesh.get_local_rank(mesh.ndim - 1)) * count
    problem = f"the logits of {count} of {attention.heads} heads"
    needed = "to know which: a weight that is a DTensor, cut by heads along the last axis of its mesh"
    raise ValueError(explain_error(attention.name, problem, needed, "Write clip.record(module, largest, first=...)"))


def parts_of_heads(attention: Attention) -> int:
    """Return among how many ranks tensor parallelism cuts the query weight, the last axis of its mesh; 1 without it.

    Outside of a forward, this may also be the cut by FSDP.
    """
    weight = getattr(*attention.queries)
    if isinstance(weight, DTensor) and weight.placements and isinstance(weight.placements[-1], Shard):
        return int(weight.device_mesh.size(weight.device_mesh.ndim - 1))
    return 1
