"""checkpoint.convert: the next step from another optimizer's state is the one that it would have taken.

torch's own Muon and AdamW run here, and so does DeepSpeed's Muon without its engine; the steps of other packages are
restated in fp64 in `tests/support/peers.py`. The packages themselves run in `tests/hosts/test_migrating.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import muonmesh as mm
from muonmesh.checkpoint import convert
from muonmesh.errors import FileError, StateError
from muonmesh.tools.migration import PackageName
from tests.support import peers, problem
from tests.support.mutations import MANY, QUICK, mutate_value
from tests.support.peers import ADAMW, KELLER_JORDAN, MATRICES, REST, Net
from tests.support.tensors import random_fp64
from tests.support.workers import Pool

COVERS = ("tools.checkpoints.conversion.convert", "tools.checkpoints.named_groups.in_saved_order")

EXACT: dict[str, Any] = {"compute_dtype": torch.float64, "state_dtype": torch.float64}


def give_fp64(model: nn.Module, seed: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = random_fp64(*parameter.shape, seed=100 * seed + number).to(parameter.dtype)


def apart_after_steps(model: nn.Module, source: nn.Module, start: dict[str, Tensor]) -> dict[str, float]:
    """The distance of two ends, relative to the way from the start."""
    end = {name: parameter.detach() for name, parameter in source.named_parameters()}
    return {
        name: float((weight.detach() - end[name]).norm() / (end[name] - start[name]).norm())
        for name, weight in model.named_parameters()
    }


def named_state(model: nn.Module, names: tuple[str, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if name in names]


def copied_net(model: nn.Module) -> Any:
    fresh = Net(next(model.parameters()).dtype)
    fresh.load_state_dict(model.state_dict())
    return fresh


# ------------------------------------------------------------------ torch itself


def torch_pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(named_state(model, MATRICES), lr=0.02, momentum=0.8, weight_decay=0.1)
    return [muon, torch.optim.AdamW(named_state(model, REST), lr=0.003, betas=(0.8, 0.9), weight_decay=0.0)]


@pytest.mark.parametrize("how", ["optimizers", "state dicts", "files"])
def test_torch_s_muon_and_adamw_go_on_here(how: str, tmp_path: Path) -> None:
    """In bf16, in which torch's Muon computes; without the state the next step would end half a step elsewhere."""
    source = Net(torch.float32)
    optimizers = torch_pair(source)
    for seed in range(3):
        give_fp64(source, seed)
        for optimizer in optimizers:
            optimizer.step()
    model = copied_net(source)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    muon = mm.from_model(model, **mm.convert_settings(*optimizers))
    sources: list[Any] = [*optimizers] if how == "optimizers" else [half.state_dict() for half in optimizers]
    if how == "files":
        for number, state in enumerate(sources):
            torch.save(state, tmp_path / f"{number}.pt")
        sources = [tmp_path / f"{number}.pt" for number in range(2)]
    muon.load_state_dict(convert(sources, muon, package=None if how == "optimizers" else "torch"))
    for network in (model, source):
        give_fp64(network, 3)
    for optimizer in (muon, *optimizers):
        optimizer.step()
    differences = apart_after_steps(model, source, start)
    assert [differences[name] for name in REST] == [0.0] * 4  # AdamW's half is torch's own, bit for bit
    assert max(differences[name] for name in MATRICES) < 0.03, differences


# ------------------------------------------------------------------ the others, by their formulas

Walk = tuple[str, Callable[..., peers.Step], dict[str, Any]]
DION = {"lr": 0.02, "mu": 0.9, "weight_decay": 0.1, "nesterov": True, "adjust_lr": "rms_norm", "cautious_wd": False}
EMERGING = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "coefficient_type": "quintic"}
EMERGING |= {"num_ns_steps": 5, "scale_mode": "spectral", "extra_scale_factor": 0.2}
PEERS: dict[str, Walk] = {
    "keller_jordan": ("keller_jordan", peers.keller_jordan, KELLER_JORDAN),
    "dion": ("dion", peers.dion, {**DION, "use_polar_express": True}),
    "emerging_optimizers": ("emerging_optimizers", peers.emerging_optimizers, EMERGING),
    "megatron": ("emerging_optimizers", peers.emerging_optimizers, EMERGING),
}


