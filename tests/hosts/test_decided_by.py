"""What hosts decide by an optimizer's class, name or attributes: see docs/internals/hosts-decide-by.md."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.dataclasses import MegatronLMPlugin
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer, create_riemannian_optimizer
from torch import nn

import muonmesh as mm
from muonmesh.integrations.accelerate import from_model
from tests.hosts.replay import different, weights
from tests.hosts.tiny import Tokens, llama
from tests.hosts.world import accelerated, launched

SETTINGS: dict[str, Any] = {"lr": 0.02, "compute_dtype": torch.float32}


def test_it_has_nothing_by_which_hosts_know_other_optimizers() -> None:
    """Schedule-free ones (train, eval), DeepSpeed's (overflow), bitsandbytes' (optim_bits), sharded ones of fairscale
    (consolidate_state_dict), fused ones, LOMO's (args, fused_backward)."""
    optimizer = mm.from_model(llama(), **SETTINGS)
    foreign = (
        "train",
        "eval",
        "overflow",
        "optim_bits",
        "consolidate_state_dict",
        "args",
        "fused_backward",
        "optimizer",
    )
    assert [name for name in foreign if hasattr(optimizer, name)] == []
    assert not {"betas", "fused", "foreach", "capturable"} & optimizer.defaults.keys()
    with launched():
        wrapped = Accelerator(cpu=True).prepare(optimizer)
        wrapped.train()  # as the Trainer calls it before each step
        wrapped.eval()
    assert optimizer.state == {}


def test_accelerates_megatron_knows_two_optimizers_by_their_names() -> None:
    plugin = types.SimpleNamespace(megatron_lm_default_args={})
    with pytest.raises(ValueError, match="Optimizer muon is not supported by Megatron-LM"):
        MegatronLMPlugin.set_optimizer_type(plugin, mm.from_model(llama(), **SETTINGS))


def replaced_optimizer() -> str:
    with launched(), accelerated(True):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_force_ds_cpu_optimizer": True}
        config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        with pytest.raises(ValueError, match="zero_force_ds_cpu_optimizer") as caught:
            from_model(accelerator, llama(), **SETTINGS)
        return str(caught.value)


def test_accelerate_may_not_put_deepspeeds_adam_in_its_place(workers: Any) -> None:
    for message in workers(2).run(replaced_optimizer, timeout=90.0):
        assert message.startswith("config: found zero_force_ds_cpu_optimizer=True; needed False"), message


# ------------------------------------------------------------------ a step that says it can unscale


def test_fabric_does_not_clip_what_unscales_itself() -> None:
    """Its scaler does it, before `muonmesh.Muon.clip_grad_norm_`: the norms are those without a scale."""
    norms = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model = llama()
        module, optimizer = fabric.setup(model, mm.from_model(model, **SETTINGS))
        batch = {key: value[None] for key, value in Tokens()[0].items()}
        fabric.backward(module(**batch).loss)
        with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
        scaler.unscale_(optimizer.optimizer)
        norms.append(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.step()
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


# ------------------------------------------------------------------ classes that PEFT calls or derives from


def adapters() -> nn.Module:
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False))


def loss_of_model(model: nn.Module) -> torch.Tensor:
    batch = torch.stack([Tokens()[row]["input_ids"] for row in range(4)])
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def test_lora_plus_gives_its_halves_their_rates() -> None:
    model = adapters()
    before = weights(model)
    twin = copy.deepcopy(model)
    derived = create_loraplus_optimizer(model, mm.Muon, loraplus_lr_ratio=4, **SETTINGS)
    trained = [(name, p) for name, p in twin.named_parameters() if p.requires_grad]
    halves = [[pair for pair in trained if part in pair[0]] for part in ("lora_A", "lora_B")]
    groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (0.02, 0.08), strict=True)]
    plain = mm.Muon(groups, weight_decay=0.0, **SETTINGS)
    for adapted, optimizer in ((model, derived), (twin, plain)):
        loss_of_model(adapted).backward()
        optimizer.step()
    assert different(weights(model), weights(twin)) == []
    assert sorted(different(weights(model), before)) == sorted(name for name, _ in trained)


def test_gradients_that_a_derived_class_preconditions_are_orthogonalized_once() -> None:
    model = adapters()
    twin = copy.deepcopy(model)
    derived = create_riemannian_optimizer(model, mm.Muon, **SETTINGS)
    before_it = create_riemannian_optimizer(twin, torch.optim.SGD, lr=0.0)
    plain = mm.Muon([p for p in twin.parameters() if p.requires_grad], **SETTINGS)
    loss_of_model(model).backward()
    derived.step()
    loss_of_model(twin).backward()
    before_it.step()
    plain.step()
    assert derived.counts.orthogonalized == plain.counts.orthogonalized == 8
    assert different(weights(model), weights(twin)) == []
