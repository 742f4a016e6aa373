"""Convert: turns the state of another optimizer into a state dict that `muonmesh.Muon` loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muonmesh.checkpoint.form import PARAMETER, check_state_dict, misfit
from muonmesh.checkpoint.state import REFUSED
from muonmesh.comm.storage import local_of
from muonmesh.errors import StateError, explain_error
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.runtime import Runtime
from muonmesh.step.state_layout import NUMBERS, wrong_state
from muonmesh.tools.checkpoints.archive import read_archive
from muonmesh.tools.checkpoints.named_groups import NamedGroup, SourceState, in_saved_order, named_groups
from muonmesh.tools.local_part import local_part
from muonmesh.tools.migration.package import ALGORITHMS, ParameterState
from muonmesh.tools.migration.packages import PACKAGES, PackageName, foreign_setting, groups_of

_OR_NEW = ". To begin with new state there, write convert(..., strict=False)"

Source: TypeAlias = Optimizer | Mapping[str, Any] | str | os.PathLike[str]
Sources: TypeAlias = Source | Sequence[Source]


@plain_modes()
def convert(
    source: Sources,
    optimizer: Optimizer,
    *,
    package: PackageName | None = None,
    params: Sequence[Sequence[str | Tensor]] | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Return the state of another optimizer as a state dict that `muonmesh.Muon` loads, without executing code from it.

    With the settings of `muonmesh.convert_settings`, the next step of muonmesh is then the next step of the other Muon,
    up to rounding. `convert` does not read settings: the optimizer that loads the state dict keeps its own::

        optimizer = mm.from_model(model, **mm.convert_settings(muon, adamw))
        optimizer.load_state_dict(muonmesh.checkpoint.convert([muon, adamw], optimizer))

    Args:
        source: An optimizer of a known package, with its state; or the result of its ``state_dict``; or a file of
            ``torch.save`` with this result. Pass a list if several sources hold the state, such as torch's Muon and
            AdamW, or one file for each rank. From a file with several state dicts, pass these:
            ``[saved["muon"], saved["adamw"]]``. All ranks make the same call.
        optimizer: The optimizer of muonmesh that takes the state.
        package: The package that wrote the state. Needed unless every source is an optimizer. ``"torch"`` is right for
            torch's Muon and AdamW together.
        params: Needed if the state has no names: for each group of the source a list of its parameters, or their names,
            in the order in which the other optimizer got them. With several sources, first the groups of the first
            source, then the groups of the second, and so on. If every source has as many groups as ``params``, such as
            one file for each rank, ``params`` applies to each source.
        strict: Whether every parameter must get state. If False, a parameter starts with new state if the source has
            none of it, or that of another algorithm than trains it here, such as dion's Lion.

    Returns:
        ``{"state": ..., "param_groups": ...}`` by number, with names. Momentum is an average, in fp32 where it was a
        sum. Each tensor has the layout of muonmesh's state: a DTensor stays a DTensor, and a whole tensor is cut into
        shards.

    Raises:
        StateError: the state belongs to another model or, by a setting of its groups, to another package; or it is
            incomplete, differs between sources, or holds values that no step of Muon or AdamW leaves.
        FileError: a file cannot be read, holds more than data, or has changed since it was written.
        TypeError, ValueError: the source belongs to no known package, or an argument is wrong.
    """
    recipients = _recipients(optimizer)
    sources: Sequence[Any] = source if isinstance(source, list | tuple) else [source]
    opened = [state for single_source in sources for state in _opened(single_source, package)]
    orders = iter(_orders(params, [len(saved.groups) for saved in opened]))
    groups = [group for saved in opened for group in named_groups(saved, orders, recipients)]
    states: dict[str, ParameterState] = {}
    for group in in_saved_order(groups, recipients):
        _check_package(group)
        keys = PACKAGES[group.package].state_keys
        for name, entry in zip(group.names, group.entries, strict=True):
            if entry:  # another source may have the missing state
                state = keys.read(name, group.settings, entry)
                if name in states:
                    _check_agreement(name, states[name], state)
                states.setdefault(name, state)
    return _state_dict(optimizer.param_groups, recipients, states, strict=strict)


# ---------------------------------------------------------------- muonmesh's optimizer


