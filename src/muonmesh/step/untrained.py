"""Warnings that a step gives once, by name: parameters that are idle, lost to rounding, or unsuited for their rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import LayoutError, about, warn
from muonmesh.groups.parameter_sites import parameter_sites, tensor_attributes
from muonmesh.names import patterns
from muonmesh.numerics.rules import Rule, rule_of
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import Precision

Tell = Callable[[Tensor, Callable[[Tensor], None]], None]
"""The type of `Runtime.tell`, which gives a warning without waiting for the device."""

PATIENCE = 100
"""Number of steps without a gradient before a warning names the parameter; also the steps between model searches."""


@dataclass
class IdleParameters:
    """Counts for how many steps each parameter has had no gradient.

    Attributes:
        model: The model whose parameters are in the groups; None if it is unknown.
        trained: The names of the parameters that the groups were made with.
        frozen: The names of parameters that were frozen when the groups were made.
        steps: How many steps have been taken.
        counts: For each parameter without a gradient, for how many steps it has had none.
    """

    model: ReferenceType[nn.Module] | None = None
    trained: Collection[str] = ()
    frozen: Collection[str] = ()
    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _looked_at: set[str] = field(default_factory=set)
    _newly_missing: bool = False

    def error(self, missing: Mapping[str, Tensor], *, any_gradient: bool) -> LayoutError | None:
        """Return the error for parameters that will certainly never have a gradient; None if there are none.

        Such parameters were replaced in the model by others, or a framework froze all of them before the first step.
        The model is searched when a parameter has no gradient for the first time, and again after `PATIENCE` steps.

        Args:
            missing: The parameters without a gradient, by name.
            any_gradient: Whether other parameters have a gradient.
        """
        if self.steps == 0 and not any_gradient and missing and all(map(_is_frozen, missing.values())):
            text = "All parameters of this optimizer are frozen. Make the optimizer after the model has its adapters: "
            text += "muonmesh.from_model(get_peft_model(model, config)), or for a Trainer optimizer_cls_and_kwargs="
            text += '(muonmesh.integrations.transformers.MuonFactory, {"args": args})'
            return LayoutError(about(listed([*missing]), text))
        fresh = missing.keys() - self._looked_at
        model = None if self.model is None or not fresh else self.model()
        self._newly_missing = model is not None
        if model is None:
            return None
        self._looked_at |= fresh
        others = {site.name: site.parameter for site in parameter_sites(model) if site.name in fresh}
        unregistered = {name for name in fresh - others.keys() if isinstance(missing[name], DTensor)}
        if unregistered and (replaced := sorted(unregistered & tensor_attributes(model).keys())):
            text = "The optimizer's parameter has no gradient, and in its place the model holds a tensor that is no "
            text += "parameter, as DistributedDataParallel leaves it over tensor parallelism. Wrap the model with "
            text += "DistributedDataParallel(model, device_mesh=mesh[...]) before you make the optimizer"
            return LayoutError(about(listed(replaced), text))
        others = {name: other for name, other in others.items() if other is not missing[name]}
        self._looked_at -= others.keys()
        names = [name for name, other in others.items() if other.grad is not None]
        if not names:
            return None
        text = "The optimizer's parameter has no gradient, and the model now holds another parameter of this name, "
        text += "which has one. Make the optimizer after fully_shard, parallelize_module, to_empty or "
        text += "load_state_dict(..., assign=True), which replace parameters"
        return LayoutError(about(listed(names), text))

    def count(self, missing: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], *, any_gradient: bool) -> None:
        """Note what is missing in a step, and warn of parameters without a gradient for `PATIENCE` steps.

        Args:
            missing: The parameters without a gradient, by name.
            groups: The param groups of the optimizer.
            any_gradient: Whether other parameters had a gradient.
        """
        self.counts = {name: self.counts.get(name, 0) + 1 for name in missing}
        idle = [name for name, steps in self.counts.items() if steps == PATIENCE and name not in self._warned]
        if idle:
            self._warned.update(idle)
            others = "others had one" if any_gradient else "nothing else had one either"
            text = f"{listed(idle)} had no gradient in the last {PATIENCE} steps, in which {others}, and did not learn"
            text += ". Find out who froze or skipped this, or leave it out of the groups"
            if not any_gradient:
                text += "; make the optimizer after what replaces parameters (FSDP1, deepcopy, PEFT)"
            warn(text)
        if self.steps % PATIENCE == 1:
            self._looked_at.clear()
        if self.steps % PATIENCE == 1 or (missing and self._newly_missing):
            self._look_for_others(groups)

    def _look_for_others(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn of parameters that the model trains now and this optimizer does not hold.

        Those that were neither trained nor frozen when the groups were made count if they have a gradient.
        """
        model = None if self.model is None else self.model()
        held = {id(parameter) for group in groups for parameter in group["params"]}
        trainable = [] if model is None else [site for site in parameter_sites(model) if site.parameter.requires_grad]
        others = {site.name: site.parameter for site in trainable if id(site.parameter) not in held}
        known = {*self.trained, *self.frozen, *self._warned}
        unfrozen = [name for name in others if name in self.frozen and name not in self._warned]
        added = [name for name, parameter in others.items() if name not in known and parameter.grad is not None]
        self._warned.update(unfrozen, added)
        for names, cause in (
            (unfrozen, "frozen when the optimizer was made and unfrozen since"),
            (added, "added to the model since the optimizer was made"),
        ):
            if names:
                text = (
                    f"{listed(names)} {'was' if len(names) == 1 else 'were'} {cause}, but this optimizer trains only "
                )
                text += 'what it was given. Write optimizer.add_param_group({"params": [...], "param_names": [...], '
                warn(text + '"algorithm": "muon" or "adamw"})')


