"""FlagVector: the questions that the ranks of a connected set answer before any rank writes. Flags: the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonmesh.comm.agreement import STANDING, Agreed, Agreement, Field
from muonmesh.comm.gradients import REDUCTIONS, partial_axes
from muonmesh.layout import Elementwise, Parameter, Plan
from muonmesh.step.parameter_steps import ParameterStep

PLACED = (len(REDUCTIONS) - 1).bit_length()
"""Questions about the place of a gradient along one mesh axis: the bits of its index in `REDUCTIONS`."""

DIGEST = 64
"""Questions about the settings that the CPU knows, and again about those that only the device knows."""


class FlagVector:
    """The questions before a step, which follow from its plan. Only ``own_shards`` differs between its ranks.

    - `STANDING`.
    - "skip": does a rank want this step to change nothing? "overflow": has its GradScaler found an overflow? "moves":
      is every learning rate 0, and a gradient of AdamW's parameters not zero, so that this is not the step that only
      creates state?
    - "nonzero": for each Matrix, does a rank have a gradient in it that is not zero?
    - "present": for each parameter, does a rank have a gradient?
    - "shard": for each shard that replicas hold, do all of them have a gradient (1) or all lack it (0)? A rank with a
      partial gradient says nothing, because a missing summand is zero.
    - "placed": for each mesh axis of a parameter with replicas, is its gradient partial in the same way?
    - "settings", "values": for each set of ranks that share parameters, are the hashes of their settings equal?

    Args:
        plan: The plan.
        rank: The rank of this process.

    Attributes:
        agreement: The place of each question in the vector.
        own_shards: For each parameter, Muon's first and then AdamW's, the places in "shard" of what this rank stores.
        shards: For each shard that replicas hold, the number of its parameter.
        axes: For each parameter with replicas by its number, its mesh axes as places among those of all parameters.
        shared: For each set of ranks that share parameters the numbers of those parameters.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.own_shards, self.shards, self.axes = list[Sequence[int]](), list[int](), dict[int, range]()
        width, shared = 0, dict[tuple[int, ...], list[int]]()
        parameters: list[Parameter | Elementwise] = [*plan.parameters, *plan.elementwise]
        for number, parameter in enumerate(parameters):
            target, ranks, first = parameter.target, tuple(parameter.target.ranks), len(self.shards)
            stores = target.copies() > 1 and rank in ranks
            self.own_shards.append([first + part for part in target.parts(rank)] if stores else [])
            if target.copies() > 1:
                self.shards += [number] * target.part_count()
                self.axes[number] = range(width, width + len(getattr(target, "mesh", ())))
                width = self.axes[number].stop
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(number)
        self.shared = [*shared.values()]
        self.agreement = Agreement(
            *STANDING,
            Field("skip"),
            Field("overflow"),
            Field("moves"),
            Field("nonzero", len(plan.assignments)),
            Field("present", len(self.own_shards)),
            Field("shard", len(self.shards), "equal"),
            Field("placed", PLACED * width, "equal"),
            Field("settings", DIGEST * len(self.shared), "equal"),
            Field("values", DIGEST * len(self.shared), "equal"),
        )

    def of_gradients(self, entries: Sequence[ParameterStep | None]) -> dict[str, bytearray]:
        """Return what this rank says of its gradients.

        Args:
            entries: The parameters with their gradients, as the plan numbers them; None: others hold the parameter.
        """
        answers = {name: self.agreement.silence(name) for name in ("present", "shard", "placed")}
        for number, (shards, entry) in enumerate(zip(self.own_shards, entries, strict=True)):
            if entry is None:
                continue
            present, over = entry.gradient is not None, partial_axes(entry.gradient)
            answers["present"][number] = present
            if not any(over):
                for shard in shards:
                    answers["shard"][shard] = present
            if present and (axes := self.axes.get(number)):
                # Replicas outside a DTensor's mesh stand in front.
                for axis, op in zip(axes, (0,) * (len(axes) - len(over)) + over, strict=True):
                    answers["placed"][PLACED * axis : PLACED * (axis + 1)] = [op >> bit & 1 for bit in range(PLACED)]
        return answers

    def partial(self, agreed: Agreed) -> dict[int, list[int]]:
        """Return the parameters of which a rank has a partial gradient, by number: its reduction along each axis."""
        bits = agreed.answers("placed").tolist()
        if not any(bits):
            return {}
        digits = [bits[first : first + PLACED] for first in range(0, len(bits), PLACED)]
        ops = [sum(bit << shift for shift, bit in enumerate(digit_bits)) for digit_bits in digits]
        reductions = {number: [ops[axis] for axis in axes] for number, axes in self.axes.items()}
        return {number: over for number, over in reductions.items() if any(over)}


@dataclass
class Flags:
    """The flags that all ranks agreed on before any rank wrote.

    Attributes:
        nonzero: For each Matrix whether any rank has a non-zero gradient in it: booleans. If the CPU does not wait for
            the flags (CUDA), a bool tensor (n,), whose entries are false too if ``stop`` is true.
        skip: Whether any rank wants this step to change nothing.
        overflow: Whether any rank's GradScaler has found an overflow: a 0-d bool tensor. None: this rank has no
            GradScaler.
        only_creates_state: Whether this is the step by which torch's checkpoint code creates state: learning
            rate 0 and every gradient exactly zero.
        stop: 0-d bool tensor, true if any rank found an error or skips the step; the CPU does not know it yet. None if
            the CPU knows: for parameters on a CPU, at learning rate 0, and if a rank is alone and nothing can stop it.
        replan: Whether the parameters of any rank have changed since the plan was made. Then no other flag counts.
    """

    nonzero: list[bool] | Tensor
    overflow: Tensor | None
    skip: bool = False
    only_creates_state: bool = False
    stop: Tensor | None = None
    replan: bool = False
