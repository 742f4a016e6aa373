"""DeepSpeed's Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.migration.keller_jordan import jordan_half
from muonmesh.migration.package import Halves, Package, adamw_half


def _read_deepspeed(group: Mapping[str, Any]) -> Halves:
    """Read a group of the optimizer, or the configuration, which speaks of both halves."""

    def rate(key: str, default: float) -> Any:
        own = group[key] if group[key] is not None else group["lr"]
        return default if own is None else own

    muon = {"muon": jordan_half({**group, "lr": rate("muon_lr", 0.02)})}
    adamw = {"adamw": adamw_half({**group, "lr": rate("adam_lr", 3e-4)})}
    return {**muon, **adamw} if group["use_muon"] is None else muon if group["use_muon"] else adamw


PACKAGE = Package(  # DeepSpeed 0.19
    {
        "lr": None,
        "muon_lr": None,
        "adam_lr": None,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "use_muon": None,
    },
    _read_deepspeed,
    {"adam_w_mode": (True,)},
    frozenset({"ns_method", "torch_adam", "fp32_optimizer_states", "bias_correction"}),
)