@pytest.mark.parametrize("name", PEERS)
def test_the_next_step_is_theirs(name: str) -> None:
    """Three steps by their formulas in fp64, their state as they save it, and one more step by each."""
    package, peer, settings = PEERS[name]
    source = Net(torch.float64)
    ends = {key: parameter.detach().clone() for key, parameter in source.named_parameters()}
    memories: dict[str, dict[str, Any]] = {key: {} for key in ends}
    steps = {key: peer(**settings) if key in MATRICES else peers.adam_half(**ADAMW) for key in ends}

    def walk(seed: int) -> None:
        give_fp64(source, seed)
        for key, parameter in source.named_parameters():
            ends[key] = steps[key](ends[key], parameter.grad, memories[key])

    for seed in range(3):
        walk(seed)
    adamws = [memories[key]["adamw"] for key in REST]
    momenta = [memories[key]["m"] for key in MATRICES]
    saved = peers.saved_state(name, momenta, [(memory["exp_avg"], memory["exp_avg_sq"]) for memory in adamws])
    model = Net(torch.float64)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(ends[key])
    start = {key: value.clone() for key, value in ends.items()}
    rules = mm.convert_settings(package, **settings)  # type: ignore[arg-type]
    rest = mm.convert_settings("adamw", **{**ADAMW})
    muon = mm.from_model(model, **{**rules, "adamw": rest}, **EXACT)
    muon.load_state_dict(convert(saved, muon, package=package, params=[MATRICES, REST]))  # type: ignore[arg-type]
    walk(3)
    give_fp64(model, 3)
    muon.step()
    with torch.no_grad():
        for key, parameter in source.named_parameters():
            parameter.copy_(ends[key])
    assert max(apart_after_steps(model, source, start).values()) < 1e-5


# ------------------------------------------------------------------ names, order, ranks


