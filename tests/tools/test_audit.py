"""`muonmesh.audit`: what it says of optimizers whose steps are known, also on ranks, and that it leaves no trace."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
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
from muonmesh.layout.matrix import split_matrices
from muonmesh.tools.auditing.judge import of_matrices, polar
from muonmesh.tools.auditing.probe import probing_gradient
from tests.support.audited import MATRICES, BySvd, Net, backward, halves, torchs, verdicts
from tests.support.workers import Pool

COVERS = (
    "tools.auditing.audit.audit",
    "tools.auditing.judge.judge",
    "tools.auditing.probe.probing_gradient",
    "tools.local_part.local_part",
)

# ------------------------------------------------------------------ what it compares with


@pytest.mark.parametrize("shape", [(12, 40), (96, 32), (300, 300), (1, 9)])
def test_polar_factors_are_those_of_an_fp64_svd(shape: tuple[int, int]) -> None:
    gradient = probing_gradient("w", shape, torch.device("cpu"))
    u, values, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
    rank = int((values > 1e-6 * values[0]).sum())
    assert rank == max(1, min(64, shape[0] // 2, shape[1] // 2))
    first, second = polar(gradient)
    assert torch.allclose((first @ second).double(), u[:, :rank] @ vh[:rank], atol=2e-3)
    assert torch.equal(gradient, probing_gradient("w", shape, torch.device("cpu")))
    assert not torch.equal(gradient, probing_gradient("v", shape, torch.device("cpu")))


def test_polar_factors_of_parts_are_put_where_the_parts_are() -> None:
    whole = probing_gradient("w", (24, 16), torch.device("cpu"))
    for spec, parts in ((("rows", 8, 16), (whole[:8], whole[8:])), (("interleaved", 2, 0), (whole[::2], whole[1::2]))):
        updates = torch.stack([whole, torch.zeros_like(whole)])
        factors, _ = of_matrices(split_matrices("w", (24, 16), spec), updates, torch.clone)
        placed = (factors[:8], factors[8:]) if spec[0] == "rows" else (factors[::2], factors[1::2])
        for factor, part in zip(placed, parts, strict=True):
            assert torch.allclose(factor, torch.matmul(*polar(part)), atol=1e-5)


# ------------------------------------------------------------------ what it says


def test_of_muonmesh_there_is_nothing_to_mend() -> None:
    model = Net()
    report = mm.audit(mm.from_model(model, lr=1e-3), model)
    assert report.ok, report
    assert verdicts(report)["attn.in_proj_weight"] == "orthogonalized"
    assert {row.matrices for row in report.rows if row.weight == "attn.in_proj_weight"} == {3}
    assert verdicts(report)["embed.weight"] == verdicts(report)["up.bias"] == "elementwise"
    assert report.scale == "match_rms_adamw"
    assert all(0.9 < row.size < 1.1 for row in report.rows if not math.isnan(row.size))


def test_a_guess_is_told() -> None:
    """A fused weight that is cut elsewhere may be one matrix or three: not even muonmesh knows."""
    layers = [nn.ModuleDict({"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16)}) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    report = mm.audit(mm.from_model(model, lr=1e-3), model)
    assert report.guesses == ("0.qkv.weight", "0.proj.weight", "1.qkv.weight", "1.proj.weight", "2.weight")
    assert (
        "Judged by a guess: *.qkv.weight, *.proj.weight, *.weight. Write muonmesh.audit(optimizer, model, groups="
        in " ".join(str(report).split())
    )
    assert str(report).endswith("Nothing to mend if the guesses are right.")
    overrides = {r"qkv\.weight": {"algorithm": "muon", "matrices": ("rows", 16, 16, 16)}}
    overrides |= {r"proj\.weight": "muon", "2.weight": "adamw"}
    optimizer = mm.from_model(model, lr=1e-3, overrides=overrides)
    for groups in (mm.split_params(model, overrides=overrides), None):  # what muonmesh was told is no guess either
        decided = mm.audit(optimizer, model, groups=groups)
        assert not decided.guesses
        assert str(decided).endswith("Nothing to mend.")
    assert mm.audit(mm.Muon(mm.from_model(model).param_groups), model).guesses == report.guesses


def test_a_group_that_was_edited_is_audited() -> None:
    """Names and parameters were read side by side, and the audit ended with an error of `zip`, not with `Muon`'s."""
    model = Net()
    optimizer = mm.from_model(model, lr=1e-3)
    del optimizer.param_groups[0]["params"][0]
    report = mm.audit(optimizer, model)
    assert {row.verdict for row in report.rows} == {"raises"}
    assert "param_names for" in " ".join(str(report).split())


