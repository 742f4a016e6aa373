"""A model for DeepSpeed's engine whose reduced gradients are known exactly, and what one process makes of them.

The loss is linear in every parameter, so a gradient is what the forward is given: small integers times a power of two,
different on every rank and in every micro-batch. Their mean over ranks and micro-batches is exact in every dtype,
however DeepSpeed reduces it. So the gradient that Muon gets is known without asking the engine where it put it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import logging
import math
import os
import re
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # tests/gpu asks for a GPU

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.clip.norm_means import means_of
from muonmesh.comm.process_groups import group_of
from muonmesh.errors import PlanError
from muonmesh.integrations.deepspeed import initialize
from muonmesh.integrations.deepspeed.checkpoint import expert_names
from muonmesh.integrations.deepspeed.optimizer import EngineOptimizer
from muonmesh.integrations.deepspeed.records import read_flats
from muonmesh.step.connection import placed_members
from tests.support import cases, problem

deepspeed.utils.logger.setLevel(logging.ERROR)
# Collectives are gloo's: DeepSpeed would compile an extension for shared memory, which only inference uses.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls collectives by old names

STEPS = 4


class Linear(nn.Linear):
    def forward(self, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        return _dot(self, gradients, prefix)


class Embedding(nn.Embedding):
    def forward(self, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        return _dot(self, gradients, prefix)


class Norm(nn.LayerNorm):
    def forward(self, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        return _dot(self, gradients, prefix)


def _dot(module: nn.Module, gradients: dict[str, Tensor], prefix: str) -> Tensor:
    terms = [
        (p * gradients[f"{prefix}.{name}"].to(p.dtype)).sum() for name, p in module.named_parameters(recurse=False)
    ]
    return torch.stack(terms).sum()


class Model(nn.Module):
    """Shapes that no number of ranks divides; one matrix never has a gradient and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(29, 8)
        self.qkv = Linear(14, 42)
        self.norm = Norm(13)
        self.up = Linear(20, 33)
        self.idle = Linear(11, 9, bias=False)
        self.frozen = Linear(5, 6)
        self.down = Linear(33, 47, bias=False)
        self.lone = Linear(1, 7, bias=False)
        self.head = Linear(19, 10)
        self.frozen.requires_grad_(False)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        reached = {name.partition(".")[0] for name in gradients}
        return torch.stack([module(gradients, name) for name, module in self.named_children() if name in reached]).sum()


SHAPES = {name: tuple(p.shape) for name, p in Model().named_parameters()}
OPTIMIZER: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.9,
    "overrides": {"qkv.weight": {"matrices": ("rows", 14, 14, 14)}, "head.weight": "adamw"},
    "adamw": {"lr": 0.01},
}


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def build(*, zero_init: dict[str, Any] | None = None) -> Model:
    """The model; under `zero.Init` its values are set through DeepSpeed's own door."""
    drawn = values()
    if zero_init is None:
        model = Model()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(drawn[name])
        return model
    with deepspeed.zero.Init(config_dict_or_path=zero_init):
        model = Model()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(drawn[name])
    return model


