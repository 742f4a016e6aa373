"""DeepSpeed's real engine over gloo: every configuration gives the bits of one process with the same gradients."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muonmesh.errors import FileError, LayoutError, StateError
from muonmesh.integrations.deepspeed import initialize
from muonmesh.integrations.deepspeed.clipping import EngineGradients
from muonmesh.integrations.deepspeed.config import prepare_config, prepare_host_config, read_config, take_scheduler
from tests.hosts import deepspeed_engine as ds
from tests.hosts.deepspeed_engine import zero
from tests.support import cases
from tests.support.alone import files_of_at_most
from tests.support.workers import Pool

COVERS = (
    "integrations.deepspeed.checkpoint.checked_load",
    "integrations.deepspeed.clipping.measure",
    "integrations.deepspeed.config.read_config",
    "integrations.deepspeed.initialize.initialize",
    "integrations.deepspeed.mending.mend",
    "integrations.deepspeed.mending.report_fp32_writes",
    "integrations.deepspeed.optimizer.EngineOptimizer",
    "integrations.deepspeed.records.read_flats",
)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 8.0}}
CPU = {"device": "cpu"}
MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


# What differs from DeepSpeed's defaults, and must not change the update.
UNLIKE: dict[str, Any] = {
    "allgather_partitions": False,
    "use_multi_rank_bucket_allreduce": False,
    "ignore_unused_parameters": False,
    "load_from_fp32_weights": False,
    "enable_sanity_checks": True,
    "save_muon_momentum_buffer_in_memory": True,
    "offload_optimizer": {"device": "cpu", "pipeline_read": True, "pipeline_write": True, "fast_init": True},
}
UNLIKE_GRADIENTS: dict[str, Any] = {
    "communication_data_type": "fp32",
    "managed_gradient_accumulation": False,
    "bf16": {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": False},
}
UNLIKE_STAGE_3: dict[str, Any] = {
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
    "stage3_module_granularity_threshold": 100,
    "memory_efficient_linear": False,
    "override_module_apply": False,
}


EXACT: dict[str, dict[str, Any]] = {
    "0": zero(0),
    "0 bf16": zero(0) | BF16,
    "0 accumulation": zero(0) | {"gradient_accumulation_steps": 4},
    "1": zero(1),
    "2": zero(2),
    "3": zero(3),
}
for stage in (1, 2, 3):
    EXACT |= {
        f"{stage} all-reduce": zero(stage, reduce_scatter=False),
        f"{stage} overlap": zero(stage, overlap_comm=True, contiguous_gradients=True),
        f"{stage} scattered gradients": zero(stage, contiguous_gradients=False),
        f"{stage} small buckets": zero(stage, reduce_bucket_size=64, allgather_bucket_size=64),
        f"{stage} accumulation": zero(stage) | {"gradient_accumulation_steps": 4},
        f"{stage} bf16": zero(stage) | BF16 | {"gradient_accumulation_steps": 2},
        f"{stage} bf16, sums in fp32": zero(stage) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}},
        f"{stage} bf16, sums in bf16": zero(stage) | BF16 | {"data_types": {"grad_accum_dtype": "bf16"}},
        f"{stage} fp16": zero(stage) | FP16,
        f"{stage} offload": zero(stage, offload_optimizer=CPU) | {"gradient_accumulation_steps": 2},
        f"{stage} offload, bf16": zero(stage, offload_optimizer=CPU) | BF16,
    }
EXACT |= {
    "1 round robin": zero(1, round_robin_gradients=True),
    "2 round robin": zero(2, round_robin_gradients=True),
    "2 round robin, aligned": zero(2, round_robin_gradients=True, parameter_alignment=True),
    "1 unlike settings": zero(1, **UNLIKE) | UNLIKE_GRADIENTS | {"gradient_predivide_factor": 2.0},
    "1 scaled sums": zero(1) | {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "2 scaled sums": zero(2, reduce_scatter=False, compute_grad_norm=False) | {"gradient_predivide_factor": 2.0},
    "2 unlike settings": zero(2, **UNLIKE) | UNLIKE_GRADIENTS,
    "3 unlike settings": zero(3, **UNLIKE, **UNLIKE_STAGE_3) | UNLIKE_GRADIENTS,
    "3 secondary partitions": zero(3, zero_hpz_partition_size=2),
    "3 sub-groups": zero(3, sub_group_size=300),
    "3 nothing persists": zero(3, stage3_param_persistence_threshold=0),
    "3 parameters offloaded": zero(3, offload_param=CPU, offload_optimizer=CPU, stage3_param_persistence_threshold=0)
    | BF16,
}


# On four ranks one of each kind of cut.
AT_FOUR = (
    "0 bf16",
    "1 accumulation",
    "1 bf16, sums in fp32",
    "2 all-reduce",
    "2 round robin, aligned",
    "2 bf16",
    "2 offload",
    "3 overlap",
    "3 sub-groups",
    "3 fp16",
    "3 parameters offloaded",
)


# On two ranks, where these differ by one setting from others: in `make soak`.
AGAIN = {
    *("0 accumulation", "1", "2", "3", "1 accumulation", "1 bf16, sums in bf16", "1 offload", "2 scattered gradients"),
    *("2 bf16", "2 offload, bf16", "2 round robin", "3 small buckets", "3 offload", "3 fp16", "3 sub-groups"),
    *("1 all-reduce", "1 overlap", "1 scattered gradients", "1 small buckets", "1 bf16", "1 offload, bf16"),
    *("2 overlap", "2 small buckets", "2 accumulation", "2 bf16, sums in bf16", "2 fp16"),
    *("3 all-reduce", "3 overlap", "3 scattered gradients", "3 bf16", "3 bf16, sums in fp32", "3 bf16, sums in bf16"),
}


@pytest.mark.parametrize(
    ("world", "name"),
    [
        *(pytest.param(2, name, marks=[pytest.mark.soak] * (name in AGAIN)) for name in EXACT),
        *((4, name) for name in AT_FOUR),
    ],
)
def test_the_update_is_that_of_one_process(pools: dict[int, Pool], world: int, name: str) -> None:
    assert pools[world].run(ds.exactness, EXACT[name]) == [[]] * world


STAGES = (0, 1, 2, 3)
RULES: dict[str, dict[str, Any]] = {
    "dynmuon": {"dynmuon_power": 0.2},
    "soap": {"soap_every": 2, "soap_beta2": 0.8},  # its state lies at the owners
    "normuon": {"lr": 0.04, "normuon_beta2": 0.8},
}
STRUCTURED = ("0", "1 accumulation", "2", "2 offload", "3", "3 sub-groups", "3 parameters offloaded")
FURTHER = ("0 bf16", "1 bf16, sums in fp32", "1 offload", "2 round robin", "3 offload")
WRITTEN = ("0 bf16", "1 bf16, sums in fp32", "2 fp16", "2 offload, bf16", "3", "3 bf16", "3 nothing persists")
IN_BF16 = {"compute_dtype": torch.bfloat16}
OF_GROUPS = {"up.weight": {"lr": 0.05, "momentum": 0.5}, "down.weight": {"ns_steps": 3}}
# A config, and what `deepspeed_engine.exactness` is asked beside it.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"{n} computed in bf16": (zero(n), IN_BF16) for n in STAGES},
    **{f"{n} compiled products": (zero(n), {**IN_BF16, "kernels": "compiled"}) for n in (1, 3)},
    **{f"{n} groups": (zero(n), {"overrides": ds.OPTIMIZER["overrides"] | OF_GROUPS}) for n in (1, 2, 3)},
    # As if each were so many times larger; stage 3 has no such setting.
    **{f"{n} summed over ranks": (zero(n) | {"gradient_allreduce_op": "sum"}, {"times": 2}) for n in (0, 1, 2)},
    **{
        f"{n} masters and state in bf16": (
            zero(n) | STATES,
            {"single": {"weights": torch.bfloat16, "state_dtype": torch.bfloat16}},
        )
        for n in (1, 2, 3)
    },
    "3 zero.Init": (zero(3), {"zero_init": True}),
    "3 zero.Init, bf16": (zero(3) | BF16, {"zero_init": True}),
    **{
        f"{name}, {rule}": (EXACT[name], {"rule": rule, "muon": RULES[rule]})
        for rule, names in {
            "soap": ("0", "1 accumulation", "2 bf16", "2 offload", "3 sub-groups"),
            "dynmuon": ("0 bf16", "2 round robin", "3 sub-groups"),
            "normuon": ("1", "3"),
        }.items()
        for name in names
    },
    # DeepSpeed's own Muon looks at it at three of the six places where it calls its update.
    **{
        f"{name}, tag of heads": (EXACT[name], {"heads": {"up.weight": 3, "down.weight": 47}})
        for name in (*STRUCTURED, "2 bf16")
    },
    # Its stages 1 and 2 orthogonalize what carries ``use_muon``, if the name of the optimizer's class says Muon.
    **{
        f"{name}, its own Muon's tag on {tagged}": (EXACT[name], {"use_muon": expression})
        for name in STRUCTURED + FURTHER
        for tagged, expression in (("matrices", r".*\.weight(?<!norm\.weight)"), ("everything", ".*"))
    },
    # DeepSpeed alone would round its old fp32 weights over what was written in the next step.
    **{
        f"{name}, written by {how}": (EXACT[name], {"between": partial(ds.written, how)})
        for name in WRITTEN
        for how in ("load_state_dict", "clamp")
    },
    # A write of fp32 weights had kept all others of the same flat tensor from following the module.
    **{
        f"{name}, written beside fp32 weights": (EXACT[name], {"between": ds.written_beside})
        for name in ("1 bf16, sums in fp32", "2 round robin", "2 offload, bf16", "3", "3 sub-groups", "3 bf16")
    },
    **{f"{n} state away and back": (zero(n), {"between": ds.away_and_back}) for n in (1, 2, 3)},
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_an_engine_is_what_one_process_does(
    pools: dict[int, Pool], name: str, request: pytest.FixtureRequest
) -> None:
    if "compiled" in name:
        request.getfixturevalue("products")
    config, arguments = ASKED[name]
    assert pools[2].run(ds.exactness, config, **arguments) == [[], []]


@pytest.mark.parametrize("states", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("name", ["0 bf16", "1", "1 bf16, sums in fp32", "2 offload, bf16", "3 bf16"])
def test_weights_that_are_written_after_a_load_count(
    pools: dict[int, Pool], tmp_path: Path, name: str, states: bool
) -> None:
    """The fp32 weights that were loaded had looked as if they had been written after the module's."""
    assert pools[2].run(ds.written_later, EXACT[name], str(tmp_path), load_optimizer_states=states) == [[], []]