def jordan_state(model: nn.Module, order: Sequence[str], stored: Sequence[str]) -> dict[str, Any]:
    """What one rank of KellerJordan's distributed MuonWithAuxAdam saves: the momentum of some matrices."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    momenta = [random_fp64(*shapes[name], seed=7 + MATRICES.index(name)) for name in order]
    moments = [(random_fp64(*shapes[name]), random_fp64(*shapes[name]).abs()) for name in REST]
    saved: dict[str, Any] = peers.saved_state("keller_jordan", momenta, moments)
    for number, name in enumerate(order):
        if name not in stored:
            del saved["state"][number]
    return saved


def test_the_ranks_of_keller_jordan_s_muon_each_have_some_and_sort_by_shape() -> None:
    model = Net(torch.float64)
    muon = mm.from_model(model, **EXACT)
    ordered = ["mid.weight", "up.weight"]  # by shape, the largest first; the model has them the other way round
    ranks = [jordan_state(model, ordered, [name]) for name in ordered]
    muon.load_state_dict(convert(ranks, muon, package="keller_jordan", params=[MATRICES, REST]))
    for name, parameter in model.named_parameters():
        if name in MATRICES:
            assert torch.equal(
                muon.state[parameter]["momentum_buffer"], random_fp64(*parameter.shape, seed=7 + MATRICES.index(name))
            )
    with pytest.raises(
        mm.StateError, match=r"up\.weight: found no state of it in the source; needed .*, and the files of all ranks"
    ):
        convert(ranks[:1], muon, package="keller_jordan", params=[MATRICES, REST])


LAYERS = {"a": (6, 8), "b": (6, 8), "c": (12, 8), "d": (6, 8)}


class Layers(nn.Module):
    """Matrices of two shapes: sorted by shape, the third comes first, and all but the last move."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in LAYERS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def jordan_files(count: int) -> list[dict[str, Any]]:
    """Return what each rank of KellerJordan's distributed Muon saves: matrix i is with rank i modulo ``count``."""
    momenta = {name: torch.full(shape, number + 1.0) for number, (name, shape) in enumerate(LAYERS.items())}
    in_order = [momenta[name] for name in ("c", "a", "b", "d")]
    groups = [{"params": [0, 1, 2, 3], "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}]
    states = [{i: {"momentum_buffer": in_order[i]} for i in range(rank, 4, count)} for rank in range(count)]
    return [{"state": state, "param_groups": groups} for state in states]


def converted_layers(
    files: list[dict[str, Any]], *, strict: bool = True, package: PackageName = "keller_jordan"
) -> Any:
    optimizer = mm.Muon(list(Layers().named_parameters()))
    state = convert(files, optimizer, package=package, params=[[*LAYERS]], strict=strict)["state"]
    return [float(state[number]["momentum_buffer"].mean()) if number in state else None for number in range(4)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_ranks_together_tell_that_matrices_are_sorted(count: int) -> None:
    """One file alone may fit the order of the model as well: that of rank 1 has one small matrix of several."""
    assert converted_layers(jordan_files(count)) == [1.0, 2.0, 3.0, 4.0]
    assert converted_layers(jordan_files(count), strict=False) == [1.0, 2.0, 3.0, 4.0]


def test_files_that_do_not_tell_the_order_are_refused() -> None:
    with pytest.raises(
        mm.StateError, match=r"b: found state that fits the given order and that of sorted shapes; needed"
    ):
        converted_layers(jordan_files(4)[1:2], strict=False)


def test_only_optimizers_that_sort_are_sorted() -> None:
    """Sorting would make shapes fit that are those of other matrices."""
    files = jordan_files(1)
    files[0]["param_groups"] = [
        {**torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults, "params": [0, 1, 2, 3]}
    ]
    with pytest.raises(mm.StateError, match=r"a: found momentum_buffer of shape \(12, 8\); needed \(6, 8\)"):
        converted_layers(files, package="torch")


def test_names_of_a_live_optimizer_are_those_of_its_tensors() -> None:
    """``params`` in another order does not count: an optimizer may have sorted its matrices."""
    model = Layers()
    named = dict(model.named_parameters())
    muon = torch.optim.Muon([named[name] for name in ("c", "b", "a", "d")])
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    muon.step()
    state = convert(muon, mm.Muon(list(named.items())), params=[[*LAYERS]])["state"]
    expected = [float(muon.state[parameter]["momentum_buffer"].mean()) for parameter in model.parameters()]
    assert [float(state[number]["momentum_buffer"].mean()) for number in range(4)] == expected
    assert len({*expected}) == 4


def test_sources_that_disagree_are_refused() -> None:
    """Files of two steps; the first one would have won."""
    files = jordan_files(2)
    later = {**files[0], "state": {0: {"momentum_buffer": files[0]["state"][0]["momentum_buffer"] + 1}}}
    with pytest.raises(mm.StateError, match=r"c: found different states in two sources; needed one state of it"):
        converted_layers([*files, later])
    assert converted_layers([*files, files[0]]) == [1.0, 2.0, 3.0, 4.0]

    model = Net()
    states = []
    for steps in (1, 2):
        adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(steps):
            adamw.step()
        states.append(adamw.state_dict())
    everything = mm.from_model(model, overrides={".*": "adamw"})
    with pytest.raises(mm.StateError, match="found different states in two sources"):
        convert(states, everything, package="torch")


def test_a_name_twice_is_refused() -> None:
    muon = mm.Muon(list(Layers().named_parameters()))
    with pytest.raises(mm.StateError, match=r"a: found its name 2 times among those of one source"):
        convert(jordan_files(1), muon, package="keller_jordan", params=[["a", "a", "c", "d"]], strict=False)


def test_state_by_name_of_torch_s_own_function() -> None:
    """`get_optimizer_state_dict` writes names where `state_dict` writes numbers."""
    model = Net()
    muon = torch.optim.Muon([parameter for _, parameter in named_state(model, MATRICES)])
    adamw = torch.optim.AdamW([parameter for _, parameter in named_state(model, REST)])
    give_fp64(model, 1)
    muon.step()
    adamw.step()
    optimizer = mm.from_model(model)
    by_name = convert(get_optimizer_state_dict(model, [muon, adamw]), optimizer, package="torch")
    live = convert([muon, adamw], optimizer)
    assert by_name["param_groups"] == live["param_groups"]
    for number, entry in live["state"].items():
        assert all(torch.equal(value, by_name["state"][number][key]) for key, value in entry.items())


def test_matrices_of_dion_s_lion_begin_anew() -> None:
    """Lion's momentum has the key of Muon's, and is an average where Muon's is a sum."""
    model = Net()
    muon = mm.from_model(model)
    saved: Any = peers.saved_state("dion", [torch.ones(20, 12), torch.ones(20, 20)], [])
    saved["param_groups"][0]["algorithm"] = "lion"
    arguments: Any = {"package": "dion", "params": [MATRICES, []]}
    with pytest.raises(
        mm.StateError, match=r"up\.weight: found the state of lion; needed that of muon.* strict=False\)$"
    ):
        convert(saved, muon, **arguments)
    assert convert(saved, muon, **arguments, strict=False)["state"] == {}


OLD_JORDAN = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
"""A group of KellerJordan's Muon of 2024, which sums gradients."""
OTHER_MUONS: list[tuple[PackageName, dict[str, Any], str]] = [
    ("torch", OLD_JORDAN, "no setting 'ns_coefficients'"),
    ("torch", {**torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults, "algo": "muon"}, "the setting 'algo'"),
    ("emerging_optimizers", OLD_JORDAN, "the setting 'nesterov'"),
    ("megatron", {**KELLER_JORDAN, "dampening": 0}, "the setting 'dampening'"),
    ("keller_jordan", {**KELLER_JORDAN, "qk_clip_alpha": 0.5}, "the setting 'qk_clip_alpha'"),
    ("dion", {"mu": 0.9, "lr": 0.01, "fraction": 0.25}, "the setting 'fraction'"),
]


@pytest.mark.parametrize(("package", "group", "fault"), OTHER_MUONS)
def test_groups_of_other_muons_are_refused(package: PackageName, group: dict[str, Any], fault: str) -> None:
    """Some of them sum gradients: read as an average, a sum would outweigh the next gradients 20 times."""
    key = "momentum" if package == "dion" else "momentum_buffer"
    saved = {
        "state": {n: {key: torch.ones(4, 4)} for n in range(4)},
        "param_groups": [{**group, "params": [0, 1, 2, 3]}],
    }
    with pytest.raises(
        mm.StateError, match=rf"source: found {fault} in a group; needed groups as {package} makes them"
    ):
        converted_layers([saved], package=package)


def test_what_the_source_lacks_begins_anew_if_asked() -> None:
    """AdamW trained the whole model, or only Muon's state was kept."""
    model = Net(torch.float64)
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    muon = mm.from_model(model, **EXACT)
    with pytest.raises(mm.StateError, match=r"found the state of adamw; .* begin with new state there, write convert"):
        convert(adamw, muon)
    muon.load_state_dict(convert(adamw, muon, strict=False))
    named = dict(model.named_parameters())
    assert all(not muon.state.get(named[name]) for name in MATRICES)
    assert all(torch.equal(muon.state[named[name]]["exp_avg"], adamw.state[named[name]]["exp_avg"]) for name in REST)

    other = mm.from_model(model, **EXACT)
    half = jordan_state(model, MATRICES, MATRICES)
    for number in (2, 3, 4, 5):
        del half["state"][number]
    other.load_state_dict(convert(half, other, package="keller_jordan", params=[MATRICES, REST], strict=False))
    assert all("momentum_buffer" in other.state[named[name]] for name in MATRICES)
    assert all(not other.state.get(named[name]) for name in REST)
    other.step()


@pytest.mark.parametrize("how", ["live", "names", "numbers"])
def test_frozen_parameters_without_state_are_left_out(how: str) -> None:
    """AdamW got all parameters of the model."""
    model = Net()
    model.up.weight.requires_grad_(requires_grad=False)
    order = [name for name, _ in model.named_parameters()]
    adamw = torch.optim.AdamW(model.named_parameters() if how == "names" else model.parameters(), lr=1e-3)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name != "up.weight" else None
    adamw.step()
    muon = mm.from_model(model)
    source: Any = adamw if how == "live" else adamw.state_dict()
    state = convert(source, muon, package="adamw", params=[order] if how == "numbers" else None, strict=False)
    muon.load_state_dict(state)
    named = dict(model.named_parameters())
    assert all(torch.equal(muon.state[named[name]]["exp_avg"], adamw.state[named[name]]["exp_avg"]) for name in REST)
    assert not muon.state.get(named["mid.weight"])


class Program:
    """What a hostile file would run; here a call without harm that would be seen."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def fine_conversion(model: nn.Module) -> dict[str, Any]:
    return jordan_state(model, MATRICES, MATRICES)


Spoil = Callable[[dict[str, Any]], Any]
REFUSED: dict[str, tuple[Spoil, str]] = {
    "another shape": (
        lambda s: s["state"][1].update(momentum_buffer=random_fp64(3, 4)),
        r"mid\.weight: found momentum_buffer of shape \(3, 4\); needed \(20, 20\)",
    ),
    "another rule": (
        lambda s: s["state"][0].update(second_moment=random_fp64(20)),
        r"up\.weight: found 'second_moment' in its state, which belongs to another rule; needed momentum_buffer",
    ),
    "amsgrad": (lambda s: s["state"][2].update(max_exp_avg_sq=random_fp64(10, 12)), "'max_exp_avg_sq'"),
    "no moments": (
        lambda s: s["state"][2].pop("exp_avg"),
        r"embedding\.weight: found state 'exp_avg_sq' \(torch\.float64\), 'step' \(int\)",
    ),
    "no arithmetic": (
        lambda s: s["state"][0].update(momentum_buffer=s["state"][0]["momentum_buffer"].to(torch.float8_e4m3fn)),
        r"up\.weight: found state 'momentum_buffer' \(torch\.float8_e4m3fn\); needed .*torch\.float32.*\.float\(\)",
    ),
    "nothing": (lambda s: s.clear(), r"source: found an empty dict; needed what an optimizer's state_dict"),
    "no count": (lambda s: s["state"][3].pop("step"), r"up\.bias: found no count of AdamW's steps; needed 'step'"),
    "state of nobody": (lambda s: s["state"].update({9: {"step": 1}}), r"found state of 1 parameters that are in none"),
    "no state": (lambda s: s["state"].clear(), r"up\.weight: found no state of it"),
    "half of the model": (
        lambda s: [s["param_groups"].pop(), [s["state"].pop(n) for n in (2, 3, 4, 5)]],
        r"params: found parameters for 2 groups; needed those of 1 groups",
    ),
    "an older Muon, which sums gradients": (
        lambda s: s["param_groups"][0].update(nesterov=True, ns_steps=5),
        r"source: found the setting 'nesterov' in a group; needed groups as keller_jordan makes them",
    ),
    "not a state dict": (
        lambda s: s.pop("param_groups"),
        r"source: found state; needed what an optimizer's state_dict",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_does_not_fit_is_refused(how: str) -> None:
    spoil, message = REFUSED[how]
    model = Net(torch.float64)
    saved = fine_conversion(model)
    spoil(saved)
    with pytest.raises((mm.StateError, ValueError), match=message):
        convert(saved, mm.from_model(model), package="keller_jordan", params=[MATRICES, REST])


def test_the_way_it_was_asked_for_is_refused(tmp_path: Path) -> None:
    model = Net(torch.float64)
    muon, saved = mm.from_model(model), fine_conversion(model)
    jordan: Any = {"package": "keller_jordan"}
    with pytest.raises(
        mm.StateError, match=r"that have numbers instead of names; needed their names.*Write params=\[\.\.\.\]"
    ):
        convert(saved, muon, **jordan)
    with pytest.raises(mm.StateError, match=r"needed parameters of this model, not mid\.wait"):
        convert(saved, muon, params=[("up.weight", "mid.wait"), REST], **jordan)
    with pytest.raises(mm.StateError, match=r"embedding\.weight: found the state of adamw; needed that of muon"):
        convert(saved, mm.from_model(model, overrides={"embedding.weight": "muon"}), params=[MATRICES, REST], **jordan)
    with pytest.raises(mm.StateError, match=r"rule 'normuon', which keeps .*; needed momentum alone"):
        convert(saved, mm.from_model(model, rule="normuon"), params=[MATRICES, REST], **jordan)
    with pytest.raises(TypeError, match=r"optimizer: found a AdamW; needed a muonmesh\.Muon"):
        convert(saved, torch.optim.AdamW(model.parameters()), params=[MATRICES, REST])
    with pytest.raises(ValueError, match=r"found no package, .*; needed one of 'adamw', .*State of muonmesh"):
        convert(muon.state_dict() | {"state": {}}, muon)
    with pytest.raises(TypeError, match=r"nothing to convert: write optimizer\.load_state_dict\(source\.state_dict"):
        convert(muon, muon)
    torch.save({"muon": saved, "adamw": saved}, tmp_path / "both.pt")
    with pytest.raises(
        mm.StateError, match=r"both\.pt: found muon, adamw; needed .* convert\(\[saved\[key\], \.\.\.\]"
    ):
        convert(tmp_path / "both.pt", muon, **jordan)
    with pytest.raises(ValueError, match=r"package: found 'lion'; needed one of 'adamw'"):
        convert(saved, muon, package="lion")  # type: ignore[arg-type]
    torch.save({**saved, "extra": Program()}, tmp_path / "hostile.pt")
    for path, message in (
        (tmp_path / "hostile.pt", "more than data"),
        (tmp_path / "none.pt", "found nothing there"),
        (tmp_path, "fold"),
    ):
        with pytest.raises(mm.errors.FileError, match=message):
            convert(path, muon, params=[MATRICES, REST], **jordan)
    assert not (tmp_path / "touched").exists()
    assert not Path("touched").exists()


# ------------------------------------------------------------------ shards


class Sharded(nn.Module):
    """Two ranks cut each parameter, one of them unevenly: torch's Muon takes even shards only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(8, 5)


def give_cut(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = problem.placed_like(parameter, torch.randn(parameter.shape, generator=generator))


def torchs_pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    rest = [(name, p) for name, p in model.named_parameters() if name != "up.weight"]
    muon = torch.optim.Muon([("up.weight", model.get_parameter("up.weight"))], lr=0.02, weight_decay=0.1)
    return [muon, torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0)]


def converted(live: bool) -> list[str]:
    """The names of what is not bit for bit as in one process, after a step from converted state."""
    single, sharded = Sharded(), Sharded()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    ends = []
    pairs = {id(model): torchs_pair(model) for model in (single, sharded)}
    for model in (single, sharded):
        for seed in range(2):
            give_cut(model, seed)
            for optimizer in pairs[id(model)]:
                optimizer.step()
    with torch.no_grad():  # sharded sums round otherwise: the weights and the state of one process for both
        for name, parameter in single.named_parameters():
            cut = sharded.get_parameter(name)
            cut.copy_(problem.placed_like(cut, parameter.detach()))
    for model in (single, sharded):
        settings = mm.convert_settings(*pairs[id(model)])
        muon = mm.from_model(model, **settings, process_group="local", compute_dtype=torch.float32)
        if live and model is sharded:
            state = convert(pairs[id(sharded)], muon)
            assert all(isinstance(e["exp_avg"], DTensor) for e in state["state"].values() if "exp_avg" in e)
        else:
            state = convert([optimizer.state_dict() for optimizer in pairs[id(single)]], muon, package="torch")
        muon.load_state_dict(state)
        give_cut(model, 2)
        muon.step()
        ends.append({name: problem.whole(parameter) for name, parameter in model.named_parameters()})
    return [name for name, end in ends[0].items() if not torch.equal(end, ends[1][name])]


def test_shards_go_on_with_the_bits_of_one_process(workers: Callable[[int], Pool]) -> None:
    assert workers(2).run(converted, True) == [[], []]
    assert workers(2).run(converted, False) == [[], []]


# ------------------------------------------------------------------ mutated state


SENTENCE = re.compile(r"[^\n]+: found [^\n]+; needed [^\n]+")


def saved_by(package: str, model: nn.Module) -> Any:
    """What a package saves after three steps: torch's two by stepping, the others in their form."""
    named = dict(model.named_parameters())
    if package in ("torch", "adamw"):
        muon = torch.optim.Muon([(name, named[name]) for name in MATRICES], lr=0.02)
        rest = torch.optim.AdamW([(name, named[name]) for name in REST], lr=0.01)
        for seed in range(3):
            for parameter in named.values():
                parameter.grad = torch.full_like(parameter, 0.1 + seed)
            muon.step()
            rest.step()
        states = [muon.state_dict(), rest.state_dict()]
        return states if package == "torch" else states[::-1]
    values = {name: torch.rand(named[name].shape) for name in (*MATRICES, *REST)}
    moments = [(values[name], values[name] + 1) for name in REST]
    return peers.saved_state(package, [values[name] for name in MATRICES], moments)


def shapes_of(state: dict[str, Any]) -> dict[Any, Any]:
    return {
        number: {key: tuple(value.shape) for key, value in entry.items()} for number, entry in state["state"].items()
    }


def outcome_of_conversion(make: Callable[[], dict[str, Any]], optimizer: mm.Muon, right: dict[str, Any]) -> str:
    """How it ended; what was made must have the form of what is right, and must load."""
    try:
        converted = make()
    except (StateError, FileError, TypeError, ValueError) as error:
        expected = type(error) in (StateError, FileError, TypeError, ValueError)
        return "refused" if expected and SENTENCE.fullmatch(str(error)) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if shapes_of(converted) != shapes_of(right) or not all(
        isinstance(value, Tensor) for entry in converted["state"].values() for value in entry.values()
    ):
        return "another form"
    optimizer.load_state_dict(converted)
    return "loaded"


def walk(saved: Any, count: int, optimizer: mm.Muon, convert_it: Callable[[Any, int], dict[str, Any]]) -> None:
    """Convert what was saved, and so many mutations of it."""
    right = convert_it(saved, 1)
    optimizer.load_state_dict(right)
    outcomes, bad = Counter[str](), []
    for number in range(count):
        mutated, mutation = mutate_value(saved, number)
        result = outcome_of_conversion(lambda m=mutated, n=number: convert_it(m, n), optimizer, right)
        outcomes[result if result in ("refused", "loaded") else "bad"] += 1
        if result not in ("refused", "loaded"):
            bad.append(f"{number} ({mutation}): {result}")
    print(f"{count} mutations of seeds 0 to {count - 1}: {dict(outcomes)}")
    assert not bad, "\n".join(bad)
    assert outcomes["refused"] > count // 4


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("package", get_args(PackageName))
def test_mutated_state_ends_in_one_sentence_or_loads(package: PackageName, count: int, tmp_path: Path) -> None:
    model = Net()
    optimizer = mm.from_model(model)
    params = None if package in ("torch", "adamw") else [MATRICES, REST]

    def convert_it(source: Any, number: int) -> dict[str, Any]:
        if number % 4 == 0:
            torch.save(source, tmp_path / "state.pt")
            source = tmp_path / "state.pt"
        return convert(source, optimizer, package=package, params=params)

    walk(saved_by(package, model), count, optimizer, convert_it)
