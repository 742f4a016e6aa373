"""PEFT's adapters in a loop of one's own: they train, are saved and are loaded, and so is what Muon keeps of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

import muonmesh as mm
from tests.hosts.replay import different, weights
from tests.hosts.tiny import Tokens, llama

SETTINGS: dict[str, Any] = {"lr": 0.05, "compute_dtype": torch.float32, "overrides": {"lora_[AB]": "muon"}}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def train_batches(model: nn.Module, optimizer: mm.Muon, batches: range) -> None:
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
    train_batches(model, optimizer, range(3))
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train_batches(model, optimizer, range(3, 6))
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)

    again = PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    resumed = mm.from_model(again, **SETTINGS)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train_batches(again, resumed, range(3, 6))
    assert different(weights(again), weights(model)) == []


Q = ["q_proj"]
RATE: dict[str, Any] = {"lr": 0.05, "compute_dtype": torch.float32}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
# What Muon does not train, and the group that it is in where all of it is in one.
OTHERS: dict[str, tuple[peft.PeftConfig, str]] = {
    "OFT": (peft.OFTConfig(target_modules=Q, oft_block_size=4, r=0), "adamw.matrices"),
    "HRA": (peft.HRAConfig(target_modules=Q, r=4), "adamw.matrices"),
    "VBLoRA": (peft.VBLoRAConfig(target_modules=Q, num_vectors=16, vector_length=4, r=2, topk=2), "adamw.matrices"),
    "LoHa": (peft.LoHaConfig(target_modules=Q, r=4), "adamw.matrices"),
    "LoKr": (peft.LoKrConfig(target_modules=Q, r=4), "adamw.matrices"),
    "trainable tokens": (peft.TrainableTokensConfig(token_indices=[0, 1]), "adamw.embeddings"),
}
ADAPTERS: dict[str, peft.PeftConfig] = {
    **{name: config for name, (config, _) in OTHERS.items()},
    "DoRA": LoraConfig(**LORA, use_dora=True),
    "rsLoRA": LoraConfig(**LORA, use_rslora=True),
    "PiSSA": LoraConfig(**LORA, init_lora_weights="pissa"),
    "biases": LoraConfig(**LORA, bias="all", lora_bias=True),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=Q, init_r=6, target_r=2, total_step=20),  # without its pruning
    "VeRA": peft.VeraConfig(target_modules=Q, r=4),
    "IA3": peft.IA3Config(target_modules=[*Q, "down_proj"], feedforward_modules=["down_proj"]),
    "BOFT": peft.BOFTConfig(target_modules=Q, boft_block_size=4),
    "prompt tuning": peft.PromptTuningConfig(**PROMPT),
    "prefix tuning": peft.PrefixTuningConfig(**PROMPT),
    "p-tuning": peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_every_kind_train_and_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """All that is trained moves, the base does not, and a checkpoint goes on as if nothing had been between."""
    settings = {**RATE, "overrides": {"lora_[AB]": "muon"} if name in {"DoRA", "rsLoRA", "PiSSA", "AdaLoRA"} else {}}

    def adapted() -> tuple[nn.Module, mm.Muon]:
        torch.manual_seed(0)  # some adapters have random numbers that they do not train and PEFT does not save
        model = get_peft_model(llama(), copy.deepcopy(ADAPTERS[name]))
        return model, mm.from_model(model, **settings)

    model, optimizer = adapted()
    assert name not in OTHERS or {group["name"] for group in optimizer.param_groups} == {OTHERS[name][1]}
    before = {name: p.clone() for name, p in model.named_parameters()}
    train_batches(model, optimizer, range(2))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    train_batches(model, optimizer, range(2, 4))

    again, resumed = adapted()
    mm.checkpoint.load(tmp_path / "saved", again, resumed)
    train_batches(again, resumed, range(2, 4))
    assert different(weights(again), weights(model)) == []


def test_saved_modules_are_what_they_copy() -> None:
    config = LoraConfig(target_modules=Q, modules_to_save=["down_proj", "lm_head"], r=2)
    groups = mm.split_params(get_peft_model(llama(), config))
    by_name = {name: g["name"] for g in groups for name in g["param_names"] if "modules_to_save" in name}
    assert {name.split(".modules")[0].split(".")[-1]: group for name, group in by_name.items()} == {
        "down_proj": "muon",
        "lm_head": "adamw.head",
    }


def factors_of_experts(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Cut a tensor of the shape of a factor as PEFT's `get_delta_weight` cuts the factor: experts × out × in."""
    if "lora_A" in name:
        return tensor.reshape(layer.num_experts, -1, tensor.shape[-1])
    return tensor.reshape(tensor.shape[0], -1, layer.num_experts).permute(2, 0, 1)


