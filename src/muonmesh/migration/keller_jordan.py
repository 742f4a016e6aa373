"""KellerJordan's Muon and MuonWithAuxAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.migration.package import Halves, Package, Settings, adamw_half, muon_half


def jordan_half(group: Mapping[str, Any]) -> Settings:
    """Translate a group of matrices; DeepSpeed's are the same."""
    momentum = group["momentum"]
    return muon_half(group, momentum=momentum, nesterov=True, scale_mode="original", coefficients="simple", steps=5)


def _read_keller_jordan(group: Mapping[str, Any]) -> Halves:
    if group["use_muon"]:
        return {"muon": jordan_half({**group, "lr": 0.02 if group["lr"] is None else group["lr"]})}
    return {"adamw": adamw_half({**group, "lr": 3e-4 if group["lr"] is None else group["lr"]})}


PACKAGE = Package(  # KellerJordan/Muon, `muon-optimizer` 0.1.0
    {
        "lr": None,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "use_muon": True,
    },
    _read_keller_jordan,
)
