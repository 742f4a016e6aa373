"""get_megatron_optimizer: replaces Megatron's function of this name; install: puts it into Megatron's modules."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from megatron.core import optimizer as megatrons
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muonmesh.clip.limits import ClipPolicy
from muonmesh.clip.squares import scale_kind_of
from muonmesh.comm.gather_objects import gather_objects, settled
from muonmesh.errors import PlanError, explain_error
from muonmesh.groups.parameter_sites import unwrapped
from muonmesh.integrations.megatron.declared import mesh_finder
from muonmesh.integrations.megatron.layouts import SavedBox, layout_of, ranges_of, saved_boxes_of
from muonmesh.integrations.megatron.main_grad import MainGrad, ShardedGrad
from muonmesh.integrations.megatron.optimizer import Holding, MegatronOptimizer
from muonmesh.integrations.megatron.param_groups import find_groups
from muonmesh.integrations.megatron.refusals import is_fsdp, refuse, refuse_formats, refuse_state
from muonmesh.layout import Declared, FlatShards
from muonmesh.optimizer import Muon

_SHARED = ("compute_dtype", "kernels", "state_dtype", "state_device", "memory_budget_mb", "shard_state")
"""Settings of the whole optimizer that ``muon=`` may have."""

_READ = ["dp_cp", "tp", "expt_dp", "expt_tp", "ep", "pp"]
"""The groups of a ProcessGroupCollection that muonmesh reads."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    policy: ClipPolicy = "adamw_only",
    skip_above: float | str = math.inf,
) -> MegatronOptimizer:
    """Return one optimizer for Muon's and AdamW's parameters, experts included. All ranks of the world call it.

    It replaces `megatron.core.optimizer.get_megatron_optimizer`, with DistributedDataParallel alone, with the
    distributed optimizer, and with Megatron-FSDP; ``config.optimizer`` stays "adam". With the same reduced gradients,
    the update is the update of one process for every parallel layout of the model, on a CPU bit for bit.

    Args:
        config: Megatron's OptimizerConfig: learning rate, weight decay, AdamW's betas and ε, clipping (``clip_grad``)
            and precision.
        model_chunks: This pipeline stage's chunks, each in Megatron's DistributedDataParallel or
            FullyShardedDataParallel (Megatron-FSDP).
        config_overrides: Megatron's overrides, applied to Muon's and AdamW's parameters. They decide about the weight
            decay of vectors, except where ``overrides`` do. None: Megatron's standard overrides.
        use_gloo_process_groups: Ignored; accepted for Megatron's callers.
        pg_collection: Megatron's process groups; None: the groups of `parallel_state`.
        dump_param_to_param_group_map: Must be None; call ``optimizer.explain()`` instead.
        muon: Settings of Muon's groups, such as ``{"lr": 6e-4, "momentum": 0.95}``; ``"rule"`` (see `Muon`); and
            settings of the whole optimizer: ``compute_dtype``, ``kernels``, ``state_dtype``, ``state_device``,
            ``memory_budget_mb``, ``shard_state``.
        adamw: Settings of AdamW's groups.
        overrides: Name or regular expression → "muon", "adamw" or settings, as for `split_params`. Layers and experts
            in the names have their numbers in the whole model.
        policy: Which gradients ``config.clip_grad`` clips, see `Muon.clip_grad_norm_`.
        skip_above: A step with a larger norm changes nothing, see `Muon.clip_grad_norm_`; "4x" is 4 times the norm's
            running mean.

    Raises:
        ValueError, TypeError, LayoutError: on each rank that finds an error.
        PlanError: on all other ranks, if any rank finds an error.
    """

    def build() -> tuple[MegatronOptimizer, set[str]]:
        refuse(config, model_chunks, dump_param_to_param_group_map)
        axes = pg_collection or ProcessGroupCollection.use_mpu_process_groups(_READ)
        _check_axes(axes)
        settings = dict(muon or {})
        shared = {key: settings.pop(key) for key in _SHARED if key in settings}
        refuse_state(shared, qk_clip=any(getattr(chunk.config, "qk_clip", False) for chunk in model_chunks))
        refuse_formats(model_chunks, flat=config.use_distributed_optimizer or bool(shared.get("shard_state")))
        ranks = max(group.size() for group in (axes.tp, getattr(axes, "expt_tp", None)) if group is not None)
        fsdp = any(is_fsdp(chunk) for chunk in model_chunks)
        boxes: dict[int, list[SavedBox]] = {}
        for chunk in model_chunks if not fsdp else ():
            boxes |= saved_boxes_of(unwrapped(chunk), ranks)
        groups, used = find_groups(
            config,
            model_chunks,
            0 if getattr(axes, "ep", None) is None else axes.ep.rank(),
            config_overrides=config_overrides,
            overrides=overrides or {},
            rule=settings.pop("rule", "muon"),
            muon=settings,
            adamw=adamw or {},
        )
        ranges = ranges_of(model_chunks) if config.use_distributed_optimizer and not fsdp else None
        holdings, layouts = _holdings_of(groups, axes, boxes, ranges)
        intervals = {h.tensor: (h.parameter, h.low) for h in holdings if h.tensor is not h.parameter}
        optimizer = Muon(
            groups,
            config.lr,
            adamw_betas=(config.adam_beta1, config.adam_beta2),
            adamw_eps=config.adam_eps,
            master_dtype=torch.float32 if config.bf16 or config.fp16 else None,
            layouts=layouts,
            gradients=ShardedGrad() if fsdp else MainGrad(intervals=intervals),
            **shared,
        )
        built = MegatronOptimizer(optimizer, config, list(model_chunks), holdings, axes, policy, skip_above)
        built.limits.check()
        return built, used

    built, used_overrides = settled(build, kind=PlanError)
    halves = {scale_kind_of(group) for group in built.param_groups if group["params"]}
    from_ranks = gather_objects((used_overrides, built.limits, halves))
    unused = sorted(set(overrides or {}).difference(*(used for used, *_ in from_ranks)))
    if unused:
        needed = "a parameter's name, or an expression that re.search finds in one, on some pipeline stage"
        raise ValueError(explain_error(f"overrides[{unused[0]!r}]", "no match on any rank", needed, "Correct it"))
    built.meet([(limits, halves) for _, limits, halves in from_ranks])
    return built


