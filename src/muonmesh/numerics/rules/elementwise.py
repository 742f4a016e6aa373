"""ElementwiseRule: what a step does with parameters that need no whole matrix, element by element where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.rules.rule import Hyperparameters


@dataclass(frozen=True, slots=True)
class ElementwiseRule(Hyperparameters):
    """A rule that steps each element by itself: nothing travels, and a gradient of zeros is one like any other.

    A rule of your own overrides `update`, says with `keeps` what it keeps from step to step, and is made known with
    `register_rule`. It may only use operations whose result for an element depends on nothing but that element's
    inputs, for tensors of every length: ``lerp_``, ``mul_``, ``sign``, ``sqrt``, ``where``, casts. Then every sharding
    gives the same bits.
    """

    def keeps(self) -> tuple[str, ...]:
        """Return the names of what is kept for each element, in the dtype of the weights; it begins as zeros."""
        return ()

    def update(self, gradient: Tensor, state: Mapping[str, Tensor], count: Tensor) -> Tensor:
        """Return u of the step ``p ← p − lr·u``; weights decay besides, as the group says.

        Args:
            gradient: Any shape, fp32 or wider, read only.
            state: What the rule keeps, each of that shape, fp32 or wider; written in place.
            count: How many steps have been taken with this one, fp32, 0-d.

        Returns:
            The same shape.
        """
        raise NotImplementedError  # `register_rule` has refused such a rule

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
        """Step the parameters of a group, in place, computed in fp32 or wider and rounded once.

        Args:
            weights: Masters where there are any.
            gradients: Gradients of the same shapes and dtypes as the weights.
            state: What the rule keeps, for each of the weights.
            counts: Steps taken with each of them, fp32, 0-d.
            stop: 0-d bool tensor: whether nothing changes after all; None for no.
            measured: Whether the squares of the steps are asked for.

        Returns:
            If so, for each of the weights the sum of the squares of its step without decay, 0-d fp64.
        """
        squares = []
        for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            held = {key: tensors[number] for key, tensors in state.items()}
            kept = {key: tensor.to(wide, copy=True) for key, tensor in held.items()}
            count, fresh = counts[number] + 1, weight.to(wide, copy=True)
            step = self.update(gradient.to(wide), kept, count)
            self.decay(fresh, step)
            step = step * self.lr
            fresh.sub_(step)
            for old, new in [(weight, fresh), (counts[number], count), *((held[key], kept[key]) for key in held)]:
                old.copy_(new if stop is None else torch.where(stop, old, new.to(old.dtype)))
            if measured:
                squares.append(step.double().square().sum())
        return squares
