"""Lightning: a module whose Trainer trains it with Muon, and the optimizer of a Fabric.

One optimizer holds both halves, so that Lightning's automatic optimization takes it. What is said through the wrappers
that Lightning and Fabric put around it (clipping, metrics) reaches the optimizer itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from muonmesh.build import from_model as core_from_model
from muonmesh.comm.storage import world_size
from muonmesh.errors import explain_error
from muonmesh.groups import split_params
from muonmesh.groups.split import restricted
from muonmesh.optimizer import Muon


class MuonModule(LightningModule):  # type: ignore[misc]  # lightning is not checked with us
    """A LightningModule that is trained with Muon on matrices and AdamW on the rest.

    It works under the strategies that keep parameters whole or make DTensors of them: one device, DDP, and
    ModelParallelStrategy (FSDP2, tensor parallelism)::

        class Model(MuonModule):
            muon = {"lr": 3e-4}

    A schedule is added by a ``configure_optimizers`` of one's own that begins with ``super().configure_optimizers()``.

    Attributes:
        muon: Arguments of `muonmesh.from_model`, by name.
        muon_clip: Arguments of `muonmesh.Muon.clip_grad_norm_` but ``max_norm``, which is the Trainer's
            ``gradient_clip_val``: ``policy`` and ``skip_above``.
    """

    muon: ClassVar[Mapping[str, Any]] = {}
    muon_clip: ClassVar[Mapping[str, Any]] = {}

    def configure_optimizers(self) -> Any:
        """Return the optimizer.

        Raises:
            TypeError, ValueError: a setting is unknown or wrong, or the strategy holds parameters in another way.
        """
        return from_model(self.trainer, self, **self.muon)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the optimizer, which leaves Muon's gradients alone unless ``muon_clip`` has another policy.

        Raises:
            ValueError: the Trainer asks to clip each element, or ``muon_clip`` has an argument that nobody would read.
        """
        if unknown := sorted(set(self.muon_clip) - {"policy", "skip_above"}):
            write = "Write the norm as Trainer(gradient_clip_val=...)"
            raise ValueError(explain_error("muon_clip", f"{unknown}", "policy and skip_above alone", write))
        if gradient_clip_algorithm not in (None, "norm"):  # an enumeration of strings
            found, needed = 'gradient_clip_algorithm="value"', "a norm to clip by"
            raise ValueError(explain_error("Trainer", found, needed, 'Write gradient_clip_algorithm="norm"'))
        if gradient_clip_val or self.muon_clip:
            optimizer.clip_grad_norm_(gradient_clip_val or math.inf, **self.muon_clip)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Move a schedule, but leave one of steps where it is after a step that changed nothing."""
        by_step = any(c.scheduler is scheduler and c.interval == "step" for c in self.trainer.lr_scheduler_configs)
        optimizer = getattr(scheduler, "optimizer", None)
        if not (by_step and isinstance(optimizer, Muon) and optimizer.skipped):
            super().lr_scheduler_step(scheduler, metric)

    def unfreeze(self, modules: nn.Module | Iterable[nn.Module], optimizer: Any, lr: float | None = None) -> None:
        """Train modules that were frozen, each parameter by the half it belongs to.

        For the ``finetune_function`` of a ``BaseFinetuning`` callback, whose own ``unfreeze_and_add_param_group`` knows
        nothing of halves, so that the optimizer refuses its groups.

        Args:
            modules: In this module.
            optimizer: Its optimizer; gets new groups, named after those that the parameters would have been in.
            lr: Learning rate of the new groups; None: that of each half as the optimizer has it.
        """
        some = [modules] if isinstance(modules, nn.Module) else list(modules)
        fresh = {parameter for module in some for parameter in module.parameters()}
        fresh -= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in fresh:
            parameter.requires_grad_(True)
        rates = {group["algorithm"]: group["lr"] for group in reversed(optimizer.param_groups)}
        taken = {group["name"] for group in optimizer.param_groups}
        groups = split_params(self)
        named = ((name, p) for group in groups for name, p in zip(group["param_names"], group["params"], strict=True))
        held = {name: (name, parameter) for name, parameter in named if parameter in fresh}
        for group in groups:
            if held.keys().isdisjoint(group["param_names"]):
                continue
            name, number = group["name"], 1
            while name in taken:
                number += 1
                name = f"{group['name']}-{number}"
            rate = rates.get(group["algorithm"], optimizer.defaults["lr"]) if lr is None else lr
            optimizer.add_param_group({**restricted(group, held), "name": name, "lr": rate})


class MuonMetrics(Callback):  # type: ignore[misc]  # lightning is not checked with us
    """Log `muonmesh.Muon.metrics` with what the Trainer logs, every ``log_every_n_steps`` steps."""

    def __init__(self) -> None:
        self._measured = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the optimizer record its updates from the first step on.

        Raises:
            TypeError: the Trainer has another optimizer.
        """
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, Muon):
                found, write = f"an optimizer {type(optimizer).__name__}", "Derive the module from MuonModule"
                raise TypeError(explain_error("MuonMetrics", found, "muonmesh.Muon", write))
            optimizer.metrics()
        self._measured = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure after a step, while its gradients are there; all ranks do."""
        step = trainer.global_step  # stays where it is while gradients are accumulated
        if step != self._measured and step % trainer.log_every_n_steps == 0:
            self._measured = step
            for optimizer in trainer.optimizers:
                pl_module.log_dict({f"muon/{key}": value for key, value in optimizer.metrics().items()})


def from_model(host: Fabric | Trainer, model: nn.Module, lr: float = 3e-4, **settings: Any) -> Muon:
    """Return the optimizer of a model for a Fabric, or for a Trainer.

    Under ModelParallelStrategy make it after ``fabric.setup_module(model)``, as every optimizer there::

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(from_model(fabric, model, lr=3e-4))

    Args:
        host: Says by its strategy who holds plain matrices.
        model: Set up by Lightning already or not.
        lr: Learning rate of both halves.
        settings: Further arguments of `muonmesh.from_model`, by name.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong, or the strategy holds parameters in another way.
    """
    kind = type(host.strategy).__name__
    if kind == "DeepSpeedStrategy":
        found, needed = kind, "a strategy that keeps parameters whole or makes DTensors of them"
        write = "Write muonmesh.integrations.deepspeed.initialize(model=model, config=...) in a loop of your own"
        raise ValueError(explain_error("the strategy", found, needed, write))
    group = ("world" if host.world_size > 1 else "local") if world_size() > 1 else None
    return core_from_model(model, lr, **{"process_group": group, **settings})
