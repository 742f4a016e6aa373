"""``axolotl train`` with the example's plugin: Axolotl's own command, trainer and checkpoints, on a CPU.

The versions that want Python 3.12 can be installed with all that they depend on (``make test-axolotl``). On two ranks
their start asks for an NVIDIA driver.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import muonmesh as mm

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "base_model": "tiny",
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "plugins": ["tests.hosts_all.axolotl_recorded.RecordedPlugin"],
    "muonmesh": {"momentum": 0.8},
    "optimizer": "adamw_torch",
    "learning_rate": 0.02,
    "weight_decay": 0.1,
    "lr_scheduler": "cosine",
    "sequence_len": 32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "dataset_prepared_path": "prepared",
    "attn_implementation": "eager",
    "seed": 5,
    **dict.fromkeys(("bf16", "fp16", "tf32", "sample_packing"), False),
}


def write_model_and_data(folder: Path) -> None:
    words = [f"w{i}" for i in range(60)]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder / "tiny")
    generator = random.Random(0)
    rows = (json.dumps({"text": " ".join(generator.choices(words, k=24))}) for _ in range(64))
    (folder / "data.jsonl").write_text("\n".join(rows))


def axolotl_train(folder: Path, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Run ``axolotl train`` with a configuration, and return the weights that it has saved."""
    config = folder / f"{name}.yml"
    config.write_text(json.dumps({**SETTINGS, "output_dir": name, **settings}))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("axolotl")), "train", config.name, "--launcher", "python"]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}/examples:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    environment |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return load_file(folder / name / "model.safetensors")


def test_its_trainer_is_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    write_model_and_data(tmp_path)
    trained = axolotl_train(tmp_path, "whole")
    steps = torch.load(tmp_path / "whole" / "steps.pt")
    assert len(steps) == 4

    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny")
    optimizer = mm.from_model(model, lr=0.02, weight_decay=0.1, momentum=0.8, adamw_betas=(0.9, 0.999))
    for gradients, rates in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()
    plain = model.state_dict()
    assert [name for name, weight in trained.items() if not torch.equal(weight, plain[name])] == []

    resumed = axolotl_train(tmp_path, "resumed", resume_from_checkpoint="whole/checkpoint-2")
    assert [name for name, weight in resumed.items() if not torch.equal(weight, trained[name])] == []
