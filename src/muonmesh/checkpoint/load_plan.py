"""LoadPlan: determines where each tensor of a checkpoint goes in a model and an optimizer, before any tensor is read.

Settings of param groups are saved as JSON, and found again by the names of the parameters.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonmesh.checkpoint.form import TEXT, ValueKind, check_form, only
from muonmesh.checkpoint.manifest import REMEDY, SavedTensor
from muonmesh.checkpoint.record import MODEL, STATE, Boxes, ParameterRecord
from muonmesh.comm.gather_objects import first_difference
from muonmesh.comm.storage import this_rank
from muonmesh.errors import FileError, StateError, about, explain_error, warn
from muonmesh.files import is_integer
from muonmesh.layout import split_matrices
from muonmesh.layout.matrix import as_tuples
from muonmesh.numerics.setting import plain
from muonmesh.settings import FRESH_MEANS, NORM_MEANS
from muonmesh.settings.checks import check_group
from muonmesh.step.state_layout import StateForm

IDENTITY = ("params", "param_names", "parameters", "matrices", "reasons", "name", "algorithm", "use_muon", "moe")
"""Keys of a group that are no settings: they identify the group, and follow from the model."""


def group_settings(records: Iterable[ParameterRecord]) -> dict[str, Any]:
    """Return the settings of the parameters on this rank, as data for JSON.

    Returns:
        ``{"parameters": {name: {"group", "matrices"}}, "products": [...]}``. ``group`` is the JSON text of the group's
        name, algorithm and settings. ``products`` names the implementations of matrix products that have
        orthogonalized matrices.

    Raises:
        StateError: a setting is not plain data.
    """
    texts: dict[int, str] = {}
    parameters = {}
    products = set()
    for record in records:
        group = record.group
        if id(group) not in texts:
            subject = f"group {group['name']!r}"
            settings = {key: _plain(subject, key, value) for key, value in group.items() if key not in IDENTITY}
            group_data = {"name": group["name"], "algorithm": record.parameter.algorithm, "settings": settings}
            texts[id(group)] = json.dumps(group_data, sort_keys=True)
        matrices = _plain(record.name, "matrices", record.parameter.spec)
        parameters[record.name] = {"group": texts[id(group)], "matrices": matrices}
        if record.parameter.is_matrix and record.created:
            products.add(record.products)
    return {"parameters": parameters, "products": sorted(products)}


def merged_settings(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all ranks, with each group, parameter and kind of products once.

    Args:
        by_rank: The result of `group_settings` on each rank.

    Returns:
        As `group_settings`, with ``"groups": [{"name", "algorithm", "settings"}]``; ``group`` is an index in this list.

    Raises:
        StateError: ranks have different settings for a parameter.
    """
    if (differs := first_difference(settings["parameters"] for settings in by_rank)) is not None:
        name, before, rank = differs
        fault = f"other settings on rank {rank} than on rank {before}"
        raise StateError(explain_error(name, fault, "the same on all ranks", "Set the groups alike"))
    parameters = {name: entry for settings in by_rank for name, entry in settings["parameters"].items()}
    numbers: dict[str, int] = {}
    numbered = {
        name: {**entry, "group": numbers.setdefault(entry["group"], len(numbers))} for name, entry in parameters.items()
    }
    products = sorted({kind for settings in by_rank for kind in settings["products"]})
    return {"groups": list(map(json.loads, numbers)), "parameters": numbered, "products": products}


def _is_plain(value: Any, depth: int = 8) -> bool:
    """Return whether a value is a number, a string or nothing, or nested lists of these, not deeper than ``depth``."""
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(entry, depth - 1) for entry in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)  # no NaN


_PLAIN = ValueKind("a number, a string, or lists of them, not nested deeper than 8", _is_plain)
_SETTING = ValueKind("the name of a setting", lambda name: name not in IDENTITY)


