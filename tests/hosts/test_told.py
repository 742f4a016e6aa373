"""What hosts would do without a word, or with words that say nothing, is told."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import muonmesh as mm
from muonmesh.integrations.accelerate import from_model
from muonmesh.integrations.deepspeed.optimizer import EngineOptimizer
from muonmesh.integrations.transformers import MuonCallback, MuonFactory
from tests.hosts.deepspeed_engine import zero
from tests.hosts.tiny import Tokens, llama
from tests.hosts.world import accelerated, launched

COVERS = ("integrations.refusals.refuse_settings",)

FP32: dict[str, Any] = {"compute_dtype": torch.float32}


def kept_alive() -> int:
    """How many parameters of the model as it was are kept alive when Accelerate has sharded it."""
    with launched(), accelerated(True):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator, model = Accelerator(fsdp_plugin=plugin), llama()
        optimizer = from_model(accelerator, model, **FP32)
        before = [weakref.ref(parameter) for parameter in model.parameters()]
        model, optimizer = accelerator.prepare(model, optimizer)
        gc.collect()
        return sum(reference() is not None for reference in before)


def test_nothing_of_the_unsharded_model_is_kept(workers: Any) -> None:
    assert workers(2).run(kept_alive, timeout=90.0) == [0, 0]


def test_accelerate_knows_which_steps_were_skipped() -> None:
    with launched():
        accelerator, model = Accelerator(cpu=True), torch.nn.Linear(6, 4)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # on a CPU Accelerate makes none
        muon = from_model(accelerator, model, lr=0.1, **FP32)
        schedule = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 0.5**step)
        model, optimizer, schedule = accelerator.prepare(model, muon, schedule)
        skipped, rates = [], []
        for scale in (1.0, float("inf"), 1.0, 1e6):
            accelerator.backward(model(torch.ones(2, 6)).sum() * scale)
            accelerator.scaler.unscale_(muon)  # as accelerator.unscale_gradients() does under fp16
            muon.clip_grad_norm_(1.0, skip_above=1e3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
            rates.append(muon.param_groups[0]["lr"])
    assert skipped == [False, True, False, True]
    assert rates == [0.05, 0.05, 0.025, 0.025]


def trainer_for(folder: Path, pair: tuple[Any, dict[str, Any]], *callbacks: Any, **more: Any) -> Trainer:
    args = TrainingArguments(str(folder), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, **more)
    if pair[0] is MuonFactory:
        pair = (MuonFactory, {"args": args, **FP32, **pair[1]})
    return Trainer(llama(), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=pair, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("pair", "more", "message"),
    [
        ((mm.from_model, {}), {}, "from_model: found no model; .*MuonFactory"),
        ((mm.Muon, {}), {}, "needed .*matri"),
        ((MuonFactory, {"momentun": 0.9}), {}, "from_model: found the argument 'momentun'; .*Write momentum="),
        ((MuonFactory, {}), {"optim": "adafactor"}, "found optim='adafactor' and MuonFactory; .*remove optim="),
        ((MuonFactory, {}), {"optim_args": "rank=4"}, "TrainingArguments: found optim_args='rank=4'"),
    ],
)
def test_what_a_trainer_cannot_be_given_is_said(
    tmp_path: Path, pair: tuple[Any, dict[str, Any]], more: dict[str, Any], message: str
) -> None:
    with launched(), pytest.raises((TypeError, ValueError), match=message):
        trainer_for(tmp_path, pair, **more).train()


def two_rates(folder: str) -> str:
    """What a Trainer says of a rate beside ``args``, if DeepSpeed's scheduler has that of ``args``."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    config = {"train_micro_batch_size_per_gpu": "auto", **zero(1), "scheduler": scheduler}
    with launched(), accelerated(True):
        trainer = trainer_for(Path(folder), (MuonFactory, {"lr": 1e-3}), deepspeed=config, learning_rate=0.01)
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared where it arrives
            trainer.train()
    return str(error.value)


def test_a_rate_that_deepspeeds_scheduler_would_overrule_is_refused(workers: Any, tmp_path: Path) -> None:
    for message in workers(2).run(two_rates, str(tmp_path), timeout=120.0):
        assert "found learning_rate=0.01, which DeepSpeed's scheduler follows, and lr=0.001 beside args" in message
        assert message.endswith("Write TrainingArguments(learning_rate=0.001)")


