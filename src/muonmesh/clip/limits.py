"""Limits: what a call of `Muon.clip_grad_norm_` asks for, and what follows from the norms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from muonmesh.clip.norms import GradNorms
from muonmesh.clip.squares import FELT, INVARIANT, norms_of
from muonmesh.errors import explain_error

ClipPolicy = Literal["adamw_only", "all", "separate", "per_matrix"]
"""Which gradients `Muon.clip_grad_norm_` scales down, and by which norm; its docstring describes each policy."""


@dataclass(frozen=True)
class Limits:
    """The arguments of one call of `Muon.clip_grad_norm_`, which documents them."""

    max_norm: float = math.inf
    policy: ClipPolicy = "adamw_only"
    skip_above: float = math.inf
    norms: bool = True
    norm_type: float = 2.0

    def check(self) -> None:
        """Raise ValueError unless the arguments can be met."""
        if self.policy not in get_args(ClipPolicy):
            known = ", ".join(f'"{policy}"' for policy in get_args(ClipPolicy))
            raise ValueError(explain_error("policy", f"{self.policy!r}", f"one of {known}"))
        for name, value, meaning in (
            ("max_norm", self.max_norm, "to measure only"),
            ("skip_above", self.skip_above, "to skip none but non-finite ones"),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(explain_error(name, f"{value!r}", f"a number of at least 0, or inf {meaning}"))
        if not isinstance(self.norms, bool):
            raise ValueError(explain_error("norms", f"{self.norms!r}", "True or False"))
        if self.norm_type != 2:
            write = "For others call torch.nn.utils.clip_grad_norm_ on the AdamW parameters"
            raise ValueError(explain_error("norm_type", f"{self.norm_type!r}", "2: Euclidean norms alone", write))

    @property
    def measures_both(self) -> bool:
        """Whether both halves are measured: asked for, or needed to clip, or to see a non-finite gradient."""
        return self.norms or self.policy != "adamw_only" or self.skip_above < math.inf

    @property
    def protects(self) -> tuple[str, ...]:
        """The norms by which the policy clips, of which none may be above ``skip_above``."""
        return {"all": ("total",), "separate": ("muon", "adamw")}.get(self.policy, ("adamw",))

    @property
    def digest(self) -> int:
        """A hash of the arguments below 2**20: ranks add it up to find out whether their arguments are equal."""
        text = f"{self.policy} {float(self.max_norm)} {float(self.skip_above)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % 2**20

    def skips(self, sums: Tensor, apart: Sequence[str] = ()) -> Tensor:
        """Return whether the step is skipped, 0-d bool: too large, or not finite, also of what is measured apart."""
        norms = norms_of(sums)
        above = [norms[name] > self.skip_above for name in self.protects]
        infinite = [~norms_of(sums, number)["total"].isfinite() for number in range(1 + len(apart))]
        return torch.stack([*above, *infinite]).any()

    def coefficients(self, sums: Tensor, skip: Tensor, apart: Sequence[str] = ()) -> dict[int, Tensor]:
        """Return min(1, max_norm / norm), as torch's function computes it, for each half that is clipped as one.

        The keys are the places of the halves in the sums.
        """
        by = {"all": {INVARIANT: "total", FELT: "total"}, "separate": {INVARIANT: "muon", FELT: "adamw"}}
        return {
            half + 2 * number: torch.where(skip, 1.0, (self.max_norm / (norms[name] + 1e-6)).clamp(max=1.0))
            for number, norms in enumerate(norms_of(sums, number) for number in range(1 + len(apart)))
            for half, name in by.get(self.policy, {FELT: "adamw"}).items()
        }

    def told(self, sums: Tensor, skip: Tensor, apart: Sequence[str] = ()) -> GradNorms:
        """Return the norms, or with ``norms=False`` those that the policy needs."""
        known = {name: norm if self.norms or name in self.protects else None for name, norm in norms_of(sums).items()}
        others = {name: norms_of(sums, number)["total"] for number, name in enumerate(apart, 1)}
        return GradNorms(**known, skipped=skip, apart=others)
