"""Invariant 14: whatever else writes weights between steps is respected, and master weights follow."""

from __future__ import annotations

import functools
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.step.runtime import Driver
from tests.support import gathered, problem, reference, writers
from tests.support.problem import Bag

BF16, FP32 = torch.bfloat16, torch.float32

# name: (shape, matrices); None puts the parameter into the AdamW group. Small equal matrices are stepped as a stack.
PARAMETERS: dict[str, tuple[tuple[int, ...], Any]] = {
    **{f"small {number}": ((12, 16), "whole") for number in range(3)},
    "large": ((150, 130), "whole"),
    "experts": ((3, 8, 16), "stack"),
    "conv1d": ((18, 54), ("transposed", ("rows", 18, 18, 18))),
    "embedding": ((29, 8), None),
    "norm": ((13,), None),
}


def bag_and_optimizer(dtype: torch.dtype, rule: str, **settings: Any) -> tuple[nn.Module, mm.Muon]:
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(shape, generator=generator).to(BF16).to(dtype) for name, (shape, _) in PARAMETERS.items()
    }
    model = Bag(values)
    named = {True: [], False: []}
    for name, parameter in model.named_parameters():
        named[PARAMETERS[name][1] is not None].append((name, parameter))
    matrices = [PARAMETERS[name][1] for name, _ in named[True]]
    groups = [{"params": named[True], "algorithm": rule, "matrices": matrices}]
    groups.append({"params": named[False], "algorithm": "adamw", "weight_decay": 0.05})
    return model, mm.Muon(groups, lr=0.02, weight_decay=0.1, **settings)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(BF16).to(parameter.dtype)


def as_masters(model: nn.Module, exact: nn.Module) -> None:
    """Write into fp32 weights what the masters of bf16 weights have to be, element by element."""
    with torch.no_grad():
        for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
            written = weight.float() != master.to(weight.dtype).float()
            master[written] = weight.float()[written]


PATHS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "cpu": ({}, {}),
    "as on a device": ({}, {"waits": False}),
    "a matrix at a time": ({"memory_budget_mb": 0}, {}),
    "rules that need sums": ({"rule": "hyperball"}, {}),
    "sums as on a device": ({"rule": "hyperball"}, {"waits": False}),
    "state beside the weights": ({"rule": "adamuon"}, {}),
    "int8": ({"state_dtype": "int8"}, {}),
}


@pytest.mark.parametrize(("how", "path"), [*product(writers.WRITERS, [*PATHS][:2]), *product(["clamp"], [*PATHS][2:])])
def test_masters_are_what_fp32_weights_would_be(how: str, path: str) -> None:
    """bf16 weights with masters, and the same model in fp32 without any, written alike: every bit of a master."""
    settings, runtime = PATHS[path]
    settings = {"rule": "muon", **settings}
    low, optimizer = bag_and_optimizer(BF16, master_dtype=FP32, **settings)
    exact, other = bag_and_optimizer(FP32, **settings)
    for stepped in (optimizer, other):
        for key, value in runtime.items():
            setattr(stepped._runtime, key, value)
    first = writers.copied(low)
    for step in range(5):
        give_gradients(low, step)
        give_gradients(exact, step)
        optimizer.step()
        other.step()
        if step in (1, 2):
            writers.write(how, low, first)
            as_masters(low, exact)
    for (name, weight), wide in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(optimizer.state[weight]["master"], wide), name
        assert torch.equal(weight, wide.to(BF16)), name


