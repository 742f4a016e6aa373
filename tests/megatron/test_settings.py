"""Megatron's settings reach our groups: what its own optimizers make of a configuration, ours make of it too."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ParamKey, get_standard_config_overrides
from megatron.core.optimizer import get_megatron_optimizer as megatrons
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.transformer import TransformerConfig
from torch import nn

import muonmesh as mm
from muonmesh.integrations.megatron import get_megatron_optimizer, refusals
from tests.megatron import host
from tests.megatron.host import Shape
from tests.megatron.shapes import ONE_LAYER

NORMS = Shape(model=(*ONE_LAYER, ("qk_layernorm", True), ("add_bias_linear", True)))
ONLY_MUON = r"^(?!.*linear)"
"""What to freeze."""

COVERS = (
    "integrations.megatron.param_groups.find_groups",
    "integrations.megatron.refusals.refuse",
)


# ------------------------------------------------------------------ rates and decays

OVERRIDES: dict[str, Any] = {
    "standard": None,
    "none": {},
    "a name in the wrapped chunk": {ParamKey(name="module.decoder.layers.0.mlp.*"): {"max_lr": 0.5, "min_lr": 0.1}},
    "a name without the wrapper": {ParamKey(name="decoder.layers.0.mlp.*"): {"max_lr": 0.5}},
    "vectors decay": {ParamKey(name="*layernorm.weight"): {"wd_mult": 1.0}, ParamKey(name="*.bias"): {"wd_mult": 0.0}},
    "parts of the decay": {ParamKey(name="*linear_fc?.*"): {"wd_mult": 0.25}},
    "a decay of its own": {ParamKey(name="*linear_fc1.*"): {"start_wd": 0.5, "end_wd": 0.7}},
}


STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def scheduled_groups(make: Any, config: Any, chunks: Any, overrides: Any) -> dict[str, list[float]]:
    """For each parameter its rate and its decay at step 0 of ten, then at 3, 6 and 12, for each style of decaying."""
    optimizer = make(config, chunks, overrides)
    rates_and_decays: dict[str, list[float]] = {}
    for style in STYLES:
        for name, values in of_style(optimizer, chunks, style).items():
            rates_and_decays.setdefault(name, []).extend(values)
    return rates_and_decays


def of_style(optimizer: Any, chunks: Any, style: str) -> dict[str, list[float]]:
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.001,
        max_lr=0.02,
        min_lr=0.002,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style=style,
        wsd_decay_steps=5,
        lr_wsd_decay_style="minus_sqrt",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=10,
        wd_incr_style="linear" if style == "linear" else "cosine",
    )
    names = {parameter: name for chunk in chunks for name, parameter in chunk.named_parameters()}
    values: dict[str, list[float]] = {}
    for increment in (0, 3, 3, 6):
        scheduler.step(increment)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values.setdefault(names[parameter], []).extend((group["lr"], group["weight_decay"]))
    return values


def rates_of_both(overrides: str, settings: dict[str, Any]) -> None:
    host.begin(NORMS)
    chunks, config = host.chunks_of(NORMS), host.optimizer_config(NORMS, **{"min_lr": 0.002, **settings})
    by_megatron = scheduled_groups(megatrons, config, chunks, OVERRIDES[overrides])
    by_muonmesh = scheduled_groups(get_megatron_optimizer, config, chunks, OVERRIDES[overrides])
    assert by_muonmesh.keys() == by_megatron.keys()
    differing = {
        name: (by_muonmesh[name], by_megatron[name])
        for name in by_muonmesh
        if by_muonmesh[name] != pytest.approx(by_megatron[name])
    }
    assert differing == {}


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        *((name, {}) for name in OVERRIDES),
        ("standard", {"apply_wd_to_qk_layernorm": True}),
        ("standard", {"decoupled_lr": 0.005}),
        ("standard", {"decoupled_lr": 0.005, "decoupled_min_lr": 0.001}),
    ],
    ids=[*OVERRIDES, "QK norms decay", "decoupled rate", "decoupled rates"],
)
def test_rates_and_decays_are_megatrons(workers, overrides: str, settings: dict[str, Any]) -> None:
    """Its own optimizers, with its own scheduler, are the reference."""
    workers(2).run(rates_of_both, overrides, settings)


def ours_alone(config: dict[str, Any], overrides: Any, arguments: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """The group and the decay of each parameter; what is set of the wrapper or the model has ``ddp.``, ``model.``."""
    host.begin(NORMS)
    chunks = host.chunks_of(NORMS)
    optimizer_config = host.optimizer_config(NORMS)
    set_objects = {"": optimizer_config, "ddp": chunks[0].ddp_config, "model": chunks[0].config}
    for key, value in config.items():  # no version of Megatron has all of these fields
        owner, _, field = key.rpartition(".")
        vars(set_objects[owner])[field] = value
    optimizer = get_megatron_optimizer(optimizer_config, chunks, overrides, **arguments)
    return {name: (g["name"], g["weight_decay"]) for g in optimizer.param_groups for name in g["param_names"]}


def test_our_arguments_and_megatrons_decide_about_decay_together(workers) -> None:
    """A decay by name comes first; that of a half is what ``wd_mult`` multiplies."""
    config, norm = {"apply_wd_to_qk_layernorm": True}, "decoder.layers.0.self_attention.q_layernorm.weight"
    named, bias = {"k_layernorm": {"weight_decay": 0.05}, "fc1.bias": {"weight_decay": 0.2}}, "linear_fc1.bias"
    for groups_and_decays in workers(2).run(
        ours_alone, config, None, {"adamw": {"weight_decay": 0.4}, "overrides": named}
    ):
        by_end = {name.rpartition("layers.0.")[2]: decay for name, (_, decay) in groups_and_decays.items()}
        assert groups_and_decays[norm] == ("adamw.vectors[end_wd=0.4][start_wd=0.4][wd_mult=1.0]", 0.4)
        assert by_end["self_attention.k_layernorm.weight"] == 0.05
        assert by_end[f"mlp.{bias}"] == 0.2
        assert by_end["input_layernorm.weight"] == by_end["mlp.linear_fc2.bias"] == 0.0
        assert by_end["mlp.linear_fc2.weight"] == 0.1


def without_a_least_rate() -> None:
    """OptimizerConfig without ``min_lr``, its default: the scheduler's counts."""
    host.begin(NORMS)
    rates = scheduled_groups(
        get_megatron_optimizer, host.optimizer_config(NORMS, min_lr=None), host.chunks_of(NORMS), None
    )
    assert {values[-2] for values in rates.values()} == {0.002}


