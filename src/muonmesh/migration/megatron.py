"""Megatron-Core's Muon, which is that of Emerging-Optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.migration.emerging_optimizers import read_emerging
from muonmesh.migration.package import Halves, Package, adamw_half


def _read_megatron(group: Mapping[str, Any]) -> Halves:
    """Read an OptimizerConfig's fields; Megatron-Core builds Emerging-Optimizers' Muon from them, always "quintic"."""
    muon = read_emerging(
        {
            **group,
            "momentum": group["muon_momentum"],
            "nesterov": group["muon_use_nesterov"],
            "coefficient_type": "quintic",
            "num_ns_steps": group["muon_num_ns_steps"],
            "scale_mode": group["muon_scale_mode"],
            "extra_scale_factor": group["muon_extra_scale_factor"],
        }
    )
    betas = (group["adam_beta1"], group["adam_beta2"])
    return {**muon, "adamw": adamw_half({**group, "betas": betas, "eps": group["adam_eps"]})}


PACKAGE = Package(  # Megatron-Core 0.16
    {
        "lr": None,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "muon_momentum": 0.95,
        "muon_use_nesterov": False,
        "muon_num_ns_steps": 5,
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": 1.0,
    },
    _read_megatron,
    {"decoupled_weight_decay": (True,)},
    # q, k and v are matrices of their own with us, and a matrix is whole under tensor parallelism.
    frozenset({"optimizer", "muon_split_qkv", "muon_fp32_matmul_prec", "muon_tp_mode"}),
)
