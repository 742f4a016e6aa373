"""Setting names: translates names and values of another optimizer's settings to muonmesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch.optim import Optimizer

from muonmesh.errors import about, explain_error, warn
from muonmesh.tools.migration.package import Halves, Settings
from muonmesh.tools.migration.packages import PACKAGES, PackageName, groups_of


def convert_settings(source: PackageName | Optimizer | object, *rest: Any, **settings: Any) -> Settings:
    """Return settings of muonmesh for the step of another optimizer.

    Pass them to ``from_model(model, **convert_settings(...))``. They are Muon's settings, and under ``"adamw"`` AdamW's
    settings, if the source has any. Settings of Muon alone or AdamW alone are also keys of a param group and arguments
    of `Muon`. docs/migrating.md says which steps are exactly the same, and what differs between the packages.

    Args:
        source: An optimizer of torch's AdamW, Adam or Muon, KellerJordan's, dion's, DeepSpeed's or muonium's; or
            Megatron-Core's ``OptimizerConfig``; or the name of a package. If a scheduler has changed a learning rate,
            the initial value counts.
        rest: If ``source`` is an optimizer, the optimizer of all other parameters, such as AdamW next to torch's Muon.
            If ``source`` is a name, param groups as that package takes them.
        settings: If ``source`` is a name, the arguments of that package's constructor (DeepSpeed: the "params" of the
            configuration's optimizer; Megatron: fields of ``OptimizerConfig``). A missing argument takes that package's
            default.

    Returns:
        A plain dict. Betas and ε are ``adamw_betas`` and ``adamw_eps``. Vectors never decay with `from_model`.

    Raises:
        TypeError: ``source`` belongs to no known package, or is an optimizer that does not store its settings.
        ValueError: a setting is unknown, has no counterpart, or differs between groups of Muon or between groups of
            AdamW.
    """
    if isinstance(source, str):
        if source not in PACKAGES:
            needed = "one of " + ", ".join(map(repr, get_args(PackageName)))
            raise ValueError(explain_error("source", f"{source!r}", needed, 'Write convert_settings("torch", lr=0.02)'))
        for group in rest:
            if not isinstance(group, Mapping):
                needed = f"param groups as {source} takes them"
                raise TypeError(explain_error("rest", f"{type(group).__name__}", needed, "Write a dict"))
        return _merged(source, [PACKAGES[source].read_group({**settings, **group}) for group in rest or ({},)], source)
    if settings:
        found = f"settings beside an optimizer: {', '.join(settings)}"
        raise ValueError(explain_error("settings", found, "either", "Change what convert_settings returns"))
    owned = [groups_of(optimizer) for optimizer in (source, *rest)]
    halves = [PACKAGES[name].read_group(group) for name, groups in owned for group in groups]
    if not any("adamw" in half for half in halves):
        what = "from_model takes these settings, learning rate included, for AdamW too. Write "
        warn(about(type(source).__name__, f"{what}convert_settings(muon, adamw), with the optimizer of the rest"))
    return _merged(type(source).__name__, halves, owned[0][0])


def _merged(where: str, groups: Sequence[Halves], name: str) -> Settings:
    """Return the settings for Muon and AdamW as arguments of `from_model`."""
    muon = _agreed(f"{where}'s Muon groups", [halves["muon"] for halves in groups if "muon" in halves], name)
    adamw = _agreed(f"{where}'s AdamW groups", [halves["adamw"] for halves in groups if "adamw" in halves], name)
    return {**muon, "adamw": adamw} if muon and adamw else muon or adamw


def _agreed(where: str, groups: list[Settings], name: str) -> Settings:
    """Return the settings that all groups of one algorithm have in common.

    Raises:
        ValueError: the groups have different settings.
    """
    decaying = [group for group in groups if not group.pop("exempt", False)]
    groups = decaying or groups  # groups of vectors without decay need no setting: vectors never decay in muonmesh
    for key in groups[0] if groups else ():
        values = {str(group.get(key)): None for group in groups}
        if len(values) > 1:
            found, needed = f"{key} {' and '.join(values)}", "one for all of them"
            write = 'Convert each group by itself: {"params": group["params"], "algorithm": "muon" or "adamw", '
            write += f'**convert_settings("{name}", group)}}. If a group has matrices and vectors, convert one group, '
            write += "and pass the settings of the others as from_model(..., overrides={...})"
            raise ValueError(explain_error(where, found, needed, write))
    return groups[0] if groups else {}
