"""TRL's trainers, which are Trainers: SFT and DPO, with and without PEFT's adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import muonmesh as mm
from muonmesh.integrations.transformers import MuonCallback, MuonFactory
from tests.hosts.replay import Given, different, replayed, strengths, weights
from tests.hosts.tiny import MATRICES, llama, sentences, tokenizer
from tests.hosts.watch import Watch, losses
from tests.hosts.world import launched

SETTINGS: dict[str, Any] = {"compute_dtype": torch.float32}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "max_grad_norm": 1e-6,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }


def sft(folder: Path, **more: Any) -> tuple[SFTTrainer, Watch]:
    args, watch = SFTConfig(**settings(folder), max_length=8), Watch()
    if "optimizers" not in more:
        more["optimizer_cls_and_kwargs"] = (MuonFactory, {"args": args, **SETTINGS, **more.pop("muon", {})})
    data = Dataset.from_dict({"text": sentences()})
    callbacks = [watch, MuonCallback(metrics=True)]
    trainer = SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, **more)
    return trainer, watch


def dpo(folder: Path) -> tuple[DPOTrainer, Watch]:
    args, watch = DPOConfig(**settings(folder), max_length=16), Watch()
    chosen, rejected = ([f" {text}" for text in sentences(length=length)] for length in (5, 4))
    data = Dataset.from_dict({"prompt": sentences(), "chosen": chosen, "rejected": rejected})
    callbacks = [watch, MuonCallback(metrics=True)]
    trainer = DPOTrainer(llama(), llama(), args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)
    # DPOTrainer has no argument for it, and Trainer reads it when training begins.
    trainer.optimizer_cls_and_kwargs = (MuonFactory, {"args": args, **SETTINGS})
    return trainer, watch


def check_trl(trainer: Trainer, inputs: list[Given], snapshots: list[dict[str, torch.Tensor]]) -> None:
    plain = replayed(llama(), inputs, weight_decay=0.1, adamw_betas=(0.9, 0.999), **SETTINGS)
    assert different(snapshots[-1], plain) == []
    moved = strengths(snapshots[0], snapshots[1], 0.05)
    muon = [moved[name] for name in moved if name.endswith("_proj.weight")]
    assert len(muon) == MATRICES
    assert min(muon) > 0.1, "the trainer's clipping to a norm of 1e-6 cannot stall Muon"
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["muon/update_rms"] > 0 for entry in logged)


def trained_and_resumed(folder: Path, make: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Train, and again from the middle; return what the model was wrapped in and the weights."""
    with launched():
        trainer, watch = make(folder)
        trainer.train()
        check_trl(trainer, watch.inputs, watch.weights)
        again, _ = make(folder)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert losses(again.state.log_history) == losses(trainer.state.log_history)
        assert different(weights(again.model), watch.weights[-1]) == []
        return type(trainer.model_wrapped).__name__, watch.weights[-1]


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_trainer_of_trl_is_a_plain_loop_and_resumes(tmp_path: Path, make: Any) -> None:
    trained_and_resumed(tmp_path, make)


@pytest.mark.parametrize("make", [sft, dpo])
def test_two_ranks_are_a_plain_loop_and_resume_too(workers: Any, tmp_path: Path, make: Any) -> None:
    first, second = workers(2).run(trained_and_resumed, tmp_path, make, timeout=300.0)
    assert first[0] == second[0] == "DistributedDataParallel"
    assert different(first[1], second[1]) == []


def test_adapters_by_muon(tmp_path: Path) -> None:
    with launched():
        trainer, watch = sft(tmp_path, peft_config=LORA, muon={"overrides": {"lora_[AB]": "muon"}})
        trainer.train()
        assert {name.split(".")[-3] for name in watch.weights[0]} == {"lora_A", "lora_B"}
        moved = strengths(watch.weights[0], watch.weights[1], 0.05)
        assert len(moved) == 8
        # B is zero at first, so A has no gradient yet; what has one moves at full strength.
        assert all(moved[name] > 0.1 for name in moved if "lora_B" in name)
        assert all(moved[name] == 0 for name in moved if "lora_A" in name)


def test_what_trl_makes_of_an_optimizer_without_a_word_is_told(tmp_path: Path) -> None:
    with launched():
        base = llama()
        trainer = SFTTrainer(
            base,
            SFTConfig(**settings(tmp_path), max_length=8),
            train_dataset=Dataset.from_dict({"text": sentences()}),
            processing_class=tokenizer(),
            peft_config=LORA,
            optimizers=(mm.from_model(base, **SETTINGS), None),
        )
        with pytest.raises(
            mm.LayoutError, match=r"All parameters of this optimizer are frozen.* the model has its adapters"
        ):
            trainer.train()
        trainer, _ = sft(tmp_path, peft_config=LORA)
        with pytest.warns(UserWarning, match="PeftModelForCausalLM: found 0 matrices for Muon among 8 trained"):
            trainer.train()
