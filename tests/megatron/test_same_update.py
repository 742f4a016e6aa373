"""Given the gradients that Megatron has reduced, its model is trained as one process trains it, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron import host
from tests.megatron.host import Shape
from tests.megatron.shapes import DELTA_NET, LATENT, MAMBA, MOE, MTP, ONE_LAYER, SEQUENCE
from tests.megatron.training import Trained, train

BF16, FP16 = torch.bfloat16, torch.float16
# Replicated over the tensor-parallel ranks, each of which normalises heads of its own, and 0.16.1 adds up no gradients
# of it unless sequence parallelism is on: its copies drift apart, whatever the optimizer.
UNREDUCED = "self_attention.out_norm"

ALSO_FLAT = (
    *("DP 2", "TP 2", "PP 2 × DP 2, tied", "multi-token prediction, TP 2 × DP 2", "EP 2 × DP 4"),
    *("EP 2 × TP 2 × DP 2, sequence parallel", "Mamba, TP 2 × DP 2", "gated delta net, TP 2 × DP 2"),
)
WHOLE = {
    "DP 2": (2, Shape()),
    "TP 2": (2, Shape(tp=2)),
    "TP 2 × DP 2": (4, Shape(tp=2)),
    "TP 4, sequence parallel": (4, Shape(tp=4, model=SEQUENCE)),
    "TP 2 × DP 2, tied, bf16": (4, Shape(tp=2, tied=True, dtype=BF16)),
    "PP 2 × DP 2, tied": (4, Shape(pp=2, tied=True)),
    "PP 2 × VPP 2": (2, Shape(pp=2, vpp=2, model=(("num_layers", 4),))),
    "PP 2 × TP 2, fp16": (4, Shape(pp=2, tp=2, dtype=FP16)),
    "EP 2 × DP 4": (4, Shape(ep=2, model=MOE + ONE_LAYER)),
    "EP 2 × TP 2 × DP 2, sequence parallel": (4, Shape(tp=2, ep=2, etp=1, model=MOE + SEQUENCE + ONE_LAYER)),
    "EP 2 × ETP 2": (4, Shape(ep=2, etp=2, model=MOE + ONE_LAYER)),
    "EP 2 × ETP 2 × TP 2, sequence parallel": (4, Shape(tp=2, ep=2, etp=2, model=MOE + SEQUENCE + ONE_LAYER)),
    "multi-token prediction, TP 2 × DP 2": (4, Shape(tp=2, model=MTP + ONE_LAYER)),
    "multi-token prediction, PP 2": (2, Shape(pp=2, model=MTP)),
    "PP 2, nothing to train on the first stage": (2, Shape(pp=2, frozen_stage=0)),
    "Mamba, TP 2 × DP 2": (4, Shape(tp=2, model=MAMBA)),
    "MLA, TP 2": (2, Shape(tp=2, model=LATENT + ONE_LAYER)),
    "gated delta net, TP 2 × DP 2": (4, Shape(tp=2, model=DELTA_NET + ONE_LAYER, frozen=UNREDUCED)),
}
FLAT = {
    **{name: (ranks, shape.but(flat=True)) for name, (ranks, shape) in WHOLE.items() if name in ALSO_FLAT},
    "TP 2 × DP 2, small overlapping buckets": (4, Shape(tp=2, flat=True, overlap=True)),
    "TP 2 × DP 2, bf16": (4, Shape(tp=2, flat=True, dtype=BF16)),
    "DP 4, parameters gathered in the next forward pass": (4, Shape(flat=True, overlap=True, late_gather=True)),
    "PP 2 × DP 2, nothing to train on the last stage": (4, Shape(pp=2, flat=True, frozen_stage=1)),
    "PP 2 × DP 2, fp16": (4, Shape(pp=2, flat=True, dtype=FP16)),
}
LATENT_HEADS = {"linear_q_up_proj.weight": ("heads", 4, 0), "linear_kv_up_proj.weight": ("heads", 8, 0)}
# Where every head is a matrix: 4 heads of queries, 2 of keys, 2 of values; of MLA 4 of 12 rows, and 4 of keys and
# values each. Heads are those of the whole weight: a shard of it has fewer.
HEADS = {"linear_qkv.weight": ("heads", 8, 0), "linear_proj.weight": ("heads", 4, 1)}
# Of matrices of Muon and AdamW.
RULES = {"linear_fc2.weight": "normuon", "linear_proj.weight": "adamuon", "output_layer.weight": "muon"}


def with_head_matrices(heads: dict[str, Any]) -> dict[str, Any]:
    return {"overrides": {name: {"algorithm": "muon", "matrices": matrices} for name, matrices in heads.items()}}


# What our optimizer is asked, and how Megatron's wrapper is told to reduce gradients.
ASKED: dict[str, tuple[int, Shape, dict[str, Any]]] = {
    "state in CPU memory": (4, Shape(tp=2, dtype=BF16), {"muon": {"state_device": "cpu"}}),
    "heads, TP 2": (2, Shape(tp=2), with_head_matrices(HEADS)),
    "heads, TP 2 × DP 2, distributed optimizer": (4, Shape(tp=2, flat=True), with_head_matrices(HEADS)),
    "heads, MLA, TP 2": (2, Shape(tp=2, model=LATENT + ONE_LAYER), with_head_matrices(LATENT_HEADS)),
    "rules": (2, Shape(tp=2, model=ONE_LAYER), {"overrides": RULES}),
}
ASKED |= {
    f"{name}, distributed optimizer": (ASKED[name][0], ASKED[name][1].but(flat=True), ASKED[name][2])
    for name in ("state in CPU memory", "rules")
}
REDUCED = [
    (Shape(flat=True), {"pad_buckets_for_high_nccl_busbw": True}),
    (Shape(flat=True, dtype=BF16), {"reduce_scatter_with_fp32_accumulation": True}),
    (Shape(flat=True, dtype=BF16), {"grad_reduce_in_fp32": False}),
    (Shape(dtype=BF16), {"grad_reduce_in_fp32": False}),
    (Shape(), {"check_for_nan_in_grad": True, "check_for_large_grads": True}),
    (Shape(flat=True, overlap=True, late_gather=True), {"align_param_gather": True}),
]
if host.LATER:  # their ``main_grad`` is no view of what is sent, and gets a copy of what has been reduced
    local = {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("all",)}
    REDUCED += [(Shape(flat=flat, dtype=BF16), local) for flat in (False, True)]
ASKED |= {
    f"{', '.join(ddp)} of {shape.dtype}, {'flat' if shape.flat else 'whole'}": (
        2,
        shape.but(model=ONE_LAYER, ddp=tuple(ddp.items())),
        {},
    )
    for shape, ddp in REDUCED
}


def check_ranks(trained: list[Trained]) -> None:
    for of_rank in trained:
        assert of_rank.differing == {}
        assert of_rank.moved > 0.01
        assert of_rank.norms == pytest.approx(of_rank.expected, rel=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_distributed_data_parallel(workers, name: str) -> None:
    ranks, shape = WHOLE[name]
    check_ranks(workers(ranks).run(train, shape))


@pytest.mark.parametrize("name", FLAT)
def test_distributed_optimizer(workers, name: str) -> None:
    ranks, shape = FLAT[name]
    check_ranks(workers(ranks).run(train, shape))


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_beside_it(workers, name: str) -> None:
    ranks, shape, settings = ASKED[name]
    check_ranks(workers(ranks).run(train, shape, **settings))
