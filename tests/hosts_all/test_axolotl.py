"""Axolotl's own plugin manager and a Trainer: the plugin gives it our optimizer, with the configuration's settings.

Axolotl is installed without what it depends on, which wants CUDA, so its own trainer classes are not here. What is real
is its plugin machinery, its configuration's dict, and the Trainer from which its trainers are derived.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import muonmesh as mm

sys.path.append(str(Path(__file__).parents[2] / "examples"))
NAME = "axolotl_muon.MuonPlugin"


def axolotl_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def test_the_plugin_s_trainer_steps_muon_as_the_configuration_says(tmp_path: Path) -> None:
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert NAME in manager.plugins
    rows = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=0.02, weight_decay=0.3, lr_scheduler_type="constant", report_to=[]
    )
    trainer = Trainer(axolotl_llama(), args, train_dataset=data)
    manager.post_trainer_create(DictDefault({"muonmesh": {"momentum": 0.8}}), trainer)
    before = trainer.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    trainer.train()
    muon = trainer.optimizer.optimizer
    assert isinstance(muon, mm.Muon)
    group = muon.param_groups[0]
    assert (group["algorithm"], group["lr"], group["weight_decay"], group["momentum"]) == ("muon", 0.02, 0.3, 0.8)
    assert len(group["params"]) == 14
    assert not torch.equal(before, trainer.model.model.layers[0].mlp.up_proj.weight.cpu())


def test_what_stands_in_the_configuration_is_checked() -> None:
    [path] = [plugin.get_input_args() for name, plugin in PluginManager.get_instance().plugins.items() if name == NAME]
    module, _, name = path.rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    assert arguments(muonmesh={"momentum": 0.8}).muonmesh == {"momentum": 0.8}
    with pytest.raises(ValueError, match="muonmesh"):
        arguments(muonmesh="fast")
