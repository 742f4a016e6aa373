"""Gradients straight to owners: the bits of one process that is given their mean, for the fewest bytes."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import muonmesh as mm
from muonmesh.comm.communicator import AllToAll, Communicator, PendingCollective
from muonmesh.comm.process_groups import host_group
from muonmesh.comm.to_owners import ToOwners, on_replica
from muonmesh.layout import MeshLayout
from muonmesh.tools.forecasts.forecast import Weight, forecast, gradients_to_owners
from tests.device.simulated import SimulatedDevice
from tests.support.on_ranks import on_ranks
from tests.support.samples import one_in
from tests.support.sent import Sent

COVERS = (
    "comm.to_owners.ToOwners",
    "comm.packed_all_to_all.PackedAllToAll",
    "tools.forecasts.forecast.gradients_to_owners",
)

FP32: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "compute_dtype": torch.float32}


class Net(nn.Module):
    """Six matrices, of which the last may be left out; an embedding and norms are AdamW's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, width)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, blocks: int = 3) -> Tensor:
        x = self.embedding(tokens)
        for up, down in list(zip(self.up, self.down, strict=True))[:blocks]:
            x = x + down(torch.relu(up(x)))
        return self.norm(x)


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 24, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(out: Tensor) -> Tensor:
    return out.float().pow(2).mul(torch.arange(out.shape[-1])).mean() + out.float().sin().mean()


