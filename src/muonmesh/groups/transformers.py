"""The classifier for parameters of `transformers` whose matrices no forward shows."""

from __future__ import annotations

from typing import Any

from muonmesh.groups.sites import Matrices, Role, Site, class_names


def classify(site: Site) -> Role | None:
    """Return the role of a parameter whose output is cut by lists of indices, or which holds experts in two dims."""
    names = class_names(site.module, "transformers")
    if "DbrxExpertGLU" in names and len(site.shape) == 2:
        count = site.module.moe_num_experts
        down = site.key == "w2"  # used in × out
        matrices: Matrices = ("transposed", ("heads", count, 1)) if down else ("heads", count, 0)
        return Role("muon", "matrices", "experts, one matrix each" + (", stored in × out" if down else ""), matrices)
    owner: Any = site.owners[min(1, len(site.owners) - 1)][1]
    if site.owners[0][0] == "query_key_value" and site.key == "weight" and "FalconAttention" in class_names(owner):
        size, groups = owner.head_dim, owner.num_kv_heads if owner.new_decoder_architecture else 1
        if owner.new_decoder_architecture or owner.multi_query:
            queries = owner.num_heads // groups * size
            rows = ("interleaved", (queries, size, size), 0) if groups > 1 else ("rows", queries, size, size)
            return Role("muon", "matrices", "linear, fused: q, k, v (FalconAttention)", rows)
    return None
