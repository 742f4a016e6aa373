"""What a tensor-parallel plan leaves out is held by each rank of its axis: one parameter, with nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import muonmesh as mm
from muonmesh.step.connection import placed_members
from tests.support import problem
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.undeclared_replicas.find_copies",
    "comm.undeclared_replicas.insist_on_averages",
)

FP32: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "compute_dtype": torch.float32}
MESHES = {
    "tp": ((2,), ("tp",)),
    "fsdp, tp": ((2, 2), ("shard", "tp")),
    "hsdp, tp": ((1, 2, 2), ("replicate", "shard", "tp")),
    "hsdp of 2, tp": ((2, 1, 2), ("replicate", "shard", "tp")),
    "hsdp, tp on 8": ((2, 2, 2), ("replicate", "shard", "tp")),
    "stages, tp": ((2, 2), ("stage", "tp")),
}


LEFT_OUT = sorted(["embedding.weight", *(f"{m}.{k}" for m in ("norm", "free", "head") for k in ("weight", "bias"))])


class Net(nn.Module):
    """The plan takes up and down; embedding, norm, a matrix with its bias, and head are left out of it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(24, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.free = nn.Linear(8, 8)
        self.head = nn.Linear(8, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        return self.head(torch.tanh(self.free(x + self.down(torch.relu(self.up(x))))))


def parallelized(mesh: DeviceMesh, model: Net) -> Net:
    """Shard a model as people do: tensor parallelism over one axis, FSDP2 or HSDP over the others."""
    tp = mesh["tp"] if mesh.ndim > 1 else mesh
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("replicate", "shard"))
    return fully_shard(model, mesh=mesh[names] if len(names) > 1 else mesh[names[0]]) if names else model  # type: ignore[return-value]


def backward_of_tokens(model: nn.Module, step: int, seed: int = 0) -> None:
    tokens = torch.randint(0, 24, (3, 5), generator=torch.Generator().manual_seed(10 * seed + step))
    model.zero_grad()
    model(tokens).square().mean().backward()


def with_gradients_of(model: nn.Module, alone: nn.Module) -> None:
    """Give a model of one process the gradients of another, whole."""
    for name, parameter in alone.named_parameters():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        parameter.grad = problem.whole(gradient)


def result(model: nn.Module, optimizer: mm.Muon) -> dict[str, Tensor]:
    """Return parameters and state, whole, as the ranks that share them gather them."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = problem.whole(parameter)
        tensors |= {f"{name}.{key}": problem.whole(value) for key, value in optimizer.state[parameter].items()}
    return tensors


def against_one_process(layout: str, process_group: str | None, folder: Path) -> dict[str, Any]:
    sizes, names = MESHES[layout]
    mesh = mesh_of(sizes, names=names)
    stage = mesh.get_local_rank("stage") if "stage" in names else 0
    model, alone = parallelized(mesh, Net(stage)), Net(stage)
    optimizer = mm.from_model(model, process_group=process_group, **FP32)
    single = mm.from_model(alone, process_group="local", **FP32)
    report: dict[str, Any] = {"norms": [], "clipped": [], "open": optimizer.explain().open}
    for step in range(3):
        backward_of_tokens(model, step, stage)
        with_gradients_of(model, alone)
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), float("inf")))
        measured, expected = optimizer.clip_grad_norm_(1e-3), single.clip_grad_norm_(1e-3)
        report["norms"].append(float(measured) / norm)
        report["clipped"].append(torch.equal(measured.total, expected.total))
        optimizer.step()
        single.step()
    report["differing"] = problem.differing(result(model, optimizer), result(alone, single))
    report["orthogonalized"] = optimizer.counts.orthogonalized
    report["copies"] = sorted({(m.name, m.storage.copies) for m in placed_members(optimizer) if "norm" in m.name})
    measured, expected = optimizer.metrics(), single.metrics()
    report["metrics"] = [key for key in expected if measured[key] != pytest.approx(expected[key], rel=1e-5)]
    report["found"] = optimizer.explain().open
    if "stage" not in names:
        mm.checkpoint.save(folder, model, optimizer)
        resumed = parallelized(mesh, Net(7))
        again = mm.from_model(resumed, process_group=process_group, **FP32)
        mm.checkpoint.load(folder, resumed, again)
        for net, its in ((model, optimizer), (resumed, again)):
            backward_of_tokens(net, 3)
            its.step()
        report["resumed"] = problem.differing(result(model, optimizer), result(resumed, again))
    return report


@pytest.mark.parametrize(
    ("layout", "process_group"),
    [
        *((layout, None) for layout in MESHES),
        *(("tp", "auto"), ("hsdp, tp", "auto")),
        *(pytest.param(name, "auto", marks=pytest.mark.soak) for name in MESHES if name not in ("tp", "hsdp, tp")),
    ],
)
def test_what_a_plan_leaves_out_is_one_parameter(
    workers, tmp_path: Path, layout: str, process_group: str | None
) -> None:
    sizes, _ = MESHES[layout]
    ranks = torch.Size(sizes).numel()
    outcomes = workers(ranks).run(against_one_process, layout, process_group, tmp_path / "saved", timeout=120)
    copies = 2 * (sizes[0] if layout.startswith("hsdp") else 1)
    for report in outcomes:
        assert report["norms"] == pytest.approx([1.0] * 3, rel=1e-6)
        assert report["differing"] == []
        assert report["copies"] == [("norm.bias", copies), ("norm.weight", copies)]
        assert sorted(report["open"]) == LEFT_OUT
        assert report["found"] == ()
        assert report["metrics"] == []
        assert report.get("resumed", []) == []
    assert sum(report["orthogonalized"] for report in outcomes) == 3 * (
        2 if "stages" in layout else 1
    )  # each matrix once


@pytest.mark.parametrize(("ranks", "layout"), [(2, "tp"), (4, "fsdp, tp")])
@on_ranks()
def test_what_a_plan_leaves_out_is_saved_before_the_first_step(layout: str, tmp_path: Path) -> None:
    """And loaded into one that begins otherwise."""
    folder = tmp_path / "saved"
    sizes, names = MESHES[layout]
    mesh = mesh_of(sizes, names=names)
    models = [parallelized(mesh, Net(seed)) for seed in (0, 7)]
    optimizers = [mm.from_model(model, **FP32) for model in models]
    mm.checkpoint.save(folder, models[0], optimizers[0])
    mm.checkpoint.load(folder, models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        backward_of_tokens(model, 0)
        optimizer.step()
    results = (result(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
    assert problem.differing(*results) == []


@on_ranks(4)
def test_a_save_before_the_first_step_decides_nothing(tmp_path: Path) -> None:
    """Experts that begin alike: the save takes them for one, and the first step must look again."""
    model = Mixture("zeros dtensor")
    groups = [{"params": [("expert", model.expert)]}, {"params": [("dense", model.dense)]}]
    optimizer = mm.Muon(groups, **FP32)
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    model.expert.grad, model.dense.grad = model.gradients
    with pytest.raises(mm.LayoutError, match="expert: Parameters of this name have different gradients of equal weig"):
        optimizer.step()


@pytest.mark.parametrize("process_group", ["group", "world"])
@on_ranks(4)
def test_a_process_group_that_names_some_of_the_copies(process_group: str) -> None:
    """Data parallel by hand over tensor parallel: the ProcessGroup given names half of the copies of a norm."""
    mesh = mesh_of((2, 2), names=("data", "tp"))
    model, alone = Net(), Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    group: Any = mesh["data"].get_group() if process_group == "group" else process_group
    optimizer = mm.from_model(model, process_group=group, shard_state=process_group == "group", **FP32)
    single = mm.from_model(alone, process_group="local", **FP32)
    norms = []
    for step in range(2):
        backward_of_tokens(model, step)
        with_gradients_of(model, alone)
        norms.append(float(optimizer.clip_grad_norm_(1.0)) / float(single.clip_grad_norm_(1.0)))
        optimizer.step()
        single.step()
    assert {m.storage.copies for m in placed_members(optimizer) if "norm" in m.name} == {4}
    assert norms == pytest.approx([1.0, 1.0], rel=1e-12)
    assert problem.differing(result(model, optimizer), result(alone, single)) == []


@on_ranks(2)
def test_norms_of_sequence_parallelism_are_reduced_and_counted_once() -> None:
    """Sequence parallelism in the plan: the gradient of the norm is a partial sum, which the DTensor reduces."""
    mesh = mesh_of((2,), names=("tp",))
    model, alone = Net(), Net()
    plan = {
        "embedding": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "free": SequenceParallel(use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = mm.from_model(model, **FP32)
    single = mm.from_model(alone, process_group="local", **FP32)
    norms = []
    for step in range(2):
        tokens = torch.randint(0, 24, (3, 6), generator=torch.Generator().manual_seed(step))
        for net in (model, alone):
            net.zero_grad()
            net(tokens).square().mean().backward()
        assert model.norm.weight.grad.placements[0].is_partial()
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), float("inf")))
        norms.append(float(optimizer.clip_grad_norm_(1.0)) / norm)
        with_gradients_of(model, alone)
        optimizer.step()
        single.step()
    assert norms == pytest.approx([1.0, 1.0], rel=1e-5)
    assert problem.differing(result(model, optimizer), result(alone, single)) == []


def stages_alike(sizes: tuple[int, ...]) -> tuple[float, int]:
    """Two stages of a pipeline that begin with the same names and bits: nothing links them, so nobody asks."""
    mesh = mesh_of(sizes, names=("stage", "shard"))
    model = fully_shard(Net(), mesh=mesh["shard"])
    optimizer = mm.from_model(model, **FP32)
    backward_of_tokens(model, 0, mesh.get_local_rank("stage"))
    twin = Net()
    with_gradients_of(model, twin)
    norm = float(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    return norm / float(nn.utils.clip_grad_norm_(twin.parameters(), 1.0)), optimizer.counts.orthogonalized


def test_stages_of_equal_names_and_bits_are_not_copies(workers) -> None:
    outcomes = workers(4).run(stages_alike, (2, 2))
    assert [norm for norm, _ in outcomes] == pytest.approx([1.0] * 4, rel=1e-6)
    assert sum(count for _, count in outcomes) == 2 * 3


class Mixture(nn.Module):
    """A matrix that all ranks share, and experts of one name on each: DTensors of the data axis, or plain."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        mesh = mesh_of((2, 2), names=("data", "expert"))
        expert = mesh.get_local_rank("expert")
        dense = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        values = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 + expert))
        self.dense = nn.Parameter(distribute_tensor(dense, mesh, [Replicate(), Shard(0)], src_data_rank=None))
        weight = values if kind.startswith("weights") else torch.ones(4, 6)
        self.gradients = [values.clone(), torch.ones(8, 6)]
        if kind.endswith("dtensor"):
            weight, self.gradients[0] = (
                distribute_tensor(t.clone(), mesh["data"], [Shard(0)], src_data_rank=None)
                for t in (weight, self.gradients[0])
            )
        self.expert = nn.Parameter(weight)
        self.gradients[1] = distribute_tensor(self.gradients[1], mesh, [Replicate(), Shard(0)], src_data_rank=None)