@pytest.mark.parametrize("name", ["1", "2 bf16"])
def test_weights_that_are_written_after_the_state_was_away_count(pools: dict[int, Pool], name: str) -> None:
    """The fp32 weights, which were known by their address, had come back elsewhere."""
    assert pools[2].run(ds.written_later, EXACT[name], None) == [[], []]


@pytest.mark.parametrize("directly", [False, True], ids=["by its function", "in its tensors"])
@pytest.mark.parametrize("name", ["1 bf16, sums in fp32", "2", "3 sub-groups"])
def test_fp32_weights_that_are_written_before_a_save_count(
    pools: dict[int, Pool], tmp_path: Path, name: str, directly: bool
) -> None:
    """A save had forgotten that they were newer than the module's, and the next step rounded these into them."""
    assert pools[2].run(ds.fp32_written_and_saved, EXACT[name], str(tmp_path), directly=directly) == [[], []]


BY_HAND = {"managed_gradient_accumulation": False}
LEFT_OUT: dict[str, dict[str, Any]] = {
    **{f"{n} offload": zero(n, offload_optimizer=CPU) for n in (1, 2, 3)},
    **{f"{n} offload, by hand": zero(n, offload_optimizer=CPU) | BY_HAND for n in (2, 3)},
    **{f"{n}": zero(n) for n in (1, 2, 3)},
    "3 by hand": zero(3) | BY_HAND,
    "3 small buckets": zero(3, reduce_bucket_size=64, sub_group_size=300),
    "2 offload, bf16, sums in fp32": zero(2, offload_optimizer=CPU)
    | BF16
    | {"data_types": {"grad_accum_dtype": "fp32"}},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_gradient_of_an_earlier_step_is_not_stepped_again(pools: dict[int, Pool], name: str) -> None:
    """DeepSpeed alone keeps it at stage 3 and with offload, and with offload loses one that the last batch lacks."""
    assert pools[2].run(ds.left_out, LEFT_OUT[name]) == [[], []]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_backward_pass_does_not_step_the_last_gradients_again(
    pools: dict[int, Pool], stage: int
) -> None:
    """With offload DeepSpeed does; without, it raises a TypeError, and at stage 0 such a step changes nothing."""
    assert pools[2].run(ds.stepped_without_backward, zero(stage, offload_optimizer=CPU)) == [[], []]


def test_a_model_that_is_fp16_already_trains_on_the_masters_that_the_engine_keeps(pools: dict[int, Pool]) -> None:
    """Without masters AdamW's ε would be 0 in fp16, and `Muon` refuses it."""
    assert pools[2].run(ds.from_half, zero(1) | FP16) == [True, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_skips_the_step_on_every_rank(pools: dict[int, Pool], stage: int) -> None:
    """And a scale that grows does not shrink the gradients that were multiplied by the one before."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 1}
    wrong, skipped, scale = pools[2].run(ds.overflowing, zero(stage) | {"fp16": fp16}, 1)[0]
    assert (wrong, skipped, scale) == ([], 1, 16.0)


@pytest.mark.parametrize("number", [0, -1], ids=["first group", "last group"])
@pytest.mark.parametrize("name", ["1", "2", "3", "3 sub-groups"])
def test_a_step_that_raises_is_followed_by_right_steps(
    pools: dict[int, Pool], tmp_path: Path, name: str, number: int
) -> None:
    """DeepSpeed went on with one group alone at stages 1 and 2, and stepped it again beside each other at stage 3."""
    outcomes = pools[2].run(ds.stopped, EXACT[name], number, str(tmp_path))
    assert [wrong for _, wrong in outcomes] == [[], []]
    assert all("lr: found -1.0; needed a number of at least 0" in message for message, _ in outcomes)


# ---------------------------------------------------------------- what a step does


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrices_that_straddle_ranks_are_orthogonalized_once(pools: dict[int, Pool], stage: int) -> None:
    report = pools[2].run(ds.work_done, zero(stage) | {"gradient_accumulation_steps": 2})[0]
    inside = {name: [at % ds.SHAPES[name][1] for at in places] for name, places in report["cut"].items()}
    assert any(at for places in inside.values() for at in places), "no matrix is cut within a row"
    assert report["done"] == 6  # three of qkv, up, down, lone; idle has no gradient


def test_explain_is_one_table_of_all_parameters(pools: dict[int, Pool]) -> None:
    explanation = pools[2].run(ds.work_done, zero(2))[0]["explained"]
    assert "qkv.weight" in explanation
    assert "norm.weight" in explanation
    assert len(re.findall("^parameter ", explanation, re.MULTILINE)) == 1
    assert re.findall(
        r"^rank (\d+) of (\d+): \d of 6 orthogonalizations.*\(imbalance 1\.", explanation, re.MULTILINE
    ) == [("0", "2")]
    assert "flat×1  " in explanation
    assert "override 'qkv.weight'" in explanation


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_enters_nothing(pools: dict[int, Pool], stage: int) -> None:
    assert pools[4].run(ds.poisoned, stage) == [[]] * 4


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.soak) for stage in (0, 1)), 3])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.04, "warmup_num_steps": 4, "warmup_type": "linear"}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}),
        ("CosineAnnealingLR", {"T_max": 5}),
    ],
)
def test_a_schedule_moves_both_halves_and_keeps_their_ratio(
    pools: dict[int, Pool], stage: int, name: str, params: dict[str, Any]
) -> None:
    """DeepSpeed's OneCycle would cycle ``betas`` too, and warns that it does not, since the defaults have none."""
    config = zero(stage) | {"scheduler": {"type": name, "params": params}}
    rates, wrong = pools[2].run(ds.scheduled, config)[0]
    assert wrong == []
    assert len({step_rates[0] for step_rates in rates}) > 2, "the schedule does not move"
    for muon, *adamw in rates:
        assert adamw == pytest.approx([muon / 2] * len(adamw))


def test_a_schedule_of_groups_with_one_rate_needs_no_lr(pools: dict[int, Pool]) -> None:
    """It was refused because of rates that differ, which they do not."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 2}}
    config = zero(1) | {"scheduler": scheduler}
    reached = pools[2].run(ds.rates_after_warm_up, config, muon={"lr": 0.05}, adamw={"lr": 0.05})[0]
    assert reached == pytest.approx([0.05] * len(reached))


def schedule_of_two_groups(scheduler: dict[str, Any], lr: float | None = None) -> torch.optim.lr_scheduler.LRScheduler:
    """A scheduler of a config for an optimizer of two groups with the rates 0.02 and 0.001."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.02, 0.001)]
    make = take_scheduler({"scheduler": scheduler}, lr)
    assert make is not None
    schedule: torch.optim.lr_scheduler.LRScheduler = make(torch.optim.SGD(groups))
    return schedule


def test_a_floor_that_is_one_number_is_refused_for_groups_of_different_rates() -> None:
    """It was taken for each group: a rate of 0.001 would rise to 0.01."""
    floor = {"type": "CosineAnnealingLR", "params": {"T_max": 5, "eta_min": 0.01}}
    with pytest.raises(ValueError, match=r"^config: found eta_min=0.01 for groups .*cos_min_ratio"):
        schedule_of_two_groups(floor, 0.02)
    assert schedule_of_two_groups(
        {"type": "CosineAnnealingLR", "params": {"T_max": 5, "eta_min": 0}}
    ).get_last_lr() == [0.02, 0.001]


def test_rates_of_0_need_no_lr() -> None:
    """They are for any group. ReduceLROnPlateau was refused for its default ``min_lr`` of 0."""
    assert schedule_of_two_groups({"type": "ReduceLROnPlateau", "params": None}).get_last_lr() == [0.02, 0.001]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_without_gradients_is_counted_in_a_warm_up_from_0(pools: dict[int, Pool], stage: int) -> None:
    """At rate 0, a rank whose part has zero gradients does not know that other ranks' parts have gradients."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.04, "warmup_num_steps": 4}}
    assert pools[2].run(ds.warmed_up, zero(stage) | {"scheduler": scheduler})[0] == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_update_has_no_scale(pools: dict[int, Pool], stage: int) -> None:
    """Gradients of 1e-30 move Muon's weights as those of 1 do, and those of 1e+18 too."""
    moved = pools[2].run(ds.moved_at_scales, stage, [2.0**-100, 1.0, 2.0**60])[0]
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[2], moved[1])
    assert moved[1].any()


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    "policy", ["adamw_only", *(pytest.param(p, marks=pytest.mark.soak) for p in ("all", "separate"))]
)
@pytest.mark.parametrize(
    "config",
    [
        zero(0),
        zero(1),
        zero(2) | FP16,
        zero(2, offload_optimizer=CPU),
        zero(1) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}},
        zero(3, sub_group_size=300) | FP16,
        zero(3, offload_optimizer=CPU),
    ],
    ids=["0", "1", "2 fp16", "2 offload", "bf16", "3 fp16", "3 offload"],
)
def test_clipping_is_by_the_norm_of_the_whole_model(
    pools: dict[int, Pool], config: dict[str, Any], policy: str
) -> None:
    wrong, norms = pools[2].run(ds.clipped, config, {"max_norm": 2.0, "policy": policy})[0]
    assert wrong == []
    for engine, single in norms:
        assert engine == pytest.approx(single)


