"""What does not fit is told by name before anything changes; what means the same loads."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.checkpoint.save_load import checkpointed
from tests.support import problem
from tests.support.on_ranks import on_ranks

COVERS = (
    "checkpoint.load_plan.LoadPlan",
    "checkpoint.load_plan.plan_load",
    "checkpoint.record.ParameterRecord",
    "checkpoint.form.check_state_dict",
)

SHAPES = {"qkv.weight": (12, 6), "up.weight": (9, 5), "embed.weight": (7, 4), "norm.bias": (5,)}
FUSED: dict[str, Any] = {"qkv.weight": ("rows", 4, 4, 4)}


class Model(nn.Module):
    """Parameters by dotted names, and a buffer."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            owner, key = name.split(".")
            module = nn.Module()
            module.register_parameter(key, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            self.add_module(owner, module)
        self.register_buffer("count", torch.randn(2, generator=generator))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def groups_of(model: nn.Module, specs: dict[str, Any], algorithm: str = "muon") -> list[dict[str, Any]]:
    matrix: dict[str, Any] = {"algorithm": algorithm, "name": "matrices", "params": [], "param_names": []}
    rest: dict[str, Any] = {"algorithm": "adamw", "name": "rest", "params": [], "param_names": []}
    for name, parameter in model.named_parameters():
        group = matrix if parameter.ndim > 1 and not name.startswith("embed") else rest
        group["params"].append(parameter)
        group["param_names"].append(name)
    matrix["matrices"] = [specs.get(name) for name in matrix["param_names"]]
    return [matrix, rest]


def make(
    shapes: dict[str, tuple[int, ...]] | None = None,
    *,
    seed: int = 0,
    specs: dict[str, Any] | None = None,
    algorithm: str = "muon",
    dtype: torch.dtype = torch.float32,
    group: Any = "local",
    **settings: Any,
) -> tuple[Model, mm.Muon]:
    model = Model(SHAPES if shapes is None else shapes, seed, dtype)
    groups = groups_of(model, FUSED if specs is None else specs, algorithm)
    return model, mm.Muon(groups, process_group=group, compute_dtype=torch.float32, **settings)


def step_with_random_gradients(model: nn.Module, optimizer: mm.Muon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def whole_with_buffers(model: nn.Module, optimizer: mm.Muon) -> dict[str, Tensor]:
    return problem.result(model, optimizer) | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves a model after a step."""

    def save(**how: Any) -> Path:
        model, optimizer = make(**how)
        step_with_random_gradients(model, optimizer, 1)
        mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
        return tmp_path / "checkpoint"

    return save


def load_refused(path: Path, error: type[Exception] = mm.StateError, **how: Any) -> str:
    """Load into something that does not fit, and return the message; nothing has changed."""
    model, optimizer = make(seed=5, **how)
    step_with_random_gradients(model, optimizer, 2)
    before = whole_with_buffers(model, optimizer)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with pytest.raises(error) as caught:
        mm.checkpoint.load(path, model, optimizer)
    assert problem.differing(whole_with_buffers(model, optimizer), before) == []
    assert settings == [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return str(caught.value)


OTHERS = {"qkw.weight": (12, 6), "up.weight": (9, 6), "embed.weight": (7, 4), "norm.bias": (5,), "gate.weight": (3, 3)}


# How a checkpoint was saved, into what it is loaded, and parts of what is said.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "names and shapes, with the nearest": (
        {},
        {"shapes": OTHERS, "specs": {"qkw.weight": FUSED["qkv.weight"]}},
        (
            "no model.qkw.weight (the nearest is qkv.weight)",
            "no model.gate.weight",
            "model.qkv.weight, which nothing here has (the nearest is qkw.weight)",
            "model.up.weight of shape (9, 5), where (9, 6) is needed",
            "load(..., strict=False)",
        ),
    ),
    "numbers of other matrices": (
        {"algorithm": "normuon"},
        {"algorithm": "normuon", "specs": {"qkv.weight": ("cols", 3, 3)}},
        ("qkv.weight: found row_second_moment of matrices ('rows', 4, 4, 4)",),
    ),
    "another rule": ({}, {"algorithm": "normuon"}, ("found state of rule 'muon'; needed that of rule 'normuon'",)),
    "weights that would be rounded": (
        {},
        {"dtype": torch.bfloat16},
        ("model.up.weight in float32, which bfloat16 would round (keep masters: master_dtype=torch.float32)",),
    ),
    "weights that neither of two dtypes of 16 bits holds": (
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "adamw_eps": 1e-4},
        ("model.up.weight in bfloat16, which float16 would round (keep masters: master_dtype=torch.float32)",),
    ),
}


@pytest.mark.parametrize("difference", REFUSED)
def test_what_differs_is_told_together(saved: Callable[..., Path], difference: str) -> None:
    before, after, parts = REFUSED[difference]
    message = load_refused(saved(**before), **after)
    assert [part for part in parts if part not in message] == []


def test_without_strict_the_common_names_load_and_the_others_stay(saved: Callable[..., Path]) -> None:
    path = saved()
    shapes = {**SHAPES, "gate.weight": (3, 3)}
    del shapes["up.weight"]
    model, optimizer = make(shapes, seed=5)
    step_with_random_gradients(model, optimizer, 2)
    before = whole_with_buffers(model, optimizer)
    mm.checkpoint.load(path, model, optimizer, strict=False)
    after = whole_with_buffers(model, optimizer)
    expected = whole_with_buffers(*make_saved())
    for name, value in after.items():
        assert torch.equal(value, (before if name.startswith("gate") else expected)[name]), name


def test_buffers_come_back_and_the_saved_learning_rate_counts(saved: Callable[..., Path]) -> None:
    """As with torch's ``load_state_dict``; whoever wants another one sets it afterwards."""
    path = saved(lr=0.25)
    model, optimizer = make(seed=5, lr=torch.tensor(0.5))
    mm.checkpoint.load(path, model, optimizer)
    assert torch.equal(model.count, Model(SHAPES, 0).count)  # type: ignore[arg-type]
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, Tensor)
    assert float(rate) == 0.25


class Normed(nn.Module):
    """Several buffers of different sizes, which DDP lets differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.wide, self.narrow = nn.BatchNorm1d(12), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.down(self.wide(self.up(x))))


@on_ranks(2)
def test_buffers_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """They had been some of one rank and some of another, so statistics of two ranks were mixed."""
    model = nn.parallel.DistributedDataParallel(Normed())
    optimizer = mm.from_model(model)
    for step in range(2):
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))).sum().backward()
        optimizer.step()
    mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    other = nn.parallel.DistributedDataParallel(Normed())
    mm.checkpoint.load(tmp_path / "checkpoint", other, mm.from_model(other))
    for (name, buffer), loaded in zip(model.named_buffers(), other.buffers(), strict=True):
        first = buffer.clone()
        dist.broadcast(first, 0)
        assert torch.equal(loaded, first), name


@on_ranks(4)
def test_a_buffer_that_ranks_shard_keeps_every_shard(tmp_path: Path) -> None:
    """Only rank 0 had written its shard, so the save was refused. Of replicas that differ, the first counts."""
    mesh = init_device_mesh("cpu", (2, 2))
    model, table = nn.Linear(6, 12), torch.arange(20.0).view(5, 4)
    placements = [Replicate(), Shard(0)]
    model.register_buffer("table", distribute_tensor(table, mesh, placements) + mesh.get_local_rank(0))
    optimizer = mm.from_model(model, process_group="world")
    mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    model.register_buffer("table", distribute_tensor(torch.zeros(5, 4), mesh, placements))
    mm.checkpoint.load(tmp_path / "checkpoint", model, optimizer)
    assert torch.equal(model.table.full_tensor(), table)  # type: ignore[operator, union-attr]


def test_state_of_what_is_frozen_now_is_not_dropped_unseen(saved: Callable[..., Path]) -> None:
    path = saved()
    model, _ = make(seed=5)
    model.up.requires_grad_(False)  # type: ignore[union-attr]
    groups = groups_of(model, FUSED)
    at = groups[0]["param_names"].index("up.weight")
    for key in ("params", "param_names", "matrices"):
        del groups[0][key][at]
    optimizer = mm.Muon(groups, process_group="local", compute_dtype=torch.float32)
    before = whole_with_buffers(model, optimizer)
    with pytest.raises(
        mm.StateError, match=r"found state of up\.weight, which nothing here trains; needed.*strict=False"
    ):
        mm.checkpoint.load(path, model, optimizer)
    assert problem.differing(whole_with_buffers(model, optimizer), before) == []
    mm.checkpoint.load(path, model, optimizer, strict=False)
    assert torch.equal(model.get_parameter("norm.bias"), make_saved()[0].get_parameter("norm.bias"))


def make_saved() -> tuple[Model, mm.Muon]:
    model, optimizer = make()
    step_with_random_gradients(model, optimizer, 1)
    return model, optimizer


@pytest.mark.parametrize("kind", ["frozen", "buffer"])
def test_two_tensors_of_one_canonical_name_are_refused(kind: str, tmp_path: Path) -> None:
    """A frozen ``module.up.weight`` beside a trained ``up.weight`` had not been saved, without an error."""
    model, optimizer = make()
    inner = nn.Module()
    inner.up = nn.Linear(5, 9, bias=False).requires_grad_(False)
    inner.register_buffer("count", torch.zeros(2))
    delattr(inner, "count" if kind == "frozen" else "up")
    model.add_module("module", inner)
    name = "up.weight" if kind == "frozen" else "count"
    message = rf"{re.escape(name)}: found two tensors of this name, {re.escape(name)} and module\.{re.escape(name)};"
    with pytest.raises(mm.StateError, match=message):
        mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    assert not (tmp_path / "checkpoint").exists()


def test_groups_may_be_cut_otherwise_if_their_settings_are_the_same(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = saved(lr=0.25)

    def apart(**second: Any) -> tuple[Model, mm.Muon]:
        model = Model(SHAPES, 5)
        matrix, rest = groups_of(model, FUSED)
        halves = [
            {**matrix, "name": key, **{k: [matrix[k][i]] for k in ("params", "param_names", "matrices")}}
            for i, key in enumerate(("first", "second"))
        ]
        halves[1].update(second)
        return model, mm.Muon([*halves, rest], lr=0.5, process_group="local", compute_dtype=torch.float32)

    model, optimizer = apart(lr=0.7)  # as an override does: the saved rate counts
    mm.checkpoint.load(path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.25]
    first, its_optimizer = make()
    step_with_random_gradients(first, its_optimizer, 1)
    momentum = optimizer.state[model.get_parameter("qkv.weight")]["momentum_buffer"]
    assert torch.equal(momentum, its_optimizer.state[first.get_parameter("qkv.weight")]["momentum_buffer"])

    other, two = apart(lr=0.125)
    step_with_random_gradients(other, two, 1)
    mm.checkpoint.save(tmp_path / "apart", other, two)
    message = load_refused(tmp_path / "apart")
    assert "found qkv.weight saved with lr=0.5, up.weight with lr=0.125" in message
    assert "Give them groups of their own" in message


WHOLE: dict[str, Any] = {"qkv.weight": "whole"}


def test_a_matrix_may_be_fused_or_split_if_its_state_means_the_same(saved: Callable[..., Path]) -> None:
    path = saved()
    model, optimizer = make(seed=5, specs=WHOLE)
    mm.checkpoint.load(path, model, optimizer)
    step_with_random_gradients(model, optimizer, 3)
    other, its_optimizer = make(specs=FUSED)
    step_with_random_gradients(other, its_optimizer, 1)
    its_optimizer.param_groups[0]["matrices"][0] = "whole"
    expected = mm.Muon(groups_of(other, WHOLE), process_group="local", compute_dtype=torch.float32)
    for parameter, state in its_optimizer.state.items():
        expected.state[parameter] = dict(state)
    step_with_random_gradients(other, expected, 3)
    assert problem.differing(whole_with_buffers(model, optimizer), whole_with_buffers(other, expected)) == []


def test_masters_take_weights_that_would_be_rounded(saved: Callable[..., Path]) -> None:
    path = saved()
    model, optimizer = make(seed=5, dtype=torch.bfloat16, master_dtype=torch.float32)
    mm.checkpoint.load(path, model, optimizer)
    first, its_optimizer = make()
    step_with_random_gradients(first, its_optimizer, 1)
    weight = model.get_parameter("up.weight")
    assert torch.equal(optimizer.state[weight]["master"], first.get_parameter("up.weight"))
    assert torch.equal(weight, first.get_parameter("up.weight").bfloat16())


def test_complex_weights_have_masters_as_wide_as_real_ones(tmp_path: Path) -> None:
    def masters() -> tuple[nn.Module, mm.Muon]:
        model = nn.Linear(4, 6, dtype=torch.complex64)
        groups = [{"params": [*model.named_parameters()], "algorithm": "adamw"}]
        return model, mm.Muon(groups, master_dtype=torch.float64)

    model, optimizer = masters()
    step_with_random_gradients(model, optimizer, 1)
    mm.checkpoint.save(tmp_path / "complex", model, optimizer)
    other, loaded = masters()
    mm.checkpoint.load(tmp_path / "complex", other, loaded)
    assert optimizer.state[model.weight]["master"].dtype == torch.complex128
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(value, loaded.state[other.weight][key]), key


def test_before_the_first_step_there_is_no_state_to_save_or_to_load(tmp_path: Path) -> None:
    fresh, untouched = make()
    mm.checkpoint.save(tmp_path / "fresh", fresh, untouched)
    assert not untouched.state
    model, optimizer = make(seed=5)
    step_with_random_gradients(model, optimizer, 2)
    mm.checkpoint.load(tmp_path / "fresh", model, optimizer)
    for pair in ((model, optimizer), (fresh, untouched)):
        step_with_random_gradients(*pair, 3)
    assert problem.differing(whole_with_buffers(model, optimizer), whole_with_buffers(fresh, untouched)) == []


def linear_after_step(**settings: Any) -> tuple[nn.Module, mm.Muon]:
    model = nn.Linear(130, 100, bias=False)
    optimizer = mm.Muon(model.named_parameters(), process_group="local", **{"kernels": "torch", **settings})
    step_with_random_gradients(model, optimizer, 1)
    return model, optimizer


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"kernels": "compiled"},
            r"by the products 'torch, deflated'; needed those .* 'compiled 1, deflated'.* kernels=\"torch\"",
        ),
        # In fp32 "auto" is Polar Express, as on a device.
        ({"compute_dtype": torch.float32}, r"'torch, deflated'; needed those of this process, 'torch, polar_ex"),
    ],
    ids=["products", "coefficients"],
)
def test_who_goes_on_with_other_products_is_told_once(
    tmp_path: Path, products: None, other: dict[str, Any], message: str
) -> None:
    """A run that named its set of coefficients goes on with it."""
    mm.checkpoint.save(tmp_path / "auto", *linear_after_step())
    with pytest.warns(UserWarning, match=message) as caught:
        mm.checkpoint.load(tmp_path / "auto", *linear_after_step(**other))
    assert len(caught) == 1
    mm.checkpoint.save(tmp_path / "named", *linear_after_step(ns_coefficients="polar_express"))
    model, optimizer = linear_after_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.checkpoint.load(tmp_path / "named", model, optimizer)
        mm.checkpoint.load(tmp_path / "auto", *linear_after_step())
    assert [group["ns_coefficients"] for group in optimizer.param_groups] == ["polar_express"]


def test_a_set_that_only_some_matrices_keep_elsewhere_is_another() -> None:
    """A device takes "deflated" for large matrices, a CPU for smaller ones too, and fp32 for none."""
    products_of = {}
    for device, dtype in itertools.product(("meta", "cpu"), (torch.bfloat16, torch.float32)):
        weights = [(str(rows), nn.Parameter(torch.empty(rows, 4096, device=device))) for rows in (1024, 4096)]
        optimizer = mm.Muon(weights, process_group="local", kernels="torch", compute_dtype=dtype)
        products_of[device, dtype] = {record.products for record in checkpointed(optimizer).checkpoint_records()}
    of_device = products_of["meta", torch.bfloat16]
    assert [there <= of_device for there in products_of.values()] == [True, False, False, False]


def test_settings_and_states_that_are_no_plain_data_are_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    optimizer.param_groups[0]["initial_lr"] = print
    with pytest.raises(mm.StateError, match=r"group 'matrices': found initial_lr = .*; needed numbers, strings"):
        mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    with pytest.raises(TypeError, match=r"optimizer: found a SGD; needed a muonmesh.Muon"):
        mm.checkpoint.save(tmp_path / "checkpoint", model, torch.optim.SGD(model.parameters()))


def rename(state: dict[str, Any]) -> None:
    state["state"]["qkw.weight"] = state["state"].pop("qkv.weight")
    state["param_groups"][0]["params"][0] = "qkw.weight"


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda state: state["state"].pop("up.weight"), "Missing optimizer state for parameter 'up.weight'"),
    "renamed": (rename, "Missing optimizer state for parameter 'qkv.weight'"),
    "another shape": (
        lambda state: state["state"]["up.weight"].update(momentum_buffer=torch.ones(9, 6)),
        "up.weight: found momentum_buffer a plain tensor of shape (9, 6); needed a plain tensor of shape (9, 5)",
    ),
    "too much": (
        lambda state: state["state"]["norm.bias"].update(stuff=torch.ones(5)),
        "norm.bias: found 'stuff' in its state; needed only exp_avg, exp_avg_sq, step, which this optimizer reads",
    ),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_a_full_state_dict_is_named(change: str, strict: bool) -> None:
    """What is missing torch names, or leaves as it was; what does not fit we do, strict or not."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=strict)
    first, its_optimizer = make()
    step_with_random_gradients(first, its_optimizer, 1)
    full: Any = get_optimizer_state_dict(first, its_optimizer, options=options)
    do, message = CHANGES[change]
    do(full)
    model, optimizer = make(seed=5)
    step_with_random_gradients(model, optimizer, 2)
    before = whole_with_buffers(model, optimizer)
    if strict or change in ("another shape", "too much"):
        with pytest.raises((mm.StateError, RuntimeError), match=re.escape(message)):
            set_optimizer_state_dict(model, optimizer, full, options=options)
        assert problem.differing(whole_with_buffers(model, optimizer), before) == []
        return
    set_optimizer_state_dict(model, optimizer, full, options=options)
    unchanged = "up.weight" if change == "missing" else "qkv.weight"
    after = whole_with_buffers(model, optimizer)
    for name, parameter in first.named_parameters():
        for key, value in its_optimizer.state[parameter].items():
            assert torch.equal(after[f"{name}.{key}"], before[f"{name}.{key}"] if name == unchanged else value), name


class Calibrated(nn.Module):
    """A module with extra state, like those of Transformer Engine."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra, self.loads = extra, 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
        self.loads += 1


def with_extra(extra: Any, seed: int = 0) -> tuple[Model, mm.Muon, Calibrated]:
    model, optimizer = make(seed=seed)
    model.get_submodule("up").add_module("scales", Calibrated(extra))
    step_with_random_gradients(model, optimizer, 1)
    return model, optimizer, model.get_submodule("up.scales")  # type: ignore[return-value]


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8)], ids=["None", "empty"])
def test_extra_state_that_is_none_leaves_no_trace(extra: Any, tmp_path: Path) -> None:
    """So modules of Transformer Engine have it where they do not compute in FP8."""
    model, optimizer, _ = with_extra(extra)
    mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    plain, plain_optimizer = make(seed=5)
    mm.checkpoint.load(tmp_path / "checkpoint", plain, plain_optimizer)
    other, two, module = with_extra(extra, seed=6)
    mm.checkpoint.load(tmp_path / "checkpoint", other, two)
    assert module.loads == 0
    assert problem.differing(whole_with_buffers(other, two), whole_with_buffers(plain, plain_optimizer)) == []


@pytest.mark.parametrize(
    ("extra", "value"),
    [
        (torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8), "a Tensor"),
        (torch.tensor([1.5, 2.5]), "a Tensor"),
        (io.BytesIO(b"some"), "a BytesIO"),
        ({"scale": 1.0}, "a dict"),
    ],
    ids=["bytes", "numbers", "stream", "dict"],
)
def test_extra_state_is_refused_by_name(extra: Any, value: str, tmp_path: Path) -> None:
    """Its module might unpickle it; whoever keeps it elsewhere can save the rest."""
    model, optimizer, module = with_extra(extra)
    needed = "needed None or an empty tensor.*register_buffer"
    with pytest.raises(mm.StateError, match=rf"up\.scales\.get_extra_state\(\): found {value}; {needed}"):
        mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    assert not (tmp_path / "checkpoint").exists()
    module.get_extra_state = lambda: None  # type: ignore[method-assign]
    mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    mm.checkpoint.load(tmp_path / "checkpoint", model, optimizer)


@on_ranks(2)
def test_what_one_rank_finds_ends_on_every_rank_and_copies_are_not_one(tmp_path: Path) -> None:
    model, optimizer = make(group="world")
    step_with_random_gradients(model, optimizer, 1)
    mm.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    other, two = make({**SHAPES, "embed.weight": (7, 4 + dist.get_rank())}, seed=5, group="world")
    before = whole_with_buffers(other, two)
    with pytest.raises(mm.StateError, match=r"model\.embed\.weight of shape \(7, 4\), where \(7, 5\) is needed"):
        mm.checkpoint.load(tmp_path / "checkpoint", other, two)
    assert problem.differing(whole_with_buffers(other, two), before) == []
    with pytest.raises(mm.StateError, match='process_group="world"'):
        mm.checkpoint.save(tmp_path / "other", *make_saved())
