"""Canonical parameter names: the same with and without torch.compile, DDP or activation checkpointing."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from muonmesh.errors import explain_error

T = TypeVar("T")

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_original_module")
"""Names of the child that holds the wrapped module: of torch.compile, activation checkpointing, FSDP1, and two of
Lightning Fabric, which also holds the original model."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    The names in `WRAPPERS` are removed everywhere. ``module`` (DDP and others) is removed only in front, because models
    may have modules of this name. PEFT's ``base_model.model`` stays, because PEFT's checkpoints have it too.
    """
    *modules, key = name.split(".")
    parts = [part for part in modules if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join([*parts, key])


def starred(name: str) -> str:
    """Return a name with "*" in place of numbers; it is the same for parameters of different layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _is_starred(key: str, name: str) -> bool:
    """Whether a name is a key of ``overrides=`` but for numbers in place of each "*"."""
    parts, named = key.split("."), name.split(".")
    return len(parts) == len(named) and all(
        part == other or (part == "*" and other.isdecimal()) for part, other in zip(parts, named, strict=True)
    )


def stagger_of(name: str, index: int) -> int:
    """Return a number of a matrix that depends only on its parameter's name and its index in the parameter.

    Equal parameters in successive layers have successive numbers. So if matrices with equal numbers modulo k take
    turns, the layers are spread evenly over k turns.
    """
    kind, layers = re.sub("[0-9]+", "", name), re.findall("[0-9]+", name)
    return zlib.crc32(kind.encode()) + sum(map(int, layers)) + index


def patterns(values: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """Return values of parameters by keys of ``overrides=``; each key means exactly the parameters with its value.

    Layers that differ in their number only share a key: "blocks.*.up.weight" for all, an expression for some.

    Args:
        values: The values by name.
        names: The names of all parameters among which an override chooses.
    """
    alike = dict[tuple[str, T], list[str]]()
    for name, value in values.items():
        alike.setdefault((starred(name), value), []).append(name)
    counts = Counter(map(starred, names))
    by_pattern = dict[str, T]()
    for (star, value), matching in alike.items():
        rows = [name.split(".") for name in matching]
        same = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        varied = ".".join(part if alone else "*" for part, alone in zip(rows[0], same, strict=True))
        if len(matching) == 1:
            key = matching[0]
        elif len(matching) == counts[star]:
            key = star
        elif len(matching) == sum(_is_starred(varied, name) for name in names):
            key = varied
        else:
            first, last = same.index(False), len(same) - same[::-1].index(False)
            inner = "|".join(re.escape(".".join(row[first:last])) for row in rows)
            before, after = ([*map(re.escape, part)] for part in (rows[0][:first], rows[0][last:]))
            key = "^" + r"\.".join([*before, f"({inner})", *after]) + "$"
        by_pattern[key] = value
    return by_pattern


def names_matching(key: str, names: Collection[str]) -> list[str]:
    """Return the names that a key of ``overrides=`` means.

    That is the equal name; or else all names that have numbers where the key has "*", and are equal elsewhere; or else
    all names that `re.search` finds.

    Raises:
        ValueError: the key is neither a name nor a regular expression.
    """
    if key in names:
        return [key]
    if "*" in key.split(".") and (alike := [name for name in names if _is_starred(key, name)]):
        return alike
    try:
        return [name for name in names if re.search(key, name)]
    except re.error as error:
        topic, fault = f"overrides[{key!r}]", f"no parameter's name and no regular expression ({error})"
        raise ValueError(explain_error(topic, fault, "either", "Use re.escape on what is meant literally")) from None


def in_order(overrides: Mapping[str, T], names: Collection[str]) -> Iterator[tuple[str, T, list[str]]]:
    """Yield each key of ``overrides=`` with its value and the names that it means; later ones take precedence.

    Exact names take precedence over expressions, and later expressions over earlier expressions.

    Raises:
        ValueError: a key is neither a name nor a regular expression.
    """
    for key in sorted(overrides, key=lambda key: key in names):
        yield key, overrides[key], names_matching(key, names)