def local_gradient(model: Net, step: int, rank: int, blocks: int = 3) -> dict[str, Tensor]:
    """Return one replica's gradients at the weights of a model that is left as it is."""
    twin = Net(model.norm.normalized_shape[0]).to(model.norm.weight.dtype)
    twin.load_state_dict(model.state_dict())
    loss_of(twin(tokens_of(step, rank), blocks)).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def averaged(many: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up in the order of the ranks, in fp32; zero where a rank has none."""
    means = {}
    for name in dict.fromkeys(name for gradients in many for name in gradients):
        gradient = next(gradients[name] for gradients in many if name in gradients)
        total = torch.zeros(gradient.shape, dtype=torch.float32)
        for gradients in many:
            total = total + gradients.get(name, torch.zeros_like(gradient)).float()
        means[name] = total / len(many)
    return means


def alone_on_means(steps: int, settings: dict[str, Any], dtype: torch.dtype, blocks: Any = lambda rank: 3) -> Net:
    """Train in one process that is given the mean of all ranks' gradients."""
    return given_means(
        lambda model, step, rank: local_gradient(model, step, rank, blocks(rank)), steps, settings, dtype
    )


def given_means(
    of: Any, steps: int, settings: dict[str, Any] = FP32, dtype: torch.dtype = torch.float32, anew: int = 0
) -> Net:
    """Train in one process that is given the mean of what ``of`` returns for each rank; ``anew``: when it begins so."""
    model = Net().to(dtype)
    for step in range(steps):
        if step in (0, anew):
            optimizer = mm.from_model(model, process_group="local", gradients=Given(), **settings)
        means = averaged([of(model, step, rank) for rank in range(dist.get_world_size())])
        adamw = {n for g in optimizer.param_groups if g["algorithm"] == "adamw" for n in g["param_names"]}
        for name, parameter in model.named_parameters():
            mean = means.get(name)
            parameter.grad = None
            optimizer.gradients.values[parameter] = (  # type: ignore[attr-defined]
                mean if mean is None or name not in adamw else mean.to(dtype)
            )
        optimizer.step()
    return model


class Given(mm.GradientSource):
    """Gradients in a dtype of their own."""

    def __init__(self) -> None:
        self.values: dict[Tensor, Tensor | None] = {}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.values.get(parameter)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        self.values[parameter] = gradient


def straight_to_owners(net: nn.Module, **settings: Any) -> mm.Muon:
    """An optimizer of several buckets whose gradients go straight to owners."""
    options = {**FP32, "process_group": "world", "memory_budget_mb": 0.064, **settings}
    return mm.from_model(net, gradients="to_owners", **options)


def train_on_tokens(net: nn.Module, optimizer: mm.Muon, steps: Iterable[int], *blocks: int) -> None:
    """Step with this rank's own tokens."""
    for step in steps:
        loss_of(net(tokens_of(step, dist.get_rank()), *blocks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def to_owners_of(optimizer: mm.Muon) -> ToOwners:
    assert isinstance(optimizer.gradients, ToOwners)
    return optimizer.gradients


def differing_weights(model: nn.Module, other: nn.Module) -> list[str]:
    others = dict(other.named_parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(p, others[n])]


def replicas(wrapped: bool, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[list[str], bool, int, int]:
    model = Net().to(dtype)
    net: nn.Module = DistributedDataParallel(model) if wrapped else model
    optimizer = mm.from_model(net, process_group="world", gradients="to_owners", memory_budget_mb=0.064, **settings)
    for step in range(4):
        loss_of(net(tokens_of(step, dist.get_rank()))).backward()
        optimizer.step()
        empty = all(p.grad is None for n, p in model.named_parameters() if "up" in n or "down" in n)
        (optimizer if step % 2 else net).zero_grad()
    momentum = sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s)
    str(optimizer.explain())
    return (
        differing_weights(model, alone_on_means(4, settings, dtype)),
        empty,
        momentum,
        sum(p.numel() for p in net.parameters()),
    )


@pytest.mark.parametrize(
    ("ranks", "wrapped", "dtype"),
    one_in(5, itertools.product((2, 3, 4), (False, True), (torch.float32, torch.bfloat16))),
)
def test_replicas_have_the_bits_of_one_process(workers, ranks: int, wrapped: bool, dtype: torch.dtype) -> None:
    outcomes = workers(ranks).run(replicas, wrapped, dtype, FP32)
    assert all(wrong == [] and empty for wrong, empty, *_ in outcomes)
    assert sum(momentum for *_, momentum, _ in outcomes) == 6 * 16 * 32, "each matrix has its momentum once"
    assert max(momentum for *_, momentum, _ in outcomes) <= 6 * 16 * 32 / ranks * 1.5


class Reduced(mm.GradientSource):
    """A host's own source: matrices lie on the replicas by turns, and each gradient is reduced to its own."""

    def __init__(self) -> None:
        self.numbers: dict[Tensor, int] = {}
        self.names: dict[Tensor, str] = {}
        self.sums: dict[Tensor, Tensor] = {}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.sums.get(parameter)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        parameter.grad = None

    def at_momentum(self, parameter: Tensor) -> bool:
        return parameter in self.numbers

    def momentum_storages(self, matrices: Any) -> Any:
        self.numbers = {tensor: number % storage.copies for number, (_, tensor, storage) in enumerate(matrices)}
        return [on_replica(storage, self.numbers[tensor]) for _, tensor, storage in matrices]

    def bind(self, replicated: Any, group: Any, bucket_bytes: int) -> None:
        self.names = dict(replicated)

    def complete(self, step: int) -> None:
        for tensor in self.names:
            if tensor.grad is None:
                continue
            parts = [torch.empty_like(tensor.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor.grad)
            total, owner = sum(parts[1:], parts[0].float()) / len(parts), self.numbers.get(tensor)
            if owner is not None:
                total = total.flatten() if owner == dist.get_rank() else total.new_empty(0)
            self.sums[tensor], tensor.grad = total, None


@on_ranks(2)
def test_a_source_of_a_host_can_reduce_to_where_it_wants_the_momentum() -> None:
    model = Net()
    optimizer = mm.from_model(model, process_group="world", gradients=Reduced(), **FP32)
    train_on_tokens(model, optimizer, range(3))
    assert sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s) == 3 * 16 * 32
    assert differing_weights(model, alone_on_means(3, FP32, torch.float32)) == []


def traffic(width: int, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[float, float, float, float]:
    """Bytes that this rank sends in backward and step, what counts and explain() tell, and what AdamW's travel for."""
    model = Net(width).to(dtype)
    optimizer = mm.from_model(model, process_group="world", gradients="to_owners", memory_budget_mb=0.32, **settings)
    for step in range(2):
        loss_of(model(tokens_of(step, dist.get_rank()))).backward()
        optimizer.step()
        before = replace(to_owners_of(optimizer).counts)
        optimizer.zero_grad()
        with Sent(dist.get_world_size()) as sent:
            loss_of(model(tokens_of(step, dist.get_rank()))).backward()
            optimizer.step()
        optimizer.zero_grad()
    after, explanation = to_owners_of(optimizer).counts, optimizer.explain()
    source, planned = to_owners_of(optimizer), optimizer._runtime.connected
    assert planned is not None
    copies = {"copy": dist.get_rank(), "copies": dist.get_world_size()}
    gradients = gradients_to_owners(source.owners, len(source._buckets), planned.replicated, **copies)
    assert gradients.bytes_sent == pytest.approx(after.bytes_sent - before.bytes_sent, rel=0.01)
    assert gradients.bytes_received == pytest.approx(after.bytes_received - before.bytes_received, rel=0.01)
    assert gradients.collectives == after.collectives - before.collectives
    every = tuple(range(dist.get_world_size()))
    weights = [
        Weight(name, MeshLayout.replicated(tuple(p.shape), every), "whole" if group["algorithm"] == "muon" else None)
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    ]
    forecasted = forecast(weights, rank=dist.get_rank(), to_owners=True)
    assert forecasted.gradients.bytes_sent == pytest.approx(after.bytes_sent - before.bytes_sent, rel=0.01)
    assert forecasted.stored["momentum"] == 4 * sum(
        s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s
    )
    counted = after.bytes_sent - before.bytes_sent + optimizer.counts.bytes_sent
    others = sum(p.numel() for n, p in model.named_parameters() if "up" not in n and "down" not in n)
    explained = explanation.bytes_sent + gradients.bytes_sent
    return sent.bytes, counted, explained, 2 * others * torch.finfo(dtype).bits // 8


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_gradients_and_results_travel_once(workers, ranks: int) -> None:
    outcomes = workers(ranks).run(traffic, 64, torch.float32, FP32)
    unit = (ranks - 1) / ranks
    matrices = 4 * 6 * 64 * 128
    mean = sum(issued - unit * others for issued, *_, others in outcomes) / ranks
    assert 1.99 <= mean / (unit * matrices) <= 2.04, "a gradient and a result: two units, all-reduce would be three"
    assert all(0 <= issued - counted < 3000 for issued, counted, *_ in outcomes), "flags alone are not counted"
    assert all(explained == pytest.approx(counted, rel=0.01) for _, counted, explained, _ in outcomes)


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "DDP"])
@pytest.mark.parametrize("kind", ["some", "all", "none at all"])
@on_ranks(3)
def test_parameters_that_ranks_do_not_use(kind: str, wrapped: bool) -> None:
    """Leave the last matrices out on some ranks, or on all of them."""
    skipping = {"some": lambda rank: 2 if rank == 0 else 3, "all": lambda rank: 2, "none at all": lambda rank: 3}[kind]
    model = Net()
    net = DistributedDataParallel(model, find_unused_parameters=True) if wrapped else model
    train_on_tokens(net, straight_to_owners(net), range(3), skipping(dist.get_rank()))
    assert differing_weights(model, alone_on_means(3, FP32, torch.float32, skipping)) == []


@on_ranks(3)
def test_a_rank_without_any_gradient_counts_as_zero() -> None:
    model = Net()
    optimizer = straight_to_owners(model)
    rank = dist.get_rank()
    for step in range(3):
        if step != 1 or rank == 0:  # in the second step rank 0 alone has run backward
            loss_of(model(tokens_of(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
        digest = torch.stack([p.detach().double().sum() for p in model.parameters()])
        low, high = digest.clone(), digest.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        assert torch.equal(low, high)
        assert digest.isfinite().all()


def accumulated(kind: str) -> tuple[float, int, list[bool]]:
    """Return how far sums of three micro-batches are from their mean in fp64, the bytes, and whether .grad is None."""
    model = Net()
    optimizer = straight_to_owners(model)
    rank, source = dist.get_rank(), to_owners_of(optimizer)
    loss_of(model(tokens_of(9, rank))).backward()
    optimizer.step()
    if kind == "dropped":
        optimizer.zero_grad()
        loss_of(model(tokens_of(8, rank))).backward()
    optimizer.zero_grad()
    before, worst = source.counts.bytes_sent, 0.0
    micro_batches = [[local_gradient(model, step, r) for r in range(dist.get_world_size())] for step in range(3)]
    for step in range(3):
        if kind == "no_sync" and step < 2:
            with source.no_sync():
                loss_of(model(tokens_of(step, rank))).backward()
        else:
            loss_of(model(tokens_of(step, rank))).backward()
        if kind == "measured":  # a clip between two backward passes
            optimizer.clip_grad_norm_(float("inf"))
    optimizer.clip_grad_norm_(float("inf"))
    sent = source.counts.bytes_sent - before
    for name, parameter in model.named_parameters():
        want = (
            sum(gradients[name].double() for per_rank in micro_batches for gradients in per_rank)
            / dist.get_world_size()
        )
        gradient = source.gradient(parameter)
        if gradient is not None and gradient.numel():
            worst = max(worst, float((gradient.view(want.shape) - want).abs().max() / want.abs().max()))
    return worst, sent, [p.grad is None for n, p in model.named_parameters() if "up" in n or "down" in n]


@pytest.mark.parametrize("kind", ["no_sync", "every backward", "measured", "dropped"])
def test_several_backward_passes_add_up(workers, kind: str) -> None:
    outcomes = workers(3).run(accumulated, kind)
    assert all(worst < 1e-5 and all(empty) for worst, _, empty in outcomes)
    once = 2 * 4 * 6 * 16 * 32  # of all three ranks: each sends two thirds of its matrices
    adamw = 3 * 4 * (24 * 16 + 2 * 16) * 4 // 3
    expected = {"no_sync": 1, "every backward": 2, "dropped": 2, "measured": 3}[kind]
    assert sum(sent for _, sent, _ in outcomes) == expected * once + (3 if kind == "measured" else 1) * adamw


@on_ranks(2)
def test_gradients_that_some_ranks_drop_are_refused_on_all() -> None:
    """Rank 0 alone drops gradients; then all of them do, and go on as if they had never been."""
    models = []
    for wrong in (True, False):
        model = Net()
        optimizer = straight_to_owners(model)
        for step in range(3):
            loss_of(model(tokens_of(step, dist.get_rank()))).backward()
            if wrong and step == 1:
                if dist.get_rank() == 0:
                    optimizer.zero_grad()
                    loss_of(model(tokens_of(step, dist.get_rank()))).backward()
                with pytest.raises(mm.PlanError, match="Call zero_grad\\(\\) on all"):
                    optimizer.step()
                optimizer.zero_grad()
                loss_of(model(tokens_of(step, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert differing_weights(*models) == []


def crossing() -> list[str]:
    """Two models under one loss; each rank runs their backward passes in another order."""
    runs = []
    for crossed in (True, False):
        models = [Net(), Net(8)]
        optimizers = [straight_to_owners(model) for model in models]
        for step in range(2):
            for model in models if crossed and dist.get_rank() else reversed(models):
                loss_of(model(tokens_of(step, dist.get_rank()))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        runs.append(models)
    return [name for first, other in zip(*runs, strict=True) for name in differing_weights(first, other)]


def order_of_collectives(connections: str) -> list[tuple[str, str]]:
    """The process group and the name of every transfer of this rank, in order, while models cross as in `crossing`."""
    begun = list[tuple[str, str]]()
    honest = Communicator.start

    def all_to_all(communicator: Communicator, moved: AllToAll) -> PendingCollective:
        begun.append((communicator.group.group_name, moved.name))
        return honest(communicator, moved)

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    Communicator.start = all_to_all  # type: ignore[method-assign]
    try:
        assert crossing() == []
    finally:
        Communicator.start = honest  # type: ignore[method-assign]
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    return begun


def test_with_one_queue_all_ranks_begin_collectives_in_one_order(workers) -> None:
    """A kernel of NCCL waits for other ranks, and the kernels of all groups stand in the one queue behind it.

    Nor do two optimizers meet each other's gradients.
    """
    first, second = workers(2).run(order_of_collectives, "1")
    assert first == second
    assert len({group for group, _ in first}) > 2
    first, second = workers(2).run(order_of_collectives, "8")
    assert first != second
    assert sorted(first) == sorted(second)


def hsdp() -> tuple[list[str], int]:
    """FSDP2 cuts along one axis of a mesh and averages there; replicas along the other add up at owners."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for layer in (*model.up, *model.down):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = mm.from_model(model, process_group=group, gradients="to_owners", memory_budget_mb=0.064, **FP32)
    twin = Net()
    expected = mm.from_model(twin, process_group="local", gradients=Given(), **FP32)
    for step in range(3):
        loss_of(model(tokens_of(step, dist.get_rank()))).backward()
        optimizer.step()
        gradients = [local_gradient(twin, step, rank) for rank in range(4)]
        shards = [averaged(gradients[:2]), averaged(gradients[2:])]  # as FSDP2 averages two ranks, then the replicas
        means = averaged(shards)
        for name, parameter in twin.named_parameters():
            expected.gradients.values[parameter] = means.get(name)  # type: ignore[attr-defined]
        expected.step()
        optimizer.zero_grad()
    momentum = sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s)
    whole = {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return [n for n, p in twin.named_parameters() if not torch.equal(p, whole[n])], momentum


def test_hsdp_has_the_bits_of_one_process(workers) -> None:
    outcomes = workers(4).run(hsdp)
    assert all(wrong == [] for wrong, _ in outcomes)
    assert sum(momentum for _, momentum in outcomes) == 6 * 16 * 32


@on_ranks(3)
def test_norms_count_once() -> None:
    """Norms over the true ones: of Muon's gradients, of all, as metrics tell it, and as a running mean keeps it."""
    model, rank = Net(), dist.get_rank()
    optimizer = straight_to_owners(model)
    means = averaged([local_gradient(model, 0, r) for r in range(dist.get_world_size())])
    true = torch.cat([g.flatten().double() for n, g in means.items() if "up" in n or "down" in n])
    all_gradients = torch.cat([gradient.flatten().double() for gradient in means.values()])
    loss_of(model(tokens_of(0, rank))).backward()
    norms = optimizer.clip_grad_norm_(float("inf"), skip_above="4x")
    optimizer.step()
    rms = optimizer.metrics()[f"{optimizer.param_groups[0]['name']}/gradient_rms"]
    optimizer.finish()
    mean = optimizer.param_groups[0]["norm_means"][0][0] / float(all_gradients.norm())
    total, muon = (float(norm) / float(all_of.norm()) for norm, all_of in ((norms, all_gradients), (norms.muon, true)))
    assert [muon, total, rms / float(true.pow(2).mean().sqrt()), mean] == pytest.approx([1.0] * 4, rel=1e-5)


def clip_to_owners(kind: str) -> tuple[float, bool, float]:
    """Two steps clipped by ``kind``: the largest difference from clipping means, whether ranks agree, and the norm."""
    model, expected, rank = Net(), Net(), dist.get_rank()
    settings: dict[str, Any] = {**FP32, "memory_budget_mb": 0.064, "process_group": "world"}
    optimizer = mm.from_model(model, gradients="to_owners", **settings)
    other = mm.from_model(expected, **{**settings, "process_group": "local"})
    adamw = {n for g in optimizer.param_groups if g["algorithm"] == "adamw" for n in g["param_names"]}
    limit, norm = 1e-3, torch.zeros(())
    for step in range(2):
        per_rank = [local_gradient(expected, step, r) for r in range(dist.get_world_size())]
        if kind == "torch's":  # each rank its own gradients; from the second step on those of matrices have left
            for gradients in per_rank:
                present = [gradient for name, gradient in gradients.items() if not step or name in adamw]
                factor = limit / (torch.stack([gradient.norm() for gradient in present]).norm() + 1e-6)
                for gradient in present:
                    gradient.mul_(factor.clamp(max=1.0))
        means = averaged(per_rank)
        for name, parameter in expected.named_parameters():
            parameter.grad = means[name]
        if kind != "torch's":
            other.clip_grad_norm_(limit, policy="separate")
        other.step()
        loss_of(model(tokens_of(step, rank))).backward()
        if kind == "torch's":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        else:
            optimizer.clip_grad_norm_(limit, policy="separate")
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    digest = torch.stack([p.detach().double().sum() for p in model.parameters()])
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    alike = all(torch.equal(row, digest) for row in digests)
    return max(float((a - b).abs().max()) for a, b in pairs), alike, float(norm)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_clipping_means_and_what_torchs_does(workers, kind: str) -> None:
    outcomes = workers(2).run(clip_to_owners, kind)
    assert all(difference < 2e-6 and alike for difference, alike, _ in outcomes)
    if kind == "torch's":
        assert len({norm for *_, norm in outcomes}) == 2, "each rank has its own norm"


@on_ranks(2)
def test_a_scaler_is_refused() -> None:
    model = Net()
    optimizer = straight_to_owners(model)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model(tokens_of(0, dist.get_rank())))).backward()
    with pytest.raises(mm.LayoutError, match="Train in bf16 without a GradScaler"):
        scaler.step(optimizer, scaler=scaler)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def from_grad(device: str, simulated: SimulatedDevice | None = None) -> tuple[list[Tensor], dict[str, int]]:
    """Step three times with gradients that lie in ``.grad``; return the weights, and where the host waited."""
    drawn = torch.Generator().manual_seed(dist.get_rank())
    weights = {f"w{n}": nn.Parameter(torch.linspace(-1, 1, 16 * (8 + n)).view(16, -1).to(device)) for n in range(4)}
    bias = nn.Parameter(torch.ones(7).to(device))
    parameters = [*weights.values(), bias]
    gradients = [[torch.randn(p.shape, generator=drawn).to(device) for p in parameters] for _ in range(3)]
    groups = [
        {"name": "muon", "params": list(weights.items())},
        {"name": "adamw", "algorithm": "adamw", "params": [("bias", bias)]},
    ]
    settings: dict[str, Any] = {**FP32, "kernels": "torch", "memory_budget_mb": 0.016}
    optimizer = mm.Muon(groups, process_group="world", gradients="to_owners", **settings)
    for step in range(3):
        if simulated is not None and step:
            simulated.waits.clear()
        for parameter, gradient in zip(parameters, gradients[step], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
    waits = {} if simulated is None else dict(simulated.waits)
    return [p.detach().cpu().clone() for p in parameters], waits


@on_ranks(2)
def test_the_host_waits_for_no_device() -> None:
    expected, _ = from_grad("cpu")
    with SimulatedDevice(seed=1) as simulated:  # raises if there are races
        weights, waits = from_grad("cuda:0", simulated)
    for weight, expected_weight in zip(weights, expected, strict=True):
        assert (weight - expected_weight).abs().max() < 1e-6, "Frobenius norms of a device are added up otherwise"
    assert waits == {}


@on_ranks(2)
def test_ranks_talk_over_hosts_also_where_their_group_has_devices_alone() -> None:
    """For as long as the ranks' own group waits, and not for torch's half an hour."""
    world, devices = dist.group.WORLD, dist.new_group(backend="cuda:gloo")
    assert world is not None
    other, number = host_group(devices), torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(number, group=other)
    waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in (world, other)]
    assert host_group(world) is world
    assert other is not devices
    assert (float(number), waits) == (3.0, [300.0, 300.0])


@pytest.mark.parametrize("settings", [{"state_dtype": "int8"}, {"rule": "normuon"}, {"rule": "adamuon"}], ids=str)
def test_other_rules_and_state_have_the_bits_of_one_process(workers, settings: dict[str, Any]) -> None:
    assert all(wrong == [] for wrong, *_ in workers(2).run(replicas, False, torch.float32, {**FP32, **settings}))


@on_ranks(2)
def test_a_static_graph_is_refused() -> None:
    net = DistributedDataParallel(Net(), static_graph=True)
    with pytest.raises(ValueError, match="Leave out static_graph"):
        mm.from_model(net, gradients="to_owners", **FP32)


@pytest.mark.parametrize("group", ["world", "auto"])
@on_ranks(2)
def test_a_wrapper_that_comes_after_the_optimizer_averages_no_more(group: str) -> None:
    """As Accelerate, Trainer and Lightning wrap: DDP would average what hooks have sent, and it would count twice."""
    model = Net()
    optimizer = straight_to_owners(model, process_group=group)
    net = DistributedDataParallel(model)
    train_on_tokens(net, optimizer, range(4))
    assert not net.require_backward_grad_sync
    assert differing_weights(model, alone_on_means(4, FP32, torch.float32)) == []
    del optimizer
    assert net.require_backward_grad_sync


@on_ranks(2)
def test_a_wrapper_that_averages_for_another_optimizer_too_is_refused_on_all() -> None:
    model = nn.ModuleDict({"net": Net(), "other": nn.Linear(4, 4)})
    net = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = straight_to_owners(model["net"])
    loss_of(model["net"](tokens_of(0, dist.get_rank()))).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(mm.LayoutError, match=r"^other\.weight: .* another optimizer trains. Leave out gradients="):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert net.require_backward_grad_sync


@on_ranks(2)
def test_replicas_that_fsdp2_averages_are_refused_on_all() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = mm.from_model(model, gradients="to_owners", **FP32)
    loss_of(model(tokens_of(0, dist.get_rank()))).backward()
    before = [p.detach().to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]
    with pytest.raises(mm.LayoutError, match="FSDP2 averages gradients over the replicas of its mesh"):
        optimizer.step()
    after = [p.detach().to_local() for p in model.parameters() if isinstance(p, DTensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_ranks(2)
def test_partial_gradients_are_refused_on_all() -> None:
    """Rank 1 has a gradient that is partial over an axis of a mesh, though of one rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "tensor"))
    weight = nn.Parameter(DTensor.from_local(torch.ones(8, 12), mesh["tensor"], [Replicate()]))
    settings: dict[str, Any] = {**FP32, "process_group": mesh["replicate"].get_group()}
    optimizer = mm.Muon([("weight", weight)], gradients="to_owners", **settings)
    placed = Partial() if dist.get_rank() else Replicate()
    weight.grad = DTensor.from_local(torch.ones(8, 12), mesh["tensor"], [placed])
    with pytest.raises((mm.LayoutError, mm.PlanError), match="gradient that is partial") as raised:
        optimizer.step()
    assert torch.equal(weight.detach().to_local(), torch.ones(8, 12))
    assert type(raised.value) is (mm.LayoutError if dist.get_rank() else mm.PlanError)


def saved_on_three(folder: str) -> list[str]:
    model = Net()
    optimizer = straight_to_owners(model)
    train_on_tokens(model, optimizer, range(2))
    mm.checkpoint.save(folder, model, optimizer)
    return differing_weights(model, alone_on_means(2, FP32, torch.float32))


def loaded_on_two(folder: str) -> tuple[list[str], list[str]]:
    """Go on on two ranks with and without the mode, and alone with the same means, all from one checkpoint."""
    rank, settings = dist.get_rank(), {**FP32, "memory_budget_mb": 0.064}
    with_it, without, single = Net(), Net(), Net()
    optimizers = [
        mm.from_model(with_it, process_group="world", gradients="to_owners", **settings),
        mm.from_model(without, process_group="world", gradients=Given(), **settings),
        mm.from_model(single, process_group="local", gradients=Given(), **settings),
    ]
    for model, optimizer in zip((with_it, without, single), optimizers, strict=True):
        mm.checkpoint.load(folder, model, optimizer)
    for step in range(2, 4):
        means = averaged([local_gradient(single, step, r) for r in range(2)])
        loss_of(with_it(tokens_of(step, rank))).backward()
        for model, optimizer in zip((without, single), optimizers[1:], strict=True):
            for name, parameter in model.named_parameters():
                optimizer.gradients.write(parameter, means[name])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differing_weights(with_it, single), differing_weights(without, single)


def test_a_checkpoint_of_three_ranks_goes_on_on_two_with_and_without_it(workers, tmp_path) -> None:
    folder = str(tmp_path / "saved")
    assert workers(3).run(saved_on_three, folder) == [[]] * 3
    assert workers(2).run(loaded_on_two, folder) == [([], [])] * 2


# ------------------------------------------------------------------ optimizers that come, change and go


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_groups_that_come_while_gradients_are_under_way(when: str) -> None:
    """A matrix and a vector come ``when`` a backward pass has not run or has; compared with one process."""
    results = []
    for ranks in ([dist.get_rank()], list(range(dist.get_world_size()))):
        alone, model = len(ranks) > 1, Net()
        torch.manual_seed(5)
        linear, scale = nn.Linear(16, 16, bias=False), nn.Parameter(torch.ones(16))
        parameters = {**dict(model.named_parameters()), "late": linear.weight, "scale": scale}
        settings = {**FP32, "process_group": "local" if alone else "world", "memory_budget_mb": 0.064}
        optimizer = mm.from_model(model, gradients=Given() if alone else "to_owners", **settings)
        new: list[Any] = [
            {"name": "late", "algorithm": "muon", "params": [("late", linear.weight)]},
            {"name": "scale", "algorithm": "adamw", "params": [("scale", scale)]},
        ]
        for step in range(4):
            losses = [loss_of(linear(model(tokens_of(step, rank))) * scale) for rank in ranks]
            for group in new if when == "before" and step == 2 else ():
                optimizer.add_param_group(group)
            if alone:
                per_rank = [torch.autograd.grad(loss, [*parameters.values()]) for loss in losses]
                for name, mean in averaged(
                    [dict(zip(parameters, gradients, strict=True)) for gradients in per_rank]
                ).items():
                    optimizer.gradients.write(parameters[name], mean)
            else:
                losses[0].backward()
            for group in new if when == "after" and step == 2 else ():
                optimizer.add_param_group(group)
            optimizer.step()
            optimizer.zero_grad()
            linear.weight.grad = scale.grad = None
        results.append((model, linear.weight, scale))
    (model, weight, vector), (expected, other, another) = results
    assert differing_weights(model, expected) == []
    assert torch.equal(weight, other)
    assert torch.equal(vector, another)


@pytest.mark.parametrize("how", ["gone", "under way", "there"])
@on_ranks(2)
def test_an_optimizer_that_is_gone_takes_no_gradients(how: str) -> None:
    """DDP averages again, hooks are gone, and one that is still there is told of.

    Another optimizer comes after the first step; the first one may have sent gradients that nobody waits for.
    """
    model = Net()
    net = DistributedDataParallel(model)
    optimizer = straight_to_owners(net, process_group=None)
    loss_of(net(tokens_of(0, dist.get_rank()))).backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "under way" and dist.get_rank() == 0:
        loss_of(net(tokens_of(7, dist.get_rank()))).backward()
    if how == "there":
        first, optimizer = optimizer, straight_to_owners(net, process_group=None)
        if dist.get_rank() == 0:  # one rank keeps it, and all of them hear of that
            del first
        loss_of(net(tokens_of(1, dist.get_rank()))).backward()
        with pytest.raises((mm.LayoutError, mm.PlanError), match="another optimizer with gradients='to_owners'"):
            optimizer.step()
        first = None
    else:
        del optimizer
        assert not model.up[0].weight._post_accumulate_grad_hooks
        assert net.require_backward_grad_sync
        optimizer = straight_to_owners(net, process_group=None)
    optimizer.zero_grad()
    train_on_tokens(net, optimizer, (1, 2))
    assert not net.require_backward_grad_sync
    assert differing_weights(model, given_means(local_gradient, 3, anew=1)) == []


@on_ranks(2)
def test_copies_go_on_with_gradients_of_their_own() -> None:
    model = Net()
    optimizer = straight_to_owners(model)
    pairs = [(model, optimizer)]
    for step in range(3):
        if step == 1:
            pairs += [copy.deepcopy(pairs[0]), pickle.loads(pickle.dumps(pairs[0]))]
        for net, stepped in pairs:
            loss_of(net(tokens_of(step, dist.get_rank()))).backward()
            stepped.step()
            stepped.zero_grad()
    expected = alone_on_means(3, FP32, torch.float32)
    assert [differing_weights(net, expected) for net, _ in pairs] == [[], [], []]


# ------------------------------------------------------------------ other backward passes


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("a backward pass ends halfway")


def blockwise(model: Net, step: int, rank: int, wrap: Any = lambda block, x: block(x), at_one: Any = None) -> Tensor:
    """Each pair of matrices twice, as tied weights are."""
    x = model.embedding(tokens_of(step, rank))
    for number, (up, down) in enumerate(zip([*model.up, *model.up], [*model.down, *model.down], strict=True)):
        x = wrap(lambda x, up=up, down=down: x + down(torch.relu(up(x))), x)
        x = at_one(x) if at_one is not None and number == 1 else x
    return loss_of(model.norm(x))


def twice_used(model: Net, step: int, rank: int) -> dict[str, Tensor]:
    twin = Net()
    twin.load_state_dict(model.state_dict())
    blockwise(twin, step, rank).backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    if step == 1:
        gradients.pop("up.1.weight")  # frozen on all ranks
        if rank == 1:
            del gradients["norm.weight"], gradients["down.0.weight"]  # frozen on one
    return gradients


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["raises", "compiled", "checkpoints", "reentrant checkpoints"])
@on_ranks(3)
def test_backward_passes_that_end_early_are_compiled_or_run_twice(kind: str) -> None:
    """With weights that are used twice, and that are frozen for a step on all ranks or on one."""
    model, rank = Net(), dist.get_rank()
    optimizer = mm.from_model(model, process_group="world", gradients="to_owners", memory_budget_mb=0.004, **FP32)
    compiled = torch.compile(lambda *arguments: blockwise(model, *arguments), backend="eager")
    for step in range(3):
        model.up[1].weight.requires_grad_(step != 1)
        for weight in (model.norm.weight, model.down[0].weight):
            weight.requires_grad_(step != 1 or rank != 1)
        if kind == "raises" and step:
            with pytest.raises(RuntimeError, match="halfway") if rank == 1 else nullcontext():
                blockwise(model, step, rank, at_one=Raises.apply if rank == 1 else None).backward()
            optimizer.zero_grad()
        if kind == "compiled":
            compiled(step, rank).backward()
        elif kind.startswith("checkpoints"):
            again = partial(checkpoint, use_reentrant="reentrant" in kind)  # its hooks are called twice a pass
            blockwise(model, step, rank, again).backward()
        else:
            blockwise(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = given_means(twice_used, 3)
    limit = 2e-6 if "reentrant" in kind else 0.0  # two passes add their summands up in two sums
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert (parameter - other).abs().max() <= limit
