"""Refusals: refuses settings of a framework's configuration that an optimizer of muonmesh cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muonmesh.errors import explain_error

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""For each setting by name: the values that work, and what to write if the setting has another."""


def refuse_settings(config: str, read: Callable[[str], Any], refusals: Refusals) -> None:
    """Raise ValueError if a setting has a value that does not work; a setting that is missing, or None, does.

    Args:
        config: The name of the configuration.
        read: Returns a setting by its name; None if it is missing.
        refusals: The settings that may be refused.
    """
    for name, (accepted, write) in refusals.items():
        if (value := read(name)) is not None and value not in accepted:
            needed = " or ".join(map(repr, accepted)) or "none"
            raise ValueError(explain_error(config, f"{name}={value!r}", needed, write))
