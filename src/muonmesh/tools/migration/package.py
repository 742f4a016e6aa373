"""Package: the names of another package's settings and of its state, and their meaning in muonmesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from muonmesh.errors import StateError, explain_error
from muonmesh.files import is_finite
from muonmesh.numerics.dtypes import HELD_DTYPES, NEEDED_HELD
from muonmesh.numerics.rules import step_count
from muonmesh.numerics.scale import ScaleMode
from muonmesh.settings import FOREIGN_KEYS

ALGORITHMS = ("muon", "adamw")
"""The values of "algorithm" in a group whose state muonmesh can keep; dion also has "lion"."""


class ParameterState(NamedTuple):
    """The state of one parameter, with muonmesh's keys.

    Attributes:
        algorithm: "muon" or "adamw", the algorithm to which the state belongs; any other rule of the package by the
            package's name.
        state: "momentum_buffer", an average, for Muon; "exp_avg", "exp_avg_sq" and "step", 0-d fp32, for AdamW; nothing
            for other rules. Tensors have the shape in which the other optimizer keeps them.
    """

    algorithm: str
    state: dict[str, Tensor]


@dataclass(frozen=True)
class StateKeys:
    """The keys under which one package keeps the state of a parameter.

    A sum of gradients ``M ← μM + g`` is 1/(1 − μ) times the average ``m ← μm + (1 − μ)g`` of the same gradients. The
    same factor lies between the Nesterov directions ``g + μM`` and ``(1 − μ)g + μm``. So if muonmesh starts with the
    average (1 − μ)M, all further steps have the same directions.

    Attributes:
        momentum: The key of a matrix's momentum.
        sums: Whether the momentum is a sum of gradients, and not an average.
        factor: The key of μ in a group.
        first: The key of AdamW's first moment.
        second: The key of AdamW's second moment.
        count: The key of AdamW's step count. If it is missing, "step" of the group is read.
        beside: Keys that change no step of Muon, such as counts.
        mark: A key of every group with momentum, if a package that keeps sums has the same other keys.
    """

    momentum: str = "momentum_buffer"
    sums: bool = False
    factor: str = "momentum"
    first: str = "exp_avg"
    second: str = "exp_avg_sq"
    count: str = "step"
    beside: frozenset[str] = frozenset({"step"})
    mark: str | None = None

    def read(self, name: str, group: Mapping[str, Any], entry: Mapping[str, Any]) -> ParameterState:
        """Return the state of one parameter, with muonmesh's keys.

        Args:
            name: The name of the parameter, for messages.
            group: The saved group of the parameter.
            entry: The saved state of the parameter, not empty.

        Raises:
            StateError: the saved state is incomplete, or has values that no step of Muon or AdamW leaves.
        """
        rule = group.get("algorithm")
        if isinstance(rule, str) and rule not in ALGORITHMS:
            return ParameterState(rule, {})
        is_adamw = self.second in entry
        needed = (self.first, self.second) if is_adamw else (self.momentum,)
        missing = [
            key for key in needed if not (isinstance(entry.get(key), Tensor) and entry[key].dtype in HELD_DTYPES)
        ]
        if missing:
            kinds = {str(key): getattr(value, "dtype", type(value).__name__) for key, value in entry.items()}
            fault = "state " + ", ".join(f"{key!r} ({kind})" for key, kind in sorted(kinds.items()))
            required = f"{self.momentum!r} of a matrix, or {self.first!r} and {self.second!r} of AdamW's, "
            write = "Save the state after a step, and convert other dtypes with .float()"
            raise StateError(explain_error(name, fault, f"{required}in {NEEDED_HELD}", write))
        strangers = sorted(map(str, entry.keys() - {*needed, *self.beside, *((self.count,) if is_adamw else ())}))
        if strangers:
            fault = f"{strangers[0]!r} in its state, which belongs to another rule"
            write = "Begin without that state: train on with a new optimizer, its settings from convert_settings"
            raise StateError(explain_error(name, fault, f"{', '.join(needed)} and a count of steps alone", write))
        if not is_adamw:
            momentum = entry[self.momentum].detach()
            return ParameterState("muon", {"momentum_buffer": self._average(name, group, momentum)})
        count = _number(entry.get(self.count, group.get("step")))
        if count is None:
            fault = "no count of AdamW's steps"
            required = f"{self.count!r} in its state or 'step' in its group, for the bias correction"
            raise StateError(explain_error(name, fault, required, f'Write state["{self.count}"] = the number of steps'))
        step = step_count(count)
        state = {"step": step, "exp_avg": entry[self.first].detach(), "exp_avg_sq": entry[self.second].detach()}
        return ParameterState("adamw", state)

    def _average(self, name: str, group: Mapping[str, Any], momentum: Tensor) -> Tensor:
        if not self.sums:
            return momentum
        factor = _number(group.get(self.factor))
        if factor is None or factor >= 1:
            fault, needed = f"{self.factor} {factor} in its group", "μ in [0, 1), by which gradients were summed"
            raise StateError(explain_error(name, fault, needed, f'Write group["{self.factor}"] = 0.95, or what it was'))
        return momentum.to(torch.promote_types(momentum.dtype, torch.float32)) * (1 - factor)


def _number(value: Any) -> float | None:
    """Return a finite number of at least 0, plain or as a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if is_finite(value) and value >= 0 else None


