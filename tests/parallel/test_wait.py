"""step(wait=False): the last results travel under the next forward, which sees the new weights all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.layout import FlatShards, Interval, MeshLayout
from tests.meshes import mesh_of

WIDTH, STEPS = 8, 3
KINDS = ("plain", "ddp", "fsdp", "fsdp prefetch", "fsdp root", "hsdp", "tp")


class Block(nn.Module):
    """Reads the weight of one child itself, as attention modules do, and calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x) if isinstance(self.up.weight, DTensor) else linear(x, self.up.weight)
        return x + self.down(torch.relu(up))


class Stack(nn.Module):
    """Blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def held(kind: str) -> tuple[nn.Module, nn.Module]:
    """The model whose forward is run, and the one whose parameters are trained."""
    torch.manual_seed(1)
    model = Stack()
    mesh = mesh_of((2, 2), names=("replicate", "shard")) if kind == "hsdp" else mesh_of((2,))
    if kind == "ddp":
        return DistributedDataParallel(model), model
    if kind.startswith("fsdp") or kind == "hsdp":
        if kind != "fsdp root":
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if kind == "fsdp prefetch":
            model.set_modules_to_forward_prefetch(list(model.blocks))
    if kind == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(kind: str, wait: bool) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """Train: the losses, one without gradients between steps among them; the weights; whether steps left something."""
    model, inner = held(kind)
    plain = kind in ("plain", "ddp")
    optimizer = mm.from_model(inner, lr=0.1, process_group="world" if plain else None, compute_dtype=torch.float32)
    losses, left = [], []
    for number in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(wait=wait)
        left.append(optimizer._kept.deferred is not None)
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number == 1:
            with torch.no_grad():
                losses.append(model(x).square().mean())
    state = {name: whole(value) for name, value in inner.state_dict().items()}  # finishes the last step
    return losses, list(state.values()), left


def both(kind: str) -> list[bool]:
    losses, weights, left = trained(kind, wait=False)
    needed_losses, needed_weights, none = trained(kind, wait=True)
    assert all(torch.equal(found, needed) for found, needed in zip(losses, needed_losses, strict=True))
    assert all(torch.equal(found, needed) for found, needed in zip(weights, needed_weights, strict=True))
    assert not any(none)
    return left


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_forward_and_state_dict_see_what_step_without_waiting_left(workers, kind) -> None:
    ranks = 4 if kind == "hsdp" else 2
    assert workers(ranks).run(both, kind) == [[True] * STEPS] * ranks


class Flat(nn.Module):
    """A linear layer of whose weight each rank holds half of the elements in a flat buffer, as ZeRO does."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
        self.part = nn.Parameter(whole.flatten().chunk(2)[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(self.part) for _ in range(2)]
        dist.all_gather(parts, self.part.detach())
        return x @ torch.cat(parts).view(WIDTH, WIDTH)


def flat(wait: bool, scaled: bool) -> tuple[list[Tensor], list[bool]]:
    """What a forward makes of flat halves after each step, and whether the steps left something.

    With ``scaled`` a GradScaler calls the steps, and the second one finds an overflow on one rank.
    """
    model, half = Flat(), WIDTH * WIDTH // 2
    held = tuple((Interval(rank * half, half, 0),) for rank in range(2))
    layout = FlatShards(MeshLayout.replicated((WIDTH, WIDTH), (0, 1)), held, (half, half))
    group = {"params": [("part", model.part)], "algorithm": "muon"}
    optimizer = mm.Muon([group], lr=0.1, layouts={"part": layout}, compute_dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    scaler.scale(torch.ones(()))
    outputs, left = [], []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model.part.grad = torch.randn(half, generator=generator) * scaler.get_scale()
        if scaled and number == 1 and dist.get_rank() == 1:
            model.part.grad[0] = torch.inf
        if scaled:
            scaler.step(optimizer, scaler=scaler, wait=wait)
            scaler.update()
        else:
            optimizer.step(wait=wait)
        left.append(optimizer._kept.deferred is not None)
        outputs.append(model(torch.ones(1, WIDTH)))
    return outputs, left


def flat_both(scaled: bool) -> list[bool]:
    outputs, left = flat(False, scaled)
    needed, none = flat(True, scaled)
    assert all(torch.equal(found, other) for found, other in zip(outputs, needed, strict=True))
    assert torch.equal(outputs[0], outputs[1]) == scaled
    assert not any(none)
    return left


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_flat_shards_and_a_scaler_that_skips_see_what_was_left(workers, scaled: bool) -> None:
    assert workers(2).run(flat_both, scaled) == [[True, not scaled, True]] * 2


def saved_and_loaded(folder: Path) -> tuple[bool, bool]:
    """Whether the last step left something, and whether the checkpoint of it has the weights that came of it."""
    model, inner = held("fsdp")
    optimizer = mm.from_model(inner, lr=0.1, compute_dtype=torch.float32)
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step(wait=False)
    left = optimizer._kept.deferred is not None
    mm.checkpoint.save(folder / "saved", inner, optimizer)
    _, other = held("fsdp")
    mm.checkpoint.load(folder / "saved", other, mm.from_model(other, lr=0.1, compute_dtype=torch.float32))
    pairs = zip(inner.parameters(), other.parameters(), strict=True)
    return left, all(torch.equal(whole(some), whole(loaded)) for some, loaded in pairs)


def test_checkpoints_have_what_step_without_waiting_left(workers, tmp_path: Path) -> None:
    assert workers(2).run(saved_and_loaded, tmp_path) == [(True, True)] * 2


def order() -> tuple[list[int], list[int]]:
    """The blocks that had begun when the rest was done, and the parameters that waited, by block."""
    model = Stack()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = mm.from_model(model, process_group="world", compute_dtype=torch.float32, bucket_cap_mb=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(wait=False)
    waiting = sorted({int(names[number].split(".")[1]) for number in optimizer._kept.deferred._tensors})
    begun: list[int] = []
    for number, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(lambda *_: None)
        block.register_forward_pre_hook(lambda *_, number=number: begun.append(number))
    seen: list[int] = []
    finish = optimizer._kept.deferred._finish
    optimizer._kept.deferred._finish = lambda: (seen.extend(begun), finish())
    model(torch.ones(1, WIDTH))
    return seen, waiting


def test_a_block_that_holds_nothing_of_the_last_bucket_does_not_wait(workers) -> None:
    for seen, waiting in workers(2).run(order):
        assert waiting[0] > 0, "the last bucket should lie past the first block, or this shows nothing"
        assert seen == list(range(waiting[0]))


def past_the_modules() -> None:
    """Read a weight that has not been written, and train with what came of it."""
    model = Stack()
    optimizer = mm.from_model(model, process_group="world", compute_dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(wait=False)
    optimizer.zero_grad()
    model.blocks[0].up.weight.sum().backward()
    dist.barrier()
    optimizer.step()


def test_a_forward_that_no_module_announced_is_an_error_on_every_rank(workers) -> None:
    for outcome in workers(2).run_expecting_errors(past_the_modules, timeout=30.0):
        assert outcome.error is mm.errors.StateError
        assert "optimizer.finish()" in outcome.message
