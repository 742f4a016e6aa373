"""EngineParameter: one parameter that ZeRO cuts into shards; under tensor parallelism, this rank's part of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.placing import placements_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import MeshLayout


@dataclass(frozen=True)
class EngineParameter:
    """The description of one parameter of an engine: name, shape, matrices and tensor-parallel placement.

    Attributes:
        name: Canonical name, unique over all ranks: an expert has its number among the experts of all ranks.
        shape: Global shape.
        matrices: How the parameter splits into matrices, see `split_matrices`; None for AdamW's parameters.
        tensor_parallel: The number of tensor-parallel ranks.
        placement: The torch placement of the parameter over the tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    matrices: Any
    tensor_parallel: int
    placement: Placement

    def within(self, ranks: tuple[int, ...]) -> MeshLayout:
        """Return the parameter's layout over a data-parallel group and its tensor-parallel peers, before ZeRO cuts it.

        Args:
            ranks: The global ranks of the data-parallel group.

        Raises:
            LayoutError: the group contains tensor-parallel peers.
        """
        size = self.tensor_parallel
        if size == 1:
            return MeshLayout.replicated(self.shape, ranks)
        # DeepSpeed's mesh is (data, tensor), row-major.
        column = dist.get_rank() % size
        grid = [rank - column + peer for rank in ranks for peer in range(size)]
        if any(rank % size != column for rank in ranks):
            found = f"a partition over the ranks {ranks}, which tensor parallelism of {size} shards among them"
            write = "Make the model without zero.Init, or set autotp_size to 1"
            raise LayoutError(explain_error(self.name, found, "one over data-parallel ranks", write))
        placements = placements_of(self.name, (Replicate(), self.placement))
        return MeshLayout(self.shape, (len(ranks), size), tuple(grid), placements)


def engine_parameter(
    parameter: Any, name: str, shape: tuple[int, ...], matrices: Any, *, tensor_parallel: int
) -> EngineParameter:
    """Return the description of a parameter after the engine has configured its modules.

    Args:
        parameter: The parameter that DeepSpeed will train.
        name: See `EngineParameter`.
        shape: The global shape, from before the engine was made.
        matrices: See `EngineParameter`.
        tensor_parallel: The number of tensor-parallel ranks.

    Raises:
        LayoutError: DeepSpeed has cut the parameter in a way that muonmesh does not know.
    """
    placement = _placement(name, getattr(parameter, DS_AUTOTP_UC_META, None) or {}, shape, tensor_parallel)
    known = EngineParameter(name, shape, matrices, tensor_parallel, placement)
    peers = MeshLayout(shape, (tensor_parallel,), tuple(range(tensor_parallel)), placements_of(name, (placement,)))
    needed = peers.local_shape(dist.get_rank() % tensor_parallel)
    held = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if held != needed:
        found = f"shape {held} in the engine"
        raise LayoutError(explain_error(name, found, f"{needed} of {shape}", "Leave its module as it is, or whole"))
    return known


def _placement(name: str, meta: dict[str, Any], shape: tuple[int, ...], size: int) -> Placement:
    """Return the placement by which AutoTP has cut a parameter, from AutoTP's notes for universal checkpoints.

    Raises:
        LayoutError: the parts are uneven.
    """
    dim = meta.get("partition_dim")
    if size == 1 or dim is None or meta.get("replicated"):
        return Replicate()
    widths = meta.get("sub_param_shard_widths") or [meta.get("partition_sizes") or [shape[dim] / size] * size]
    if len({width for some in widths for width in some}) > 1:
        found = f"uneven parts {widths} along dim {dim} under tensor parallelism"
        needed = f"{size} equal ones of each of its {len(widths)} parts"
        write = "Choose an autotp_size that divides its heads, or skip it in partition_config"
        raise LayoutError(explain_error(name, found, needed, write))
    return Shard(dim) if len(widths) == 1 else _StridedShard(dim, split_factor=len(widths))
