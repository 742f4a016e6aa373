"""State: the Records of an engine as a nested state dict of tensors, for `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonmesh.checkpoint.entries import flat
from muonmesh.checkpoint.fitting import Fit, fit
from muonmesh.checkpoint.groups import settings_of
from muonmesh.checkpoint.ranks import agreed
from muonmesh.checkpoint.record import MODEL, STATE
from muonmesh.checkpoint.share import Share
from muonmesh.comm.storage import Storage
from muonmesh.comm.telling import tell_all
from muonmesh.integrations.deepspeed.optimizer import EngineMuon
from muonmesh.names import canonical_name
from muonmesh.step.slots import RUNNING


@torch.no_grad()
def get_state(engine: Any) -> dict[str, Any]:
    """Return the weights and the optimizer state of an engine by parameter name; all ranks call it.

    The tensors are DTensors, cut by rows over all ranks, and have the shape of the whole parameter. Trained weights are
    the fp32 weights. `muonmesh.checkpoint.save` writes the same tensors without a copy of them.

    Returns:
        ``{"model": {name: weights}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``

    Raises:
        StateError: a step was interrupted while it wrote.
    """
    optimizer: EngineMuon = engine.basic_optimizer
    agreed(optimizer.refuse_if_interrupted)
    shares: dict[str, Share] = {}
    for record in optimizer.checkpoint_records():
        for part in record.parts:  # one that no step has made yet is zero
            shares[f"{STATE}.{record.name}.{part.key}"] = Share(part.shape, part.dtype, {})
        shares.update(record.shares())
    mesh = init_device_mesh(engine.device.type, (dist.get_world_size(),))
    with optimizer.whole(engine.module, write=False):
        for name, tensor in _untrained(engine).items():
            whole = tensor.detach().contiguous()
            shares[f"{MODEL}.{name}"] = Share(tuple(whole.shape), whole.dtype, {(0,) * whole.ndim: whole})
        tensors = _cut_by_rows(shares, mesh)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, tensor in tensors.items():
        if name.startswith(f"{MODEL}."):
            state["model"][name.removeprefix(f"{MODEL}.")] = tensor
        else:
            owner, key = name.removeprefix(f"{STATE}.").rsplit(".", 1)
            state["optimizer"]["state"].setdefault(owner, {})[key] = tensor
    groups = state["optimizer"]["param_groups"] = []
    for group in optimizer.param_groups:
        left_out = ("parameters",) if group["algorithm"] == "muon" else ("parameters", "matrices")
        kept = {key: value for key, value in group.items() if key not in left_out}
        groups.append({**kept, "params": group["parameters"], "param_names": group["parameters"]})
    return state


@torch.no_grad()
def set_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Write what `get_state` returned, from whatever engine, into this engine; all ranks call it.

    Without ``param_groups`` in the state, the settings stay as they are.

    Raises:
        StateError: on every rank: a parameter or a state is missing, has another shape or belongs to another group.
            Nothing has been written.
    """
    optimizer: EngineMuon = engine.basic_optimizer
    saved_groups = state["optimizer"].get("param_groups")
    tensors = flat({"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}})
    records = optimizer.checkpoint_records()
    found: list[Fit] = []
    with optimizer.whole(engine.module, write=True):
        untrained = {name: (tensor, Storage(None, tuple(tensor.shape))) for name, tensor in _untrained(engine).items()}
        names = {name for some in tell_all([*(r.name for r in records), *untrained]) for name in some}

        def work_out() -> None:
            if saved_groups is not None:
                optimizer.check_groups([{**group, "parameters": group["params"]} for group in saved_groups])
            held = {name: TensorStorageMetadata(TensorProperties(t.dtype), t.shape, []) for name, t in tensors.items()}
            saved = settings_of(records)
            for entry in saved["parameters"].values():
                entry["fresh"] = False
            found.append(fit("the state", held, saved, records, untrained, names, strict=True))

        agreed(work_out)
        (fitting,) = found
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for at, box in fitting.shares[name].boxes.items() if name in fitting.shares else ():
                box.copy_(whole[_places(at, box)])
        agreed(fitting.check_counts)
        fitting.write()
    if saved_groups is not None:
        optimizer.restore_groups([{**group, "parameters": group["params"]} for group in saved_groups])
    optimizer.checkpoint_restored()


def _untrained(engine: Any) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers that a state dict keeps, by the names that a checkpoint has."""
    module = engine.module
    renamed, kept = engine.basic_optimizer.renamed(module), module.state_dict().keys()
    tensors = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    tensors += [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
    return {renamed.get(canonical_name(name), canonical_name(name)): tensor for name, tensor in tensors}


def _cut_by_rows(shares: Mapping[str, Share], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the tensors of which the ranks hold boxes, cut by rows over all ranks; all ranks call it.

    Counts, and what is one number for each matrix, are whole on every rank.
    """
    everyone = tell_all({name: (tuple(s.shape), s.dtype, list(s.boxes)) for name, s in shares.items()})
    told = {name: said for some in everyone for name, said in some.items()}
    first = {
        (name, at): rank for rank, some in reversed([*enumerate(everyone)]) for name in some for at in some[name][2]
    }
    found: dict[str, Tensor] = {}
    for name in sorted(told):
        shape, dtype, _ = told[name]
        whole = torch.zeros(shape, dtype=dtype, device=mesh.device_type)
        for at, box in shares[name].boxes.items() if name in shares else ():
            if first[name, at] == dist.get_rank():
                whole[_places(at, box)] = box
        dist.all_reduce(whole.view(-1).view(torch.uint8))  # adding zeros to bytes keeps every bit, of -0 too
        small = not shape or name.rpartition(".")[2] in RUNNING
        found[name] = whole if small else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    return found


def _places(at: tuple[int, ...], box: Tensor) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(at, box.shape, strict=True))