def test_factors_of_each_expert_are_matrices_of_their_own() -> None:
    """PEFT keeps the factors of all experts of a layer in one weight: A one after the other, B column by column."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=2, target_modules=Q, target_parameters=experts))
    optimizer = mm.from_model(model, **SETTINGS)
    layers = [module for module in model.modules() if hasattr(module, "num_experts") and hasattr(module, "lora_A")]
    trained = [(layer, *pair) for layer in layers for pair in layer.named_parameters() if pair[1].requires_grad]
    held = {id(p): (layer, name, p) for layer, name, p in trained if "base_layer" not in name}
    assert len(held) == 4
    plain = {key: nn.Parameter(factors_of_experts(*one).detach().contiguous()) for key, one in held.items()}
    beside = mm.Muon([{"params": [*plain.values()], "algorithm": "muon"}], **RATE)
    data = Tokens()
    for number in range(3):
        optimizer.zero_grad()
        batch = torch.stack([data[number + row]["input_ids"] for row in range(4)])
        model(input_ids=batch, labels=batch).loss.backward()
        for key, (layer, name, p) in held.items():
            plain[key].grad = factors_of_experts(layer, name, p.grad).contiguous()
        optimizer.step()
        beside.step()
    assert all(torch.equal(factors_of_experts(*one), plain[key]) for key, one in held.items())


# ------------------------------------------------------------------ quantized bases

FOUR = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
BASES: dict[str, tuple[Any, str]] = {
    "bitsandbytes, 4 bits": (BitsAndBytesConfig(load_in_4bit=True, **FOUR), "Linear4bit"),
    "bitsandbytes, 8 bits": (BitsAndBytesConfig(load_in_8bit=True), "Linear8bitLt"),
    "torchao, 8 bits": (TorchAoConfig(Int8WeightOnlyConfig()), "Int8Tensor"),
    "quanto, 8 bits": (QuantoConfig(weights="int8"), "QLinear"),
}


def all_numbers(model: nn.Module) -> dict[str, Tensor]:
    """All numbers of a model, those inside of quantized weights too, by name."""
    numbers = dict[str, Tensor]()
    for name, value in model.state_dict().items():
        inner = value.__tensor_flatten__()[0] if hasattr(type(value), "__tensor_flatten__") else []  # torchao's
        numbers |= {f"{name}.{key}": getattr(value, key).clone() for key in inner}
        if not inner and isinstance(value, Tensor):
            numbers[name] = value.detach().clone()
    return numbers


@pytest.mark.parametrize("name", BASES)
def test_adapters_of_a_quantized_base(name: str, tmp_path: Path) -> None:
    """QLoRA: factors and a saved module are stepped as plain copies are, and the base stays as it was loaded."""
    config, kind = BASES[name]
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    layer = base.model.layers[0].mlp.up_proj
    assert kind in (type(layer).__name__, type(layer.weight).__name__)
    assert {g["name"] for g in mm.split_params(base)} == {"adamw.embeddings", "adamw.head", "adamw.vectors"}
    trained = LoraConfig(**LORA, modules_to_save=["lm_head"])
    model = get_peft_model(prepare_model_for_kbit_training(base), trained)
    optimizer = mm.from_model(model, **RATE, overrides={"lora_[AB]": "muon"})
    assert [(g["name"], len(g["params"])) for g in optimizer.param_groups] == [("muon", 8), ("adamw.head", 1)]
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in learned.items()}
    factors = [p for name, p in plain.items() if "lora_" in name]
    beside = mm.Muon(
        [
            {"params": factors, "algorithm": "muon"},
            {"params": [p for name, p in plain.items() if "lora_" not in name], "algorithm": "adamw"},
        ],
        **RATE,
    )
    before = all_numbers(model)
    for number in range(3):
        optimizer.zero_grad()
        batch = torch.stack([Tokens()[number + row]["input_ids"] for row in range(4)])
        model(input_ids=batch, labels=batch).loss.backward()
        for key, p in learned.items():
            plain[key].grad = p.grad.clone()
        optimizer.step()
        beside.step()
    assert all(torch.equal(p, plain[key]) for key, p in learned.items())
    after = all_numbers(model)
    moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert moved == set(learned)
