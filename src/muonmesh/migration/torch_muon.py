"""torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.migration.package import Halves, Package, muon_half
from muonmesh.migration.polynomials import JORDAN, named
from muonmesh.numerics.scale import ScaleMode


def _read_torch(group: Mapping[str, Any]) -> Halves:
    mode: ScaleMode = "match_rms_adamw" if group["adjust_lr_fn"] == "match_rms_adamw" else "original"
    return {
        "muon": muon_half(
            group,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale_mode=mode,
            coefficients=named(group["ns_coefficients"]),
            steps=group["ns_steps"],
        )
    }


PACKAGE = Package(  # torch 2.13
    {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": JORDAN,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    _read_torch,
    {"adjust_lr_fn": (None, "original", "match_rms_adamw")},
    frozenset({"eps"}),  # ours has none: no gradient is too small
)