def _is_frozen(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen parameter. A framework's other tensors, such as master weights, do not count."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def listed(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def warn_of_rounding(planned: StepPlan, groups: Sequence[Mapping[str, Any]], precision: Precision, tell: Tell) -> None:
    """Warn if rounding loses steps of low-precision parameters, unless they have master weights.

    That is a part of the entries of Muon's first such parameter, or all entries of parameters of AdamW: norms near 1.
    Of what several ranks hold whole, the first of them warns.
    """
    if precision.master is not None:
        return
    _warn_of_still(planned, groups, tell)
    for member, parameter in zip(planned.muon, planned.plan.parameters, strict=True):
        if member is None or groups[member.group]["stochastic_rounding"] is not None or _is_told_elsewhere(member):
            continue
        local = local_of(member.tensor).detach()
        if local.dtype not in (torch.bfloat16, torch.float16) or not local.numel():
            continue
        size = rule_of(groups[member.group]).step_size(parameter.matrices[0].rows, parameter.matrices[0].cols)
        if math.isnan(size.rms):
            continue
        warning = (
            f"{member.name} and perhaps others are {local.dtype} without masters: a typical step of RMS "
            f"{size.rms:.1e} leaves {{:.0%}} of its entries unchanged by rounding. Write "
            "Muon(..., master_dtype=torch.float32) to keep fp32 copies in the optimizer state"
        )

        def say(unchanged: Tensor, warning: str = warning) -> None:
            if float(unchanged) >= 0.01:
                warn(warning.format(float(unchanged)))

        tell(((local.float() + size.rms).to(local.dtype) == local).float().mean(), say)
        return


def _warn_of_still(planned: StepPlan, groups: Sequence[Mapping[str, Any]], tell: Tell) -> None:
    """Warn of AdamW's low-precision parameters in which a step as large as the learning rate moves no entry."""
    names, rates, still = list[str](), set[float](), list[Tensor]()
    for member in (member for members in planned.adamw for member in members):
        group, local = groups[member.group], local_of(member.tensor).detach()
        # The first step of a warmup is small; schedulers keep the rate that it leads to.
        rate = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
        low = local.dtype in (torch.bfloat16, torch.float16) and local.numel() > 0 and not _is_told_elsewhere(member)
        if low and rate > 0 and group["algorithm"] == "adamw" and group["stochastic_rounding"] is None:
            names.append(member.name)
            rates.add(rate)
            ends = ((local.float() + step).to(local.dtype) == local for step in (rate, -rate))
            still.append(torch.stack([end.all() for end in ends]).all())

    def say(is_lost: Tensor) -> None:
        lost = [name for name, lost_here in zip(names, is_lost.tolist(), strict=True) if lost_here]
        if lost:
            kinds = [*patterns(dict.fromkeys(lost, True), [member.name for member in planned.members])]
            warn(
                f"{listed(kinds)}: AdamW trains these weights in 16 bits without masters, and at learning rate "
                f"{max(rates):g} rounding leaves all of their entries unchanged in each step. Write "
                "Muon(..., master_dtype=torch.float32), or for bf16 stochastic_rounding=0, or hold the weights in fp32"
            )

    if still:
        tell(torch.stack(still), say)


def _is_told_elsewhere(member: OptimizedParameter) -> bool:
    return member.storage.replicated and this_rank() != min(member.ranks)


def warn_of_unsuited(
    planned: StepPlan, rules: Sequence[Rule | None], flags: Mapping[int, Tensor], warned: set[object], tell: Tell
) -> None:
    """Warn of the matrices that did not suit their rule in a step.

    Args:
        planned: The plan of the step.
        rules: The rule of each param group.
        flags: Whether a matrix does not suit its rule, 0-d bool tensor, by its assignment.
        warned: What was told before. Each parameter that a warning names is added, as ("unsuited", name).
        tell: `Runtime.tell`.
    """
    texts, flags_here = list[tuple[str, str]](), []
    for assignment, flag in flags.items():
        member = planned.muon[planned.plan.assignments[assignment].parameter]
        rule = None if member is None else rules[member.group]
        if member is not None and rule is not None:
            texts.append((member.name, rule.unsuited_warning))
            flags_here.append(flag)

    def say(unsuited: Tensor) -> None:
        for (name, text), is_unsuited in zip(texts, unsuited.tolist(), strict=True):
            if is_unsuited and ("unsuited", name) not in warned:
                warned.add(("unsuited", name))
                warn(f"{name}: found {text.format(name=name)}")

    if flags_here:
        tell(torch.stack(flags_here), say)
