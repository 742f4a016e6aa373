"""Global names: the names of parameters in the whole model, from Megatron's numbers of layers and experts.

Each pipeline stage, and each chunk of a virtual pipeline, counts its layers from 0. Each expert-parallel rank counts
its experts from 0. The name in the whole model is the same for every parallel layout.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from muonmesh.groups.sites import Site
from muonmesh.integrations.megatron.roles import is_grouped
from muonmesh.names import canonical_name


def whole_name(site: Site, expert_rank: int) -> str:
    """Return the name of a chunk's parameter in the whole model.

    Args:
        site: The place of the parameter in its chunk.
        expert_rank: The index of this rank among the expert-parallel ranks.
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
    """Return the parameter's key. With one weight per expert, it has the expert's number in the whole model."""
    found = re.fullmatch(r"(weight|bias)(\d+)", site.key)
    count = getattr(site.module, "num_gemms", None)
    if found is None or not isinstance(count, int):
        return site.key
    return f"{found[1]}{expert_rank * count + int(found[2])}"


def expert_names(site: Site, name: str, expert_rank: int) -> list[str]:
    """Return the names of the tensors that the optimizer steps for a parameter: its own name, or one for each expert.

    Args:
        site: The place of the parameter in its chunk.
        name: The parameter's name in the whole model.
        expert_rank: The index of this rank among the expert-parallel ranks.
    """
    if not is_grouped(site.module):
        return [name]
    before, _, key = name.rpartition(".")
    count: Any = site.module.num_local_experts
    return [f"{before}.{expert_rank * count + i}.{key}" for i in range(count)]
