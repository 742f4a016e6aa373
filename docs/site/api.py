"""Write the public API as text: every name with its arguments and their defaults.

    python docs/site/api.py                 # writes docs/reference/api.txt, which a test compares

Types are left out: how Python prints them depends on its version.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[1] / "reference" / "api.txt"
MODULES = ("muonmesh", "muonmesh.checkpoint", "muonmesh.testing")


def arguments(function: Any, own: bool = False) -> str:
    """Return the arguments of a function with their defaults; ``own``: without the object whose method it is."""
    parameters = list(inspect.signature(function).parameters.values())[own:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def lines_of(name: str, found: Any, public: Collection[Any]) -> Iterator[str]:
    """Yield the lines of one public name: a class with what no public base has, a function, or the values of a type."""
    if not inspect.isclass(found):
        choices = typing.get_args(found)
        yield f"{name} = {' | '.join(map(repr, choices))}" if choices else f"{name}{arguments(found)}"
        return
    bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
    shown = arguments(found) if inspect.isfunction(found.__init__) else ""
    yield f"class {name}{shown}{f' of {bases}' if bases else ''}"
    for member in inspect.classify_class_attrs(found):
        home = member.defining_class
        if member.name.startswith("_") or not home.__module__.startswith("muonmesh"):
            continue
        if home is not found and home in public:
            continue
        if member.kind in ("method", "class method", "static method"):
            function = inspect.unwrap(getattr(found, member.name))
            yield f"    {member.name}{arguments(function, own=member.kind == 'method')}"
        else:
            yield f"    {member.name}"


def stub() -> str:
    """Return the whole text."""
    parts = []
    for name in MODULES:
        module = importlib.import_module(name)
        found = {public: getattr(module, public) for public in sorted(module.__all__)}
        public = [one for one in found.values() if inspect.isclass(one)]
        lines = [line for name, one in found.items() for line in lines_of(name, one, public)]
        parts.append("\n".join([f"# {name}", "", *lines]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub())