def test_the_parameters_of_a_flat_tensor_share_one_copy_of_its_gradient() -> None:
    """Clipping reads it for each of them, and holds all that it has read."""
    flat, pieces = torch.zeros(10), [torch.full((2, 2), 3.0), torch.full((4,), 5.0)]
    source = EngineGradients(SimpleNamespace(averaged_gradients={7: pieces}), 7)
    gradient = source.gradient(flat)
    assert gradient is source.gradient(flat)
    assert gradient is not None
    assert gradient.tolist() == [3.0] * 4 + [5.0] * 4 + [0.0] * 2


@pytest.mark.parametrize(
    ("stage", "clip", "steps", "warm_up"),
    [
        (2, {"max_norm": 2.0, "skip_above": 40.0}, ds.STEPS, 0),
        # After ten steps, those above the mean.
        *((n, {"max_norm": 0.5, "policy": "separate", "skip_above": "1x"}, 15, 10) for n in (0, 1, 3)),
    ],
)
def test_a_norm_above_the_limit_skips_the_step(
    pools: dict[int, Pool], stage: int, clip: dict[str, Any], steps: int, warm_up: int
) -> None:
    wrong, norms = pools[2].run(ds.clipped, zero(stage), clip, steps=steps)[0]
    assert wrong == []
    assert [engine[3] for engine, _ in norms] == [single[3] for _, single in norms]
    assert not any(engine[3] for engine, _ in norms[:warm_up])
    assert {engine[3] for engine, _ in norms[warm_up:]} == {True, False}