def test_the_least_rate_of_the_scheduler_counts(workers) -> None:
    workers(2).run(without_a_least_rate)


def without_the_configs_rate() -> float | None:
    """Muon and AdamW with rates of their own, one step of the schedule and of the optimizer."""
    host.begin(NORMS)
    chunks = host.chunks_of(NORMS)
    config = host.optimizer_config(NORMS)
    optimizer = get_megatron_optimizer(config, chunks, muon={"lr": 0.2}, adamw={"lr": 0.1})
    of_style(optimizer, chunks, "constant")
    return get_canonical_lr_for_logging(optimizer.param_groups)


def test_a_rate_is_logged_if_no_parameter_has_the_configs(workers) -> None:
    """Megatron-LM 0.16.1 formats the rate of the first group with ``default_config``, and raised for None."""
    assert workers(2).run(without_the_configs_rate) == [0.02, 0.02]


TRANSFORMER_ENGINE = ("use_precision_aware_optimizer", "reuse_grad_buf_for_mxfp8_param_ag")
GATHERED = ("fp8_param_gather", "fp4_param_gather")


@pytest.mark.parametrize(
    ("config", "overrides", "arguments", "message"),
    [
        ({"lr": None}, None, {}, r"lr=None; needed a learning rate\. Set lr="),
        ({"muon_momentum": 0.8}, None, {}, r"muon_momentum=0\.8.*Write muon=\{'momentum'"),
        ({"muon_scale_mode": "unit_rms_norm"}, None, {}, r"Write muon=\{'scale_mode'"),
        ({"muon_split_qkv": False}, None, {}, "'matrices': 'whole'"),
        ({"muon_use_nesterov": True}, None, {}, "'nesterov'"),
        ({"muon_nesterov": True}, None, {}, "'nesterov'"),
        ({"muon_coefficient_type": "polar_express"}, None, {}, "'ns_coefficients'"),
        ({"muon_scalar_optimizer": "lion"}, None, {}, "AdamW steps what Muon does not step"),
        ({"use_layer_wise_distributed_optimizer": True}, None, {}, "Set use_distributed_optimizer=True"),
        ({"optimizer_cuda_graph": True}, None, {}, "a CUDA graph would repeat"),
        ({"grad_norm_skip_threshold": 9.0}, None, {}, r"=9\.0; needed 0 or inf\. Remove it; write skip_above=\.\.\."),
        ({"muon_fp32_matmul_prec": "high"}, None, {}, "'compute_dtype'"),
        ({"muon_num_ns_steps": 6}, None, {}, "'ns_steps'"),
        ({"muon_tp_mode": "distributed"}, None, {}, "each matrix is orthogonalized whole"),
        ({"muon_extra_scale_factor": 0.2}, None, {}, "'extra_scale_factor'"),
        ({}, {"lr": 0.1}, {}, "found lr=0.1; needed a setting that Megatron's scheduler reads. Write max_lr"),
        ({}, {"lr_mult": 2.0}, {}, "Write max_lr"),
        ({}, {"weight_decay": 0.1}, {}, "Write start_wd and end_wd"),
        ({}, {"end_wd": 0.2}, {"muon": {"weight_decay": 0.1}}, "end_wd from config_overrides and weight_decay=0.1"),
        ({}, {"wd_mult": 0.5}, {"overrides": {"fc1": {"weight_decay": 0.1}}}, "wd_mult from config_overrides"),
        ({}, {"betas": 0.5}, {}, "betas"),
        ({}, {"optimizer": "sgd"}, {}, r"found optimizer='sgd'.* Write overrides=\{name: 'adamw'\} or 'muon'"),
        ({}, {"eps": 1e-9}, {}, r"Write adamw=\{'adamw_eps': .* leave out --use-mup"),
        ({"optimizer": "sgd"}, None, {}, "Set optimizer='adam'"),
        ({"use_distributed_optimizer": True}, None, {}, "Set it as in OptimizerConfig"),
        ({"decoupled_weight_decay": False}, None, {}, "Set decoupled_weight_decay=True"),
        ({"decoupled_lr": 0.1}, None, {"adamw": {"lr": 0.2}}, "Remove one"),
        ({}, None, {"dump_param_to_param_group_map": "x"}, r"Write print\(optimizer.explain\(\)\)"),
        ({}, None, {"policy": "sometimes"}, "policy: found 'sometimes'"),
        ({}, None, {"skip_above": "often"}, "skip_above: found 'often'"),
        ({}, None, {"overrides": {"(": "adamw"}}, "Use re.escape on what is meant literally"),
        # What OptimizerConfig takes with Transformer Engine only, and what wrapper and model hold otherwise.
        *(({field: True}, None, {}, f"found {field}") for field in TRANSFORMER_ENGINE),
        *(({f"ddp.{field}": True}, None, {}, f"found {field}") for field in ("use_megatron_fsdp", *GATHERED)),
        *(({f"model.{field}": 2}, None, {}, f"found {field}") for field in refusals._MODEL),
    ],
)
def test_what_would_have_no_effect_is_refused(workers, config: Any, overrides: Any, arguments: Any, message: str):
    keys = None if overrides is None else {ParamKey(name="*linear_fc1.weight"): overrides}
    for outcome in workers(2).run_expecting_errors(ours_alone, config, keys, arguments):
        assert outcome.error is ValueError
        assert re.search(message, outcome.message)


