"""What Megatron's training loop asks of its optimizer: schedules, overflow, zeros, refusals, errors on one stage."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.errors import PlanError, StateError
from muonmesh.integrations.megatron import get_megatron_optimizer
from muonmesh.step.connection import placed_members
from muonmesh.step.parameters import collect
from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.megatron.shapes import MOE, ONE_LAYER, SEQUENCE
from tests.megatron.training import train

COVERS = (
    "integrations.megatron.build.get_megatron_optimizer",
    "integrations.megatron.optimizer.MegatronOptimizer",
)


def built(shape: Shape, **settings: Any) -> tuple[list[Any], Any]:
    host.begin(shape)
    chunks = host.chunks_of(shape)
    return chunks, get_megatron_optimizer(
        host.optimizer_config(shape, **settings.pop("config", {})), chunks, **settings
    )


# ------------------------------------------------------------------ gradients


def built_over_other_gradients() -> list[float]:
    host.begin(Shape())
    chunks = host.chunks_of(Shape())
    for parameter in chunks[0].parameters():
        parameter.main_grad.fill_(dist.get_rank() + 1.0)
    get_megatron_optimizer(host.optimizer_config(Shape()), chunks)
    return sorted({float(parameter.main_grad.max()) for parameter in chunks[0].parameters()})


def test_what_lies_in_main_grad_before_the_first_pass_does_not_matter(workers) -> None:
    """Later versions leave it unwritten where they add up gradients in fp32 and send them in bf16."""
    assert workers(2).run(built_over_other_gradients) == [[1.0], [2.0]]


def gradients_outside_buffers(shape: Shape) -> tuple[int, list[str]]:
    """How many gradients a step reads, and those of them that are no views of Megatron's buffers."""
    chunks, optimizer = built(shape)
    host.backward(shape, chunks, optimizer, 0)
    optimizer.step()
    muon = optimizer.optimizer
    runtime = muon._runtime
    collected = collect(runtime.planned, muon, runtime, None)
    entries = [entry for group_entries in (collected.muon, *collected.adamw) for entry in group_entries if entry]
    gradients = {entry.member.name: local_of(entry.gradient) for entry in entries if entry.gradient is not None}
    read = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    buffers = {buffer.grad_data.untyped_storage().data_ptr() for chunk in chunks for buffer in chunk.buffers}
    return len(read), [n for n, gradient in read.items() if gradient.untyped_storage().data_ptr() not in buffers]


@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_main_grad_is_read_where_it_lies(workers, flat: bool) -> None:
    for count, elsewhere in workers(2).run(gradients_outside_buffers, Shape(dtype=torch.bfloat16, flat=flat)):
        assert count > 4
        assert elsewhere == []


