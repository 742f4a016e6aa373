"""Who steps what, and as which matrices: the same however the model is cut up, and as Megatron's modules compute."""

from __future__ import annotations

from typing import Any

import pytest

from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import host
from tests.megatron.host import Shape
from tests.megatron.shapes import DELTA_NET, GATED_ATTENTION, LATENT, MOE, NOT_GATED, ONE_LAYER, SEQUENCE

Roles = dict[str, tuple[str, Any, tuple[int, ...]]]
"""For each parameter its group, its matrices and its whole shape."""

HALVES = ("heads", 2, 0)
LAYER = "decoder.layers.0."


def roles(shape: Shape) -> Roles:
    """Of this rank's stage."""
    host.begin(shape)
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), host.chunks_of(shape))
    found: Roles = {}
    wholes = {member.name: member.storage.shape for member in optimizer.optimizer.members}
    for group in optimizer.param_groups:
        for i, name in enumerate(group["param_names"]):
            matrices = group["matrices"][i] if "matrices" in group else None
            found[name] = (group["name"].removesuffix("[experts]"), matrices, wholes[name])
    return found


def table(pool: Any, shape: Shape) -> Roles:
    """Of all stages."""
    found: Roles = {}
    for mine in pool.run(roles, shape):
        for name, said in mine.items():
            assert found.setdefault(name, said) == said
    return found


VECTOR = ("adamw.vectors", None)
BLOCK: dict[str, tuple[str, Any]] = {
    "embedding.word_embeddings.weight": ("adamw.embeddings", None),
    f"{LAYER}input_layernorm.weight": VECTOR,
    f"{LAYER}pre_mlp_layernorm.weight": VECTOR,
    f"{LAYER}self_attention.linear_proj.weight": ("muon", "whole"),
    "decoder.final_layernorm.weight": VECTOR,
    "output_layer.weight": ("adamw.head", None),
}
GROUPED = {f"{LAYER}self_attention.linear_qkv.weight": ("muon", ("interleaved", (16, 8, 8), 0))}
MLP = {f"{LAYER}mlp.linear_fc1.weight": ("muon", HALVES), f"{LAYER}mlp.linear_fc2.weight": ("muon", "whole")}
CASES: dict[str, tuple[Any, dict[str, tuple[str, Any]], list[Shape]]] = {
    "GQA, gated MLP": ((), BLOCK | GROUPED | MLP, [Shape(), Shape(tp=2)]),
    "multi-head, plain MLP with biases": (
        (*NOT_GATED, ("num_query_groups", None)),
        BLOCK
        | {
            f"{LAYER}self_attention.linear_qkv.weight": ("muon", ("interleaved", (8, 8, 8), 0)),
            f"{LAYER}self_attention.linear_qkv.bias": VECTOR,
            f"{LAYER}self_attention.linear_proj.bias": VECTOR,
            f"{LAYER}mlp.linear_fc1.weight": ("muon", "whole"),
            f"{LAYER}mlp.linear_fc1.bias": VECTOR,
            f"{LAYER}mlp.linear_fc2.weight": ("muon", "whole"),
            f"{LAYER}mlp.linear_fc2.bias": VECTOR,
        },
        [Shape(), Shape(tp=2)],
    ),
    "gated attention": (
        GATED_ATTENTION,
        BLOCK | MLP | {f"{LAYER}self_attention.linear_qkv.weight": ("muon", ("interleaved", (16, 16, 8, 8), 0))},
        [Shape(), Shape(tp=2)],
    ),
    "MLA": (
        LATENT,
        BLOCK
        | MLP
        | {
            f"{LAYER}self_attention.linear_q_down_proj.weight": ("muon", "whole"),
            f"{LAYER}self_attention.linear_q_up_proj.weight": ("muon", "whole"),
            f"{LAYER}self_attention.linear_kv_down_proj.weight": ("muon", ("rows", 8, 4)),
            f"{LAYER}self_attention.linear_kv_up_proj.weight": ("muon", ("interleaved", (8, 8), 0)),
        },
        [Shape(), Shape(tp=2)],
    ),
    "gated delta net": (
        DELTA_NET,
        {name: said for name, said in BLOCK.items() if "linear_proj" not in name}
        | MLP
        | {
            f"{LAYER}self_attention.in_proj.weight": ("muon", ("rows", 16, 16, 32, 32, 4, 4)),
            f"{LAYER}self_attention.out_proj.weight": ("muon", "whole"),
            f"{LAYER}self_attention.conv1d.weight": ("adamw.matrices", None),
            f"{LAYER}self_attention.A_log": VECTOR,
            f"{LAYER}self_attention.dt_bias": VECTOR,
            f"{LAYER}self_attention.out_norm.weight": VECTOR,
        },
        [Shape(), Shape(tp=2)],
    ),
    "experts": (
        MOE,
        BLOCK
        | GROUPED
        | {f"{LAYER}mlp.router.weight": ("adamw.matrices", None)}
        | {f"{LAYER}mlp.shared_experts.linear_fc1.weight": ("muon", HALVES)}
        | {f"{LAYER}mlp.shared_experts.linear_fc2.weight": ("muon", "whole")}
        | {f"{LAYER}mlp.experts.local_experts.{i}.linear_fc1.weight": ("muon", HALVES) for i in range(4)}
        | {f"{LAYER}mlp.experts.local_experts.{i}.linear_fc2.weight": ("muon", "whole") for i in range(4)},
        [Shape(), Shape(ep=2), Shape(tp=2, ep=2, etp=1, model=SEQUENCE)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_roles_by_megatrons_own_classes(workers, case: str) -> None:
    """Whole shapes are those of one rank: what `sharded_state_dict` says, whatever the attributes are."""
    settings, expected, shapes = CASES[case]
    first: Roles = {}
    for shape in shapes:
        found = table(workers(2), shape.but(model=(*settings, *ONE_LAYER, *shape.model)))
        assert {name: (group, matrices) for name, (group, matrices, _) in found.items()} == expected
        assert found == (first := first or found)


def test_stages_get_what_the_whole_model_gets(workers) -> None:
    """Two pipeline stages, and two chunks on each; layers have the numbers of the whole model."""
    for tied in (False, True):
        shape = Shape(tied=tied, model=(("num_layers", 4),))
        whole = table(workers(2), shape)
        for cut in (shape.but(pp=2), shape.but(pp=2, vpp=2)):
            stages = table(workers(2), cut)
            # The last stage's copy of a tied embedding has a name of its own, and the embedding's role.
            copy = stages.pop("output_layer.weight") if tied else None
            assert stages == whole
            assert copy is None or copy == whole["embedding.word_embeddings.weight"]
