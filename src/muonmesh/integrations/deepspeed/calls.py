"""Call: one of the calls of `Muon.step` that one step of a DeepSpeed engine makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from muonmesh.comm.storage import Storage, this_rank, world_size
from muonmesh.layout import FlatShards
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `Muon.step`, which steps one flat tensor of a ZeRO engine, or at stage 0 all parameters.

    Attributes:
        muon: The optimizer that plans the call and takes the step.
        told: A `Muon` with the same groups and state that knows which parameters lie in the flat tensor. It describes
            the call for tables and checkpoints. It is the same object as ``muon`` except for AdamW's flat tensors;
            there it never steps.
        reasons: Why each parameter is in its group, by name.
    """

    muon: Muon
    told: Muon
    reasons: Mapping[str, str]

    @property
    def tensor(self) -> Tensor:
        """The flat tensor that the call steps."""
        tensor: Tensor = self.muon.param_groups[0]["params"][0]
        return tensor

    @cached_property
    def parameters(self) -> list[OptimizedParameter]:
        """The parameters in the tensors that the call steps."""
        return placed_members(self.told)

    @cached_property
    def layouts(self) -> dict[str, FlatShards]:
        """Where the elements of each parameter lie in the flat tensors of all ranks, by name; empty at stage 0."""
        held = {each.name: each.storage.layout for each in self.parameters}
        return {name: layout for name, layout in held.items() if isinstance(layout, FlatShards)}

    @cached_property
    def storages(self) -> Mapping[Tensor, list[Storage]]:
        """For each tensor that the call steps: the storages of the parameters in it."""
        found = defaultdict[Tensor, list[Storage]](list)
        for parameter in self.parameters:
            found[parameter.tensor].append(parameter.storage)
        return found

    def explain(self) -> Explanation:
        """Return an explanation of the call, with a row for each parameter."""
        rows = (replace(row, reason=self.reasons[row.parameter]) for row in self.told.explain().rows)
        return replace(self.muon.explain(), rows=tuple(rows))


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
