"""Setting: the declaration of a setting of a group, an optimizer or a rule, so that one check serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, field
from numbers import Real
from typing import Any, NamedTuple, get_args

from muonmesh.errors import explain_error

LARGEST = 1e9
"""The largest number in a setting. A step multiplies up to four of them, and divides by 1 − β; the result is then a
finite fp32 number. For any other, torch would raise an error in the middle of a step."""

NOT_NEGATIVE = f"a number of at least 0, at most {LARGEST:g}"
"""For messages."""

TORCHS_NAMES = {"betas": "adamw_betas", "eps": "adamw_eps"}
"""The names of torch.optim.AdamW for settings of muonmesh."""


class Setting(NamedTuple):
    """The declaration of a setting: its default, a check of values, and the text for errors about what is needed."""

    default: Any = MISSING
    fits: Callable[[Any], bool] = lambda _: True
    needed: str = ""


def choice(default: object, words: object, why: str = "") -> Setting:
    """Return a setting that is one of the strings of a Literal; ``why`` is the end of the error message."""
    allowed = get_args(words)
    needed = "one of " + ", ".join(map(repr, allowed)) + why
    return Setting(default, lambda value: isinstance(value, str) and value in allowed, needed)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of at most `LARGEST` in size, and no bool."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return False
    number: Any = value
    return bool(-LARGEST <= number <= LARGEST)


_PLAIN = (float, int, bool, str)


def plain(value: Any) -> Any:
    """Return a number of another library, such as NumPy, as a float, which torch's operations accept; others as is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return float(value) if isinstance(value, Real) else value


def number(default: float, fits: Callable[[float], bool], needed: str) -> Setting:
    """Return a setting that is a number, see `is_number`."""
    return Setting(default, lambda value: is_number(value) and fits(value), needed)


def not_negative(default: float) -> Setting:
    """Return a setting that is a number of at least 0."""
    return number(default, lambda value: value >= 0, NOT_NEGATIVE)


def positive(default: float) -> Setting:
    """Return a setting that is a number above 0."""
    return number(default, lambda value: value > 0, f"a positive number, at most {LARGEST:g}")


def fraction(default: float) -> Setting:
    """Return a setting that is a number of at least 0 and below 1."""
    return number(default, lambda value: 0 <= value < 1, "a number in [0, 1)")


def two_fractions(default: tuple[float, float]) -> Setting:
    """Return a setting that is two numbers of at least 0 and below 1."""
    return Setting(default, lambda value: isinstance(value, (tuple, list)) and _are_two(value), "two numbers in [0, 1)")


def _are_two(values: Sequence[Any]) -> bool:
    return len(values) == 2 and all(is_number(value) and 0 <= value < 1 for value in values)


def switch(default: bool) -> Setting:
    """Return a setting that is on or off."""
    return Setting(default, lambda value: isinstance(value, bool), "True or False")


def whole(default: int | None, least: int, needed: str, *, most: int = 2**63 - 1) -> Setting:
    """Return a setting that is a whole number from ``least`` to ``most``; None too, if that is the default."""
    return Setting(
        default,
        lambda value: (value is None and default is None) or (type(value) is int and least <= value <= most),
        needed,
    )


def rule_field(key: str, setting: Setting) -> Any:
    """Return a dataclass field of a rule with its key in a param group; values are checked as ``setting`` declares."""
    return field(default=setting.default, metadata={"key": key, "setting": setting})


def own_names(subject: str, settings: Mapping[str, Any], read: Collection[str] = ()) -> dict[str, Any]:
    """Return settings with muonmesh's names in place of torch's (`TORCHS_NAMES`).

    Args:
        subject: The function, argument or group that the settings were given to, for messages.
        settings: The settings by name.
        read: The settings of the rule that reads them; a rule may have settings of these names itself.

    Raises:
        ValueError: a setting was given by both names, with different values.
    """
    renamed = dict(settings)
    for torch_name, name in TORCHS_NAMES.items():
        if torch_name in renamed and torch_name not in read:
            value = renamed.pop(torch_name)
            if name in renamed and renamed[name] != value:
                values = f"{torch_name}={value!r} and {name}={renamed[name]!r}"
                raise ValueError(explain_error(subject, values, "one of them", f"Remove {torch_name}"))
            renamed[name] = value
    return renamed
