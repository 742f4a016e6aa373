"""`muonmesh.audit` on ranks: shards, replicas, and ranks that have other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import muonmesh as mm
from tests.support.audited import MATRICES, Net, backward, torchs, verdicts
from tests.support.workers import Pool

COVERS = ("tools.local_part.local_part",)


class LocalMuon(Optimizer):
    """What many do: orthogonalizes what this rank has of a matrix, and what is no matrix goes down its gradient."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, apart: float = 0.0, fill: bool = False, rows: bool = False
    ) -> None:
        self.apart, self.fill, self.rows = apart, fill, rows
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local, gradient = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
                if parameter.ndim == 2 and gradient.numel():
                    gradient = nn.functional.normalize(gradient) if self.rows else gradient
                    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
                    gradient = u @ v if self.fill else (u * (s > 1e-6 * s[0])) @ v
                local.sub_(group["lr"] * (1 + self.apart * dist.get_rank()) * gradient)


def sharded(kind: str) -> nn.Module:
    model = Net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return fully_shard(model)  # type: ignore[return-value]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])  # type: ignore[return-value]


def stored_weights(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """What this rank has of the weights and of their state."""
    states = [entry for state in optimizer.state.values() for entry in state.values() if isinstance(entry, Tensor)]
    return [t.to_local() if isinstance(t, DTensor) else t for t in (*(p.detach() for p in model.parameters()), *states)]


def audited(kind: str) -> dict[str, dict[str, str]]:
    """What is said of three optimizers; and that all ranks say the same, and nothing has changed."""
    model = sharded(kind)
    optimizer = mm.from_model(model, lr=1e-3)
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    before = [weight.clone() for weight in stored_weights(model, optimizer)]
    reports = {"ours": mm.audit(optimizer, model), "torch": mm.audit(torchs(getattr(model, "module", model)), model)}
    reports["local"] = mm.audit(LocalMuon(model.parameters()), model)
    assert len(before) > len(gradients)
    assert all(map(torch.equal, before, stored_weights(model, optimizer)))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, {name: str(report) for name, report in reports.items()})
    assert all(text == texts[0] for text in texts)
    assert reports["ours"].ok, reports["ours"]
    for row in reports["local"].rows:
        if row.verdict == "each shard alone":
            assert row.matrices == 1, "a shard is one matrix, also of fused weights"
    return {name: verdicts(report) for name, report in reports.items()}


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 2), ("tp", 4)])
def test_shards_and_replicas_are_judged_whole(workers: Callable[[int], Pool], kind: str, ranks: int) -> None:
    by_report = workers(ranks).run(audited, kind)[0]
    assert {by_report["ours"][name] for name in MATRICES} == {"orthogonalized"}
    assert by_report["torch"]["attn.in_proj_weight"] == "as one matrix"
    assert by_report["torch"]["up.weight"] == "orthogonalized"
    alone = "orthogonalized" if kind == "ddp" else "each shard alone"
    assert by_report["local"]["up.weight"] == by_report["local"]["down.weight"] == alone
    assert by_report["local"]["up.bias"] == "follows the gradient"


def exactly() -> list[mm.AuditRow]:
    """What is said of an SVD, whose arbitrary vectors fill the null spaces of the shards; and of one after MuonEq."""
    rows = []
    for balanced in (False, True):
        model = nn.Sequential(nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False))
        fully_shard(model)
        groups = mm.split_params(model, overrides={".*": "muon"})
        report = mm.audit(LocalMuon(model.parameters(), fill=True, rows=balanced), model, groups=groups)
        assert not report.ok
        rows += report.rows
    return rows


def test_shards_that_an_exact_svd_orthogonalizes_are_told(workers: Callable[[int], Pool]) -> None:
    for row in workers(2).run(exactly)[0]:
        assert (row.verdict, row.mend[:34]) == ("each shard alone", "each rank orthogonalizes its shard"), row
        assert row.like > 0.98
        assert 0.6 < row.size < 1.6


def differing() -> set[str]:
    model = DistributedDataParallel(Net())
    return set(verdicts(mm.audit(LocalMuon(model.parameters(), apart=1e-3), model)).values())


def test_replicas_that_end_apart_are_told(workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(differing) == [{"replicas differ"}] * 2


def audited_stages() -> dict[str, str]:
    stage = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(12, 20), "shared": nn.Linear(20, 12)})
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.fill_(0.5)
    groups = mm.split_params(stage, overrides={"weight": "muon"})
    return verdicts(mm.audit(mm.Muon(groups, process_group="local"), stage, groups=groups))


def test_ranks_may_have_other_weights(workers: Callable[[int], Pool]) -> None:
    first, second = workers(2).run(audited_stages)
    assert first == second
    assert {name for name, verdict in first.items() if verdict == "orthogonalized"} == {
        "layer0.weight",
        "layer1.weight",
        "shared.weight",
    }
    assert set(first.values()) == {"orthogonalized", "elementwise"}


def one_on_meta() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Linear(4, 4)
    mm.audit(torch.optim.AdamW(model.parameters()), model)


def test_a_mistake_on_one_rank_is_an_error_on_every_rank(workers: Callable[[int], Pool]) -> None:
    first, second = workers(2).run_expecting_errors(one_on_meta)
    assert "rank 1: " in (first.message or "")
    assert "weight on the meta device" in (first.message or "")
    assert "weight on the meta device" in (second.message or "")
