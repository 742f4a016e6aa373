"""Explanation: the algorithm of each parameter and the reason, the owner of each matrix, and the cost of a step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from muonmesh.errors import escaped
from muonmesh.numerics.rules import RULES, rule_of
from muonmesh.report.traffic import state_bytes_of, traffic
from muonmesh.settings import GROUP_SETTINGS
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import Precision
from muonmesh.table import aligned

_HEAD = ("parameter", "algorithm", "why", "matrices", "layout", "owner", "GFLOP", "MB sent", "step RMS", "spectral")
_OF_DEVICES = '; by default a CPU computes in bf16, and takes "deflated" from 384 rows on, a device for the largest'


@dataclass(frozen=True)
class Row:
    """One parameter of an explanation.

    Attributes:
        parameter: Canonical name.
        algorithm: "muon", "adamw", or the rule of its group.
        reason: Why the parameter has this algorithm.
        matrices: Number and sizes of the matrices that are orthogonalized, e.g. ``3 of 768×768``.
        layout: The layout of the parameter, as text.
        owners: The number of matrices that each owner orthogonalizes, by rank.
        flops: FLOPs in a step over all ranks.
        bytes: Bytes that this rank sends for the parameter in a step.
        rms: Root mean square of one step; for AdamW an upper bound, which the table marks by "≤"; NaN if it is not
            known, see `Rule.step_size` and `ElementwiseRule.largest_step`.
        spectral: Spectral norm of one step; NaN for AdamW, and if it is not known.
        state: Bytes of the parameter's state that this rank keeps from step to step, in the stored dtypes.
        sets: The number of matrices that each coefficient set orthogonalizes, by its name, on a device with the dtype.
    """

    parameter: str
    algorithm: str
    reason: str
    matrices: str
    layout: str
    owners: dict[int, int]
    flops: int
    bytes: int
    rms: float
    spectral: float
    state: int = 0
    sets: dict[str, int] = field(default_factory=dict)


def imbalance(loads: Mapping[int, int]) -> float:
    """Return the load of the busiest rank divided by the mean load; 1 is perfect. Without any work the result is 1.

    Args:
        loads: FLOPs of each rank of a plan (`Plan.loads`).
    """
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total else 1.0


@dataclass(frozen=True)
class Explanation:
    """What one step does, according to its plan; ``str()`` is a table.

    Attributes:
        rows: One per parameter, in the order of the groups.
        rank: The rank that this object describes.
        orthogonalizations: Matrices that this rank orthogonalizes in a step.
        collectives: Collectives of a step in which this rank takes part. As in the two numbers of bytes, the averaging
            of gradients is left out, by DDP, FSDP2 or ``gradients="to_owners"``.
        bytes_sent: Bytes this rank sends in a step; flags and sums for rules are not counted.
        bytes_received: Bytes this rank receives in a step; flags and sums for rules are not counted.
        flops: FLOPs of one step, for each rank.
        state_bytes: Bytes of optimizer state that this rank keeps from step to step.
        host_bytes: The part of ``state_bytes`` that ``state_device="cpu"`` keeps in CPU memory.
        relayed: Number of parameters whose results ranks pass on, because their replicas are on several machines.
        budget_bytes: The largest number of bytes that a step uses without weights, gradients and state, as
            ``memory_budget_mb`` sets it for Muon's own rule. A CPU keeps this memory from step to step.
        alone: The number of matrices that travel one at a time, because they do not fit into the budget.
        open: Names of parameters that other ranks may hold too. The first step looks for these copies. Until then, this
            object assumes that there are none.
    """

    rows: tuple[Row, ...]
    rank: int
    orthogonalizations: int
    collectives: int
    bytes_sent: int
    bytes_received: int
    flops: dict[int, int]
    state_bytes: int = 0
    host_bytes: int = 0
    relayed: int = 0
    budget_bytes: int = 0
    alone: int = 0
    open: tuple[str, ...] = ()

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank divided by the mean of all ranks; 1 is perfect."""
        return imbalance(self.flops)

    def __str__(self) -> str:
        """Return a table and a summary."""
        lines = [_HEAD] + [
            (
                row.parameter,
                row.algorithm,
                row.reason,
                row.matrices,
                row.layout,
                _owners(row.owners),
                f"{row.flops / 1e9:.3g}" if row.flops else "",
                f"{row.bytes / 1e6:.3g}" if row.bytes else "",
                "" if math.isnan(row.rms) else f"{'≤' * math.isnan(row.spectral)}{row.rms:.1e}",
                "" if math.isnan(row.spectral) else f"{row.spectral:.1e}",
            )
            for row in self.rows
        ]
        table = aligned(lines, ruled=True)
        table.append(
            f"rank {self.rank} of {len(self.flops)}: {self.orthogonalizations} of "
            f"{sum(sum(row.owners.values()) for row in self.rows)} orthogonalizations, "
            f"{self.flops.get(self.rank, 0) / 1e9:.3g} of {sum(self.flops.values()) / 1e9:.3g} GFLOP "
            f"(imbalance {self.imbalance:.2f}), "
            f"{self.collectives} collectives, {self.bytes_sent / 1e6:.3g} MB sent, "
            f"{self.bytes_received / 1e6:.3g} MB received in each step"
        )
        sets = sum((Counter(row.sets) for row in self.rows), Counter[str]())
        if set(sets) - {"polar_express"}:
            text = ", ".join(f"{count} by {name}" for name, count in sorted(sets.items()))
            on_device = any(name.endswith("in fp16") for name in sets)
            table.append(f"orthogonalized: {text}{_OF_DEVICES if on_device else ''}")
        if self.relayed:
            table.append(f"results of {self.relayed} parameters enter each machine once and are passed on there")
        if self.open:
            more = f" and {len(self.open) - 3} more" if len(self.open) > 3 else ""
            table.append(escaped(f"the first step looks for copies on other ranks of {', '.join(self.open[:3])}{more}"))
        if self.state_bytes:
            host = f", {self.host_bytes / 1e6:.3g} MB of it in CPU memory" if self.host_bytes else ""
            table.append(f"rank {self.rank} stores {self.state_bytes / 1e6:.3g} MB of optimizer state{host}")
        if self.budget_bytes:
            over = f", and more for {self.alone} matrices that it takes one at a time" if self.alone else ""
            table.insert(-1, f"a step takes up to memory_budget_mb={self.budget_bytes / 2**20:.4g} more{over}")
        return "\n".join(table)


