"""QK-clip: the same weights whatever shards them, given the same logits on some rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

import muonmesh as mm
from tests.support import models, problem
from tests.support.meshes import mesh_of

MODULES = [f"model.layers.{layer}.self_attn" for layer in range(2)]


def logits(layer: int, rank: int) -> Tensor:
    """Of eight heads; each rank has seen other data, so the largest of a head is somewhere."""
    return torch.rand(8, generator=torch.Generator().manual_seed(10 * layer + rank)) * 200


def heads_of_rank(largest: Tensor, layout: str) -> Tensor:
    """What this rank computes of these: under tensor parallelism its own heads."""
    ranks = {"tp": 4, "fsdp x tp": 2}.get(layout, 1)
    return largest.chunk(ranks)[dist.get_rank() % ranks]


def clip_in_layout(layout: str) -> list[str]:
    placed, alone = models.hold("llama", layout), models.build("llama")
    world = dist.get_world_size()
    results = []
    for model, group in ((placed.model, placed.process_group), (alone, "local")):
        optimizer = mm.from_model(model, lr=0.01, process_group=group)
        clip = mm.QKClip(model, threshold=100.0, optimizer=optimizer)
        for step in range(2):
            gradients = torch.Generator().manual_seed(step)
            for _, p in sorted(model.named_parameters()):
                p.grad = problem.placed_like(p, torch.randn(p.shape, generator=gradients))
            for layer in range(2):
                if model is alone:  # has seen all
                    every = torch.stack([logits(layer, data_of(layout, rank, world)) for rank in range(world)])
                    clip.record(alone.get_submodule(MODULES[layer]), every.amax(0))
                else:
                    local = heads_of_rank(logits(layer, data_of(layout, dist.get_rank(), world)), layout)
                    clip.record(model.get_submodule(MODULES[layer]), local)
            optimizer.step()
        results.append({name: problem.whole(p) for name, p in model.named_parameters()})
        results[-1] |= {f"{name} noted": largest for name, largest in clip.largest.items()}
    return problem.differing(*results)


def with_nan(bad: float) -> tuple[bool, list[float]]:
    """Rank 1 has seen a logit that is no number; rank 0 one that is too large. Whether a weight changed, and all S."""
    model = models.build("llama")
    clip = mm.QKClip(model, threshold=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    largest = torch.full((8,), bad if dist.get_rank() else 50.0)
    for name in MODULES:
        clip.record(model.get_submodule(name), largest)
    clip.step()
    changed = any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    return changed, clip.largest[MODULES[0]].tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_seen_by_all_ranks(workers, bad: float) -> None:
    assert workers(2).run(with_nan, bad) == [(False, [float("inf")] * 8)] * 2


def data_of(layout: str, rank: int, world: int) -> int:
    """Which data a rank has: those of one tensor-parallel group have the same."""
    return {"tp": 0, "fsdp x tp": rank // 2}.get(layout, rank)


@pytest.mark.parametrize("layout", ["fsdp", "tp", "fsdp x tp", pytest.param("hsdp", marks=pytest.mark.soak)])
def test_weights_are_clipped_bit_for_bit(workers, layout: str) -> None:
    assert workers(4).run(clip_in_layout, layout) == [[]] * 4


def distances_of_logits(layout: str) -> list[float]:
    """How far the logits noted in a real forward pass are from those of one process, relative to the largest."""
    placed, alone = models.hold("llama", layout), models.build("llama")
    largest = []
    for model in (placed.model, alone):
        clip = mm.QKClip(model.train())
        batch = models.tokens(0, 4, 6)
        model(input_ids=batch if model is alone else placed.own_part(batch), use_cache=False)
        if model is placed.model:
            clip.step()
            largest.append(clip.largest)
        else:
            largest.append({name: clip._largest.view(2, 8)[layer] for layer, name in enumerate(MODULES)})
    return [float((largest[0][name] - largest[1][name]).abs().max() / largest[1][name].abs().max()) for name in MODULES]


@pytest.mark.parametrize("layout", ["fsdp", "fsdp x tp"])
def test_the_largest_logit_of_all_ranks_is_noted(workers, layout: str) -> None:
    """Of every rank's data and heads; products of other shapes round otherwise."""
    for distances in workers(4).run(distances_of_logits, layout):
        assert max(distances) < 1e-5