def test_it_says_the_same_under_autocast() -> None:
    model = Net()
    optimizer = mm.from_model(model, lr=1e-3, compute_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        report = mm.audit(optimizer, model).to_dict()
    assert report == mm.audit(optimizer, model).to_dict()


def test_of_torchs_muon_it_sees_the_fused_matrix_and_the_embedding() -> None:
    model = Net()
    report = mm.audit(torchs(model), model)
    by_name = verdicts(report)
    assert (by_name["attn.in_proj_weight"], by_name["up.weight"]) == ("as one matrix", "orthogonalized")
    assert report.scale == "original"
    assert not report.ok
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    rows = {row.weight: row for row in mm.audit(torch.optim.Muon(matrices), model).rows}
    assert rows["embed.weight"].verdict == "orthogonalized"
    assert "embedding" in rows["embed.weight"].mend
    assert rows["up.bias"].verdict == "not in the optimizer"


def test_what_is_not_orthogonalized_is_told() -> None:
    model = Net()
    for optimizer, verdict in (
        (torch.optim.AdamW(model.parameters()), "elementwise"),
        (torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True), "follows the gradient"),
        ([*torchs(model), torch.optim.AdamW(halves(model)[0])], "twice"),
    ):
        report = mm.audit(optimizer, model)
        assert {verdicts(report)[name] for name in MATRICES} == {verdict}, report
        assert all(row.mend for row in report.rows if row.weight in MATRICES)
    frozen = Net()
    mm_groups = mm.split_params(frozen)
    lost = mm.audit(torch.optim.AdamW(copy.deepcopy(frozen).parameters()), frozen, groups=mm_groups)
    assert set(verdicts(lost).values()) == {"not in the optimizer"}


def test_blocks_and_steps_of_another_size_are_told() -> None:
    model = nn.ModuleDict({name: nn.Linear(24, 24, bias=False) for name in ("a", "b", "c")})
    a, b, c = model.parameters()
    blocks = [BySvd([a]), BySvd([b], blocks=2), BySvd([c], times=2.0)]
    rows = {
        row.weight: row for row in mm.audit(blocks, model, groups=mm.split_params(model, overrides={".*": "muon"})).rows
    }
    assert [row.verdict for row in rows.values()] == ["orthogonalized", "in blocks", "orthogonalized"]
    assert rows["b.weight"].matrices == 2
    assert 1.9 < rows["c.weight"].size < 2.1
    assert "another size than the scale says" in rows["c.weight"].mend
    assert all(row.like > 0.99 for row in rows.values()), rows


@pytest.mark.parametrize("rule", ["normuon", "adamuon", "muoneq", "muon_plus", "hyperball"])
def test_rules_of_muonmesh_are_orthogonalizations(rule: str) -> None:
    model = nn.ModuleDict({"up": nn.Linear(96, 160, bias=False), "down": nn.Linear(160, 96, bias=False)})
    groups = mm.split_params(model, overrides={".*": "muon"})
    for group in groups:
        group["algorithm"] = rule
    report = mm.audit(mm.Muon(groups, lr=1e-3), model, groups=groups)
    assert set(verdicts(report).values()) == {"orthogonalized"}, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_svd_that_fills_null_spaces_hides_nothing(dtype: torch.dtype) -> None:
    model = Net(width=32).to(dtype)
    matrices, others = halves(model)
    report = mm.audit([BySvd(matrices, fill=True), torch.optim.AdamW(others)], model)
    rows = {row.weight: row for row in report.rows if row.weight in MATRICES}
    assert rows.pop("attn.in_proj_weight").verdict == "as one matrix", report
    assert {row.verdict for row in rows.values()} == {"orthogonalized"}, report
    assert all(row.like > 0.98 for row in rows.values()), report
    assert all(math.isfinite(row.size) for row in rows.values()), report


class Scaled(torch.optim.Muon):
    """Multiplies its finished updates, all as a clip by their norm, or every second one."""

    every = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = [parameter.clone() for parameter in self.param_groups[0]["params"]]
        super().step(closure)
        for parameter, old in list(zip(self.param_groups[0]["params"], before, strict=True))[:: self.every]:
            parameter.copy_(old + 0.02 * (parameter - old))


