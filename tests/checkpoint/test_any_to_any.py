"""Saved under any layout, loaded under any other: training goes on bit for bit as if one process had never stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from tests.support import cases, problem
from tests.support.cases import LAYOUTS, Case, Source

# Split into rows, interleaved, stored in × out, stacked; tall and wide, smaller than the ranks, uneven; AdamW's half.
NAMES = ("few", "qkv", "neox", "conv1d", "expert_gate_up", "embedding", "bias")
PARAMETERS = {name: problem.PARAMETERS[name] for name in NAMES}
FIRST, LAST = 1, 3  # steps before the checkpoint, and at the end
RULES: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"algorithm": "normuon", "normuon_side": "longer", "normuon_beta2": 0.8},  # state by row or by column
    "hyperball": {"algorithm": "hyperball"},  # by matrix
    "adamuon": {"algorithm": "adamuon", "adamuon_beta2": 0.8},  # by element
}


def values_of(seed: int) -> dict[str, Tensor]:
    values = problem.initial(seed)
    return {name: values[name] for name in NAMES}


SOURCE = Source(PARAMETERS, values_of)


def build_case(layout: str, seed: int = 0, *, rule: str = "muon", **settings: Any) -> Case:
    settings_of_problem = {**problem.SETTINGS, "compute_dtype": torch.float32, **settings}
    return cases.build(layout, SOURCE, seed, muon=RULES[rule], **settings_of_problem)


def clip_and_step(case: Case, first: int, last: int) -> None:
    for step in range(first, last):
        gradients = problem.gradients(step % 5)  # which grow tenfold from one to the next
        case.give({name: gradients[name] for name in NAMES})
        case.optimizer.clip_grad_norm_(1e30, policy="separate", skip_above="1e9x")  # counts norms, skips nothing
        case.optimizer.step()
    case.optimizer.zero_grad()


def step_and_save(layout: str, path: str, settings: dict[str, Any]) -> None:
    case = build_case(layout, **settings)
    clip_and_step(case, 0, FIRST)
    mm.checkpoint.save(path, case.model, case.optimizer)


def load_into_other(layout: str, path: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    case = build_case(layout, seed=7, **settings)  # other weights than those that were saved
    mm.checkpoint.load(path, case.model, case.optimizer)
    clip_and_step(case, FIRST, LAST)
    case.optimizer.finish()
    assert {group["norm_means"][1] for group in case.optimizer.param_groups} == {(LAST, LAST, LAST)}
    return case.whole()


@functools.cache
def uninterrupted(**settings: Any) -> dict[str, Tensor]:
    case = build_case("one process", **settings)
    clip_and_step(case, 0, LAST)
    return case.whole()


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Where the checkpoint of a layout is; each is saved once, and loaded by many."""

    @functools.cache
    def path_of(layout: str, **settings: Any) -> Path:
        path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
        workers(LAYOUTS[layout][0]).run(step_and_save, layout, str(path), settings)
        return path

    return path_of


def check_resumed(workers: Any, path: Path, after: str, **settings: Any) -> None:
    expected = uninterrupted(**settings)
    for result in workers(LAYOUTS[after][0]).run(load_into_other, after, str(path), settings):
        assert problem.differing(result, expected) == []


@pytest.mark.soak
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_checkpoint_of_any_layout_loads_into_any_other(workers, saved, before: str, after: str) -> None:
    check_resumed(workers, saved(before), after)


def go_on(layout: str, step: int, before: str, after: str) -> dict[str, Tensor]:
    """Load what another layout saved, take a step, and save."""
    case = build_case(layout, seed=7)
    mm.checkpoint.load(before, case.model, case.optimizer)
    clip_and_step(case, step, step + 1)
    mm.checkpoint.save(after, case.model, case.optimizer)
    return case.whole()


def test_a_training_moves_through_all_layouts_and_back(workers, saved, tmp_path: Path) -> None:
    """Each layout once as what is saved and once as what it is loaded into; the bits are those of one process."""
    first, *others = LAYOUTS
    path = saved(first)
    alone = build_case(first)
    clip_and_step(alone, 0, FIRST)
    for step, layout in enumerate([*others, first], FIRST):
        clip_and_step(alone, step, step + 1)
        after = tmp_path / str(step)
        for result in workers(LAYOUTS[layout][0]).run(go_on, layout, step, str(path), str(after)):
            assert (layout, problem.differing(result, alone.whole())) == (layout, [])
        path = after


# Among layouts of each kind: cut by rows and by columns, replicas that share state, flat.
STATES = (
    "fsdp over tp",
    "flat 2",
    "hsdp, shared state",
    "declared over tp",
    "one process",
    "flat over tp",
    "shard 1 on 2",
    "hsdp to owners",
)
TRIED = {("normuon", "fsdp over tp", "flat 2"), ("hyperball", "declared over tp", "one process")}


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        pytest.param(rule, a, b, marks=() if (rule, a, b) in TRIED else pytest.mark.soak)
        for rule in RULES
        if rule != "muon"
        for a in STATES
        for b in STATES
    ],
)
def test_what_rules_keep_goes_along(workers, saved, rule: str, before: str, after: str) -> None:
    """By element, row, column and matrix."""
    check_resumed(workers, saved(before, rule=rule), after, rule=rule)


MASTERS = {"dtype": torch.bfloat16, "master_dtype": torch.float32}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp 2", "hsdp, shared state"),
        pytest.param("one process", "declared over tp", marks=pytest.mark.soak),
        pytest.param("tp 2", "one process", marks=pytest.mark.soak),
    ],
)
def test_masters_go_along_as_the_weights(workers, saved, before: str, after: str) -> None:
    """Weights are saved as they are trained, so a model in fp32 takes them too, to the last bit."""
    path = saved(before, **MASTERS)
    check_resumed(workers, path, after, **MASTERS)
    for weights in workers(1).run(loaded_in_full, str(path), MASTERS):
        assert weights == []


IN_COPIES = {"in_copies": True, "state_device": "cpu"}


@pytest.mark.parametrize("rule", ["muon", pytest.param("adamuon", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp 2", "flat 2"),
        *(
            pytest.param(a, b, marks=pytest.mark.soak)
            for a in ("hsdp, shared state", "declared over tp", "one process")
            for b in ("flat over tp", "fsdp over tp")
        ),
    ],
)
def test_state_on_the_host_goes_along_and_so_does_state_that_was_not_there(
    workers, saved, rule: str, before: str, after: str
) -> None:
    check_resumed(workers, saved(before, rule=rule, **IN_COPIES), after, rule=rule)
    check_resumed(workers, saved(before, rule=rule), after, rule=rule, **IN_COPIES)


def loaded_in_full(path: str, settings: dict[str, Any]) -> list[str]:
    """Load what has masters into a model in fp32, and return which weights are not the masters."""
    local_case = build_case("one process", seed=7)
    mm.checkpoint.load(path, local_case.model, local_case.optimizer)
    trained = build_case("one process", **settings)
    clip_and_step(trained, 0, FIRST)
    whole, loaded = trained.whole(), local_case.whole()
    return [name for name in NAMES if not torch.equal(loaded[name], whole[f"{name}.master"])]