# ------------------------------------------------------------------ clipping


def clip_by_config(rule: str) -> tuple[list[float | None], list[float]]:
    """Norms that steps return, and by how much they have scaled a gradient, with a limit that changes in between."""
    shape = Shape(model=ONE_LAYER, frozen=ONLY_MUON)
    host.begin(shape)
    chunks, config = host.chunks_of(shape), host.optimizer_config(shape, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, chunks, muon={"rule": rule})
    norms, scaled = list[float | None](), list[float]()
    for step, config.clip_grad in enumerate((0.0, 1e-3, 0.0)):
        host.backward(shape, chunks, optimizer, step)
        gradient = next(p for p in chunks[0].parameters() if p.requires_grad).main_grad
        before = gradient.clone()
        norms.append(optimizer.step()[1])
        scaled.append(float(gradient.norm() / before.norm()))
    return norms, scaled


def test_a_limit_counts_from_the_step_that_has_it(workers) -> None:
    """Also where no parameter is AdamW's, for a rule whose update depends on the gradients' size."""
    for norms, scaled in workers(2).run(clip_by_config, "dynmuon"):
        assert norms[0] is norms[2] is None
        assert norms[1] is not None
        assert scaled == pytest.approx([1.0, 1e-3 / norms[1], 1.0], rel=1e-4)
    for norms, scaled in workers(2).run(clip_by_config, "muon"):
        assert norms == [None] * 3
        assert scaled == [1.0] * 3


