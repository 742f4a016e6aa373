"""Global names: what parameters are called in the whole model, from the numbers that Megatron gives layers and experts.

A pipeline stage counts its layers from 0, and so does each chunk of a virtual pipeline; an expert-parallel rank counts
its experts so. Under the names of the whole model a parameter is the same one however the model is cut up.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from muonmesh.groups.sites import Site
from muonmesh.integrations.megatron.roles import is_grouped
from muonmesh.names import canonical_name


def whole_name(site: Site, expert_rank: int) -> str:
    """Return the name that the parameter at a site has in a model on one rank.

    Args:
        site: Where a chunk holds it.
        expert_rank: Of this rank among those of expert parallelism.
    """
    parts = [name for name, _ in reversed(site.owners)][1:]
    modules = [module for _, module in reversed(site.owners)]
    for i, part in enumerate(parts):
        if not part.isdecimal():
            continue
        container, number = modules[i], getattr(modules[i + 1], "layer_number", None)
        if parts[i - 1] == "layers" and isinstance(number, int):
            parts[i] = str(number - 1)
        elif parts[i - 1] == "local_experts" and isinstance(container, nn.ModuleList):
            parts[i] = str(expert_rank * len(container) + int(part))
    return canonical_name(".".join([*parts, _expert_key(site, expert_rank)]))


def _expert_key(site: Site, expert_rank: int) -> str:
    """Return a key with its expert's number in the whole model, of a layer that holds one weight an expert."""
    found = re.fullmatch(r"(weight|bias)(\d+)", site.key)
    count = getattr(site.module, "num_gemms", None)
    if found is None or not isinstance(count, int):
        return site.key
    return f"{found[1]}{expert_rank * count + int(found[2])}"


def expert_names(site: Site, name: str, expert_rank: int) -> list[str]:
    """Return the names of the tensors that a parameter is stepped as: its own, or one for each expert.

    Args:
        site: Where the model holds it.
        name: Its name in the whole model.
        expert_rank: Of this rank among those of expert parallelism.
    """
    if not is_grouped(site.module):
        return [name]
    before, _, key = name.rpartition(".")
    count: Any = site.module.num_local_experts
    return [f"{before}.{expert_rank * count + i}.{key}" for i in range(count)]
