"""Limits: the arguments of `Muon.clip_grad_norm_`, the coefficients that follow from the norms, and the result."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muonmesh.clip.norm_means import counted, limits_from, means_of
from muonmesh.clip.squares import SCALE_INVARIANT, SCALE_SENSITIVE, norms_of, place_of
from muonmesh.comm.agreement import bits_of
from muonmesh.comm.gradients import GradientSource, multiply
from muonmesh.comm.storage import local_of, overlapping, shares_memory
from muonmesh.errors import explain_error


@dataclass(frozen=True)
class GradNorms:
    """Norms of the gradients before clipping, over all shards, every element counted once.

    ``float(norms)`` and ``norms.item()`` are the total norm, as in loops written for torch's function. Reading them
    needs no communication, so a single rank may log them. On CUDA, reading waits for the device.

    Attributes:
        total: Norm of all gradients, a 0-d fp64 tensor; None with ``norms=False`` if the policy does not need it.
        muon: Norm of the gradients of Muon's groups and of groups with other scale-invariant rules; None in the same
            case.
        adamw: Norm of all other gradients: AdamW's, and those of rules that depend on the scale; None in the same case.
        skipped: Whether the next ``step`` changes nothing, a 0-d bool tensor.
        apart: By name, the norms of gradients that the other norms do not include (`GradientSource.norms_apart`).
    """

    total: Tensor | None
    muon: Tensor | None
    adamw: Tensor | None
    skipped: Tensor
    apart: Mapping[str, Tensor] = field(default_factory=dict)

    def item(self) -> float:
        """Return the total norm."""
        return float(self)

    def __float__(self) -> float:
        """Return the total norm; NaN if it was not computed."""
        return math.nan if self.total is None else float(self.total)

    def __format__(self, spec: str) -> str:
        """Return the total norm as text."""
        return format(float(self), spec)


ClipPolicy = Literal["adamw_only", "all", "separate"]
"""Which gradients `Muon.clip_grad_norm_` scales down, and by which norm; its docstring describes each policy."""


@dataclass(frozen=True)
class Limits:
    """The arguments of one call of `Muon.clip_grad_norm_`, which documents them."""

    max_norm: float = math.inf
    policy: ClipPolicy = "adamw_only"
    skip_above: float | str = math.inf
    norms: bool = True
    norm_type: float = 2.0

    def check(self) -> None:
        """Raise ValueError if an argument is unknown or out of range."""
        if self.policy not in get_args(ClipPolicy):
            policies = ", ".join(f'"{policy}"' for policy in get_args(ClipPolicy))
            raise ValueError(explain_error("policy", f"{self.policy!r}", f"one of {policies}"))
        if not _is_limit(self.max_norm):
            needed = "a number of at least 0, or inf to measure only"
            write = "Write optimizer.clip_grad_norm_(1.0): the optimizer knows the parameters"
            raise ValueError(explain_error("max_norm", f"{self.max_norm!r}", needed, write))
        if not (_is_limit(self.skip_above) if self.multiple is None else 0 < self.multiple < math.inf):
            needed = "a number of at least 0, inf to skip none but non-finite ones, or a multiple of the norm's mean"
            write = 'Write skip_above="4x" to skip a step whose norm is above 4 times its running mean'
            raise ValueError(explain_error("skip_above", f"{self.skip_above!r}", needed, write))
        if not isinstance(self.norms, bool):
            raise ValueError(explain_error("norms", f"{self.norms!r}", "True or False"))
        if self.norm_type != 2:
            write = "For others call torch.nn.utils.clip_grad_norm_ on the AdamW parameters"
            raise ValueError(explain_error("norm_type", f"{self.norm_type!r}", "2: Euclidean norms alone", write))

    @property
    def multiple(self) -> float | None:
        """The factor N of ``skip_above="Nx"``; NaN for another string, None for a number."""
        if not isinstance(self.skip_above, str):
            return None
        fits = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?x", self.skip_above)
        return float(self.skip_above.removesuffix("x")) if fits else math.nan

    @property
    def skips_large(self) -> bool:
        """Whether a step may be skipped because a finite norm is large."""
        return self.multiple is not None or self.skip_above != math.inf

    @property
    def measured(self) -> set[int]:
        """The kinds of gradients to measure: SCALE_SENSITIVE (AdamW's), and SCALE_INVARIANT (Muon's) if needed.

        Muon's gradients are measured if ``norms`` is True, if the policy needs them, or with ``skip_above``.
        """
        all_kinds = self.norms or self.policy != "adamw_only" or self.skips_large
        return {SCALE_INVARIANT, SCALE_SENSITIVE} if all_kinds else {SCALE_SENSITIVE}

    @property
    def protects(self) -> tuple[str, ...]:
        """The names of the norms by which the policy clips; a step is skipped if one is above ``skip_above``."""
        return tuple(dict.fromkeys(self._by.values()))

    @property
    def _by(self) -> dict[int, str]:
        """The kinds of gradients to clip, as places in the sums, each with the name of the norm that limits it."""
        by = {
            "all": {SCALE_INVARIANT: "total", SCALE_SENSITIVE: "total"},
            "separate": {SCALE_INVARIANT: "muon", SCALE_SENSITIVE: "adamw"},
        }
        return by.get(self.policy, {SCALE_SENSITIVE: "adamw"})

    @property
    def bits(self) -> bytes:
        """A hash of the arguments, by which ranks compare them."""
        above = float(self.skip_above) if self.multiple is None else f"{self.multiple}x"
        return bits_of(f"{self.policy} {float(self.max_norm)} {above}")

    def decide(
        self, sums: Tensor, groups: Sequence[Mapping[str, Any]], apart: Sequence[str] = (), stops: Tensor | None = None
    ) -> Decision:
        """Return what follows from the vector of squares; see `Decision`.

        The step is skipped if a norm that the policy protects is above ``skip_above``, or any norm is not finite. A
        coefficient is min(1, max_norm / norm), as torch's function computes it; a skipped step scales nothing.

        Args:
            sums: The vector, added up.
            groups: The param groups, which have the running means of the norms.
            apart: The names of the norms that are measured apart. They skip a step only if they are not finite.
            stops: 0-d bool: whether a step is skipped anyway, and its norms do not count; None: no.
        """
        usual, *others = every = [norms_of(sums, number) for number in range(1 + len(apart))]
        limits: Mapping[str, Any] = dict.fromkeys(usual, self.skip_above)
        means = None
        if self.multiple is not None:
            before = means_of(groups, sums.device)
            limits = dict(zip(usual, limits_from(before, self.multiple), strict=True))
            means = counted(before, torch.stack([*usual.values()]))
            means = means if stops is None else torch.where(stops, before, means)
        above = [usual[name] > limits[name] for name in self.protects]
        infinite = [~norms["total"].isfinite() for norms in every]
        skip = torch.stack([*above, *infinite, *([] if stops is None else [stops])]).any()
        coefficients = {
            kind + 2 * number: torch.where(skip, 1.0, (self.max_norm / (norms[name] + 1e-6)).clamp(max=1.0))
            for number, norms in enumerate(every)
            for kind, name in self._by.items()
        }
        reported = {name: norm if self.norms or name in self.protects else None for name, norm in usual.items()}
        totals = {name: norms["total"] for name, norms in zip(apart, others, strict=True)}
        return Decision(GradNorms(**reported, skipped=skip, apart=totals), coefficients, means)


class Decision(NamedTuple):
    """What follows from the summed squares of gradients: one decision, the same on every rank.

    Attributes:
        norms: The norms; with ``norms=False``, only those that the policy needs.
        coefficients: For each kind of gradients to clip, as places in the sums, the factor to scale them by.
        means: The running means of the norms with these; None if ``skip_above`` is no multiple of them.
    """

    norms: GradNorms
    coefficients: dict[int, Tensor]
    means: Tensor | None


def _is_limit(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def scale_groups(
    groups: Sequence[Mapping[str, Any]], source: GradientSource, coefficients: Mapping[int, Tensor]
) -> None:
    """Multiply the gradients of each group by their coefficient.

    A gradient whose memory overlaps with that of another one, or among its own elements, is not written, nor is an
    inference tensor: a scaled copy takes its place.

    Args:
        groups: The param groups.
        source: The source of the gradients.
        coefficients: 0-d fp64 tensors, by place in the sums.
    """
    coefficients = {  # a CPU knows which are 1; reading them on a device would wait
        position: coefficient
        for position, coefficient in coefficients.items()
        if coefficient.device.type != "cpu" or float(coefficient) != 1
    }
    if not coefficients:
        return
    gradients = [
        (parameter, gradient, place_of(group, str(group.get("name")), parameter, source))
        for group in groups
        for parameter in group["params"]
        if (gradient := source.gradient(parameter)) is not None
    ]
    overlaps = overlapping([local_of(gradient) for _, gradient, _ in gradients])

    def in_place(local: Tensor, *, overlaps: bool) -> bool:
        return not local.numel() or not (overlaps or shares_memory(local) or local.is_inference())

    scaled = [
        (
            parameter,
            gradient if in_place(local_of(gradient), overlaps=shared) else gradient.clone(),
            coefficients[position],
        )
        for (parameter, gradient, position), shared in zip(gradients, overlaps, strict=True)
        if position in coefficients
    ]
    for parameter, gradient, coefficient in scaled:
        multiply(local_of(gradient), coefficient)
        source.write(parameter, gradient)
