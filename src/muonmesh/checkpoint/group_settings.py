"""Group settings: saves the settings of param groups as JSON, and finds them again by parameter name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from muonmesh.checkpoint.form import TEXT, TRUTH, Kind, check_form, only
from muonmesh.checkpoint.manifest import REMEDY
from muonmesh.checkpoint.record import Record
from muonmesh.errors import FileError, StateError, about, explain_error
from muonmesh.files import is_whole
from muonmesh.layout.matrix import as_tuples
from muonmesh.numerics.setting import plain
from muonmesh.settings import FRESH_MEANS, NORM_MEANS
from muonmesh.settings.checks import check_group

OWN_KEYS = ("params", "param_names", "parameters", "matrices", "reasons", "name", "algorithm", "use_muon", "moe")
"""Keys of a group that are no settings: they identify the group, and follow from the model."""


def settings_of(records: Iterable[Record]) -> dict[str, Any]:
    """Return the settings of the parameters on this rank, as data for JSON.

    Returns:
        ``{"parameters": {name: {"group", "matrices", "fresh"}}, "products": [...]}``. ``group`` is the JSON text of the
        group's name, algorithm and settings. ``fresh`` is True if no step has created state for the parameter.
        ``products`` names the implementations of matrix products that have orthogonalized matrices.

    Raises:
        StateError: a setting is not plain data.
    """
    texts: dict[int, str] = {}
    parameters = {}
    products = set()
    for record in records:
        group = record.group
        if id(group) not in texts:
            where = f"group {group['name']!r}"
            settings = {key: _plain(where, key, value) for key, value in group.items() if key not in OWN_KEYS}
            said = {"name": group["name"], "algorithm": record.parameter.algorithm, "settings": settings}
            texts[id(group)] = json.dumps(said, sort_keys=True)
        matrices = _plain(record.name, "matrices", record.parameter.spec)
        parameters[record.name] = {"group": texts[id(group)], "matrices": matrices, "fresh": not record.created}
        if record.parameter.is_matrix and record.created:
            products.add(record.products)
    return {"parameters": parameters, "products": sorted(products)}


def merged(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all ranks, with each group, parameter and kind of products once.

    Args:
        some: The result of `settings_of` on each rank.

    Returns:
        As `settings_of`, with ``"groups": [{"name", "algorithm", "settings"}]``; ``group`` is an index in this list.

    Raises:
        StateError: ranks have different settings for a parameter.
    """
    parameters: dict[str, dict[str, Any]] = {}
    for rank, said in enumerate(some):
        for name, entry in said["parameters"].items():
            if parameters.setdefault(name, entry) != entry:
                found = f"other settings on rank {rank} than on the ranks before"
                raise StateError(explain_error(name, found, "the same on all ranks", "Set the groups alike"))
    numbers: dict[str, int] = {}
    numbered = {
        name: {**entry, "group": numbers.setdefault(entry["group"], len(numbers))} for name, entry in parameters.items()
    }
    products = sorted({kind for said in some for kind in said["products"]})
    return {"groups": list(map(json.loads, numbers)), "parameters": numbered, "products": products}


def _is_plain(value: Any, depth: int = 8) -> bool:
    """Return whether a value is a number, a string or nothing, or nested lists of these, not deeper than ``depth``."""
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return value is None or (isinstance(value, bool | int | float | str) and value == value)  # no NaN


_PLAIN = Kind("a number, a string, or lists of them, not nested deeper than 8", _is_plain)
_SETTING = Kind("the name of a setting", lambda name: name not in OWN_KEYS)


def check_saved(path: Path, saved: dict[str, Any]) -> None:
    """Check that settings from a file have the form of the result of `merged`.

    Raises:
        FileError: they have another form.
    """
    number = Kind("the number of a group", lambda value: is_whole(value) and 0 <= value < len(saved["groups"]))
    form = only(
        {
            "groups": [only({"name": TEXT, "algorithm": TEXT, "settings": {_SETTING: _PLAIN}})],
            "parameters": {TEXT: only({"group": number, "matrices": _PLAIN, "fresh": TRUTH})},
            "products": [TEXT],
        }
    )
    check_form(str(path), saved, form, REMEDY, kind=FileError)


def fitting_means(records: Iterable[Record], saved: Mapping[str, Any]) -> Any:
    """Return the saved norm means, if all these parameters have the same; else fresh ones: they were clipped apart."""
    entries = filter(None, (saved["parameters"].get(record.name) for record in records))
    settings = [saved["groups"][number]["settings"] for number in sorted({entry["group"] for entry in entries})]
    means = [as_tuples(each.get(NORM_MEANS, FRESH_MEANS)) for each in settings]
    return means[0] if means and means.count(means[0]) == len(means) else FRESH_MEANS


def fitting_settings(
    group: Mapping[str, Any], records: Iterable[Record], saved: Mapping[str, Any], means: Any
) -> dict[str, Any]:
    """Return the saved settings for a group: the settings of its parameters' saved groups, which must be equal.

    Args:
        group: The group.
        records: Its parameters.
        saved: The checkpoint's settings, see `settings_of`.
        means: The norm means of all groups, see `fitting_means`.

    Raises:
        StateError: these settings differ, or are out of range.
    """
    where = f"group {group['name']!r}"
    entries = {record.name: saved["parameters"].get(record.name) for record in records}
    given = {name: saved["groups"][entry["group"]]["settings"] for name, entry in entries.items() if entry is not None}
    if not given:
        return {}
    first, settings = next(iter(given.items()))
    for name, others in given.items():
        for key in sorted((settings.keys() | others.keys()) - {NORM_MEANS}):
            if settings.get(key) != others.get(key):
                found = f"{first} saved with {key}={settings.get(key)!r}, {name} with {key}={others.get(key)!r}"
                write = "Give them groups of their own, as when they were saved"
                raise StateError(explain_error(where, found, "one value for all parameters of a group", write))
    settings = {**{key: as_tuples(value) for key, value in settings.items()}, NORM_MEANS: means}
    try:
        check_group(where, {**group, **settings})
    except (TypeError, ValueError) as error:
        raise StateError(about("the checkpoint", error)) from None
    return settings


def set_group(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write settings into a group. A tensor is filled in place, since a compiled step may hold it."""
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _plain(where: str, key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(where, key, entry) for entry in value]
    value = plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    needed = "numbers, strings, and lists of them"
    write = "Keep it outside of the group: a checkpoint holds nothing that could execute"
    raise StateError(explain_error(where, f"{key} = {value!r}", needed, write))
