"""Who holds plain matrices is read off DDP's wrapper, given or found; what it does not hold is an error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.wrappers.group_that_averages",
    "comm.wrappers.refuse_join",
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
