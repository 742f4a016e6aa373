"""torch.compile around the optimizer, or a whole step under FSDP2: it runs as it is, with the same bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support.meshes import mesh_of

Step = Callable[[Tensor], Any]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))


def stepping(net: nn.Module, optimizer: mm.Muon, compiled: str = "") -> Step:
    """Return what takes a step with an input, of which one part is compiled."""

    def part(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager") if name in compiled else function

    clip = part("clipping", lambda: optimizer.clip_grad_norm_(0.5))
    take = part("step", optimizer.step)

    @functools.partial(part, "end")
    def end() -> None:
        clip()
        take()
        optimizer.zero_grad()

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            loss: Tensor = net(x).square().mean()
            loss.backward()
            clip()
            return loss

        if "closure" in compiled:
            take(closure)
            optimizer.zero_grad()
        else:
            net(x).square().mean().backward()
            end()

    return part("whole", step)


@pytest.mark.parametrize("compiled", ["step", "step with a closure", "clipping", "end", "whole"])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_three_compiled_steps_are_those_of_an_uncompiled_optimizer(compiled: str, lr: Any) -> None:
    net = layers()
    twin = copy.deepcopy(net)
    optimizer, other = mm.from_model(net, lr=lr), mm.from_model(twin, lr=lr)
    plain, compiled_step = stepping(net, optimizer), stepping(twin, other, compiled)
    for number in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        plain(x)
        compiled_step(x)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
            for key, value in optimizer.state[a].items():
                assert torch.equal(value, other.state[b][key]), key


@pytest.mark.slow
def test_the_default_backend_takes_it_too() -> None:
    net = layers()
    twin = copy.deepcopy(net)
    optimizer, other = mm.from_model(net, lr=0.05), mm.from_model(twin, lr=0.05)
    compiled = torch.compile(other.step)
    for number in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        for module, step in ((net, optimizer.step), (twin, compiled)):
            module.zero_grad()
            module(x).square().mean().backward()
            step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("compiled", ["step", "end"])
def test_fullgraph_says_that_the_step_is_no_graph(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # what was compiled before has no frame to compile again
    net = layers()
    before = copy.deepcopy(net)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="function `Muon"):
        stepping(net, mm.from_model(net, lr=0.05), compiled)(torch.randn(8, 12))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))


# ------------------------------------------------------------------ a whole step under FSDP2


OURS = str(Path(mm.__file__).parent)


def trained_plain_or_compiled(compiled: bool) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """Three steps; weights and state of this rank, graph breaks by what they say, and graphs of the last step."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of((2,)))
    optimizer = mm.from_model(model, lr=torch.tensor(0.05, dtype=torch.float64), compute_dtype=torch.float32)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return optimizer.step()

    run = torch.compile(step, backend="aot_eager") if compiled else step
    graphs = 0
    for number in range(3):
        graphs = counters["stats"]["unique_graphs"]
        run(torch.randn(8, 12, generator=torch.Generator().manual_seed(2 * number + dist.get_rank())))
    tensors = {name: local_of(p).detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        tensors.update({f"{name}.{key}": local_of(value).clone() for key, value in optimizer.state[p].items()})
    graphs = counters["stats"]["unique_graphs"] - graphs
    breaks = {str(key): value for key, value in counters["graph_break"].items()}
    torch._dynamo.reset()
    return tensors, breaks, graphs


def test_a_whole_step_under_fsdp2_has_the_bits_of_an_uncompiled_one(workers) -> None:
    for (plain, _, _), (compiled, breaks, graphs) in zip(
        workers(2).run(trained_plain_or_compiled, False), workers(2).run(trained_plain_or_compiled, True), strict=True
    ):
        assert plain.keys() == compiled.keys()
        assert [name for name, value in plain.items() if not torch.equal(value, compiled[name])] == []
        # The optimizer is called and never looked into, and nothing is compiled again in the last step.
        # A clone, and so its environment, may lie in a folder of the package's name.
        assert [message for message in breaks if OURS in message and "Muon.step" not in message] == []
        assert any("Muon.step" in message for message in breaks)
        assert graphs == 0
