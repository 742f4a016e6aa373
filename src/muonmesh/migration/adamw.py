"""AdamW: torch's AdamW and Adam, and the Adams of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.errors import explain_error
from muonmesh.migration.package import OFF, SWITCHES, Halves, Package, adamw_half


def _read_adamw(group: Mapping[str, Any]) -> Halves:
    if not group["decoupled_weight_decay"] and group["weight_decay"]:
        found, needed = f"{group['weight_decay']} that is not decoupled", "decoupled decay, AdamW's, or 0"
        raise ValueError(explain_error("weight_decay", found, needed, "Convert an AdamW with the decay that you want"))
    # One learning rate serves both halves when Muon's step has the RMS of AdamW's (Moonlight, arXiv 2502.16982).
    return {"adamw": {**adamw_half(group), "scale_mode": "match_rms_adamw"}}


PACKAGE = Package(
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    _read_adamw,
    {"amsgrad": OFF, "maximize": OFF, "differentiable": OFF},
    # The last is that of DeepSpeed's FusedAdam and DeepSpeedCPUAdam.
    SWITCHES | {"bias_correction"},
)
