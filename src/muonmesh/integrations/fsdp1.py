"""FSDP1: describes where FullyShardedDataParallel keeps the parameters that it has flattened.

FullyShardedDataParallel puts the parameters of a module end to end in one flat tensor, pads it, and gives each rank an
equal part. With ``use_orig_params=True``, each parameter of the model is then a view of the elements that the rank
holds; the view may be empty::

    groups = muonmesh.split_params(model)  # before wrapping: flat pieces have no shape or role
    model = FullyShardedDataParallel(model, use_orig_params=True, ...)
    optimizer = muonmesh.Muon(groups, lr=3e-4, layouts=declared_layouts(model))
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate as TorchReplicate

from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Declared, FlatShards, Interval, MeshLayout, Replicate
from muonmesh.names import canonical_name


def declared_layouts(model: nn.Module) -> dict[str, Declared]:
    """Return the layout of every parameter that FSDP1 has flattened, for ``Muon(..., layouts=...)``.

    All sharding strategies of FSDP1 work: whole on every rank (NO_SHARD), sharded over all ranks, and sharded within
    groups of ranks with replicas in the other groups (HYBRID_SHARD). No communication.

    Args:
        model: A model that is, or contains, a ``FullyShardedDataParallel``.

    Raises:
        ValueError: the model has no ``FullyShardedDataParallel``.
        LayoutError: a wrapper was made without ``use_orig_params=True``, so the model has only flat parameters.
    """
    wrappers = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    if not wrappers:
        problem = "no module wrapped by FullyShardedDataParallel"
        write = "Pass what FullyShardedDataParallel(model, use_orig_params=True) returns; fully_shard needs no layouts"
        raise ValueError(explain_error("declared_layouts", problem, "a model under FSDP1", write))
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    layouts: dict[str, Declared] = {}
    for wrapper in wrappers:
        if wrapper._handle is not None and world_size() > 1:
            layouts.update(_of_handle(wrapper, wrapper._handle, names))
    return layouts


def _of_handle(wrapper: FullyShardedDataParallel, handle: Any, names: dict[int, str]) -> dict[str, Declared]:
    """Return the layouts of the parameters in one flat buffer."""
    flat = handle.flat_param
    if flat._params is None:
        problem, needed = "one flat parameter instead of them", "views of it, one for each of them"
        write = "Write FullyShardedDataParallel(..., use_orig_params=True), or shard with fully_shard"
        raise LayoutError(explain_error(", ".join(flat._fqns), problem, needed, write))
    group = wrapper.process_group
    assert group is not None
    sharing = dist.get_process_group_ranks(group)
    if not handle.uses_sharded_strategy:
        mesh = DeviceMesh.from_group(group, handle.device.type)
        return {names[id(p)]: (mesh, [TorchReplicate()]) for p in flat._params}
    # HYBRID_SHARD: another group of ranks is this group, shifted by the distance from this rank to its peer there.
    copies, me = getattr(wrapper, "_inter_node_pg", None), this_rank()
    peers = [me] if copies is None else dist.get_process_group_ranks(copies)
    ranks = tuple(rank + peer - me for peer in peers for rank in sharing)
    places = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
    offsets = [ends for ends, is_padding in places if not is_padding]
    layouts: dict[str, Declared] = {}
    for parameter, shape, (first, last) in zip(flat._params, flat._shapes, offsets, strict=True):
        within = MeshLayout(tuple(shape), (len(peers), len(sharing)), ranks, (Replicate(), Replicate()))
        layouts[names[id(parameter)]] = FlatShards.in_buffer(
            within, [1], Interval(0, last + 1 - first, first), flat._sharded_size.numel() * len(sharing)
        )
    return layouts