def experts(kind: str, algorithm: str, process_group: str | None) -> float:
    model = Mixture(kind)
    groups = [
        {"params": [("expert", model.expert)], "algorithm": algorithm},
        {"params": [("dense", model.dense)], "algorithm": "muon"},
    ]
    optimizer = mm.Muon(groups, process_group=process_group, **FP32)
    model.expert.grad, model.dense.grad = model.gradients
    norm = optimizer.clip_grad_norm_(1.0, policy="all")
    optimizer.step()
    return float(norm)


OF_WEIGHTS, OF_GRADIENTS = "different weights on the ranks", "different gradients of equal weights on the ranks"


@pytest.mark.parametrize(
    ("kind", "algorithm", "process_group", "difference"),
    [
        ("weights dtensor", "muon", None, ""),  # two parameters of one name: bits say so
        ("zeros dtensor", "muon", None, f"{OF_GRADIENTS} (0, 2) and"),
        ("zeros dtensor", "adamw", "auto", f"{OF_GRADIENTS} (0, 2)"),
        ("zeros dtensor", "muon", "local", ""),
        ("weights plain", "muon", None, f"{OF_WEIGHTS} (0,) and (1,)"),
        ("weights plain", "adamw", "auto", f"{OF_WEIGHTS} (0,) and (1,)"),
        ("zeros plain", "adamw", None, f"{OF_GRADIENTS} (0,) and"),
    ],
)
def test_parameters_of_one_name_that_are_no_copies(
    workers, kind: str, algorithm: str, process_group: str | None, difference: str
) -> None:
    message = f"expert: Parameters of this name have {difference}" if difference else ""
    outcomes = workers(4).run_expecting_errors(experts, kind, algorithm, process_group, timeout=30)
    for outcome in outcomes:
        assert outcome.error is (mm.LayoutError if message else None), outcome.message
        assert message in outcome.message
    if not message:
        weights = [torch.randn(4, 6, generator=torch.Generator().manual_seed(2 + expert)) for expert in range(2)]
        true = torch.cat([*(value.flatten() for value in weights), torch.ones(48)]).double().norm()
        assert [outcome.value for outcome in outcomes] == pytest.approx([float(true)] * 4)