def test_the_engines_own_clipping_does_not_stall_muon(pools: dict[int, Pool]) -> None:
    """It scales raw gradients; a scale that is the same at each step does not change Muon's direction."""
    moved = pools[2].run(ds.moved_with_engine_clipping, 1e-6)[0]
    assert moved[1e-6] == pytest.approx(moved[0.0], rel=1e-3)


# ---------------------------------------------------------------- tensor and expert parallelism


@pytest.mark.parametrize(("kind", "world"), [("1", 2), ("2", 2), ("2", 4)])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_experts(peers: dict[int, Pool], tmp_path: Path, stage: int, kind: str, world: int) -> None:
    folder = str(tmp_path) if stage else None
    assert peers[world].run(ds.parallel, zero(stage), kind, folder) == [[]] * world


# Stage, ranks, and over how many of them the four experts are dealt.
EXPERTS = [(2, 2, "2"), (1, 4, "4"), (0, 2, "2"), (2, 4, "2"), (1, 2, "1"), (0, 4, "4")]
MOVES = [((2, 2, "2"), (1, 4, "4")), ((0, 4, "4"), (2, 2, "2")), ((1, 2, "1"), (0, 2, "2"))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, id=f"{a} to {b}", marks=() if (a, b) in MOVES else pytest.mark.soak)
        for a in EXPERTS
        for b in EXPERTS
    ],
)
def test_experts_go_to_any_number_of_ranks(
    peers: dict[int, Pool], tmp_path: Path, before: tuple[int, int, str], after: tuple[int, int, str]
) -> None:
    """Every expert with its momentum, bit for bit, at any stage, and in one process without DeepSpeed."""
    (stage, world, kind), (other_stage, others, other_kind) = before, after
    folder = str(tmp_path / "checkpoint")
    saved, later = peers[world].run(ds.save_experts, zero(stage), kind, folder)[0]
    assert sum("deepspeed_experts" in name and name.rpartition(".")[2] not in ds.STATE for name in saved) == 8
    for loaded, trained in peers[others].run(ds.load_experts, zero(other_stage), other_kind, folder):
        assert ds.differences(loaded, saved) == []
        assert before != after or ds.differences(trained, later) == []
    assert peers[world].run(ds.load_without_deepspeed, folder, saved) == [[]] * world


