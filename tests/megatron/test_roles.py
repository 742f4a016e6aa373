"""Who steps what, and as which matrices: the same however the model is cut up, and as Megatron's modules compute."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import experts as kinds
from torch import nn

from muonmesh.groups import split_params
from muonmesh.groups.parameter_sites import parameter_sites
from muonmesh.integrations.megatron import get_megatron_optimizer
from muonmesh.integrations.megatron.roles import whole_name
from muonmesh.step.connection import placed_members
from tests.megatron import host
from tests.megatron.host import Shape
from tests.megatron.shapes import (
    DELTA_NET,
    GATED_ATTENTION,
    LATENT,
    MAMBA,
    MOE,
    MTP,
    NOT_GATED,
    ONE_LAYER,
    SEQUENCE,
)

Roles = dict[str, tuple[str, Any, tuple[int, ...]]]
"""For each parameter its group, its matrices and its whole shape."""

COVERS = ("integrations.megatron.roles.megatron_role",)

HALVES = ("heads", 2, 0)
LAYER = "decoder.layers.0."
AHEAD = "mtp.layers.0."
CONVOLUTION = "mixer.conv1d_" if host.LATER else "mixer.conv1d."
INNER = "mtp_model_layer" if host.LATER else "transformer_layer"


def roles_of_stage(shape: Shape) -> Roles:
    """Of this rank's stage."""
    host.begin(shape)
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), host.chunks_of(shape))
    role_of: Roles = {}
    wholes = {member.name: member.storage.shape for member in placed_members(optimizer.optimizer)}
    for group in optimizer.param_groups:
        for i, name in enumerate(group["param_names"]):
            matrices = group["matrices"][i] if "matrices" in group else None
            role_of[name] = (group["name"].removesuffix("[experts]"), matrices, wholes[name])
    return role_of


def table(pool: Any, shape: Shape) -> Roles:
    """Of all stages."""
    role_of: Roles = {}
    for rank_roles in pool.run(roles_of_stage, shape):
        for name, role in rank_roles.items():
            assert role_of.setdefault(name, role) == role
    return role_of


