"""The real Trainer of `transformers`: what it writes into the optimizer, what it makes of it, and what it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from transformers import Trainer, TrainingArguments

from muonmesh.integrations.transformers import MuonCallback, MuonFactory
from tests.hosts.replay import Given, different, replayed, strengths
from tests.hosts.tiny import MATRICES, Tokens, llama, tensor_parallel_llama
from tests.hosts.watch import Watch, losses
from tests.hosts.world import accelerated, launched

COVERS = (
    "integrations.transformers.MuonFactory",
    "integrations.transformers.MuonCallback",
)

STEPS = 4
SETTINGS: dict[str, Any] = {"compute_dtype": torch.float32, "momentum": 0.9}
LIMIT = 2.0
OF_ARGUMENTS = {"weight_decay": 0.3, "adamw_betas": (0.8, 0.99), "adamw_eps": 1e-7}


def arguments(folder: str, **more: Any) -> TrainingArguments:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "weight_decay": 0.3,
        "adam_beta1": 0.8,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
        "max_grad_norm": 1e-6,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": True,
    }
    return TrainingArguments(folder, **{**settings, **more})


def train_launched(folder: str, how: str, resume: bool = False) -> tuple[Any, ...]:
    """Train under one way of launching; return what was found, which any process can compare."""
    more = {
        "fsdp2": {
            "use_cpu": False,
            "fsdp": True,
            "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        },
        "tp": {"use_cpu": False, "save_strategy": "no"},  # a Trainer does not save what it has not sharded itself
    }
    with launched(), accelerated(how in more):
        args, watch = arguments(folder, **more.get(how, {})), Watch()
        trainer = Trainer(
            tensor_parallel_llama(folder) if how == "tp" else llama(),
            args,
            train_dataset=Tokens(),
            callbacks=[watch, MuonCallback(metrics=True)],
            optimizer_cls_and_kwargs=(MuonFactory, {"args": args, **SETTINGS}),
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        return type(trainer.model_wrapped).__name__, watch.inputs, watch.weights, trainer.state.log_history


def check_trainer(
    model: str, inputs: list[Given], snapshots: list[dict[str, torch.Tensor]], logs: list[dict[str, float]]
) -> None:
    """What holds under any way of launching."""
    assert [step.rates["muon"] for step in inputs] == [0.05 * (1 - n / STEPS) for n in range(STEPS)]
    assert different(snapshots[-1], replayed(llama(), inputs, **OF_ARGUMENTS, **SETTINGS)) == []
    # The Trainer has scaled all gradients to a norm of 1e-6. AdamW's ε is far above them, Muon does not feel it.
    moved = strengths(snapshots[0], snapshots[1], 0.05)
    muon = [moved[name] for name in moved if name.endswith("_proj.weight")]
    assert len(muon) == MATRICES
    assert min(muon) > 0.1
    assert moved["lm_head.weight"] < 0.5
    logged = [entry for entry in logs if "loss" in entry]
    assert [entry["learning_rate/adamw.head"] for entry in logged] == [entry["learning_rate"] for entry in logged]
    assert all(entry["muon/gradient_rms"] > 0 and entry["muon/update_rms"] > 0 for entry in logged)


WRAPPED = {
    "alone": "LlamaForCausalLM",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPLlamaForCausalLM",
    "tp": "LlamaForCausalLM",
}


@pytest.mark.parametrize("how", WRAPPED)
def test_a_trainer_is_a_plain_loop_and_resumes(workers: Any, tmp_path: Path, how: str) -> None:
    """But under tensor parallelism, which a Trainer does not save."""

    def trained(**resume: Any) -> list[tuple[Any, ...]]:
        arguments = train_launched, str(tmp_path), how
        return (
            [train_launched(*arguments[1:], **resume)]
            if how == "alone"
            else workers(2).run(*arguments, **resume, timeout=90)
        )

    first, *others = trained()
    assert first[0] == WRAPPED[how]
    check_trainer(*first)
    assert all(different(first[2][-1], other[2][-1]) == [] for other in others)
    if how != "tp":
        resumed = trained(resume=True)[0]
        assert losses(resumed[3])[-2:] == losses(first[3])[-2:]
        assert different(resumed[2][-1], first[2][-1]) == []


def train_zero(
    folder: str, stage: int | None, *, offload: str = "none", resume: bool = False
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The callback clips and skips, and a Trainer's own limit would stall AdamW; without a stage it is DDP."""
    zero = {"stage": stage, "offload_optimizer": {"device": offload}}
    config: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto"}
    config |= {"scheduler": None} if stage == 2 else {}  # as templates write it
    engine = stage is not None
    more: dict[str, Any] = {"use_cpu": False, "deepspeed": config} if engine else {}
    with launched(), accelerated(engine):
        args = arguments(folder, **more)
        factory = MuonFactory, {"args": args, **SETTINGS}
        trainer = Trainer(
            llama(),
            args,
            train_dataset=Tokens(),
            optimizer_cls_and_kwargs=factory,
            callbacks=[MuonCallback(clip=0.3, policy="all", skip_above=LIMIT)],
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["learning_rate/muon"] for entry in logged] == [entry["learning_rate"] for entry in logged]
        rates = trainer.lr_scheduler.get_last_lr()
        named = trainer.model.named_parameters()
        assert type(trainer.model_wrapped).__name__ == ("DeepSpeedEngine" if engine else "DistributedDataParallel")
        if not stage:
            return {name: p.detach().clone() for name, p in named}, rates
        return {name: safe_get_full_fp32_param(p).clone() for name, p in named}, rates


@pytest.fixture(scope="module")
def ddp(workers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What DDP ends with, whose gradients DeepSpeed's are compared with."""
    result: tuple[dict[str, torch.Tensor], list[float]]
    result = workers(2).run(train_zero, str(tmp_path_factory.mktemp("ddp")), None, timeout=90.0)[0]
    return result


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, "none"), (1, "none"), (2, "none"), (2, "cpu"), (3, "none")], ids=str
)
def test_deepspeed_is_ddp(workers: Any, tmp_path: Path, ddp: Any, stage: int, offload: str) -> None:
    """With offload, Accelerate would replace any optimizer by DeepSpeed's Adam for the CPU."""
    expected, rates = ddp
    assert rates == [0.05 * (1 - 2 / STEPS)] * 4  # of four steps two were skipped: one before it was saved, one after
    trained, at = workers(2).run(train_zero, str(tmp_path), stage, offload=offload, timeout=90.0)[0]
    if stage == 3:  # whose own backward rounds otherwise
        torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-4)
    else:
        assert different(trained, expected) == []
    assert at == rates
    again, at = workers(2).run(train_zero, str(tmp_path), stage, offload=offload, resume=True, timeout=90.0)[0]
    assert different(again, trained) == []
    assert at == rates