def gradients_of(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """What one rank's forward is given in one micro-batch: its gradients."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    drawn = {n: torch.randint(-4, 5, shape, generator=generator).float() for n, shape in SHAPES.items()}
    drawn["idle.weight"].zero_()
    if step == 1:
        drawn["lone.weight"].zero_()
    return {name: value * 2.0 ** (3 * (step % 3) - 4) for name, value in drawn.items()}


def reduced(step: int, micros: int, sources: int | None = None) -> dict[str, Tensor]:
    """The mean over ranks, or over so many of them, and micro-batches."""
    world = sources or dist.get_world_size()
    drawn = [gradients_of(step, micro, rank) for micro in range(micros) for rank in range(world)]
    return {name: torch.stack([gradients[name] for gradients in drawn]).sum(0) / len(drawn) for name in SHAPES}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed refuses fp16 where its accelerator says no; torch computes it on a CPU all the same."""
    with unittest.mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        yield


def as_launchers_do() -> None:
    """Set what torchrun sets."""
    rank = str(dist.get_rank())
    local = "0" if get_accelerator().device_name() == "cuda" else rank  # ranks of tests/gpu share one GPU
    os.environ.update(RANK=rank, LOCAL_RANK=local, WORLD_SIZE=str(dist.get_world_size()))


def engine_for(config: dict[str, Any], model: nn.Module | None = None, *, clip: Any = None, **optimizer: Any) -> Any:
    as_launchers_do()
    settings = {"compute_dtype": torch.float32, **OPTIMIZER, **optimizer}
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    return initialize(model=model or build(), config=config, optimizer=settings, clip=clip)[0]


def ready() -> None:
    """What takes long the first time: to import DeepSpeed and all that an engine needs."""
    engine_for(zero(1)).destroy()
    gc.collect()
    gc.freeze()  # engines look for cycles whenever they say how much memory they use


Change = Callable[[int, dict[str, Tensor]], None]
"""Changes a step's gradients in place."""


def train(engine: Any, steps: range, *, sources: int | None = None, change: Change = lambda *_: None) -> None:
    """Take steps; with ``sources`` that many ranks' gradients are shared out, so that the mean has no world size."""
    source = dist.get_rank() % (sources or dist.get_world_size())
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            drawn = gradients_of(step, micro, source)
            change(step, drawn)
            engine.backward(engine({name: value.to(engine.device) for name, value in drawn.items()}))
            engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    """The fp32 weights, whole, through DeepSpeed's own function; where it has none (stage 0), as it keeps them."""
    if hasattr(engine.optimizer, "fp32_groups"):
        names = {id(p): name for name, p in engine.module.named_parameters()}
        groups = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        return {names[id(p)]: master.detach().clone() for p, master in pairs}
    gathered = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            gathered[name] = (parameter if whole is None else whole).detach().float().cpu().clone()
    return gathered


def computed_with(engine: Any) -> dict[str, Tensor]:
    """The weights that the module computes with."""
    gathered = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            gathered[name] = parameter.detach().float().cpu().clone()
    return gathered


STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""The keys of state by element."""


def states(engine: Any) -> dict[str, Tensor]:
    """Momenta and moments, whole, through DeepSpeed's own function."""
    optimizer, gathered, parameters = engine.basic_optimizer, {}, dict(engine.module.named_parameters())
    for _, name, tensor, _ in entries_of(optimizer):
        for key, value in optimizer.state[tensor].items():
            if key in STATE and value.shape == tensor.shape:
                whole = safe_get_full_optimizer_state(parameters[name], key)
                gathered[f"{name}.{key}"] = whole.detach().float().cpu().clone()
    return gathered


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Weights and states, whole, by name."""
    return {**weights(engine), **states(engine)}


class OneProcess:
    """A single-process Muon on whole weights, fp32 if not said, that is given the same reduced gradients."""

    def __init__(
        self, dtype: torch.dtype, device: Any = "cpu", *, weights: torch.dtype = torch.float32, **optimizer: Any
    ) -> None:
        self.model = Model()
        for name, parameter in self.model.named_parameters():
            parameter.data = values()[name].to(device, dtype).to(weights)
        settings = {"compute_dtype": torch.float32, **OPTIMIZER, **optimizer}
        self.optimizer = mm.from_model(self.model, process_group="local", **settings)

    def step(self, gradients: dict[str, Tensor], **clip: Any) -> Any:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True)
        norms = self.optimizer.clip_grad_norm_(**clip) if clip else None
        self.optimizer.step()
        return norms

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().float().cpu().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def states(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key in STATE and value.shape == parameter.shape:
                    tensors[f"{name}.{key}"] = value.float().cpu().clone()
        return tensors

    @property
    def snapshot(self) -> dict[str, Tensor]:
        return {**self.weights, **self.states}


def differences(tensors: dict[str, Tensor], needed: dict[str, Tensor]) -> list[str]:
    """Names of what is not bit for bit the same."""
    wrong = [f"only on one side: {sorted(tensors.keys() ^ needed.keys())}"] if tensors.keys() != needed.keys() else []
    for name in tensors.keys() & needed.keys():
        if not torch.equal(tensors[name], needed[name]):
            wrong.append(f"{name}: {float((tensors[name] - needed[name]).abs().max()):.1e}")
    return sorted(wrong)


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(key, {}).get("enabled"):
            return dtype
    return torch.float32


@contextlib.contextmanager
def running(config: dict[str, Any], model: nn.Module | None = None, **settings: Any) -> Iterator[Any]:
    """An engine, which is destroyed at the end."""
    with fp16_on_cpu():
        engine = engine_for(config, model, **settings)
        yield engine
        engine.destroy()


@contextlib.contextmanager
def beside(
    config: dict[str, Any],
    model: nn.Module | None = None,
    *,
    clip: Any = None,
    single: dict[str, Any] | None = None,
    **optimizer: Any,
) -> Iterator[tuple[Any, OneProcess]]:
    """A running engine, and one process with the same settings and those of ``single``."""
    with running(config, model, clip=clip, **optimizer) as engine:
        yield engine, OneProcess(dtype_of(config), engine.device, **{**optimizer, **(single or {})})


def step_both(engine: Any, single: OneProcess, step: int, *, times: int = 1, **clip: Any) -> Any:
    """Step an engine, and one process with its mean gradients so many ``times``; return the norms of the latter."""
    train(engine, range(step, step + 1))
    mean = reduced(step, engine.gradient_accumulation_steps())
    return single.step({name: times * gradient for name, gradient in mean.items()}, **clip)


def exactness(
    config: dict[str, Any],
    *,
    between: Callable[[Any, OneProcess, int], None] = lambda *_: None,
    zero_init: bool = False,
    heads: dict[str, int] | None = None,
    use_muon: str | None = None,
    single: dict[str, Any] | None = None,
    times: int = 1,
    **optimizer: Any,
) -> list[str]:
    """Train some steps and return what differs from one process: weights, module, states.

    With ``heads`` the engine's parameters have DeepSpeed's tag of so many heads, and those of one process are told.
    With ``use_muon`` those whose names it matches have DeepSpeed's tag of its own Muon, and the others deny it.
    ``between`` is called with both before each step. The gradients of one process are so many ``times`` as large.
    """
    model = build(zero_init={"train_micro_batch_size_per_gpu": 1, **config} if zero_init else None)
    for name, parameter in model.named_parameters() if use_muon is not None else ():
        parameter.use_muon = re.fullmatch(use_muon, name) is not None  # type: ignore[attr-defined]
    single_settings = dict(single or {})
    if heads is not None:
        for name, count in heads.items():
            model.get_parameter(name).muon_num_heads = count  # type: ignore[attr-defined]
        matrices = {name: {"matrices": ("heads", count, 0)} for name, count in heads.items()}
        single_settings["overrides"] = {**OPTIMIZER["overrides"], **matrices}
    with beside(config, model, single=single_settings, **optimizer) as (engine, process):
        frozen = {name: v for name, v in computed_with(engine).items() if name.startswith("frozen")}
        wrong = [f"before: {line}" for line in differences(weights(engine), process.weights)]
        for step in range(STEPS):
            between(engine, process, step)
            step_both(engine, process, step, times=times)
        wrong += differences(weights(engine), process.weights)
        dtype = dtype_of(config)
        expected = {name: value.to(dtype).float() for name, value in process.weights.items()} | frozen
        wrong += [f"module: {line}" for line in differences(computed_with(engine), expected)]
        # DeepSpeed's own function finds no state that has been away.
        if engine.zero_optimization() and between is not away_and_back:
            wrong += [f"state: {line}" for line in differences(states(engine), process.states)]
    return wrong


def away_and_back(engine: Any, _: OneProcess, step: int) -> None:
    """Move the state to the host and back. At stage 3 the engine moves those of its own Adam alone, and says so."""
    is_refused = engine.zero_optimization_stage() == 3
    refusal = pytest.raises(AssertionError, match=r"^Offloading is supported only for DeepSpeed FusedAdam\.$")
    if step == 2:
        with refusal if is_refused else contextlib.nullcontext():
            engine.offload_states()
            engine.reload_states()


def from_half(config: dict[str, Any]) -> bool:
    """Whether a model that was cast to fp16 before the engine was made trains on."""
    with running(config, build().half()) as engine:
        before = weights(engine)
        train(engine, range(2))
        after = weights(engine)
        finite = all(bool(weight.isfinite().all()) for weight in after.values())
        return finite and not torch.equal(after["up.weight"], before["up.weight"])


# ---------------------------------------------------------------- weights that other code writes


def _write(engine: Any, how: str) -> dict[str, Tensor]:
    """Write into the module as its users do, on every rank alike; return its weights."""
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if how == "load_state_dict" and not hasattr(parameters[0], "ds_id"):
        engine.module.load_state_dict({name: value.to(parameters[0].dtype) for name, value in values().items()})
        return computed_with(engine)
    drawn = values()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        parted = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=parted), torch.no_grad():
            if how == "clamp":
                parameter.clamp_(-0.5, 0.5)
            else:
                parameter.copy_(drawn[name])
    return computed_with(engine)


def written(how: str, engine: Any, single: OneProcess, step: int) -> None:
    """Write weights of both alike before the third step, and fp32 weights alone before the last."""
    if step == 2:
        stored = _write(engine, how)
        for name, exact in single.model.named_parameters():
            if exact.requires_grad:
                other = stored[name] != exact.detach().to(dtype_of(engine.config)).float()
                exact.data[other] = stored[name][other]
    elif step == 3 and engine.zero_optimization():
        third = values()["up.weight"] / 3
        safe_set_full_fp32_param(engine.module.up.weight, third)
        single.model.up.weight.data.copy_(third)


def fill(engine: Any, *names: str) -> None:
    """Write weights of the module that no weight of the model rounds to."""
    for name in names:
        parameter = engine.module.get_parameter(name)
        parted = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=parted), torch.no_grad():
            parameter.fill_(-9.0)


def written_beside(engine: Any, single: OneProcess, step: int) -> None:
    """Before the third step, write an fp32 weight, and in the module weights that lie in the same flat and others."""
    if step == 2:
        third = values()["up.weight"] / 3
        safe_set_full_fp32_param(engine.module.up.weight, third)
        single.model.up.weight.data.copy_(third)
        fill(engine, "down.weight", "norm.bias")
        for written_parameter in (single.model.down.weight, single.model.norm.bias):
            written_parameter.data.fill_(-9.0)


def written_later(config: dict[str, Any], folder: str | None, **how: Any) -> list[str]:
    """Write into the module after a load, or after the state was away; what a step at rate 0 changes."""
    with running(config) as engine:
        train(engine, range(2))
        if folder is None:
            engine.offload_states()
            engine.reload_states()
        else:
            engine.save_checkpoint(folder, tag="saved")
            train(engine, range(2, 3))
            engine.load_checkpoint(folder, **how)
        stored = _write(engine, "clamp")
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, range(3, 4))
        return differences(computed_with(engine), stored)


def fp32_written_and_saved(config: dict[str, Any], folder: str, *, directly: bool) -> list[str]:
    """Write fp32 weights and save; what differs from one process after a step, and from the written ones once loaded.

    Args:
        config: The engine's config.
        folder: Where to save.
        directly: Whether to write into DeepSpeed's flat tensors, and not by its function.
    """
    with beside(config) as (engine, single):
        for step in range(2):
            step_both(engine, single, step)
        if directly:
            for flat in read_flats(engine):
                flat.tensor.data.mul_(-1.0)
            for parameter in single.model.parameters():
                parameter.data.mul_(-1.0 if parameter.requires_grad else 1.0)
        else:
            third = values()["up.weight"] / 3
            safe_set_full_fp32_param(engine.module.up.weight, third)
            single.model.up.weight.data.copy_(third)
        saved = single.weights
        engine.save_checkpoint(folder, tag="saved")
        step_both(engine, single, 2)
        wrong = differences(weights(engine), single.weights)
        engine.load_checkpoint(folder, tag="saved")
        wrong += [f"loaded: {line}" for line in differences(weights(engine), saved)]
        train(engine, range(2, 3))
        return wrong + [f"after: {line}" for line in differences(weights(engine), single.weights)]


# ---------------------------------------------------------------- checkpoints


MEASURED = {"max_norm": 1e9, "policy": "separate", "skip_above": "1e9x"}  # counts norms; clips and skips nothing


def means(engine: Any) -> dict[str, Tensor]:
    """The running means of the norms, without the last bits, in which sums over other ranks may differ."""
    return {"norm means": means_of(engine.basic_optimizer.param_groups, torch.device("cpu")).float()}


@functools.cache
def source() -> cases.Source:
    """The model for the layouts of `tests.support.cases`, in the groups that `from_model` makes."""
    groups = mm.split_params(build(), overrides=OPTIMIZER["overrides"], adamw=OPTIMIZER["adamw"])
    parameters: dict[str, tuple[tuple[int, ...], Any]] = {}
    for group in groups:
        specs = group.get("matrices") or ["adamw"] * len(group["params"])
        for name, spec in zip(group["param_names"], specs, strict=True):
            parameters[name] = SHAPES[name], spec or "whole"
    return cases.Source(parameters, lambda seed: {name: values()[name] for name in parameters}, groups)


def in_layout(layout: str) -> cases.Case:
    shared = {key: OPTIMIZER[key] for key in ("lr", "momentum")}
    case = cases.build(layout, source(), compute_dtype=torch.float32, **shared)
    for name in SHAPES.keys() - source().parameters.keys():  # what is frozen, or a flat buffer
        problem.Bag.put(case.model, name, nn.Parameter(values()[name], requires_grad=False))  # type: ignore[arg-type]
    return case


def train_case(case: cases.Case, steps: range) -> None:
    for step in steps:
        gradients = reduced(step, 1, sources=2)
        case.give({name: gradients[name] for name in source().parameters})
        case.optimizer.step()


def uninterrupted() -> dict[str, Tensor]:
    """Weights and state of one process after all steps, whose gradients are those of two ranks."""
    single = OneProcess(torch.float32)
    for step in range(STEPS):
        single.step(reduced(step, 1, sources=2))
    return single.snapshot


def save_anywhere(layout: str | dict[str, Any], folder: str) -> None:
    """Train half of the steps in a layout, or in an engine with a config, and save with `muonmesh.checkpoint`."""
    if isinstance(layout, str):
        case = in_layout(layout)
        train_case(case, range(STEPS // 2))
        mm.checkpoint.save(folder, case.model, case.optimizer)
        return
    with running(layout) as engine:
        train(engine, range(STEPS // 2), sources=2)
        mm.checkpoint.save(folder, engine, engine)


def load_anywhere(layout: str | dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Load that into what has trained on something else, train the other half and return weights and state."""
    if isinstance(layout, str):
        case = in_layout(layout)
        train_case(case, range(1, 2))
        mm.checkpoint.load(folder, case.model, case.optimizer)
        train_case(case, range(STEPS // 2, STEPS))
        trained = tuple(source().parameters)
        return {n: value for n, value in case.whole().items() if n.startswith(trained) and not n.endswith(".step")}
    with running(layout) as engine:
        train(engine, range(1, 2), sources=2)
        mm.checkpoint.load(folder, engine.module, engine.optimizer)
        before = computed_with(engine)
        assert all(torch.equal(before[name], weight) for name, weight in weights(engine).items())
        train(engine, range(STEPS // 2, STEPS), sources=2)
        return weights(engine) | (states(engine) if engine.zero_optimization() else {})


def save(config: dict[str, Any], folder: str, *, steps: int = 2, **optimizer: Any) -> dict[str, Tensor]:
    """Train, save in DeepSpeed's format and in ours, and return what the next steps make of it."""
    with running(config, clip=MEASURED, **optimizer) as engine:
        train(engine, range(steps), sources=2)
        for group in engine.optimizer.param_groups:
            group["lr"] = group["lr"] / 4  # as a schedule would
        engine.save_checkpoint(folder, tag="saved")
        mm.checkpoint.save(f"{folder}/ours", engine, engine)
        train(engine, range(steps, STEPS), sources=2)
        return snapshot(engine) | means(engine)


def resume(config: dict[str, Any], folder: str, how: str, *, steps: int = 2, **optimizer: Any) -> dict[str, Tensor]:
    """Load into an engine that has trained on something else, and train on."""
    with running(config, clip=MEASURED, **optimizer) as engine:
        train(engine, range(1), sources=2)
        if how == "ours":
            mm.checkpoint.load(f"{folder}/ours", engine, engine)
        else:
            engine.load_checkpoint(folder, tag="saved")
        algorithms = [group["algorithm"] for group in engine.optimizer.param_groups]
        assert algorithms == [optimizer.get("rule", "muon"), *["adamw"] * (len(algorithms) - 1)], algorithms
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        assert rates == [0.005, *[0.0025] * (len(rates) - 1)], rates
        train(engine, range(steps, STEPS), sources=2)
        return snapshot(engine) | means(engine)


def save_only(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Train a step, save under two tags and return the weights, which move between them."""
    with running(config) as engine:
        train(engine, range(1), sources=2)
        engine.save_checkpoint(folder, tag="older")
        train(engine, range(1, 2), sources=2)
        engine.save_checkpoint(folder, tag="latest one")
        return computed_with(engine)


def load_only(config: dict[str, Any], folder: str, clip: Any = None, **how: Any) -> tuple[Any, ...]:
    """Load; the weights before and after a step at rate 0, and the limit by which the engine itself clips."""
    with running(config, clip=clip) as engine:
        engine.load_checkpoint(folder, **how)
        before = computed_with(engine)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, range(1), sources=2)
        return before, computed_with(engine), getattr(engine.optimizer, "clip_grad", None)


class Convolutions(nn.Module):
    """An ordinary convolution, which Muon flattens, and a depthwise one, which is AdamW's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.mix = nn.Linear(8, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.inner(self.patches(x))).flatten(2).mean(-1)
        return self.head(self.mix(x)).square().mean()


def taken_back(config: dict[str, Any], folder: str) -> tuple[dict[str, str], list[str]]:
    """Take steps, go back to a state, take them again; each parameter's algorithm and what differs."""
    torch.manual_seed(0)
    with running(config, Convolutions(), overrides={}) as engine:

        def steps(numbers: range) -> dict[str, Tensor]:
            for number in numbers:
                torch.manual_seed(10 * number + dist.get_rank())
                engine.backward(engine(torch.randn(4, 3, 8, 8)))
                engine.step()
            return weights(engine)

        before = steps(range(2))
        mm.checkpoint.save(folder, engine, engine)
        after = steps(range(2, 4))
        wrong = [name for name in after if torch.equal(after[name], before[name])]
        mm.checkpoint.load(folder, engine, engine)
        wrong += differences(weights(engine), before) + differences(steps(range(2, 4)), after)
        groups = engine.basic_optimizer.param_groups
        algorithms = {name: group["algorithm"] for group in groups for name in group["parameters"]}
        return algorithms, wrong


# ---------------------------------------------------------------- what a step does


def same_rates(engine: Any, single: OneProcess) -> list[float]:
    """Give one process the rates of an engine's groups, and return them."""
    rates = [float(group["lr"]) for group in engine.optimizer.param_groups]
    for group, rate in zip(single.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return rates


def scheduled(config: dict[str, Any]) -> tuple[list[list[float]], list[str]]:
    """The rates at each step, by group, and what differs from one process that is given the same rates."""
    rates: list[list[float]] = []
    wrong = exactness(config, between=lambda engine, single, _: rates.append(same_rates(engine, single)))
    return rates, wrong


def warmed_up(config: dict[str, Any]) -> list[str]:
    """Train from rate 0 with rows of the embedding, one rank's part of it, that only the last step uses."""

    def late_rows(step: int, gradients: dict[str, Tensor]) -> None:
        if step < STEPS - 1:
            gradients["embed.weight"][8:] = 0.0

    with beside(config) as (engine, single):
        for step in range(STEPS):
            same_rates(engine, single)
            train(engine, range(step, step + 1), change=late_rows)
            mean = reduced(step, 1)
            late_rows(step, mean)
            single.step(mean)
        return differences(snapshot(engine), single.snapshot)


def rates_after_warm_up(config: dict[str, Any], **rates: Any) -> list[float]:
    """The rates of all groups after a warm-up of two steps, where nobody has written ``lr``."""
    as_launchers_do()
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    engine = initialize(model=build(), config=config, optimizer={"compute_dtype": torch.float32, **rates})[0]
    train(engine, range(3))
    reached = [float(group["lr"]) for group in engine.basic_optimizer.param_groups]
    engine.destroy()
    return reached


ABSENT = {(1, 0), (1, 1), (2, 1), (3, 0)}
"""Steps and micro-batches whose forward leaves out some modules: both of a step, the last and the first."""


def left_out(config: dict[str, Any]) -> list[str]:
    """Train with modules that some forwards leave out, as a layer that is dropped or an expert without tokens."""

    def of_reached(step: int, micro: int, rank: int) -> dict[str, Tensor]:
        absent = ("up.", "down.", "norm.", "head.") if (step, micro) in ABSENT else ()
        return {n: g for n, g in gradients_of(step, micro, rank).items() if not n.startswith(absent)}

    micros, by_hand = range(2), not config.get("managed_gradient_accumulation", True)
    with beside(config if by_hand else {**config, "gradient_accumulation_steps": len(micros)}) as (engine, single):
        for step in range(STEPS + 1):
            for micro in micros:
                engine.backward(engine(of_reached(step, micro, dist.get_rank())) / (len(micros) if by_hand else 1))
                if not by_hand or micro == micros[-1]:
                    engine.step()
            mean = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            for micro, rank in itertools.product(micros, range(dist.get_world_size())):
                for name, gradient in of_reached(step, micro, rank).items():
                    mean[name] += gradient / (len(micros) * dist.get_world_size())
            single.step(mean)
        return differences(snapshot(engine), single.snapshot)


def stepped_without_backward(config: dict[str, Any]) -> list[str]:
    """Step again without a backward pass; what differs from one process with gradients of 0."""
    with beside(config) as (engine, single):
        step_both(engine, single, 0)
        engine.step()
        single.step({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        return differences(snapshot(engine), single.snapshot)


def stopped(config: dict[str, Any], number: int, folder: str) -> tuple[str, list[str]]:
    """Let one rank have a wrong rate in one group at the third step; the message, and what differs after two more.

    One process leaves out the third step, though DeepSpeed steps one group after the other.
    """
    with beside(config) as (engine, single):
        for step in range(2):
            step_both(engine, single, step)
        engine.save_checkpoint(folder, tag="saved")
        engine.load_checkpoint(folder, tag="saved")  # torch then makes a new list of groups
        groups = engine.basic_optimizer.param_groups
        rate = groups[number]["lr"]
        groups[number]["lr"] = -1.0 if dist.get_rank() else rate
        with pytest.raises((PlanError, ValueError)) as caught:
            train(engine, range(2, 3))
        groups[number]["lr"] = rate
        for step in range(3, 5):
            step_both(engine, single, step)
        return str(caught.value), differences(snapshot(engine), single.snapshot)


def overflowing(config: dict[str, Any], spoiled: int) -> tuple[list[str], int, float]:
    """Train with a gradient that overflows on one rank at one step; what differs from skipping that step."""

    def overflow(step: int, gradients: dict[str, Tensor]) -> None:
        if step == spoiled and dist.get_rank() == 1:
            gradients["up.weight"][3, 5] = torch.inf

    with beside(config) as (engine, single):
        train(engine, range(STEPS), change=overflow)
        for step in range(STEPS):
            if step != spoiled:
                single.step(reduced(step, 1))
        wrong = differences(snapshot(engine), single.snapshot)
        return wrong, engine.skipped_steps, float(engine.optimizer.loss_scale)


def clipped(
    config: dict[str, Any], clip: dict[str, Any], steps: int = STEPS
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """What differs from one process that clips by the same policy, and both's norms."""
    norm_pairs = []
    with beside(config, clip=clip) as (engine, single):
        for step in range(steps):
            norms = step_both(engine, single, step, **clip)
            norms_of_both = engine.basic_optimizer.norms, norms
            norm_pairs.append(
                tuple((float(n.total), float(n.muon), float(n.adamw), bool(n.skipped)) for n in norms_of_both)
            )
        return differences(weights(engine), single.weights), norm_pairs


def moved_with_engine_clipping(limit: float) -> dict[float, float]:
    """How far Muon's weights move without and with DeepSpeed's own clipping."""
    moved = {}
    for clipping in (0.0, limit):
        with running(zero(2) | {"gradient_clipping": clipping}, weight_decay=0.0) as engine:
            before = weights(engine)
            train(engine, range(1))
            moved[clipping] = float((weights(engine)["up.weight"] - before["up.weight"]).norm())
    return moved


def moved_at_scales(stage: int, scales: list[float]) -> list[Tensor]:
    """One of Muon's weights after a step, for gradients of several sizes."""
    moved = []
    for scale in scales:
        with running(zero(stage)) as engine:
            train(engine, range(1), change=lambda _, drawn, by=scale: [value.mul_(by) for value in drawn.values()])
            moved.append(weights(engine)["up.weight"])
    return moved


def poisoned(stage: int) -> list[str]:
    """Fill all padding of weights, momenta and gradients with NaN; what differs from one process, clipping included."""
    clip = {"max_norm": 1.0, "policy": "all"}
    with beside(zero(stage), clip=clip) as (engine, single):
        optimizer, padding = engine.basic_optimizer, {}
        for muon in optimizer.muons:
            tensor = muon.param_groups[0]["params"][0]
            free = torch.ones(tensor.numel(), dtype=torch.bool)
            for layout in layouts_in(muon).values():
                for _, length, start in layout.intervals_of(dist.get_rank()):
                    free[start : start + length] = False
            padding[id(tensor)] = free
            tensor.data[free] = torch.nan
            for key in STATE:
                if key in optimizer.state[tensor]:
                    optimizer.state[tensor][key][free] = torch.nan
        honest = optimizer.step

        def step() -> None:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    tensor.grad = tensor.grad.clone()  # DeepSpeed's own buffer has a norm of its own
                    tensor.grad[padding[id(tensor)]] = torch.nan
            honest()

        optimizer.step = step
        for number in range(STEPS):
            step_both(engine, single, number, **clip)
        wrong = differences(weights(engine), single.weights)
    count = torch.tensor(sum(int(free.sum()) for free in padding.values()))
    dist.all_reduce(count)
    return wrong if count else ["there is no padding"]


def work_done(config: dict[str, Any]) -> dict[str, Any]:
    """What the calls of one step do on all ranks together, and where the matrices lie."""
    with running(config) as engine:
        optimizer = engine.basic_optimizer
        train(engine, range(1))
        muons = [muon for muon in optimizer.muons if muon.param_groups[0]["algorithm"] == "muon"]
        orthogonalized = torch.tensor([muon.counts.orthogonalized for muon in muons])
        dist.all_reduce(orthogonalized)
        cut = {
            name: sorted(interval.first for intervals in layout.intervals for interval in intervals)[1:]
            for muon in muons
            for name, layout in layouts_in(muon).items()
        }
        return {"done": int(orthogonalized.sum()), "cut": cut, "explained": str(optimizer.explain())}


def tampered(config: dict[str, Any], how: str) -> None:
    """Make an engine of a DeepSpeed whose records are different."""

    def read(engine: Any) -> Any:
        zero = engine.optimizer
        if how == "missing":
            for name in ("round_robin_bit16_offsets", "grad_position"):
                if hasattr(zero, name):
                    delattr(zero, name)
        elif how == "order" and hasattr(zero, "grad_position"):
            starts = [start for _, start, _ in zero.grad_position.values()]
            positions = zip(zero.grad_position.items(), starts[1:] + starts[:1], strict=True)
            zero.grad_position = {key: (group, start, length) for (key, (group, _, length)), start in positions}
        elif how == "order":
            for parameters in zero.round_robin_bit16_groups:
                parameters.reverse()
        elif how == "one rank" and dist.get_rank() == 1:
            zero.partition_size[0] += 2
        return read_flats(engine)

    module = importlib.import_module("muonmesh.integrations.deepspeed.initialize")
    with unittest.mock.patch.object(module, "read_flats", read):
        engine_for(config)


def consolidated(config: dict[str, Any], folder: str) -> list[str]:
    """What differs between the weights and what `zero_to_fp32` makes of a checkpoint, and a step after a load."""
    engine, other = engine_for(config), engine_for(config)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="saved")
    gathered = get_fp32_state_dict_from_zero_checkpoint(folder, tag="saved")
    needed = weights(engine)
    wrong = differences({name: gathered[name].float() for name in needed}, needed)
    other.load_checkpoint(folder, tag="saved")
    train(engine, range(2, 3))
    train(other, range(2, 3))
    wrong += differences(snapshot(other), snapshot(engine))
    engine.destroy()
    other.destroy()
    return wrong


# ---------------------------------------------------------------- tensor and expert parallelism


class Parallel(nn.Module):
    """A gated network that AutoTP cuts by columns and by rows, with its fused gate and up matrix in one."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 24)
        self.fused = nn.Linear(24, 32, bias=False)
        self.outward = nn.Linear(16, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.plain = nn.Linear(24, 18)
        self.head = nn.Linear(18, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        gate, up = self.fused(x).chunk(2, dim=-1)
        x = self.norm(x + self.outward(gate.sigmoid() * up))
        return self.head(self.plain(x)).square().mean()


EXPERTS = 4


class Experts(nn.Module):
    """A network with a layer of four experts."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 16)
        expert = nn.Sequential(nn.Linear(16, 24, bias=False), nn.ReLU(), nn.Linear(24, 16, bias=False))
        self.moe = MoE(16, expert, num_experts=EXPERTS, ep_size=ep_size, k=1, use_rts=False, capacity_factor=4.0)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.inward(x))[0]).square().mean()


AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [".*fused\\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
            {"patterns": [".*outward\\.weight$"], "partition_type": "row"},
        ],
    },
}
FUSED = {"fused.weight": {"matrices": ("rows", 16, 16)}}


def norms_wrong(optimizer: Any, gradients: dict[str, Tensor]) -> list[str]:
    """Which norms are not those of all ranks' gradients, experts of other ranks included."""
    algorithms = {name: group["algorithm"] for group in optimizer.param_groups for name in group["parameters"]}
    squares_of = {name: (algorithms[name], float(g.double().square().sum())) for name, g in gradients.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, squares_of)
    merged = {name: entry for entries in everyone for name, entry in entries.items()}
    wrong = []
    for half, norm in (("muon", optimizer.norms.muon), ("adamw", optimizer.norms.adamw)):
        needed = math.sqrt(math.fsum(squares for algorithm, squares in merged.values() if algorithm == half))
        if abs(float(norm) / needed - 1) > 1e-12:
            wrong.append(f"norm of {half}: found {float(norm)}, needed {needed}")
    return wrong


def parallel(config: dict[str, Any], kind: str, folder: str | None = None) -> list[str]:
    """Train a real model and return what differs from one process that is given the engine's own reduced gradients.

    They are read from the flat tensors through the layouts, after it has been seen that what these say of the weights
    is what the model was made with.
    """
    torch.manual_seed(0)
    size = config.get("tensor_parallel", {}).get("autotp_size", 1)
    model = Parallel() if kind == "autotp" else Experts(int(kind))
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    overrides = FUSED if kind == "autotp" else {}
    engine = engine_for(config, model, clip=math.inf, overrides=overrides, adamw={"lr": 0.01})  # measures only
    optimizer = engine.basic_optimizer
    entries = {name: (muon, tensor) for muon, name, tensor, _ in entries_of(optimizer)}

    def whole(of: Any) -> dict[str, Tensor]:
        return {name: gather(muon, name, of(tensor)) for name, (muon, tensor) in entries.items()}

    values = whole(lambda tensor: tensor.detach())
    local = {called: name for name, called in expert_names(engine.module).items()}
    wrong = [f"made: {line}" for line in differences(values, {n: initial[local.get(n, n)] for n in values})]
    twins = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {
            key: value for key, value in group.items() if key not in ("params", "parameters", "matrices", "moe")
        }
        settings |= {"name": str(number), "params": [twins[name] for name in group["parameters"]]}
        settings |= {"param_names": list(group["parameters"])}
        groups.append(settings | ({"matrices": group["matrices"]} if group["algorithm"] == "muon" else {}))
    single = mm.Muon(groups, process_group="local", compute_dtype=torch.float32)
    honest, gradients = optimizer._run, {}

    def run(muon: mm.Muon) -> None:
        for name, (of, tensor) in entries.items():
            if of is muon and tensor.grad is not None:
                gradients[name] = gather(muon, name, tensor.grad)
        honest(muon)

    optimizer._run = run
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank() // size)
        engine.backward(engine(torch.randn(8, 12)))
        engine.step()
        wrong += norms_wrong(optimizer, gradients)
        for name, parameter in twins.items():
            parameter.grad = gradients.pop(name)
        single.step()
    wrong += differences(whole(lambda tensor: tensor.detach()), {name: p.detach() for name, p in twins.items()})
    if folder is not None:
        engine.save_checkpoint(folder, tag="saved")

        def first_of_state(tensor: Tensor) -> Tensor:
            return next(optimizer.state[tensor][key] for key in STATE if key in optimizer.state[tensor])

        needed = whole(first_of_state)
        for muon in optimizer.muons:
            first_of_state(muon.param_groups[0]["params"][0]).zero_()
        engine.load_checkpoint(folder, tag="saved")
        loaded = whole(first_of_state)
        wrong += [f"loaded: {line}" for line in differences(loaded, needed)]
    engine.destroy()
    return wrong


def layouts_in(muon: mm.Muon) -> dict[str, mm.FlatShards]:
    """Where the parameters in a flat tensor lie, by name; empty at stage 0."""
    all_layouts = {member.name: member.storage.layout for member in placed_members(muon)}
    return {name: layout for name, layout in all_layouts.items() if isinstance(layout, mm.FlatShards)}


def entries_of(optimizer: EngineOptimizer) -> Iterator[tuple[mm.Muon, str, Tensor, str]]:
    """Yield each parameter's Muon, name, tensor (its own at stage 0, else the flat one) and algorithm."""
    for muon in optimizer.muons:
        if layouts_in(muon):
            (group,) = muon.param_groups
            for name in layouts_in(muon):
                yield muon, name, group["params"][0], group["algorithm"]
        else:
            for group in muon.param_groups:
                for name, tensor in zip(group["param_names"], group["params"], strict=True):
                    yield muon, name, tensor, group["algorithm"]


@functools.cache
def group_for(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """One process group for the same ranks."""
    return group_of(ranks, [])


def gather(muon: mm.Muon, name: str, local: Tensor) -> Tensor:
    """A parameter's share of a tensor, whole."""
    layout: Any = (layouts_in(muon) or muon.layouts).get(name)
    if layout is None:
        return local.clone()
    group = group_for(layout.ranks)
    whole = torch.zeros(layout.shape, dtype=local.dtype, device=local.device)
    if layout.replica_number(dist.get_rank()) == 0:
        for block in layout.blocks(dist.get_rank()):
            box = tuple(slice(o, o + n) for o, n in zip(block.region.offset, block.region.shape, strict=True))
            whole[box].copy_(local.as_strided(block.region.shape, block.strides, local.storage_offset() + block.start))
    if group is None:
        return whole
    dist.all_reduce(whole, group=group)
    return whole


def held_experts(engine: Any) -> dict[str, Tensor]:
    """Weights and momenta of all ranks, whole, by names in which experts have their number among those of all ranks."""
    gathered = {}
    for muon, name, tensor, algorithm in entries_of(engine.basic_optimizer):
        state = engine.basic_optimizer.state[tensor]
        keys = ("momentum_buffer",) if algorithm == "muon" else ("exp_avg", "exp_avg_sq")
        tensors = {"": tensor.detach(), **{f".{key}": state[key] for key in keys}}
        for key, value in tensors.items():
            gathered[name + key] = gather(muon, name, value)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gathered)
    merged: dict[str, Tensor] = {}
    for part in everyone:
        for name, value in part.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged


def experts_engine(config: dict[str, Any], kind: str, seed: int) -> contextlib.AbstractContextManager[Any]:
    torch.manual_seed(seed)
    return running(config, Experts(int(kind)), overrides={}, adamw={"lr": 0.01})


def train_experts(engine: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        engine.backward(engine(torch.randn(8, 12)))
        engine.step()


def save_experts(config: dict[str, Any], kind: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train and save; everything as it is then, and after two more steps."""
    with experts_engine(config, kind, 0) as engine:
        train_experts(engine, range(2))
        mm.checkpoint.save(folder, engine, engine)
        saved = held_experts(engine)
        train_experts(engine, range(2, 4))
        return saved, held_experts(engine)


def load_experts(config: dict[str, Any], kind: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load into what has trained on something else; everything as it is then, and after two more steps."""
    with experts_engine(config, kind, 7) as engine:
        train_experts(engine, range(5, 6))
        mm.checkpoint.load(folder, engine, engine)
        loaded = held_experts(engine)
        computed = {name for name, p in engine.module.named_parameters() if not bool(p.isfinite().all())}
        assert not computed
        train_experts(engine, range(2, 4))
        return loaded, held_experts(engine)


def experts_in_its_format(config: dict[str, Any], kind: str, folder: str, *, loads: bool) -> None:
    """Save experts in DeepSpeed's format, or load them."""
    with experts_engine(config, kind, 0) as engine:
        if loads:
            engine.load_checkpoint(folder)
        else:
            engine.save_checkpoint(folder, tag="saved")


def load_without_deepspeed(folder: str, needed: dict[str, Tensor]) -> list[str]:
    """Load into a plain module that one process has to itself; what differs from what is needed."""
    groups: dict[str, dict[str, Any]] = {
        key: {"name": key, "algorithm": key.split()[0], "params": [], "param_names": []}
        for key in ("muon", "adamw", "adamw of vectors")
    }
    weights = {name: value for name, value in needed.items() if name.rpartition(".")[2] not in STATE}
    model = problem.Bag({name: torch.zeros_like(value) for name, value in weights.items()})
    for name, value in weights.items():
        kind = "muon" if f"{name}.momentum_buffer" in needed else "adamw" if value.ndim > 1 else "adamw of vectors"
        groups[kind]["params"].append(model.get_parameter(name))
        groups[kind]["param_names"].append(name)
    for key, buffer in Experts(1).named_buffers():
        model.get_submodule(key.rpartition(".")[0]).register_buffer(key.rpartition(".")[2], buffer)
    optimizer = mm.Muon(list(groups.values()), process_group="local", compute_dtype=torch.float32)
    mm.checkpoint.load(folder, model, optimizer)
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {f"{name}.{key}": state[key] for key in STATE if key in state}
    return differences({name: value.detach() for name, value in tensors.items()}, needed)
