"""Full: loads whole tensors that rank 0 alone has, and checks them before torch sends any to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from muonmesh.checkpoint.fitting import names_apart, refuse
from muonmesh.comm.storage import this_rank
from muonmesh.comm.telling import agreed
from muonmesh.errors import StateError, explain_error


def load_full(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Any] | None,
    state: Mapping[str, Any] | None,
) -> None:
    """Hand full state dicts of rank 0 to all ranks, whatever holds their parameters. All ranks call it.

    It is torch's ``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``broadcast_from_rank0``, behind a look
    at what rank 0 has. Torch alone lets the other ranks wait for what rank 0 lacks, and writes some of the state before
    it finds what does not fit.

    Args:
        model: As those functions take it: plain, DDP, or sharded by DTensors.
        optimizer: The optimizer of the model's parameters.
        weights: On rank 0, what ``get_model_state_dict`` gave with ``full_state_dict``; None on the others.
        state: On rank 0, what ``get_optimizer_state_dict`` gave with it, flattened or not; None on the others.

    Raises:
        StateError: on every rank, before any weight or state has changed: an entry is missing, too much, or of another
            shape, or rank 0 has none. The message names each with the nearest name.
    """
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_here, state_here = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=flat)

    def check() -> None:
        if this_rank() != 0:
            return
        if weights is None or state is None:
            needed = "the full state dicts of the model and of the optimizer"
            raise StateError(explain_error("load_full", "None on rank 0", needed, "Read the file there"))
        wrong = _differences("weights ", model_here, weights) + _differences("", state_here, _flattened(state))
        refuse("full state dict", wrong)

    agreed(check, kind=StateError)
    first = this_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=torch.distributed.is_initialized())
    set_model_state_dict(model, dict(weights or {}) if first else {}, options=options)
    set_optimizer_state_dict(model, optimizer, dict(state or {}) if first else {}, options=options)


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return state by the names of torch's flattened form, in which it may be already."""
    if "state" not in state:
        return dict(state)
    found = {f"state.{name}.{key}": value for name, entry in state["state"].items() for key, value in entry.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            found |= {f"param_groups.{name}.{key}": group[key] for key in group if key != "params"}
    return found


def _differences(what: str, needed: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each tensor that is missing, that nothing asks for, or that has another shape."""
    lost, spare = sorted(needed.keys() - given.keys()), sorted(given.keys() - needed.keys())
    said = names_apart(what, lost, spare, needed, given)
    shapes = {name: (_shape(given[name]), _shape(needed[name])) for name in sorted(needed.keys() & given.keys())}
    misshapen = {name: shape for name, shape in shapes.items() if shape[0] != shape[1]}
    return said + [f"{what}{name} of shape {a}, where {b} is needed" for name, (a, b) in misshapen.items()]


def _shape(value: Any) -> tuple[int, ...] | None:
    """None of what is no tensor: settings, which the optimizer compares itself."""
    return tuple(value.shape) if isinstance(value, Tensor) else None
