"""The first training forward is watched: a step with a contradicted guess raises on every rank and changes nothing."""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import muonmesh as mm
from muonmesh.errors import LayoutError, PlanError
from tests.support.models import Calls, OpaqueProduct
from tests.support.on_ranks import on_ranks
from tests.support.workers import Pool

COVERS = ("groups.watch.Watch",)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixed(self.norm(x))
        return x + self.out(F.scaled_dot_product_attention(mixed[..., :16], mixed[..., 16:32], mixed[..., 32:]))


class TwoHeads(nn.Module):
    """A policy and a value on blocks: the value is registered last, so only it is guessed to be an output layer."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.actions, self.worth = nn.Linear(16, 4), nn.Linear(16, 1)
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        x = x.mean(1)
        return self.actions(x), self.worth(x)


IDS = torch.arange(10).view(2, 5) % 9


def loss(outputs: Any) -> Tensor:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """One step."""
    optimizer.zero_grad()
    loss(model(*(args or (IDS,)))).backward()
    optimizer.step()


def split_or_adamw(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The split of each matrix of Muon, or "adamw"."""
    return {
        name: group["matrices"][i] if group["algorithm"] == "muon" else "adamw"
        for group in optimizer.param_groups
        for i, name in enumerate(group["param_names"])
    }


