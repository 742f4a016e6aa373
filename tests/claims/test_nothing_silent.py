"""Nothing silent, in one process: what a user gets wrong is honoured or refused, before anything is written."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

import muonmesh as mm
from muonmesh.layout import FlatShards, MeshLayout
from tests.support.tensors import same_bits

COVERS = (
    "settings.checks.check_group",
    "step.members.check_members",
    "step.untrained.IdleParameters",
    "settings.GroupSettings",
    "step.state_layout.check_state",
)


def gradient_for(parameter: Tensor, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)


def matrix_vector_optimizer(**settings: Any) -> tuple[nn.Parameter, nn.Parameter, mm.Muon]:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(5))
    groups = [
        {"params": [matrix], "param_names": ["matrix"], "name": "muon"},
        {"params": [vector], "param_names": ["vector"], "name": "adamw", "algorithm": "adamw"},
    ]
    return matrix, vector, mm.Muon(groups, lr=0.1, **settings)


def step_once(optimizer: mm.Muon, step: int) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient_for(parameter, step)
    optimizer.step()


def tensors_of(optimizer: mm.Muon) -> list[Tensor]:
    """Every tensor that a step could write, copied."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [parameter, *(v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


# ------------------------------------------------------------------ strides of loaded state


SPLITS: dict[str, tuple[tuple[int, ...], Any]] = {
    "whole": ((8, 12), "whole"),
    "rows": ((24, 12), ("rows", 8, 8, 8)),
    "cols": ((12, 24), ("cols", 8, 16)),
    "stack": ((3, 8, 6), "stack"),
    "heads": ((24, 12), ("heads", 4, 0)),
    "interleaved": ((16, 10), ("interleaved", 2, 0)),
}


@pytest.mark.parametrize("how", ["load_state_dict", "by hand"])
@pytest.mark.parametrize("master", [None, torch.float64], ids=["no-master", "master"])
@pytest.mark.parametrize("split", SPLITS)
def test_state_with_other_strides_is_the_same_state(split: str, master: torch.dtype | None, how: str) -> None:
    shape, spec = SPLITS[split]

    def build() -> tuple[nn.Parameter, mm.Muon]:
        weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        return weight, mm.Muon([{"params": [weight], "matrices": [spec]}], lr=0.1, master_dtype=master)

    weight, optimizer = build()
    step_once(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    entry = saved["state"][0]
    for key in ("momentum_buffer", "master"):
        if key in entry:
            entry[key] = entry[key].transpose(-1, -2).contiguous().transpose(-1, -2)
            assert not entry[key].is_contiguous()
    twin, other = build()
    with torch.no_grad():
        twin.copy_(weight)
    if how == "by hand":
        other.state[twin] = {**entry}
    else:
        other.load_state_dict(saved)
    for stepped in (optimizer, other):
        step_once(stepped, 1)
    assert torch.equal(weight, twin)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], other.state[twin]["momentum_buffer"])


# ------------------------------------------------------------------ parameters that change


def test_a_resized_parameter_is_planned_anew_or_refused_while_it_has_state() -> None:
    matrix, _, optimizer = matrix_vector_optimizer()
    step_once(optimizer, 0)
    matrix.data = torch.randn(6, 4)
    before = tensors_of(optimizer)
    with pytest.raises(mm.StateError, match=r"matrix: found momentum_buffer .* of shape \(8, 12\).*\(6, 4\)"):
        step_once(optimizer, 1)
    assert same_bits(before, tensors_of(optimizer))
    del optimizer.state[matrix]
    step_once(optimizer, 1)
    alone = nn.Parameter(before[0].clone())
    other = mm.Muon([alone], lr=0.1)
    step_once(other, 1)
    assert torch.equal(matrix, alone)


