"""A program: unsloth's own model and trainer with MuonFactory, all weights or LoRA, compared with a plain loop.

    python -m tests.hosts_all.unsloth_run FOLDER [lora]

It is a process of its own, because importing unsloth changes transformers and TRL. It prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from unsloth import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments  # isort: skip - before transformers

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from muonmesh.integrations.transformers import MuonCallback, MuonFactory
from tests.hosts.replay import Given, different, replayed, weights
from tests.hosts.tiny import sentences, tokenizer

SETTINGS: dict[str, Any] = {"momentum": 0.8, "compute_dtype": torch.float32}


def model_of(folder: str, adapted: bool) -> Any:
    """Return unsloth's model, as its users write it."""
    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=32, dtype=torch.float32, load_in_4bit=False, full_finetuning=not adapted
    )
    if adapted:
        names = ["q_proj", "v_proj", "down_proj"]
        model = FastLanguageModel.get_peft_model(model, r=4, target_modules=names, lora_alpha=4, random_state=0)
    return model


def trained(folder: str, adapted: bool) -> dict[str, Any]:
    model = model_of(folder, adapted)
    args = UnslothTrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        bf16=False,
        fp16=False,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataset_num_proc=1,
        max_length=32,
    )
    settings = {**SETTINGS, "overrides": {"lora_[AB]": "muon"}} if adapted else SETTINGS
    trainer = UnslothTrainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"text": sentences()}),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(MuonFactory, {"args": args, **settings}),
        callbacks=[MuonCallback(clip=1.0)],
    )
    inputs: list[Given] = []
    create = trainer.create_optimizer

    def created(*arguments: Any) -> Any:
        optimizer = create(*arguments)
        inner = getattr(optimizer, "optimizer", optimizer)
        if not inner._optimizer_step_pre_hooks:
            inner.register_step_pre_hook(lambda *_: inputs.append(Given.to(inner)))
        return optimizer

    trainer.create_optimizer = created
    first = weights(model)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    after = weights(model)
    second = model_of(folder, adapted)
    plain = replayed(second, inputs, weight_decay=0.1, adamw_betas=(0.9, 0.999), adamw_eps=1e-8, **settings)
    return {
        "optimizer": type(optimizer).__name__,
        "muon": isinstance(optimizer, mm.Muon),
        "matrices": len(optimizer.param_groups[0]["params"]),
        "steps": len(inputs),
        "moved": len(different(first, after)),
        "of": len(after),
        "plain loop": different(after, plain),
    }


def main() -> None:
    folder, *kind = sys.argv[1:]
    if not Path(folder, "config.json").is_file():
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        tiny = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
        tiny.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    print(json.dumps(trained(folder, bool(kind))))


if __name__ == "__main__":
    main()
