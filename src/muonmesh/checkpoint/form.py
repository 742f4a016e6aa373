"""Form: checks the whole structure of data from another program, before any part of it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muonmesh.errors import MuonMeshError, StateError, explain_error
from muonmesh.files import is_finite, is_integer


@dataclass(frozen=True)
class ValueKind:
    """A kind of values: its name in messages, and a function that tests whether a value is of this kind."""

    name: str
    holds: Callable[[Any], bool]


Form: TypeAlias = "ValueKind | list[Any] | tuple[Any, ...] | dict[Any, Any] | None"
"""The structure that a value must have. A `ValueKind`: a value of this kind. ``None``: the value None. ``[form]``: a
list whose entries have this form. ``(form, ...)``: one of these forms. A dict: a dict in which each string key must
exist with a value of its form; a ValueKind as key applies to all keys."""


def _is_readable(value: object) -> bool:
    if not isinstance(value, Tensor):
        return True
    odd = value.is_meta or value.is_nested or value.is_quantized
    return value.layout == torch.strided and not odd


ANYTHING = ValueKind("anything", lambda value: True)
TEXT = ValueKind("a string", lambda value: isinstance(value, str))
SIZE = ValueKind("a whole number of at least 0", lambda value: is_integer(value) and 0 <= value < 1 << 63)
FINITE = ValueKind("a finite number", is_finite)
POSITIVE = ValueKind("a positive, finite number", lambda value: is_finite(value) and value > 0)
PARAMETER = ValueKind("a parameter or its name", lambda value: isinstance(value, str | Tensor))
KEY = ValueKind("a parameter, its number or its name", lambda value: is_integer(value) or PARAMETER.holds(value))
VALUE = ValueKind("a dense tensor, or no tensor", _is_readable)

STATE_DICT: Form = {
    "param_groups": [{"params": [KEY], "param_names": ([TEXT], None), TEXT: VALUE}],
    "state": {KEY: {TEXT: VALUE}},
}
"""The form of an optimizer's state dict."""


def only(form: Mapping[str, Form]) -> Form:
    """Return the form of a dict that has these keys and no others."""
    return {**form, ValueKind(f"one of {', '.join(form)}", form.__contains__): ANYTHING}


def one_of(values: Collection[Any], why: str = "") -> ValueKind:
    """Return the kind that contains exactly these values; True does not count as 1."""
    name = " or ".join(map(repr, values)) + why
    return ValueKind(name, lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values))


def misfit(subject: str, value: Any, form: Form) -> tuple[str, str, str] | None:
    """Return the first fault of a value as (place, what is there, what is needed); None if the value has the form."""
    return next(_misfits(subject, value, form), None)


def _misfits(subject: str, value: Any, form: Form) -> Iterator[tuple[str, str, str]]:
    match form:
        case tuple():
            faults = [misfit(subject, value, alternative) for alternative in form]
            if None not in faults:
                yield from filter(None, faults[:1])
            return
        case None:
            fits, needed = value is None, "nothing"
        case ValueKind():
            fits, needed = form.holds(value), form.name
        case list():
            fits, needed = isinstance(value, list | tuple), "a list"
        case _:
            fits, needed = isinstance(value, Mapping), "a dict"
    if not fits:
        yield subject, _described(value), needed
    elif isinstance(form, list):
        for number, item in enumerate(value):
            yield from _misfits(f"{subject}[{number}]", item, form[0])
    elif isinstance(form, dict):
        for key, its in form.items():
            if isinstance(key, ValueKind):
                for item in value:
                    yield from _misfits(f"a key of {subject}", item, key)
                    yield from _misfits(f"{subject}[{_described(item)}]", value[item], its)
            else:
                yield from _misfits(f"{subject}[{key!r}]", value.get(key), its)


def check_form(subject: str, value: Any, form: Form, write: str, *, kind: type[MuonMeshError] = StateError) -> Any:
    """Return a value if it has the form.

    Args:
        subject: The name of the value in messages.
        value: The value.
        form: The form that the value must have.
        write: What the user can do if the value has another form.
        kind: The class of the error.

    Raises:
        MuonMeshError: of the class ``kind``: the value has another form.
    """
    fault = misfit(subject, value, form)
    if fault is not None:
        raise kind(explain_error(*fault, write))
    return value


def check_state_dict(subject: str, value: Any, write: str) -> Any:
    """Return the state dict of an optimizer if it has the right form.

    Args:
        subject: The name of the value in messages.
        value: The state dict.
        write: What the user can do if it has another form.

    Raises:
        StateError: it has another form, or has state of parameters that are in none of its groups.
    """
    check_form(subject, value, STATE_DICT, write)
    strangers = value["state"].keys() - {key for group in value["param_groups"] for key in group["params"]}
    if strangers:
        fault = f"state of {len(strangers)} parameters that are in none of its groups"
        raise StateError(explain_error(subject, fault, "state of those alone", "Hand over state_dict() as it is"))
    return value


def _described(value: object) -> str:
    if value is None or isinstance(value, str | bool | int | float):
        return "nothing" if value is None else repr(value)
    dtype = f" of {value.dtype}, {value.layout}, on {value.device.type}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{dtype}"
