"""Megatron's own QK-clip after each step: the distributed optimizer's shards get the bits of whole masters."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.qk_clip import clip_qk
from torch import Tensor

from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.megatron.shapes import LATENT, ONE_LAYER
from tests.support.in_copies import work_in_copies

COVERS = ("integrations.megatron.sharded_master.ShardedMaster",)

CLIP = (("qk_clip", True), ("qk_clip_threshold", 100.0))
LOGITS = (150.0, 99.0, 310.0, 7.0)


def trained_with_clips(shape: Shape, clips: bool, on_host: bool = False) -> dict[str, Tensor]:
    """Weights after some steps; Transformer Engine, which is not here, would have counted the largest logits."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    muon = {"state_device": "cpu"} if on_host else {}
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks, muon=muon)
    if on_host:
        work_in_copies(optimizer.optimizer)
    rank, data = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    for step in range(4):
        optimizer.zero_grad()
        host.backward(shape, chunks, optimizer, step)
        optimizer.step()
        if clips and step < 3:  # the last step rounds the masters as the clips have left them
            for layer in chunks[0].module.module.decoder.layers:
                rank_logits = torch.tensor(LOGITS).chunk(shape.tp)[rank].clone()
                layer.self_attention.core_attention.current_max_attn_logits = rank_logits / (1 + data)
            assert clip_qk(chunks) == max(torch.tensor(LOGITS).chunk(shape.tp)[rank])
    if shape.late_gather:
        chunks[0].start_param_sync(force_sync=True)
    return gathered.gather(gathered.local_values(gathered.named(chunks)))


def flat_beside_whole(shape: Shape, on_host: bool) -> tuple[list[str], list[str]]:
    """Which weights differ between the distributed optimizer and the plain one, and which the clip changes."""
    flat, plain = trained_with_clips(shape.but(flat=True), True, on_host), shape.but(late_gather=False)
    whole, never = trained_with_clips(plain, True), trained_with_clips(plain, False)
    wrong = [name for name in whole if not torch.equal(whole[name], flat[name])]
    return wrong, [name for name in whole if not torch.equal(whole[name], never[name])]


def fails_under_tensor_parallelism() -> None:
    trained_with_clips(Shape(tp=2, dtype=torch.bfloat16, model=CLIP), True)


def test_megatron_clips_other_attention_under_tensor_parallelism_by_the_sizes_of_the_whole(workers) -> None:
    """If this fails, Megatron has mended it, and docs/megatron.md may say that it works."""
    for outcome in workers(2).run_expecting_errors(fails_under_tensor_parallelism):
        assert "must match the size" in outcome.message


def masters_after_a_clip(shape: Shape) -> tuple[int, list[str]]:
    """How many master weights Megatron's clip has scaled, and which of these are not theirs after a tiny step."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks)
    host.backward(shape, chunks, optimizer, 0)
    optimizer.step()
    before = {name: main(parameter).clone() for name, parameter in chunks[0].named_parameters()}
    for layer in chunks[0].module.module.decoder.layers:
        layer.self_attention.core_attention.current_max_attn_logits = torch.tensor(LOGITS)
    clip_qk(chunks)
    clipped = {name: main(parameter).clone() for name, parameter in chunks[0].named_parameters()}
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 1e-12
    optimizer.zero_grad()
    host.backward(shape, chunks, optimizer, 1)
    optimizer.step()
    changed = [name for name, value in clipped.items() if not torch.equal(value, before[name])]
    after = {name: main(parameter) for name, parameter in chunks[0].named_parameters()}
    return len(changed), [name for name in changed if not torch.allclose(after[name], clipped[name], rtol=2.0**-22)]


def main(parameter: Tensor) -> Tensor:
    """The master weight as Megatron finds it, as a plain tensor."""
    return parameter.main_param.as_subclass(Tensor).detach()  # type: ignore[attr-defined]


@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_master_weights_keep_their_precision_through_a_clip(workers, flat: bool) -> None:
    """Megatron scales the master weight, and the weight from its rounded elements: the master weight counts."""
    for count, wrong in workers(2).run(masters_after_a_clip, Shape(dtype=torch.bfloat16, model=CLIP, flat=flat)):
        assert count > 0
        assert wrong == []


@pytest.mark.parametrize(
    ("ranks", "shape", "on_host"),
    [
        (2, Shape(dtype=torch.bfloat16, model=CLIP), True),
        (2, Shape(dtype=torch.float16, model=CLIP, overlap=True, late_gather=True), False),
        (4, Shape(tp=2, dtype=torch.bfloat16, model=(*CLIP, *LATENT, *ONE_LAYER)), False),
    ],
    ids=["DP 2, bf16, state in CPU memory", "DP 2, fp16, gathered in the forward pass", "MLA, TP 2 × DP 2, bf16"],
)
def test_shards_are_clipped_as_whole_masters_are(workers, ranks: int, shape: Shape, on_host: bool) -> None:
    for wrong, clipped in workers(ranks).run(flat_beside_whole, shape, on_host):
        assert wrong == []
        assert any("self_attention.linear_q" in name for name in clipped)
