"""`swift sft` itself, on a tiny model in a folder: that its steps are Muon's, in one process and on two ranks.

A step of an orthogonalised matrix says so itself: divided by learning rate and the scale of the whole matrix, its
largest singular value is near 1, for all fourteen matrices. Of a shard, a clipped or a raw gradient it is anything.
(The smallest are not: the gradient of four short sentences has few singular values that are not about 0.)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
RATE = 1e-2
WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with its tokenizer, and conversations; nothing is downloaded."""
    place = tmp_path_factory.mktemp("swift")
    made = Tokenizer(WordLevel({word: i for i, word in enumerate([*WORDS, *SPECIAL])}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    names = {"unk_token": "<unk>", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=SPECIAL[2:3], **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    rows = torch.randint(len(WORDS), (16, 6), generator=torch.Generator().manual_seed(1)).tolist()
    with (place / "data.jsonl").open("w") as file:
        for row in rows:
            said = " ".join(WORDS[number] for number in row)
            file.write(json.dumps({"messages": [{"role": r, "content": said} for r in ("user", "assistant")]}) + "\n")
    return place


SHIM = str(Path(__file__).with_name("swift_cpu.py"))


def sft(folder: Path, name: str, *more: str, ranks: int = 1, shim: str = "") -> dict[str, Tensor]:
    """Run one step of `swift sft`; returns the weights of the checkpoint."""
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    if ranks > 1:
        environment["NPROC_PER_NODE"] = str(ranks)
    asked = [sys.executable, "-m", "muonmesh.integrations.swift"]
    plugin = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    command = f"swift sft --model model --model_type qwen2 --template qwen --dataset data.jsonl --tuner_type full \
        --external_plugins {plugin} {shim} --optimizer muonmesh --optim_args weight_decay=0.0,momentum=0.9 \
        --output_dir {name} --add_version false --max_steps 1 --save_steps 1 --learning_rate {RATE} \
        --lr_scheduler_type constant --warmup_ratio 0 --per_device_train_batch_size {4 // ranks} \
        --gradient_accumulation_steps 1 --torch_dtype float32 --check_model false --report_to none \
        --split_dataset_ratio 0 --gradient_checkpointing false --dataloader_num_workers 0".split()
    done = subprocess.run(
        [*command, *more], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    saved = folder / name / "checkpoint-1"
    if not (saved / "model.safetensors").exists():  # FSDP2's preset saves in shards
        dcp_to_torch_save(saved / "pytorch_model_fsdp_0", saved / "model.pt")
        weights: dict[str, Tensor] = torch.load(saved / "model.pt", weights_only=True)["model"]
        return weights
    return load_file(saved / "model.safetensors")


# Without the first two, transformers sees no distributed run on a CPU, and each rank would train a model of its own.
GLOO = ("--use_cpu", "true", "--ddp_backend", "gloo")
FP32 = ("--fp16", "false", "--bf16", "false")
WAYS: dict[str, tuple[str, ...]] = {
    "one": (),
    "ddp": GLOO,
    "zero2": ("--deepspeed", "zero2", *FP32),
    "zero3": ("--deepspeed", "zero3", *FP32),
    "fsdp2": ("--fsdp", "fsdp2", *FP32),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_hidden_matrix_takes_an_orthogonal_step(folder: Path, way: str) -> None:
    shim = SHIM if way in ("zero2", "zero3", "fsdp2") else ""
    before = load_file(folder / "model" / "model.safetensors")
    after = sft(folder, way, *WAYS[way], ranks=1 if way == "one" else 2, shim=shim)
    hidden = [name for name, weight in before.items() if weight.ndim == 2 and ".layers." in name]
    assert len(hidden) == 14
    for name in hidden:
        scale = RATE * 0.2 * math.sqrt(max(before[name].shape))
        largest = float(torch.linalg.matrix_norm((before[name].double() - after[name].double()) / scale, 2))
        assert 0.85 < largest < 1.3, (name, largest)
    moved = before["lm_head.weight"] - after["lm_head.weight"]
    assert 0 < float(moved.abs().max()) < 1.01 * RATE  # AdamW's first step is at most the rate, element by element
