"""The classifier of parameters that modules of `transformers` hold outside of layers, known from their forwards."""

from __future__ import annotations

from muonmesh.groups.fused_projections import Matrices, class_names
from muonmesh.groups.sites import Role, Site


def classify(site: Site) -> Role | None:
    """Say what the bare parameters of `transformers`' own classes are."""
    names = class_names(site.module, "transformers")
    if any(name.endswith("MultiModalProjector") for name in names) and site.key == "mm_input_projection_weight":
        return Role("muon", "matrices", "projection, stored in × out", ("transposed", "whole"))
    if "DbrxExpertGLU" in names and len(site.shape) == 2:
        count = site.module.moe_num_experts
        down = site.key == "w2"  # used in × out
        matrices: Matrices = ("transposed", ("heads", count, 1)) if down else ("heads", count, 0)
        return Role("muon", "matrices", "experts, one matrix each" + (", stored in × out" if down else ""), matrices)
    return None
