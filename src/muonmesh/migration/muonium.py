"""muonium's Muon."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

from muonmesh.errors import explain_error
from muonmesh.migration.memory import Memory
from muonmesh.migration.package import OFF, SWITCHES, Halves, Package, adamw_half, muon_half
from muonmesh.migration.polynomials import polar_express_102


def _read_muonium(group: Mapping[str, Any]) -> Halves:
    decay = group["wd"]
    # muonium multiplies the decay by √max(1, rows/cols) as it does the update; its leading dims are a batch.
    shapes = [tuple(parameter.shape) for parameter in group.get("params", ())]
    if group["flatten"]:
        shapes = [(shape[0], prod(shape[1:])) for shape in shapes]
    matrices = {shape[-2:] for shape in shapes if len(shape) > 1}
    factors = sorted({sqrt(max(1.0, rows / cols)) for rows, cols in matrices}) or [1.0]
    polar = group["orthogonalization_strategy"] == "polar_express"
    betas = group.get("betas", group["adam_betas"])
    adamw = adamw_half({**group, "weight_decay": decay, "betas": betas, "eps": group.get("eps", group["adam_eps"])})
    algorithm = group["algorithm"]
    if algorithm == "adamw":
        return {"adamw": adamw}
    if len(factors) > 1 and decay:
        found = f"a weight decay of {decay} that muonium multiplies by factors of the shape, {factors}"
        write = "Convert the matrices of each shape by themselves, as a group of their own"
        raise ValueError(explain_error("group", found, "one decay for the group", write))
    muon = muon_half(
        {**group, "weight_decay": decay * factors[0]},
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        scale_mode="original",
        coefficients=polar_express_102(group["ns_steps"]) if polar else "simple",
        steps=group["ns_steps"],
        cautious=bool(group["use_cautious_wd"]),
    )
    return {"muon": muon} if algorithm == "muon" else {"muon": muon, "adamw": adamw}


PACKAGE = Package(  # muonium 0.2.0
    {
        "lr": 1e-3,
        "wd": 0.1,
        "use_cautious_wd": True,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "orthogonalization_strategy": "polar_express",
        "adam_betas": (0.9, 0.95),
        "adam_eps": 1e-8,
        "algorithm": None,
        "flatten": False,
    },
    _read_muonium,
    {
        "algorithm": (None, "muon", "adamw"),
        "maximize": OFF,
        "amsgrad": OFF,
        "is_adamw": (True,),
        "decoupled_weight_decay": (True,),
        "split_sizes": OFF,
        "differentiable": OFF,
    },
    SWITCHES | {"betas", "eps", "use_muon", "fused_adam", "foreach_adam", "batch_size", "has_complex"},
    memory=Memory(sums=True, beside=frozenset({"step", "lr_ratio"})),
)