# ------------------------------------------------------------------ models of plain modules


class Net(nn.Module):
    """As in Megatron's own tests of optimizers: no ``sharded_state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.fc3 = (
            nn.Linear(16, 24),
            nn.LayerNorm(24),
            nn.Linear(24, 20),
            nn.Linear(20, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.fc2(self.norm(self.fc1(x)).relu())
        return self.fc3(hidden.relu())


class Described(Net):
    """One whose method describes nothing."""

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        return {}


def plain(kind: type[Net], shape: Shape) -> dict[str, float]:
    """By how much parameters differ from those of one process after three steps with the same reduced gradients."""
    host.begin(shape)
    torch.manual_seed(5)
    net = kind()
    single = copy.deepcopy(net)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=shape.flat)
    chunk = DistributedDataParallel(TransformerConfig(num_layers=1, num_attention_heads=1), ddp, net)
    config = host.optimizer_config(shape, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [chunk])
    betas = config.adam_beta1, config.adam_beta2
    reference = mm.from_model(single, 0.02, adamw_betas=betas, adamw_eps=config.adam_eps, process_group="local")
    for step in range(3):
        chunk.zero_grad_buffer()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        chunk(inputs).square().mean().backward()
        chunk.finish_grad_sync()
        (buffer,) = chunk.buffers
        reduced = buffer.grad_data.clone()
        if shape.flat:
            dist.all_gather_into_tensor(reduced, buffer.grad_data.chunk(dist.get_world_size())[dist.get_rank()].clone())
        for parameter, other in zip(net.parameters(), single.parameters(), strict=True):
            start, end, _ = buffer.param_index_map[parameter]
            other.grad = reduced[start:end].view(parameter.shape).clone()
        assert optimizer.step()[0]
        reference.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert {*optimizer.sharded_state_dict()["state"]} == {name for name, _ in net.named_parameters()}
    pairs = zip(net.named_parameters(), single.parameters(), strict=True)
    return {name: float((a - b).abs().max()) for (name, a), b in pairs if not torch.equal(a, b)}


@pytest.mark.parametrize("kind", [Net, Described])
@pytest.mark.parametrize("flat", [False, True], ids=["whole", "flat"])
def test_a_model_of_plain_modules(workers, flat: bool, kind: type[Net]) -> None:
    assert workers(2).run(plain, kind, Shape(flat=flat)) == [{}, {}]


def test_a_model_of_plain_modules_may_not_be_cut(workers) -> None:
    for outcome in workers(2).run_expecting_errors(plain, Net, Shape(tp=2)):
        assert "Net: found no sharded_state_dict() under tensor parallelism over 2 ranks" in outcome.message
        assert "or set the tensor-parallel size to 1" in outcome.message


def test_a_standard_override_is_what_the_scripts_pass() -> None:
    """So ``None`` above stands for Megatron-LM's scripts too."""
    keys = get_standard_config_overrides(host.optimizer_config(NORMS))
    assert [dict(override) for override in keys.values()] == [{"wd_mult": 0.0}]
