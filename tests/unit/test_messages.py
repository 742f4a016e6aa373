"""Messages: they name what the user wrote, and all of them are made in one place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm

WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    *(("ns_coefficients", value, {}) for value in ("polarexpress", [], [(1.0,)], [(float("nan"), 1.0)], 3, [3, 4])),
    *(("ns_steps", value, {}) for value in (0, -1, 2.5, True, "five")),
    *(("ns_method", value, {}) for value in ("fast", 3)),
    ("ns_method", "gram", {"ns_coefficients": [(-1.0, 2.0)]}),  # known only when the polynomials are looked at
    *(("scale_mode", value, {}) for value in ("frob", 3)),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 5)


def fine(**settings: Any) -> mm.Muon:
    optimizer = mm.from_model(Net(), **settings)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return optimizer


def constructor(wrong: dict[str, Any]) -> None:
    mm.Muon([nn.Parameter(torch.ones(4, 6))], **wrong)


def model(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), **wrong)


def group(wrong: dict[str, Any]) -> None:
    mm.Muon([{"params": [nn.Parameter(torch.ones(4, 6))], **wrong}])


def half(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), muon=wrong)


def override(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), overrides={"blocks": wrong})


def added(wrong: dict[str, Any]) -> None:
    fine().add_param_group({"params": [nn.Parameter(torch.ones(4, 6))], "algorithm": "muon", **wrong})


def later(call: Callable[[mm.Muon], Any]) -> Callable[[dict[str, Any]], None]:
    def path(wrong: dict[str, Any]) -> None:
        optimizer = fine()
        optimizer.step()
        optimizer.param_groups[0].update(wrong)
        call(optimizer)

    return path


def loaded(wrong: dict[str, Any]) -> None:
    optimizer = fine()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0].update(wrong)
    optimizer.load_state_dict(state)
    optimizer.step()


PATHS: dict[str, Callable[[dict[str, Any]], None]] = {
    "constructor": constructor,
    "from_model": model,
    "group": group,
    "muon=": half,
    "overrides=": override,
    "add_param_group": added,
    "step": later(lambda optimizer: optimizer.step()),
    "clip_grad_norm_": later(lambda optimizer: optimizer.clip_grad_norm_(1.0)),
    "metrics": later(lambda optimizer: optimizer.metrics()),
    "explain": later(lambda optimizer: optimizer.explain()),
    "load_state_dict": loaded,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("key", "value", "beside"), WRONG, ids=str)
def test_messages_name_the_key_that_was_written(path: str, key: str, value: Any, beside: dict[str, Any]) -> None:
    """Not the argument of the function below that found it, which nobody reads in a group."""
    with pytest.raises((ValueError, TypeError, mm.StateError)) as raised:
        PATHS[path]({**beside, key: value})
    message = str(raised.value)
    assert re.search(rf"\b{key}: found ", message), message
    assert not re.search(r"(?<!\w)(coefficients|steps|method|mode)\s*[=:]", message), message
    assert "; needed " in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("mode", "scale_mode"),
        ("coefficients", "ns_coefficients"),
        ("steps", "ns_steps"),
        ("method", "ns_method"),
        ("ns_step", "ns_steps"),
        ("momentun", "momentum"),
        ("betas", "adamw_betas"),
    ],
)
@pytest.mark.parametrize("path", ["group", "muon=", "overrides=", "add_param_group", "step", "explain"])
def test_an_unknown_key_raises_with_the_nearest_known_one(path: str, key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"found the key '{key}'; needed '{meant}'\. Rename it$"):
        PATHS[path]({key: 1})


def test_orthogonalize_names_its_own_arguments() -> None:
    x = torch.ones(3, 4)
    for given, said in (
        ({"coefficients": "polarexpress"}, "coefficients: found 'polarexpress'"),
        ({"steps": 0}, "steps: found 0"),
        ({"method": "gram", "coefficients": [(-1.0, 2.0)]}, "method: found 'gram'"),
    ):
        with pytest.raises(ValueError, match=rf"^{said}"):
            mm.orthogonalize(x, **given)