def built_after_a_backward(shape: Shape) -> tuple[bool, float | None, float]:
    """Whether main_grad is as the backward left it after all that is no step, and the norm of the step after that."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    host.backward(shape, chunks, None, 0)
    gradients = {name: gradient.clone() for name, gradient in gathered.gradients(chunks).items()}
    expected = gathered.gather(gathered.local_values(gathered.named(chunks), gradients))
    optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks)
    optimizer.zero_grad()
    optimizer.sharded_state_dict()
    same = all(torch.equal(gradients[name], gradient) for name, gradient in gathered.gradients(chunks).items())
    _, norm, _ = optimizer.step()
    return same, norm, float(torch.cat([gradient.double().flatten() for gradient in expected.values()]).norm())


@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_main_grad_is_megatrons_to_zero(workers, flat: bool) -> None:
    """Building the optimizer, its zero_grad and the state of a checkpoint leave the gradients alone."""
    for same, norm, expected in workers(2).run(built_after_a_backward, Shape(tp=2, flat=flat, dtype=torch.bfloat16)):
        assert same
        assert norm == pytest.approx(expected)


# ------------------------------------------------------------------ schedules


def scheduled() -> list[list[tuple[str, float, float]]]:
    """The rates and decays of all groups at steps 0, 5 and 10 of ten."""
    _, optimizer = built(Shape(tp=2), muon={"lr": 0.2}, adamw={"weight_decay": 0.3}, config={"min_lr": 0.002})
    assert isinstance(optimizer, MegatronOptimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.02,
        min_lr=0.002,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=10,
        wd_incr_style="linear",
    )
    values = []
    for increment in (0, 5, 5):
        scheduler.step(increment)
        values.append([(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups])
    assert get_canonical_lr_for_logging(optimizer.param_groups) == pytest.approx(0.002)
    return values


def test_schedules_keep_ratios_and_leave_vectors_without_decay(workers) -> None:
    for begin, middle, end in workers(2).run(scheduled):
        for step, rate, decay in ((begin, 0.02, 0.1), (middle, 0.011, 0.15), (end, 0.002, 0.2)):
            by_name = {name: (lr, wd) for name, lr, wd in step}
            assert by_name.keys() == {"muon", "adamw.embeddings", "adamw.head", "adamw.vectors"}
            assert by_name["muon"] == pytest.approx((10 * rate, decay))
            assert by_name["adamw.head"] == pytest.approx((rate, 0.3))  # asked for, so it stays
            assert by_name["adamw.vectors"] == pytest.approx((rate, 0.0))


def decoupled() -> dict[str, tuple[float, bool]]:
    shape = Shape()
    config = host.optimizer_config(shape, decoupled_lr=0.005, decoupled_min_lr=0.001)
    _, optimizer = built(
        shape,
        config={"decoupled_lr": 0.005, "decoupled_min_lr": 0.001},
        config_overrides=get_standard_config_overrides(config),
    )
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config", "max_lr", "min_lr")
    assert all(key in group for group in optimizer.param_groups for key in keys)
    return {
        group["name"].partition("[")[0]: (group["max_lr"], group["default_config"]) for group in optimizer.param_groups
    }


def test_a_decoupled_rate_is_that_of_embeddings_and_output_layer(workers) -> None:
    for rates in workers(2).run(decoupled):
        assert rates["adamw.embeddings"] == rates["adamw.head"] == (0.005, False)
        assert rates["muon"] == rates["adamw.vectors"] == (0.02, True)


# ------------------------------------------------------------------ overflow, zeros


def overflow(shape: Shape) -> tuple[Any, bool, list[float]]:
    """A non-finite gradient on the last rank alone, then a good step; what came back, what changed, the scales."""
    chunks, optimizer = built(shape, config={"hysteresis": 1})
    scales = [float(optimizer.get_loss_scale())]
    host.backward(shape, chunks, optimizer, 0)
    before = gathered.gather(gathered.local_values(gathered.named(chunks)))
    if dist.get_rank() == dist.get_world_size() - 1:
        last = list(chunks[-1].parameters())[-1]
        last.main_grad.fill_(float("inf"))
    step_result = optimizer.step()
    after = gathered.gather(gathered.local_values(gathered.named(chunks)))
    scales.append(float(optimizer.get_loss_scale()))
    return step_result, all(torch.equal(before[name], after[name]) for name in before), scales


@pytest.mark.parametrize("flat", [False, True], ids=["whole", "flat"])
def test_an_overflow_on_one_rank_skips_on_all(workers, flat: bool) -> None:
    shape = Shape(pp=2, dtype=torch.float16, flat=flat)
    for step_result, same, (before, after) in workers(2).run(overflow, shape):
        assert step_result == (False, None, None)
        assert same
        assert after == before / 2


def zeros(shape: Shape) -> tuple[int, int, int]:
    chunks, optimizer = built(shape, config={"log_num_zeros_in_grad": True})
    host.backward(shape, chunks, optimizer, 0)
    named = {n: p for n, p in gathered.named(chunks).items() if not getattr(p, "shared", False)}
    whole = gathered.gather(gathered.local_values(named, gathered.gradients(chunks)))
    expected = sum(int((gradient == 0).sum()) for gradient in whole.values())
    counted = optimizer.count_zeros()
    _, _, returned = optimizer.step()
    return returned, counted, expected


@pytest.mark.parametrize(
    "shape",
    [Shape(tp=2), Shape(tp=2, flat=True), Shape(pp=2, tied=True), Shape(ep=2, model=MOE + ONE_LAYER)],
    ids=["TP", "flat", "tied", "experts"],
)
def test_zeros_are_counted_once(workers, shape: Shape) -> None:
    for returned, counted, expected in workers(4).run(zeros, shape):
        assert returned == counted == expected
        assert returned > 0 or shape.tied


# ------------------------------------------------------------------ errors


def one_stage(mistake: str) -> None:
    """Something is wrong on the last of two stages only."""
    shape = Shape(pp=2, dtype=torch.float16 if mistake == "no main_grad" else torch.float32)
    if mistake == "an override of one stage":
        _, optimizer = built(shape, overrides={"output_layer": {"lr": 0.5}})
        rates = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
        assert rates.get("output_layer.weight", 0.5) == 0.5
        return
    if mistake == "an override of no stage":
        built(shape, overrides={"no_such_layer": "adamw"})
    is_last = dist.get_rank() == 1
    if mistake == "a setting":
        built(shape, muon={"momentum": 2.0} if is_last else None)
    chunks, optimizer = built(shape, config={"clip_grad": 0.0 if is_last and mistake == "a limit" else 1.0})
    host.backward(shape, chunks, optimizer, 0)
    if mistake == "a gradient":
        next(iter(chunks[0].parameters())).main_grad = torch.zeros(1) if is_last else torch.zeros(64, 32)
    if mistake == "no main_grad" and is_last:  # found while the loss scale is taken out
        parameter = next(iter(chunks[0].parameters()))
        parameter.grad, parameter.main_grad = torch.zeros_like(parameter), None
    optimizer.step()


def test_an_override_may_name_what_one_stage_has(workers) -> None:
    workers(2).run(one_stage, "an override of one stage")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("an override of no stage", "no_such_layer"),
        ("a setting", "momentum"),
        ("a limit", r"max_norm=inf, policy='adamw_only', .* on rank 1; needed the same"),
        ("a gradient", "gradient of local shape"),
        ("no main_grad", "a gradient in grad and no main_grad"),
    ],
)
def test_an_error_on_one_stage_is_raised_on_every_stage(workers, mistake: str, message: str) -> None:
    begin = time.monotonic()
    first, second = workers(2).run_expecting_errors(one_stage, mistake, timeout=30.0)
    assert time.monotonic() - begin < 30  # gloo would wait for minutes
    assert issubclass(second.error, (ValueError, StateError))
    assert re.search(message, second.message)
    assert first.error is (ValueError if mistake in ("an override of no stage", "a limit") else PlanError)


def stopped(mistake: str, policy: str, **config: Any) -> tuple[str, bool, bool, bool]:
    """Something is wrong on one replica of the last of two stages, and then is mended.

    Returns:
        The error's message; whether weights and gradients are those from before; and whether both of two more steps,
        once all is well again, changed something.
    """
    chunks, optimizer = built(Shape(pp=2), policy=policy, config=config)
    host.backward(Shape(pp=2), chunks, optimizer, 0)
    optimizer.step()
    named, is_last = gathered.named(chunks), dist.get_rank() == dist.get_world_size() - 1
    tensor = optimizer.param_groups[0]["params"][0]
    state, group, gradient = optimizer.optimizer.state[tensor], optimizer.param_groups[0], tensor.main_grad
    momentum, rate = state["momentum_buffer"], group["lr"]
    before = [(p.detach().clone(), p.main_grad.clone()) for p in named.values()]
    if is_last and mistake == "no gradient":
        tensor.main_grad = None
    if is_last and mistake == "a rate":
        group["lr"] = 2 * rate
    if is_last and mistake == "a setting":
        group["momentum"] = 2.0
    if is_last and mistake == "a state":
        state["momentum_buffer"] = torch.zeros(1)
    with pytest.raises((PlanError, StateError, ValueError)) as caught:
        optimizer.step()
    tensor.main_grad, state["momentum_buffer"], group["lr"], group["momentum"] = gradient, momentum, rate, 0.95
    after = [(p.detach(), p.main_grad) for p in named.values()]
    weights, gradients = (
        all(torch.equal(old[i], new[i]) for old, new in zip(before, after, strict=True)) for i in range(2)
    )
    stepped = [optimizer.step()[0] for _ in range(2)]
    moved = not torch.equal(tensor, dict(zip(named.values(), before, strict=True))[tensor][0])
    return str(caught.value), weights, gradients, all(stepped) and moved


@pytest.mark.parametrize(
    ("policy", "config"),
    [("all", {}), ("all", {"clip_grad": 0.0}), ("separate", {})],
    ids=["clipped", "not clipped", "separate"],
)
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no gradient", r"Some of the ranks .2, 3. have a gradient"),
        ("a rate", "on rank 2 and .* on rank 3"),
        ("a setting", "momentum"),
        ("a state", "momentum_buffer a plain tensor of shape"),
    ],
)
def test_nothing_is_written_on_any_stage(
    workers, mistake: str, message: str, policy: str, config: dict[str, Any]
) -> None:
    """What only the flags of a stage find is raised on the other stage too, before it has scaled or written."""
    outcomes = workers(4).run(stopped, mistake, policy, **config, timeout=60.0)
    assert [(weights, gradients, moved) for _, weights, gradients, moved in outcomes] == [(True, True, True)] * 4
    messages = [message_of_rank for message_of_rank, *_ in outcomes]
    assert all("nother rank" in message_of_rank for message_of_rank in messages[:2])
    assert all(re.search(message, message_of_rank) for message_of_rank in messages[2:])


def offloaded() -> None:
    """``--optimizer-cpu-offload`` asks for both; without Transformer Engine 0.16.1 fails on the second."""
    shape = Shape(flat=True, dtype=torch.bfloat16)
    host.begin(shape)
    chunks, config = host.chunks_of(shape), host.optimizer_config(shape, optimizer_cpu_offload=True)
    config.use_precision_aware_optimizer = True
    with pytest.raises(ValueError, match=r"Remove both settings; write muon={'state_device': 'cpu"):
        get_megatron_optimizer(config, chunks)
    get_megatron_optimizer(host.optimizer_config(shape), chunks, muon={"state_device": "cpu"})


def test_offloading_is_refused_by_what_replaces_it(workers) -> None:
    workers(2).run(offloaded)


def unwrapped() -> None:
    host.begin(Shape())
    get_megatron_optimizer(host.optimizer_config(Shape()), [host.chunks_of(Shape())[0].module])


def unreduced() -> bool:
    """Whether Megatron leaves other gradients on ranks that hold the same experts."""
    shape = Shape(tp=2, etp=1, model=MOE + SEQUENCE + ONE_LAYER)
    host.begin(shape)
    chunks = host.chunks_of(shape)
    host.backward(shape, chunks, None, 0)
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    expert = gathered.named(chunks)[name]
    experts = [torch.zeros_like(expert) for _ in range(2)]
    dist.all_gather(experts, expert.main_grad)
    differ = not torch.equal(*experts)
    dist.all_gather(experts, expert.detach())
    with pytest.raises(ValueError, match=r"does not average .* Set expert_model_parallel_size above 1, or expert_t"):
        get_megatron_optimizer(host.optimizer_config(shape), chunks)
    return differ and torch.equal(*experts)


def test_experts_that_megatron_lets_drift_apart_are_refused(workers) -> None:
    """Of 0.16.1. Later versions average their gradients, and they are trained as one process trains them."""
    if not host.LATER:
        assert workers(2).run(unreduced) == [True, True]
        return
    for trained in workers(2).run(train, Shape(tp=2, etp=1, model=MOE + SEQUENCE + ONE_LAYER)):
        assert trained.differing == {}
        assert trained.norms == pytest.approx(trained.expected, rel=1e-6)


# ------------------------------------------------------------------ the rest of the interface


def by_collection(shape: Shape) -> bool:
    """Whether groups passed as a collection, without those of experts too, give the layouts of `parallel_state`."""
    host.begin(shape)
    chunks, every = host.chunks_of(shape), ProcessGroupCollection.use_mpu_process_groups()
    layouts = []
    for collection in (None, every, ProcessGroupCollection(tp=every.tp, pp=every.pp, dp=every.dp)):
        optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks, pg_collection=collection)
        layouts.append([member.storage.layout for member in placed_members(optimizer.optimizer)])
    return layouts[0] == layouts[1] == layouts[2]


def test_groups_may_be_passed(workers) -> None:
    assert workers(4).run(by_collection, Shape(tp=2, flat=True)) == [True] * 4


def incomplete() -> None:
    host.begin(Shape())
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp"])
    get_megatron_optimizer(host.optimizer_config(Shape()), host.chunks_of(Shape()), pg_collection=groups)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(incomplete, "pg_collection: found no pp; needed tp, pp, and dp_cp or dp"), (unwrapped, "found a GPTModel")],
)
def test_what_is_not_all_there_is_told(workers, mistake: Any, message: str) -> None:
    for outcome in workers(2).run_expecting_errors(mistake):
        assert outcome.error is ValueError
        assert message in outcome.message


def offered(shape: Shape) -> None:
    chunks, optimizer = built(shape)
    assert optimizer.chained_optimizers == [optimizer]
    assert optimizer.is_stub_optimizer is False
    host.backward(shape, chunks, optimizer, 0)
    assert optimizer.prepare_grads() is False
    norm = optimizer.get_grad_norm()
    gradients: list[Tensor] = list(
        gathered.gather(gathered.local_values(gathered.named(chunks), gathered.gradients(chunks))).values()
    )
    assert norm == pytest.approx(float(torch.cat([g.double().flatten() for g in gradients]).norm()))
    assert optimizer.step_with_ready_grads() is True
    parameters = list(chunks[0].parameters())
    assert {id(p) for p in optimizer.get_parameters()} == {id(p) for p in parameters}
    for parameter in parameters:
        assert parameter.main_param_sharded == shape.flat
        assert parameter.main_param.dtype == torch.float32
        parameter.data.fill_(0.5)
    optimizer.reload_model_params()
    assert all(bool((parameter.main_param == 0.5).all()) for parameter in parameters)
    assert "muon" in str(optimizer.explain())
    with pytest.raises(StateError, match=r"linear_proj.weight: found no state of it; needed that of all parameters"):
        optimizer.load_state_dict({"state": {}, "param_groups": {}})
    with pytest.raises(StateError, match=r"reload_model_params: found a state dict to take masters from"):
        optimizer.reload_model_params({"model": {}})
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("flat", [False, True], ids=["whole", "flat"])
def test_what_loops_read(workers, flat: bool) -> None:
    workers(2).run(offered, Shape(tp=2, flat=flat, dtype=torch.bfloat16))


# ------------------------------------------------------------------ weights that other code writes


def moved_from_written(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """How far a tiny step takes each weight from what was written; and masters that are saved, but not its own."""
    chunks, optimizer = built(shape)
    host.backward(shape, chunks, optimizer, 0)
    optimizer.step()
    parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.data.clamp_(-0.004, 0.004)
    stored = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    optimizer.sharded_state_dict()
    muon = optimizer.optimizer
    stale = [
        member.name
        for member in placed_members(muon)
        if not torch.equal(local_of(muon.state[member.tensor]["master"]).to(shape.dtype), local_of(member.tensor))
    ]
    for group in muon.param_groups:
        group["lr"] = 1e-9
    optimizer.zero_grad()
    host.backward(shape, chunks, optimizer, 1)
    optimizer.step()
    return {name: float((p.detach().float() - stored[name]).abs().max()) for name, p in parameters.items()}, stale


@pytest.mark.parametrize("flat", [False, True], ids=["DDP", "distributed optimizer"])
def test_weights_that_other_code_writes_are_respected(workers, flat: bool) -> None:
    for far, stale in workers(2).run(moved_from_written, Shape(dtype=torch.bfloat16, flat=flat)):
        assert stale == []
        assert len(far) > 4
        assert {name: distance for name, distance in far.items() if distance > 2.0**-8 * 0.004} == {}
