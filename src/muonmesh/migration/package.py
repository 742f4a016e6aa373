"""Package: what one other package calls its settings, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.migration.memory import Memory
from muonmesh.numerics.coefficients import Polynomial
from muonmesh.numerics.scale import ScaleMode
from muonmesh.settings import FOREIGN_KEYS

Settings: TypeAlias = dict[str, Any]
Halves: TypeAlias = dict[str, Settings]
"""Our settings of the halves that a group speaks of: "muon", "adamw" or both."""

OFF = (None, False)
SWITCHES = frozenset({"foreach", "fused", "capturable"})


@dataclass(frozen=True)
class Package:
    """What one package calls its settings, and what it keeps of a parameter.

    Attributes:
        defaults: The settings that change a step, with the package's defaults.
        read: Translates a group with all of them.
        without: Settings that change a step in a way that we have no counterpart for, with the values that do not.
        beside: Settings that change no step: how it is run, or where.
        memory: What it keeps.
    """

    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Halves]
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    memory: Memory = field(default_factory=Memory)

    def read_group(self, given: Mapping[str, Any]) -> Halves:
        """Translate a group, or settings alone.

        Raises:
            ValueError: a key is unknown, or its value has no counterpart.
        """
        for key, value in given.items():
            if key in self.without:
                if not any(value is fine or value == fine for fine in self.without[key]):
                    needed = " or ".join(map(repr, self.without[key]))
                    write = _INSTEAD.get(key, "Leave it out")
                    raise ValueError(explain_error(key, f"{value!r}, for which we have no counterpart", needed, write))
            elif key not in self.defaults and key not in self.beside and key not in _COMMON | FOREIGN_KEYS:
                known = ", ".join(self.defaults)
                raise ValueError(explain_error("settings", f"{key!r}", f"some of {known}", "Correct or remove it"))
        rate = given.get("initial_lr", given.get("lr", self.defaults["lr"]))
        halves = self.read({**self.defaults, **given, "lr": float(rate) if isinstance(rate, Tensor) else rate})
        shapes = [tuple(parameter.shape) for parameter in given.get("params", ())]
        vectors = bool(shapes) and all(sum(size > 1 for size in shape) <= 1 for shape in shapes)
        for half in halves.values():
            if vectors and half["weight_decay"] == 0:
                half["exempt"] = True
        return halves


_COMMON = frozenset({"params", "param_names", "name"})

_INSTEAD = {
    "split_sizes": 'Leave it out and write overrides={name: {"matrices": ("rows", ...)}} for from_model',
    "num_heads": 'Leave it out and write overrides={name: {"matrices": ("heads", n, dim)}} for from_model',
    "maximize": "Leave it out and negate the loss",
    "use_gram_newton_schulz": "Leave it out: ns_method does this, with its own restarts",
    "coefficient_type": 'Write coefficient_type="quintic", or set ns_coefficients afterwards',
    "weight_decay_method": "Leave it out: our decay is decoupled",
    "decoupled_weight_decay": "Leave it out: our decay is decoupled",
    "adam_w_mode": "Leave it out: our decay is decoupled",
    "algorithm": 'Convert the settings of its Muon, and write rule="normuon" for from_model if that is meant',
}


def adamw_half(group: Mapping[str, Any]) -> Settings:
    """Return our settings for AdamW as the others have it."""
    return {
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "decay_mode": "full",
        "adamw_betas": tuple(group["betas"]),
        "adamw_eps": group["eps"],
    }


def muon_half(
    group: Mapping[str, Any],
    *,
    momentum: float,
    nesterov: bool,
    scale_mode: ScaleMode,
    coefficients: str | list[Polynomial],
    steps: int,
    extra_scale_factor: float = 1.0,
    cautious: bool = False,
) -> Settings:
    """Return our settings for Muon; rate and decay are those of ``group``."""
    return {
        "lr": group["lr"],
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": group["weight_decay"],
        "decay_mode": "cautious" if cautious else "full",
        "scale_mode": scale_mode,
        "extra_scale_factor": extra_scale_factor,
        "ns_coefficients": coefficients,
        "ns_steps": steps,
    }