VECTOR = ("adamw.vectors", None)
BLOCK: dict[str, tuple[str, Any]] = {
    "embedding.word_embeddings.weight": ("adamw.embeddings", None),
    f"{LAYER}input_layernorm.weight": VECTOR,
    f"{LAYER}pre_mlp_layernorm.weight": VECTOR,
    f"{LAYER}self_attention.linear_proj.weight": ("muon", "whole"),
    "decoder.final_layernorm.weight": VECTOR,
    "output_layer.weight": ("adamw.head", None),
}
QKV = {f"{LAYER}self_attention.linear_qkv.weight": ("muon", ("interleaved", (16, 8, 8), 0))}
MLP = {f"{LAYER}mlp.linear_fc1.weight": ("muon", HALVES), f"{LAYER}mlp.linear_fc2.weight": ("muon", "whole")}
CASES: dict[str, tuple[Any, dict[str, tuple[str, Any]], list[Shape]]] = {
    "GQA, gated MLP": ((), BLOCK | QKV | MLP, [Shape(), Shape(tp=2)]),
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
        {name: placing for name, placing in BLOCK.items() if "linear_proj" not in name}
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
    "Mamba": (
        (*MAMBA, ("num_layers", 2)),
        {
            "embedding.word_embeddings.weight": ("adamw.embeddings", None),
            f"{LAYER}norm.weight": VECTOR,
            f"{LAYER}mixer.in_proj.weight": ("muon", ("rows", 64, 64, 8, 8, 8)),
            f"{LAYER}mixer.out_proj.weight": ("muon", "whole"),
            f"{LAYER}{CONVOLUTION}weight": ("adamw.matrices", None),
            f"{LAYER}{CONVOLUTION}bias": VECTOR,
            f"{LAYER}mixer.A_log": VECTOR,
            f"{LAYER}mixer.D": VECTOR,
            f"{LAYER}mixer.dt_bias": VECTOR,
            f"{LAYER}mixer.norm.weight": VECTOR,
            "decoder.layers.1.pre_mlp_layernorm.weight": VECTOR,
            "decoder.layers.1.mlp.linear_fc1.weight": ("muon", HALVES),
            "decoder.layers.1.mlp.linear_fc2.weight": ("muon", "whole"),
            "output_layer.weight": ("adamw.head", None),
        },
        [Shape(), Shape(tp=2)],
    ),
    "multi-token prediction": (
        MTP,
        BLOCK
        | QKV
        | MLP
        | {f"{AHEAD}{name}.weight": VECTOR for name in ("enorm", "hnorm", "final_layernorm")}
        | {f"{AHEAD}eh_proj.weight": ("muon", "whole")}
        | {
            name.replace(LAYER, f"{AHEAD}{INNER}."): placing
            for name, placing in (BLOCK | QKV | MLP).items()
            if name.startswith(LAYER)
        },
        [Shape(), Shape(tp=2)],
    ),
    "experts": (
        MOE,
        BLOCK
        | QKV
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
        role_of = table(workers(2), shape.but(model=(*ONE_LAYER, *settings, *shape.model)))
        assert {name: (group, matrices) for name, (group, matrices, _) in role_of.items()} == expected
        assert role_of == (first := first or role_of)


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


# ------------------------------------------------------------------ classes that need CUDA to be made


def without_constructor(kind: type[nn.Module], config: Any, **members: Any) -> nn.Module:
    """A module of a class whose constructor asks for kernels; what it would have made that roles read is given."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.config = config
    for name, value in members.items():
        setattr(module, name, value)
    return module


class Grouped(nn.Module):
    """What TEGroupedLinear leaves: one weight an expert, numbered."""

    def __init__(self, experts: int, rows: int, cols: int) -> None:
        super().__init__()
        self.num_gemms = experts
        for i in range(experts):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(rows, cols)))


def grouped() -> tuple[list[tuple[str, Any]], list[str]]:
    shape = Shape(model=MOE)
    host.begin(shape)
    config = host.config_of(shape)
    experts = without_constructor(
        kinds.TEGroupedMLP, config, linear_fc1=Grouped(2, 48, 32), linear_fc2=Grouped(2, 32, 24)
    )
    groups = split_params(experts)
    sites = list(parameter_sites(experts))
    return list(zip(groups[0]["param_names"], groups[0]["matrices"], strict=True)), [whole_name(s, 3) for s in sites]


def test_experts_of_transformer_engine_have_numbers_and_halves(workers) -> None:
    """Gate and up of each; on the fourth expert-parallel rank with two experts they are the seventh and eighth."""
    for splits, names in workers(2).run(grouped):
        assert splits == [
            ("linear_fc1.weight0", HALVES),
            ("linear_fc1.weight1", HALVES),
            ("linear_fc2.weight0", "whole"),
            ("linear_fc2.weight1", "whole"),
        ]
        assert names == ["linear_fc1.weight6", "linear_fc1.weight7", "linear_fc2.weight6", "linear_fc2.weight7"]


def latent(kind: str) -> dict[str, Any]:
    """What a kind of MLA holds that has no layers without Transformer Engine; sizes are those of `LATENT`."""
    shape = Shape(model=LATENT)
    host.begin(shape)
    sizes = {"linear_qkv_down_proj": (32, 16 + 8 + 4), "linear_kv_down_proj": (32, 8 + 4), "linear_kv_up_proj": (8, 64)}
    linear = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    module = importlib.import_module(f"megatron.core.transformer.{kind.rpartition('.')[0]}")
    layer = without_constructor(getattr(module, kind.rpartition(".")[2]), host.config_of(shape), **linear)
    groups = split_params(layer)
    return dict(zip(groups[0]["param_names"], groups[0]["matrices"], strict=True))


@pytest.mark.skipif(not host.LATER, reason="megatron-core 0.16 has no such attention")
@pytest.mark.parametrize(
    "kind",
    [
        "multi_latent_attention.FusedMLASelfAttention",
        "experimental_attention_variant.absorbed_mla.AbsorbedMLASelfAttention",
    ],
)
def test_parts_of_later_kinds_of_latent_attention_are_matrices_of_their_own(workers, kind: str) -> None:
    for specs in workers(2).run(latent, kind):
        assert specs == {
            "linear_qkv_down_proj.weight": ("rows", 16, 8, 4),
            "linear_kv_down_proj.weight": ("rows", 8, 4),
            "linear_kv_up_proj.weight": ("interleaved", (8, 8), 0),
        }


def flattened_weights() -> None:
    shape = Shape(model=MOE)
    host.begin(shape)
    weights = {f"weight{i}": nn.Parameter(torch.zeros(32, 96)) for i in (1, 2)}
    split_params(without_constructor(kinds.GroupedMLP, host.config_of(shape), **weights))


@pytest.mark.skipif(host.LATER, reason="megatron-core after 0.16 has no GroupedMLP")
def test_experts_in_one_flat_weight_are_refused_by_split_params(workers) -> None:
    """Their shape, hidden × (experts · ffn), is not how their memory is read: one wrong matrix for all experts."""
    for outcome in workers(2).run_expecting_errors(flattened_weights):
        assert outcome.error is ValueError
        assert "weight1: found all experts of a GroupedMLP in weight1" in outcome.message
        assert "Set moe_grouped_gemm=False" in outcome.message
