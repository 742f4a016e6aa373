"""initialize: makes a DeepSpeed engine that trains with Muon, at any ZeRO stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import has_moe_layers, is_moe_param
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from muonmesh.checkpoint.load_plan import IDENTITY
from muonmesh.clip.limits import Limits
from muonmesh.comm.process_groups import host_group
from muonmesh.errors import LayoutError, explain_error
from muonmesh.groups import split_params
from muonmesh.groups.parameter_sites import global_shape
from muonmesh.integrations.deepspeed.checkpoint import checked_load, checked_save, expert_names
from muonmesh.integrations.deepspeed.clipping import limits_of
from muonmesh.integrations.deepspeed.config import prepare_config, read_config, take_scheduler
from muonmesh.integrations.deepspeed.mending import mend, report_fp32_writes
from muonmesh.integrations.deepspeed.optimizer import EngineOptimizer
from muonmesh.integrations.deepspeed.records import EngineParameter, Flat, engine_parameter, prove, read_flats
from muonmesh.layout import FlatParameter
from muonmesh.names import canonical_name
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.optimizer import Muon
from muonmesh.settings import OPTIMIZER_SETTINGS

_SPLIT = frozenset(inspect.signature(split_params).parameters) - {"model"}
_ENGINES = {"process_group", "layouts", "shard_state", "master_dtype", "state_dtype", "state_device", "gradients"}
_ENGINES |= {"stochastic_rounding"}  # the engine has fp32 master weights
_SHARED = OPTIMIZER_SETTINGS.keys() - _ENGINES


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str,
    optimizer: Mapping[str, Any] | None = None,
    clip: float | Mapping[str, Any] | None = None,
    **deepspeed_kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` with an optimizer of muonmesh, and return its results: engine, optimizer, and so on.

    In each step, one rank (the owner of a matrix) orthogonalizes the whole matrix, wherever ZeRO has put its elements.
    The update is the update of one process with the same reduced gradients. The optimizer is
    ``engine.basic_optimizer``; its ``explain()`` shows where each parameter is and which rank owns each matrix.

    Args:
        model: The model, also one made under `deepspeed.zero.Init`.
        config: DeepSpeed's config, a dict or the path of a JSON file. It is copied; settings that Muon needs are added
            to the copy and logged. It may have a "scheduler": the rates in it are for groups whose rate is ``lr``, and
            groups with another rate keep their ratio to ``lr``.
        optimizer: Settings of `muonmesh.Muon` (``lr``, ``momentum``, …) and of `muonmesh.split_params` (``muon``,
            ``adamw``, ``overrides``), by name; and ``rule``, as for `muonmesh.from_model`.
        clip: The largest norm of AdamW's gradients over all ranks; or ``max_norm``, ``policy`` and ``skip_above`` of
            `Muon.clip_grad_norm_`, by name. None: no clipping. ``engine.basic_optimizer.norms`` has the norms of the
            last step.
        deepspeed_kwargs: Further arguments of `deepspeed.initialize`, such as ``training_data``.

    Returns:
        The four results of `deepspeed.initialize`: engine, optimizer, data loader and scheduler.

    Raises:
        TypeError, ValueError: a setting is unknown, or the config has a setting that gives a wrong update; the message
            says what to write.
        LayoutError: the records of the installed DeepSpeed do not describe its flat tensors.
    """
    assembly = Assembly(model, optimizer or {})
    if "model_parameters" in deepspeed_kwargs:
        write = "Remove it. To leave a parameter out, call requires_grad_(False). To choose AdamW for it, use "
        write += '"overrides"'
        raise ValueError(explain_error("model_parameters", "a list", "none, because the model is split by role", write))
    return assembly.initialize(deepspeed.initialize, assembly.make_optimizer, config, clip, deepspeed_kwargs)


