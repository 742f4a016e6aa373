"""Lightning 2.6: Trainer and Fabric train, clip, log, save and resume with `muonmesh.integrations.lightning`."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any, ClassVar

import lightning
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from muonmesh.integrations.lightning import MuonMetrics, MuonModule, from_model
from tests.hosts.replay import Given, different, replayed, strengths, weights
from tests.hosts.tiny import Tokens, llama
from tests.hosts.world import launched

COVERS = ("integrations.lightning.MuonModule",)

SETTINGS: dict[str, Any] = {"lr": 0.02, "compute_dtype": torch.float32}
STEPS = 6
LAUNCHED = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # what Lightning asks to know torchrun by


def cut_llama(model: nn.Module, how: str, mesh: Any) -> None:
    """Cut a Llama as ``configure_model`` does: by FSDP2, or the MLPs by tensor parallelism and the rest not at all."""
    for layer in model.model.layers:
        if how == "fsdp2":
            fully_shard(layer, mesh=mesh)
            continue
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, plan)
    if how == "fsdp2":
        fully_shard(model, mesh=mesh)


class Model(MuonModule):
    muon = SETTINGS

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.model = llama()
        self.how = how
        self.inputs: list[Given] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.how in ("fsdp2", "tp"):
            axis = {"fsdp2": "data_parallel", "tp": "tensor_parallel"}[self.how]
            cut_llama(self.model, self.how, self.device_mesh[axis])

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **settings: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **settings)
        self.inputs.append(Given.to(optimizer))


def fit_epochs(folder: Path, how: str = "", resume: str | None = None, **more: Any) -> tuple[Model, lightning.Trainer]:
    """Train two epochs of three steps of four sequences a rank, clipped hard, with a checkpoint after each."""
    parallel = {
        "fsdp2": {"data_parallel_size": 2, "tensor_parallel_size": 1},
        "tp": {"data_parallel_size": 1, "tensor_parallel_size": 2},
    }
    strategy = ModelParallelStrategy(**parallel[how]) if how in parallel else how or "auto"
    module = more.pop("module", None) or Model(how)
    keep = ModelCheckpoint(dirpath=folder / "kept", every_n_epochs=1, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2 if how else 1,
            "strategy": strategy,
            "max_epochs": 2,
            "gradient_clip_val": 1e-6,
            "logger": CSVLogger(
                folder, name="log", version="resumed" if resume else "whole", flush_logs_every_n_steps=1
            ),
            "log_every_n_steps": 1,
            "callbacks": [keep, LearningRateMonitor(), MuonMetrics()],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **more,
        }
    )
    tokens = Tokens(24 if how in ("ddp", "fsdp2") else 12)  # three steps an epoch
    trainer.fit(module, DataLoader(tokens, batch_size=4), ckpt_path=resume, weights_only=False)
    return module, trainer


class Skipping(Model):
    """Of six steps the second and the fourth change nothing."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **settings: Any) -> None:
        self.muon_clip = {"skip_above": 1e-9 if self.trainer.global_step in (1, 3) else math.inf}
        super().configure_gradient_clipping(optimizer, *args, **settings)


class SkippingByEpoch(Skipping):
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        return {**configured, "lr_scheduler": {**configured["lr_scheduler"], "interval": "epoch"}}


@pytest.mark.parametrize(("module", "moved"), [(Model, 6), (Skipping, 4), (SkippingByEpoch, 2)])
def test_a_skipped_step_leaves_a_schedule_of_steps_where_it_is(tmp_path: Path, module: Any, moved: int) -> None:
    with launched():
        _, trainer = fit_epochs(tmp_path, module=module())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == moved


