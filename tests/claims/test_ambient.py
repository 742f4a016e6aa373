"""What a user has set for the process changes no bit: default dtype and device, autocast, modes, threads."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

import muonmesh as mm
from tests.support.ambient import Ambient, around_entries
from tests.support.problem import SETTINGS, Bag, gradients, groups, initial

pytestmark = pytest.mark.own_ambient

SOURCES = Path(mm.__file__).parent
# Torch's functions that make tensors of the default dtype and where the default device says.
FACTORIES = {function.__name__ for function in _device_constructors()}
RULES = [
    "muon",
    "normuon",
    "adamuon",
    "muoneq",
    "muon_plus",
    "dynmuon",
    "soap",
    "hyperball",
    "scion_row_norm",
    "scion_sign",
]


def test_every_tensor_is_made_with_its_dtype_and_device() -> None:
    calls = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            named = {keyword.arg for keyword in node.keywords}
            of_torch = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if of_torch and not {"dtype", "device"} <= named:
                calls.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}")
    assert not calls


def drawn_settings(seed: int) -> dict[str, Any]:
    """Draw what an optimizer is made with, and how its gradients are clipped."""
    numbers = random.Random(seed)
    compiled = numbers.random() < 0.4
    narrow = compiled or numbers.random() < 0.6
    deflated = numbers.random() < 0.3
    return {
        "rule": numbers.choice(RULES),
        "policy": numbers.choice([None, "all", "adamw_only", "separate"]),
        "compute_dtype": torch.bfloat16 if narrow else numbers.choice([torch.float32, torch.float64]),
        "kernels": "compiled" if compiled else "auto",
        "ns_coefficients": "deflated" if deflated else numbers.choice(["polar_express", "quintic", "cans"]),
        "state_dtype": numbers.choice([torch.float32, torch.bfloat16, "int8"]),
        "weights": numbers.choice([torch.float32, torch.bfloat16]),
        "decay_mode": numbers.choice(["full", "cautious"]),
        "memory_budget_mb": numbers.choice([None, 0.16]),
    }


def values_with_a_large_one(weights: torch.dtype) -> dict[str, Tensor]:
    """The awkward shapes, and one that is large enough for the Gram form and for deflation."""
    large = torch.randn(400, 900, generator=torch.Generator().manual_seed(5))
    return {name: value.to(weights) for name, value in {**initial(), "even": large}.items()}


def trained_in_states(seed: int, *, hostile: bool) -> dict[str, Any]:
    """Three steps, each in a state of its own, with a checkpoint between; everything that can be read afterwards."""
    chosen = drawn_settings(seed)
    rule, policy, weights = (chosen.pop(key) for key in ("rule", "policy", "weights"))
    # The order of torch's own sums depends on the number of threads: of fp32 products, and of the norms that clip.
    threads = None if chosen["compute_dtype"] == torch.bfloat16 and policy is None else 1

    def ambient(part: str) -> Any:
        drawn = Ambient.drawn(f"{seed} {part}")
        return around_entries((drawn if threads is None else replace(drawn, threads=threads)) if hostile else None)

    def model_and_optimizer(tensors: dict[str, Tensor]) -> tuple[Bag, mm.Muon]:
        model = Bag(tensors)
        entries = groups(model)
        entries[0]["algorithm"] = rule
        return model, mm.Muon(entries, **{**SETTINGS, **chosen})

    with ambient("made"):
        model, optimizer = model_and_optimizer(values_with_a_large_one(weights))
    figures: dict[str, Any] = {}
    for step in range(3):
        step_gradients = gradients(step + 1)
        step_gradients["even"] = torch.randn(400, 900, generator=torch.Generator().manual_seed(step))
        for name, parameter in model.named_parameters():
            parameter.grad = step_gradients[name].to(parameter.dtype)
        with ambient(f"step {step}"):
            if policy is not None:
                norms = optimizer.clip_grad_norm_(1.0, policy=policy)
                figures[f"norms {step}"] = [float(norms.total), float(norms.muon), float(norms.adamw)]
            optimizer.step()
            figures[f"metrics {step}"] = optimizer.metrics()
        if step == 1:
            with ambient("saved"):
                saved = optimizer.state_dict()
            with ambient("loaded"):
                model, optimizer = model_and_optimizer({name: p.detach() for name, p in model.named_parameters()})
                optimizer.load_state_dict(saved)
    tensors_after: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        name = next(name for name, p in model.named_parameters() if p is parameter)
        tensors_after |= {f"{name} {key}": value for key, value in state.items()}
    assert not [name for name, value in tensors_after.items() if value.is_inference()]
    return {**tensors_after, "told": figures}


def check_seed(seed: int) -> None:
    expected, hostile_tensors = trained_in_states(seed, hostile=False), trained_in_states(seed, hostile=True)
    figures, hostile_figures = expected.pop("told"), hostile_tensors.pop("told")
    assert expected.keys() == hostile_tensors.keys(), seed
    kinds = {name: (value.dtype, value.device) for name, value in expected.items()}
    assert {name: (value.dtype, value.device) for name, value in hostile_tensors.items()} == kinds, seed
    assert [name for name in expected if not torch.equal(expected[name], hostile_tensors[name])] == [], drawn_settings(
        seed
    )
    for step, expected_values in figures.items():
        assert hostile_figures[step] == pytest.approx(expected_values, rel=1e-12), drawn_settings(seed)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_under_ambient_state_is_a_step_without(seed: int, products: None) -> None:
    check_seed(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_states(block: int, products: None) -> None:
    for seed in range(1000 + 50 * block, 1000 + 50 * (block + 1)):
        check_seed(seed)


@pytest.mark.parametrize("coefficients", ["polar_express", "deflated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_orthogonalize_under_ambient_state(coefficients: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 400, 900, generator=torch.Generator().manual_seed(1))
    kernels = ["auto", "compiled"] if dtype == torch.bfloat16 else ["auto"]
    for name in kernels:
        expected = mm.orthogonalize(x, coefficients=coefficients, dtype=dtype, kernels=name)
        for seed in range(8):
            with around_entries(replace(Ambient.drawn(seed), threads=1)):
                assert torch.equal(mm.orthogonalize(x, coefficients=coefficients, dtype=dtype, kernels=name), expected)