def test_experts_at_stage_3_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape('Write "zero_optimization": {"stage": 2}')):
        initialize(model=ds.Experts(1), config=zero(3))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallelism(peers: dict[int, Pool], stage: int, world: int) -> None:
    config = zero(stage) | {"tensor_parallel": ds.AUTOTP}
    assert peers[world].run(ds.parallel, config, "autotp") == [[]] * world


# ---------------------------------------------------------------- checkpoints


ACROSS: dict[str, tuple[dict[str, Any], list[tuple[str, int, dict[str, Any]]]]] = {
    "1": (zero(1), [("same", 2, zero(1)), ("ours", 4, zero(2)), ("ours", 4, zero(3))]),
    "2 round robin": (
        zero(2, round_robin_gradients=True) | BF16,
        [
            ("same", 2, zero(2, round_robin_gradients=True) | BF16),
            ("ours", 4, zero(1) | BF16),
            ("ours", 2, zero(3, sub_group_size=300) | BF16),
        ],
    ),
    "bf16, sums in fp32": (
        zero(1) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}},
        [
            ("same", 2, zero(1) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
            ("ours", 4, zero(2) | BF16),
            ("ours", 4, zero(1) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
        ],
    ),
    "3": (
        zero(3, sub_group_size=300),
        [("same", 2, zero(3, sub_group_size=300)), ("ours", 4, zero(3)), ("ours", 4, zero(2))],
    ),
    "2 offload": (
        zero(2, offload_optimizer=CPU),
        [("same", 2, zero(2, offload_optimizer=CPU)), ("ours", 4, zero(1))],
    ),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(pytest.param(name, "muon", marks=[pytest.mark.soak] * (name not in ("1", "3"))) for name in ACROSS),
        *(("1", "soap"), ("3", "soap"), ("1", "normuon")),
    ],
)
def test_training_resumes_bit_for_bit(pools: dict[int, Pool], tmp_path: Path, name: str, rule: str) -> None:
    config, others = ACROSS[name]
    settings = {} if rule == "muon" else {"rule": rule, "muon": RULES[rule] | {"lr": 0.02}}
    needed = pools[2].run(ds.save, config, str(tmp_path), **settings)[0]
    for how, world, other in others:
        resumed = pools[world].run(ds.resume, other, str(tmp_path), how, **settings)[0]
        assert (how, ds.differences(resumed, needed)) == (how, [])
    assert needed["norm means"][1].tolist() == [ds.STEPS] * 3


