"""dion's Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.errors import explain_error
from muonmesh.migration.memory import Memory
from muonmesh.migration.package import OFF, Halves, Package, adamw_half, muon_half
from muonmesh.migration.polynomials import polar_express_102
from muonmesh.numerics.scale import ScaleMode


def _read_dion(group: Mapping[str, Any]) -> Halves:
    modes: dict[str | None, ScaleMode] = {"spectral_norm": "unit_rms_norm", "rms_norm": "match_rms_adamw", None: "none"}
    if group["adjust_lr"] not in modes:
        needed = "one of " + ", ".join(map(repr, modes))
        raise ValueError(explain_error("adjust_lr", f"{group['adjust_lr']!r}", needed, 'Write "rms_norm"'))
    cautious = bool(group["cautious_wd"])
    muon = muon_half(
        group,
        momentum=group["mu"],
        nesterov=group["nesterov"],
        scale_mode=modes[group["adjust_lr"]],
        coefficients=polar_express_102(5) if group["use_polar_express"] else "quintic",
        steps=5,
        cautious=cautious,
    )
    betas = (group.get("beta1", group["betas"][0]), group.get("beta2", group["betas"][1]))
    adamw = adamw_half({**group, "betas": betas, "eps": group["epsilon"]})
    adamw["decay_mode"] = muon["decay_mode"]
    halves = {"muon": muon, "adamw": adamw}
    return halves if group["algorithm"] is None else {group["algorithm"]: halves[group["algorithm"]]}


PACKAGE = Package(  # microsoft/dion 0.1.0
    {
        "lr": 0.01,
        "mu": 0.95,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "cautious_wd": False,
        "epsilon": 1e-8,
        "nesterov": False,
        "adjust_lr": "spectral_norm",
        "use_polar_express": True,
        "algorithm": None,
    },
    _read_dion,
    {
        "algorithm": (None, "muon", "adamw"),
        "use_gram_newton_schulz": OFF,
        "newton_schulz_func": OFF,
        "split_sizes": OFF,
        "num_heads": OFF,
    },
    frozenset({"distributed_mesh", "flatten", "use_triton", "step", "beta1", "beta2"}),
    memory=Memory("momentum", sums=True, factor="mu", first="momentum", second="variance", count="step_dev"),
)
