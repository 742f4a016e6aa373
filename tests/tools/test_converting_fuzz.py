"""checkpoint.convert of mutated state, of every package: each ends in one sentence, or in state that ours loads."""

from __future__ import annotations

import re
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
from tests.support.mutations import MANY, QUICK, mutate_value

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
"""What the groups of a package say."""


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


def shapes_of(state: dict[str, Any]) -> dict[Any, Any]:
    return {
        number: {key: tuple(value.shape) for key, value in entry.items()} for number, entry in state["state"].items()
    }


def outcome(make: Callable[[], dict[str, Any]], optimizer: mm.Muon, right: dict[str, Any]) -> str:
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
        result = outcome(lambda m=mutated, n=number: convert_it(m, n), optimizer, right)
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
