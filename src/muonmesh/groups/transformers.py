"""The classifier for parameters that modules of `transformers` hold outside layers, by their forward methods."""

from __future__ import annotations

from muonmesh.groups.fused_projections import Matrices, class_names
from muonmesh.groups.sites import Role, Site


def classify(site: Site) -> Role | None:
    """Return the role of a parameter that a module of `transformers` holds outside layers; None if it is unknown."""
    names = class_names(site.module, "transformers")
    if any(name.endswith("MultiModalProjector") for name in names) and site.key == "mm_input_projection_weight":
        return Role("muon", "matrices", "projection, stored in × out", ("transposed", "whole"))
    if "DbrxExpertGLU" in names and len(site.shape) == 2:
        count = site.module.moe_num_experts
        down = site.key == "w2"  # used in × out
        matrices: Matrices = ("transposed", ("heads", count, 1)) if down else ("heads", count, 0)
        return Role("muon", "matrices", "experts, one matrix each" + (", stored in × out" if down else ""), matrices)
    return None
