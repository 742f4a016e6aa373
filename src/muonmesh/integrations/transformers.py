"""Transformers: the optimizer of a Trainer, its clipping and its logs; also for classes that derive from Trainer, such
as TRL's.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from muonmesh.clip.limits import ClipPolicy, Limits
from muonmesh.comm.wrappers import layers_of, living
from muonmesh.errors import about, explain_error
from muonmesh.integrations.accelerate import optimizer_for
from muonmesh.optimizer import Muon

if TYPE_CHECKING:  # DeepSpeed need not be installed
    from muonmesh.integrations.deepspeed.optimizer import EngineOptimizer

_DEFAULTS = ("adamw_torch", "adamw_torch_fused")
"""The default values of ``TrainingArguments.optim``; the version of torch decides which of them is used."""

_logger = logging.get_logger(__name__)


class MuonFactory:
    """Creates the optimizer of a Trainer; write ``optimizer_cls_and_kwargs=(MuonFactory, {"args": args})``.

    The Trainer creates a MuonFactory and calls it with the model and the keyword arguments of the pair. The
    `TrainingArguments` give the learning rate, weight decay, betas and ε. The optimizer finds at its first step which
    ranks hold copies of the same matrices, so one script works in one process, under DDP, FSDP2 and DeepSpeed.
    """

    def __init__(self, *groups: object, **settings: object) -> None:
        """Take nothing; the model comes with the call.

        Raises:
            TypeError: it is given settings, which belong into the pair; or a Trainer gives groups of parameters, as
                unsloth's does to give embeddings a learning rate.
        """
        if settings and not groups:
            write = "Write optimizer_cls_and_kwargs=(MuonFactory, {...}) with them in the dict"
            raise TypeError(explain_error("MuonFactory", ", ".join(settings), "to be called with the model", write))
        if groups:
            problem, write = "groups of parameters", "Leave out what makes them, such as embedding_learning_rate"
            raise TypeError(explain_error("MuonFactory", problem, "to be called with the model", write))

    def __call__(
        self, model: nn.Module, *, args: TrainingArguments | None = None, **settings: Any
    ) -> Muon | torch.optim.Optimizer:
        """Return the optimizer of a model. The Trainer makes this call.

        Args:
            model: The model that the Trainer wraps or shards.
            args: The `TrainingArguments` of the Trainer. MuonFactory reads ``learning_rate``, ``weight_decay``,
                ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``.
            settings: Arguments of `muonmesh.from_model`, by name; they override ``args``. Under DeepSpeed, the settings
                that `muonmesh.integrations.deepspeed.initialize` takes as ``optimizer=``.

        Raises:
            TypeError, ValueError: a setting is unknown or wrong, ``args`` is missing, or ``args`` sets ``optim`` or
                ``optim_args``, which MuonFactory does not use; or a scheduler in DeepSpeed's config has the learning
                rate of ``args``, and ``settings`` another.
        """
        if args is None:
            write = 'Write optimizer_cls_and_kwargs=(MuonFactory, {"args": args})'
            raise TypeError(explain_error("MuonFactory", "no args", "the TrainingArguments, for their rates", write))
        if args.optim_args:
            problem, needed = f"optim_args={args.optim_args!r}", "settings of muonmesh.from_model, beside args"
            write = 'Write optimizer_cls_and_kwargs=(MuonFactory, {"args": args, "momentum": 0.95})'
            raise ValueError(explain_error("TrainingArguments", problem, needed, write))
        if args.optim not in _DEFAULTS:
            problem, needed = f"optim={OptimizerNames(args.optim).value!r} and MuonFactory", "only one optimizer"
            write = "To train with muonmesh, remove optim=. To train with the other, remove optimizer_cls_and_kwargs="
            raise ValueError(explain_error("TrainingArguments", problem, needed, write))
        if (lr := settings.get("lr", args.learning_rate)) != args.learning_rate in _rates_of_scheduler():
            problem = f"learning_rate={args.learning_rate}, which DeepSpeed's scheduler follows, and "
            problem += f"lr={lr} beside args"
            write = f"Write TrainingArguments(learning_rate={lr})"
            raise ValueError(explain_error("TrainingArguments", problem, "one rate", write))
        defaults = {
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "adamw_betas": (args.adam_beta1, args.adam_beta2),
            "adamw_eps": args.adam_epsilon,
        }
        return optimizer_for(model, {**defaults, **settings}, _scaled_by)


class MuonCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not checked with us
    """Clips the gradients instead of the Trainer, and adds the optimizer's learning rates and metrics to its logs.

    The callback logs the learning rate of each group as ``learning_rate/<group>``; a Trainer alone logs only the rate
    of the first group. Under DeepSpeed the engine steps inside ``backward``, so the callback gives the engine these
    limits when training begins, and the engine clips and skips by the same rules.

    Args:
        clip: The largest norm, by ``policy``. None means no clipping here. If ``clip`` or ``skip_above`` is set, the
            callback sets the Trainer's ``max_grad_norm`` to 0, because the norm of clipped gradients says nothing.
        policy: Which gradients are clipped, see `muonmesh.Muon.clip_grad_norm_`.
        skip_above: A step with a larger norm, or a norm that is not finite, changes nothing on any rank, and the
            learning-rate schedule does not advance. "4x" is 4 times the running mean of the norm.
        metrics: Whether to log `muonmesh.Muon.metrics` at each log of the Trainer. Not possible under DeepSpeed, whose
            engine has freed the gradients by then.

    Raises:
        ValueError: an argument is out of range. When training begins: the Trainer has another optimizer, or ``metrics``
            is True under DeepSpeed.
    """

    def __init__(
        self,
        *,
        clip: float | None = None,
        policy: ClipPolicy = "adamw_only",
        skip_above: float | str = math.inf,
        metrics: bool = False,
    ) -> None:
        self._limits = Limits(math.inf if clip is None else clip, policy, skip_above)
        try:
            self._limits.check()
        except ValueError as error:
            raise ValueError(about("MuonCallback", str(error).replace("max_norm", "clip"))) from None
        self.clips = clip is not None or self._limits.skips_large
        self.metrics = metrics
        self._figures: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Take over the clipping from the Trainer, and move this callback in front of all others, loggers included."""
        inner = _optimizer_in(kwargs["optimizer"])
        if self.clips and args.max_grad_norm:
            _logger.info(f"MuonCallback clips, so max_grad_norm is set from {args.max_grad_norm} to 0")
            args.max_grad_norm = 0.0
        if not isinstance(inner, Muon):
            if self.metrics:
                message = "metrics=True does not work under DeepSpeed, whose engine frees the gradients first. Remove "
                raise ValueError(about("MuonCallback", message + "metrics=True. Learning rates are logged anyway"))
            if self.clips:
                inner.clip_by(self._limits)
        elif self.metrics:
            inner.metrics()  # from here on updates are recorded
        for handler in living(CallbackHandler):
            if self in handler.callbacks:
                handler.callbacks.remove(self)
                handler.callbacks.insert(0, self)

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        """Clip the gradients, which the Trainer has unscaled. DeepSpeed has already clipped and stepped."""
        inner = _optimizer_in(kwargs["optimizer"])
        if self.clips and isinstance(inner, Muon):
            inner.clip_grad_norm_(**asdict(self._limits))

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Mark a skipped step before the Trainer advances the schedule, and measure while the gradients exist."""
        wrapper = kwargs["optimizer"]
        inner = _optimizer_in(wrapper)
        self._figures = {f"learning_rate/{group['name']}": float(group["lr"]) for group in inner.param_groups}
        if isinstance(inner, Muon):
            wrapper._is_overflow = inner.skipped
            if self.metrics and _logs_next(args, state):
                self._figures |= inner.metrics()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add learning rates and metrics to the log of a training step, before the loggers read the log."""
        if logs is not None and "loss" in logs:
            figures = {key: float(value) for key, value in self._figures.items()}  # waits for the GPU
            logs.update(figures)
            state.log_history[-1].update(figures)


