"""Package: what one other package calls its settings, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.migration.state_keys import StateKeys
from muonmesh.numerics.scale import ScaleMode
from muonmesh.settings import FOREIGN_KEYS

Settings: TypeAlias = dict[str, Any]
Halves: TypeAlias = dict[str, Settings]
"""Our settings of the halves that a group speaks of: "muon", "adamw" or both."""

_HALVES = {"muon": ("muon",), True: ("muon",), "adamw": ("adamw",), False: ("adamw",)}
"""Which halves a group speaks of, by its key "algorithm" or "use_muon"."""


@dataclass(frozen=True)
class Package:
    """What one package calls its settings, and what it keeps of a parameter.

    Attributes:
        defaults: The settings that change a step, with the package's defaults.
        halves: The halves that a group speaks of which does not say so.
        rates: The learning rate of each half where the group has none.
        scales: Our scale mode for each value of its own setting.
        coefficients: Returns the Newton–Schulz coefficients of a group.
        adjust: Changes what has been read of a group where the shape of a setting is another than ours.
        beside: Settings that change no step: how it is run, or where.
        state_keys: Under which keys it keeps state.
    """

    defaults: Mapping[str, Any]
    halves: tuple[str, ...] = ("muon", "adamw")
    rates: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str | None, ScaleMode] = field(default_factory=lambda: {None: "original"})
    coefficients: Callable[[Settings], Any] = lambda group: "simple"
    adjust: Callable[[Settings, Halves], None] = lambda group, halves: None
    beside: frozenset[str] = frozenset()
    state_keys: StateKeys = field(default_factory=StateKeys)

    def read_group(self, given: Mapping[str, Any]) -> Halves:
        """Translate a group, or settings alone.

        Raises:
            ValueError: a key is unknown, or its value has no counterpart.
        """
        rate = given.get("initial_lr", given.get("lr", self.defaults["lr"]))
        group = {**self.defaults, **given, "lr": float(rate) if isinstance(rate, Tensor) else rate}
        for key in [*group]:
            group.setdefault(_plain(key), group[key])
        for key, value in given.items():
            fine, write = WITHOUT.get(key, (None, ""))
            if _plain(key) == "scale_mode":
                fine, write = (*self.scales,), "Write one of them"
            if fine is None:
                if key not in self.defaults and key not in self.beside and key not in _COMMON | FOREIGN_KEYS:
                    known = ", ".join(self.defaults)
                    raise ValueError(explain_error("settings", f"{key!r}", f"some of {known}", "Correct or remove it"))
            elif not any(value is one or value == one for one in fine) and (
                key not in _DECAYS or group["weight_decay"]
            ):
                needed = " or ".join(map(repr, fine))
                raise ValueError(explain_error(key, f"{value!r}, which muonmesh has no counterpart for", needed, write))
        if "beta1" in group:
            group["betas"] = (group["beta1"], group["beta2"])
        chosen = group.get("algorithm", group.get("use_muon"))
        read = {"muon": self._muon, "adamw": self._adamw}
        halves = {half: read[half](group) for half in (self.halves if chosen is None else _HALVES[chosen])}
        self.adjust(group, halves)
        shapes = [tuple(parameter.shape) for parameter in given.get("params", ())]
        vectors = bool(shapes) and all(sum(size > 1 for size in shape) <= 1 for shape in shapes)
        for half in halves.values():
            if vectors and half["weight_decay"] == 0:
                half["exempt"] = True
        return halves

    def _rate(self, half: str, group: Settings) -> Any:
        given = (group.get(key) for key in (f"{half.removesuffix('w')}_lr", "lr"))
        return next((rate for rate in given if rate is not None), self.rates.get(half))

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
            "decay_mode": "full",
            "adamw_betas": tuple(group["betas"]),
            "adamw_eps": group["eps"],
        }


def _plain(key: str) -> str:
    """Return what this file calls a setting. A setting of one half may say so by its first word."""
    plain = key.removeprefix("muon_").removeprefix("adam_")
    return _NAMES.get(plain, plain)


_NAMES = {
    "mu": "momentum",
    "use_nesterov": "nesterov",
    "wd": "weight_decay",
    "cautious_wd": "cautious",
    "use_cautious_wd": "cautious",
    "adjust_lr": "scale_mode",
    "adjust_lr_fn": "scale_mode",
    "num_ns_steps": "ns_steps",
    "epsilon": "eps",
}
"""Other names of settings. A group that has the latter key, too, means that."""

_COMMON = frozenset({"params", "param_names", "name"})
_OFF = (None, False)
_DECAYS = {
    key: ((True, "decoupled"), "Leave it out: our decay is decoupled")
    for key in ("weight_decay_method", "decoupled_weight_decay", "adam_w_mode", "is_adamw")
}

WITHOUT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **_DECAYS,
    "amsgrad": (_OFF, "Leave it out"),
    "differentiable": (_OFF, "Leave it out"),
    "newton_schulz_func": (_OFF, "Leave it out"),
    "maximize": (_OFF, "Leave it out and negate the loss"),
    "split_sizes": (_OFF, 'Leave it out and write overrides={name: {"matrices": ("rows", ...)}} for from_model'),
    "num_heads": (_OFF, 'Leave it out and write overrides={name: {"matrices": ("heads", n, dim)}} for from_model'),
    "use_gram_newton_schulz": (_OFF, "Leave it out: ns_method does this, with its own restarts"),
    "coefficient_type": (
        ("simple", "quintic", "polar_express", "cans", "deepseekv4"),
        'Write coefficient_type="quintic", or set ns_coefficients afterwards',
    ),
    "algorithm": (
        (None, "muon", "adamw"),
        'Convert the settings of its Muon, and write rule="normuon" for from_model if that is meant',
    ),
}
"""Settings of any package that change a step and have no counterpart in muonmesh, with the values that change nothing,
and what to write instead of others. How decay is coupled matters only with a decay."""