def rows(folder: Path, version: str) -> list[dict[str, str]]:
    """What the logger wrote, one row a step."""
    merged: dict[str, dict[str, str]] = {}
    with (folder / "log" / version / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            merged.setdefault(row["step"], {}).update({key: value for key, value in row.items() if value})
    return [merged[step] for step in sorted(merged, key=int)]


def trainer_twice(folder: Path, how: str) -> dict[str, Any]:
    """Train, train again from the middle, and replay the gradients in one process."""
    with launched(**LAUNCHED):
        before = weights(Model())
        module, trainer = fit_epochs(folder, how)
        after = weights(module)
        second = fit_epochs(folder, how, resume=str(folder / "kept" / "step=3.ckpt"))[0]
        rank = trainer.global_rank
    first = replayed(Model(), module.inputs[:1], **SETTINGS)
    return {
        "plain loop": different(after, replayed(Model(), module.inputs, **SETTINGS)),
        "resumed": different(after, weights(second)),
        "losses": (module.losses[3:], second.losses),
        "weakest": min(v for n, v in strengths(before, first, module.inputs[0].rates["muon"]).items() if "proj" in n),
        "rows": rows(folder, "whole") if rank == 0 else None,
    }


def check_lightning(result: dict[str, Any]) -> None:
    assert result["plain loop"] == []
    assert result["resumed"] == []
    assert result["losses"][0] == result["losses"][1]
    assert len(result["losses"][1]) == STEPS - 3
    assert result["weakest"] > 0.1  # of AdamW's RMS: a norm of 1e-6 stalls nothing
    if result["rows"] is not None:
        rates = [float(row["lr-Muon/muon"]) for row in result["rows"]]
        assert rates == pytest.approx([SETTINGS["lr"] * (1 + 2 * step / STEPS) / 3 for step in range(STEPS)])
        for row in result["rows"]:
            assert float(row["muon/muon/update_to_weight"]) > 0
            assert math.isfinite(float(row["muon/adamw.embeddings/gradient_rms"]))


def results_on(workers: Any, function: Any, how: str, folder: Path) -> list[dict[str, Any]]:
    """What a function returns on two ranks; in this process, where nothing is parallel."""
    return workers(2).run(function, folder, how, timeout=300) if how else [function(folder, how)]


@pytest.mark.parametrize("how", ["", "ddp", "fsdp2", "tp"])
def test_a_trainer_on_two_ranks(workers, how: str, tmp_path: Path) -> None:
    for result in results_on(workers, trainer_twice, how, tmp_path):
        check_lightning(result)


class Measured(Model):
    """Keeps the norms by which it clips."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **settings: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        honest = inner.clip_grad_norm_
        inner.clip_grad_norm_ = lambda *args, **settings: self.norms.append(float(honest(*args, **settings)))
        MuonModule.configure_gradient_clipping(self, optimizer, *args, **settings)
        del inner.clip_grad_norm_


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path) -> None:
    """Lightning leaves them scaled for an optimizer whose ``_step_supports_amp_scaling`` says that it unscales them."""
    norms = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        module, _ = fit_epochs(
            tmp_path / str(scale),
            module=Measured(),
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
            max_epochs=1,
            gradient_clip_val=1.0,
        )
        norms.append(module.norms)
    assert len(norms[0]) == 3
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


class ByHand(Model):
    """Clips in a loop of its own, a module of muonmesh and one of torch, and keeps the norms afterwards."""

    muon_clip: ClassVar = {"skip_above": 1e6}

    def __init__(self, **clipping: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 4)
        self.clipping = clipping
        self.norms: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        return [from_model(self.trainer, self.model, **SETTINGS), torch.optim.AdamW(self.other.parameters())]

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        muon, other = self.optimizers()
        self.manual_backward(self.model(**batch).loss + self.other(torch.ones(4)).square().sum())
        before = self.norms_of(muon)
        for optimizer in (muon, other):
            self.clip_gradients(optimizer, **self.clipping)
        parts = {**self.norms_of(muon), "other": self.norms_of(other)["adamw"]}
        self.norms = {**parts, "muon before": before["muon"]}
        for optimizer in (muon, other):
            optimizer.step()
            optimizer.zero_grad()

    def norms_of(self, optimizer: Any) -> dict[str, Tensor]:
        norms = {}
        for kind in ("muon", "adamw"):
            groups = [group for group in optimizer.param_groups if group.get("algorithm", "adamw") == kind]
            grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            norms[kind] = nn.utils.get_total_norm(grads)
        return norms


def test_clipping_by_hand_is_that_of_automatic_optimization(tmp_path: Path) -> None:
    """``self.clip_gradients``, which Lightning's manual optimization and hooks call, would clip Muon's gradients."""
    quiet = {"callbacks": [], "gradient_clip_val": None, "max_epochs": 1}
    module, _ = fit_epochs(tmp_path, module=ByHand(gradient_clip_val=1e-3, gradient_clip_algorithm="norm"), **quiet)
    assert module.norms["muon"] == module.norms["muon before"]
    assert float(module.norms["adamw"]) == pytest.approx(1e-3, rel=1e-3)
    assert float(module.norms["other"]) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match=r'found gradient_clip_algorithm="value"'):
        fit_epochs(tmp_path, module=ByHand(gradient_clip_val=1.0, gradient_clip_algorithm="value"), **quiet)

    class Hook(Model):
        """Clips at each step by a value of its own, as Lightning's page on this hook shows."""

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1e-6, gradient_clip_algorithm="norm")

    hooked, _ = fit_epochs(tmp_path / "hooked", module=Hook(), callbacks=[], gradient_clip_val=None)
    whole, _ = fit_epochs(tmp_path / "whole", module=Model(), callbacks=[])  # clipped by 1e-6
    assert different(weights(hooked), weights(whole)) == []
    with pytest.raises(ValueError, match=r"gradient_clip_val: found 1e-06 beside the Trainer's 2.0; .* Remove"):
        fit_epochs(tmp_path / "both", module=Hook(), callbacks=[], gradient_clip_val=2.0)


# ------------------------------------------------------------------ what is said through the wrappers