def _recipients(optimizer: Optimizer) -> dict[str, OptimizedParameter]:
    """Return each parameter of the muonmesh optimizer that takes the state, by name.

    Raises:
        TypeError: the optimizer is not muonmesh's.
        StateError: a parameter is a flat or declared shard, or its rule keeps more than momentum.
    """
    if not isinstance(getattr(optimizer, "_runtime", None), Runtime):
        fault, write = f"a {type(optimizer).__name__}", "Write convert(source, muonmesh.from_model(model))"
        raise TypeError(explain_error("optimizer", fault, "a muonmesh.Muon over the model", write))
    recipients: dict[str, OptimizedParameter] = {}
    for member in placed_members(optimizer):
        algorithm = optimizer.param_groups[member.group]["algorithm"]
        if member.tensor.shape != torch.Size(member.storage.shape) and member.storage.mesh is None:
            fault = f"a flat or declared shard of shape {tuple(member.tensor.shape)}"
            needed = "a whole parameter or a DTensor"
            write = "Convert for the whole model, and load that with set_optimizer_state_dict"
            raise StateError(explain_error(member.name, fault, needed, write))
        if algorithm != "adamw" and [*member.state_layouts] != ["momentum_buffer"]:
            fault = f"rule {algorithm!r}, which keeps {', '.join(member.state_layouts)}"
            needed = "momentum alone, which all packages keep"
            write = 'Write rule="muon", or train on with new state'
            raise StateError(explain_error(member.name, fault, needed, write))
        recipients[member.name] = member
    return recipients


# ---------------------------------------------------------------- the other optimizer


def _opened(source: Source, package: PackageName | None) -> list[SourceState]:
    """Return the states in a source: an optimizer, a state dict, or a file.

    Raises:
        ValueError: the package is unknown, or is not given and the source does not tell it.
    """
    if package is None and isinstance(source, Optimizer):
        package = groups_of(source)[0]
    if package not in PACKAGES:
        fault = "no package, which a state dict does not tell" if package is None else repr(package)
        needed = "one of " + ", ".join(map(repr, PACKAGES))
        write = 'Write convert(source, optimizer, package="torch"), or whose state it is. State of muonmesh needs no '
        raise ValueError(explain_error("package", fault, needed, f"{write}convert"))
    if isinstance(source, Optimizer):
        return _parts({"param_groups": source.param_groups, "state": source.state}, "source", package)
    if not isinstance(source, str | os.PathLike):
        return _parts(source, "source", package)
    write = "Load it yourself if you trust whoever wrote it, and hand over the state dict"
    needed = "tensors and plain values alone, in a file by torch.save"
    return _parts(read_archive(source, needed=needed, remedy=write), str(source), package)


def _parts(saved: Any, subject: str, package: PackageName) -> list[SourceState]:
    """Return the states in the result of an optimizer's ``state_dict``, after checking its form.

    The result may be nested: Megatron chains and wraps optimizers.

    Raises:
        StateError: it has another form.
    """
    if isinstance(saved, list | tuple):
        return [part for inner in saved for part in _parts(inner, subject, package)]
    if isinstance(saved, Mapping) and "optimizer" in saved and "param_groups" not in saved:
        return _parts(saved["optimizer"], subject, package)
    if isinstance(saved, Mapping) and "state" in saved and "param_groups" in saved:
        check_state_dict(subject, saved, "Hand over what state_dict() returned, as it is")
        return [SourceState(package, saved["param_groups"], saved["state"])]
    keys = ", ".join(map(str, list(saved)[:8])) if isinstance(saved, Mapping) else ""
    fault = keys or f"an empty {type(saved).__name__}" if isinstance(saved, Mapping) else f"a {type(saved).__name__}"
    needed = "what an optimizer's state_dict() returned: state and param_groups"
    write = "Write saved = torch.load(path, weights_only=True), and convert([saved[key], ...], optimizer, "
    write += "package=...) with its key, or with the keys of all optimizers"
    raise StateError(explain_error(subject, fault, needed, write))