@pytest.mark.parametrize("settings", [{"master_dtype": FP32}, {"stochastic_rounding": 0}, {}], ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["cpu", "as on a device"])
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_a_step_after_a_load_is_a_step_of_the_loaded_weights(settings: dict[str, Any], waits: bool) -> None:
    """Against the oracle in fp64, after the best weights were loaded back."""
    model, optimizer = bag_and_optimizer(BF16, "muon", compute_dtype=FP32, **settings)
    optimizer._runtime.driver = Driver(waits)
    best = writers.copied(model)
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
    model.load_state_dict(best)
    wide_state = {name: {k: v.double() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}
    state = {name: {"momentum": entries.get("momentum_buffer"), **entries} for name, entries in wide_state.items()}
    give_gradients(model, 4)
    optimizer.step()
    muon = {"algorithm": "muon", "coefficients": coefficient_schedule("polar_express", 5), "weight_decay": 0.1}
    adamw = {"algorithm": "adamw", "weight_decay": 0.05}
    oracle_settings = {
        n: {"lr": 0.02, **(adamw if spec is None else {**muon, "matrices": spec})}
        for n, (_, spec) in PARAMETERS.items()
    }
    expected, _ = reference.reference_step(
        best, {n: p.grad for n, p in model.named_parameters()}, state, oracle_settings
    )
    for name, weight in model.named_parameters():
        # One rounding to bf16, up or down, of the largest weight; the weights before the load are ten times as far.
        bound = 2.0**-7 * float(expected[name].abs().max())
        assert float((weight.detach().double() - expected[name]).abs().max()) <= bound, name


def test_what_was_written_is_saved(tmp_path: Path) -> None:
    """A checkpoint has the master weights alone, so these follow before they are saved."""
    model, optimizer = bag_and_optimizer(BF16, "muon", master_dtype=FP32)
    give_gradients(model, 0)
    optimizer.step()
    first = writers.copied(model)
    give_gradients(model, 1)
    optimizer.step()
    writers.write("average", model, first)
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    other, loaded = bag_and_optimizer(BF16, "muon", master_dtype=FP32)
    mm.checkpoint.load(tmp_path / "saved", other, loaded)
    for (name, weight), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, twin), name


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("waits", [True, False], ids=["cpu", "as on a device"])
def test_numbers_at_the_edge(dtype: torch.dtype, waits: bool) -> None:
    """Infinity, NaN, both zeros, a master beyond fp16 and one that rounds to 0: only what was written changes."""
    weight, vector = nn.Parameter(torch.ones(2, 8, dtype=dtype)), nn.Parameter(torch.ones(8, dtype=dtype))
    groups = [{"params": [weight]}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = mm.Muon(groups, lr=0.0, weight_decay=0.0, master_dtype=FP32)
    optimizer._runtime.driver = Driver(waits)

    def step() -> None:
        for parameter in (weight, vector):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    values = torch.tensor([1.0001, 70000.0, 1e-9, -1e-9, 1.0, 1.0, 1.0, 1.0])
    written = {4: math.inf, 5: math.nan, 6: -0.0, 7: 3.0}
    for parameter in (weight, vector):
        master = optimizer.state[parameter]["master"]
        master.copy_(values)
        with torch.no_grad():
            parameter.copy_(master)
            for index, value in written.items():
                parameter[..., index] = value
    expected = values.clone()
    expected[[*written]] = torch.tensor([*written.values()])
    step()
    for parameter in (weight, vector):
        master = optimizer.state[parameter]["master"]
        assert torch.equal(master.nan_to_num(5.0), expected.nan_to_num(5.0).expand_as(master))
        assert torch.equal(parameter.nan_to_num(5.0), expected.to(dtype).nan_to_num(5.0).expand_as(parameter))


# ------------------------------------------------------------------ on ranks


MASTERS = {"master_dtype": torch.float32}


def trained_and_written(layout: str, how: str, **settings: Any) -> dict[str, Tensor]:
    """Weights and state after steps of bf16 weights that are written after the second and the third step."""
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    result: dict[str, Tensor] = {}
    first: writers.Saved = {}
    for step, (model, optimizer) in enumerate(problem.steps(layout, 4, values, problem.zeroed, **settings)):
        first = first or writers.copied(model)
        if step in (1, 2):
            writers.write(how, model, first)
        result = problem.result(model, optimizer)
    return result


@functools.cache
def written_in_one_process(how: str, **settings: Any) -> dict[str, Tensor]:
    return trained_and_written("local", how, **settings)


def differing_by_writer(layout: str, writing: list[str], **settings: Any) -> dict[str, list[str]]:
    """What differs from one process, by what was written; ``shard_state`` and the like matter to ranks alone."""
    alone = {key: value for key, value in settings.items() if key in (*MASTERS, "stochastic_rounding")}
    return {
        how: problem.differing(trained_and_written(layout, how, **settings), written_in_one_process(how, **alone))
        for how in writing
    }


@pytest.mark.parametrize(
    ("ranks", "layout", "settings"),
    [
        (2, "ddp", MASTERS),
        (2, "ddp", {**MASTERS, "shard_state": True}),
        (2, "fsdp", MASTERS),
        (2, "shard1", MASTERS),
        (2, "fsdp", {"stochastic_rounding": 3}),
        (4, "hsdp", {**MASTERS, "shard_state": True}),
        (4, "rows-cols", MASTERS),
    ],
)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_what_is_written_is_respected_as_in_one_process(
    workers, ranks: int, layout: str, settings: dict[str, Any]
) -> None:
    """One process is held against weights in fp32 and the oracle in tests/claims/test_written_weights.py."""
    writing = ["load_state_dict", "set_model_state_dict", "normalize"] if settings == MASTERS else ["average"]
    for differences in workers(ranks).run(differing_by_writer, layout, writing, **settings):
        assert differences == {how: [] for how in writing}


def after_writing(layout: str, how: str) -> dict[str, float]:
    """How far a step of tiny size takes weights from what was written, as a share of the largest weight."""
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    steps = problem.steps(layout, 3, values, **MASTERS)
    model, _ = next(steps)
    first = writers.copied(model)
    model, optimizer = next(steps)
    writers.write(how, model, first)
    written = gathered.whole(dict(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    model, _ = next(steps)
    return {
        name: float((value.float() - written[name].float()).abs().max() / written[name].float().abs().max())
        for name, value in gathered.whole(dict(model.named_parameters())).items()
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_tiny_step_stays_at_what_was_written(workers, layout: str) -> None:
    """Without the mend it returns to the master weights."""
    for how in ("load_state_dict", "clamp"):
        for distances in workers(2).run(after_writing, layout, how):
            assert {name: far for name, far in distances.items() if far > 2.0**-8} == {}
