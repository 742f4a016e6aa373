"""Axes: the process groups of Megatron's that say who holds what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from muonmesh.errors import LayoutError, explain_error
from muonmesh.integrations.megatron.declared import mesh_of

_READ = ["dp_cp", "tp", "expt_dp", "expt_tp", "ep", "pp"]
"""The groups of a ProcessGroupCollection that are read."""


@dataclass(frozen=True)
class Axes:
    """The groups of this rank.

    Attributes:
        data: Over which gradients are averaged, that of context parallelism in it.
        tensor: Whose ranks share a weight.
        expert_data: The same for experts; None where a collection has no such group, and there are none.
        expert_tensor: Likewise.
        expert_rank: Of this rank among those of expert parallelism.
        stages: How many pipeline stages there are.
    """

    data: dist.ProcessGroup
    tensor: dist.ProcessGroup
    expert_data: dist.ProcessGroup | None
    expert_tensor: dist.ProcessGroup | None
    expert_rank: int
    stages: int

    @staticmethod
    def of(collection: Any) -> Axes:
        """Read them off a ProcessGroupCollection; None: that of `parallel_state`."""
        if collection is None:
            collection = ProcessGroupCollection.use_mpu_process_groups(_READ)
        return Axes(
            getattr(collection, "dp_cp", None) or collection.dp,
            collection.tp,
            getattr(collection, "expt_dp", None),
            getattr(collection, "expt_tp", None),
            collection.ep.rank() if getattr(collection, "ep", None) is not None else 0,
            collection.pp.size(),
        )

    def mesh(self, *, expert: bool, device: str) -> DeviceMesh:
        """Return the mesh (data, tensor) of all ranks that hold some of a parameter; sends nothing.

        Raises:
            LayoutError: there are experts, and no groups of theirs.
        """
        data, tensor = (self.expert_data, self.expert_tensor) if expert else (self.data, self.tensor)
        if data is None or tensor is None:
            found, needed = "experts, and no expt_dp or expt_tp in it", "the groups of the ranks that hold them"
            write = "Pass a collection with both, such as ProcessGroupCollection.use_mpu_process_groups()"
            raise LayoutError(explain_error("pg_collection", found, needed, write))
        mesh = mesh_of(data, tensor, device)
        assert mesh is not None
        return mesh
