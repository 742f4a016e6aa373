"""checkpoint.convert of mutated state, of every package: each ends in one sentence, or in state that ours loads."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.checkpoint import convert
from muonmesh.errors import FileError, StateError
from muonmesh.tools.migration import PackageName
from tests.mutations import MANY, QUICK, mutate_value

MATRICES, REST = ("up.weight", "mid.weight"), ("embedding.weight", "up.bias", "head.weight")
SENTENCE = re.compile(r"[^\n]+: found [^\n]+; needed [^\n]+")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.up = nn.Linear(4, 6)
        self.mid = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)


MUON: dict[str, dict[str, Any]] = {
    "keller_jordan": {"use_muon": True, "momentum": 0.9},
    "dion": {"mu": 0.9, "algorithm": "muon", "step": 3},
    "deepspeed": {"use_muon": True, "ns_method": "gram", "momentum": 0.9},
    "emerging_optimizers": {"momentum": 0.9, "weight_decay_method": "decoupled"},
    "megatron": {"momentum": 0.9, "is_expert_parallel": False, "step": 3},
}
"""What the groups of a package say, by which it is known."""


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
    momentum, first, second = "momentum_buffer", "exp_avg", "exp_avg_sq"
    if package == "dion":
        momentum, first, second = "momentum", "momentum", "variance"
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate((*MATRICES, *REST)):
        value = torch.rand(named[name].shape)
        state[number] = {momentum: value} if name in MATRICES else {first: value, second: value + 1, "step": 3}
    if package == "dion":
        for number in (2, 3, 4):
            state[number]["step_dev"] = torch.tensor(3.0)
    adamw = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    marks = {key: value for key, value in MUON[package].items() if key != "momentum"}
    groups: list[dict[str, Any]] = [
        {"params": [0, 1], "lr": 0.02, "weight_decay": 0.1, **MUON[package]},
        {"params": [2, 3, 4], **adamw, **marks},
    ]
    if "use_muon" in marks:
        groups[1]["use_muon"] = False
    if package == "megatron":
        halves = [{"state": {n: state[n] for n in group["params"]}, "param_groups": [group]} for group in groups]
        return [{"optimizer": halves[0], "grad_scaler": {}}, halves[1]]
    return {"state": state, "param_groups": groups}


def of_rank(rank: int, stage: int, model: nn.Module) -> dict[str, Any]:
    """What DeepSpeed's ZeRO writes of its Muon on one of two ranks: flat tensors, of each parameter one half."""
    from deepspeed.utils.tensor_fragment import fragment_address

    named = dict(model.named_parameters())
    state: dict[int, dict[str, Any]] = {}
    pieces: list[dict[str, Any]] = []
    for number, names in enumerate((MATRICES, REST)):
        halves = {name: named[name].numel() // 2 for name in names}
        starts = {name: sum(list(halves.values())[:place]) for place, name in enumerate(names)}
        pieces.append({name: fragment_address(numel=halves[name], start=starts[name]) for name in names})
        value = torch.rand(sum(halves.values()) * (2 if stage < 3 and names is MATRICES else 1))
        adamw = {"step": 3, "exp_avg": value, "exp_avg_sq": value + 1}
        state[number] = {"momentum_buffer": value} if names is MATRICES else adamw
    groups: list[dict[str, Any]] = [
        {"params": [0], "lr": 0.02, "weight_decay": 0.1, **MUON["deepspeed"]},
        {"params": [1], "lr": 0.01, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "use_muon": False},
    ]
    kept = {"state": state, "param_groups": groups}
    if stage == 3:
        return {"optimizer_state_dict": {"optimizer_state_dict": kept, "fp32_flat_groups": [], "partition_count": 2}}
    written = {"base_optimizer_state": kept, "param_slice_mappings": pieces, "partition_count": [2, 2]}
    return {"optimizer_state_dict": written}


def zero_files(stage: int, model: nn.Module) -> dict[str, Any]:
    """The files of a folder of DeepSpeed's by name, for two ranks, in the form that it writes."""
    named = dict(model.named_parameters())
    files = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": of_rank(rank, stage, model) for rank in range(2)}
    first = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    shapes = [{name: named[name].shape for name in names} for names in (MATRICES, REST)]
    return {**files, f"{first}_model_states.pt": {"param_shapes": shapes}}


def written(files: dict[str, Any], folder: Path) -> Path:
    for name in files:
        torch.save(files[name], folder / str(name))
    return folder


def shapes_of(made: dict[str, Any]) -> dict[Any, Any]:
    return {
        number: {key: tuple(value.shape) for key, value in entry.items()} for number, entry in made["state"].items()
    }


def outcome(make: Callable[[], dict[str, Any]], ours: mm.Muon, right: dict[str, Any]) -> str:
    """How it ended; what was made must have the form of what is right, and must load."""
    try:
        made = make()
    except (StateError, FileError, TypeError, ValueError) as error:
        known = type(error) in (StateError, FileError, TypeError, ValueError)
        return "refused" if known and SENTENCE.fullmatch(str(error)) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if shapes_of(made) != shapes_of(right) or not all(
        isinstance(value, Tensor) for entry in made["state"].values() for value in entry.values()
    ):
        return "another form"
    ours.load_state_dict(made)
    return "loaded"


def walk(saved: Any, count: int, ours: mm.Muon, convert_it: Callable[[Any, int], dict[str, Any]]) -> None:
    """Convert what was saved, and so many mutations of it."""
    right = convert_it(saved, 1)
    ours.load_state_dict(right)
    made, bad = Counter[str](), []
    for number in range(count):
        mutated, what = mutate_value(saved, number)
        found = outcome(lambda m=mutated, n=number: convert_it(m, n), ours, right)
        made[found if found in ("refused", "loaded") else "bad"] += 1
        if found not in ("refused", "loaded"):
            bad.append(f"{number} ({what}): {found}")
    print(f"{count} mutations of seeds 0 to {count - 1}: {dict(made)}")
    assert not bad, "\n".join(bad)
    assert made["refused"] > count // 4


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("package", get_args(PackageName))
def test_mutated_state_ends_in_one_sentence_or_loads(package: PackageName, count: int, tmp_path: Path) -> None:
    model = Net()
    ours = mm.from_model(model)
    params = None if package in ("torch", "adamw") else [MATRICES, REST]

    def convert_it(given: Any, number: int) -> dict[str, Any]:
        if number % 4 == 0:
            torch.save(given, tmp_path / "state.pt")
            given = tmp_path / "state.pt"
        return convert(given, ours, package=package if number % 3 else None, params=params)

    walk(saved_by(package, model), count, ours, convert_it)


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("stage", [2, 3])
def test_mutated_files_of_zero_end_in_one_sentence_or_load(stage: int, count: int, tmp_path: Path) -> None:
    """The values in the files; `test_archive_fuzz` mutates bytes."""
    model = Net()
    ours = mm.from_model(model)

    def convert_it(files: Any, number: int) -> dict[str, Any]:
        folder = tmp_path / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return convert(written(files, folder), ours)

    walk(zero_files(stage, model), count, ours, convert_it)
