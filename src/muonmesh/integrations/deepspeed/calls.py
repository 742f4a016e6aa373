"""Call: what one plan covers of what DeepSpeed steps, and what a step of the engine consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from muonmesh.integrations.deepspeed.shards import Shard
from muonmesh.layout import FlatShards
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation, Row


@dataclass(frozen=True, eq=False)
class Call:
    """One flat tensor; at stage 0 all parameters together.

    Attributes:
        title: For tables and messages.
        muon: Plans and steps it.
        shards: The parameters in it.
        layouts: Where each lies in the flat tensor, by name; empty at stage 0, where every rank holds it whole.
        process_group: The ranks that share them.
    """

    title: str
    muon: Muon
    shards: tuple[Shard, ...]
    layouts: Mapping[str, FlatShards]
    process_group: dist.ProcessGroup

    @property
    def tensor(self) -> Tensor:
        """The flat tensor."""
        tensor: Tensor = self.muon.param_groups[0]["params"][0]
        return tensor

    @property
    def algorithm(self) -> str:
        """Of the flat tensor."""
        return str(self.muon.param_groups[0]["algorithm"])

    @cached_property
    def copies(self) -> dict[Tensor, int]:
        """At stage 0, how many ranks hold each element of a parameter: tensor parallelism cuts some of them."""
        return {member.tensor: member.storage.copies for member in self.muon.members}

    def explain(self) -> Explanation:
        """Return what its step does, parameter by parameter."""
        told = self.muon.explain()
        if not self.layouts:
            return told
        reasons = {shard.name: shard.reason for shard in self.shards}
        if self.algorithm == "muon":
            return replace(told, rows=tuple(replace(row, reason=reasons[row.parameter]) for row in told.rows))
        rate = float(self.muon.param_groups[0]["lr"])
        return replace(told, rows=tuple(_row(shard, rate) for shard in self.shards))


def _row(shard: Shard, rate: float) -> Row:
    shape: Any = "×".join(map(str, shard.shape))
    return Row(shard.name, "adamw", shard.reason, shape, "", {}, 0, 0, rate, math.nan)


@dataclass(frozen=True)
class Calls:
    """What one step of the engine does, call by call; ``str()`` is a table for each."""

    explanations: dict[str, Explanation]

    def __str__(self) -> str:
        """Return the tables and the balance of each call."""
        tables = [f"{title}\n{told}" for title, told in self.explanations.items()]
        balances = [
            f"{told.imbalance:.2f} in {title}" for title, told in self.explanations.items() if any(told.flops.values())
        ]
        return "\n\n".join([*tables, f"{len(tables)} calls a step; imbalance {', '.join(balances)}"])