def _plain_number(value: Any) -> Any:
    """Return the number in a tensor of one element, such as a rate of torch or a decay of dion; else the value."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


Settings: TypeAlias = dict[str, Any]
Halves: TypeAlias = dict[str, Settings]
"""Settings of muonmesh that a group of another package gives, by algorithm: "muon", "adamw" or both."""

_HALVES = {"muon": ("muon",), True: ("muon",), "adamw": ("adamw",), False: ("adamw",)}
"""The algorithms of a group, by the value of its key "algorithm" or "use_muon"."""


@dataclass(frozen=True)
class Package:
    """The settings and the state of one other package, and their meaning in muonmesh.

    Attributes:
        defaults: The settings that change a step, with the package's defaults.
        halves: The algorithms ("muon", "adamw") of a group that has neither "algorithm" nor "use_muon".
        rates: For each algorithm, the learning rate of a group that has none.
        scales: muonmesh's scale mode for each value of the package's own setting.
        coefficients: A function that returns the Newton–Schulz coefficients of a group.
        cautious_adamw: Whether AdamW's decay is cautious where Muon's is.
        beside: Settings that change no step, such as the device or the implementation.
        state_keys: The keys of the package's state.
        keeps_settings: Whether groups have Muon's settings, and not only its rate, momentum and decay.
        sorts: Whether an optimizer sorts the matrices of a group by shape.
    """

    defaults: Mapping[str, Any]
    halves: tuple[str, ...] = ("muon", "adamw")
    rates: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str | None, ScaleMode] = field(default_factory=lambda: {None: "original"})
    coefficients: Callable[[Settings], Any] = lambda group: "simple"
    cautious_adamw: bool = False
    beside: frozenset[str] = frozenset()
    state_keys: StateKeys = field(default_factory=StateKeys)
    keeps_settings: bool = True
    sorts: bool = False

    def read_group(self, raw_group: Mapping[str, Any]) -> Halves:
        """Return the settings of muonmesh for a group of the package, or for its settings without parameters.

        Raises:
            ValueError: a key is unknown, or its value has no counterpart in muonmesh.
        """
        raw_group = {key: _plain_number(value) for key, value in raw_group.items()}
        rate = raw_group.get("initial_lr", raw_group.get("lr", self.defaults["lr"]))
        group = {**self.defaults, **raw_group, "lr": rate}
        for key in [*raw_group, *group]:  # a default under another name of the same setting comes last
            group.setdefault(plain(key), group[key])
        for key, value in raw_group.items():
            matters = key not in _DECAYS or group["weight_decay"]
            fine, write = WITHOUT.get(key, WITHOUT.get(plain(key), (None, "")))
            if plain(key) == "scale_mode":
                fine, write = (*self.scales,), "Write one of them"
            if fine is None:
                if key not in self.defaults and key not in self.beside and key not in COMMON | FOREIGN_KEYS:
                    names = ", ".join(self.defaults)
                    raise ValueError(explain_error("settings", f"{key!r}", f"some of {names}", "Correct or remove it"))
            elif matters and not any(value is allowed or value == allowed for allowed in fine):
                needed = " or ".join(map(repr, fine))
                raise ValueError(explain_error(key, f"{value!r}, which muonmesh has no counterpart for", needed, write))
        if "beta1" in group:
            group["betas"] = (group["beta1"], group["beta2"])
        chosen = group.get("algorithm", group.get("use_muon"))
        read = {"muon": self._muon, "adamw": self._adamw}
        halves = {half: read[half](group) for half in (self.halves if chosen is None else _HALVES[chosen])}
        shapes = [tuple(parameter.shape) for parameter in raw_group.get("params", ())]
        vectors = bool(shapes) and all(sum(size > 1 for size in shape) <= 1 for shape in shapes)
        for half in halves.values():
            if vectors and half["weight_decay"] == 0:
                half["exempt"] = True
        return halves

    def _rate(self, half: str, group: Settings) -> Any:
        candidates = (group.get(key) for key in (f"{half.removesuffix('w')}_lr", "lr"))
        return next((rate for rate in candidates if rate is not None), self.rates.get(half))

    def _muon(self, group: Settings) -> Settings:
        return {
            "lr": self._rate("muon", group),
            "momentum": group["momentum"],
            "nesterov": group.get("nesterov", True),
            "weight_decay": group["weight_decay"],
            "decay_mode": "cautious" if group.get("cautious") else "full",
            "scale_mode": self.scales[group.get("scale_mode")],
            "extra_scale_factor": group.get("extra_scale_factor", 1.0),
            "ns_coefficients": self.coefficients(group),
            "ns_steps": group.get("ns_steps", 5),
        }

    def _adamw(self, group: Settings) -> Settings:
        return {
            "lr": self._rate("adamw", group),
            "weight_decay": group["weight_decay"],
            "decay_mode": "cautious" if self.cautious_adamw and group["cautious"] else "full",
            "adamw_betas": tuple(map(_plain_number, group["betas"])),
            "adamw_eps": group["eps"],
        }


def plain(key: str) -> str:
    """Return the name that this file uses for a setting of any package, without a prefix ``muon_`` or ``adam_``."""
    plain = key.removeprefix("muon_").removeprefix("adam_")
    return _NAMES.get(plain, plain)


_NAMES = {
    "mu": "momentum",
    "use_nesterov": "nesterov",
    "cautious_wd": "cautious",
    "adjust_lr": "scale_mode",
    "adjust_lr_fn": "scale_mode",
    "num_ns_steps": "ns_steps",
    "momentum_beta": "momentum",
    "epsilon": "eps",
}
"""Other packages' names of settings → the names in this file. If a group has both, the name in this file counts."""

