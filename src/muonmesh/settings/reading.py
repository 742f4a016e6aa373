"""Reading: what a step reads from the param groups; a group that is as the last step has read it is not read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonmesh.errors import explain_error
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.numerics.rules import RULES, Rule
from muonmesh.settings import FOREIGN_KEYS, FRESH_MEANS, NORM_MEANS
from muonmesh.settings.checks import check_group, check_structure


class GroupRead(NamedTuple):
    """A param group as a step has read it.

    Attributes:
        copies: Copies of its values, by which a change is seen (`_copies`).
        held: Its values and parameters, which stay alive, so that no other object takes the identity of one of them.
        rule: The snapshot of its rule.
        at_rest: Whether its learning rate is exactly 0.
        terms: What a plan depends on, see `plan_terms`.
    """

    copies: Mapping[str, object]
    held: object
    rule: Any
    at_rest: bool
    terms: object

    @staticmethod
    def of(group: Mapping[str, Any], copies: Mapping[str, object]) -> GroupRead:
        """Check a group and read it; ``copies`` are its copies.

        Raises:
            ValueError, TypeError: an entry is missing, unknown or has no allowed value.
        """
        where = f"group {group.get('name')!r}"
        check_structure(where, group)
        rule = check_group(where, group, read=False)
        held = [*group.values(), *group["params"]]
        return GroupRead(copies, held, rule, float(group["lr"]) == 0, plan_terms(group, rule))


class SettingsFound(NamedTuple):
    """The settings that a step reads from the param groups.

    Attributes:
        error: The first error; None if there is none.
        at_rest: Whether every learning rate is exactly 0.
        rules: For each group the snapshot of its rule for this step; None from the first group with an error on.
        terms: For each group what a plan depends on, see `plan_terms`; none from the first group with an error on.
        counting: The numbers of the groups in which steps are counted (`Hyperparameters.counts_steps`).
        groups: The groups as they were read, up to the first one with an error.
        held: What the groups hold (`_held`), if nobody can change any of it in place, and if a step has found them
            unchanged; else empty. Groups that hold the same objects are not copied to be compared.
    """

    error: Exception | None
    at_rest: bool
    rules: list[Any]
    terms: list[object]
    counting: list[int]
    groups: list[GroupRead]
    held: list[object]


def read_groups(
    groups: Sequence[Mapping[str, Any]], replaced: dict[Tensor, int], last: SettingsFound | None = None
) -> SettingsFound:
    """Check and read the current settings of all groups, in every step. An error is returned, so all ranks learn of it.

    Args:
        groups: The param groups.
        replaced: See `keep_rates_apart`. A tensor that was written since then is an error, once.
        last: What the last step has read. Groups that have not changed since then are taken from it.
    """
    if last is not None and last.held and not replaced:
        held = _held(groups)
        if len(held) == len(last.held) and all(map(is_, held, last.held)):
            return last
    error: Exception | None = None
    before, found = [] if last is None else last.groups, list[GroupRead]()
    try:
        if any(_version(tensor) != version for tensor, version in replaced.items()):
            replaced.update({tensor: _version(tensor) for tensor in replaced})
            what = "a change in place of a tensor that was given as lr of several groups, which have copies of it"
            write = 'Write for group in optimizer.param_groups: group["lr"].fill_(...)'
            raise ValueError(explain_error("lr", what, "a change of each group's own tensor", write))
        for number, group in enumerate(groups):
            copies, read = _copies(group), before[number] if number < len(before) else None
            if read is None or read.copies != copies or RULES.get(group["algorithm"]) is not type(read.rule):
                read = GroupRead.of(group, copies)
            found.append(read)
    except (TypeError, ValueError) as wrong:
        error = wrong
    if last is not None and last.error is error is None and [*map(id, found)] == [*map(id, before)]:
        if all(map(_is_fixed, groups)):
            last.held[:] = _held(groups)
        return last
    return SettingsFound(
        error,
        error is None and all([group.at_rest for group in found]),
        [group.rule for group in found] + [None] * (len(groups) - len(found)),
        [group.terms for group in found],
        [number for number, group in enumerate(found) if group.rule.counts_steps],
        found,
        [],
    )


def plan_terms(group: Mapping[str, Any], rule: Any) -> object:
    """Return what a plan depends on in a group: its parameters, names and matrices, and what its rule needs."""
    return (
        group["algorithm"],
        group.get("name"),  # metrics of all ranks bear it
        tuple(map(id, group["params"])),
        _copied(group["param_names"]),
        _copied(group.get("matrices")),
        str(group["ns_coefficients"]),
        group["ns_steps"],
        group["ns_method"],
        group["stochastic_rounding"] is None,  # parameters of some dtypes cannot have it
        (*rule.keeps().items(), rule.count_of_sums()) if isinstance(rule, Rule) else (),
    )


# ------------------------------------------------------------------ how a change of a group is seen


def _held(groups: Sequence[Mapping[str, Any]]) -> list[object]:
    """Return all that groups hold: keys, values and what is in lists; and the rules that there are."""
    found: list[object] = [*RULES.values()]
    for group in groups:
        found += group
        for value in group.values():
            found.append(value)
            found += value if isinstance(value, list) else ()
    return found


def _is_fixed(group: Mapping[str, Any]) -> bool:
    """Return whether nobody can change what a group holds without another object, apart from its parameters."""

    def fixed(value: object) -> bool:
        return type(value) in _SCALARS or (type(value) is tuple and all(map(fixed, value)))

    rest = [value for key, value in group.items() if key != "params"]
    return all([all(map(fixed, value)) if type(value) is list else fixed(value) for value in rest])


_SCALARS = {int, float, bool, str, type(None)}
"""Types of values that nobody can change in place."""

_EXACT = {int, str, type(None)}
"""Those of them whose values differ if they are not equal, whatever their type."""


def _copies(group: Mapping[str, Any]) -> Mapping[str, object]:
    """Return copies of the values of a group, by key, without those of other frameworks, which nothing reads."""
    skipped = {key for key in group.keys() & FOREIGN_KEYS if not _is_setting(key, group.get("algorithm"))}
    return {
        key: (type(value), value or str(value)) if type(value) in _SCALARS else _COPY.get(key, _copied)(value)
        for key, value in group.items()
        if key not in skipped
    }


def _copied(value: Any) -> object:
    """Return a copy that later changes of a value do not reach. Equal copies mean the same for a step.

    Numbers are compared with their types, and zeros with their signs. An object that could change unseen gets a copy
    that equals no other.
    """
    if (kind := type(value)) in _SCALARS or isinstance(value, (str, Real)):
        return kind, value or str(value)
    if isinstance(value, (list, tuple)):
        return tuple(value) if set(map(type, value)) <= _EXACT else tuple(map(_copied, value))
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.numel() != 1:
        return object()
    return (id(value), value.dtype, value.shape, _copied(value.item())) if value.device.type == "cpu" else object()


def _is_setting(key: str, algorithm: Any) -> bool:
    return isinstance(algorithm, str) and algorithm in RULES and key in RULES[algorithm].settings()


def _identities(parameters: Any) -> object:
    return [*map(id, parameters)] if isinstance(parameters, (list, tuple)) else object()


def _form_of_means(means: Any) -> object:
    """Return a copy of the norm means. As a tensor they may be on a device, and only their form is checked."""
    if means is FRESH_MEANS:
        return means
    return (means.dtype, means.shape) if isinstance(means, Tensor) else _copied(means)


_COPY: dict[str, Callable[[Any], object]] = {"params": _identities, NORM_MEANS: _form_of_means}
"""How the values of some keys are copied."""


@plain_modes()
def keep_rates_apart(groups: Sequence[dict[str, Any]], replaced: dict[Tensor, int]) -> None:
    """Give each group a learning rate of its own where several groups share one tensor.

    Schedulers such as ReduceLROnPlateau write learning rates in place, group by group. In a tensor of several groups
    they would count once for each group.

    Args:
        groups: The param groups, written.
        replaced: The tensors that were replaced by copies, with their versions; written. No group gets one again.
    """
    rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
    for rate in rates:
        if rate not in replaced and sum(rate is other for other in rates) > 1:
            replaced[rate] = _version(rate)
    for group in groups:
        if isinstance(group["lr"], Tensor) and group["lr"] in replaced:
            group["lr"] = group["lr"].detach().clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
