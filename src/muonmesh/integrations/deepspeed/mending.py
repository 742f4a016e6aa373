"""Mending: corrects errors of DeepSpeed 0.19 on the engine."""

from __future__ import annotations

from typing import Any


def mend(zero: Any) -> None:
    """Correct a ZeRO optimizer of an engine in place.

    Args:
        zero: DeepSpeed's own optimizer, which wraps the engine's.
    """
    if hasattr(zero, "_update_scale"):
        _scale_after_the_step(zero)
    if hasattr(zero, "round_robin_bit16_groups"):
        _link_in_order(zero)


def _scale_after_the_step(zero: Any) -> None:
    """Let the loss scale grow after a step.

    DeepSpeed lets it grow within the step, and then divides the gradients by the new scale. But they were multiplied by
    the old one, so each growth would halve the gradients of a step.
    """
    update, step = zero._update_scale, zero.step
    waiting: list[bool] = []

    def update_later(has_overflow: bool = False) -> None:
        waiting.append(has_overflow)

    def step_first(*arguments: Any, **named: Any) -> Any:
        waiting.clear()  # of a step that raised
        result = step(*arguments, **named)
        for has_overflow in waiting:
            update(has_overflow)
        return result

    zero._update_scale, zero.step = update_later, step_first


def _link_in_order(zero: Any) -> None:
    """Correct the links from parameters to their elements in the flat tensors.

    ``round_robin_gradients`` reorders the parameters in the flat tensors, but not these links. Without the correction,
    `safe_get_full_fp32_param` would return other parameters.
    """
    link = zero._link_all_hp_params

    def link_in_order() -> None:
        in_model_order, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
        try:
            link()
        finally:
            zero.bit16_groups = in_model_order

    zero._link_all_hp_params = link_in_order
    link_in_order()
    zero._param_slice_mappings = zero._create_param_mapping()
