"""Who holds plain matrices is read off DDP's wrapper, given or found; what it does not hold is an error."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.wrappers.group_that_averages",
    "comm.wrappers.refuse_join",
    "comm.placing.spec_of",
)

FP32: dict[str, Any] = {"lr": 0.05, "compute_dtype": torch.float32}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 6))


def train_two_steps(model: nn.Module, optimizer: mm.Muon) -> list[Tensor]:
    """Two steps on another batch for each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@on_ranks(2)
def test_the_group_is_read_off_the_wrapper_given_or_found() -> None:
    explicit = DistributedDataParallel(net())
    expected = train_two_steps(explicit, mm.from_model(explicit, process_group="world", **FP32))
    wrapper = DistributedDataParallel(net())
    from_wrapper = mm.from_model(wrapper, **FP32)
    compiled = mm.from_model(torch.compile(wrapper), **FP32)  # type: ignore[arg-type]
    group = dist.new_group([0, 1])
    model = net()
    early = mm.from_model(model, process_group="auto", **FP32)  # as a host makes it: the wrapper comes later
    wrapped = DistributedDataParallel(model, process_group=group)
    twin = pickle.loads(pickle.dumps(early)).process_group, copy.deepcopy(early).process_group
    for weights in (train_two_steps(wrapped, early), train_two_steps(wrapper, from_wrapper)):
        assert all(map(torch.equal, weights, expected))
    assert early.counts.bytes_sent == from_wrapper.counts.bytes_sent > 0
    assert (from_wrapper.process_group, compiled.process_group, early.process_group) == ("world", "world", "auto")
    assert twin == ("auto", "auto")
    assert mm.from_model(wrapped).process_group is group


AVERAGED = (
    r"\.weight: No DistributedDataParallel averages this plain tensor, while one averages 0\.weight\. "
    r'If your loop averages its gradient over all ranks, write Muon\(\.\.\., process_group="world"\)\. '
    "Otherwise leave it out of the param groups$"
)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", r"0\.weight: This parameter is a plain tensor while 2 ranks run"),
        ("ignored", f"2{AVERAGED}"),
        ("outside", f"3{AVERAGED}"),
    ],
)
@on_ranks(2)
def test_what_no_wrapper_averages_is_an_error(kind: str, message: str) -> None:
    model = net()
    optimizer = mm.from_model(model, process_group="auto", **FP32)
    if kind == "outside":
        model[3] = nn.Linear(5, 6)  # the optimizer has the layer that was here
    if kind == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    wrapped = model if kind == "none" else DistributedDataParallel(model)
    wrapped(torch.ones(4, 6)).sum().backward()
    with pytest.raises(mm.LayoutError, match=message):
        optimizer.step()


def net_of_tensor_parallelism() -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}), mesh


@on_ranks(4)
def test_replicas_of_tensor_parallelism_step_whole_matrices() -> None:
    """DDP with ``device_mesh=`` holds DTensors by their local parts, which were orthogonalized as whole matrices."""
    model, mesh = net_of_tensor_parallelism()
    wrapped, alone = DistributedDataParallel(model, device_mesh=mesh["data"]), net()
    optimizer, other = (
        mm.from_model(
            model,
            watch=False,
            overrides={"2.weight": {"algorithm": "muon", "matrices": ("cols", 3, 5)}},
            process_group=group,
            **FP32,
        )
        for model, group in ((wrapped, None), (alone, "local"))
    )
    shapes = {row.parameter: row.matrices for row in optimizer.explain().rows}
    assert shapes == {row.parameter: row.matrices for row in other.explain().rows}
    whole = dict(alone.named_parameters())
    pairs = [
        (tensor, whole[name])
        for group in optimizer.param_groups
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
    ]

    def part_of(value: Tensor, local: Tensor) -> Tensor:
        spec = getattr(local, "_st_info", None)
        return value if spec is None else distribute_tensor(value, spec.mesh, spec.placements).to_local()

    for step in range(3):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + i)) for i in range(2)]
        for batch in batches:
            (alone(batch).square().mean() / 2).backward()
        wrapped(batches[mesh["data"].get_local_rank()]).square().mean().backward()
        for local, parameter in pairs:
            gradient = part_of(parameter.grad, local)
            torch.testing.assert_close(local.grad, gradient)
            local.grad.copy_(gradient)  # its sums over ranks round otherwise
        norms = [float(trained.clip_grad_norm_(math.inf)) for trained in (optimizer, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        for trained in (optimizer, other):
            trained.step()
            trained.zero_grad()
        assert all(torch.equal(local, part_of(parameter.detach(), local)) for local, parameter in pairs)


@pytest.mark.parametrize("composable", [False, True])
@on_ranks(4)
def test_a_parameter_that_its_wrapper_replaces_by_a_tensor_is_an_error(composable: bool) -> None:
    """The wrapper takes DTensors out of the model: at once, or in the first forward."""
    model, mesh = net_of_tensor_parallelism()
    early = mm.from_model(model, process_group=mesh["data"].get_group(), **FP32)
    how: Any = {"device_mesh": mesh["data"]}
    wrapped = replicate(model, **how) if composable else DistributedDataParallel(model, **how)
    before = [p.to_local().clone() for group in early.param_groups for p in group["params"] if hasattr(p, "to_local")]
    wrapped(torch.ones(4, 6)).sum().backward()
    with pytest.raises(mm.LayoutError, match=r"^0.bias, 0.weight, .*no parameter, as Distributed.*device_mesh=mesh"):
        early.step()
    after = [p.to_local() for group in early.param_groups for p in group["params"] if hasattr(p, "to_local")]
    assert before
    assert all(map(torch.equal, before, after))
    with pytest.raises(
        ValueError, match=r"0.weight: found a DTensor in place of a parameter.*before the first forward"
    ):
        mm.from_model(wrapped, **FP32)


def test_alone_there_is_nothing_to_find() -> None:
    model = net()
    optimizer = mm.from_model(model, process_group="auto", **FP32)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match='needed "world", "local", a ProcessGroup'):
        optimizer.clip_grad_norm_(1.0, process_group="auto")
    with pytest.raises(TypeError, match=r"found no model; needed the model\. Write .*MuonFactory"):
        mm.from_model()


@pytest.mark.parametrize(
    ("throws", "error", "message"),
    [
        (False, mm.LayoutError, r"Write Join\(\[model\], throw_on_early_termination=True\)"),
        (True, RuntimeError, ""),  # torch's own, once a rank has no more data
    ],
)
@on_ranks(2)
def test_join_is_an_error_that_names_it(throws: bool, error: type[Exception], message: str) -> None:
    """Train, then train under `Join` with fewer batches on rank 1."""
    model = DistributedDataParallel(net())
    optimizer = mm.from_model(model, **FP32)
    train_two_steps(model, optimizer)

    def unevenly() -> None:
        with Join([model], throw_on_early_termination=throws):
            for _ in range(4 - 2 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.ones(4, 6)).square().sum().backward()
                optimizer.step()

    with pytest.raises(error, match=message):
        unevenly()