# Stages that meet each other and every layout, in both directions.
STAGES_OF: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3 on 2": (2, zero(3, sub_group_size=300)),
    "zero 1 on 4": (4, zero(1)),
    "zero 2 on 2": (2, zero(2, round_robin_gradients=True)),
    "zero 0 on 2": (2, zero(0)),
}
OTHERS = [name for name in cases.LAYOUTS if name != "fsdp1" and "owners" not in name]
QUICK = [
    *(("fsdp 2", "zero 3 on 2"), ("zero 3 on 2", "fsdp 4")),
    *(("zero 3 on 2", "fsdp over tp"), ("ddp, shared state", "zero 1 on 4")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, id=f"{a} to {b}", marks=() if (a, b) in QUICK else pytest.mark.soak)
        for a in (*STAGES_OF, *OTHERS)
        for b in (*STAGES_OF, *OTHERS)
        if a in STAGES_OF or b in STAGES_OF
    ],
)
def test_every_other_layout_and_any_stage(pools: dict[int, Pool], tmp_path: Path, before: str, after: str) -> None:
    def run(function: Callable[..., Any], layout: str) -> list[Any]:
        ranks, config = STAGES_OF[layout] if layout in STAGES_OF else (cases.LAYOUTS[layout][0], layout)
        arguments = config, str(tmp_path / "checkpoint")
        return [function(*arguments)] if ranks == 1 else pools[ranks].run(function, *arguments)

    run(ds.save_anywhere, before)
    expected = ds.uninterrupted()
    for loaded in run(ds.load_anywhere, after):
        assert ds.differences(loaded, {name: expected[name] for name in loaded}) == []
        assert loaded.keys() == expected.keys() or after.startswith("zero 0")  # whose state DeepSpeed does not show