def parts_of_a_sequence() -> tuple[list[float], list[float]]:
    """Each rank has a quarter of the queries and all keys, as under context parallelism; what is noted, and fp64."""
    model = models.build("llama")
    module = model.get_submodule(MODULES[0])
    clip = mm.QKClip(model)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 8, 32, 8, generator=generator) * 4 for _ in range(3))
    part = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    causal = torch.ones(32, 32, dtype=torch.bool).tril()
    with clip.watching(module):
        scaled_dot_product_attention(q[:, :, part], k, v, attn_mask=causal[part])
    clip.step()
    logits = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * 8**-0.5
    return clip.largest[MODULES[0]].tolist(), logits.masked_fill(~causal, -torch.inf).amax((0, 2, 3)).tolist()


def test_ranks_that_hold_parts_of_a_sequence_bound_it_together(workers) -> None:
    results = workers(4).run(parts_of_a_sequence)
    assert all(bounds == results[0][0] for bounds, _ in results)
    for bound, largest in zip(*results[0], strict=True):
        assert largest * (1 - 1e-6) <= bound <= largest + math.log(32)


class FusedAttention(nn.Module):
    """Attention whose one weight makes queries, keys and values, as only a forward shows."""

    num_heads, head_dim = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).mT for part in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v).mT.flatten(-2)


def clipped_once(order: str) -> tuple[list[Tensor], str]:
    """Weights after one step and its clip, where the model is sharded before or after the clip, and an example's error.

    "after" and "alone": the clip has the example. "before": its optimizer has groups that were made with the example.
    """
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 8), FusedAttention(), nn.Linear(8, 3)), (torch.randn(2, 5, 8),)
    groups, attention, message = mm.split_params(model, example=example), model[1], ""
    clip = None if order == "before" else mm.QKClip(model, threshold=1.0, example=example)
    if order != "alone":
        fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
        with pytest.raises(ValueError, match="sharded") as caught:
            mm.QKClip(model, example=example)
        message = str(caught.value)
    optimizer = mm.Muon(groups.held_by(model), process_group="local" if order == "alone" else None)
    if clip is None:
        clip = mm.QKClip(model, threshold=1.0, optimizer=optimizer)
    for p in model.parameters():
        value = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        p.grad = problem.placed_like(p, value)
    clip.record(attention, torch.tensor([4.0, 0.5]))
    optimizer.step()
    if order != "before":
        clip.step()
    return [problem.whole(p) for p in model.parameters()], message


def test_a_clip_with_an_example_is_made_before_the_model_is_sharded(workers) -> None:
    pool = workers(2)
    alone = pool.run(clipped_once, "alone")
    for order in ("after", "before"):
        for (expected, _), (weights, message) in zip(alone, pool.run(clipped_once, order), strict=True):
            assert all(map(torch.equal, weights, expected)), order
            assert message.startswith("QKClip: found example= for a model that is sharded"), message
            assert "Make the QKClip before the model is sharded" in message


class SeparateAttention(nn.Module):
    """Attention of one stage of a pipeline, or of one copy of a model."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, 4
        self.q_proj, self.k_proj = nn.Linear(8, 4 * heads), nn.Linear(8, 4 * heads)


def clipped_on_each_rank(names: list[str], heads: list[int], process_group: str | None) -> tuple[Any, bool, str]:
    """S of each module of this rank, if rank 0 records 40 and others 4; whether weights changed; and an error.

    With a process group, the weights are those of an optimizer that has it.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ModuleDict({names[rank]: SeparateAttention(heads[rank])})
    optimizer = None if process_group is None else mm.from_model(model, lr=0.0, process_group=process_group)
    clip = mm.QKClip(model, threshold=10.0, optimizer=optimizer)
    clip.record(model[names[rank]], torch.full((heads[rank],), 4.0 if rank else 40.0))
    before, message = [p.detach().clone() for p in model.parameters()], ""
    try:
        if optimizer is None:
            clip.step()
        else:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    except ValueError as error:
        message = str(error)
    changed = not all(map(torch.equal, before, model.parameters()))
    return {name: largest.tolist() for name, largest in clip.largest.items()}, changed, message


@pytest.mark.parametrize("heads", [[3, 3], [2, 5]])
def test_stages_of_a_pipeline_keep_their_own_logits(workers, heads: list[int]) -> None:
    """Without process_group= the maximum mixed heads of other layers, or, of other numbers of heads, had no end."""
    results = workers(2).run(clipped_on_each_rank, ["first", "second"], heads, None)
    assert results == [({"first": [40.0] * heads[0]}, True, ""), ({"second": [4.0] * heads[1]}, False, "")]


def test_copies_that_train_alone_keep_their_own_logits(workers) -> None:
    """The logits of another rank's copy shrank the weights of this one."""
    results = workers(2).run(clipped_on_each_rank, ["layer", "layer"], [3, 3], "local")
    assert results == [({"layer": [40.0] * 3}, True, ""), ({"layer": [4.0] * 3}, False, "")]