def check_saved_settings(path: Path, saved: dict[str, Any]) -> None:
    """Check that settings from a file have the form of the result of `merged_settings`.

    Raises:
        FileError: they have another form.
    """
    number = ValueKind("the number of a group", lambda value: is_integer(value) and 0 <= value < len(saved["groups"]))
    form = only(
        {
            "groups": [only({"name": TEXT, "algorithm": TEXT, "settings": {_SETTING: _PLAIN}})],
            "parameters": {TEXT: only({"group": number, "matrices": _PLAIN})},
            "products": [TEXT],
        }
    )
    check_form(str(path), saved, form, REMEDY, kind=FileError)


def saved_norm_means(records: Iterable[ParameterRecord], saved: Mapping[str, Any]) -> Any:
    """Return the saved means of gradient norms for ``skip_above="4x"``, if they are equal for all these parameters.

    They differ if other optimizers clipped the parameters. The means then start anew.
    """
    entries = filter(None, (saved["parameters"].get(record.name) for record in records))
    settings = [saved["groups"][number]["settings"] for number in sorted({entry["group"] for entry in entries})]
    means = [as_tuples(group_settings.get(NORM_MEANS, FRESH_MEANS)) for group_settings in settings]
    return means[0] if means and means.count(means[0]) == len(means) else FRESH_MEANS


def saved_group_settings(
    group: Mapping[str, Any], records: Iterable[ParameterRecord], saved: Mapping[str, Any], means: Any
) -> dict[str, Any]:
    """Return the saved settings for a group: the settings of its parameters' saved groups, which must be equal.

    Args:
        group: The group.
        records: Its parameters.
        saved: The checkpoint's settings, see `group_settings`.
        means: The norm means of all groups, see `saved_norm_means`.

    Raises:
        StateError: these settings differ, or are out of range.
    """
    subject = f"group {group['name']!r}"
    entries = {record.name: saved["parameters"].get(record.name) for record in records}
    by_name = {name: saved["groups"][entry["group"]]["settings"] for name, entry in entries.items() if entry}
    if not by_name:
        return {}
    first, settings = next(iter(by_name.items()))
    for name, others in by_name.items():
        for key in sorted((settings.keys() | others.keys()) - {NORM_MEANS}):
            if settings.get(key) != others.get(key):
                fault = f"{first} saved with {key}={settings.get(key)!r}, {name} with {key}={others.get(key)!r}"
                write = "Give them groups of their own, as when they were saved"
                raise StateError(explain_error(subject, fault, "one value for all parameters of a group", write))
    settings = {**{key: as_tuples(value) for key, value in settings.items()}, NORM_MEANS: means}
    try:
        check_group(subject, {**group, **settings})
    except (TypeError, ValueError) as error:
        raise StateError(about("the checkpoint", error)) from None
    return settings


def _plain(subject: str, key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(subject, key, entry) for entry in value]
    value = plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    needed = "numbers, strings, and lists of them"
    write = "Keep it outside of the group: a checkpoint holds nothing that could execute"
    raise StateError(explain_error(subject, f"{key} = {value!r}", needed, write))


_SHOWN = 8  # the number of faults in one message


@dataclass
class LoadPlan:
    """The tensors that `load` reads from a checkpoint, and where it then writes each of them.

    Attributes:
        boxes: New memory to read into, by the name of the saved tensor.
        entries: The weights (None) and the parts of the state to write, each with the name of its saved tensor. None
            instead of a name: the part is reset to its value before the first step.
        settings: The groups, each with its new settings.
        warning: A warning for the user; empty if there is none.
    """

    boxes: dict[str, Boxes] = field(default_factory=dict)
    entries: list[tuple[ParameterRecord, StateForm | None, str | None]] = field(default_factory=list)
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    warning: str = ""

    def check(self) -> None:
        """Check the tensors that were read, and warn if the run will continue with different bits.

        Raises:
            StateError: parameters of one flat tensor have different step counts.
        """
        counts: dict[tuple[Tensor, str], tuple[str, float]] = {}
        for record, part, key in self.entries:
            if part is None or part.layout.side != "parameter":
                continue
            count = 0.0 if key is None else float(self.boxes[key][()])
            first, expected = counts.setdefault((record.parameter.tensor, part.key), (record.name, count))
            if count != expected:
                fault = f"{part.key} {count:g}, and {expected:g} of {first}, which is in the same flat tensor"
                needed = "one count for all of a flat tensor"
                raise StateError(explain_error(record.name, fault, needed, "Load it into a layout that is not flat"))
        if self.warning and this_rank() == 0:
            warn(self.warning)

    def write(self) -> None:
        """Write everything that was read."""
        for record, part, key in self.entries:
            record.take(part, None if key is None else self.boxes.pop(key))
        for group, settings in self.settings:
            for key, value in settings.items():
                if isinstance(group.get(key), Tensor):  # a compiled step may hold it
                    group[key].fill_(value)
                else:
                    group[key] = value


