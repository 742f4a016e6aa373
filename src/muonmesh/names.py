"""Canonical parameter names: the same with and without torch.compile, DDP or activation checkpointing."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from muonmesh.errors import explain_error

T = TypeVar("T")

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_original_module")
"""Children by which a wrapper holds what it stands for: of torch.compile, activation checkpointing, FSDP1, and twice of
Lightning Fabric, which also holds the model as it was given."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    `WRAPPERS` go wherever they stand; ``module`` only in front (DDP and others), since models have modules of that
    name. PEFT's ``base_model.model`` stays: its checkpoints have it too.
    """
    *modules, key = name.split(".")
    parts = [part for part in modules if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join([*parts, key])


def starred(name: str) -> str:
    """Return a name with "*" for numbers: that of all layers which differ in their number only."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def phase_of(name: str, index: int) -> int:
    """Return a number of a parameter's matrix that depends on nothing else; those of one kind differ by their layers.

    So if matrices of equal phases modulo k take turns, the layers of each kind are spread evenly over k turns.
    """
    kind, layers = re.sub("[0-9]+", "", name), re.findall("[0-9]+", name)
    return zlib.crc32(kind.encode()) + sum(map(int, layers)) + index


def names_matching(key: str, names: Collection[str]) -> list[str]:
    """Return the one of the names that a key of ``overrides=`` is, or else those in which `re.search` finds it.

    Raises:
        ValueError: it is neither a name nor a regular expression.
    """
    if key in names:
        return [key]
    try:
        return [name for name in names if re.search(key, name)]
    except re.error as error:
        where, found = f"overrides[{key!r}]", f"no parameter's name and no regular expression ({error})"
        raise ValueError(explain_error(where, found, "either", "Use re.escape on what is meant literally")) from None


def in_order(overrides: Mapping[str, T], names: Collection[str]) -> Iterator[tuple[str, T, list[str]]]:
    """Yield the keys of ``overrides=``, what each says and the names that it means, those that win last.

    Exact names win over expressions, and later expressions over earlier ones.

    Raises:
        ValueError: a key is neither a name nor a regular expression.
    """
    for key in sorted(overrides, key=lambda key: key in names):
        yield key, overrides[key], names_matching(key, names)
