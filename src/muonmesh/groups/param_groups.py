"""ParamGroups: the param groups of a model, Muon's first, as a table and for a part of the model."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from torch import nn

from muonmesh.errors import about, called, escaped, explain_error
from muonmesh.groups.parameter_sites import Role, global_shape, is_traced, unwrapped
from muonmesh.groups.watch import Watch
from muonmesh.names import canonical_name, names_matching, patterns
from muonmesh.table import aligned

RESERVED = {"params", "param_names", "name", "reasons"}
"""Keys of a group that are no settings."""

FROZEN = "frozen: requires_grad is False"


class ParamGroups(list[dict[str, Any]]):
    """Param groups for `muonmesh.Muon` (or any `torch.optim.Optimizer`), Muon's first; `print` shows a table.

    Each group is a plain dict:
        "params": the parameters, in the model's order.
        "param_names": their canonical names.
        "name": unique; "muon", "adamw.embeddings", "adamw.head", "adamw.matrices", "adamw.vectors", and the same
            with the settings behind it for groups that an override made, such as "muon[lr=0.01]".
        "algorithm": "muon" or "adamw", or the rule that an override names.
        "matrices": in Muon's groups only, how each parameter splits into matrices; plain nested tuples.
        "reasons": why each parameter is in this group.
        and the settings, such as "lr" or "weight_decay".

    Attributes:
        frozen: the parameters left out, by canonical name, with the reason.
        shared: the further names of shared parameters, with the one that is in "param_names".
        guesses: the parameters of which types, names and sizes alone decided; their reasons end in "a guess".
        model: a weak reference to the model without wrappers; None after pickling. `Muon` looks there for parameters
            that were replaced, added or unfrozen later.
        trained: the names of the parameters that the groups were made with.
        watch: the watch on the model's first training forward, which `Muon` compares with the guesses; None if nothing
            is watched, and after pickling.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        frozen: dict[str, str],
        shared: dict[str, str],
        guesses: Collection[str],
        roles: dict[str, Role],
        model: nn.Module,
    ) -> None:
        super().__init__(groups)
        self.trained = frozenset(name for group in groups for name in group["param_names"])
        self.frozen = frozen
        self.shared = shared
        self.guesses = tuple(guesses)
        self._roles = roles  # those that a first training forward may contradict, not what the user has written
        self.model: weakref.ReferenceType[nn.Module] | None = weakref.ref(unwrapped(model))
        self.watch: Watch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the references to the model, which cannot be pickled."""
        return {**self.__dict__, "model": None, "watch": None}

    def held_by(self, stage: nn.Module) -> ParamGroups:
        """Return these groups with only the parameters of one part of the model: a pipeline stage, traced or not.

        The part may also be the model itself after `fully_shard` or `parallelize_module`, which replace parameters. Its
        first training forward is compared with these groups, unless it was traced.

        Args:
            stage: The part. Its parameters have their names in the whole model, with or without prefixes of wrappers.

        Raises:
            TypeError: `stage` is no module.
            ValueError: `stage` holds a parameter of another name or shape, or no trainable parameter, or weights that
                were tied in the whole model are parameters of their own.
        """
        check_module(stage)
        trained = {name: group["params"][i] for group in self for i, name in enumerate(group["param_names"])}
        members: dict[str, tuple[str, nn.Parameter]] = {}
        frozen: dict[str, str] = {}
        for key, parameter in stage.named_parameters():
            name = canonical_name(key)
            if not parameter.requires_grad:
                frozen[name] = self.frozen.get(name, FROZEN)
                continue
            first = self.shared.get(name, name)
            if first not in trained:
                problem = "The stage holds this parameter, and the groups of the whole model have none of this name. "
                problem += "Call split_params(model) on the model that the stage was cut from, and keep its names"
                raise ValueError(about(name, problem))
            if (shape := global_shape(parameter)) != (needed_shape := global_shape(trained[first])):
                needed, write = f"{needed_shape} as in the whole model", "Cut the stage from that model"
                raise ValueError(explain_error(name, f"shape {shape}", needed, write))
            if first in members:  # one of both would be trained by nobody
                cause = f"a parameter apart from {members[first][0]}, to which it was tied in the whole model"
                write = "Tie them again after sharding, or call split_params on this model, without example="
                raise ValueError(explain_error(name, cause, "one shared parameter", write))
            members[first] = name, parameter
        if not members:
            refuse_untrained(stage, frozen)
        groups = [_restricted(group, members) for group in self if not members.keys().isdisjoint(group["param_names"])]
        roles = {name: self._roles[first] for first, (name, _) in members.items() if first in self._roles}
        attributes: dict[str, Any] = {"frozen": frozen, "shared": self.shared, "guesses": self.guesses, "roles": roles}
        result = ParamGroups(groups, **attributes, model=stage)
        if roles and not any(map(is_traced, stage.modules())):
            result.watch = Watch(unwrapped(stage), roles, part=len(members) < len(trained))
        return result

    def __str__(self) -> str:
        shown = dict[str, tuple[str, ...]]()
        for group in self:
            for i, name in enumerate(group["param_names"]):
                shape = "×".join(map(str, global_shape(group["params"][i]))) or "scalar"
                matrices = str(group["matrices"][i]) if "matrices" in group else "-"
                shown[name] = shape, group["name"], matrices, group["reasons"][i]
        names = [*shown, *self.shared, *self.frozen]
        rows: list[tuple[str, ...]] = [("parameter", "count", "shape", "group", "matrices", "reason")]
        for key, cells in patterns(shown, names).items():  # each key may be pasted into overrides=
            rows.append((key, str(len(names_matching(key, shown))), *cells))
        text = aligned(rows)
        for group in self:
            count, elements = len(group["params"]), sum(prod(global_shape(p)) for p in group["params"])
            settings = {k: v for k, v in group.items() if k not in RESERVED | {"algorithm", "matrices"}}
            notes = "".join(f", {k}={v!r}" for k, v in settings.items())
            sizes = f"{count} tensor{'' if count == 1 else 's'}, {elements:,} elements"
            text.append(escaped(f"{group['name']}: {sizes}{notes}"))
        for key, reason in patterns(self.frozen, names).items():
            text.append(escaped(f"left out: {key} ({len(names_matching(key, self.frozen))}): {reason}"))
        return "\n".join(text)


def _restricted(group: Mapping[str, Any], stage: Mapping[str, tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """Return a group with only the parameters in `stage`, which maps names to the new names and parameters."""
    positions = [i for i, name in enumerate(group["param_names"]) if name in stage]
    pairs = [stage[group["param_names"][i]] for i in positions]
    lists = {key: [group[key][i] for i in positions] for key in ("matrices", "reasons") if key in group}
    return {**group, **lists, "params": [p for _, p in pairs], "param_names": [name for name, _ in pairs]}


def check_module(model: Any) -> None:
    """Raise a TypeError if a model is no module."""
    if not isinstance(model, nn.Module):
        problem = f"a {type(model).__name__}"
        raise TypeError(explain_error(called("split_params"), problem, "a torch.nn.Module", "Pass the model"))


def refuse_untrained(model: nn.Module, frozen: Mapping[str, str]) -> None:
    """Raise the ValueError that nothing of a model is trained."""
    problem = f"{len(frozen)} parameters, none with requires_grad"
    raise ValueError(explain_error(type(model).__name__, problem, "at least one to train", "Call requires_grad_()"))
