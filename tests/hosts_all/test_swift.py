"""`swift sft` and `swift pt` themselves, on a tiny model in a folder: their steps are Muon's, and resumed ones too.

A step of an orthogonalized matrix says so itself: divided by learning rate and the scale of the whole matrix, its
largest singular value is near 1, for all fourteen matrices. Of a shard, a clipped or a raw gradient it is anything.
(The smallest are not: the gradient of four short sentences has few singular values that are not about 0.)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
RATE = 1e-2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*sorted(ByteLevel.alphabet()), *SPECIAL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with its tokenizer, and data; nothing is downloaded.

    The tokenizer has a token for each byte and no merges, since `transformers` makes of any tokenizer beside a Qwen2
    one of byte pairs. One of words would know no character then, and `swift pt` would train on empty sequences.
    """
    path = tmp_path_factory.mktemp("swift")
    words = Tokenizer(BPE({token: number for number, token in enumerate(VOCABULARY)}, []))
    words.pre_tokenizer, words.decoder = ByteLevel(add_prefix_space=False), Decoder()
    names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=SPECIAL[1:2], **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=264, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    rows = torch.randint(60, (16, 6), generator=torch.Generator().manual_seed(1)).tolist()
    spoken = [" ".join(f"w{number}" for number in row) for row in rows]
    talks = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in spoken]
    texts = [[{"role": "assistant", "content": text}] for text in spoken]
    for name, messages in (("sft", talks), ("pt", texts)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in messages))
    return path


SCRIPT = ROOT / "examples" / "ms_swift.sh"
SHIM = str(Path(__file__).with_name("swift_cpu.py"))
# Without the first two, transformers sees no distributed run on a CPU, and each rank would train a model of its own.
GLOO = ("--use_cpu", "true", "--ddp_backend", "gloo")
FP32 = ("--fp16", "false", "--bf16", "false")
WAYS: dict[str, tuple[str, ...]] = {
    "one": (),
    "pt": (),
    "ddp": GLOO,
    "pt on two ranks": GLOO,
    "zero2": ("--deepspeed", "zero2", *FP32),
    "zero3": ("--deepspeed", "zero3", *FP32),
    "fsdp2": ("--fsdp", "fsdp2", *FP32),
}


def train_by_swift(folder: Path, name: str, launch: str, *more: str) -> Path:
    """Train to the second step, with a checkpoint after each; returns the folder of the checkpoints."""
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    task, ranks = ("pt" if launch.startswith("pt") else "sft"), (1 if launch in ("one", "pt") else 2)
    if ranks > 1:
        environment["NPROC_PER_NODE"] = str(ranks)
    environment["PLUGINS"] = SHIM if launch in ("zero2", "zero3", "fsdp2") else ""
    command = f"sh {SCRIPT} {task} model {task}.jsonl --model_type qwen2 --template qwen \
        --optim_args weight_decay=0.0,momentum=0.9 \
        --output_dir RUN --add_version false --max_steps 2 --save_steps 1 --logging_steps 1 --learning_rate {RATE} \
        --lr_scheduler_type constant --warmup_ratio 0 --per_device_train_batch_size {4 // ranks} \
        --gradient_accumulation_steps 1 --torch_dtype float32 --check_model false --report_to none \
        --split_dataset_ratio 0 --gradient_checkpointing false --dataloader_num_workers 0".split()
    run = subprocess.run(
        [name if part == "RUN" else part for part in (*command, *WAYS[launch], *more)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    return folder / name


def weights(checkpoint: Path) -> dict[str, Tensor]:
    if not (checkpoint / "model.safetensors").exists():  # FSDP2's preset saves in shards
        dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", checkpoint / "model.pt")
        saved: dict[str, Tensor] = torch.load(checkpoint / "model.pt", weights_only=True)["model"]
        return saved
    return load_file(checkpoint / "model.safetensors")


def swift_losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], Path]:
    """The run of each way, trained once."""
    return cache(lambda launch: train_by_swift(folder, launch, launch))


@pytest.mark.parametrize("launch", WAYS)
def test_every_hidden_matrix_takes_an_orthogonal_step(
    folder: Path, trained: Callable[[str], Path], launch: str
) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    after = weights(trained(launch) / "checkpoint-1")
    hidden = [name for name, weight in before.items() if weight.ndim == 2 and ".layers." in name]
    assert len(hidden) == 14
    for name in hidden:
        scale = RATE * 0.2 * math.sqrt(max(before[name].shape))
        largest = float(torch.linalg.matrix_norm((before[name].double() - after[name].double()) / scale, 2))
        assert 0.85 < largest < 1.3, (name, largest)
    moved = before["lm_head.weight"] - after["lm_head.weight"]
    assert 0 < float(moved.abs().max()) < 1.01 * RATE  # AdamW's first step is at most the rate, element by element


@pytest.mark.parametrize("launch", WAYS)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    folder: Path, trained: Callable[[str], Path], launch: str
) -> None:
    """The second step is the first that feels momentum and AdamW's moments."""
    whole = trained(launch)
    again = train_by_swift(folder, f"{launch}-again", launch, "--resume_from_checkpoint", str(whole / "checkpoint-1"))
    assert swift_losses(again)[-1:] == swift_losses(whole)[1:]
    first, second, resumed = (weights(run) for run in (*sorted(whole.glob("checkpoint-?")), again / "checkpoint-2"))
    assert second.keys() == resumed.keys() == first.keys()
    assert [name for name in second if not torch.equal(second[name], resumed[name])] == []
    assert [name for name in second if torch.equal(first[name], second[name])] == []