def test_finished_updates_that_are_scaled_are_told() -> None:
    model = nn.ModuleDict({name: nn.Linear(24, size, bias=False) for name, size in (("up", 96), ("mid", 24))})
    groups = mm.split_params(model, overrides={".*": "muon"})
    optimizer = Scaled(model.parameters())
    report = mm.audit(optimizer, model, groups=groups)
    assert report.fit == pytest.approx(0.02, rel=0.3)
    assert "times 0.01" in str(report)
    assert "something scales the update" in str(report)
    optimizer.every = 2
    assert "fit no scale mode that muonmesh knows" in str(mm.audit(optimizer, model, groups=groups))


class Arbitrary(BySvd):
    """Steps by matrices with equal singular values that have nothing to do with the gradient."""

    def update_of(self, gradient: Tensor) -> Tensor:
        return nn.init.orthogonal_(torch.empty_like(gradient))


def test_orthogonal_matrices_that_are_no_polar_factors_are_unknown() -> None:
    model = nn.ModuleDict({"up": nn.Linear(24, 96, bias=False), "down": nn.Linear(96, 24, bias=False)})
    groups = mm.split_params(model, overrides={".*": "muon"})
    report = mm.audit(Arbitrary(model.parameters()), model, groups=groups)
    assert set(verdicts(report).values()) == {"unknown"}
    assert f"does not know the steps of {len(report.rows)} of {len(report.rows)} weights" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_of_the_weights_hides_nothing(dtype: torch.dtype) -> None:
    model = Net(width=32).to(dtype)
    assert verdicts(mm.audit(torchs(model), model))["up.weight"] == "orthogonalized"
    optimizer = (
        mm.from_model(model, lr=1e-6, master_dtype=torch.float32) if dtype.itemsize == 2 else mm.from_model(model)
    )
    assert mm.audit(optimizer, model).ok


def test_matrices_too_large_for_an_svd_are_judged_too() -> None:
    model = nn.Sequential(nn.Linear(1300, 1100, bias=False))
    report = mm.audit(
        torch.optim.Muon(model.parameters()), model, groups=mm.split_params(model, overrides={".*": "muon"})
    )
    assert verdicts(report) == {"0.weight": "orthogonalized"}


def test_convolutions_are_matrices_too() -> None:
    model = nn.ModuleDict(
        {"two": nn.Conv2d(12, 40, 3), "one": nn.Conv1d(12, 20, 5), "up": nn.Linear(48, 20), "head": nn.Linear(20, 9)}
    )
    report = mm.audit(mm.from_model(model), model)
    rows = {row.weight: row for row in report.rows}
    assert {rows[f"{name}.weight"].verdict for name in ("one", "two", "up")} == {"orthogonalized"}, report
    assert all(0.9 < rows[f"{name}.weight"].size < 1.1 for name in ("one", "two", "up"))


# ------------------------------------------------------------------ gradients


def test_gradients_that_never_arrive_and_clipping_that_crushes_are_told() -> None:
    model = Net()
    model.unused = nn.Parameter(torch.ones(8, 8))
    backward(model)
    groups = mm.split_params(model, overrides={"unused": "muon"})
    report = mm.audit(mm.Muon(groups), model, groups=groups)
    assert [row.weight for row in report.rows if row.mend] == ["unused"]
    assert "no gradient arrives" in str(report)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    optimizers = torchs(model)
    matrices = [row for row in mm.audit(optimizers, model).rows if row.weight in MATRICES]
    assert all(row.strength < 0.5 for row in matrices)
    assert "crushed" in matrices[1].mend
    muonmesh_rows = [row for row in mm.audit(mm.Muon(groups), model, groups=groups).rows if row.weight in MATRICES]
    assert all(0.95 < row.strength < 1.05 for row in muonmesh_rows), muonmesh_rows
    exact = float(model.up.weight.grad.double().norm())  # type: ignore[union-attr]
    assert next(row.gradient for row in muonmesh_rows if row.weight == "up.weight") == pytest.approx(exact)


# ------------------------------------------------------------------ no trace

MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "torch": torchs,
    "muonmesh": lambda model: mm.from_model(model, lr=1e-2),
    "int8": lambda model: mm.from_model(model, lr=1e-2, state_dtype="int8"),
    "normuon": lambda model: mm.from_model(model, lr=1e-2, rule="normuon", master_dtype=torch.float64),
}


