"""Lightning: a module whose Trainer trains it with Muon, and the optimizer of a Fabric.

One optimizer updates Muon's and AdamW's parameters, so Lightning's automatic optimization works. Clipping and metrics
work through the wrappers of Lightning and Fabric too.
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
    """A LightningModule whose matrices are trained with Muon and whose other parameters are trained with AdamW.

    Supported strategies: one device, DDP, and ModelParallelStrategy (FSDP2, tensor parallelism)::

        class Model(MuonModule):
            muon = {"lr": 3e-4}

    To add a schedule, override ``configure_optimizers`` and call ``super().configure_optimizers()`` in it.

    Attributes:
        muon: Arguments of `muonmesh.from_model`, by name.
        muon_clip: The arguments ``policy`` and ``skip_above`` of `muonmesh.Muon.clip_grad_norm_`. Its ``max_norm`` is
            the Trainer's ``gradient_clip_val``.
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
        """Clip with `muonmesh.Muon.clip_grad_norm_`: only AdamW's gradients, unless ``muon_clip`` sets another policy.

        Raises:
            ValueError: the Trainer clips by value, or ``muon_clip`` has an unknown argument.
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
        """Move a schedule, except a schedule by steps after a skipped step."""
        by_step = any(c.scheduler is scheduler and c.interval == "step" for c in self.trainer.lr_scheduler_configs)
        optimizer = getattr(scheduler, "optimizer", None)
        if not (by_step and isinstance(optimizer, Muon) and optimizer.skipped):
            super().lr_scheduler_step(scheduler, metric)

    def unfreeze(self, modules: nn.Module | Iterable[nn.Module], optimizer: Any, lr: float | None = None) -> None:
        """Train frozen modules: their matrices with Muon, their other parameters with AdamW.

        Call this function in the ``finetune_function`` of a ``BaseFinetuning`` callback. The optimizer refuses the
        groups of that callback's own ``unfreeze_and_add_param_group``, because they name no algorithm.

        Args:
            modules: Modules in this module.
            optimizer: The optimizer of this module. It gets new groups, named after the groups that `split_params`
                would put the parameters in.
            lr: Learning rate of the new groups; None means the current rate of Muon and of AdamW.
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
    """A callback that logs `muonmesh.Muon.metrics` every ``log_every_n_steps`` steps of the Trainer."""

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
        """Measure after a step, while its gradients exist; all ranks call this method."""
        step = trainer.global_step  # stays where it is while gradients are accumulated
        if step != self._measured and step % trainer.log_every_n_steps == 0:
            self._measured = step
            for optimizer in trainer.optimizers:
                pl_module.log_dict({f"muon/{key}": value for key, value in optimizer.metrics().items()})


def from_model(host: Fabric | Trainer, model: nn.Module, lr: float = 3e-4, **settings: Any) -> Muon:
    """Return the optimizer of a model for a Fabric or a Trainer.

    With ModelParallelStrategy, call this function after ``fabric.setup_module(model)``::

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(from_model(fabric, model, lr=3e-4))

    Args:
        host: The Fabric or Trainer. Its strategy determines which ranks hold plain matrices.
        model: The model, before or after Lightning has set it up.
        lr: Learning rate of Muon and AdamW.
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