def _orders(
    params: Sequence[Sequence[str | Tensor]] | None, groups: Sequence[int]
) -> Sequence[Sequence[str | Tensor] | None]:
    """Return for each group of all sources its parameters from the argument ``params``, or None without ``params``.

    Raises:
        ValueError: ``params`` has another form or another number of groups.
    """
    if params is None:
        return [None] * sum(groups)
    fault = misfit("params", params, [[PARAMETER]])
    if fault is None and len(params) != sum(groups) and {*groups} != {len(params)}:
        needed = f"those of {' + '.join(map(str, groups))} groups"
        fault = "params", f"parameters for {len(params)} groups", needed
    if fault is not None:
        raise ValueError(explain_error(*fault, "Write params=[group, ...], a list for each group"))
    return [*params] * (sum(groups) // max(1, len(params)))


def _check_package(group: NamedGroup) -> None:
    """Raise a StateError if the group shows that another package saved it."""
    second = PACKAGES[group.package].state_keys.second
    has_momentum = any(entry and second not in entry for entry in group.entries)
    foreign = foreign_setting(group.package, group.settings, has_momentum=has_momentum)
    if foreign is not None:
        needed = f"groups as {group.package} makes them, since some Muons keep averages of gradients and some sums"
        write = "Name the package that wrote the state, or begin with new state. If the setting is your own, remove it "
        write += "from the group, or add it to muonmesh.settings.FOREIGN_KEYS"
        raise StateError(explain_error("source", f"{foreign} in a group", needed, write))


def _check_agreement(name: str, first: ParameterState, second: ParameterState) -> None:
    """Raise a StateError if two sources have different states of one parameter, such as files of different steps."""
    keys = ("momentum_buffer", "step")  # moments may differ by the rounding of sums over ranks
    pairs = [(local_of(first.state[key]), local_of(second.state[key])) for key in keys if key in first.state]
    if first.algorithm != second.algorithm or not all(
        tensor.shape == other.shape and torch.equal(tensor, other.to(tensor)) for tensor, other in pairs
    ):
        fault = "different states in two sources"
        write = "Hand over the state of one step, once for each parameter"
        raise StateError(explain_error(name, fault, "one state of it", write))


# ---------------------------------------------------------------- translation


def _state_dict(
    groups: Sequence[Mapping[str, Any]],
    recipients: Mapping[str, OptimizedParameter],
    states: Mapping[str, ParameterState],
    *,
    strict: bool,
) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    saved: list[dict[str, Any]] = []
    for group in groups:
        algorithm = "muon" if is_matrix_rule(group["algorithm"]) else "adamw"
        first = sum(len(earlier["params"]) for earlier in saved)
        numbers = range(first, first + len(group["params"]))
        saved.append({"name": group["name"], "params": list(numbers), "param_names": list(group["param_names"])})
        for number, name in zip(numbers, group["param_names"], strict=True):
            recipient, remembered = recipients[name], states.get(name)
            if not strict and (remembered is None or remembered.algorithm != algorithm):
                continue
            if remembered is None:
                needed = "what its optimizer keeps after a step with a gradient"
                write = f"Hand over all optimizers of the model, and the files of all ranks{_OR_NEW}"
                raise StateError(explain_error(name, "no state of it in the source", needed, write))
            if remembered.algorithm != algorithm:
                needed = f"that of {algorithm}, to which the parameter belongs here"
                write = f'Write overrides={{r"{name}": "{remembered.algorithm}"}} for from_model{_OR_NEW}'
                if remembered.algorithm not in ALGORITHMS:
                    write = _OR_NEW.removeprefix(". ")
                raise StateError(explain_error(name, f"the state of {remembered.algorithm}", needed, write))
            state[number] = {
                key: _placed(recipient, key, value) if key in recipient.state_layouts else value
                for key, value in remembered.state.items()
            }
            for key, value in state[number].items():
                if wrong := wrong_state(key, local_of(value)):
                    raise StateError(explain_error(name, f"{wrong} in {key}", NUMBERS, REFUSED["numbers"]))
    return {"state": state, "param_groups": saved}


def _placed(recipient: OptimizedParameter, key: str, value: Tensor) -> Tensor:
    """Return a saved tensor in the layout of muonmesh's state: unchanged if it has this layout, else gathered and cut.

    Raises:
        StateError: the tensor has another shape than the parameter.
    """
    storage = recipient.state_layouts[key].storage
    shape = torch.Size(storage.shape)
    if value.shape != shape and len(shape) > 2 and value.shape == (shape[0], prod(shape[1:])):
        value = value.reshape(shape)  # a convolution that was flattened
    if value.shape != shape:
        fault, needed = f"{key} of shape {tuple(value.shape)}", f"{tuple(shape)}, that of the parameter"
        write = "Convert for the model that the state was saved with, whole or as DTensors"
        raise StateError(explain_error(recipient.name, fault, needed, write))
    if isinstance(value, DTensor):
        if storage.mesh == value.device_mesh and storage.placements == tuple(value.placements):
            return value
        value = value.full_tensor()
    if storage.layout is None or storage.mesh is None:
        return value
    return storage.wrap(local_part(value, storage.layout))
