"""Registry: the rules by their names in param groups, and `register_rule` for rules of your own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from muonmesh.errors import explain_error
from muonmesh.numerics.rules.elementwise import ElementwiseRule
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import Hyperparameters, Rule, check_keeps

Algorithm: TypeAlias = Literal[
    "muon",
    "adamw",
    "normuon",
    "adamuon",
    "hyperball",
    "muoneq",
    "muon_plus",
    "dynmuon",
    "soap",
    "scion_sign",
    "scion_row_norm",
]
"""The rules that come with muonmesh, by the name that a group has under ``algorithm``, each in the file of its name.
`muonmesh.register_rule` adds others."""


def _rule_in_file_of(name: str) -> type[Hyperparameters]:
    """Return the one rule that the file of this name defines."""
    module = importlib.import_module(f"muonmesh.numerics.rules.{name}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (rule,) = (kind for kind in kinds if issubclass(kind, Hyperparameters))
    return rule


RULES: dict[str, type[Hyperparameters]] = {name: _rule_in_file_of(name) for name in get_args(Algorithm)}
"""The rule of each ``algorithm`` of a group."""

_OWN = frozenset(RULES)

ENTRY_POINTS = "muonmesh.rules"
"""The group of entry points by which packages declare rules of their own."""

AnyRule = TypeVar("AnyRule", bound=Rule | ElementwiseRule)


def register_rule(algorithm: str) -> Callable[[type[AnyRule]], type[AnyRule]]:
    """Return a class decorator that registers a rule under a name for the ``algorithm`` of groups.

    Register the rule in every process before it steps groups with the rule or loads their state. You may register a
    name of your own again, as when you run a notebook cell twice.

    Args:
        algorithm: The name.

    Raises:
        ValueError: the name is taken by a rule of muonmesh, or `Rule.keeps` names a kind that does not exist, or leaves
            out the momentum that `MuonRule.fold` writes.
        TypeError: the name is no string. The class is no dataclass derived from `Rule` or `ElementwiseRule`, has
            `Rule.summands` without `Rule.apply`, has a `Rule.apply` that takes no sums, has a method whose name is
            nearly that of a method of `Rule` or that a step does not call any more, or is an `ElementwiseRule` without
            `ElementwiseRule.update`.
    """
    name: object = algorithm
    if not isinstance(name, str):
        fault = "a class" if isinstance(name, type) else repr(name)
        raise TypeError(explain_error("register_rule", fault, "a name", 'Write @muonmesh.register_rule("my-rule")'))
    subject = f"register_rule({algorithm!r})"

    def register(rule: type[AnyRule]) -> type[AnyRule]:
        if algorithm in _OWN:
            write = f'Write @register_rule("my-{algorithm}")'
            raise ValueError(explain_error(subject, "a rule of muonmesh with this name", "a name of its own", write))
        for fault, needed, write in _faults(rule):
            raise TypeError(explain_error(subject, fault, needed, write))
        with suppress(AttributeError):  # of a setting without a default: a group says it, and is checked too
            check_keeps(by_defaults(rule))
            _check_momentum(rule)
        RULES[algorithm] = rule
        return rule

    return register


def _check_momentum(rule: type) -> None:
    """Raise ValueError if a rule inherits `MuonRule.fold`, and its `Rule.keeps` has no momentum."""
    if issubclass(rule, MuonRule) and rule.fold is MuonRule.fold and "momentum_buffer" not in by_defaults(rule).keeps():
        needed, write = "the momentum, which MuonRule.fold writes", "Write return {**super().keeps(), ...}"
        raise ValueError(explain_error(f"{rule.__name__}.keeps", "no 'momentum_buffer'", needed, write))


def _faults(rule: type) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with a class as a rule, what is needed, and what to write."""
    derived = isinstance(rule, type) and issubclass(rule, Rule | ElementwiseRule)
    if not (derived and "__dataclass_fields__" in vars(rule)):
        needed = "a dataclass derived from muonmesh.Rule"
        yield f"{rule!r}", needed, "Write @dataclass(frozen=True) between @register_rule and the class"
        return
    if issubclass(rule, Rule) and hasattr(rule, "apply_with"):  # the name of an earlier version
        needed = "apply, which a step calls with the sums"
        yield f"{rule.__name__}.apply_with", needed, "Rename it to apply"
    if issubclass(rule, Rule) and not _takes_sums(rule):
        needed = "one that a step can call with the sums too, which are () without summands"
        write = "Write def apply(self, weights, update, size, state, sums=())"
        yield f"{rule.__name__}.apply{inspect.signature(rule.apply)}", needed, write
    if issubclass(rule, Rule) and rule.overrides("summands") and not rule.overrides("apply"):
        needed = "both: what summands returns is added up and given to apply"
        write = "Write def apply(self, weights, update, size, state, sums)"
        yield f"summands of {rule.__name__} without apply", needed, write
    inherited = (ElementwiseRule.update, ElementwiseRule.step)
    if issubclass(rule, ElementwiseRule) and (rule.update, rule.step) == inherited:
        write = "Write def update(self, gradient, state, count), which returns the step of each element"
        yield f"{rule.__name__} without an update of its own", "one, which says what a step is", write
    parts = [name for name in dir(Rule if issubclass(rule, Rule) else ElementwiseRule) if not name.startswith("_")]
    for name in vars(rule).keys() - parts - {field.name for field in fields(rule)}:
        if not name.startswith("_") and (meant := get_close_matches(name, parts, 1, 0.8)):
            write = f"Rename it to {meant[0]}, or to a name that begins with an underscore"
            yield f"{rule.__name__}.{name}", f"a part that a step calls, such as {meant[0]!r}", write