COMMON = frozenset({"params", "param_names", "name"})
_OFF = (None, False)
_DECOUPLED = ((True, "decoupled"), "Leave it out: our decay is decoupled")
_DECAYS = dict.fromkeys(("weight_decay_method", "decoupled_weight_decay", "adam_w_mode", "is_adamw"), _DECOUPLED)

WITHOUT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **_DECAYS,
    "amsgrad": (_OFF, "Leave it out"),
    "differentiable": (_OFF, "Leave it out"),
    "newton_schulz_func": (_OFF, "Leave it out"),
    "maximize": (_OFF, "Leave it out and negate the loss"),
    "split_sizes": (_OFF, 'Leave it out and write overrides={name: {"matrices": ("rows", ...)}} for from_model'),
    "num_heads": (_OFF, 'Leave it out and write overrides={name: {"matrices": ("heads", n, dim)}} for from_model'),
    "per_head_muon": (_OFF, 'Leave it out and write overrides={name: {"matrices": ("heads", n, dim)}} for from_model'),
    "muon_split_qkv": ((True,), 'Leave it out and write overrides={name: {"matrices": "whole"}} for from_model'),
    "weight_update_hook": (_OFF, "Leave it out"),
    "use_gram_newton_schulz": (_OFF, "Leave it out: ns_method does this, with its own restarts"),
    "coefficient_type": (
        ("simple", "quintic", "polar_express", "cans", "deepseekv4"),
        'Write coefficient_type="quintic", or set ns_coefficients afterwards',
    ),
    "optimizer": (
        ("muon", "dist_muon"),  # a rate of Adam would be 5 times as large for Megatron's Muon
        'For Adam, write convert_settings("adamw", lr=..., ...). For Muon, with which Megatron-Core 0.16 sets the '
        'field to "adam", write optimizer="muon". For others, name a rule if one is meant',
    ),
    "muon_scalar_optimizer": (("adam",), "Leave it out: AdamW steps what Muon does not step"),
    "algorithm": (
        (None, *ALGORITHMS),
        'Convert the settings of its Muon, and write rule="normuon" for from_model if that is meant',
    ),
}
"""Settings of other packages that change a step and have no counterpart in muonmesh. Each has the values that change
nothing, and what to write instead of other values. The settings in ``_DECAYS`` matter only with a weight decay."""
