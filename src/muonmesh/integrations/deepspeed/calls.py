"""Call: one of the calls of `Muon.step` that one step of a DeepSpeed engine makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from muonmesh.comm.storage import Storage, this_rank, world_size
from muonmesh.integrations.deepspeed.engine_parameters import EngineParameter
from muonmesh.layout import FlatShards
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation, Row
from muonmesh.step.connection import placed_members


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `Muon.step`, which steps one flat tensor of a ZeRO engine, or at stage 0 all parameters.

    Attributes:
        muon: The optimizer that plans the call and takes the step.
        told: A `Muon` with the same groups and state that knows which parameters lie in the flat tensor. It describes
            the call for tables and checkpoints. It is the same object as ``muon`` except for AdamW's flat tensors;
            there it never steps.
        parameters: The parameters that the call steps.
        layouts: For each of these parameters by name, where its elements lie in the flat tensors of all ranks. Empty at
            stage 0, where every rank holds whole parameters.
    """

    muon: Muon
    told: Muon
    parameters: tuple[EngineParameter, ...]
    layouts: Mapping[str, FlatShards]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor that the call steps."""
        tensor: Tensor = self.muon.param_groups[0]["params"][0]
        return tensor

    @cached_property
    def storages(self) -> dict[Tensor, list[Storage]]:
        """For each tensor that the call steps: the storages of the parameters in it."""
        if self.layouts:
            return {self.tensor: [Storage(layout, layout.shape) for layout in self.layouts.values()]}
        return {member.tensor: [member.storage] for member in placed_members(self.muon)}

    def explain(self) -> Explanation:
        """Return an explanation of the call, with a row for each parameter."""
        told = self.muon.explain()
        if not self.layouts:
            return told
        (group,) = self.muon.param_groups
        reasons = {known.name: known.reason for known in self.parameters}
        if is_matrix_rule(group["algorithm"]):
            return replace(told, rows=tuple(replace(row, reason=reasons[row.parameter]) for row in told.rows))
        return replace(told, rows=tuple(_row(known, group) for known in self.parameters))


def _row(known: EngineParameter, group: Mapping[str, Any]) -> Row:
    shape = "×".join(map(str, known.shape))
    return Row(known.name, group["algorithm"], known.reason, shape, "", {}, 0, 0, float(group["lr"]), math.nan)


def explain_step(calls: Sequence[Call]) -> Explanation:
    """Return one explanation of all calls of an engine's step, with the sums of their work and traffic."""
    explanations = [call.explain() for call in calls]
    added = {
        name: sum(getattr(one, name) for one in explanations)
        for name in ("orthogonalizations", "collectives", "bytes_sent", "bytes_received", "state_bytes", "host_bytes")
    }
    return Explanation(
        rows=tuple(row for one in explanations for row in one.rows),
        rank=this_rank(),
        flops={rank: sum(one.flops.get(rank, 0) for one in explanations) for rank in range(world_size())},
        step_bytes=max(one.step_bytes for one in explanations),
        budget_bytes=max(one.budget_bytes for one in explanations),
        **added,
    )