def _takes_sums(rule: type[Rule]) -> bool:
    """Whether a step can call `Rule.apply` of this rule: with itself, weights, update, size, state and sums."""
    try:
        inspect.signature(rule.apply).bind(*[None] * 6)
    except TypeError:
        return False
    return True


def by_defaults(rule: type[AnyRule]) -> AnyRule:
    """Return a rule with the defaults of its fields; fields without a default are not set."""
    instance = object.__new__(rule)
    for field in fields(rule):
        if field.default is not MISSING:
            object.__setattr__(instance, field.name, field.default)
        elif field.default_factory is not MISSING:
            object.__setattr__(instance, field.name, field.default_factory())
    return instance


def is_known(algorithm: str) -> bool:
    """Whether a rule has this name, registered or declared by the entry points of an installed package.

    A package's rule is imported when its name is first used: ``[project.entry-points."muonmesh.rules"]`` with a line
    ``name = "module:Class"``.

    Raises:
        ValueError: importing the entry point registers no rule of this name, or two packages declare this name.
    """
    if algorithm in RULES:
        return True
    declared = entry_points(group=ENTRY_POINTS, name=algorithm)
    if not declared:
        return False
    if len(declared) > 1:
        names = ", ".join(entry.value for entry in declared)
        raise ValueError(explain_error(f"algorithm {algorithm!r}", f"several packages with it: {names}", "one"))
    (entry,) = declared
    subject, needed = f"the entry point {entry.name} = {entry.value}", "a rule registered by this name"
    try:
        entry.load()
    except (ImportError, AttributeError) as error:
        write = "Correct it, and install the package again"
        raise ValueError(explain_error(subject, str(error), needed, write)) from error
    if algorithm not in RULES:
        write = f'Write @muonmesh.register_rule("{algorithm}") in front of the class'
        raise ValueError(explain_error(subject, "no such rule in what it imports", needed, write))
    return True


def rule_of(group: Mapping[str, Any]) -> Any:
    """Return the rule of a group, with the group's current settings."""
    return RULES[group["algorithm"]].of(group)


def never_negative() -> frozenset[str]:
    """Return the names of all state, of any rule, that no step makes negative."""
    return frozenset(name for rule in RULES.values() for name in rule.never_negative)


def is_matrix_rule(algorithm: str) -> bool:
    """Whether an algorithm steps whole matrices, rather than AdamW's elements."""
    return issubclass(RULES[algorithm], Rule)