def summary(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each group: name, algorithm, parameters, elements, learning rate, unusual settings."""
    rows = []
    for group in groups:
        count, elements = len(group["params"]), sum(p.numel() for p in group["params"])
        sizes = f"{count:,} parameter{'' if count == 1 else 's'}", f"{elements:,} element{'' if elements == 1 else 's'}"
        settings = [f"lr {_rate(group.get('lr'))}"]
        rule = RULES.get(str(group.get("algorithm")))
        for key in () if rule is None else sorted({*rule.settings()} & {*group} - {"lr", "steps_taken"}):
            usual = GROUP_SETTINGS[key].default if key in GROUP_SETTINGS else None
            if str(group[key]) != str(usual):  # an invalid value may not support ==
                settings.append(f"{key} {group[key]}")
        rows.append((f"{group.get('name')}:", str(group.get("algorithm")), *sizes, ", ".join(settings)))
    return "\n".join(aligned(rows, right=(2, 3)))


def _rate(lr: object) -> str:
    """Return a learning rate as text, even an invalid one."""
    readable = isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1 and not lr.is_meta)
    return f"{float(lr):.4g}" if readable else repr(lr)  # type: ignore[arg-type]


def explain(groups: Sequence[Mapping[str, Any]], planned: StepPlan, precision: Precision) -> Explanation:
    """Return the explanation of a plan, with bytes in the dtypes of ``precision``."""
    itemsize = precision.compute.itemsize
    plan, rank = planned.plan, planned.rank
    travelling = traffic(plan, rank)
    sent, beside = travelling.sent, travelling.carried
    collectives = travelling.collectives + beside.collectives
    if precision.int8:
        collectives += planned.blocks.count > 0 and len(plan.ranks) > 1
    state_bytes = state_bytes_of(planned, precision)
    owners = defaultdict[int, Counter[int]](Counter)
    for assignment in plan.assignments:
        owners[assignment.parameter][assignment.owner] += 1
    placed = [(member, number) for number, member in enumerate(planned.muon) if member is not None]
    placed += [(member, -1) for members in planned.adamw for member in members]
    rows_of = defaultdict[Tensor, list[Row]](list)  # a flat tensor has a row for each of its parameters
    for member, number in placed:
        group, state = groups[member.group], state_bytes[member.name][0]
        if member.is_matrix:
            row = _muon_row(group, member.group, planned, number)
            row = replace(row, owners=dict(owners[number]), bytes=sent[number] * itemsize, state=state)
        else:
            shape = "×".join(map(str, member.storage.shape))
            bound = rule_of(group).largest_step()
            row = Row(member.name, member.algorithm, "", shape, "", {}, 0, 0, bound, math.nan, state)
        rows_of[member.tensor].append(row)
    rows = []
    for group in groups:
        reasons = group.get("reasons") or ["as the group says"] * len(group["params"])
        for tensor, reason in zip(group["params"], reasons, strict=True):
            rows += [replace(row, reason=reason) for row in rows_of[tensor]]
    return Explanation(
        tuple(rows),
        rank,
        sum(assignment.owner == rank for assignment in plan.assignments),
        collectives + (len(plan.ranks) > 1),  # one more for the flags
        sum(sent.values()) * itemsize + beside.sent * precision.carried.itemsize,
        travelling.received * itemsize + beside.received * precision.carried.itemsize,
        plan.loads,
        sum(total for total, _ in state_bytes.values()),
        sum(host for _, host in state_bytes.values()),
        sum(bool(relay.parts) for relay in plan.relays),
        plan.budget.bytes,
        sum(plan.assignments[n].matrix.numel > plan.bucket_elements for s in travelling.stages for n in s.moving),
        () if planned.connected else tuple(m.name for m in planned.members if m.may_have_copies(plan.ranks)),
    )


def _muon_row(group: Mapping[str, Any], of: int, planned: StepPlan, number: int) -> Row:
    """Return the row of parameter ``number`` of the plan, without owners; ``of`` is the number of its group."""
    parameter, rule = planned.plan.parameters[number], rule_of(group)
    sizes = Counter(f"{matrix.rows}×{matrix.cols}" for matrix in parameter.matrices)
    steps = [rule.step_size(matrix.rows, matrix.cols) for matrix in parameter.matrices]
    how = [planned.orthogonalizers[of, matrix.shape] for matrix in parameter.matrices if rule.orthogonalizes]
    sets = Counter(orthogonalizer.description for orthogonalizer in how)
    return Row(
        parameter.name,
        group["algorithm"],
        "",
        ", ".join(size if count == 1 else f"{count} of {size}" for size, count in sizes.items()),
        parameter.target.describe().partition(" (")[0],  # without the fingerprint of flat shards
        {},
        sum(parameter.flops),
        0,
        max(step.rms for step in steps),
        max(step.spectral for step in steps),
        sets=dict(sets),
    )


def _owners(owners: Mapping[int, int]) -> str:
    """Return the number of matrices of each owner as text: "rank 0: 2, rank 1: 1"."""
    if len(owners) > 4:
        return f"{len(owners)} ranks"
    if len(owners) == 1:
        return f"rank {next(iter(owners))}"
    return ", ".join(f"rank {rank}: {count}" for rank, count in sorted(owners.items()))
