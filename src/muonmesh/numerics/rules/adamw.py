"""AdamW: the elementwise rule "adamw", computed by torch's own AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muonmesh.numerics.rules.elementwise import ElementwiseRule


@dataclass(frozen=True, slots=True)
class AdamWRule(ElementwiseRule):
    """The rule "adamw" (arXiv 1711.05101). Because of ε in its denominator, its step depends on the scale of gradients.

    Attributes:
        betas: Decay rates of the moments.
        eps: ε.
    """

    never_negative: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    betas: tuple[float, float] = field(metadata={"key": "adamw_betas"})
    eps: float = field(metadata={"key": "adamw_eps"})

    def keeps(self) -> tuple[str, ...]:
        """Return the two moments."""
        return "exp_avg", "exp_avg_sq"

    def largest_step(self) -> float:
        """Return lr times the largest ratio of m̂ to √v̂; NaN if there is none, for β₁² ≥ β₂.

        By the Cauchy–Schwarz inequality the ratio is at most √Σ aᵢ²/bᵢ, where aᵢ = (1 − β₁)β₁ⁱ and bᵢ = (1 − β₂)β₂ⁱ are
        the weights of past gradients in the moments: 1.16 for the default betas, 7.3 for 0.9 and 0.999. Gradients that
        grow from step to step come near it, as do gradients after many steps without any.
        """
        beta1, beta2 = self.betas
        if beta1 and beta1 * beta1 >= beta2:
            return math.nan
        past = beta1 * beta1 / beta2 if beta1 else 0.0
        return float(self.lr) * (1 - beta1) / math.sqrt((1 - beta2) * (1 - past))

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        counts: Sequence[Tensor],
        *,
        stop: Tensor | None,
        measured: bool,
    ) -> list[Tensor]:
        """Step by torch's AdamW; see `ElementwiseRule.step`."""
        fused, (beta1, beta2), decay = weights[0].device.type == "cuda", self.betas, self.weight_decay
        if stop is not None and not fused:  # only torch's fused kernels have a mask
            written = [*weights, *chain(*state.values()), *counts]
            before = [tensor.clone() for tensor in written]
            squares = self.step(weights, gradients, state, counts, stop=None, measured=measured)
            for tensor, old in zip(written, before, strict=True):
                tensor.copy_(torch.where(stop, old, tensor))
            return squares
        if decay and self.decay_mode == "cautious":
            for weight, gradient, mean in zip(weights, gradients, state["exp_avg"], strict=True):
                decayed = weight.clone()
                self.decay(decayed, torch.lerp(mean, gradient, 1 - beta1))  # the update has the new moment's sign
                weight.copy_(decayed if stop is None else torch.where(stop, weight, decayed))
            decay = 0.0
        before = [weight.double() for weight in weights] if measured else []
        adamw(
            list(weights),
            list(gradients),
            list(state["exp_avg"]),
            list(state["exp_avg_sq"]),
            [],
            list(counts),
            foreach=not fused,
            fused=fused,
            found_inf=None if stop is None else stop.float(),
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(self.lr),
            weight_decay=decay,
            eps=self.eps,
        )
        return [
            (weight.double() - old * (1 - self.lr * decay)).square().sum()
            for weight, old in zip(weights, before, strict=False)
        ]


def step_count(value: float | Tensor) -> Tensor:
    """Return a count of AdamW's steps as torch stores it: fp32, 0-d, in memory of its own; for a float on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32, copy=True).reshape(())
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
