"""The real Accelerator: what `prepare` makes of model and optimizer trains as a plain loop does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.utils.data import DataLoader

from muonmesh.integrations.accelerate import from_model
from tests.hosts.replay import Given, different, replayed, weights
from tests.hosts.tiny import Tokens, llama, tensor_parallel_llama
from tests.hosts.world import accelerated, launched

COVERS = ("integrations.accelerate.optimizer_for",)

BATCHES = 8
RATE = 0.05
SETTINGS: dict[str, Any] = {"lr": RATE, "weight_decay": 0.1, "compute_dtype": torch.float32}


def accelerator_for(how: str, micro: int) -> Accelerator:
    """Make it with so many micro-batches a step."""
    if how in ("fsdp2", "hsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        twice = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if how == "hsdp" else None
        return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=micro, parallelism_config=twice)
    if how.startswith("zero"):
        config = {
            "zero_optimization": {"stage": int(how[-1])},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro,
            "gradient_clipping": 0.0,
        }
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=micro)
    if how == "tp":
        return Accelerator(parallelism_config=ParallelismConfig(tp_size=2), gradient_accumulation_steps=micro)
    return Accelerator(cpu=True, gradient_accumulation_steps=micro)


def train_accelerated(how: str, folder: str, micro: int, resume: bool = False) -> dict[str, Any]:
    """Train on eight micro-batches, saved after four, or on the last four of them."""
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"} if how.startswith("zero") else {}
    with launched(**deepspeed), accelerated(how not in ("alone", "ddp")):
        accelerator = accelerator_for(how, micro)
        model: Any = tensor_parallel_llama(f"{folder}/weights") if how == "tp" else llama()
        optimizer = from_model(accelerator, model, **SETTINGS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(Tokens(16 * accelerator.num_processes), batch_size=2)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if resume:
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, 4)
        inputs, snapshots, losses = list[Given](), [], list[float]()
        for step, batch in enumerate(loader, start=5 if resume else 1):
            if step > BATCHES:
                break
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and not deepspeed:
                    snapshots.append(weights(model))
                    accelerator.clip_grad_norm_(model.parameters(), 1e-6 if micro == 2 else 1e6)
                    inputs.append(Given.to(optimizer))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step == 4 and not resume and how != "tp":  # whose shards `save_state` cannot write
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
            "placements": {str(getattr(p, "placements", None)) for p in model.parameters()},
            "given": inputs,
            "weights": [*snapshots, final],
            "losses": losses,
            "skipped": accelerator.optimizer_step_was_skipped,
        }


@pytest.fixture(scope="module")
def ddp(workers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """DDP's weights and losses; the other ways of holding the same parameters are compared with them."""

    @cache
    def result_of(micro: int) -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp("ddp"))
        return workers(2).run(train_accelerated, "ddp", folder, micro, timeout=90.0)[0]

    return result_of


# DeepSpeed sums micro-batches in another order, so it is given one a step. TP's shards `save_state` cannot write.
@pytest.mark.parametrize(
    ("how", "ranks", "micro"),
    [("ddp", 2, 2), ("fsdp2", 2, 2), ("tp", 2, 2), ("hsdp", 4, 2), ("zero2", 2, 1), ("zero3", 2, 1)],
)
def test_every_way_is_a_plain_loop_and_resumes(
    workers: Any, ddp: Any, tmp_path: Path, how: str, ranks: int, micro: int
) -> None:
    result = workers(ranks).run(train_accelerated, how, str(tmp_path), micro, timeout=120.0)[0]
    kinds = {"ddp": DistributedType.MULTI_CPU, "fsdp2": DistributedType.FSDP, "hsdp": DistributedType.FSDP}
    if how.startswith("zero"):
        kinds[how] = DistributedType.DEEPSPEED
    assert result["type"] == kinds.get(how, result["type"])
    placements = {placed.replace("_S", "S") for placed in result["placements"]}
    assert how != "hsdp" or placements == {"(Replicate(), Shard(dim=0))"}
    if how.startswith("zero"):
        assert result["losses"] == pytest.approx(ddp(micro)["losses"], rel=0 if how == "zero2" else 1e-4)
    else:
        assert len(result["given"]) == BATCHES // 2
        assert different(result["weights"][-1], replayed(llama(), result["given"], **SETTINGS)) == []
    if how == "fsdp2":  # whose norm, by which it clips, rounds otherwise, as ZeRO-3's backward does
        assert result["losses"] == pytest.approx(ddp(micro)["losses"], rel=1e-4)
    if how == "zero2":
        assert different(result["weights"][-1], ddp(micro)["weights"][-1]) == []
    if how not in ("ddp", "tp"):
        resumed = workers(ranks).run(train_accelerated, how, str(tmp_path), micro, resume=True, timeout=120.0)[0]
        assert resumed["losses"] == result["losses"][BATCHES // 2 :]
        assert different(resumed["weights"][-1], result["weights"][-1]) == []
