"""PEFT's adapters in a loop of one's own: they train, are saved and are loaded, and so is what Muon keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import muonmesh as mm
from tests.hosts.replay import different, weights
from tests.hosts.tiny import Tokens, llama

SETTINGS: dict[str, Any] = {"lr": 0.05, "compute_dtype": torch.float32, "overrides": {"lora_[AB]": "muon"}}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def train(model: nn.Module, optimizer: mm.Muon, batches: range) -> None:
    data = Tokens()
    for number in batches:
        optimizer.zero_grad()
        batch = torch.stack([data[number + row]["input_ids"] for row in range(4)])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


def test_adapters_train_and_are_saved_and_loaded(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(**LORA))
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = mm.from_model(model, **SETTINGS)
    assert [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups] == [("muon", 8)]
    train(model, optimizer, range(3))
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(model, optimizer, range(3, 6))
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)

    again = PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    resumed = mm.from_model(again, **SETTINGS)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(again, resumed, range(3, 6))
    assert different(weights(again), weights(model)) == []


Q = ["q_proj"]
ADAPTERS: list[tuple[peft.PeftConfig, str]] = [
    (peft.OFTConfig(target_modules=Q, oft_block_size=4, r=0), "adamw.matrices"),
    (peft.HRAConfig(target_modules=Q, r=4), "adamw.matrices"),
    (peft.VBLoRAConfig(target_modules=Q, num_vectors=16, vector_length=4, r=2, topk=2), "adamw.matrices"),
    (peft.LoHaConfig(target_modules=Q, r=4), "adamw.matrices"),
    (peft.LoKrConfig(target_modules=Q, r=4), "adamw.matrices"),
    (peft.TrainableTokensConfig(token_indices=[0, 1]), "adamw.embeddings"),
]


@pytest.mark.parametrize("case", ADAPTERS, ids=lambda case: type(case[0]).__name__)
def test_what_other_adapters_add_is_adamws(case: tuple[peft.PeftConfig, str]) -> None:
    config, group = case
    groups = mm.split_params(get_peft_model(llama(), config))
    assert {g["name"] for g in groups} == {group}


def test_saved_modules_are_what_they_copy() -> None:
    config = LoraConfig(target_modules=Q, modules_to_save=["down_proj", "lm_head"], r=2)
    groups = mm.split_params(get_peft_model(llama(), config))
    found = {name: g["name"] for g in groups for name in g["param_names"] if "modules_to_save" in name}
    assert {name.split(".modules")[0].split(".")[-1]: group for name, group in found.items()} == {
        "down_proj": "muon",
        "lm_head": "adamw.head",
    }
