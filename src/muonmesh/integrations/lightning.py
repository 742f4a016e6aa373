"""Lightning: a LightningModule that trains with Muon, and the optimizer for a Fabric.

One optimizer updates Muon's and AdamW's parameters, so Lightning's automatic optimization works. Calls of clipping and
metrics on the wrappers of Lightning and Fabric reach the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from muonmesh.build import from_model as core_from_model
from muonmesh.comm.storage import world_size
from muonmesh.errors import explain_error
from muonmesh.optimizer import Muon


class MuonModule(LightningModule):  # type: ignore[misc]  # lightning is not checked with us
    """A LightningModule that trains matrices with Muon and all other parameters with AdamW.

    It works with strategies that keep parameters whole or make DTensors of them: one device, DDP, and
    ModelParallelStrategy (FSDP2, tensor parallelism)::

        class Model(MuonModule):
            muon = {"lr": 3e-4}

    To add a schedule, write your own ``configure_optimizers`` that begins with ``super().configure_optimizers()``.

    Attributes:
        muon: Arguments of `muonmesh.from_model`, by name.
        muon_clip: The arguments ``policy`` and ``skip_above`` of `muonmesh.Muon.clip_grad_norm_`. Its ``max_norm`` is
            the Trainer's ``gradient_clip_val``.
    """

    muon: ClassVar[Mapping[str, Any]] = {}
    muon_clip: ClassVar[Mapping[str, Any]] = {}

    def configure_optimizers(self) -> Any:
        """Return the optimizer of this module, with the settings in ``muon``.

        Raises:
            TypeError, ValueError: a setting is unknown or wrong, or the strategy is DeepSpeed's or FSDP1's.
        """
        return from_model(self.trainer, self, **self.muon)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip with `muonmesh.Muon.clip_grad_norm_`, in automatic and manual optimization. Muon's gradients are not
        clipped unless ``muon_clip`` sets another policy. Under a GradScaler (``precision="16-mixed"``), the gradients
        are unscaled first. Other optimizers are clipped as by Lightning.

        Raises:
            ValueError: ``gradient_clip_algorithm``, here or of the Trainer, is "value"; or the Trainer has another
                ``gradient_clip_val``.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps what `self.optimizers()` returns
        if not isinstance(inner, Muon):
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        of_trainer = self.trainer.gradient_clip_val
        if None not in (gradient_clip_val, of_trainer) and gradient_clip_val != of_trainer:
            problem, needed = f"{gradient_clip_val} beside the Trainer's {of_trainer}", "only one of them"
            raise ValueError(explain_error("gradient_clip_val", problem, needed, "Remove the Trainer's"))
        if (gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm") != "norm":  # or an enumeration
            problem, needed = 'gradient_clip_algorithm="value"', "a norm to clip by"
            raise ValueError(explain_error("Trainer", problem, needed, 'Write gradient_clip_algorithm="norm"'))
        max_norm = of_trainer if gradient_clip_val is None else gradient_clip_val
        if max_norm or self.muon_clip:
            # Lightning unscales only for optimizers whose step cannot, which it reads off `_step_supports_amp_scaling`.
            if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is not None:
                scaler.unscale_(inner)
            inner.clip_grad_norm_(max_norm or math.inf, **self.muon_clip)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance a learning-rate schedule, except a schedule by steps after a step that changed nothing."""
        by_step = any(c.scheduler is scheduler and c.interval == "step" for c in self.trainer.lr_scheduler_configs)
        optimizer = getattr(scheduler, "optimizer", None)
        if not (by_step and isinstance(optimizer, Muon) and optimizer.skipped):
            super().lr_scheduler_step(scheduler, metric)


class MuonMetrics(Callback):  # type: ignore[misc]  # lightning is not checked with us
    """Log `muonmesh.Muon.metrics` to the Trainer's loggers, every ``log_every_n_steps`` steps."""

    def __init__(self) -> None:
        self._measured = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the optimizer record its updates from the first step on.

        Raises:
            TypeError: an optimizer of the Trainer is no `muonmesh.Muon`.
        """
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, Muon):
                problem, write = f"an optimizer {type(optimizer).__name__}", "Derive the module from MuonModule"
                raise TypeError(explain_error("MuonMetrics", problem, "muonmesh.Muon", write))
            optimizer.metrics()
        self._measured = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure after a step, while its gradients exist. All ranks call it."""
        step = trainer.global_step  # does not change while gradients are accumulated
        if step != self._measured and step % trainer.log_every_n_steps == 0:
            self._measured = step
            for optimizer in trainer.optimizers:
                pl_module.log_dict({f"muon/{key}": value for key, value in optimizer.metrics().items()})


def from_model(host: Fabric | Trainer, model: nn.Module, lr: float = 3e-4, **settings: Any) -> Muon:
    """Return the optimizer of a model for a Fabric or a Trainer.

    Under ModelParallelStrategy, create every optimizer after ``fabric.setup_module(model)``::

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(from_model(fabric, model, lr=3e-4))

    Args:
        host: The Fabric or Trainer. Its number of processes decides whether all ranks hold copies of the same plain
            matrices (more than one process), or every rank trains its own.
        model: The model, before or after Lightning has set it up.
        lr: Learning rate of Muon's and AdamW's parameters.
        settings: Further arguments of `muonmesh.from_model`, by name.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong, or the strategy is DeepSpeed's or FSDP1's.
    """
    kind = type(host.strategy).__name__
    if kind == "DeepSpeedStrategy":
        problem, needed = kind, "a strategy that keeps parameters whole or makes DTensors of them"
        write = "Write muonmesh.integrations.deepspeed.initialize(model=model, config=...) in a loop of your own"
        raise ValueError(explain_error("the strategy", problem, needed, write))
    group = ("world" if host.world_size > 1 else "local") if world_size() > 1 else None
    return core_from_model(model, lr, **{"process_group": group, **settings})
