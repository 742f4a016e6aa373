"""Form: checks the whole structure of a value that another program has made, before any part of it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muonmesh.errors import StateError, explain_error
from muonmesh.files import is_whole


@dataclass(frozen=True)
class Kind:
    """A kind of value: its name in messages, and the test of whether a value is of it."""

    name: str
    holds: Callable[[Any], bool]


Form: TypeAlias = "Kind | list[Any] | tuple[Any, ...] | dict[Any, Any] | None"
"""What a value must look like: of a `Kind`; nothing, for ``None``; a list of ``[form]``; one of ``(form, ...)``; or
a dict, in which a string is a key that must be there with such a value, and a Kind is that of all keys."""


def _is_readable(value: object) -> bool:
    if not isinstance(value, Tensor):
        return True
    return value.layout == torch.strided and not (
        value.is_meta or value.is_nested or value.is_quantized or value.is_complex()
    )


TEXT = Kind("a string", lambda value: isinstance(value, str))
SIZE = Kind("a whole number of at least 0", lambda value: is_whole(value) and 0 <= value < 1 << 63)
PARAMETER = Kind("a parameter or its name", lambda value: isinstance(value, str | Tensor))
KEY = Kind("a parameter, its number or its name", lambda value: is_whole(value) or PARAMETER.holds(value))
VALUE = Kind("a dense tensor of real numbers, or no tensor", _is_readable)

STATE_DICT: Form = {
    "param_groups": [{"params": [KEY], "param_names": ([TEXT], None), TEXT: VALUE}],
    "state": {KEY: {TEXT: VALUE}},
}
"""What an optimizer has or saved."""


def misfit(where: str, value: Any, form: Form) -> tuple[str, str, str] | None:
    """Return the first place where a value is not of a form, what is there and what is needed; None where it fits."""
    faults: list[tuple[str, str, str] | None] = []
    match form:
        case tuple():
            faults = [misfit(where, value, one) for one in form]
            return None if None in faults else faults[0]
        case None:
            fits, needed = value is None, "nothing"
        case Kind():
            fits, needed = form.holds(value), form.name
        case list():
            fits, needed = isinstance(value, list | tuple), "a list"
            faults = [misfit(f"{where}[{number}]", each, form[0]) for number, each in enumerate(value if fits else ())]
        case _:
            fits, needed = isinstance(value, Mapping), "a dict"
            for key, its in form.items() if fits else ():
                if isinstance(key, Kind):
                    faults += [misfit(f"a key of {where}", each, key) for each in value]
                    faults += [misfit(f"{where}[{_told(each)}]", value[each], its) for each in value]
                else:
                    faults.append(misfit(f"{where}[{key!r}]", value.get(key), its))
    if not fits:
        return where, _told(value), needed
    return next((fault for fault in faults if fault is not None), None)


def check_form(where: str, value: Any, form: Form, write: str) -> Any:
    """Return a value if it is of a form.

    Raises:
        StateError: it is not; ``write`` says what to do then.
    """
    fault = misfit(where, value, form)
    if fault is not None:
        raise StateError(explain_error(*fault, write))
    return value


def _told(value: object) -> str:
    if value is None or isinstance(value, str) or is_whole(value):
        return "nothing" if value is None else repr(value)
    dtype = f" of {value.dtype}, {value.layout}, on {value.device.type}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{dtype}"
