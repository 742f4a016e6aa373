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
    "Mamba, TP 2 × DP 2": (4, Shape(tp=2, flat=True, model=MAMBA)),
    "gated delta net, TP 2 × DP 2": (4, Shape(tp=2, flat=True, model=DELTA_NET + ONE_LAYER, frozen=UNREDUCED)),
    "DP 2": (2, Shape(flat=True)),
    "TP 2": (2, Shape(tp=2, flat=True)),
    "TP 2 × DP 2, small overlapping buckets": (4, Shape(tp=2, flat=True, overlap=True)),
    "TP 2 × DP 2, bf16": (4, Shape(tp=2, flat=True, dtype=BF16)),
    "DP 4, parameters gathered in the next forward pass": (4, Shape(flat=True, overlap=True, late_gather=True)),
    "PP 2 × DP 2, tied": (4, Shape(pp=2, flat=True, tied=True)),
    "multi-token prediction, TP 2 × DP 2": (4, Shape(tp=2, flat=True, model=MTP + ONE_LAYER)),
    "PP 2 × DP 2, nothing to train on the last stage": (4, Shape(pp=2, flat=True, frozen_stage=1)),
    "PP 2 × DP 2, fp16": (4, Shape(pp=2, flat=True, dtype=FP16)),
    "EP 2 × DP 4": (4, Shape(ep=2, flat=True, model=MOE + ONE_LAYER)),
    "EP 2 × TP 2 × DP 2, sequence parallel": (
        4,
        Shape(tp=2, ep=2, etp=1, flat=True, model=MOE + SEQUENCE + ONE_LAYER),
    ),
}


def check(trained: list[Trained]) -> None:
    for of_rank in trained:
        assert of_rank.differing == {}
        assert of_rank.moved > 0.01
        assert of_rank.norms == pytest.approx(of_rank.expected, rel=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_distributed_data_parallel(workers, name: str) -> None:
    ranks, shape = WHOLE[name]
    check(workers(ranks).run(train, shape))


@pytest.mark.parametrize("name", FLAT)
def test_distributed_optimizer(workers, name: str) -> None:
    ranks, shape = FLAT[name]
    check(workers(ranks).run(train, shape))


@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_state_in_cpu_memory(workers, flat: bool) -> None:
    """Brought to the step and back, bucket by bucket, as on a GPU."""
    check(workers(4).run(train, Shape(tp=2, flat=flat, dtype=BF16), muon={"state_device": "cpu"}))


# Where every head is a matrix: 4 heads of queries, 2 of keys, 2 of values; of MLA 4 of 12 rows, and 4 of keys and
# values each.
HEADS = {"linear_qkv.weight": ("heads", 8, 0), "linear_proj.weight": ("heads", 4, 1)}
LATENT_HEADS = {"linear_q_up_proj.weight": ("heads", 4, 0), "linear_kv_up_proj.weight": ("heads", 8, 0)}


@pytest.mark.skipif(not host.LATER, reason="megatron-core 0.16 has no such setting")
@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_gradients_that_are_added_up_in_fp32_and_sent_in_bf16(workers, flat: bool) -> None:
    """Their ``main_grad`` is no view of what is sent, and gets a copy of what has been reduced."""
    local = (("grad_reduce_in_fp32", False), ("param_name_patterns_for_fp32_local_accumulation", ("all",)))
    check(workers(2).run(train, Shape(flat=flat, dtype=BF16, ddp=local)))


@pytest.mark.parametrize(
    ("ranks", "shape", "heads"),
    [
        (2, Shape(tp=2), HEADS),
        (4, Shape(tp=2, flat=True), HEADS),
        (2, Shape(tp=2, model=LATENT + ONE_LAYER), LATENT_HEADS),
    ],
    ids=["TP 2", "TP 2 × DP 2, distributed optimizer", "MLA, TP 2"],
)
def test_one_matrix_for_each_head(workers, ranks: int, shape: Shape, heads: dict[str, Any]) -> None:
    """Heads are those of the whole weight: a shard of it has fewer."""
    overrides = {name: {"algorithm": "muon", "matrices": matrices} for name, matrices in heads.items()}
    check(workers(ranks).run(train, shape, overrides=overrides))