def test_two_parameters_of_one_name_are_refused() -> None:
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match="w: found two parameters of this name"):
        mm.Muon([{"params": [a, b], "param_names": ["w", "w"]}])
    groups = [{"params": [a], "param_names": ["w"], "name": "a"}, {"params": [b], "param_names": ["w"], "name": "b"}]
    with pytest.raises(ValueError, match="w: found two parameters of this name"):
        mm.Muon(groups)
    with pytest.raises(ValueError, match="w: found two parameters of this name"):
        mm.Muon([{"params": [a, b], "param_names": ["w", "module._orig_mod.w"]}])


def test_algorithm_and_matrices_may_change_and_do_something() -> None:
    matrix, _, optimizer = matrix_vector_optimizer()
    optimizer.param_groups[0]["algorithm"] = "adamw"  # before there is state
    step_once(optimizer, 0)
    assert "exp_avg" in optimizer.state[matrix]
    results = []
    for in_place in (True, False):
        matrix, _, optimizer = matrix_vector_optimizer(compute_dtype=torch.float32)
        step_once(optimizer, 0)
        if in_place:
            optimizer.param_groups[0]["matrices"][0] = ("rows", 4, 4)
        else:
            optimizer.param_groups[0]["matrices"] = [["rows", 4, 4]]
        optimizer.state[matrix] = {"momentum_buffer": optimizer.state[matrix]["momentum_buffer"]}
        step_once(optimizer, 1)
        results.append(matrix.detach().clone())
    assert torch.equal(*results)
    whole, _, optimizer = matrix_vector_optimizer(compute_dtype=torch.float32)
    for step in range(2):
        step_once(optimizer, step)
    assert not torch.equal(whole, results[0])
    momentum = optimizer.state[whole]["momentum_buffer"]
    direction = torch.lerp(gradient_for(whole, 1), momentum, 0.95)
    expected = torch.cat([mm.orthogonalize(part, dtype=torch.float32) for part in direction.split(4)])
    start, _, _ = matrix_vector_optimizer()
    first = mm.orthogonalize(gradient_for(start, 0), dtype=torch.float32)
    scale, keep = 0.1 * mm.update_scale(8, 12, "match_rms_adamw"), 1 - 0.1 * 0.1
    by_hand = (start.detach() * keep - scale * first) * keep - 0.1 * mm.update_scale(
        4, 12, "match_rms_adamw"
    ) * expected
    assert torch.allclose(results[0], by_hand, atol=1e-5)


def test_a_group_that_is_added_later_says_its_algorithm() -> None:
    _, _, optimizer = matrix_vector_optimizer()
    embedding = nn.Embedding(10, 4)
    with pytest.raises(ValueError, match=r'found no "algorithm".*"muon" or "adamw".*split_params'):
        optimizer.add_param_group({"params": [embedding.weight]})
    assert len(optimizer.param_groups) == 2
    for algorithm in ({"algorithm": "adamw"}, {"use_muon": True}):
        optimizer.add_param_group({"params": [nn.Embedding(10, 4).weight], **algorithm})
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw", "adamw", "muon"]


def test_an_elementwise_layout_that_covers_an_element_twice_is_refused() -> None:
    vector, matrix = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4, 4))
    layout = FlatShards(MeshLayout.replicated((6,), (0,)), (((0, 4, 0), (2, 4, 4)),), (8,))
    groups = [
        {"params": [matrix], "param_names": ["matrix"]},
        {"params": [vector], "param_names": ["vector"], "algorithm": "adamw"},
    ]
    optimizer = mm.Muon(groups, layouts={"vector": layout})
    vector.grad, matrix.grad = torch.ones(8), torch.ones(4, 4)
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        with pytest.raises(mm.LayoutError, match="vector: found elements 4 to 2 held twice"):
            call()


# ------------------------------------------------------------------ keys and values of groups