def test_state_of_other_groups_is_refused(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[2].run(ds.save, zero(2), str(tmp_path))
    overrides = {**ds.OPTIMIZER["overrides"], "qkv.weight": {"matrices": ("rows", 28, 14)}}
    for outcome in pools[2].run_expecting_errors(ds.resume, zero(2), str(tmp_path), "same", overrides=overrides):
        assert outcome.error is StateError
        assert "found matrices" in outcome.message


@pytest.mark.parametrize(
    ("saved", "loading"),
    [(zero(2, round_robin_gradients=True), zero(1)), (zero(3), zero(3, sub_group_size=300))],
    ids=["round robin", "sub-groups"],
)
def test_parameters_that_lie_elsewhere_are_not_mixed_up(
    pools: dict[int, Pool], tmp_path: Path, saved: dict[str, Any], loading: dict[str, Any]
) -> None:
    pools[2].run(ds.save_only, saved, str(tmp_path))
    for outcome in pools[2].run_expecting_errors(ds.load_only, loading, str(tmp_path)):
        assert outcome.error is StateError
        assert "parameters in other places of DeepSpeed's flat tensors" in outcome.message


def test_a_folder_of_another_kind_of_engine_is_refused_on_every_rank(pools: dict[int, Pool], tmp_path: Path) -> None:
    kinds = {"0": zero(0), "1": zero(1), "3": zero(3)}
    for name, config in kinds.items():
        pools[2].run(ds.save_only, config, str(tmp_path / name))

    def refused(saved: str, config: dict[str, Any], message: str, world: int = 2, **how: Any) -> None:
        for outcome in pools[world].run_expecting_errors(ds.load_only, config, str(tmp_path / saved), **how):
            assert outcome.error is FileError, outcome
            assert message in outcome.message

    refused("0", zero(1), "found a checkpoint without zero_pp_rank_")
    refused("1", zero(0), "found a checkpoint with zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused("1", zero(3), "found a checkpoint without zero_pp_rank_")
    refused("3", zero(1), "found a checkpoint without mp_rank_00_model_states.pt")
    refused("1", zero(1) | BF16, "found a checkpoint without bf16_zero_pp_rank_")
    refused("1", zero(1), "found a checkpoint without zero_pp_rank_", world=4)
    # What DeepSpeed would load nothing of, or another tag
    refused("3", zero(3), "found load_module_only=True", load_module_only=True)
    refused("3", zero(3), "with an older tag", tag="older", load_optimizer_states=False)
    # For which DeepSpeed has an empty message, as for a folder `latest` names that is gone
    refused("1", zero(1), "/gone: found no checkpoint; needed a tag of ['latest one', 'older']", tag="gone")


@pytest.mark.parametrize(
    ("stage", "saved", "loading", "error", "message"),
    [
        (0, (2, "2"), (4, "4"), FileError, "a checkpoint without expp_rank_[23]_mp_rank_00_optim_states.pt"),
        (0, (4, "4"), (2, "2"), FileError, "a checkpoint with expp_rank_2_mp_rank_00_optim_states.pt"),
        (1, (2, "2"), (2, "1"), StateError, "found parameters in other places of DeepSpeed's flat tensors"),
    ],
)
def test_experts_of_another_number_of_ranks_are_refused_on_every_rank(
    tmp_path: Path, stage: int, saved: tuple[int, str], loading: tuple[int, str], error: Any, message: str
) -> None:
    """At stage 0, some ranks lacked a file; at the others, DeepSpeed told to change its parameter_alignment."""
    for (world, kind), loads in ((saved, False), (loading, True)):
        pool = Pool(world)  # DeepSpeed keeps groups of experts, and takes the largest
        try:
            arguments = zero(stage), kind, str(tmp_path)
            outcomes = pool.run_expecting_errors(ds.experts_in_its_format, *arguments, loads=loads, timeout=240.0)
        finally:
            pool.close()
        assert all(outcome.error is (error if loads else None) for outcome in outcomes), outcomes
    assert all(re.search(message, outcome.message) for outcome in outcomes)
    assert all("muonmesh.checkpoint.save" in outcome.message for outcome in outcomes)


def loads_from_folders_of_its_own(folder: str) -> str:
    """What this rank is told if only the first rank finds the file ``latest``."""
    engine = ds.engine_for(zero(1))
    engine.save_checkpoint(folder, tag="saved")
    dist.barrier()
    with pytest.raises(FileError) as caught:
        engine.load_checkpoint(folder if dist.get_rank() == 0 else f"{folder}/elsewhere")
    return str(caught.value)


def test_ranks_that_find_other_checkpoints_are_told_and_none_waits(pools: dict[int, Pool], tmp_path: Path) -> None:
    """A rank that finds none loads nothing, and the first rank waited for it."""
    for message in pools[2].run(loads_from_folders_of_its_own, str(tmp_path)):
        assert "found other tags on some ranks: {0: 'saved', 1: None}; needed the same one" in message


def saves_where_a_rank_may_not(folder: str, stage: int, limited: int) -> tuple[str, str, str]:
    """What this rank is told, what `latest` names then, and what a load finds."""
    engine = ds.engine_for(zero(stage))
    ds.train(engine, range(1))
    engine.save_checkpoint(folder, tag="first")
    ds.train(engine, range(1, 2))
    limit = files_of_at_most(500, deadly=False) if dist.get_rank() == limited else contextlib.nullcontext()
    with limit, pytest.raises(FileError) as caught:
        engine.save_checkpoint(folder, tag="second")
    latest = Path(folder, "latest").read_text()
    loaded, _ = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="third")
    return str(caught.value), latest, Path(loaded).parent.name


@pytest.mark.parametrize(("stage", "limited"), [(0, 0), (1, 0), (1, 1), (3, 1)])
def test_a_rank_that_cannot_write_is_an_error_on_all(
    pools: dict[int, Pool], tmp_path: Path, stage: int, limited: int
) -> None:
    """DeepSpeed raised on that rank alone, and the others waited for it in a barrier."""
    results = pools[2].run(saves_where_a_rank_may_not, str(tmp_path), stage, limited)
    assert results == [results[0]] * 2
    message, latest, loaded = results[0]
    assert message.startswith(f"{tmp_path}/"), message
    assert message.endswith(": could not be written: File too large. Free some space there, then save again"), message
    assert latest == loaded == "first"
    assert (tmp_path / "latest").read_text() == "third"


@pytest.mark.parametrize("name", ["0 bf16", "1", "3"])
def test_weights_without_state_stay(pools: dict[int, Pool], tmp_path: Path, name: str) -> None:
    config = EXACT[name]
    needed = pools[2].run(ds.save_only, config | {"gradient_clipping": 0.5}, str(tmp_path))[0]
    before, after, _ = pools[2].run(ds.load_only, config, str(tmp_path), load_optimizer_states=False)[0]
    assert ds.differences(before, needed) == ds.differences(after, needed) == []
    *_, limit = pools[2].run(ds.load_only, config, str(tmp_path), clip=1.0)[0]
    assert not limit  # that of the engine that saved would clip besides


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_with_convolutions_goes_back_to_a_state(pools: dict[int, Pool], tmp_path: Path, stage: int) -> None:
    for algorithms, wrong in pools[2].run(ds.taken_back, zero(stage), str(tmp_path / "checkpoint")):
        assert wrong == []
        muon = {name for name, algorithm in algorithms.items() if algorithm == "muon"}
        assert muon == {"inner.weight", "mix.weight"}
        assert algorithms["depthwise.weight"] == "adamw"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_to_fp32_finds_the_weights(pools: dict[int, Pool], tmp_path: Path, stage: int) -> None:
    assert pools[2].run(ds.consolidated, zero(stage), str(tmp_path)) == [[], []]


# ---------------------------------------------------------------- refusals


def test_without_deepspeed_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "muonmesh.integrations.deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"Write pip install 'muonmesh\[deepspeed\]'"):
        importlib.import_module("muonmesh.integrations.deepspeed")


@pytest.mark.parametrize(
    ("config", "how"),
    [(zero(1), "missing"), (zero(3), "missing"), (zero(2), "order"), (zero(3), "order"), (zero(1), "one rank")],
)
def test_different_records_are_an_error_when_the_engine_is_made(
    pools: dict[int, Pool], config: dict[str, Any], how: str
) -> None:
    for outcome in pools[2].run_expecting_errors(ds.tampered, config, how):
        assert outcome.error is LayoutError
        assert "Install deepspeed==" in outcome.message


def offload(**settings: Any) -> dict[str, Any]:
    return {"offload_optimizer": {**CPU, **settings}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Muon"}}, "found optimizer=.*; needed none. Remove it and write initialize"),
        ({"zero_allow_untested_optimizer": False} | zero(1), "found zero_allow_untested_optimizer=False"),
        (zero(2, **offload()) | {"zero_force_ds_cpu_optimizer": True}, "found zero_force_ds_cpu_optimizer=True"),
        (FP16, 'found fp16.enabled=True; needed False. Write "zero_optimization": {"stage": 1}'),
        (zero(1) | {"torch_autocast": {"enabled": True, "dtype": "float16"}}, '"dtype": "bfloat16"'),
        (
            zero(1) | {"torch_autocast": {"enabled": True, "dtype": torch.float16}},
            "autocast.dtype=torch.float16",
        ),
        *((zero(stage) | MASTERS, 'add "bf16_optimizer_states": true and remove offload') for stage in (1, 2, 3)),
        (zero(2, **offload()) | STATES, "found bf16.bf16_master_weights_and_grads=True; .*and remove offload"),
        ({"bfloat16": MASTERS["bf16"], **zero(1)}, 'Write "bf16"'),
        (zero(1, cpu_offload=True), 'Write "offload_optimizer": {"device": "cpu"}'),
        (zero(3, cpu_offload_param=True), 'Write "offload_param": {"device": "cpu"}'),
        ({"zero_optimization": True}, 'Write "zero_optimization": {"stage": 1}'),
        (
            zero(3, **offload()) | {"fp16": {"fp16_master_weights_and_grads": True}},
            "engine then has fp32 master weights",
        ),
        (zero(1, elastic_checkpoint=True), "muonmesh.checkpoint.load"),
        (
            zero(1) | {"expert_parallel": {"enabled": True, "autoep_size": 2}},
            "AutoEP packs several parameters into one",
        ),
        (zero(1) | {"checkpoint": {"load_universal": True}}, "found checkpoint.load_universal=True"),
        (zero(3, offload_optimizer={"device": "nvme"}), 'Write "offload_optimizer": {"device": "cpu"}'),
        (zero(3, offload_param={"device": "nvme"}), 'Write "offload_param": {"device": "cpu"}'),
        *((zero(stage, **offload(ratio=0.5)), "Remove ratio to offload everything, or") for stage in (1, 2, 3)),
        (zero(2, zenflow={"topk_ratio": 0.1}), "Remove zenflow"),
        (zero(3, **offload(super_offload=True)), "Remove super_offload"),
        (zero(3, mics_shard_size=2), "Remove mics_shard_size"),
        (zero(3, zero_quantized_weights=True), "found zero_optimization.zero_quantized_weights=True"),
        ({"scheduler": {"type": "Wishful"}}, "Rename it"),
        ({"scheduler": {"params": {"warmup_max_lr": 0.1}}}, 'found a scheduler of type None; .*in "type"'),
    ],
)
def test_what_would_be_wrong_is_refused(config: dict[str, Any], message: str) -> None:
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match="^config: .*" + re.sub(r"[{}]", r"\\\g<0>", message)):
        initialize(model=ds.Model(), config=config)
    assert config == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": {"layouts": {}}}, "Remove layouts"),
        ({"optimizer": {"learning_rate": 1.0}}, "the argument 'learning_rate'"),
        ({"model_parameters": []}, "split by role"),
        ({"clip": {"norm": 1.0}}, "unexpected keyword argument 'norm'"),
        ({"clip": {"max_norm": -1.0}}, "max_norm"),
        ({"clip": 1.0, "config": {"gradient_clipping": 1.0}}, "Remove gradient_clipping"),
        # The rates would be for an lr of 3e-4 that nobody has written: Muon would train with 67 times 0.02.
        (
            {
                "optimizer": {"muon": {"lr": 0.02}, "adamw": {"lr": 3e-4}},
                "config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}},
            },
            "warmup_max_lr=0.02, warmup_min_lr=0.0; needed the lr to which they belong",
        ),
        # DeepSpeed alone would follow the argument and say nothing of the other.
        (
            {"lr_scheduler": lambda optimizer: None, "config": {"scheduler": {"type": "WarmupLR"}}},
            "a scheduler, and lr_scheduler= beside it; needed only one of them",
        ),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        initialize(**{"model": ds.Model(), "config": {}, **arguments})


