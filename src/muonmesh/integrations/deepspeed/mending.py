"""Mending: corrects errors of DeepSpeed 0.19 on the engine, and reports what its functions write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple

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
        _GradientsOfThisStep(zero).take_the_places()


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


def report_fp32_writes(zero: Any, parameters: Sequence[Any], report: Callable[[Any], None]) -> None:
    """Call ``report`` with each parameter whose fp32 weights a function of DeepSpeed's for users has written.

    `safe_set_full_fp32_param` and `safe_set_local_fp32_param` call methods of the ZeRO optimizer at stage 3, and a
    method of the parameter at stages 1 and 2, which DeepSpeed sets anew when it links parameters to their fp32 weights.

    Args:
        zero: DeepSpeed's own optimizer, in which methods are replaced.
        parameters: The parameters that it trains.
        report: Gets the parameter after each write, on each rank that calls the function.
    """

    def reporting(write: Callable[..., Any], parameter: Any = None) -> Callable[..., Any]:
        @wraps(write)
        def write_and_report(*arguments: Any, **named: Any) -> Any:
            written, positional = parameter, list(arguments)
            if written is None:  # a method of the optimizer, whose arguments are the value, the parameter and the key
                written = named["param"] if len(positional) < 2 else positional.pop(1)
            result = write(*arguments, **named)
            if named.get("optim_state_key", positional[1] if len(positional) > 1 else None) is None:
                report(written)
            return result

        return write_and_report

    if hasattr(zero, "fp16_partitioned_groups_flat"):
        zero.set_full_hp_param = reporting(zero.set_full_hp_param)
        zero.set_local_hp_param = reporting(zero.set_local_hp_param)
        return
    link = zero._link_all_hp_params

    def report_from_parameters() -> None:
        for parameter in parameters:
            parameter.set_full_hp_param = reporting(parameter.set_full_hp_param, parameter)

    def link_and_report() -> None:
        link()
        report_from_parameters()

    zero._link_all_hp_params = link_and_report
    report_from_parameters()


class _Names(NamedTuple):
    """DeepSpeed's names of what it does with gradients in buffers, which differ between its stages."""

    take: str
    """The method that a backward pass calls with what it has reached."""
    sum_numbers: str
    """The attribute with the numbers of the parameters whose sums are copied into offloaded fp32 gradients."""
    copy_sums: str
    """The method that copies them."""


_STAGES_1_AND_2 = _Names(
    "copy_grads_in_partition", "_offload_accumulated_param_ids", "_finalize_cpu_offload_gradient_accumulation"
)
_STAGE_3 = _Names("partition_grads", "_offload_boundary_param_ids", "_finalize_offload_gradient_accumulation")


class _GradientsOfThisStep:
    """Zeroes the gradients of parameters that no backward pass of a step reaches, such as experts without tokens.

    Stage 3, and stages 1 and 2 with offload, keep gradients in buffers, and write there only what a backward pass
    reaches. So DeepSpeed steps any other parameter by its gradient of an earlier step, and adds to that what a later
    micro-batch contributes. With offload, it also loses a gradient that the last micro-batch does not reach.

    Its public methods take the places of DeepSpeed's methods, which they call, in the order of a step.

    Args:
        zero: DeepSpeed's own optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._is_stage_3 = hasattr(zero, "fp16_partitioned_groups_flat")
        self._names = _STAGE_3 if self._is_stage_3 else _STAGES_1_AND_2
        self._offloads = bool(zero.offload_optimizer if self._is_stage_3 else zero.cpu_offload)
        self._reached: set[int] = set()  # by the backward passes since the last step
        self._copied: set[int] = set()  # by the last of them, into the offloaded fp32 gradients
        self._take, self._finish_pass = getattr(zero, self._names.take), zero.independent_gradient_partition_epilogue
        self._step, self._zero_grad = zero.step, zero.zero_grad

    def take_the_places(self) -> None:
        """Put the public methods in the places of DeepSpeed's methods."""
        setattr(self._zero, self._names.take, self.take)
        self._zero.independent_gradient_partition_epilogue = self.finish_pass
        self._zero.step, self._zero.zero_grad = self.step, self.zero_grad

    def take(self, parameters: Any, *more: Any) -> Any:
        """Take what a backward pass has reached: at stage 3 several parameters, else one."""
        for parameter in parameters if self._is_stage_3 else (parameters,):
            number = self._number_of(parameter)
            if number not in self._reached:
                self._zero_sum(parameter)
            self._reached.add(number)
            if self._zero.is_gradient_accumulation_boundary():
                self._copied.add(number)
        return self._take(parameters, *more)

    def finish_pass(self) -> None:
        """Finish a backward pass: zero what none has reached, and copy what an earlier one has and the last has not."""
        self._finish_pass()
        self._zero_unreached()
        if self._offloads and self._zero.is_gradient_accumulation_boundary():
            self._copy_sums(self._reached - self._copied)

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Step; the next backward pass is the first of the next step."""
        if not self._reached:  # no backward pass has been finished since the last step
            self._zero_unreached()
        self._start_again()
        return self._step(*arguments, **named)

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """Forget gradients."""
        if self._is_stage_3:  # the others go on adding to what they have accumulated
            self._start_again()
        self._zero_grad(*arguments, **named)

    def _start_again(self) -> None:
        self._reached.clear()
        self._copied.clear()

    def _zero_unreached(self) -> None:
        zero = self._zero
        for parameter in chain.from_iterable(zero.fp16_groups if self._is_stage_3 else zero.params_in_partition):
            if self._number_of(parameter) not in self._reached:
                self._zero_sum(parameter)
                if self._offloads:
                    self._offloaded_gradient(parameter).zero_()

    def _number_of(self, parameter: Any) -> int:
        number: int = parameter.ds_id if self._is_stage_3 else self._zero.get_param_id(parameter)
        return number

    def _zero_sum(self, parameter: Any) -> None:
        """Zero the sum over micro-batches of a parameter's gradients."""
        if self._is_stage_3:
            vars(self._zero)["_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"][parameter.ds_id].zero_()
        elif (accumulated := self._zero.accumulated_grads_in_cpu.get(self._number_of(parameter))) is not None:
            accumulated.zero_()

    def _offloaded_gradient(self, parameter: Any) -> Tensor:
        zero = self._zero
        group, *_, start, length = zero.grad_position[zero.get_param_id(parameter)]
        flats = zero.fp32_partitioned_groups_flat if self._is_stage_3 else zero.single_partition_of_fp32_groups
        gradient: Tensor = flats[group].grad.view(-1)[start : start + length]
        return gradient

    def _copy_sums(self, numbers: set[int]) -> None:
        """Copy sums over micro-batches into the offloaded fp32 gradients, by DeepSpeed's own method."""
        if not numbers:
            return
        of_deepspeed = getattr(self._zero, self._names.sum_numbers)
        setattr(self._zero, self._names.sum_numbers, numbers)
        getattr(self._zero, self._names.copy_sums)()
        setattr(self._zero, self._names.sum_numbers, of_deepspeed)