TORCHS = ("maximize", "amsgrad", "foreach", "fused", "capturable", "differentiable")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, True, f"found {key}=True; needed False") for key in TORCHS),
        *((key, 1.0, "found the key") for key in ("moementum", "warmup_steps", "trust_ratio", 7)),
    ],
)
def test_switches_of_torch_and_keys_that_nobody_reads_are_refused(key: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mm.Muon([{"params": [nn.Parameter(torch.randn(4, 4))], key: value}])
    if key in TORCHS:
        assert mm.Muon([{"params": [nn.Parameter(torch.randn(4, 4))], key: False}]).param_groups[0][key] is False
    _, _, optimizer = matrix_vector_optimizer()
    step_once(optimizer, 0)
    half = optimizer.param_groups[key not in TORCHS]
    half[key] = value
    before = tensors_of(optimizer)
    with pytest.raises(ValueError, match=f"'{half['name']}': {message}"):
        step_once(optimizer, 1)
    assert same_bits(before, tensors_of(optimizer))


def test_a_framework_may_announce_its_keys() -> None:
    from muonmesh.settings import FOREIGN_KEYS

    with pytest.raises(ValueError, match=r"FOREIGN_KEYS.add\('layer_depth'\)"):
        mm.Muon([{"params": [nn.Parameter(torch.randn(4, 4))], "layer_depth": 3}])
    FOREIGN_KEYS.add("layer_depth")
    try:
        mm.Muon([{"params": [nn.Parameter(torch.randn(4, 4))], "layer_depth": 3}])
    finally:
        FOREIGN_KEYS.remove("layer_depth")


@pytest.mark.parametrize(
    ("weight", "master"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_masters_that_would_round_the_weight_are_refused(weight: torch.dtype, master: torch.dtype) -> None:
    for algorithm in ("muon", "adamw"):
        parameter = nn.Parameter(torch.randn(4, 4).to(weight))
        with pytest.raises(ValueError, match=f"group0.0: found dtype {weight} and master_dtype={master}"):
            mm.Muon([{"params": [parameter], "algorithm": algorithm}], master_dtype=master)


def test_a_weight_that_becomes_wider_than_its_master_is_refused() -> None:
    matrix, _, optimizer = matrix_vector_optimizer(master_dtype=torch.float32)
    step_once(optimizer, 0)
    matrix.data = matrix.data.double()
    matrix.grad = None
    with pytest.raises(ValueError, match=r"matrix: found dtype torch.float64 and master_dtype=torch.float32"):
        step_once(optimizer, 1)


# ------------------------------------------------------------------ state dicts


def test_an_empty_state_does_not_plan_and_keeps_no_parameter_alive() -> None:
    """Accelerate loads an empty state before FSDP2 replaces the parameters in the groups."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = mm.from_model(model, lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._runtime.planned is None
    weak_reference = weakref.ref(optimizer.param_groups[0]["params"][0])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(6, 6)) for _ in range(2)]
    del model
    gc.collect()
    assert weak_reference() is None


def test_saved_groups_list_no_parameters_but_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = mm.from_model(model, lr=0.1)
    step_once(optimizer, 0)
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        assert saved.keys() == group.keys()
        assert saved["param_names"] == group["param_names"]
        lists = [
            key for key, value in saved.items() if isinstance(value, list) and key not in ("params", "param_names")
        ]
        assert lists == []
        assert group["reasons"]
        assert group["algorithm"] == "adamw" or all(spec is not None for spec in group["matrices"])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    twin = mm.from_model(copy.deepcopy(model), lr=0.1)
    twin.load_state_dict(loaded)
    assert type(twin.param_groups[0]) is dict
    assert twin.param_groups[0]["matrices"] == optimizer.param_groups[0]["matrices"]
    assert twin.param_groups[0]["reasons"] == optimizer.param_groups[0]["reasons"]


class Deep(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4, bias=False) for i in layers})


def flattened(model: nn.Module, optimizer: mm.Muon) -> dict[str, Any]:
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    return dcp_state.get_optimizer_state_dict(model, optimizer, options=options)


def test_flattened_state_grows_with_the_number_of_parameters_alone() -> None:
    """torch's flattened form repeats a group's entries for each parameter."""
    sizes = []
    for count in (20, 40):
        model = Deep(range(count))
        flat_state = flattened(model, mm.from_model(model, lr=0.1))
        assert not [key for key, value in flat_state.items() if isinstance(value, list)]
        sizes.append(sum(len(pickle.dumps(v)) for v in flat_state.values() if not isinstance(v, Tensor)))
    assert sizes[1] < 2.2 * sizes[0]


def test_flattened_state_of_another_cut_into_stages_loads() -> None:
    """Saved by one stage of twelve layers, loaded by two of six; the same bits as going on."""
    torch.manual_seed(0)
    whole = Deep(range(12))
    optimizer = mm.from_model(whole, lr=0.1, overrides={".*": "muon"})
    step_once(optimizer, 0)
    saved = flattened(whole, optimizer)
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    stages = [Deep(range(6)), Deep(range(6, 12))]
    others = []
    for stage in stages:
        stage.load_state_dict({k: v for k, v in whole.state_dict().items() if k in stage.state_dict()})
        other = mm.from_model(stage, lr=0.3, overrides={".*": "muon"})
        stage_state = flattened(stage, other)
        dcp_state.set_optimizer_state_dict(stage, other, {key: saved[key] for key in stage_state}, options=options)
        assert other.param_groups[0]["lr"] == 0.1
        assert len(other.param_groups[0]["param_names"]) == len(other.param_groups[0]["matrices"]) == 6
        others.append(other)
    named = dict(whole.named_parameters())
    for stepped in (optimizer, *others):
        for group in stepped.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.grad = gradient_for(parameter, 100 + int(name.split(".")[1]))
        stepped.step()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, named[name]), name


def of_layers(layers: range, **settings: Any) -> tuple[Deep, mm.Muon]:
    torch.manual_seed(0)
    model = Deep(layers)
    return model, mm.from_model(model, lr=0.1, overrides={".*": "muon", **settings})


@pytest.mark.parametrize("flatten", [False, True])
def test_state_by_name_loads_where_a_weight_is_frozen_since(flatten: bool) -> None:
    """torch leaves its name in the saved group; the other weights go on with the same bits."""
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = of_layers(range(3))
    step_once(optimizer, 0)
    weights, saved = dcp_state.get_state_dict(model, optimizer, options=options)
    twin = copy.deepcopy(model)
    twin.layers["1"].requires_grad_(False)
    other = mm.from_model(twin, lr=0.3, overrides={".*": "muon"})
    dcp_state.set_state_dict(twin, other, model_state_dict=weights, optim_state_dict=saved, options=options)
    assert [group["param_names"] for group in other.param_groups] == [["layers.0.weight", "layers.2.weight"]]
    assert other.param_groups[0]["lr"] == 0.1
    for stepped, trained in ((model, optimizer), (twin, other)):
        for layer in ("0", "2"):
            weight = stepped.layers[layer].weight
            weight.grad = gradient_for(weight, int(layer))
        stepped.layers["1"].weight.grad = None
        trained.step()
    assert same_bits([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


def test_state_by_name_of_a_group_that_is_two_now() -> None:
    """torch gives the settings to one of the two, and would leave the other with its own; flattened, both have them."""
    model, optimizer = of_layers(range(3))
    step_once(optimizer, 0)
    saved, flat_state = dcp_state.get_optimizer_state_dict(model, optimizer), flattened(model, optimizer)
    twin, other = of_layers(range(3), **{"layers.1.weight": {"lr": 0.7}})
    names = [group["name"] for group in other.param_groups]
    with pytest.raises(mm.StateError, match=r"also has layers.0.weight, which is in another group here.*flatten"):
        dcp_state.set_optimizer_state_dict(twin, other, saved)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.7]
    assert not any(state["momentum_buffer"].any() for state in other.state.values())  # torch has created it
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    dcp_state.set_optimizer_state_dict(twin, other, flat_state, options=options)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]
    assert [group["name"] for group in other.param_groups] == names
    assert len(set(names)) == 2


def of_unfrozen(frozen: int) -> tuple[Deep, mm.Muon]:
    """Of four layers of one shape one is frozen."""
    torch.manual_seed(0)
    model = Deep(range(4))
    model.layers[str(frozen)].requires_grad_(False)
    return model, mm.from_model(model, lr=0.1, overrides={".*": "muon"})


@pytest.mark.parametrize(("saved", "unfrozen"), [(3, 0), (0, 3), (2, 1)])
def test_state_of_the_same_number_of_other_layers_is_refused(saved: int, unfrozen: int) -> None:
    """torch counts parameters: each layer would go on with the momentum of another one."""
    _, optimizer = of_unfrozen(saved)
    step_once(optimizer, 0)
    _, other = of_unfrozen(unfrozen)
    with pytest.raises(
        mm.StateError, match=r"found the state of layers\.\d\.weight in the place of layers\.\d\.weight"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_state_under_new_names_loads() -> None:
    """The model is inside of another one now."""
    _, optimizer = of_layers(range(3))
    step_once(optimizer, 0)
    model = nn.ModuleDict({"inner": Deep(range(3))})
    other = mm.from_model(model, lr=0.1, overrides={".*": "muon"})
    other.load_state_dict(optimizer.state_dict())
    momenta = [[state["momentum_buffer"] for state in each.state.values()] for each in (optimizer, other)]
    assert same_bits(*momenta)


@pytest.mark.parametrize("size", [1, 2])
def test_state_whose_names_a_framework_has_mixed_up_is_refused(size: int) -> None:
    """torch's `rekey_optim_state_dict`, which Lightning calls, takes groups for being in the order of the model."""
    apart = {f"layers.{n}.weight": {"lr": 0.3} for n in range(size)}
    model, optimizer = of_layers(range(4), **apart)
    step_once(optimizer, 0)
    mixed = FSDP.rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model)
    twin, other = of_layers(range(4), **apart)
    with pytest.raises(mm.StateError, match=r"found the state of layers\.\d\.weight in the place of.*its own checkp"):
        dcp_state.set_optimizer_state_dict(twin, other, mixed)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.3]


def in_state(number: int, key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Change an entry of the state of the matrix, 0, or of the vector."""

    def apply(saved: dict[str, Any]) -> None:
        saved["state"][number][key] = change(saved["state"][number].get(key))

    return apply


def of_torchs_muon(saved: dict[str, Any]) -> dict[str, Any]:
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = torch.optim.Muon([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.randn(4, 4)
    optimizer.step()
    return optimizer.state_dict()


NO_STATE = r"load_state_dict.*: found .*Write load_state_dict\(saved"
REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (in_state(0, "momentum_buffer", lambda t: t.fill_(float("nan"))), "infinity or NaN in momentum_buffer"),
    (
        in_state(0, "momentum_buffer", lambda t: t.index_fill_(0, torch.tensor(1), math.inf)),
        "infinity or NaN in momentum",
    ),
    (in_state(0, "momentum_buffer", lambda t: t.T), r"momentum_buffer a plain tensor of shape \(12, 8\)"),
    (in_state(0, "momentum_buffer", lambda t: t.tolist()), "momentum_buffer: found list"),
    (in_state(0, "second_momentum", lambda t: torch.zeros(8)), "'second_momentum' in its state"),
    (in_state(1, "exp_avg_sq", lambda t: -t), "a negative number in exp_avg_sq"),
    (in_state(1, "step", lambda t: t * float("nan")), "infinity or NaN in step"),
    (in_state(1, "step", lambda t: t.expand(2)), r"step a plain tensor of shape \(2,\)"),
    (in_state(1, "max_exp_avg_sq", lambda t: torch.zeros(5)), "'max_exp_avg_sq' in its state"),
    (lambda saved: saved["state"].update({7: saved["state"][0]}), "found state of 1 parameters that are in none"),
    (of_torchs_muon, r"another optimizer.*found the key 'eps'; needed 'adamw_eps'.*checkpoint\.convert\("),
    (lambda saved: {"model": {}, "optimizer": saved}, NO_STATE),
    (lambda saved: {"param_groups": saved["param_groups"]}, NO_STATE),
    (lambda saved: {**saved, "param_groups": [{"lr": 0.1}]}, NO_STATE),
    (lambda saved: {**saved, "state": []}, NO_STATE),
    (lambda saved: [saved], NO_STATE),
    (lambda saved: {"state": {}}, r"load_state_dict\['param_groups'\]: found nothing; needed a list"),
    (lambda saved: {"state": {}, "param_groups": []}, "found 0 groups"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_state_that_no_step_leaves_behind_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    _, _, optimizer = matrix_vector_optimizer()
    step_once(optimizer, 0)
    broken, before = copy.deepcopy(optimizer.state_dict()), tensors_of(optimizer)
    with pytest.raises(mm.StateError, match=message):
        optimizer.load_state_dict(change(broken) or broken)
    assert same_bits(before, tensors_of(optimizer))


# ------------------------------------------------------------------ wrappers


class Copying:
    """Does what Lightning's and Fabric's optimizers do: copy the attributes, and be of a class derived from ours."""

    def __new__(cls, optimizer: mm.Muon) -> Any:
        twin = object.__new__(type("LightningMuon", (mm.Muon,), {}))
        twin.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
        return twin


def test_what_is_said_through_a_copying_wrapper_reaches_the_optimizer() -> None:
    matrix, vector, optimizer = matrix_vector_optimizer()
    wrapper = Copying(optimizer)
    step_once(optimizer, 0)
    before = tensors_of(optimizer)
    matrix.grad, vector.grad = gradient_for(matrix, 1), gradient_for(vector, 1) * 1e6
    assert bool(wrapper.clip_grad_norm_(1.0, skip_above=50.0).skipped)
    optimizer.step()
    assert same_bits(before, tensors_of(optimizer))

    for step in range(12):
        matrix.grad, vector.grad = gradient_for(matrix, step), gradient_for(vector, step)
        wrapper.clip_grad_norm_(1.0, skip_above="4x")
        optimizer.step()
    optimizer.finish()
    assert [group["norm_means"][1] for group in optimizer.param_groups] == [(12, 12, 12)] * 2

    wrapper.metrics()
    step_once(optimizer, 30)
    assert "muon/update_rms" in optimizer.metrics()
    wrapper.process_group = "local"
    assert optimizer.process_group == "local"


# ------------------------------------------------------------------ parameters that learn nothing


def frozen_and_not() -> tuple[nn.Sequential, mm.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    model[1].requires_grad_(False)
    return model, mm.from_model(model, lr=1e-3)


def warnings_of_steps(optimizer: mm.Muon, model: nn.Module, count: int, unused: tuple[str, ...] = ()) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(count):
            for name, parameter in model.named_parameters():
                trained = parameter.requires_grad and name not in unused
                parameter.grad = gradient_for(parameter, step) if trained else None
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_a_parameter_without_gradient_for_many_steps_is_told_once_by_name() -> None:
    model, optimizer = frozen_and_not()
    assert warnings_of_steps(optimizer, model, 99, unused=("0.weight", "2.bias")) == []
    (message,) = warnings_of_steps(optimizer, model, 150, unused=("0.weight", "2.bias"))
    assert message.startswith("0.weight, 2.bias had no gradient in the last 100 steps")
    assert warnings_of_steps(optimizer, model, 5) == []
    assert warnings_of_steps(optimizer, model, 150, unused=("0.weight",)) == []  # told before


def test_a_parameter_that_is_used_now_and_then_is_not_told() -> None:
    model, optimizer = frozen_and_not()
    for _ in range(3):
        assert warnings_of_steps(optimizer, model, 90, unused=("0.weight",)) == []
        assert warnings_of_steps(optimizer, model, 1) == []


def test_an_optimizer_of_which_nothing_trains_says_so() -> None:
    """TRL with peft_config= and an optimizer made of the model before: it holds frozen weights alone."""
    model, optimizer = frozen_and_not()
    (message,) = warnings_of_steps(optimizer, model, 120, unused=tuple(dict(model.named_parameters())))
    assert "0.weight" in message
    assert "nothing else had one either" in message


def test_an_optimizer_that_holds_frozen_weights_alone_is_an_error_at_its_first_step() -> None:
    """As PEFT leaves the one that was made of the model before it had adapters."""
    model, optimizer = frozen_and_not()
    model.requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(mm.LayoutError, match=r"0.weight, .* and 1 more: All parameters .* frozen.* has its adapters"):
        warnings_of_steps(optimizer, model, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer = mm.from_model(model.requires_grad_(True), lr=1e-3)
    model[0].requires_grad_(False)  # not all of them: they may be unfrozen in turn
    assert warnings_of_steps(optimizer, model, 1) == []


def test_a_parameter_unfrozen_after_the_split_is_told_with_what_to_write() -> None:
    model, optimizer = frozen_and_not()
    assert warnings_of_steps(optimizer, model, 120) == []
    model[1].requires_grad_(True)
    (message,) = warnings_of_steps(optimizer, model, 300)
    assert message.startswith("1.weight, 1.bias were frozen when the optimizer was made")
    assert "add_param_group" in message


def test_parameters_that_train_in_the_place_of_others_are_told_at_once() -> None:
    """As PEFT's `set_adapter` switches: in a hundred steps nothing would learn."""
    model, optimizer = frozen_and_not()
    assert warnings_of_steps(optimizer, model, 3) == []
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    (message,) = warnings_of_steps(optimizer, model, 1)
    assert message.startswith("1.weight, 1.bias were frozen when the optimizer was made")
    assert warnings_of_steps(optimizer, model, 50) == []


def test_a_parameter_unfrozen_and_added_is_not_told() -> None:
    model, optimizer = frozen_and_not()
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": [("1.weight", model[1].weight)], "algorithm": "muon"})
    (message,) = warnings_of_steps(optimizer, model, 300)
    assert message.startswith("1.bias was frozen when the optimizer was made")


def untied(model: nn.Module) -> None:
    model.tied.weight = nn.Parameter(model[0].weight.detach().clone())


def with_layer(model: nn.Module) -> None:
    model.add_module("grown", nn.Linear(6, 6, bias=False))


def reparametrized(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def with_average(model: nn.Module) -> None:
    model.add_module("average", copy.deepcopy(model[0]))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (untied, "tied.weight was"),
        (with_layer, "grown.weight was"),
        (reparametrized, "0.parametrizations.weight.original0, 0.parametrizations.weight.original1 were"),
        (nn.utils.parametrizations.orthogonal, ""),  # trains the parameter that there was
        (with_average, ""),  # has no gradient
    ],
)
@pytest.mark.parametrize("steps", [0, 50])
def test_a_parameter_that_is_added_to_the_model_is_told_with_what_to_write(
    change: Callable[[nn.Module], Any], names: str, steps: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model.add_module("tied", nn.Linear(6, 6, bias=False))
    model.tied.weight = model[0].weight
    optimizer = mm.from_model(model, lr=1e-3, overrides={"0.weight": "muon"})
    messages = warnings_of_steps(optimizer, model, steps)
    change(model[0] if change is nn.utils.parametrizations.orthogonal else model)
    unused = ("average.weight", "average.bias")
    messages += warnings_of_steps(optimizer, model, 99, unused) + warnings_of_steps(optimizer, model, 150, unused)
    told = [message for message in messages if "no gradient in the last 100 steps" not in message]
    assert [message.partition(" added")[0] for message in told] == ([names] if names else [])
    assert all("since the optimizer was made" in message and "add_param_group" in message for message in told)


def test_no_matrices_at_all_is_told_at_construction() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match="Sequential: found 0 matrices for Muon among 3 trained parameters"):
        mm.from_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.from_model(model, overrides={".*": "adamw"})  # who says so knows it
        pickle.loads(pickle.dumps(mm.split_params(frozen_and_not()[0])))