def test_copies_of_one_model_have_the_largest_logit_of_all(workers) -> None:
    results = workers(2).run(clipped_on_each_rank, ["layer", "layer"], [3, 3], None)
    assert results == [({"layer": [40.0] * 3}, True, "")] * 2


def test_modules_of_one_name_that_differ_are_an_error_on_every_rank(workers) -> None:
    for _, changed, message in workers(2).run(clipped_on_each_rank, ["layer", "layer"], [3, 5], None):
        assert not changed
        assert message.startswith("layer: found 3 heads on rank 0 of the group and 5 heads on rank 1 of the group")
        assert "Pass process_group=" in message


def message_of_flattened_weights() -> tuple[str, bool]:
    """What the clip says, and whether it changed a weight."""
    model = nn.Sequential(SeparateAttention(2))
    clip = mm.QKClip(model, threshold=1.0)
    clip.record(model[0], torch.full((2,), 9.0))
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    before = [p.detach().clone() for p in wrapped.parameters()]
    with pytest.raises(ValueError, match="when the QKClip was made") as caught:
        clip.step()
    return str(caught.value), not all(map(torch.equal, before, wrapped.parameters()))


def test_a_wrapper_that_flattens_weights_is_refused(workers) -> None:
    """FSDP1's pieces of weights are vectors, of which the first elements were scaled as if they were rows."""
    for message, changed in workers(2).run(message_of_flattened_weights):
        assert not changed
        assert "0.q_proj.weight: found shape (" in message
        assert "but (8, 8) when the QKClip was made" in message


def messages_of_tensor_parallelism() -> list[str]:
    """What the clip says of a module that states the heads of this rank, as torch's tutorial does, and of DTensors."""
    model, ranks = nn.Sequential(SeparateAttention(8)), dist.get_world_size()
    attention = model[0]
    del attention.head_dim
    attention.hidden_size, attention.num_heads = 32, 8 // ranks
    mesh = mesh_of((ranks,))
    parallelize_module(attention, mesh, {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel()})
    clip, messages = mm.QKClip(model, threshold=1.0), []
    heads = (8 // ranks, 4)
    q, k = (p(torch.randn(2, 5, 8)).unflatten(-1, heads).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    with pytest.raises(ValueError, match="heads on each of the") as caught, clip.watching(attention):
        scaled_dot_product_attention(q, k, k)
    messages.append(str(caught.value))
    with pytest.raises(ValueError, match="heads on each of the") as caught:
        clip.observe(attention, q, k, scale=1.0)
    messages.append(str(caught.value))
    with pytest.raises(ValueError, match="that are DTensors") as caught:
        clip.observe(attention, DTensor.from_local(q, mesh, [Shard(1)]), k, scale=1.0)
    return [*messages, str(caught.value)]


def test_heads_of_one_rank_are_not_taken_for_those_of_all(workers) -> None:
    """Heads were taken for half as many of twice the rows, so logits of some scaled the rows of others."""
    for first, second, third in workers(2).run(messages_of_tensor_parallelism):
        assert first == second
        assert first.startswith(
            "0: found 4 heads on each of the 2 ranks that share its queries, and of the whole module;"
        )
        assert third.endswith("Write clip.observe(module, query.to_local(), key.to_local(), scale=...)")


class RecordingStage(nn.Module):
    """A stage whose attention is by its name in the whole model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, SeparateAttention(2))
        self.attention = [self.get_submodule(name)]  # in a list, so that it has one name
        self.clips: list[mm.QKClip] = []

    def forward(self, x: Tensor) -> Tensor:
        (attention,) = self.attention
        q, k = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
        self.clips[0].observe(attention, q, k, scale=0.5)
        return scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def noted_in_a_pipeline() -> dict[str, list[float]]:
    """What a stage notes in a real schedule, whose first forward reads memory that torch fills with NaN here."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = RecordingStage(f"layer{rank}")
    model.clips.append(mm.QKClip(model, threshold=1e9))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).square().mean())
    torch.use_deterministic_algorithms(True)
    try:
        if rank:
            schedule.step(target=torch.zeros(4, 5, 8))
        else:
            schedule.step(torch.randn(4, 5, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    model.clips[0].step()
    return {name: largest.tolist() for name, largest in model.clips[0].largest.items()}


def test_the_forward_that_torchs_pipelining_runs_for_shapes_does_not_count(workers) -> None:
    """Later stages run it on memory that nobody has filled, so that weights were scaled by anything."""
    for rank, noted in enumerate(workers(2).run(noted_in_a_pipeline)):
        assert list(noted) == [f"layer{rank}"]
        assert all(math.isfinite(value) and abs(value) < 100 for value in noted[f"layer{rank}"])
