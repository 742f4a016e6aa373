"""Settings: the arguments of `Muon` and the keys of its param groups, each with its type, default and check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from muonmesh.comm.gradients import GradientSource
from muonmesh.layout import Declared
from muonmesh.numerics.coefficients import MOST_STEPS, Coefficients
from muonmesh.numerics.dtypes import COMPUTE_DTYPES, HELD_DTYPES, NEEDED_COMPUTE, NEEDED_HELD
from muonmesh.numerics.kernels import KernelName
from muonmesh.numerics.newton_schulz import Method
from muonmesh.numerics.rules import DecayMode
from muonmesh.numerics.scale import ScaleMode
from muonmesh.numerics.setting import (
    NOT_NEGATIVE,
    Setting,
    choice,
    fraction,
    is_number,
    not_negative,
    positive,
    switch,
    two_fractions,
    whole,
)

StateDtype = torch.dtype | Literal["int8"]
"""The dtype of the momentum; "int8" has a scale for each block of 256 elements."""

StateDevice = Literal["cpu"] | None
"""The device that keeps per-element state; None: the device of the parameter."""

ProcessGroup = Literal["world", "local", "auto"] | dist.ProcessGroup | None

NORM_MEANS = "norm_means"
"""Key of every group: the running means of gradient norms, see `muonmesh.clip.norm_means`. No setting."""

FRESH_MEANS = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
"""Their value before a norm has been counted."""

LOST_GROUP: Any = "a ProcessGroup that was lost in pickling"
"""Stands for a ProcessGroup, which cannot be pickled, in an unpickled optimizer."""

LOST_LAYOUTS: Any = {"layouts that were lost in pickling": None}
"""Stands for declared layouts, whose meshes cannot be pickled, in an unpickled optimizer."""


def _dtype(default: object, *allowed: object, needed: str) -> Setting:
    return Setting(default, lambda value: value in allowed, needed)


_STEPS = f"a whole number from 1 to {MOST_STEPS}, or None for what the set is made for"
_DEVICE = '"cpu", or None for where the parameters are'
_LAYOUTS = "a mapping of names to (mesh, placements), FlatShards or a list of FlatParameter"


class GroupSettings(TypedDict, total=False):
    """Settings besides ``lr`` that may differ between param groups; `Muon` describes them."""

    momentum: Annotated[float, fraction(0.95)]
    weight_decay: Annotated[float, not_negative(0.1)]
    scale_mode: Annotated[ScaleMode, choice("match_rms_adamw", ScaleMode)]
    ns_coefficients: Annotated[Coefficients, Setting("auto")]
    ns_steps: Annotated[int | None, whole(None, 1, _STEPS, most=MOST_STEPS)]
    adamw_betas: Annotated[tuple[float, float], two_fractions((0.9, 0.95))]
    adamw_eps: Annotated[float, not_negative(1e-8)]
    nesterov: Annotated[bool, switch(True)]
    decay_mode: Annotated[DecayMode, choice("full", DecayMode)]
    extra_scale_factor: Annotated[float, positive(1.0)]
    ns_method: Annotated[Method, choice("auto", Method)]
    stochastic_rounding: Annotated[int | None, whole(None, 0, "a seed, a whole number below 2**63, or None")]


class OptimizerSettings(TypedDict, total=False):
    """Settings that all groups share; `Muon` describes them."""

    compute_dtype: Annotated[torch.dtype, _dtype(torch.bfloat16, *COMPUTE_DTYPES, needed=NEEDED_COMPUTE)]
    state_dtype: Annotated[StateDtype, _dtype(torch.float32, *HELD_DTYPES, "int8", needed=f'{NEEDED_HELD}, or "int8"')]
    master_dtype: Annotated[torch.dtype | None, _dtype(None, None, *HELD_DTYPES, needed=f"None or {NEEDED_HELD}")]
    process_group: Annotated[ProcessGroup, Setting(None)]
    layouts: Annotated[
        Mapping[str, Declared] | None,
        Setting(None, lambda value: value is None or isinstance(value, Mapping), _LAYOUTS),
    ]
    kernels: Annotated[KernelName, choice("auto", KernelName)]
    state_device: Annotated[StateDevice, Setting(None, lambda value: value in (None, "cpu"), _DEVICE)]
    shard_state: Annotated[bool, switch(False)]
    memory_budget_mb: Annotated[
        float | None,
        Setting(None, lambda value: value is None or (is_number(value) and value >= 0), f"{NOT_NEGATIVE}, or None"),
    ]
    gradients: Annotated[GradientSource | Literal["to_owners"] | None, Setting(None)]


class MuonSettings(GroupSettings, OptimizerSettings, total=False):
    """Keyword arguments of `Muon`. ``betas``, ``eps``, ``foreach`` and ``fused`` have torch.optim.AdamW's names."""

    betas: tuple[float, float]
    eps: float
    foreach: bool | None
    fused: bool | None


def _settings_of(declared: type) -> dict[str, Setting]:
    hints = get_type_hints(declared, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


GROUP_SETTINGS = _settings_of(GroupSettings)
OPTIMIZER_SETTINGS = _settings_of(OptimizerSettings)
SETTINGS = {**GROUP_SETTINGS, **OPTIMIZER_SETTINGS}
"""All declared settings by name, of groups and of the optimizer as a whole, without ``lr``."""

FIRST = 7, 5
"""How many settings of groups, and of the optimizer, signatures and the reference show first. They are set most often,
and they come first in the classes above."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows_settings(function: _Function) -> _Function:
    """Give a function that takes `MuonSettings` as ``**settings`` a signature with their types and defaults.

    The settings that are set most often come first (`FIRST`).
    """
    *parameters, _ = inspect.signature(function).parameters.values()
    types = get_type_hints(MuonSettings)
    first = [*islice(GROUP_SETTINGS, FIRST[0]), *islice(OPTIMIZER_SETTINGS, FIRST[1])]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=SETTINGS[name].default, annotation=types[name])
        for name in dict.fromkeys((*first, *SETTINGS))
    ]
    vars(function)["__signature__"] = inspect.signature(function).replace(parameters=[*parameters, *settings])
    return function


FOREIGN_KEYS = {
    # torch's learning-rate schedulers
    *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "initial_momentum", "max_momentum", "base_momentum"),
    # Megatron's
    *("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "start_wd", "end_wd", "default_config"),
    *("is_expert_parallel", "is_decoupled_lr", "skip_grad_norm_clip", "grad_norm_group"),
    # timm's; DeepSpeed's and ours under it
    *("lr_scale", "moe", "parameters"),
}
"""Keys that frameworks write into param groups. Other keys that muonmesh does not know raise an error. Add the keys of
your own framework to this set."""