def test_what_is_said_through_lightnings_wrapper_reaches_the_optimizer(tmp_path: Path) -> None:
    """A step above ``skip_above`` changes nothing, and the running means of norms are kept."""

    class Skipping(Model):
        muon_clip: ClassVar = {"skip_above": 1e-9, "policy": "separate"}

    before = weights(Skipping())
    skipped, _ = fit_epochs(tmp_path, module=Skipping(), callbacks=[], gradient_clip_val=None)
    assert different(before, weights(skipped)) == []

    class Limited(Model):
        muon_clip: ClassVar = {"skip_above": "4x"}

    limited, trainer = fit_epochs(tmp_path, module=Limited(), callbacks=[], gradient_clip_val=1.0)
    assert different(before, weights(limited)) == list(before)
    optimizer = trainer.optimizers[0]
    optimizer.finish()
    assert {group["norm_means"][1] for group in optimizer.param_groups} == {(STEPS, STEPS, STEPS)}

    class Wrong(Model):
        muon_clip: ClassVar = {"max_norm": 1.0}

    with pytest.raises(TypeError, match=r"multiple values for .*max_norm"):
        fit_epochs(tmp_path, module=Wrong(), callbacks=[])
    with pytest.raises(
        ValueError, match=r'Trainer: found gradient_clip_algorithm="value"; .* Write gradient_clip_algorithm="norm"'
    ):
        fit_epochs(tmp_path, module=Model(), callbacks=[], gradient_clip_algorithm="value")


class Unfreezing(BaseFinetuning):
    """Trains the embedding and the second layer from the second epoch on, by Lightning's own function."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.model.model.embed_tokens, module.model.model.layers[1]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            unfrozen = [module.model.model.embed_tokens, module.model.model.layers[1]]
            self.unfreeze_and_add_param_group(unfrozen, optimizer)


def test_modules_that_are_unfrozen_without_an_algorithm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='found no "algorithm" in a group that is added later'):
        fit_epochs(tmp_path, callbacks=[Unfreezing()])


# ------------------------------------------------------------------ Fabric


def fabric_loop(folder: Path, how: str) -> dict[str, Any]:
    """Three steps, saved whole, three more; again from what was saved; and the same gradients in one process."""
    with launched(**LAUNCHED):
        strategy: Any = how or "auto"
        if how in ("fsdp2", "tp"):
            sizes = {"fsdp2": (2, 1), "tp": (1, 2)}[how]
            strategy = FabricModelParallel(
                lambda model, mesh: (
                    cut_llama(model, how, mesh[{"fsdp2": "data_parallel", "tp": "tensor_parallel"}[how]]) or model
                ),
                data_parallel_size=sizes[0],
                tensor_parallel_size=sizes[1],
            )
        fabric = lightning.Fabric(accelerator="cpu", devices=2 if how else 1, strategy=strategy)
        fabric.launch()

        def build() -> tuple[Any, Any]:
            model = fabric.setup_module(llama(), move_to_device=False)
            return model, fabric.setup_optimizers(from_model(fabric, model, **SETTINGS))

        def step(model: Any, optimizer: Any, number: int) -> float:
            tokens = Tokens(8).tokens[4 * (number % 2) :][:4]
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            fabric.backward(loss)
            optimizer.clip_grad_norm_(1e-6)
            inputs.append(Given.to(optimizer))
            optimizer.step()
            return float(loss.detach())

        inputs: list[Given] = []
        model, optimizer = build()
        optimizer.metrics()
        losses = [step(model, optimizer, number) for number in range(3)]
        fabric.save(folder / "fabric", {"model": model, "optimizer": optimizer})
        losses += [step(model, optimizer, number) for number in range(3, 6)]
        figures = optimizer.metrics()
        after = weights(model)
        second, other = build()
        fabric.load(folder / "fabric", {"model": second, "optimizer": other}, weights_only=False)
        first_inputs, inputs = inputs, []
        again = [step(second, other, number) for number in range(3, 6)]
        resumed = different(after, weights(second))
        norms = other.clip_grad_norm_(1.0, skip_above=1e-12)
        other.step()
        return {
            "plain loop": different(after, replayed(llama(), first_inputs, **SETTINGS)),
            "resumed": resumed,
            "losses": (losses[3:], again),
            "skipped": (bool(norms.skipped), different(weights(second), after)),
            "figures": figures,
        }


@pytest.mark.parametrize("how", ["", "ddp", "fsdp2", "tp"])
def test_fabric_on_two_ranks(workers, how: str, tmp_path: Path) -> None:
    for result in results_on(workers, fabric_loop, how, tmp_path):
        assert result["plain loop"] == []
        assert result["resumed"] == []
        assert result["losses"][0] == result["losses"][1]
        assert result["skipped"] == (True, [])
        assert result["figures"]["muon/update_to_weight"] > 0


def test_a_setting_that_nobody_knows_is_refused() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match=r"from_model: found the argument 'momentun'; .* Write momentum="):
        from_model(fabric, llama(), momentun=0.9)
