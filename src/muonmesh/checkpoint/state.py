"""State: prepares the result of `Muon.state_dict`, and checks and loads a state dict without torch's casts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.checkpoint.form import check_state_dict
from muonmesh.comm.storage import local_of, world_size
from muonmesh.errors import StateError, explain_error
from muonmesh.layout import Declared
from muonmesh.layout.matrix import as_tuples
from muonmesh.names import canonical_name
from muonmesh.numerics.rules import is_matrix_rule, rule_of, step_count
from muonmesh.numerics.setting import plain
from muonmesh.settings import FRESH_MEANS, NORM_MEANS
from muonmesh.settings.checks import check_group, check_structure
from muonmesh.step.int8_momentum import SCALE, Blocks
from muonmesh.step.members import flat_layouts
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import COUNT, Precision, Refused, StateForm, check_state

_RESHARD = "Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which reshards"

_OF_ONE_RANK = "The file has the shards of one rank. Save with muonmesh.checkpoint, or a file for each rank. If a "
_OF_ONE_RANK += "framework saves the optimizer on one rank only, as under DDP, leave out shard_state=True"

REFUSED: Refused = {
    "missing": "Load the state of an optimizer of the same kind, or start with fresh state",
    "stranger": "Remove it from the state. Masters need Muon(..., master_dtype=torch.float32)",
    "shape": _RESHARD,
    "place": _RESHARD,
    "rank": _OF_ONE_RANK,
    "numbers": "Load an older checkpoint: this one was saved after training had diverged, or was damaged since",
}
"""What a load refuses of a state, and what to write; devices and dtypes become those of this optimizer. What
owners keep is checked by the first step, in which the ranks agree on the owners."""

_WORKED_OUT = ("matrices", "reasons")
"""Keys of groups with lists by parameter. They follow from the model, so a saved group has None for them."""

_LEFT_OUT = (*_WORKED_OUT, "param_names")
"""Keys that may be None in a saved group."""


class SavedGroup(OrderedDict[str, Any]):
    """A param group in a state dict: with the names of its parameters, and without lists that follow from the model.

    torch's flattened form (``flatten_optimizer_state_dict``) takes "params" out of a group, and then repeats every
    other entry for each parameter. So "param_names" becomes None when "params" is taken out; otherwise the flattened
    form would grow with the square of the number of parameters.
    """

    @staticmethod
    def of(group: Mapping[str, Any]) -> SavedGroup:
        """Return a group to save. It keeps all keys, since torch needs all of them when it loads.

        Numbers of other libraries, such as NumPy, become floats: ``torch.load(weights_only=True)`` accepts no others.
        """
        return SavedGroup((key, None if key in _WORKED_OUT else _plain(value)) for key, value in group.items())

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return an entry; with "params", set "param_names" to None."""
        entry = super().pop(key, *default)
        if key == "params" and "param_names" in self:
            self["param_names"] = None
        return entry

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain OrderedDict, which ``torch.load(weights_only=True)`` accepts."""
        return OrderedDict, (), None, None, iter(self.items())


def _plain(value: Any) -> Any:
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else plain(value)


def widen_state(states: Mapping[Tensor, dict[str, Any]], planned: StepPlan, wrote: Blocks | None) -> None:
    """Convert int8 state to fp32, in place, so that any layout and any ``state_dtype`` can load it.

    The next step converts the state back to the same int8 codes and scales, so no precision is lost.

    Args:
        states: The optimizer's state; changed in place.
        planned: The plan with the parameters' layouts.
        wrote: The blocks that were in use when the codes were written.

    Raises:
        StateError: a parameter has been split into other matrices since then.
    """
    for member in planned.members:
        entry = states.get(member.tensor, {})
        if any(key + SCALE in entry for key in member.state_layouts):
            planned.blocks.check(wrote, member.name, member.tensor, entry)
        for key, layout in member.state_layouts.items():
            if key in entry and local_of(entry[key]).dtype == torch.int8:
                wide = planned.blocks.wide(member.name, member.tensor, key, entry)
                entry[key] = layout.storage.wrap(wide)
                entry.pop(key + SCALE, None)


_NEEDED = "a checkpoint that keeps those of all ranks: torch's keeps the plain tensors of one"
_TORN = "Write muonmesh.checkpoint.save(path, model, optimizer), and load; or a file for each rank with "
_TORN += "optimizer.state_dict()"


def refuse_torn(caller: str, groups: Sequence[Mapping[str, Any]], layouts: Mapping[str, Declared]) -> None:
    """Raise StateError if torch's checkpoint functions would lose state of this optimizer.

    For plain tensors, torch saves only one rank's. But ranks have different elements under one name in flat shards, and
    in state that the owner of a matrix (the rank that orthogonalizes it) keeps. torch itself puts the flat shards of
    FSDP1 together, so these are accepted.

    Args:
        caller: The module that calls ``state_dict()``. Only torch's checkpoint module is refused.
        groups: The param groups.
        layouts: The declared layouts of plain tensors, by name.

    Raises:
        StateError: the caller is torch's checkpoint module, and there are such tensors.
    """
    if caller != "torch.distributed.checkpoint.state_dict":
        return
    for group in groups:
        keeps = rule_of(group).keeps() if is_matrix_rule(group["algorithm"]) and world_size() > 1 else {}
        keys = [key for key, kept_as in keeps.items() if "×" in kept_as]
        if keys and group["params"]:
            fault = f"{keys[0]!r} of rule {group['algorithm']!r}, of which each rank keeps that of its own matrices"
            raise StateError(explain_error(group["param_names"][0], fault, _NEEDED, _TORN))
        for name, tensor in zip(group["param_names"], group["params"], strict=True):
            if name in layouts and flat_layouts(layouts[name]) and not getattr(tensor, "_fsdp_flattened", False):
                fault = "a flat shard, of which every rank has other elements by this name"
                raise StateError(explain_error(name, fault, _NEEDED, _TORN))


def restore_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    precision: Precision,
    planned: StepPlan | None,
    frozen: Collection[str],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Load a state dict with torch's ``load_state_dict``, but the state tensors without torch's casts.

    torch would cast every state tensor to its parameter's dtype, and so round the fp32 momentum and master weights of a
    bf16 model. Settings that the saved groups do not have keep their values.

    Args:
        optimizer: The optimizer, whose groups and state are written.
        state_dict: The result of ``state_dict()``.
        precision: The dtypes of the state.
        planned: The plan with the parameters' layouts; None for an empty state.
        frozen: Names of the model's parameters that were frozen when the groups were made.
        load: torch's ``load_state_dict``.

    Raises:
        StateError: the state does not fit; nothing has been loaded then.
    """
    loaded: dict[str, Any] = {}
    before = [dict(group) for group in optimizer.param_groups]
    forms = dict[Tensor, dict[str, StateForm]]()
    for member in planned.members if planned is not None else ():
        member_forms = member.forms(precision, master=precision.master is not None)
        forms[member.tensor] = {form.key: form for form in member_forms}

    def inspect(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        loaded.update(state)
        _check_groups(before, state, frozen)
        for name, parameter, entry in _entries(before, state):
            tensors = {key: _tensor(key, value) for key, value in entry.items()}
            check_state(name, forms[parameter].values(), tensors, REFUSED)
        return {**state, "state": {key: {} for key in state["state"]}}  # torch would cast state tensors on the device

    def mend(_: torch.optim.Optimizer) -> None:
        for number, old in enumerate(before):
            # Lists by parameter keep their values, since a checkpoint may have turned tuples into lists. Names stay
            # too: two groups may have been one.
            rest = {key: old[key] for key in (*_LEFT_OUT, "name") if key in old}
            optimizer.param_groups[number] = {**old, NORM_MEANS: FRESH_MEANS, **optimizer.param_groups[number], **rest}
            optimizer.param_groups[number]["lr"] = _on_host(optimizer.param_groups[number]["lr"])
        for _name, parameter, saved in _entries(before, loaded):
            for key, value in saved.items():
                local = local_of(_tensor(key, value).detach())
                # What owners keep has the shape that was saved: without the other ranks, the owners may not be known.
                fresh = forms[parameter][key].saved._replace(shape=tuple(local.shape)).fresh()
                local_of(fresh).copy_(local)
                optimizer.state[parameter][key] = fresh

    # `inspect` runs as the last hook before torch loads, `mend` as the first hook after it, so that users' hooks see
    # the usual state.
    handles = [
        optimizer.register_load_state_dict_pre_hook(inspect),
        optimizer.register_load_state_dict_post_hook(mend, prepend=True),
    ]
    try:
        load(dict(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def _entries(
    groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    """Yield for each parameter with saved state: its name, its tensor and the saved state."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for name, parameter, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            if entry := state_dict["state"].get(key):
                yield name, parameter, entry


def _tensor(key: str, value: Any) -> Any:
    """Return a value of the state; if other code has saved a step count as a number, as a tensor."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return step_count(value) if is_number and key == COUNT else value


_AS_SAVED = "Build the groups as when the state was saved"

_CONVERT = 'load_state_dict(muonmesh.checkpoint.convert(saved, optimizer, package="torch")), or whose state it is'


def _on_host(lr: Any) -> Any:
    """Return a rate in CPU memory: Accelerate and ``torch.load(map_location=...)`` move all tensors of a state."""
    return lr.cpu() if isinstance(lr, Tensor) and not lr.is_meta else lr


def _check_groups(groups: list[dict[str, Any]], state_dict: Mapping[str, Any], frozen: Collection[str]) -> None:
    write = 'Write load_state_dict(saved["optimizer"]), which has the "state" and the "param_groups" of state_dict()'
    saved_groups = check_state_dict("load_state_dict", state_dict, write)["param_groups"]
    foreign = not any("algorithm" in group for group in saved_groups)  # each group of ours has it
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
        write = f"{_AS_SAVED}{_moved(saved_groups, groups)}"
        if foreign:
            write = f"Write {_CONVERT}"
        raise StateError(explain_error("the state", _sizes_of(saved_groups), _sizes_of(groups), write))
    trained = {name for group in groups for name in group.get("param_names", ())}
    for group, saved in zip(groups, saved_groups, strict=True):
        subject = f"group {group['name']!r}"
        for key in ("algorithm", "matrices"):
            if saved.get(key) is not None and key in group and as_tuples(saved[key]) != as_tuples(group[key]):
                fault, needed = f"{key} {saved[key]!r} in the state", f"{group[key]!r}, as this optimizer was built"
                raise StateError(explain_error(subject, fault, needed, _AS_SAVED))
        settings = {key: saved[key] for key in saved if saved[key] is not None or key not in _LEFT_OUT}
        if left_out := _names_left_out(saved, group.get("param_names", ())):
            if moved := sorted(left_out & trained):
                fault = f"a group in the state that also has {moved[0]}, which is in another group here"
                needed = "the groups that were saved, or flattened state, in which each parameter has its settings"
                write = f"{_AS_SAVED}, or give StateDictOptions(flatten_optimizer_state_dict=True) to save and load"
                raise StateError(explain_error(subject, fault, needed, write))
            del settings["param_names"]
        names = list(map(canonical_name, settings.get("param_names", group["param_names"])))
        by_name = all(isinstance(key, str) for key in saved["params"])
        if pair := _displaced(names, group["param_names"], {*trained, *frozen}, by_name=by_name):
            fault, needed = f"the state of {pair[0]} in the place of {pair[1]}", "the same parameters in the same order"
            write = f"{_AS_SAVED}. Lightning's ModelParallelStrategy resumes its own checkpoints only"
            raise StateError(explain_error(subject, fault, needed, write if by_name else _AS_SAVED))
        if "lr" in settings:
            settings["lr"] = _on_host(settings["lr"])
        try:
            check_structure(f"{subject} of the state", {**group, **settings, "params": group["params"]})
            check_group(f"{subject} of the state", {**group, **settings})
        except (TypeError, ValueError) as error:
            if not foreign:
                raise StateError(str(error)) from None
            fault = f"settings of another optimizer ({error})"
            raise StateError(explain_error("the state", fault, "those of muonmesh", f"Write {_CONVERT}")) from None


def _displaced(
    names: Sequence[str], current: Sequence[str], names_of_model: Collection[str], *, by_name: bool
) -> tuple[str, str] | None:
    """Return a parameter of this model whose saved state is in the place of another parameter, and this one.

    Other names may be new names of the same parameters.

    Args:
        names: The saved names of a group.
        current: The names of the group in this optimizer.
        names_of_model: The names of all parameters of this model.
        by_name: Whether the state was found by name, as by torch's checkpoint functions. A group then has the names of
            one of the saved groups that its parameters were in. None of the names are its own if the functions were
            given other names: torch's ``rekey_optim_state_dict`` numbers parameters in the order of the model.
    """
    if by_name and not {*names}.isdisjoint(current) and {*names} != {*current}:
        return None
    pairs = zip(names, current, strict=False)
    return next(((saved, name) for saved, name in pairs if saved != name and saved in names_of_model), None)


def _names_left_out(saved: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """Return the names in a saved group besides ``names``, if it has all of these, but not their parameters.

    torch's ``set_optimizer_state_dict`` finds state by name. It takes out of a group the parameters that this optimizer
    does not train, such as those that are frozen now, and leaves their names in the group.
    """
    of_saved = saved.get("param_names")
    if not isinstance(of_saved, (list, tuple)) or not all(isinstance(name, str) for name in of_saved):
        return set()
    every = set(map(canonical_name, of_saved))
    return every - set(names) if len(of_saved) > len(names) and set(names) <= every else set()


def _sizes_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the names and sizes of groups, in words for a message."""
    sizes = [f"{group.get('name', number)!r} {len(group['params'])}" for number, group in enumerate(groups)]
    more = " and so on" if len(sizes) > 8 else ""
    return f"{len(groups)} group{'' if len(groups) == 1 else 's'}, with parameters: {', '.join(sizes[:8])}{more}"


def _moved(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences for a message: which parameters, three of them, are in another group than in the state."""
    in_state, current = (
        {canonical_name(name): repr(group.get("name")) for group in side for name in group.get("param_names") or ()}
        for side in (saved, groups)
    )
    sentences = [
        f". The group of {name} is {in_state.get(name, 'missing')} in the state and {current.get(name, 'missing')} here"
        for name in {**current, **in_state}
        if in_state.get(name) != current.get(name)
    ]
    return "".join(sentences[:3]) if in_state else ""
