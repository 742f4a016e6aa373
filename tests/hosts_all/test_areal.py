"""AReaL's own FSDP engine on two gloo ranks, with the file that replaces its AdamW: it trains, saves and loads.

Real are the engine with its configuration, its CPU platform, FSDP2, packing, the loss of supervised fine-tuning,
tensor parallelism, clipping, schedule and checkpoint. Not run: rollouts, and the controller's worker processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.hosts_all import without_loggers  # AReaL's trainers import loggers
from tests.support.engines import SAME, prepare_ranks, train_and_resume
from tests.support.workers import Pool

pytest_plugins = ("tests.support.engines",)
prepare_ranks(without_loggers.__name__, "areal.trainer.sft.lm_engine")

RATE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two layers and a tokenizer of bytes; nothing is downloaded."""
    from tests.hosts.tiny import tokenizer

    path = tmp_path_factory.mktemp("areal")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def areal_engine(folder: str, *, split: str = "fsdp:d2", type: str = "adam", per_layer: bool = False) -> Any:
    """Return AReaL's engine for supervised fine-tuning, as its trainer makes it in each process."""
    import areal_muon  # noqa: F401 - what the example's first line says to write
    from areal.api import FinetuneSpec, ModelAllocation
    from areal.api.cli_args import FSDPEngineConfig, OptimizerConfig, TrainEngineConfig
    from areal.engine import FSDPLMEngine

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    optimizer = OptimizerConfig(type=type, lr=RATE, weight_decay=0.3, beta1=0.8, beta2=0.9, gradient_clipping=1e-3)
    config = TrainEngineConfig(
        experiment_name="e",
        trial_name="t",
        path=folder,
        backend=split,
        dtype="float32",
        attn_impl="sdpa",
        gradient_checkpointing=False,
        optimizer=optimizer,
        fsdp=FSDPEngineConfig(per_layer_optim_step=per_layer),
    )
    engine = FSDPLMEngine(config)
    engine.create_process_group(parallel_strategy=ModelAllocation.from_str(split).parallel)
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=16, train_batch_size=4))
    return engine


def areal_steps(engine: Any, steps: range) -> None:
    """Train with the engine's own method."""
    for step in steps:
        tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(10 * step + engine.dp_rank))
        every = torch.ones_like(tokens)
        batch = {"input_ids": tokens, "attention_mask": every.bool(), "loss_mask": every}
        engine.train_lm([{name: values[[row]] for name, values in batch.items()} for row in range(2)])
        engine.lr_scheduler_step()


def trained_by_areal(folder: str, checkpoint: str, split: str) -> dict[str, Any]:
    import areal_muon
    from areal.api import SaveLoadMeta

    areal_muon.SETTINGS = {"momentum": 0.8, "compute_dtype": torch.float32}
    meta = SaveLoadMeta(
        path=checkpoint, weight_format="dcp", with_optim=True, tokenizer=None, processor=None, base_model_path=None
    )

    def resume() -> Any:
        engine = areal_engine(folder, split=split)
        engine.load(meta)
        return engine

    return train_and_resume(
        areal_engine(folder, split=split),
        areal_steps,
        lambda engine: engine.save(meta),
        resume,
        lambda engine: engine.model,
        Qwen2ForCausalLM.from_pretrained(folder),
        **{"weight_decay": 0.3, "momentum": 0.8, "adamw_betas": (0.8, 0.9), "compute_dtype": torch.float32},
    )


@pytest.mark.parametrize("split", ["fsdp:d2", "fsdp:d1t2"], ids=["FSDP2", "TP"])
def test_the_engine_s_steps_are_those_of_a_plain_loop(pair: Pool, folder: str, tmp_path: Path, split: str) -> None:
    for result in pair.run(trained_by_areal, folder, str(tmp_path), split, timeout=400):
        assert result.pop("rates")[0] == {RATE}
        assert result == SAME


def areal_refusals(folder: str) -> list[str]:
    messages = [type(areal_engine(folder, type="sgd").optimizer).__name__]
    try:
        areal_engine(folder, per_layer=True)
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_what_it_cannot_make_is_said_and_what_is_named_stays(pair: Pool, folder: str) -> None:
    for named, layers in pair.run(areal_refusals, folder, timeout=400):
        assert "per_layer_optim_step: false" in layers
        assert named == "SGD"
