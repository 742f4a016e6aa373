"""Reading: what a step reads from the param groups; a group that is as the last step has read it is not read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.numerics.rules import RULES, Rule
from muonmesh.settings.checks import check_group, check_structure


class GroupRead:
    """A param group as a step has read it.

    Args:
        group: The group.

    Attributes:
        keys: Its keys.
        contents: Its values, which stay alive like the entries of its lists, so that no other object takes the identity
            of one of them. Empty if some of them could change in place: then every step reads the group.
        rule: The snapshot of its rule.
        at_rest: Whether its learning rate is exactly 0.
        terms: What a plan depends on, see `plan_terms`.

    Raises:
        ValueError, TypeError: an entry is missing, unknown or has no allowed value.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        subject = f"group {group.get('name')!r}"
        check_structure(subject, group)
        self.rule = check_group(subject, group, read=False)
        fixed = all([key == "params" or _is_fixed(value, lists=True) for key, value in group.items()])
        self.keys, self.contents = [*group], [*group.values()] if fixed else []
        self._texts, self._lists = list[list[Any]](), list[list[Any]]()
        for value in self.contents:
            if type(value) is list:  # of texts, equal ones are the same to a step, and Python compares whole lists
                (self._texts if set(map(type, value)) <= {str, type(None)} else self._lists).append(value)
        self._texts_before = [*map(list, self._texts)]
        self._lengths, self._entries = [*map(len, self._lists)], [*chain.from_iterable(self._lists)]
        self.at_rest, self.terms = float(group["lr"]) == 0, plan_terms(group, self.rule)

    def is_current(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group holds the same objects, none of which can change, and its rule is the same."""
        if len(group) != len(self.contents) or not all(map(is_, group.values(), self.contents)):
            return False
        same = self._texts == self._texts_before and [*map(len, self._lists)] == self._lengths
        if not same or not all(map(is_, chain.from_iterable(self._lists), self._entries)):  # one has moved, say
            return False
        return [*group] == self.keys and RULES.get(group["algorithm"]) is type(self.rule)


class StepSettings:
    """The settings that a step reads from the param groups.

    Args:
        groups: The groups as they were read, up to the first one with an error.
        count: The number of groups.
        error: The first error; None if there is none.

    Attributes:
        groups, error: As given.
        at_rest: Whether every learning rate is exactly 0.
        rules: For each group the snapshot of its rule for this step; None from the first group with an error on.
        terms: For each group what a plan depends on, see `plan_terms`; none from the first group with an error on.
        counting: The numbers of the groups in which steps are counted (`Hyperparameters.counts_steps`).
    """

    def __init__(self, groups: Sequence[GroupRead], count: int, error: Exception | None) -> None:
        self.groups, self.error = groups, error
        self.at_rest = error is None and all([group.at_rest for group in groups])
        self.rules: list[Any] = [group.rule for group in groups] + [None] * (count - len(groups))
        self.terms = [group.terms for group in groups]
        self.counting = [number for number, group in enumerate(groups) if group.rule.counts_steps]


def read_groups(
    groups: Sequence[Mapping[str, Any]], replaced: dict[Tensor, int], last: StepSettings | None = None
) -> StepSettings:
    """Check and read the current settings of all groups, in every step. An error is returned, so all ranks learn of it.

    Args:
        groups: The param groups.
        replaced: See `keep_rates_apart`. A tensor that was written since then is an error, once.
        last: What the last step has read. Groups that have not changed since then are taken from it.
    """
    error: Exception | None = None
    before: Sequence[GroupRead] = () if last is None else last.groups
    groups_read: list[GroupRead] = []
    try:
        if replaced and any(_version(tensor) != version for tensor, version in replaced.items()):
            replaced.update({tensor: _version(tensor) for tensor in replaced})
            problem = "a change in place of a tensor that was given as lr of several groups, which have copies of it"
            write = 'Write for group in optimizer.param_groups: group["lr"].fill_(...)'
            raise ValueError(explain_error("lr", problem, "a change of each group's own tensor", write))
        for number, group in enumerate(groups):
            read = before[number] if number < len(before) else None
            groups_read.append(read if read is not None and read.is_current(group) else GroupRead(group))
    except (TypeError, ValueError) as wrong:
        error = wrong
    if last is not None and last.error is error is None and [*map(id, groups_read)] == [*map(id, before)]:
        return last
    return StepSettings(groups_read, len(groups), error)


def plan_terms(group: Mapping[str, Any], rule: Any) -> object:
    """Return what a plan depends on in a group: its parameters, names and matrices, and what its rule needs."""
    return (
        group["algorithm"],
        group.get("name"),  # metrics of all ranks bear it
        tuple(map(id, group["params"])),
        tuple(group["param_names"]),
        repr(group.get("matrices")),  # tells 1 from True
        str(group["ns_coefficients"]),
        group["ns_steps"],
        group["ns_method"],
        group["stochastic_rounding"] is None,  # parameters of some dtypes cannot have it
        (*rule.keeps().items(), rule.count_of_sums(), rule.orthogonalizes, rule.sees_direction)
        if isinstance(rule, Rule)
        else (),
    )


# ------------------------------------------------------------------ how a change of a group is seen


def _is_fixed(value: object, *, lists: bool = False) -> bool:
    """Return whether a value cannot change in place; or, with ``lists``, is a list of such values."""
    inside = value if type(value) is tuple or (lists and type(value) is list) else None
    return type(value) in (int, float, bool, str, type(None)) if inside is None else all(map(_is_fixed, inside))


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