def test_groups_that_a_trainer_makes_itself_are_refused() -> None:
    groups = [{"params": list(llama().parameters()), "lr": 1e-3}]
    with pytest.raises(TypeError, match=r"^MuonFactory: found groups of parameters; .*embedding_learning_rate"):
        MuonFactory(groups, lr=1e-3)
    with pytest.raises(TypeError, match=r"^MuonFactory: found lr; .*optimizer_cls_and_kwargs=\(MuonFactory"):
        MuonFactory(lr=1e-3)


def test_the_callback_clips_in_place_of_the_trainer_and_skips(tmp_path: Path) -> None:
    with launched():
        trainer = trainer_for(tmp_path, (MuonFactory, {}), MuonCallback(skip_above=1e-9), max_grad_norm=1e-3)
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert trainer.args.max_grad_norm == 0.0
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        assert trainer.lr_scheduler.last_epoch == 0  # the schedule waits too
        with pytest.raises(ValueError, match=r"MuonCallback: found a AdamW; .*MuonFactory"):
            trainer_for(tmp_path, (torch.optim.AdamW, {}), MuonCallback()).train()


@pytest.mark.parametrize(
    "wrong", [{"clip": -1.0}, {"policy": "al"}, {"skip_above": "50"}, {"skip_above": float("nan")}]
)
def test_arguments_of_the_callback_are_checked_before_a_training_begins(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^MuonCallback: {next(iter(wrong))}: found"):
        MuonCallback(**wrong)


def test_metrics_are_refused_under_deepspeed() -> None:
    defaults = {"algorithm": "muon", "parameters": ["w"], "matrices": ["whole"], "name": "muon"}
    engine_s = EngineOptimizer([{"params": [torch.nn.Parameter(torch.zeros(4))], **defaults}], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"MuonCallback: metrics=True does not work under DeepSpeed.*Remove metrics"):
        MuonCallback(metrics=True).on_train_begin(None, None, None, optimizer=engine_s)


def given_to_deepspeed(stage: int, how: str) -> str:
    """What DeepSpeed's own function makes of our optimizer, the likeliest mistake; or of a callable that returns it.

    DeepSpeed's own word about untested optimizers comes first, and ours once that is switched off.
    """
    with launched(), accelerated(True):
        model = llama()
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        if how != "untested":
            config["zero_allow_untested_optimizer"] = True
        before = {name: p.clone() for name, p in model.named_parameters()}

        def make(_: Any = None) -> mm.Muon:
            return mm.from_model(model, lr=0.1, process_group="world", **FP32)

        def use() -> None:
            passed = make if how == "callable" else make()
            engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=passed)
            engine.backward(engine(**next(iter(DataLoader(Tokens(), batch_size=2)))).loss)
            engine.step()

        with pytest.raises((AssertionError, ValueError)) as caught:
            use()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        return str(caught.value)


@pytest.mark.parametrize("how", ["untested", "optimizer", "callable"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_given_to_deepspeeds_own_function_says_what_to_write(workers: Any, stage: int, how: str) -> None:
    for message in workers(2).run(given_to_deepspeed, stage, how, timeout=90.0):
        if how == "untested":
            assert message.startswith("You are using an untested ZeRO Optimizer"), message
            continue
        assert "param_names for 1 parameters" in message, message
        assert (
            'muonmesh.integrations.deepspeed.initialize(model=model, config=config, optimizer={"lr": 3e-4})' in message
        )


def trained_without_zero(how: str) -> list[str]:
    """Two steps of DeepSpeed's engine at stage 0 with our optimizer; return the weights that a plain loop has not."""
    with launched(), accelerated(True):
        model, alone = llama(), llama()
        alone.load_state_dict(model.state_dict())

        def make(_: Any = None) -> mm.Muon:
            return mm.from_model(model, lr=0.1, process_group="world", **FP32)

        passed = make if how == "callable" else make()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=passed)
        plain = mm.from_model(alone, lr=0.1, process_group="world", **FP32)
        for number, batch in zip(range(2), DataLoader(Tokens(), batch_size=2), strict=False):
            batch = {key: value.roll(dist.get_rank() + number, -1) for key, value in batch.items()}
            engine.backward(engine(**batch).loss)
            engine.step()
            alone(**batch).loss.backward()
            for p in alone.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            plain.step()
            plain.zero_grad()
        return [name for name, p in alone.named_parameters() if not torch.equal(p, model.get_parameter(name))]


@pytest.mark.parametrize("how", ["optimizer", "callable"])
def test_deepspeeds_own_function_trains_without_zero(workers: Any, how: str) -> None:
    """Stage 0 averages gradients and leaves parameters as they are, as DistributedDataParallel does."""
    assert workers(2).run(trained_without_zero, how, timeout=90.0) == [[], []]