def plan_load(
    path: str | os.PathLike[str],
    tensors: Mapping[str, SavedTensor],
    saved: Mapping[str, Any],
    records: Sequence[ParameterRecord],
    everyone: Mapping[str, bool],
    *,
    strict: bool,
) -> LoadPlan:
    """Return where each tensor of a checkpoint goes.

    Args:
        path: The path of the checkpoint, for messages.
        tensors: The tensors in the checkpoint, by name.
        saved: The checkpoint's settings, see `group_settings`.
        records: The parameters of this rank, and the tensors that no optimizer steps.
        everyone: The names of the records of all ranks, and whether an optimizer trains each.
        strict: Whether missing and additional names are an error.

    Raises:
        StateError: the checkpoint does not fit the model and the optimizer.
    """
    plan = LoadPlan()
    model = {name.removeprefix(f"{MODEL}."): entry for name, entry in tensors.items() if name.startswith(f"{MODEL}.")}
    states: dict[str, dict[str, SavedTensor]] = {}
    for name, entry in tensors.items():
        if name.startswith(f"{STATE}."):
            owner, key = name.removeprefix(f"{STATE}.").rsplit(".", 1)
            states.setdefault(owner, {})[key] = entry
    wrong = _name_faults([record.name for record in records], model, states, everyone) if strict else []
    for record in records:
        if record.name in model:
            key = f"{MODEL}.{record.name}"
            wrong += _weight_faults(key, model[record.name], record.parameter.storage.shape, record.dtype)
            plan.entries.append((record, None, key))
            if record.group:
                wrong += _plan_state(plan, record, saved, states, strict=strict)
    other = ", or write load(..., strict=False), which leaves alone what only one of them has" if strict else ""
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        write = f"Load it into the model and the optimizer that it was saved with{other}"
        needed = "what this model and this optimizer hold"
        raise StateError(explain_error(str(path), "; ".join(wrong[:_SHOWN]) + more, needed, write))
    plan.boxes = {name: record.boxes_for(part, tensors[name].dtype) for record, part, name in plan.entries if name}
    groups: dict[int, list[ParameterRecord]] = {}
    for record in records:
        if record.group:
            groups.setdefault(id(record.group), []).append(record)
    used, there_products = set[str](), saved.get("products")
    means = saved_norm_means([record for record in records if record.group], saved)
    for members in groups.values():
        settings = saved_group_settings(members[0].group, members, saved, means)
        plan.settings.append((members[0].group, settings))
        matrices = [record for record in members if record.parameter.is_matrix]
        used |= {replace(record, group=record.group | settings).products for record in matrices}
    if there_products and not used <= {*there_products}:
        fault = f"a run that orthogonalized matrices by the products {', '.join(map(repr, there_products))}"
        needed = f"those of this process, {', '.join(map(repr, sorted(used)))}, for the same bits"
        write = "The run goes on with other bits. torch's products and Polar Express are to be had everywhere"
        write = f'{write}: Muon(..., kernels="torch", ns_coefficients="polar_express")'
        plan.warning = explain_error(str(path), fault, needed, write)
    return plan