def _logs_next(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the Trainer may log the current step; the result is the same on all ranks."""
    step = state.global_step + 1
    if args.logging_strategy != "steps" or (step == 1 and args.logging_first_step):
        return True  # logs at the end of an epoch, whose last step is unknown here
    return bool(step % state.logging_steps == 0 or step >= state.max_steps)


def _optimizer_in(optimizer: Any) -> Muon | EngineOptimizer:
    """Return the optimizer inside the wrappers of Accelerate and DeepSpeed.

    Raises:
        ValueError: it is no optimizer of muonmesh.
    """
    inner: Any = None
    for inner in layers_of(optimizer):
        if isinstance(inner, Muon) or hasattr(inner, "clip_by"):
            inner_optimizer: Muon | EngineOptimizer = inner
            return inner_optimizer
    problem, write = f"a {type(inner).__name__}", 'Write optimizer_cls_and_kwargs=(MuonFactory, {"args": args})'
    raise ValueError(explain_error("MuonCallback", problem, "a Trainer whose optimizer is muonmesh.Muon", write))


def _rates_of_scheduler() -> list[float]:
    """Return the rates in the scheduler of DeepSpeed's config; the Trainer demands there its own, or "auto" for it."""
    if AcceleratorState._shared_state.get("distributed_type") != DistributedType.DEEPSPEED:
        return []
    scheduler = AcceleratorState().deepspeed_plugin.deepspeed_config.get("scheduler") or {}
    params = scheduler.get("params") or {}
    return [value for key, value in params.items() if key.endswith("_lr")]


def _scaled_by(optimizer: Muon) -> list[AcceleratedOptimizer]:
    """Return Accelerate's wrapper of the optimizer, if the wrapper's GradScaler is stepping the optimizer now.

    During such a step the wrapper replaces ``optimizer.step`` by a function of its own, which refers to the wrapper.
    """
    step = vars(optimizer).get("step")
    names = inspect.getclosurevars(step).nonlocals if inspect.isfunction(step) else {}
    return [value for value in names.values() if isinstance(value, AcceleratedOptimizer)]
