"""Named groups: which parameter of a model each saved state of another optimizer belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import not_, or_
from typing import Any, NamedTuple

from torch import Tensor

from muonmesh.errors import StateError, explain_error
from muonmesh.names import canonical_name
from muonmesh.step.members import OptimizedParameter
from muonmesh.tools.migration.packages import PACKAGES, PackageName


class SourceState(NamedTuple):
    """The state of another optimizer: its package, its groups and its state by parameter."""

    package: PackageName
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[Any, Mapping[str, Any]]


class NamedGroup(NamedTuple):
    """One param group of another optimizer, with the names of its parameters.

    Attributes:
        package: The package of the optimizer.
        number: The number of the group in its source.
        settings: The group as it was saved.
        names: The name of each parameter.
        entries: The saved state of each parameter; empty if the source has none.
        is_live: Whether the names are those of the optimizer's own tensors, so that they are in the right order.
    """

    package: PackageName
    number: int
    settings: Mapping[str, Any]
    names: Sequence[str]
    entries: Sequence[Mapping[str, Any]]
    is_live: bool


def named_groups(
    saved: SourceState, orders: Iterator[Sequence[str | Tensor] | None], recipients: Mapping[str, OptimizedParameter]
) -> list[NamedGroup]:
    """Return the groups of a source with the names of their parameters, in the order of the saved state.

    Parameters without state that muonmesh does not train, such as frozen ones, are left out.

    Raises:
        StateError: the state has no names, or names of other parameters than the recipients', or one name twice.
    """
    by_id = {id(recipient.tensor): recipient.name for recipient in recipients.values()}
    groups: list[NamedGroup] = []
    for number, group in enumerate(saved.groups):
        keys, order = group["params"], next(orders)
        entries = [saved.state.get(key, {}) for key in keys]
        trained = [id(key) in by_id for key in keys]
        is_live = any(trained) and all(map(or_, trained, map(not_, entries)))
        if is_live:  # an optimizer over this very model
            chosen = [by_id.get(id(key), "?") for key in keys]
        elif order is not None:
            chosen = [by_id.get(id(key), "?") if isinstance(key, Tensor) else canonical_name(key) for key in order]
        elif group.get("param_names"):
            chosen = list(map(canonical_name, group["param_names"]))
        elif all(isinstance(key, str) for key in keys):  # by get_optimizer_state_dict
            chosen = list(map(canonical_name, keys))
        else:
            fault = f"{len(keys)} parameters in group {number} that have numbers instead of names"
            needed = "their names, or the optimizer itself over the parameters of this model"
            write = "Write params=[...], for each group its parameters in the order in which that optimizer was given "
            write += "them"
            raise StateError(explain_error("source", fault, needed, write))
        # In a sorted group, a name may belong to another entry.
        may_be_sorted = PACKAGES[saved.package].sorts and not is_live
        with_state = [name for name, entry in zip(chosen, entries, strict=False) if entry or may_be_sorted]
        strangers = [name for name in with_state if name not in recipients]
        if len(chosen) != len(keys) or strangers:
            fault = f"{len(keys)} parameters in group {number}, for which the names are {', '.join(chosen[:4])}"
            needed = f"parameters of this model, not {strangers[0]}" if strangers else "as many names"
            write = "Convert for the model and the groups that the state was saved with"
            raise StateError(explain_error("source", fault, needed, write))
        remaining = [(name, entry) for name, entry in zip(chosen, entries, strict=True) if name in recipients]
        names = [name for name, _ in remaining]
        groups.append(NamedGroup(saved.package, number, group, names, [entry for _, entry in remaining], is_live))
    for name, count in Counter(name for named in groups for name in named.names).items():
        if count > 1:
            fault, write = f"its name {count} times among those of one source", "Name each parameter once in params="
            raise StateError(explain_error(name, fault, "one state of it", write))
    return groups


def in_saved_order(groups: Sequence[NamedGroup], recipients: Mapping[str, OptimizedParameter]) -> list[NamedGroup]:
    """Return the groups with their names in the order of the saved state.

    Each rank of KellerJordan's distributed Muon saves the state of some matrices, so only the files of all ranks
    together show whether the matrices were sorted.
    """
    ranks: dict[tuple[int, tuple[str, ...]], list[NamedGroup]] = {}
    for group in groups:
        ranks.setdefault((group.number, tuple(group.names)), []).append(group)
    names = {key: _saved_order(same_group, recipients) for key, same_group in ranks.items()}
    return [group._replace(names=names[group.number, tuple(group.names)]) for group in groups]


def _saved_order(ranks: Sequence[NamedGroup], recipients: Mapping[str, OptimizedParameter]) -> Sequence[str]:
    """Return the names of one group, of which each rank has saved a part, in the order of the saved state.

    KellerJordan's distributed Muon sorts its matrices by shape, with a stable sort. If the shapes fit in the given
    order, the given order is right.

    Raises:
        StateError: too few matrices have state to tell whether they were sorted.
    """
    group = ranks[0]
    names = group.names
    by_shape = sorted(names, key=lambda name: recipients[name].tensor.shape, reverse=True)
    sorts = PACKAGES[group.package].sorts and group.settings.get("use_muon") is not False
    saved = [[entry for entry in entries if entry] for entries in zip(*(rank.entries for rank in ranks), strict=True)]
    if group.is_live or not sorts or not _fit(saved, by_shape, recipients):
        return names
    if not _fit(saved, names, recipients):
        return by_shape
    unclear = [name for name, other, entries in zip(names, by_shape, saved, strict=True) if entries and name != other]
    if unclear:
        fault = "state that fits the given order and that of sorted shapes"
        needed = "the files of all ranks, or the order of the saved state"
        write = "Convert the files of all ranks in one call, or sort params= as that optimizer does, by shape"
        raise StateError(explain_error(unclear[0], fault, needed, write))
    return names


def _fit(
    saved: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str], recipients: Mapping[str, OptimizedParameter]
) -> bool:
    """Return whether each saved entry has a tensor with the shape of the parameter of that name."""
    return all(
        any(isinstance(value, Tensor) and value.shape == recipients[name].tensor.shape for value in entry.values())
        for name, entries in zip(names, saved, strict=True)
        for entry in entries
    )