def test_the_config_is_copied_and_what_is_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("muonmesh.integrations.deepspeed.config.log_dist", lambda message, **_: lines.append(message))
    config: dict[str, Any] = zero(2, offload_optimizer=CPU)
    prepared = prepare_config(read_config(config), has_experts=False)
    assert config == zero(2, offload_optimizer=CPU)
    assert prepared == {
        **config,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    (line,) = lines
    for key in (
        '"zero_allow_untested_optimizer": true',
        '"zero_force_ds_cpu_optimizer": false',
        '"gradient_clipping": 0.0',
    ):
        assert key in line
    assert prepare_config({"gradient_clipping": 3.0}, has_experts=False)["gradient_clipping"] == 3.0
    assert prepare_config({"gradient_clipping": "auto"}, has_experts=False)["gradient_clipping"] == 0.0


def test_a_section_that_is_null_is_missing() -> None:
    """Templates write it. DeepSpeed and the frameworks ask whether the name is there, and then fail on None."""
    config = {"optimizer": None, "scheduler": None, "zero_optimization": None, "bf16": {"enabled": True}}
    assert read_config(config) == BF16
    prepare_host_config(config)
    assert config == BF16 | {"zero_force_ds_cpu_optimizer": False}
    assert take_scheduler({"scheduler": {}}, None) is None
