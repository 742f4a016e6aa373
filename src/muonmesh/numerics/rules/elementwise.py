"""ElementwiseRule: the base class of rules that update each element alone, on the rank that stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.rules.rule import Hyperparameters, check_result


@dataclass(frozen=True, slots=True)
class ElementwiseRule(Hyperparameters):
    """A rule that updates each element alone, without communication. A gradient of zeros counts like any other.

    To write a rule of your own, override `update`, declare its state with `keeps`, and call `register_rule`. `update`
    may only use operations whose result for an element depends on the inputs of this element alone, for tensors of
    every length: ``lerp_``, ``mul_``, ``sign``, ``sqrt``, ``where``, casts. Then every sharding gives the same bits.
    """

    def keeps(self) -> tuple[str, ...]:
        """Return the names of state with one number per element, in the dtype of the weights. State starts at 0."""
        return ()

    def update(self, gradient: Tensor, state: Mapping[str, Tensor], count: Tensor) -> Tensor:
        """Return u of the step ``p ← p − lr·u``, without weight decay, which is applied separately.

        Args:
            gradient: Any shape, fp32 or wider, read only.
            state: The state by name, each of the shape of the gradient, fp32 or wider, written in place.
            count: The number of steps of this parameter, this step included, fp32, 0-d.

        Returns:
            The same shape.
        """
        raise NotImplementedError  # `register_rule` refuses rules without this method

    def largest_step(self) -> float:
        """Return an upper bound of the root mean square of a step, without weight decay; NaN if it is not known.

        `Muon.explain` shows the bound. Override this method in a rule of your own that has one.
        """
        return math.nan

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
            weights: The parameters, or their fp32 master weights if there are any.
            gradients: Gradients of the same shapes and dtypes as the weights.
            state: The state by name, with one tensor for each of the weights.
            counts: The number of steps already taken with each of the weights, fp32, 0-d.
            stop: 0-d bool tensor: True means that the step changes nothing. None means False.
            measured: Whether to return the squares of the steps.

        Returns:
            With ``measured``, for each of the weights the sum of the squares of its step without decay, 0-d fp64; else
            an empty list.
        """
        squares = []
        for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            stored = {key: tensors[number] for key, tensors in state.items()}
            updated = {key: tensor.to(wide, copy=True) for key, tensor in stored.items()}
            count, fresh = counts[number] + 1, weight.to(wide, copy=True)
            step = self.update(gradient.to(wide), updated, count)
            check_result(self.update, step, fresh.shape)
            self.decay(fresh, step)
            step = step * self.lr
            fresh.sub_(step)
            pairs = [(weight, fresh), (counts[number], count), *((stored[key], updated[key]) for key in stored)]
            for old, new in pairs:
                old.copy_(new if stop is None else torch.where(stop, old, new.to(old.dtype)))
            if measured:
                squares.append(step.double().square().sum())
        return squares
