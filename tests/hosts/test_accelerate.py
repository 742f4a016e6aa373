"""The real Accelerator: what `prepare` makes of model and optimizer trains as a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from muonmesh.integrations.accelerate import from_model
from tests.hosts.replay import Given, different, replayed, weights
from tests.hosts.tiny import Tokens, llama
from tests.hosts.world import accelerated, launched

STEPS = 4
RATE = 0.05
SETTINGS: dict[str, Any] = {"lr": RATE, "weight_decay": 0.1, "compute_dtype": torch.float32}


def accelerator_for(how: str) -> Accelerator:
    """Make it with two micro-batches a step."""
    if how == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if how.startswith("zero"):
        config = {
            "zero_optimization": {"stage": int(how[-1])},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
        }
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def train(how: str, folder: str, resume: bool = False) -> dict[str, Any]:
    """Four steps of two micro-batches, saved after two, or the last two of them."""
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"} if how.startswith("zero") else {}
    with launched(**deepspeed), accelerated(how not in ("alone", "ddp")):
        accelerator = accelerator_for(how)
        model: Any = llama()
        optimizer = from_model(accelerator, model, **SETTINGS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
        loader = DataLoader(Tokens(), batch_size=2)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if resume:
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, 4)
        given, seen, losses = list[Given](), [], list[float]()
        for step, batch in enumerate(loader, start=5 if resume else 1):
            if step > 2 * STEPS:
                break
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and not deepspeed:
                    seen.append(weights(model))
                    accelerator.clip_grad_norm_(model.parameters(), 1e-6 if how == "clipped" else 1e6)
                    given.append(Given.to(optimizer))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step == 4 and not resume:
                accelerator.save_state(folder)
        final = {} if deepspeed else weights(model)
        if deepspeed:
            from deepspeed.utils import safe_get_full_fp32_param

            final = {
                name: safe_get_full_fp32_param(p).clone()
                for name, p in accelerator.unwrap_model(model).named_parameters()
            }
        return {
            "type": accelerator.distributed_type,
            "given": given,
            "weights": [*seen, final],
            "losses": losses,
            "skipped": accelerator.optimizer_step_was_skipped,
        }


@pytest.fixture(scope="module")
def ddp(workers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = str(tmp_path_factory.mktemp("ddp"))
    return workers(2).run(train, "ddp", folder, timeout=90.0)[0], folder


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_update_is_that_of_a_plain_loop(workers: Any, ddp: Any, tmp_path: Path, how: str) -> None:
    found, folder = ddp
    if how == "ddp":
        assert found["type"] == DistributedType.MULTI_CPU
        plain = replayed(llama(), found["given"], **SETTINGS)
        assert different(found["weights"][-1], plain) == []
    else:
        reference, folder = found, str(tmp_path)
        found = workers(2).run(train, how, folder, timeout=90.0)[0]
        assert found["type"] == (DistributedType.FSDP if how == "fsdp2" else DistributedType.DEEPSPEED)
        assert different(found["weights"][-1], reference["weights"][-1]) == []
        assert found["losses"] == reference["losses"]
    resumed = workers(2).run(train, how, folder, resume=True, timeout=90.0)[0]
    assert resumed["losses"] == found["losses"][4:]
    assert different(resumed["weights"][-1], found["weights"][-1]) == []
