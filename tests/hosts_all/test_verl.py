"""verl's own FSDP engine on two gloo ranks, with the one variable that chooses us: it builds, steps, saves and loads.

Real are `import verl`, the engine with its configuration, FSDP2, clipping, schedule and checkpoint. Not run: Ray's
workers, rollouts, and the losses of reinforcement learning; the loss is the language model's own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from tests.hosts.replay import Given, different, replayed, weights
from tests.support import workers

MODULES = "tests.hosts_all.verl_cpu,verl_muon"
EXAMPLES = str(Path(__file__).parents[2] / "examples")
sys.path.append(EXAMPLES)  # of this process, and of its ranks
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), EXAMPLES)))
os.environ |= {"VERL_USE_EXTERNAL_MODULES": MODULES, "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}
multiprocessing.set_forkserver_preload(
    [
        workers.__name__,
        "muonmesh.build",
        "muonmesh.integrations.qk_clip",
        *workers.MODELS,
        "verl",
        "verl.workers.engine",
    ]
)

RATE = 0.01


@pytest.fixture(scope="module")
def pair() -> Iterator[workers.Pool]:
    pool = workers.Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two layers; nothing is downloaded."""
    path = tmp_path_factory.mktemp("verl")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(path)
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


def verl_steps(engine: Any, steps: range) -> list[Given]:
    """Take steps with the engine's own methods; return what its optimizer was given."""
    inputs: list[Given] = []
    engine.optimizer.register_step_pre_hook(lambda *_: inputs.append(Given.to(engine.optimizer)))
    for step in steps:
        engine.optimizer_zero_grad()
        tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        engine.optimizer_step()
        engine.lr_scheduler_step()
    return inputs


def trained_by_verl(folder: str, checkpoint: str) -> dict[str, Any]:
    settings = {"momentum": 0.8, "compute_dtype": "float32"}
    engine = engine_of(folder, override_optimizer_config=settings)
    optimizer = engine.optimizer
    inputs = verl_steps(engine, range(2))
    engine.save_checkpoint(checkpoint)
    inputs += verl_steps(engine, range(2, 4))[:2]
    after = weights(engine.module)
    second = engine_of(folder, override_optimizer_config=settings)
    second.load_checkpoint(checkpoint)
    verl_steps(second, range(2, 4))
    muon_settings = {"weight_decay": 0.3, "momentum": 0.8, "adamw_betas": (0.8, 0.9), "compute_dtype": torch.float32}
    plain = replayed(LlamaForCausalLM.from_pretrained(folder), inputs[:2] + inputs[-2:], **muon_settings)
    return {
        "muon": type(optimizer) is mm.Muon,
        "matrices": len(optimizer.param_groups[0]["params"]),
        "plain loop": different(after, plain),
        "resumed": different(after, weights(second.module)),
        "first": inputs[0].rates,
    }


def test_the_engine_s_steps_are_those_of_a_plain_loop(pair: workers.Pool, folder: str, tmp_path: Path) -> None:
    for result in pair.run(trained_by_verl, folder, str(tmp_path), timeout=400):
        assert result["muon"]
        assert result["matrices"] == 14
        assert result["plain loop"] == []
        assert result["resumed"] == []
        assert set(result["first"].values()) == {RATE}


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


def test_what_it_cannot_make_is_said_and_what_is_named_stays(pair: workers.Pool, folder: str) -> None:
    for named, flat, setting in pair.run(refusals, folder, timeout=400):
        assert "Write strategy=fsdp2" in flat
        assert "Write momentum=" in setting
        assert named == "SGD"