def trained_and_audited(name: str, *, audited: bool) -> tuple[list[Tensor], list[dict[str, Any]]]:
    model = Net()
    optimizer = MAKERS[name](model)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    schedules = [torch.optim.lr_scheduler.StepLR(member, 2) for member in optimizers]
    for step in range(5):
        for member in optimizers:
            member.zero_grad()
        backward(model)
        if audited and step in (0, 3):
            gradients = [(weight.grad, weight.grad.clone()) for weight in model.parameters() if weight.grad is not None]
            random = torch.get_rng_state()
            mm.audit(optimizer, model)
            assert torch.equal(random, torch.get_rng_state())
            for weight, (gradient, before) in zip(model.parameters(), gradients, strict=True):
                assert weight.grad is gradient
                assert torch.equal(gradient, before)
        for member, schedule in zip(optimizers, schedules, strict=True):
            member.step()
            schedule.step()
    return [weight.detach() for weight in model.parameters()], [member.state_dict() for member in optimizers]


@pytest.mark.parametrize("name", MAKERS)
def test_a_training_that_is_audited_goes_on_bit_for_bit(name: str) -> None:
    weights, states = trained_and_audited(name, audited=True)
    plain_weights, plain_states = trained_and_audited(name, audited=False)
    assert all(torch.equal(weight, plain_weight) for weight, plain_weight in zip(weights, plain_weights, strict=True))
    for state, before in zip(states, plain_states, strict=True):
        assert str(state["param_groups"]) == str(before["param_groups"])
        assert state["state"].keys() == before["state"].keys()
        for key, entry in state["state"].items():
            for field, value in entry.items():
                other = before["state"][key][field]
                assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


# ------------------------------------------------------------------ odd input


class Raising(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].add_(1.0)
        raise RuntimeError("no such kernel\nand more")


def test_an_optimizer_that_raises_is_told_and_leaves_no_trace() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    report = mm.audit(Raising(model.parameters()), model)
    assert report.raised == "RuntimeError: no such kernel"
    assert set(verdicts(report).values()) == {"raises"}
    assert not report.ok
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_closures_sparse_gradients_and_tied_weights() -> None:
    model = Net()
    assert verdicts(mm.audit(torch.optim.LBFGS(model.parameters()), model))["up.weight"] != "raises"
    model.embed.sparse = True
    tied = nn.ModuleDict({"embed": nn.Embedding(24, 16, sparse=True), "up": nn.Linear(16, 24)})
    sparse = torch.optim.SparseAdam(tied["embed"].parameters())
    tied["embed"](torch.arange(24)).sum().backward()
    rows = mm.audit([sparse, torch.optim.Muon([tied["up"].weight])], tied).rows
    assert {row.weight: row.verdict for row in rows}["embed.weight"] == "elementwise"
    tied["up"].weight = tied["embed"].weight
    by_name = verdicts(mm.audit(torch.optim.AdamW(tied.parameters()), tied))
    assert sorted(by_name) == ["embed.weight", "up.bias"]


def test_what_cannot_be_stepped_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="found a weight on the meta device; needed one with numbers"):
        mm.audit(torch.optim.AdamW(model.parameters()), model)
    plain = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="none with requires_grad"):
        mm.audit(torch.optim.AdamW(plain.parameters()), plain)


def test_the_report_has_whole_names_and_fits_json() -> None:
    long = "a_very_long_name_of_a_module_that_goes_on_and_on_and_on_and_on"
    model = nn.ModuleDict({long: Net()})
    report = mm.audit(torchs(model[long]), model)
    assert f"\n{long}.up.weight  " in str(report)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(content["rows"]) == len(report.rows)
    assert content["ok"] is False


# ------------------------------------------------------------------ on ranks


def sharded_net(kind: str) -> nn.Module:
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
    model = sharded_net(kind)
    optimizer = mm.from_model(model, lr=1e-3)
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    before = [weight.clone() for weight in stored_weights(model, optimizer)]
    reports = {"ours": mm.audit(optimizer, model), "torch": mm.audit(torchs(getattr(model, "module", model)), model)}
    reports["local"] = mm.audit(BySvd(model.parameters()), model)
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
        report = mm.audit(BySvd(model.parameters(), fill=True, rows=balanced), model, groups=groups)
        assert not report.ok
        rows += report.rows
    return rows


def test_shards_that_an_exact_svd_orthogonalizes_are_told(workers: Callable[[int], Pool]) -> None:
    for row in workers(2).run(exactly)[0]:
        assert (row.verdict, row.mend[:34]) == ("each shard alone", "each rank orthogonalizes its shard"), row
        assert row.like > 0.98
        assert 0.6 < row.size < 1.6


def verdicts_on_ranks_apart() -> set[str]:
    model = DistributedDataParallel(Net())
    return set(verdicts(mm.audit(BySvd(model.parameters(), apart=1e-3), model)).values())


def test_replicas_that_end_apart_are_told(workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(verdicts_on_ranks_apart) == [{"replicas differ"}] * 2


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