@on_ranks(2, timeout=30)
def test_a_matrix_that_one_rank_alone_holds_is_an_error_on_every_rank() -> None:
    """One rank alone holds a plain matrix: it is told, and so are the others."""
    mesh = mesh_of((2,), names=("tp",))
    parameters = {"dense": nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))}
    if dist.get_rank():
        parameters["free"] = nn.Parameter(torch.ones(4, 4))
    optimizer = mm.Muon([{"params": list(parameters.items())}], **FP32)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    error = mm.LayoutError if dist.get_rank() else mm.PlanError
    with pytest.raises(error, match="free: This parameter is a plain tensor while 2 ranks run"):
        optimizer.step()


@on_ranks(2, timeout=30)
def test_gradients_of_parts_of_the_tokens_are_an_error_on_every_rank() -> None:
    """Sequence parallelism by hand beside the plan: the norm of each rank sees a part of the tokens."""
    mesh = mesh_of((2,), names=("tp",))
    model = Net()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = mm.from_model(model, **FP32)
    tokens = torch.randint(0, 24, (3, 6), generator=torch.Generator().manual_seed(0))
    part = model.norm(model.embedding(tokens)).chunk(2, dim=1)[dist.get_rank()]
    x = DTensor.from_local(part, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()]).to_local()
    model.head(model.free(x + model.down(torch.relu(model.up(x))))).square().mean().backward()
    message = (
        r"have different gradients of equal weights on the ranks \(0,\) and \(1,\).*SequenceParallel\(\) for a norm"
    )
    with pytest.raises(mm.LayoutError, match=message):
        optimizer.clip_grad_norm_(1.0)
