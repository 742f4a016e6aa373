"""Checkpoint: loading optimizer state without losing precision, and refusing what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.comm.storage import Storage, local_of, local_shape
from muonmesh.errors import StateError, explain_error
from muonmesh.slots import RUNNING, Precision, running_shape

_MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "master")
_RESHARD = "Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which reshards"


class Place(NamedTuple):
    """Where a parameter lives, where its momentum does, and how many matrices it holds."""

    storage: Storage
    state: Storage
    matrices: int


def restore_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    precision: Precision,
    places: Mapping[Tensor, Place],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Load a state dict through torch's ``load``, then undo its casts to the parameters' dtypes.

    torch casts every state tensor to its parameter's dtype, which would round the fp32 momentum and masters of a
    bf16 model; they are taken from the state dict again. Settings that the saved groups lack keep their values.

    Args:
        optimizer: Its groups and state are written.
        state_dict: As from ``state_dict()``.
        precision: The dtypes to keep.
        places: Where each parameter lives.
        load: Torch's ``load_state_dict``.

    Raises:
        StateError: before anything is loaded, if the state does not fit.
    """
    given: dict[str, Any] = {}
    before = [dict(group) for group in optimizer.param_groups]

    def inspect(_: torch.optim.Optimizer, seen: dict[str, Any]) -> None:
        given.update(seen)
        _check(before, seen, places)

    def mend(_: torch.optim.Optimizer) -> None:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            for key, value in old.items():
                group.setdefault(key, value)
            for key in ("matrices", "param_names"):  # a checkpoint may have turned tuples into lists
                if key in old:
                    group[key] = old[key]
        for parameter, saved in _pairs(before, given):
            for key, value in saved.items():
                if key == "step":  # which torch 1.11 kept as a number
                    value = torch.as_tensor(value)
                if isinstance(value, Tensor):
                    optimizer.state[parameter][key] = _restored(key, value, parameter, precision)

    # Ours is the last hook before torch loads and the first after it, so users' hooks see what they expect.
    handles = [
        optimizer.register_load_state_dict_pre_hook(inspect),
        optimizer.register_load_state_dict_post_hook(mend, prepend=True),
    ]
    try:
        load(dict(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def _pairs(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """Return each parameter with its saved state, if it has any."""
    pairs = []
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if state_dict["state"].get(key):
                pairs.append((parameter, state_dict["state"][key]))
    return pairs


def _restored(key: str, value: Tensor, parameter: Tensor, precision: Precision) -> Tensor:
    device = parameter.device
    if key == "step":
        return value.detach().clone().to("cpu" if device.type == "cpu" else device, torch.float32)
    if key in RUNNING:
        dtype = torch.float32
    elif key == "momentum_buffer":
        dtype = precision.state
    elif key == "master":
        dtype = precision.master or value.dtype
    else:
        dtype = precision.master or parameter.dtype
    return value.detach().to(device, dtype, copy=True)


def _check(groups: list[dict[str, Any]], state_dict: Mapping[str, Any], places: Mapping[Tensor, Place]) -> None:
    saved_groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
        raise StateError(
            f"found {len(saved_groups)} groups of {[len(g['params']) for g in saved_groups]} parameters; needed "
            f"{len(groups)} of {[len(g['params']) for g in groups]}. Build the groups as when the state was saved"
        )
    for group, saved in zip(groups, saved_groups, strict=True):
        if "lr" in saved and saved["lr"] is None:
            raise StateError(
                f"group {group['name']!r}: found lr None, which torch leaves where one saved group is loaded into "
                "several; needed a learning rate. Build the groups as when the state was saved"
            )
        for key in ("algorithm", "matrices"):
            if key in saved and key in group and _plain(saved[key]) != _plain(group[key]):
                raise StateError(
                    f"group {group['name']!r}: found {key} {saved[key]!r} in the state; needed {group[key]!r}, as this "
                    "optimizer was built. Build the groups as when the state was saved"
                )
        for parameter, name, key in zip(group["params"], group["param_names"], saved["params"], strict=True):
            entry = state_dict["state"].get(key)
            if entry:
                _check_entry(name, parameter, places[parameter], group["algorithm"], entry)


def _check_entry(name: str, parameter: Tensor, place: Place, algorithm: str, entry: Mapping[str, Any]) -> None:
    needed = "momentum_buffer" if algorithm == "muon" else "exp_avg"
    if needed not in entry:
        raise StateError(
            explain_error(
                name,
                f"state {sorted(map(str, entry))}",
                f"{needed!r}: the parameter belongs to {algorithm}",
                "Load the state of an optimizer of the same kind, or start with fresh state",
            )
        )
    for key in RUNNING:
        if key in entry and tuple(entry[key].shape) != running_shape(place.matrices):
            found, shape = f"{key} of shape {tuple(entry[key].shape)}", running_shape(place.matrices)
            raise StateError(explain_error(name, found, f"{shape}, one a matrix", "Split it as when it was saved"))
    for key in _MOMENTS:
        value = entry.get(key)
        if value is None:
            continue
        storage = place.state if key == "momentum_buffer" else place.storage
        if not _fits(value, storage, parameter):
            raise StateError(
                explain_error(
                    name, f"{key} {_told(value)}", f"{_needed(storage, parameter)} as the parameter", _RESHARD
                )
            )


def _fits(value: Tensor, storage: Storage, parameter: Tensor) -> bool:
    if not isinstance(value, DTensor) or storage.mesh is None:
        return not isinstance(value, DTensor) and storage.mesh is None and value.shape == parameter.shape
    expected = local_shape(storage)
    placed = tuple(value.placements) == storage.placements and tuple(value.shape) == storage.shape
    return placed and tuple(local_of(value).shape) == expected


def _needed(storage: Storage, parameter: Tensor) -> str:
    if storage.mesh is None:
        return _told(parameter)
    return f"a DTensor of shape {storage.shape} placed {storage.placements}, {local_shape(storage)} here"


def _told(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {shape} placed {tuple(tensor.placements)}, {tuple(local_of(tensor).shape)} here"
    return f"a plain tensor of shape {shape}"


def _plain(value: Any) -> Any:
    """Return nested lists for nested tuples, so that both compare equal."""
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
