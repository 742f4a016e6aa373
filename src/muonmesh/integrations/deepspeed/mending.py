"""Mending: corrects errors of DeepSpeed 0.19 on the engine."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor


def mend(zero: Any) -> None:
    """Correct a ZeRO optimizer of an engine in place.

    Args:
        zero: DeepSpeed's own optimizer, which wraps the engine's.
    """
    if hasattr(zero, "_update_scale"):
        _scale_after_the_step(zero)
    if hasattr(zero, "round_robin_bit16_groups"):
        _link_in_order(zero)
    if hasattr(zero, "fp16_partitioned_groups_flat") or getattr(zero, "cpu_offload", False):
        _step_gradients_of_this_step(zero)


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


def _step_gradients_of_this_step(zero: Any) -> None:
    """Zero the gradients of parameters that no backward pass of a step reaches, such as experts without tokens.

    Stage 3, and stages 1 and 2 with offload, keep gradients in buffers, and write there only what a backward pass
    reaches. So DeepSpeed steps any other parameter by its gradient of an earlier step, and adds to that what a later
    micro-batch contributes. With offload, it also loses a gradient that the last micro-batch does not reach.
    """
    stage_3 = hasattr(zero, "fp16_partitioned_groups_flat")
    offloads = zero.offload_optimizer if stage_3 else zero.cpu_offload
    reached: set[int] = set()  # by the backward passes since the last step
    copied: set[int] = set()  # by the last of them, into the offloaded fp32 gradients
    taking, numbers, copying = (
        "copy_grads_in_partition",
        "_offload_accumulated_param_ids",
        "_finalize_cpu_offload_gradient_accumulation",
    )
    if stage_3:
        taking, numbers, copying = (
            "partition_grads",
            "_offload_boundary_param_ids",
            "_finalize_offload_gradient_accumulation",
        )
    take, finish, step, zero_grad = (
        getattr(zero, name) for name in (taking, "independent_gradient_partition_epilogue", "step", "zero_grad")
    )

    def number_of(parameter: Any) -> int:
        number: int = parameter.ds_id if stage_3 else zero.get_param_id(parameter)
        return number

    def forget(parameter: Any) -> None:
        """Zero the sum over micro-batches."""
        if stage_3:
            vars(zero)["_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"][parameter.ds_id].zero_()
        elif (accumulated := zero.accumulated_grads_in_cpu.get(number_of(parameter))) is not None:
            accumulated.zero_()

    def offloaded(parameter: Any) -> Tensor:
        group, *_, start, length = zero.grad_position[zero.get_param_id(parameter)]
        flats = zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups
        gradient: Tensor = flats[group].grad.view(-1)[start : start + length]
        return gradient

    def take_noting(parameters: Any, *more: Any) -> Any:
        for parameter in parameters if stage_3 else (parameters,):
            if number_of(parameter) not in reached:
                forget(parameter)
            reached.add(number_of(parameter))
            if zero.is_gradient_accumulation_boundary():
                copied.add(number_of(parameter))
        return take(parameters, *more)

    def finish_pass() -> None:
        finish()
        for parameter in chain.from_iterable(zero.fp16_groups if stage_3 else zero.params_in_partition):
            if number_of(parameter) not in reached:
                forget(parameter)
                if offloads:
                    offloaded(parameter).zero_()
        if offloads and zero.is_gradient_accumulation_boundary() and reached - copied:
            # DeepSpeed's own function for it, which reads the numbers of the parameters.
            accumulated = getattr(zero, numbers)
            setattr(zero, numbers, reached - copied)
            getattr(zero, copying)()
            setattr(zero, numbers, accumulated)

    def start_again() -> None:
        reached.clear()
        copied.clear()

    def step_once(*arguments: Any, **named: Any) -> Any:
        start_again()
        return step(*arguments, **named)

    def zero_all(*arguments: Any, **named: Any) -> None:
        if stage_3:  # the others go on adding to what they have accumulated
            start_again()
        zero_grad(*arguments, **named)

    setattr(zero, taking, take_noting)
    zero.independent_gradient_partition_epilogue, zero.step, zero.zero_grad = finish_pass, step_once, zero_all
