"""split_params: puts every trainable parameter of a model into exactly one param group, with a reason."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from muonmesh.errors import called, explain_error, warn
from muonmesh.groups.example import Example, facts_of_example
from muonmesh.groups.facts import Facts
from muonmesh.groups.known import input_output_layers
from muonmesh.groups.param_groups import FROZEN, RESERVED, ParamGroups, check_module, refuse_untrained
from muonmesh.groups.parameter_sites import (
    Matrices,
    Role,
    Site,
    global_shape,
    shared_sites,
    tensor_attributes,
    unwrapped,
)
from muonmesh.groups.roles import by_shape, declarations, declared_by, shared_roles, without_decay
from muonmesh.groups.watch import Watch
from muonmesh.layout.matrix import as_tuples
from muonmesh.names import in_order, names_matching
from muonmesh.numerics.rules import RULES, is_known, is_matrix_rule
from muonmesh.numerics.setting import own_names

_NAMES = ("muon", "adamw.embeddings", "adamw.head", "adamw.matrices", "adamw.vectors")
_HEADS = "muon_num_heads"
"""Attribute of a parameter that gives DeepSpeed's own Muon the number of heads in its rows."""


@dataclass
class _Entry:
    """One trainable parameter: all its names, its role, and its settings from overrides.

    `differing` are the different splits that it would get under its other names. `notes` are added to the reason.
    """

    parameter: nn.Parameter
    names: list[str]
    role: Role
    differing: list[Matrices | None]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    overridden_by: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The canonical name: the first name of the parameter in the model."""
        return self.names[0]

    @property
    def algorithm(self) -> str:
        """The algorithm, or the rule, that trains the parameter."""
        return str(self.settings.get("algorithm", self.role.algorithm))

    @property
    def half(self) -> str:
        """Whose settings the parameter gets: "muon" for a rule of matrices, else "adamw"."""
        return "muon" if is_matrix_rule(self.algorithm) else "adamw"

    @property
    def guessed(self) -> bool:
        """Whether the role of the parameter is a guess, which a forward may contradict."""
        return self.role.guess and not self.overridden_by


def split_params(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    example: Example | None = None,
    watch: bool = True,
) -> ParamGroups:
    """Sort the trainable parameters of `model` into param groups for Muon and AdamW.

    Args:
        model: any module, whether or not it is on the meta device, sharded by `fully_shard`, or wrapped in
            DistributedDataParallel, torch.compile or activation checkpointing.
        muon: settings for all groups of Muon, such as `{"lr": 6e-4}`.
        adamw: settings for all groups of AdamW. Norms, biases and other vectors keep weight decay 0 whatever is said
            here; only an override that names them changes it.
        overrides: canonical name or regular expression → "muon", "adamw", a rule, or a dict of settings that may hold
            "algorithm" and "matrices". A key that is a parameter's exact name means that parameter only; any other is
            searched for in the names (`re.search`). Exact names win over expressions, later expressions over earlier
            ones, setting by setting.
        example: One forward of the model, from whose graph input layers, output layers and fused weights are read: its
            arguments as a tuple, its keyword arguments as a dict, or a function that calls the model and returns its
            loss. With arguments, a copy on the meta device runs where that is possible, so nothing is computed. The
            model, its gradients and torch's random numbers stay as they were. Before the model is sharded only; write
            ``groups.held_by(model)`` after it.
        watch: Whether a `Muon` of these groups reads the first training forward of the model, if there is no
            ``example``. Before its first step it compares what the forward shows with what was guessed. What the user
            has written in ``overrides`` is not compared.

    Returns:
        The groups, Muon's first. Each parameter is in exactly one group; `print(groups)` shows all groups.

    Raises:
        TypeError: `model` is no module, or settings or overrides are not of the types above.
        ValueError: an override matches nothing, or does not fit its parameter; no parameter is trainable; a wrapper
            flattened a weight, so its shape is lost; ``example`` is given and the model is sharded; or the forward of
            ``example`` raises.

    Warns:
        UserWarning: if Muon gets no matrix.

    The rules are in docs/groups.md; "Muon for hidden matrices, AdamW for the rest" is K. Jordan's
    (https://kellerjordan.github.io/posts/muon/).
    """
    check_module(model)
    base: dict[str, dict[str, Any]] = {}
    for half, values in (("muon", muon), ("adamw", adamw)):
        write = "Write it in overrides={...} where a parameter is meant"
        source, reserved = f"{called('split_params')}: {half}=", RESERVED | {"algorithm", "matrices"}
        settings = _settings(source, {} if values is None else values, reserved, write)
        base[half] = own_names(f"{half}=", settings) if half == "adamw" else settings
        _check_read(f"{half}=", base[half], [half])
    facts = None if example is None else facts_of_example(model, example)
    entries, frozen = _entries(model, facts)
    _override(entries, frozen, overrides)
    for entry in entries:
        _check_possible(entry)
    groups: dict[str, dict[str, Any]] = {name: {} for name in _NAMES}
    for entry in entries:
        algorithm, half = entry.algorithm, entry.half
        entry.settings.pop("algorithm", None)
        matrices = entry.settings.pop("matrices", entry.role.matrices)
        kind = "matrices" if half == "muon" else entry.role.kind
        name = "muon" if half == "muon" else f"adamw.{kind}"
        settings = {**base[half], **({"weight_decay": 0.0} if kind == "vectors" else {}), **entry.settings}
        apart = [] if algorithm == half else [algorithm]
        apart += [f"{k}={v!r}" for k, v in sorted(entry.settings.items())]
        if apart:
            name += "[" + ",".join(apart) + "]"
        group = groups.setdefault(name, {})
        if not group:
            group.update(params=[], param_names=[], name=name, algorithm=algorithm)
            group.update({"matrices": []} if half == "muon" else {}, reasons=[], **settings)
        group["params"].append(entry.parameter)
        group["param_names"].append(entry.name)
        group["reasons"].append(_reason(entry))
        if half == "muon":
            group["matrices"].append(as_tuples(matrices))
    filled = [group for group in groups.values() if group]
    further = {name: entry.name for entry in entries for name in entry.names[1:]}
    if not any(is_matrix_rule(group["algorithm"]) for group in filled) and not any(e.overridden_by for e in entries):
        warn(
            f"{type(model).__name__}: found 0 matrices for Muon among {len(entries)} trained parameters, so AdamW "
            "trains all of them. print(split_params(model)) says why; write "
            + ("" if example is not None else "example=(inputs,), so that a forward shows which are matrices, or ")
            + 'overrides={name: "muon"}'
        )
    guesses = [entry.name for entry in entries if entry.guessed]
    roles = {entry.name: entry.role for entry in entries if watch and not entry.overridden_by}
    filled.sort(key=lambda group: _NAMES.index(group["name"].partition("[")[0]))
    result = ParamGroups(filled, frozen=frozen, shared=further, guesses=guesses, roles=roles, model=model)
    if watch and facts is None and guesses:
        result.watch = Watch(unwrapped(model), roles)
    return result


def _reason(entry: _Entry) -> str:
    reason = "; ".join([entry.role.reason, *entry.notes, *(["a guess"] if entry.guessed else [])])
    if entry.overridden_by:
        keys = ", ".join(map(repr, dict.fromkeys(entry.overridden_by)))
        reason = f"override {keys} (by default {entry.role.algorithm}: {reason})"
    if len(entry.names) > 1:
        reason += f"; shared with {', '.join(entry.names[1:])}"
    return reason


def _settings(source: str, values: Any, reserved: Collection[str], write: str) -> dict[str, Any]:
    """Return settings as a dict, after a check that each key may be a setting of a group."""
    if not isinstance(values, Mapping):
        raise TypeError(explain_error(source, repr(values), "a dict of settings", 'Write a dict such as {"lr": 6e-4}'))
    for key in values:
        if not isinstance(key, str) or key in reserved:
            needed = 'settings such as "lr": the rest is decided parameter by parameter'
            raise ValueError(explain_error(source, repr(key), needed, write))
    return dict(values)


def _entries(model: nn.Module, facts_by_id: Mapping[int, Facts] | None) -> tuple[list[_Entry], dict[str, str]]:
    """Return all trainable parameters, once each in the order of their first names, and the frozen parameters.

    `facts_by_id` are what a forward showed of parameters, by id; None without a forward.
    """
    layers, places = input_output_layers(model), shared_sites(model)
    _check_declarations([site for group in places for site in group])
    for name, tensor in tensor_attributes(model).items():
        if hasattr(getattr(tensor, "_local_tensor", tensor)._base, "_st_info"):
            problem = (
                "a DTensor in place of a parameter, which a forward of DistributedDataParallel(..., device_mesh=...)"
            )
            needed, write = "the parameter", "Make the optimizer before the first forward"
            raise ValueError(explain_error(name, f"{problem} leaves", needed, write))
    frozen = {site.name: FROZEN for group in places for site in group if not site.parameter.requires_grad}
    trained = [group for group in places if group[0].parameter.requires_grad]
    if not trained:
        refuse_untrained(model, frozen)
    entries = []
    for group in trained:
        parameter = group[0].parameter
        facts = None if facts_by_id is None else facts_by_id.get(id(parameter))
        roles = shared_roles(group, layers, facts)
        role, differing = roles[0], list(dict.fromkeys(r.matrices for r in roles))[1:]
        entry = _Entry(parameter, [site.name for site in group], role, differing if role.algorithm == "muon" else [])
        if facts_by_id is not None and facts is None and role.guess:
            entry.notes.append("the example's forward does not show it")
        exempt = next(filter(None, map(without_decay, group)), None) if role.kind != "vectors" else None
        if exempt is not None and (role.algorithm == "adamw" or exempt != "its name"):
            entry.settings["weight_decay"] = 0.0
            entry.notes.append(f"no weight decay, by {exempt}")
        entries.append(entry)
    return entries, frozen


def _check_declarations(all_sites: list[Site]) -> None:
    used = {(id(module), key) for site in all_sites for module, key in declarations(site)}
    for module in {id(m): m for site in all_sites for _, m in site.owners}.values():
        for key in declared_by(module):
            if (id(module), key) not in used:
                problem = f"{key!r} in its muonmesh_matrices, which names no parameter of it"
                needed = "a name as in its named_parameters()"
                raise ValueError(explain_error(type(module).__name__, problem, needed, "Correct or remove it"))


def _override(entries: list[_Entry], frozen: dict[str, str], overrides: Any) -> None:
    """Apply `overrides` to the entries, expressions first, exact names last."""
    if overrides is None:
        return
    if not isinstance(overrides, Mapping):
        needed, write = "a mapping from names or regular expressions", 'Write overrides={"lm_head.weight": "muon"}'
        raise TypeError(explain_error(called("split_params"), f"overrides={overrides!r}", needed, write))
    by_name = {name: entry for entry in entries for name in entry.names}
    ordered = list(in_order({key: _settings_of(key, value) for key, value in overrides.items()}, by_name))
    for key, settings, meant in ordered:
        if not meant:
            _refuse_unmatched(key, by_name, frozen)
        for entry in {id(by_name[name]): by_name[name] for name in meant}.values():
            rule = RULES.get(settings.get("algorithm", entry.algorithm), RULES["adamw"])
            entry.settings.update(own_names(f"overrides[{key!r}]", settings, rule.settings()))
            if "algorithm" in settings or "matrices" in settings:
                entry.overridden_by.append(key)
    for key, settings, meant in ordered:
        source = f"overrides[{key!r}]"
        _check_read(source, own_names(source, settings), {by_name[name].half for name in meant})


def _check_read(source: str, settings: Collection[str], halves: Collection[str]) -> None:
    """Raise a ValueError for a setting of the other algorithm than the one that trains these parameters."""
    read = {key for half in halves for key in RULES[half].settings()}
    readable = {*RULES["muon"].settings(), *RULES["adamw"].settings()}
    for key in settings:
        if key in readable and key not in read:  # so there is one half
            problem = f"{key!r}, which {''.join(halves)} does not read"
            needed = "a setting of these parameters' algorithm"
            write = "Remove it, or write it where the other algorithm trains"
            raise ValueError(explain_error(source, problem, needed, write))


def _settings_of(key: Any, value: Any) -> dict[str, Any]:
    """Return the value of an override as a dict of settings."""
    source = f"overrides[{key!r}]"
    if not isinstance(key, str):
        write = "Write the name of a parameter or a regular expression"
        shown = f"of the class {type(key).__name__}" if isinstance(key, nn.Parameter | nn.Module) else repr(key)
        raise TypeError(explain_error("overrides", f"the key {shown}", "a string", write))
    if not isinstance(value, str | Mapping):
        write = f'Write {{{key!r}: {{"lr": ...}}}}, or call requires_grad_(False) on a parameter to freeze it'
        raise TypeError(explain_error(source, repr(value), '"muon", "adamw" or a dict of settings', write))
    settings = _settings(source, {"algorithm": value} if isinstance(value, str) else value, RESERVED, "Remove it")
    algorithm = settings.get("algorithm", "muon")
    if not isinstance(algorithm, str) or not is_known(algorithm):
        others = ", ".join(f'"{name}"' for name in RULES if name not in ("muon", "adamw"))
        close = difflib.get_close_matches(str(algorithm), RULES, 1) or ["muon"]
        needed = f'"muon" or "adamw", or another rule: {others}'
        write = f"Write {{{key!r}: {close[0]!r}}}, or call requires_grad_(False) on a parameter to freeze it"
        raise ValueError(explain_error(source, f"the algorithm {algorithm!r}", needed, write))
    return settings


def _refuse_unmatched(key: str, names: Collection[str], frozen: Collection[str]) -> NoReturn:
    """Raise a ValueError because the key of an override matches no trainable parameter."""
    source = f"overrides[{key!r}]"
    if names_matching(key, frozen):
        write = "Remove the override, or call requires_grad_() before"
        raise ValueError(explain_error(source, "frozen parameters only", "one that is trained", write))
    plain = key.replace("\\", "")
    alike = [name for name in names if plain.rpartition(".")[2] in name] or names
    close = difflib.get_close_matches(plain, alike, n=3, cutoff=0.4)
    needed = "a parameter's name, or an expression that re.search finds in one"
    write = f"Write one of: {', '.join(close)}" if close else f"The first parameter is {next(iter(names))}"
    raise ValueError(explain_error(source, "no parameter that matches", needed, write))


def _check_possible(entry: _Entry) -> None:
    """Raise a ValueError if the algorithm does not fit a parameter.

    Muon needs at least two dims and a split into matrices. AdamW takes no matrices.
    """
    algorithm = entry.algorithm
    keys = ", ".join(map(repr, entry.overridden_by))
    shape = global_shape(entry.parameter)
    if not is_matrix_rule(algorithm):
        if "matrices" in entry.settings:
            named = "AdamW" if algorithm == "adamw" else algorithm
            problem = f'"matrices" from override {keys} for a parameter of {named} ({entry.role.reason})'
            write = f'Write {{"algorithm": "muon", "matrices": {entry.settings["matrices"]!r}}}'
            raise ValueError(explain_error(entry.name, problem, "Muon as its algorithm", write))
        return
    if len(shape) < 2:
        by = f"override {keys}" if keys else f"{entry.role.reason!r}"
        problem, needed = f"Muon for shape {shape}, by {by}", "two or more dims: a vector has no matrix"
        write = f'Write overrides={{{entry.name!r}: "adamw"}}, or leave it out there'
        raise ValueError(explain_error(entry.name, problem, needed, write))
    if entry.differing and "matrices" not in entry.settings:
        stored = f"{entry.role.matrices!r} and {entry.differing[0]!r}"
        problem = f"one parameter shared by {', '.join(entry.names)}, whose modules store it differently, as {stored}"
        write = f'overrides={{{entry.name!r}: {{"algorithm": "muon", "matrices": {entry.role.matrices!r}}}}}'
        raise ValueError(explain_error(entry.name, problem, "one form for all of them", f"Write {write}"))
    heads = getattr(entry.parameter, _HEADS, None)
    if heads is not None and "matrices" not in entry.settings and len(shape) == 2:
        _tag(entry, heads, shape)
    if entry.settings.get("matrices", entry.role.matrices) is None:
        default = by_shape(shape)
        if default is None:
            problem, needed = f"Muon from override {keys} for shape {shape}", "what its matrices are"
            write = 'Write {"algorithm": "muon", "matrices": "flatten"} for one matrix, out × the rest'
            raise ValueError(explain_error(entry.name, problem, needed, write))
        entry.settings["matrices"] = default


def _tag(entry: _Entry, heads: object, shape: tuple[int, ...]) -> None:
    """Make a matrix for each head of a parameter with DeepSpeed's tag for the number of heads: blocks of its rows."""
    counts = isinstance(heads, int) and not isinstance(heads, bool) and heads > 0
    if not (counts and entry.role.matrices == "whole" and shape[0] % heads == 0):  # type: ignore[operator]
        problem = f"{_HEADS}={heads!r} on {shape}, which splits as {entry.role.matrices!r}"
        needed = "whole heads that follow each other in the rows of one matrix"
        write = f'del parameter.{_HEADS}, and overrides={{"{entry.name}": {{"algorithm": "muon", "matrices": ...}}}}'
        raise ValueError(explain_error(entry.name, problem, needed, f"Write {write}"))
    entry.settings["matrices"] = ("heads", heads, 0)
    entry.notes.append(f"one matrix for each head: {_HEADS}={heads}")
