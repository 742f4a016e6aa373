"""Mending: corrects an error of DeepSpeed 0.19 on the engine."""

from __future__ import annotations

from typing import Any


def mend(zero: Any) -> None:
    """Correct the links of a ZeRO optimizer from parameters to their fragments, in place.

    ``round_robin_gradients`` reorders the parameters in the flat tensors, but not these links. Without the correction,
    `safe_get_full_fp32_param` would return other parameters.
    """
    if not hasattr(zero, "round_robin_bit16_groups"):
        return
    link = zero._link_all_hp_params

    def link_in_order() -> None:
        given, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
        try:
            link()
        finally:
            zero.bit16_groups = given

    zero._link_all_hp_params = link_in_order
    link_in_order()
    zero._param_slice_mappings = zero._create_param_mapping()