def reasons(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {n: r for g in optimizer.param_groups for n, r in zip(g["param_names"], g["reasons"], strict=True)}


SPLIT = {r"blocks\.\d\.mixed\.weight": {"algorithm": "muon", "matrices": ("rows", 16, 16, 16)}}


def offered_overrides(message: str) -> list[dict[str, Any]]:
    """The values of ``overrides=`` in a message."""
    return [ast.literal_eval(text) for text in re.findall(r"overrides=(\{.*?\})(?=,? or |\.? to |$)", message)]


@pytest.mark.parametrize("line", [0, 1])
def test_a_wrong_half_is_an_error_before_anything_is_written_with_the_lines_to_write(line: int) -> None:
    model = TwoHeads()
    optimizer = mm.from_model(model, overrides=SPLIT)
    assert split_or_adamw(optimizer)["actions.weight"] == "whole"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # it does not go away
        with pytest.raises(LayoutError, match=r"^actions\.weight: .*no other layer reads what it makes") as caught:
            train_one_step(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(optimizer.state.values())
    pasted = offered_overrides(str(caught.value))
    assert pasted == [{"actions.weight": "adamw"}, {"actions.weight": "muon"}]
    optimizer = mm.from_model(model, overrides=SPLIT | pasted[line])
    train_one_step(model, optimizer)
    assert split_or_adamw(optimizer)["actions.weight"] == ("adamw", "whole")[line]
    assert not torch.equal(model.actions.weight, before["actions.weight"])


@pytest.mark.parametrize("line", [0, 1])
def test_another_split_is_a_warning_with_the_lines_to_write(line: int) -> None:
    heads = {"actions.weight": "adamw"}
    model = TwoHeads()
    optimizer = mm.from_model(model, overrides=heads)
    with pytest.warns(
        UserWarning, match=r"^blocks\.0\.mixed\.weight: .*blocks\.\*\.mixed\.weight is split as"
    ) as caught:
        train_one_step(model, optimizer)
    assert len(caught) == 1
    pasted = offered_overrides(str(caught[0].message))
    optimizer = mm.from_model(model, overrides=heads | pasted[line])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_one_step(model, optimizer)
    assert split_or_adamw(optimizer)["blocks.1.mixed.weight"] == (("rows", 16, 16, 16), "whole")[line]


def adapted(frozen: nn.Linear) -> nn.Module:
    """A frozen layer, and two factors beside it, as LoRA has them."""
    down, up = nn.Linear(frozen.in_features, 4, bias=False), nn.Linear(4, frozen.out_features, bias=False)
    return Calls(lambda self, x: self.frozen(x) + self.up(self.down(x)), frozen=frozen, down=down, up=up)


def test_adapters_beside_frozen_fused_weights_are_split_in_every_block() -> None:
    """Behind the first block, what the frozen layer makes is in the graph too, without its weight."""
    model = TwoHeads().requires_grad_(False)
    for block in model.blocks:
        block.mixed = adapted(block.mixed)
    optimizer = mm.from_model(model)
    with pytest.warns(UserWarning, match=r"blocks\.\*\.mixed\.up\.weight is split as 'whole'") as caught:
        train_one_step(model, optimizer)
    (lines, _) = offered_overrides(str(caught[0].message))
    assert lines == {"blocks.*.mixed.up.weight": {"algorithm": "muon", "matrices": ("rows", 16, 16, 16)}}


def test_what_is_confirmed_is_no_guess_any_more_and_neither_warns() -> None:
    model = TwoHeads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = mm.split_params(model, overrides={**SPLIT, "actions.weight": "adamw"})
        assert "blocks.1.out.weight" in groups.guesses
        assert "a guess" in str(groups)
        optimizer = mm.Muon(groups)
        assert reasons(optimizer)["blocks.1.out.weight"] == "linear; a guess"
        train_one_step(model, optimizer)
    assert "a guess" not in str(groups)
    assert "a guess" not in str(optimizer.explain())
    assert reasons(optimizer)["worth.weight"] == "output layer: in a forward, no other layer reads what it makes"


def untouched(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_stays_after_the_first_forward_or_without_an_optimizer() -> None:
    model = TwoHeads()
    groups = mm.split_params(model)
    assert not untouched(model)
    outputs = model(IDS)
    assert untouched(model)
    node = weakref.ref(outputs[0])
    del outputs
    assert node() is None  # no graph and no tensor is held
    del groups
    groups = mm.split_params(model)
    del groups
    assert untouched(model)
    for plain in (mm.split_params(model, watch=False), mm.split_params(model, example=(IDS,))):
        assert untouched(model)
        assert plain.watch is None


def test_no_cycle_keeps_model_groups_or_optimizer_alive() -> None:
    model = TwoHeads()
    groups = mm.split_params(model)
    gc.collect()
    gc.disable()
    try:
        references = weakref.ref(model), weakref.ref(groups.watch)  # type: ignore[arg-type]
        model(IDS)
        del model
        for group in groups:
            group["params"].clear()
        assert references[0]() is None
        del group, groups
        assert references[1]() is None
    finally:
        gc.enable()


def test_a_model_that_is_gone_before_the_step_is_not_compared() -> None:
    model = TwoHeads()
    optimizer = mm.from_model(model)
    loss(model(IDS)).backward()
    del model
    optimizer.step()


def test_a_single_layer_is_no_model() -> None:
    model = nn.Linear(8, 8)
    optimizer = mm.from_model(model)
    train_one_step(model, optimizer, torch.randn(3, 8))
    assert split_or_adamw(optimizer)["weight"] == "whole"


def test_a_model_whose_matrices_all_look_like_adamws_is_contradicted_too() -> None:
    torch.manual_seed(0)

    def several(self: Any, x: Tensor) -> Tensor:
        """Stacks of matrices that only a forward shows, because no module of torch holds them."""
        return x + torch.stack([x @ up @ down for up, down in zip(self.up, self.down, strict=True)]).sum(0)

    stacks = {"up": nn.Parameter(torch.randn(2, 8, 16)), "down": nn.Parameter(torch.randn(2, 16, 8))}
    model = nn.Sequential(nn.Embedding(16, 8), Calls(several, **stacks), nn.Linear(8, 16))
    with pytest.warns(UserWarning, match=r"found 0 matrices for Muon.*write example=\(inputs,\)"):
        optimizer = mm.from_model(model)
    with pytest.raises(LayoutError, match=r"^1\.up: .*by which a forward multiplies, stored in × out") as caught:
        train_one_step(model, optimizer)
    shown, guess = offered_overrides(str(caught.value))
    for overrides, up in ((shown, ("stack", ("transposed", "whole"))), (guess, "adamw")):
        optimizer = mm.from_model(model, overrides=overrides)
        train_one_step(model, optimizer)
        assert split_or_adamw(optimizer)["1.up"] == up


def test_a_model_that_may_be_a_block_is_none_that_the_forward_contradicts() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = mm.from_model(model)
    train_one_step(model, optimizer, torch.randn(3, 8))
    assert split_or_adamw(optimizer)["2.weight"] == "whole"


def test_switched_off() -> None:
    model = TwoHeads()
    optimizer = mm.from_model(model, watch=False)
    train_one_step(model, optimizer)
    assert reasons(optimizer)["actions.weight"] == "linear; a guess"


# --- what is not read, or not compared -------------------------------------------------------------------------------


def without_gradients_and_in_evaluation_mode(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None:
    with torch.no_grad():
        model(IDS)
    loss(model.eval()(IDS)).backward()
    assert not untouched(model)
    optimizer.step()  # nothing was seen, so the guess stays
    model.train()


def one_that_raises(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None:
    with pytest.raises(IndexError):
        model(IDS + 99)


def one_before_the_optimizer_was_made(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None:
    loss(outputs).backward()
    optimizer.step()


def a_step_that_only_creates_state(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None:
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state


def a_traced_one(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.trace(model, IDS)  # type: ignore[no-untyped-call]


def no_other_forward(model: nn.Module, optimizer: mm.Muon, outputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("first", "checkpoints"),
    [
        (without_gradients_and_in_evaluation_mode, None),
        (one_that_raises, None),
        (one_before_the_optimizer_was_made, None),
        (a_step_that_only_creates_state, None),
        (a_traced_one, None),
        (no_other_forward, False),
        (no_other_forward, True),
    ],
)
def test_what_is_not_read_is_followed_by_a_forward_that_is(
    first: Callable[..., None], checkpoints: bool | None
) -> None:
    model = TwoHeads(checkpoints)
    outputs = model(IDS)
    optimizer = mm.from_model(model, overrides=SPLIT)
    first(model, optimizer, outputs)
    with pytest.raises(LayoutError, match=r"^actions\.weight: .*contradicts"):
        train_one_step(model, optimizer)
    assert not model.blocks[0].out.weight.isnan().any()


def test_several_forwards_before_a_step() -> None:
    model = TwoHeads()
    optimizer = mm.from_model(model, overrides={**SPLIT, "actions.weight": "adamw"})
    for _ in range(3):
        loss(model(IDS)).backward()
    optimizer.step()
    assert "a guess" not in str(optimizer.explain())


def test_what_the_first_forward_did_not_use_is_not_contradicted() -> None:
    """The second phase reads what the first does not: of its output layer the first forward shows nothing."""

    def forward(self: Any, x: Tensor, second: bool = False) -> Tensor:
        return (self.second if second else self.first)(F.relu(self.body(x)))

    body, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(4, 8)
    model = Calls(forward, body=body, second=nn.Linear(16, 5), first=nn.Linear(16, 3))
    optimizer = mm.from_model(model)
    train_one_step(model, optimizer, x)
    train_one_step(model, optimizer, x, True)
    assert reasons(optimizer)["second.weight"].endswith("a guess")
    assert not reasons(optimizer)["first.weight"].endswith("a guess")


def test_an_auxiliary_output_without_a_loss_is_not_compared() -> None:
    forward: Any = lambda self, ids: (self.model(ids), self.pool(self.model.embed(ids).mean(1)))  # noqa: E731
    model = Calls(forward, pool=nn.Linear(16, 16), model=TwoHeads())  # the pooled output is in no loss
    optimizer = mm.from_model(model, overrides={**SPLIT, "model.actions.weight": "adamw"})
    loss(model(IDS)[0]).backward()
    optimizer.step()
    assert reasons(optimizer)["pool.weight"].endswith("a guess")


def test_an_output_that_another_forward_may_read_is_told() -> None:
    """What the first forward left out has a gradient: another forward was made, which may read what this one made."""
    model = TwoHeads()
    model.aside = nn.Linear(4, 1)
    optimizer = mm.from_model(model, overrides={**SPLIT, "aside.weight": "adamw", "worth.weight": "adamw"})
    (loss(model(IDS)) + loss(model.aside(model(IDS)[0]))).backward()
    with pytest.warns(UserWarning, match=r"actions.weight.*other forwards may differ.*overrides="):
        optimizer.step()
    assert split_or_adamw(optimizer)["actions.weight"] == "whole"


def test_frozen_layers_and_a_teacher_without_gradients() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_output = self.teacher(ids)
        pairs = zip(self.student(ids), teacher_output, strict=True)
        return torch.stack([F.mse_loss(a, b) for a, b in pairs]).sum()

    model = Calls(forward, teacher=TwoHeads().requires_grad_(False), student=TwoHeads())
    model.student.blocks[0].requires_grad_(False)
    model.student.embed.requires_grad_(False)
    optimizer = mm.from_model(model, overrides=SPLIT)
    with pytest.raises(LayoutError, match=r"overrides=\{r\"student\.actions\.weight\": \"adamw\"\}"):
        train_one_step(model, optimizer)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_are_not_read_and_compile_as_they_would(when: str) -> None:
    count: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        count.append(len(inputs))
        return graph.forward

    plain = TwoHeads()
    compiled: Any = torch.compile(plain, backend=backend, fullgraph=True)
    optimizer = mm.from_model(compiled if when == "before" else plain, overrides=SPLIT)
    for _ in range(3):
        train_one_step(compiled, optimizer)
    assert len(count) == 1
    assert reasons(optimizer)["actions.weight"] == "linear; a guess"


def test_a_compiled_block_shows_nothing_of_its_weights() -> None:
    model = TwoHeads()
    model.blocks[0].compile(backend="aot_eager")
    optimizer = mm.from_model(model, overrides={"actions.weight": "adamw"})
    with pytest.warns(UserWarning, match=r"^blocks\.1\.mixed\.weight: .* blocks\.1\.mixed\.weight is split"):
        train_one_step(model, optimizer)
    assert reasons(optimizer)["blocks.0.mixed.weight"].endswith("a guess")


def coupling() -> nn.Module:
    """A block of a normalizing flow: what it makes is added to half of its inputs, and is output as well as read."""

    def forward(self: Any, x: Tensor) -> Tensor:
        read, shifted = x.chunk(2, -1)
        return torch.cat((shifted + self.shift(read), read), -1)

    return Calls(forward, shift=nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)))


def highway() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * F.relu(self.value(x)) + (1 - gate) * x

    return Calls(forward, value=nn.Linear(8, 8), gate=nn.Linear(8, 8))


@pytest.mark.parametrize("block", [coupling, highway])
def test_no_block_is_an_output_layer_where_blocks_like_it_may_be_none(block: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(*(block() for _ in range(4)))
    optimizer = mm.from_model(model)
    train_one_step(model, optimizer, torch.randn(3, 8))
    assert {split for name, split in split_or_adamw(optimizer).items() if name.endswith("weight")} == {"whole"}


def recursive(self: Any, x: Tensor, depth: int = 2) -> Tensor:
    """The first forward that returns is one inside of another."""
    below = self.leaf(x) if depth == 0 else self.mix(F.relu(self(x, depth - 1)))
    return self.out(below) if depth == 2 else below


def features_alone(self: Any, x: Tensor, features: bool = False) -> Tensor:
    return self.body(x) if features else self.out(F.relu(self.body(x)))


def test_a_forward_of_a_part_of_the_model_shows_no_output_layer_if_another_follows() -> None:
    model = Calls(recursive, leaf=nn.Linear(8, 16), mix=nn.Linear(16, 16), out=nn.Linear(16, 3))
    train_one_step(model, mm.from_model(model), torch.randn(4, 8))
    body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
    model = Calls(features_alone, body=body, out=nn.Linear(12, 3))
    optimizer = mm.from_model(model)
    model(torch.randn(4, 8), True)
    train_one_step(model, optimizer, torch.randn(4, 8))
    assert split_or_adamw(optimizer)["body.2.weight"] == "whole"


def test_a_loop_over_time_takes_time_in_proportion() -> None:
    """Each step of the loop is one of the outputs of a node, and is added to a product with what came before."""

    def loop(self: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        states = []
        for read in self.reads(x).unbind(1):
            state = torch.tanh(read + self.again(state))
            states.append(self.out(state))
        return torch.stack(states, 1)

    def looked_at(count: int) -> int:
        model = Calls(loop, reads=nn.Linear(8, 16), again=nn.Linear(16, 16), out=nn.Linear(16, 2))
        groups, looks = mm.split_params(model), 0

        def count_looks(frame: Any, event: str, argument: Any) -> None:
            nonlocal looks
            looks += event == "call" and frame.f_code.co_name in ("sources", "weight_at", "<genexpr>")

        sys.setprofile(count_looks)
        try:
            model(torch.randn(2, count, 8))
        finally:
            sys.setprofile(None)
        assert groups.watch is not None
        assert groups.watch.facts
        return looks

    assert looked_at(200) < 2.5 * looked_at(100)


def test_forwards_that_show_nothing_are_read_until_the_first_step() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return OpaqueProduct.apply(x, self.weight)

    model, x = nn.Sequential(Hidden(8, 16), nn.ReLU(), Hidden(16, 16), nn.ReLU(), Hidden(16, 3)), torch.randn(4, 8)
    groups = mm.split_params(model)
    optimizer = mm.Muon(groups)
    model(x)
    assert not untouched(model)
    train_one_step(model, optimizer, x)
    assert untouched(model)
    assert reasons(optimizer)["2.weight"].endswith("a guess")


@dataclasses.dataclass
class Unset:
    logits: Tensor
    cache: Any = dataclasses.field(init=False)


class Unready(collections.abc.Mapping[str, Any]):
    """Outputs of which some raise when they are read."""

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def __getitem__(self, key: str) -> Any:
        if key == "later":
            raise RuntimeError("not yet")
        return self.out

    def __iter__(self) -> Iterator[str]:
        return iter(("out", "later"))

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("outputs", ["nested", "unset", "unready"])
def test_no_outputs_make_a_training_forward_raise(outputs: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        out = self.layers(x)
        return Unset(out) if outputs == "unset" else Unready(out) if outputs == "unready" else nested(out, 3000)

    def nested(value: Any, depth: int) -> Any:
        for _ in range(depth):
            value = (value,)
        return value

    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    model = Calls(forward, layers=layers)
    optimizer = mm.from_model(model)
    warns = outputs == "unready"
    with pytest.warns(UserWarning, match="could not be read") if warns else contextlib.nullcontext():
        model(torch.randn(4, 8))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert untouched(model)
    assert reasons(optimizer)["layers.2.weight"].endswith("a guess") == warns


def test_what_a_forward_saved_is_freed_without_a_collection_of_garbage() -> None:
    model, saved = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)), list[weakref.ref[Any]]()
    groups = mm.split_params(model)

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            saved.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda packed: packed.tensor):
            outputs = model(torch.randn(4, 8))
        assert groups.watch is not None
        assert groups.watch.facts
        assert any(packed() for packed in saved)
        del outputs
        assert not any(packed() for packed in saved)
    finally:
        gc.enable()


# --- copies ----------------------------------------------------------------------------------------------------------


def test_copies_of_model_groups_and_optimizer_work_and_watch_nothing() -> None:
    model = TwoHeads()
    groups = mm.split_params(model, overrides=SPLIT)
    optimizer = mm.Muon(groups)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins.append(torch.load(buffer, weights_only=False))
    for twin in twins:
        assert torch.equal(twin(IDS)[0], model.eval()(IDS)[0])
        assert untouched(twin)
    for other in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert other.watch is None
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied._runtime.watch is None
    with pytest.raises(LayoutError, match="contradicts"):
        train_one_step(model.train(), optimizer)


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@on_ranks(2)
def test_replicated_and_sharded_models(how: str) -> None:
    model = TwoHeads()
    if how == "ddp":
        torch.manual_seed(torch.distributed.get_rank())
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    optimizer = mm.from_model(wrapped, overrides=SPLIT)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        train_one_step(wrapped, optimizer, IDS)
    except LayoutError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))  # type: ignore[arg-type]
    optimizer = mm.from_model(wrapped, overrides={"actions.weight": "adamw"})
    train_one_step(wrapped, optimizer, IDS)
    message, same, confirmed = message, same, reasons(optimizer)["blocks.1.out.weight"] == "linear"
    assert message.startswith("actions.weight: The first training forward contradicts")
    assert same
    assert confirmed


def _split_warnings(how: str, watching: tuple[int, ...]) -> int:
    model = TwoHeads()
    wrapped = nn.parallel.DistributedDataParallel(model) if how == "ddp" else fully_shard(model)
    watch = torch.distributed.get_rank() in watching
    optimizer = mm.from_model(wrapped, overrides={"actions.weight": "adamw"}, watch=watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_one_step(wrapped, optimizer, IDS)
    return sum('"rows", 16, 16, 16' in str(warning.message) for warning in caught)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_first_rank_warns_of_what_all_ranks_have_seen(how: str, workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(_split_warnings, how, (0, 1)) == [1, 0]
    assert workers(2).run(_split_warnings, how, (1,)) == [0, 1]


def _contradicted_on_one() -> tuple[str, str]:
    model = TwoHeads()
    rank = torch.distributed.get_rank()
    optimizer = mm.from_model(nn.parallel.DistributedDataParallel(model), overrides=SPLIT, watch=rank == 1)
    try:
        train_one_step(model, optimizer, IDS)
    except (LayoutError, PlanError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_contradiction_on_one_rank_raises_on_all(workers: Callable[[int], Pool]) -> None:
    first, second = workers(2).run(_contradicted_on_one)
    assert second[0] == "LayoutError"
    assert "actions.weight: The first training forward contradicts" in first[1]


def _stage() -> dict[str, Any]:
    """Train a part of a pipeline: what its last layer makes is read by another stage."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.mix(F.relu(self.inner(F.relu(self.reads(x)))))

    model = Calls(forward, reads=nn.Linear(12, 20), mix=nn.Linear(24, 16), inner=nn.Linear(20, 24))
    optimizer = mm.from_model(model, overrides={"inner.weight": "muon"}, process_group="local")
    train_one_step(model, optimizer, torch.randn(3, 12, requires_grad=True))
    return split_or_adamw(optimizer)


def test_the_last_layer_of_a_stage_may_be_read_by_another(workers: Callable[[int], Pool]) -> None:
    for reasons_of in workers(2).run(_stage):
        assert reasons_of["mix.weight"] == "whole"
    with pytest.raises(LayoutError, match=r"^mix\.weight"):  # in one process there is no other stage
        _stage()


def test_a_part_of_a_model_is_compared_with_the_roles_of_the_whole() -> None:
    """Its last layer is read by other parts, whether or not they are in other processes."""
    whole = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 32), nn.GLU(), nn.Linear(16, 5))
    x, first, more = torch.randn(3, 12), whole[:3], whole[:4]
    optimizer = mm.Muon(mm.split_params(whole).held_by(first))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_one_step(first, optimizer, x)
    assert split_or_adamw(optimizer) == {"0.weight": "whole", "2.weight": "whole", "0.bias": "adamw", "2.bias": "adamw"}
    with pytest.warns(UserWarning, match=r'^2\.weight: .*"matrices": \("rows", 16, 16\)'):
        train_one_step(more, mm.Muon(mm.split_params(whole).held_by(more)), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_one_step(more, mm.Muon(mm.split_params(whole, example=(x,)).held_by(more)), x)
    assert mm.split_params(whole, watch=False).held_by(whole).watch is None


class Scaled(torch.autograd.Function):
    """A function that hides from the graph what reads a weight's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@pytest.mark.parametrize("hides", [True, False])
def test_what_training_hides_does_not_contradict_what_an_example_showed(hides: bool) -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 32), nn.GLU(), nn.Linear(16, 5))
    x, split = torch.randn(3, 12), ("rows", 16, 16)
    groups = mm.split_params(model, example=(x,))
    model[2].register_forward_hook(lambda module, args, output: Scaled.apply(output) if hides else output * 2)
    optimizer = mm.Muon(groups.held_by(model))
    assert split_or_adamw(optimizer)["2.weight"] == split
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_one_step(model, optimizer, x)
    assert split_or_adamw(optimizer)["2.weight"] == split
