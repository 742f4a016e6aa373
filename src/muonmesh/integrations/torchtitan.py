"""torchtitan: an optimizer container and metrics for torchtitan, which overrides put into its configuration.

Your configuration file stays as it is. Add to the command line of torchtitan::

    --override.imports 'muonmesh.integrations.torchtitan.muon={"lr": 8e-4}' muonmesh.integrations.torchtitan.metrics
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override

from muonmesh.build import from_model
from muonmesh.errors import explain_error
from muonmesh.groups import Role, Site
from muonmesh.groups.classifiers import register
from muonmesh.groups.parameter_sites import class_names
from muonmesh.optimizer import Muon

_DTYPES = ("compute_dtype", "state_dtype", "master_dtype")
"""Settings that an override can give only by name, such as "float32"."""


class MuonContainer(OptimizersContainer):  # type: ignore[misc]  # torchtitan is not checked with us
    """An OptimizersContainer of torchtitan with one `muonmesh.Muon` for each pipeline part of the model.

    Schedules, checkpoints and the trainer's clipping work as with torchtitan's own optimizers. State is saved by
    parameter name, so a checkpoint loads when pipeline parallelism splits the model into other parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The Config of torchtitan's container. Its own list of optimizers is ignored.

        Attributes:
            settings: Arguments of `muonmesh.from_model`, by name.
        """

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":  # torchtitan's hook is for its own Adam and AdamW alone
            problem, needed = "implementation='fused_opt_states_bf16'", "another: it has no effect on Muon"
            write = 'Write settings={"state_dtype": "bfloat16"} for momentum in bf16'
            raise ValueError(explain_error("OptimizersContainer.Config", problem, needed, write))
        self.model_parts = model_parts
        self.optimizers = [_optimizer_of(part, config.settings) for part in model_parts]
        parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._validate_params(parameters)
        self._post_init(parameters)


class MuonMetricsProcessor(MetricsProcessor):  # type: ignore[misc]  # torchtitan is not checked with us
    """torchtitan's MetricsProcessor, which also logs `muonmesh.Muon.metrics`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The Config of torchtitan's MetricsProcessor, unchanged."""

    def log(self, step: int, *args: Any, extra_metrics: dict[str, Any] | None = None, **more: Any) -> None:
        """Log as torchtitan does, and add the optimizers' metrics of the last step.

        All ranks call it, since the metrics are sums over shards.
        """
        figures = dict(extra_metrics or {})
        optimizers = list(self.optimizers)
        for number, optimizer in enumerate(optimizers):
            prefix = "muon" if len(optimizers) == 1 else f"muon/{number}"
            figures |= {f"{prefix}/{key}": float(value) for key, value in optimizer.metrics().items()}
        super().log(step, *args, extra_metrics=figures, **more)


@override(target=MetricsProcessor.Config, description="figures of muonmesh.Muon")  # type: ignore[untyped-decorator]
def metrics(config: MetricsProcessor.Config) -> MuonMetricsProcessor.Config:
    """Return the configuration of `MuonMetricsProcessor` that replaces torchtitan's, with the same settings."""
    replacement: MuonMetricsProcessor.Config = derive(config, MuonMetricsProcessor.Config)
    return replacement


@override(target=OptimizersContainer.Config, description="Muon for matrices, AdamW for the rest")  # type: ignore[untyped-decorator]
def muon(config: OptimizersContainer.Config, **settings: Any) -> MuonContainer.Config:
    """Return the configuration of `MuonContainer` that replaces the optimizers of a torchtitan configuration.

    Args:
        config: The replaced configuration. Its parameter patterns and learning rates are ignored.
        settings: Arguments of `muonmesh.from_model`, by name. ``lr`` is required, since the rate in ``config`` is
            ignored. Write a dtype by its name, such as "float32".

    Raises:
        TypeError: ``lr`` is missing.
    """
    if "lr" not in settings:
        write = "Write 'muonmesh.integrations.torchtitan.muon={\"lr\": 8e-4}'"
        raise TypeError(explain_error("muonmesh.integrations.torchtitan.muon", "no lr", "a learning rate", write))
    return MuonContainer.Config(settings=settings, implementation=config.implementation)


def _optimizer_of(part: nn.Module, settings: dict[str, Any]) -> Muon:
    """Return the optimizer of one pipeline part of a model, after torchtitan has applied parallelism."""
    named = {key: settings[key] for key in _DTYPES if settings.get(key, "int8") != "int8"}
    # A wrong name stays a string, so that the optimizer raises an error that names it.
    settings = {**settings, **{key: getattr(torch, str(value), value) for key, value in named.items()}}
    return from_model(part, **settings)


def torchtitan_role(site: Site) -> Role | None:
    """Return the role of a fused parameter of torchtitan's own classes; None means that the general rules decide.

    The classes are read from torchtitan 0.3.0.
    """
    if site.key == "mlp1_weight_EGD" and "GptOssGroupedExperts" in class_names(site.module, "torchtitan"):
        return Role("muon", "matrices", "experts: gate, up row by row", ("stack", ("interleaved", 2, 0)))
    if site.key != "weight":
        return None
    owner: Any
    attribute, owner = site.layer
    if attribute == "wqkv" and "FusedQKVLinear" in class_names(owner, "torchtitan"):
        group = (owner.heads_per_kv * owner.head_dim, owner.head_dim, owner.head_dim)
        return Role("muon", "matrices", "attention: q, k, v by query group", ("interleaved", group, 0))
    if attribute == "wkv_a" and hasattr(owner, "kv_lora_rank"):
        split = ("rows", owner.kv_lora_rank, owner.qk_rope_head_dim)
        return Role("muon", "matrices", "attention: latent, rotary key", split)
    if attribute == "wkv_b" and hasattr(owner, "qk_nope_head_dim"):
        head = (owner.qk_nope_head_dim, owner.v_head_dim)
        return Role("muon", "matrices", "attention: k, v head by head", ("interleaved", head, 0))
    return None


register(torchtitan_role)