def hosted(model: nn.Module, optimizer: Mapping[str, Any]) -> EngineOptimizer:
    """Return an optimizer for a framework that gives it to `deepspeed.initialize` together with its model.

    `hosted` replaces `deepspeed.initialize` for the rest of the process. The new function treats this optimizer as
    `muonmesh.integrations.deepspeed.initialize` does, and any other optimizer as DeepSpeed does. You may make
    schedulers for the returned optimizer at once, since the engine keeps its param groups.

    Args:
        model: The model that the framework will give to DeepSpeed.
        optimizer: The settings that `muonmesh.integrations.deepspeed.initialize` takes as ``optimizer=``.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
    """
    assembly = Assembly(model, optimizer)
    engine_optimizer = assembly.make_optimizer()
    engine_optimizer.awaits = assembly
    if not hasattr(deepspeed.initialize, "_knows_muonmesh"):
        deepspeed.initialize = _knowing(deepspeed.initialize)
    return engine_optimizer


def _knowing(original: Callable[..., tuple[Any, Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any, Any]]:
    @wraps(original)
    def initialize(*positional: Any, **named: Any) -> tuple[Any, Any, Any, Any]:
        optimizer: Any = named.get("optimizer")
        assembly: Assembly | None = getattr(optimizer, "awaits", None)
        if assembly is None:
            return original(*positional, **named)
        optimizer.awaits = None
        config = named.pop("config", None) or named.pop("config_params", None)
        # The assembly has the model, and the optimizer's groups already have the parameters.
        others = {key: value for key, value in named.items() if key not in ("model", "optimizer", "model_parameters")}
        return assembly.initialize(original, optimizer, config, None, others)

    initialize._knows_muonmesh = True  # type: ignore[attr-defined]
    return initialize


def _shapes(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    # fp32 for fp16 parameters: the engine keeps fp32 master weights, and gives these to the optimizer.
    dtypes = [torch.float32 if p.dtype == torch.float16 else p.dtype for p in parameters]
    return [torch.empty(global_shape(p), dtype=d, device="meta") for p, d in zip(parameters, dtypes, strict=True)]


class Assembly:
    """Makes a DeepSpeed engine with its optimizer, from settings that are checked before the engine exists.

    DeepSpeed replaces modules and parameters while it makes an engine. So `make_optimizer` runs inside of
    `deepspeed.initialize`, when the modules are as they will be trained, and `bind` runs on the finished engine.

    Args:
        model: The model to train.
        optimizer: The settings that `muonmesh.integrations.deepspeed.initialize` takes as ``optimizer=``.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
    """

    def __init__(self, model: nn.Module, optimizer: Mapping[str, Any]) -> None:
        settings = dict(optimizer)
        for key in settings:
            if key in _ENGINES:
                needed = "none: the engine decides where parameters, gradients, masters and momentum live"
                raise ValueError(explain_error("optimizer", f"{key}=", needed, f"Remove {key}"))
        if isinstance(model, deepspeed.PipelineModule):
            problem, needed = "a PipelineModule", "a plain module: a pipeline's tied parameters would be stepped apart"
            raise ValueError(explain_error("model", problem, needed, "Use ZeRO, tensor or expert parallelism instead"))
        rule = settings.pop("rule", "muon")
        groups = split_params(model, **{key: settings.pop(key) for key in _SPLIT & settings.keys()})
        for group in groups:
            group["algorithm"] = rule if group["algorithm"] == "muon" else group["algorithm"]
        watched_keys = ("param_names", "algorithm", "matrices", "reasons")
        self._watched = groups.watch, [{key: group[key] for key in watched_keys if key in group} for group in groups]
        # Parameters may be shards already, or become shards later. Settings are checked for their global shapes.
        self._template = Muon([{**group, "params": _shapes(group["params"])} for group in groups], **settings)
        self._shared = {key: settings[key] for key in _SHARED if key in settings}
        rates = {float(group["lr"]) for group in self._template.param_groups}
        if "lr" in settings:
            rates = {float(self._template.defaults["lr"])}
        self._scheduled_rate = rates.pop() if len(rates) == 1 else None
        self._model = model
        self._parameters: dict[int, EngineParameter] = {}
        self._reasons: dict[str, str] = {}
        self._labels: list[str] = []

    def initialize(
        self,
        original: Callable[..., tuple[Any, Any, Any, Any]],
        optimizer: EngineOptimizer | Callable[[Any], EngineOptimizer],
        config: Any,
        clip: float | Mapping[str, Any] | None,
        others: Mapping[str, Any],
    ) -> tuple[Any, Any, Any, Any]:
        """Make the engine with `deepspeed.initialize`, and return the results of `deepspeed.initialize`.

        Args:
            original: DeepSpeed's own function `deepspeed.initialize`, which `hosted` may have replaced.
            optimizer: The method `make_optimizer`, which DeepSpeed then calls, or an optimizer that it has made.
            config: DeepSpeed's config, a dict or the path of a JSON file.
            clip: The largest norm of AdamW's gradients over all ranks, or arguments of `Muon.clip_grad_norm_` by name.
                None: no clipping.
            others: Further arguments of `deepspeed.initialize`, by name.
        """
        prepared = prepare_config(read_config(config), has_experts=bool(has_moe_layers(self._model)[0]))
        limits, arguments = limits_of(clip, prepared), dict(others)
        if arguments.get("lr_scheduler") is None:
            arguments["lr_scheduler"] = take_scheduler(prepared, self._scheduled_rate)
        elif prepared.get("scheduler"):
            problem = "a scheduler, and lr_scheduler= beside it"
            raise ValueError(explain_error("config", problem, "only one of them", "Remove either"))
        engine, *rest = original(model=self._model, config=prepared, optimizer=optimizer, **arguments)
        self.bind(engine, limits)
        return (engine, *rest)

    def make_optimizer(self, _: Any = None) -> EngineOptimizer:
        """Return the optimizer of the model's current parameters. DeepSpeed calls this method while it makes an engine.

        Raises:
            LayoutError: DeepSpeed has changed a parameter's name or shape, or cut a parameter in an unknown way.
        """
        named = self._model.named_parameters(remove_duplicate=False)
        parameters: dict[str, Any] = {canonical_name(name): parameter for name, parameter in named}
        groups: list[dict[str, Any]] = []
        parsed = getattr(self._model, "ds_autotp_parsed", False)
        tensor_parallel = deepspeed_groups.get_tensor_model_parallel_world_size() if parsed else 1
        renamed = expert_names(self._model)
        for group in self._template.param_groups:
            names = group["param_names"]
            missing = [name for name in names if name not in parameters]
            if missing:
                problem = "a module without it after DeepSpeed replaced modules"
                write = "Exclude its module from what replaces modules, such as AutoTP"
                raise LayoutError(explain_error(missing[0], problem, "all names of the model", write))
            specs = group.get("matrices") or [None] * len(names)
            by_experts: dict[str | None, dict[str, Any]] = {}
            for name, meta, spec, reason in zip(names, group["params"], specs, group["reasons"], strict=True):
                parameter = parameters[name]
                experts = parameter.group_name if is_moe_param(parameter) else None
                if experts not in by_experts:
                    by_experts[experts] = self._group(group, experts)
                shape = tuple(meta.shape)
                called = renamed.get(name, name)
                description = engine_parameter(parameter, called, shape, spec, tensor_parallel=tensor_parallel)
                self._parameters[id(parameter)], self._reasons[description.name] = description, reason
                for key, value in (("params", parameter), ("parameters", description.name), ("matrices", spec)):
                    by_experts[experts][key].append(value)
            groups += by_experts.values()
            name = group["name"]
            self._labels += [name if experts is None else f"{name} {experts}" for experts in by_experts]
        optimizer = EngineOptimizer(groups, self._template.defaults)
        if tensor_parallel == 1:  # a forward cuts shards, whose sizes are no weight's
            optimizer.watched = self._watched
        return optimizer

    def _group(self, group: Mapping[str, Any], experts: str | None) -> dict[str, Any]:
        """Return a group without parameters. DeepSpeed requires the name of the experts' ranks as a group's name."""
        settings = {key: value for key, value in group.items() if key not in IDENTITY}
        identity: dict[str, Any] = {"name": group["name"]} if experts is None else {"name": experts, "moe": True}
        return {"params": [], "parameters": [], "matrices": [], "algorithm": group["algorithm"], **identity, **settings}

    def bind(self, engine: Any, limits: Limits | None) -> None:
        """Read from the engine where each parameter lies, and give the optimizer those that take its step.

        Args:
            engine: The finished DeepSpeed engine.
            limits: The limits for clipping; None means no clipping.

        Raises:
            LayoutError: DeepSpeed's records do not describe its flat tensors.
        """
        optimizer: EngineOptimizer = engine.basic_optimizer
        groups = optimizer.param_groups
        engine.load_checkpoint, engine.save_checkpoint = checked_load(engine), checked_save(engine)
        if not engine.zero_optimization():
            optimizer.bind(list(self._replicated(engine, groups)), self._reasons, limits, engine)
            return
        proved = prove(lambda: read_flats(engine), self._parameters)
        muons = [self._flat(number, *flat_with_contents, groups) for number, flat_with_contents in enumerate(proved)]
        optimizer.bind(muons, self._reasons, limits, engine)
        mend(engine.optimizer)
        places = {parameter: (flat.tensor, interval) for flat, _ in proved for parameter, interval in flat.spans}
        report_fp32_writes(
            engine.optimizer, tuple(places), lambda parameter: optimizer.fp32_written(*places[parameter])
        )

    def _replicated(self, engine: Any, groups: Sequence[Mapping[str, Any]]) -> Iterator[Muon]:
        """Yield the optimizers at stage 0, where every rank of a data-parallel group holds whole parameters.

        Each set of ranks that shares experts has one of its own. Tensor-parallel shards are declared as layouts.
        """
        parameters = {description.name: description for description in self._parameters.values()}
        sets: dict[str | None, list[dict[str, Any]]] = {}
        for label, group in zip(self._labels, groups, strict=True):
            inner = {**_settings(group), "name": label, "param_names": group["parameters"], "params": group["params"]}
            inner |= {"matrices": group["matrices"]} if is_matrix_rule(group["algorithm"]) else {}
            sets.setdefault(group["name"] if group.get("moe") else None, []).append(inner)
        for experts, groups_of_set in sets.items():
            dense = engine.seq_data_parallel_group
            process_group = dense if experts is None else engine.expert_data_parallel_group[experts]
            names = [name for group in groups_of_set for name in group["param_names"]]
            ranks = tuple(dist.get_process_group_ranks(process_group))
            cut = [parameters[name] for name in names if not isinstance(parameters[name].placement, Replicate)]
            layouts = {description.name: description.within(ranks) for description in cut}
            if any(parameters[name].tensor_parallel > 1 for name in names):
                process_group = dist.group.WORLD  # parameters that are not cut are the same on all ranks
            yield Muon(groups_of_set, process_group=process_group, layouts=layouts, **self._shared)

    def _flat(
        self, number: int, flat: Flat, contents: Sequence[FlatParameter], groups: Sequence[Mapping[str, Any]]
    ) -> Muon:
        """Return the optimizer of one flat tensor, which holds Muon's parameters or AdamW's."""
        group, label = groups[flat.group], self._labels[flat.group]
        title = f"{label} ({len(contents)} parameters, flat tensor {number})"
        inner = [{**_settings(group), "params": [flat.tensor], "param_names": [title]}]
        shared = {**self._shared, "state_dtype": flat.tensor.dtype}  # as DeepSpeed keeps it: bf16 with bf16 masters
        offloaded = flat.tensor.device.type == "cpu"
        process_group = host_group(flat.process_group) if offloaded else flat.process_group
        return Muon(inner, layouts={title: contents}, process_group=process_group, **shared)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "parameters", "matrices", "moe")}
