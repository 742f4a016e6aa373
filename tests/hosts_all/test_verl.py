"""verl's own FSDP engine on two gloo ranks, with the one variable that chooses us: it builds, steps, saves and loads.

Real are `import verl`, the engine with its configuration, FSDP2, clipping, schedule and checkpoint. Not run: Ray's
workers, rollouts, and the losses of reinforcement learning; the loss is the language model's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaForCausalLM

import muonmesh as mm
from tests.hosts.tiny import llama
from tests.support.engines import SAME, prepare_ranks, train_and_resume
from tests.support.workers import Pool

pytest_plugins = ("tests.support.engines",)
MODULES = "tests.hosts_all.verl_cpu,verl_muon"
prepare_ranks(
    *("muonmesh.integrations.qk_clip", "verl", "verl.workers.engine"),
    VERL_USE_EXTERNAL_MODULES=MODULES,
    VERL_PLATFORM="cpu",
)

RATE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two layers; nothing is downloaded."""
    path = tmp_path_factory.mktemp("verl")
    llama().save_pretrained(path)
    return str(path)


def engine_of(folder: str, *, strategy: str = "fsdp2", **optimizer: Any) -> Any:
    """Return verl's engine with the variable set, as its workers make it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    sizes = HFModelConfig(
        path=folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, use_remove_padding=False
    )
    whole = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(  # its registry has it for CUDA and NPUs alone
        model_config=sizes,
        engine_config=FSDPEngineConfig(
            strategy=strategy, mixed_precision=whole, use_torch_compile=False, optimizer_offload=True
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=RATE, weight_decay=0.3, betas=(0.8, 0.9), clip_grad=1e-3, total_training_steps=4, **optimizer
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def verl_steps(engine: Any, steps: range) -> None:
    """Take steps with the engine's own methods."""
    for step in steps:
        engine.optimizer_zero_grad()
        tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        engine.optimizer_step()
        engine.lr_scheduler_step()


def trained_by_verl(folder: str, checkpoint: str) -> dict[str, Any]:
    settings = {"momentum": 0.8, "compute_dtype": "float32"}

    def resume() -> Any:
        engine = engine_of(folder, override_optimizer_config=settings)
        engine.load_checkpoint(checkpoint)
        return engine

    return train_and_resume(
        engine_of(folder, override_optimizer_config=settings),
        verl_steps,
        lambda engine: engine.save_checkpoint(checkpoint),
        resume,
        lambda engine: engine.module,
        LlamaForCausalLM.from_pretrained(folder),
        **{"weight_decay": 0.3, "momentum": 0.8, "adamw_betas": (0.8, 0.9), "compute_dtype": torch.float32},
    )


def test_the_engine_s_steps_are_those_of_a_plain_loop(pair: Pool, folder: str, tmp_path: Path) -> None:
    for result in pair.run(trained_by_verl, folder, str(tmp_path), timeout=400):
        assert result.pop("rates")[0] == {RATE}
        assert result == SAME


def refusals(folder: str) -> list[str]:
    engine = engine_of(folder, optimizer="SGD")
    messages = [type(engine.optimizer).__name__]
    engine.optimizer_config = engine_of(folder).optimizer_config
    flat = FullyShardedDataParallel(LlamaForCausalLM.from_pretrained(folder), device_id=torch.device("cpu"))
    for make in (
        lambda: engine._build_optimizer(flat),
        lambda: engine_of(folder, override_optimizer_config={"momentun": 1}),
    ):
        try:
            make()
        except (mm.LayoutError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_what_it_cannot_make_is_said_and_what_is_named_stays(pair: Pool, folder: str) -> None:
    for named, flat, setting in pair.run(refusals, folder, timeout=400):
        assert "Write strategy=fsdp2" in flat
        assert "Write momentum=" in setting
        assert named == "SGD"