def _name_faults(
    local: Collection[str], saved: Mapping[str, Any], states: Mapping[str, Any], everyone: Mapping[str, bool]
) -> list[str]:
    """Return messages about names that only the checkpoint or only this run has, each with the most similar name."""
    spare, lost = [name for name in saved if name not in everyone], [name for name in local if name not in saved]
    strays = [name for name in states if not everyone.get(name, name in saved)]
    lines: list[tuple[str, str, Iterable[str]]] = [(f"no {MODEL}.{name}", name, spare or saved) for name in lost]
    lines += [(f"{MODEL}.{name}, which nothing here has", name, lost or local) for name in spare]
    for name in strays:
        lacks, among = ("trains", ()) if name in everyone else ("has", local)
        lines.append((f"state of {name}, which nothing here {lacks}", name, among))
    # Only for what the message will show: with many names, the search for all could take hours.
    shown = [message + nearest(name, among) for message, name, among in lines[:_SHOWN]]
    return shown + [message for message, _, _ in lines[_SHOWN:]]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most similar name, in brackets for a message; empty if no name is similar."""
    close = difflib.get_close_matches(name, list(islice(names, 5000)), 1, 0.5)
    return f" (the nearest is {close[0]})" if close else ""


def _weight_faults(name: str, entry: SavedTensor, shape: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Return messages about saved weights of another shape, or of a precision that loading would round."""
    old = entry.dtype
    if entry.shape != tuple(shape):
        return [f"{name} of shape {entry.shape}, where {tuple(shape)} is needed"]
    if torch.promote_types(old, dtype) != dtype:
        remedy = f"keep masters: master_dtype={torch.promote_types(old, dtype).to_real()}"
        return [f"{name} in {_label(old)}, which {_label(dtype)} would round ({remedy})"]
    return []


def _plan_state(
    plan: LoadPlan,
    record: ParameterRecord,
    saved: Mapping[str, Any],
    states: Mapping[str, Mapping[str, SavedTensor]],
    *,
    strict: bool,
) -> list[str]:
    """Add the state of one parameter to ``plan``, and return messages about entries that do not fit.

    Raises:
        StateError: the saved state belongs to another rule, or to other matrices.
    """
    saved_states, entry = states.get(record.name, {}), saved["parameters"].get(record.name)
    if entry is None or not saved_states:  # no step had created state
        plan.entries += [(record, part, None) for part in record.parts]
        return [f"no state of {record.name}, which nobody trained"] if entry is None and strict else []
    algorithm = saved["groups"][entry["group"]]["algorithm"]
    if algorithm != record.parameter.algorithm:
        needed = f"that of rule {record.parameter.algorithm!r}, by which this optimizer updates it"
        write = "Build the groups as when it was saved, or load the weights alone, by torch.distributed.checkpoint"
        raise StateError(explain_error(record.name, f"state of rule {algorithm!r}", needed, write))
    other = _splits_otherwise(record, entry["matrices"])
    wrong = []
    for part in record.parts:
        name = f"{STATE}.{record.name}.{part.key}"
        if other and part.layout.side not in ("element", "parameter"):
            spec, old = record.parameter.spec or "whole", as_tuples(entry["matrices"]) or "whole"
            had, needed = f"{part.key} of matrices {old!r}", f"that of {spec!r}: it has a number for each of their "
            needed += {"rows": "rows", "cols": "columns"}.get(part.layout.side, "matrices")
            raise StateError(explain_error(record.name, had, needed, "Split it as when it was saved"))
        elif part.key not in saved_states:
            plan.entries.append((record, part, None))
            wrong += [f"no {name}"] if strict else []
        elif saved_states[part.key].shape != part.layout.storage.shape:
            wrong.append(f"{name} of shape {saved_states[part.key].shape}, where {part.layout.storage.shape} is needed")
        else:
            plan.entries.append((record, part, name))
    strangers = sorted(saved_states.keys() - {part.key for part in record.parts})
    return wrong + [f"{STATE}.{record.name}.{key}, which this optimizer does not read" for key in strangers if strict]


def _splits_otherwise(record: ParameterRecord, saved: Any) -> bool:
    """Return whether a parameter was saved as other matrices than here; several specs can mean the same matrices."""
    if not record.parameter.is_matrix:
        return False
    shape, old = record.parameter.storage.shape, as_tuples(saved)
    try:
        return split_matrices(record.name, shape, old) != split_matrices(record.name, shape, record.parameter.spec)
    except ValueError:  # another shape; another message reports it
        return True


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
