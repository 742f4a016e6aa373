"""The Muon of Emerging-Optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonmesh.errors import explain_error
from muonmesh.migration.package import Halves, Package, muon_half
from muonmesh.numerics.scale import ScaleMode


def read_emerging(group: Mapping[str, Any]) -> Halves:
    """Translate a group; Megatron-Core's says the same in other words."""
    modes: dict[str, ScaleMode] = {
        "shape_scaling": "original",
        "spectral": "spectral",
        "unit_rms_norm": "unit_rms_norm",
    }
    if group["scale_mode"] not in modes:
        needed = "one of " + ", ".join(map(repr, modes))
        raise ValueError(explain_error("scale_mode", f"{group['scale_mode']!r}", needed, 'Write "spectral"'))
    return {
        "muon": muon_half(
            group,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale_mode=modes[group["scale_mode"]],
            coefficients=group["coefficient_type"],
            steps=group["num_ns_steps"],
            extra_scale_factor=group["extra_scale_factor"],
        )
    }


PACKAGE = Package(  # Emerging-Optimizers 0.3
    {
        "lr": 3e-4,
        "momentum": 0.95,
        "weight_decay": 0.01,
        "nesterov": False,
        "coefficient_type": "quintic",
        "num_ns_steps": 5,
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
    },
    read_emerging,
    {
        "weight_decay_method": ("decoupled",),
        "coefficient_type": ("simple", "quintic", "polar_express", "cans", "deepseekv4"),
    },
    frozenset({"fp32_matmul_prec", "use_syrk"}),
)