def _check_axes(axes: Any) -> None:
    """Raise ValueError if Megatron's process groups lack one that every model needs."""
    for needed in (("tp",), ("pp",), ("dp_cp", "dp")):
        if all(getattr(axes, name, None) is None for name in needed):
            write = f"Set pg_collection.{needed[0]}, or leave pg_collection out for the groups of parallel_state"
            raise ValueError(explain_error("pg_collection", f"no {needed[0]}", "tp, pp, and dp_cp or dp", write))


def _holdings_of(
    groups: Sequence[dict[str, Any]],
    axes: Any,
    boxes: Mapping[int, list[SavedBox]],
    ranges: Mapping[Any, list[tuple[int, int]]] | None,
) -> tuple[list[Holding], dict[str, Declared]]:
    """Replace the parameters in the groups by the tensors that the optimizer steps, and return their layouts by name.

    Args:
        groups: The param groups; ``"params"`` is changed in place.
        axes: Megatron's process groups.
        boxes: The boxes of each parameter in Megatron's checkpoints, by its ``id``.
        ranges: For each parameter the elements that each data-parallel rank keeps; None without the distributed
            optimizer.

    Returns:
        A `Holding` for each tensor, and the layout of each tensor by name.
    """
    holdings: list[Holding] = []
    layouts: dict[str, Declared] = {}
    dense = getattr(axes, "dp_cp", None) or axes.dp, axes.tp
    mesh_for = mesh_finder(dense, (getattr(axes, "expt_dp", None), getattr(axes, "expt_tp", None)))
    for group in groups:
        for i, (name, parameter) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            if isinstance(parameter, DTensor):  # of Megatron-FSDP, which says where it lies
                holdings.append(Holding(name, name, 0, parameter, parameter, 0, False))
                continue
            mesh = mesh_for(name, parameter)
            assert mesh is not None
            own_boxes, ranges_of_ranks = boxes.get(id(parameter)), None if ranges is None else ranges[parameter]
            layouts[name] = layout_of(name, parameter, own_boxes, mesh, ranges_of_ranks)
            tensor: Tensor = parameter
            low, high = (0, parameter.numel()) if ranges_of_ranks is None else ranges_of_ranks[mesh.get_local_rank(0)]
            if isinstance(layouts[name], FlatShards):
                tensor = parameter.data.view(-1)[low:high]
            group["params"][i] = tensor
            copy = int(getattr(parameter, "shared", False))
            saved = boxes[id(parameter)][0].key if copy else name
            resizes = any(box.resizes for box in own_boxes or ())
            holdings.append(Holding(name, saved, copy, parameter, tensor, low, resizes))
    return holdings, layouts


def install(**settings: Any) -> None:
    """Replace Megatron's `get_megatron_optimizer` by muonmesh's, in every module that has imported it, permanently.

    Write two lines at the top of pretrain_gpt.py. Keep its argument ``--optimizer adam``, with or without
    ``--use-distributed-optimizer``; Megatron's own Muon then raises an error::

        from muonmesh.integrations.megatron import install
        install(muon={"lr": 6e-4})

    Args:
        settings: The arguments of `get_megatron_optimizer` that Megatron's function does not have: ``muon``,
            ``adamw``, ``overrides``, ``policy``, ``skip_above``.

    Raises:
        TypeError: an argument has another name.
    """
    arguments = inspect.signature(get_megatron_optimizer).parameters.values()
    # Megatron's function has the other arguments.
    setting_names = [argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY]
    if unknown := [name for name in settings if name not in setting_names]:
        problem, needed = f"the setting {unknown[0]!r}", f"one of {', '.join(setting_names)}"
        raise TypeError(explain_error("install", problem, needed, "Remove it"))
    original = getattr(megatrons.get_megatron_optimizer, "__wrapped_by_muonmesh__", megatrons.get_megatron_optimizer)
    replacement = functools.wraps(get_megatron_optimizer)(functools.partial(get_megatron_optimizer, **settings))
    replacement.__wrapped_by_muonmesh__ = original  # type: ignore[attr-defined]
    _replace("get_megatron_optimizer", (original, megatrons.get_megatron_optimizer), replacement)
    with suppress(ImportError):
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        # Of Megatron's own Muon, on which the settings would have no effect: its name in the config is refused.
        _replace(
            "get_megatron_muon_optimizer",
            (get_megatron_muon_optimizer,),
            lambda config, *_, **__: refuse(config, (), None),
        )


def _replace(name: str, before: Collection[Any], replacement: Any) -> None:
    """Replace a function of Megatron in every module that has it under its name."""
    for module in list(sys.modules.values()):
        # getattr would start the imports of modules that import on demand.
        if getattr(module, "__dict__", {}).get(name) in before:
            setattr(module, name, replacement)
