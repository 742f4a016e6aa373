"""Muon: the optimizer. Validate, plan once, run the exchange."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from muonmesh.checkpoint.state import SavedGroup, refuse_torn, restore_state, widen_state
from muonmesh.clip.clipping import clip_gradients
from muonmesh.clip.limits import ClipPolicy, GradNorms, Limits
from muonmesh.clip.norm_means import bring_to_host, keep_means, means_of
from muonmesh.comm.communicator import Counts
from muonmesh.comm.gradients import PARAMETER_GRAD, GradientSource, check_source
from muonmesh.comm.rendezvous import announcing_failure, withdraw_failure
from muonmesh.comm.storage import world_size
from muonmesh.comm.to_owners import ToOwners
from muonmesh.errors import explain_error, warn
from muonmesh.groups import ParamGroups
from muonmesh.layout import Declared
from muonmesh.numerics.kernels.threads import abandon_scratch, alone, plain_modes
from muonmesh.numerics.setting import own_names
from muonmesh.report.explain import Explanation, explain, summary
from muonmesh.report.metrics import measure
from muonmesh.settings import LOST_GROUP, LOST_LAYOUTS, MuonSettings, ProcessGroup, shows_settings
from muonmesh.settings.checks import algorithm_of, check_process_group, read_settings
from muonmesh.settings.reading import StepSettings, keep_rates_apart, read_groups
from muonmesh.step.connection import connect, forget, outdated, plan
from muonmesh.step.elementwise_step import step_elementwise
from muonmesh.step.flag_vector import Flags
from muonmesh.step.members import check_members, group_for, keep_gradients_of_views
from muonmesh.step.muon_step import MuonStep, Profiled
from muonmesh.step.offload import Offload
from muonmesh.step.parameters import Collected, ReadyParameters, collect, remember, steady
from muonmesh.step.planning import StepPlan
from muonmesh.step.preflight import preflight, stand_aside
from muonmesh.step.replicas import fingerprints
from muonmesh.step.runtime import UNCLIPPED, Clip, Requested, Runtime
from muonmesh.step.state_layout import Precision
from muonmesh.step.untrained import PATIENCE, IdleParameters, warn_of_unsuited

T = TypeVar("T")


class _Agreed(NamedTuple):
    """A step that all ranks have agreed on: their plan, and what this rank has read for it."""

    planned: StepPlan
    settings: StepSettings
    collected: Collected
    flags: Flags
    clip: Clip


class Muon(torch.optim.Optimizer):
    """The Muon optimizer for matrices, with AdamW for all other parameters: the same update in every layout.

    Muon replaces the momentum M = UΣVᵀ of a matrix by about UVᵀ (K. Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon). This needs the whole matrix. If ranks hold shards of a matrix, they send
    their pieces to one rank, the *owner*. The owner orthogonalizes the matrix and sends the result to every rank that
    stores a part. So sharding never changes the algorithm: on a CPU parameters and state are bit for bit those of one
    process. A parameter may hold several matrices, as a fused q, k, v weight does. Each has its own owner.

    In one step all ranks check their gradients and agree, before anything is written. Each rank then updates the
    momentum that it stores. Owners orthogonalize, and every rank applies weight decay and update to what it stores.
    A matrix whose gradient is missing, or exactly zero on every rank, keeps its momentum and its weights.

    The arguments that most people set come first, and the rare ones follow. All but ``params`` and ``lr`` are keyword
    arguments. A param group may have its own value of each argument up to ``adamw_eps``, and of ``nesterov``,
    ``decay_mode``, ``extra_scale_factor``, ``ns_method`` and ``stochastic_rounding``.

    Args:
        params: Param groups, best from `split_params`; or parameters, or (name, parameter) pairs, all of them
            matrices. Keys of a group besides torch's: ``algorithm`` ("muon", the default, another rule, or "adamw";
            ``use_muon`` is accepted for it), ``matrices`` (how each parameter splits), ``name``, and settings.
        lr: Learning rate of Muon and AdamW, a number or a tensor of one element in CPU memory. For a Muon matrix, lr ×
            scale is the spectral norm of one step.
        momentum: μ of ``m ← lerp(m, g, 1 − μ)``.
        weight_decay: Decoupled weight decay of Muon and AdamW: ``p ← p·(1 − lr·weight_decay)``.
        scale_mode: How the update of a matrix is scaled, see `update_scale`. With "match_rms_adamw" (Moonlight) one
            learning rate serves Muon and AdamW.
        ns_coefficients: The Newton–Schulz coefficients: the name of a set, or polynomials of your own. See
            `orthogonalize`. "auto" takes "deflated" for matrices with at least 384 rows and columns on a CPU, or 4,096
            and 45 · 2²⁰ elements on a device, if ``compute_dtype`` is bf16 or fp16, and "polar_express" for all others.
        ns_steps: Newton–Schulz steps. None: as many as the set is made for, which are 10 for "deepseekv4", 3 for
            "deflated", 5 for the others, and one for each polynomial of your own.
        adamw_betas: AdamW's decay rates of the moments. ``betas`` is accepted too, as in torch.optim.AdamW.
        adamw_eps: AdamW's ε. ``eps`` is accepted too.
        compute_dtype: The dtype in which matrices are orthogonalized and sent. A device orthogonalizes bf16 in fp16;
            fp16 means the same there, and is refused on a CPU.
        state_dtype: The dtype of the momentum, kept through ``load_state_dict``. "int8" stores blocks of 256 elements
            with one fp32 scale each, 1.02 bytes an element. Checkpoints store int8 momentum as fp32, and load with any
            ``state_dtype``.
        master_dtype: ``torch.float32`` keeps fp32 copies of lower-precision parameters in the state.
        process_group: The ranks that hold plain matrices (not DTensors): "world" or a ProcessGroup under DDP, "local"
            if every rank trains a copy of its own, "auto" for the ranks of the DistributedDataParallel that holds them
            at the first step. It is required if several ranks run and hold plain matrices, unless the ranks share other
            parameters, as under tensor parallelism: then they find copies at the first step.
        layouts: Where plain local shards live, by name: ``(mesh, placements)`` in DTensor's vocabulary, with the
            global shape as a third entry where shards are uneven; a `FlatShards`; or a list of `FlatParameter` for a
            flat buffer of several parameters. A DTensor needs no entry.

    Other Parameters:
        nesterov: Whether to orthogonalize ``lerp(g, m, μ)`` instead of m.
        decay_mode: "full", or "cautious": only the weights that the update moves towards zero decay (arXiv 2510.12402).
            AdamW's groups decay in the same mode. To keep "full" for them, write
            ``from_model(..., decay_mode="cautious", adamw={"decay_mode": "full"})``.
        extra_scale_factor: A factor that multiplies the scale.
        ns_method: "auto", "standard" or "gram", see `orthogonalize`.
        stochastic_rounding: A seed, a whole number. bf16 weights without fp32 master weights, and AdamW's moments of
            such weights, are then rounded up or down at random, so that steps too small for bf16 count on average. The
            random number of an element depends on the seed, the step, the parameter's name and the place of the element
            in the whole parameter, so every layout gives the same bits. None rounds to nearest.
        kernels: The code that multiplies matrices, the same on all ranks; see `orthogonalize`. "auto" takes torch's
            products, with a warning, if some rank cannot run the code that should be the fastest.
        state_device: "cpu" keeps per-element state (momentum, state of rules and AdamW, fp32 master weights) in pinned
            CPU memory and copies it to the device one bucket at a time. Before you read such state yourself, call
            `finish`. None keeps it where the parameters are.
        shard_state: Whether replicas (DDP, the replicate axis of HSDP) store the momentum in shards, as DTensors. This
            takes less memory and gives the same bits.
        memory_budget_mb: MiB that a step may use on each rank in addition to weights, gradients and state. The result
            has the same bits with any budget. With a budget that is too small, a step takes one matrix at a time. None:
            on one device 1.5 times the memory of torch.optim.Muon; on several twice the memory that it needs for the
            largest matrix, but at least 160 MiB, and 256 MiB on a CPU; more for many small matrices.
        gradients: Where gradients are kept if not in ``parameter.grad``, see `GradientSource`; for Megatron-Core's
            ``main_grad`` a `muonmesh.integrations.megatron.MainGrad`. With "to_owners" the optimizer averages gradients
            over replicas itself, and sends the gradient of a matrix only to its owner; see `ToOwners`.

    Raises:
        ValueError, TypeError: a setting or a group is wrong; the message says what to write.
    """

    # GradScaler then always calls `step`, even if this rank overflowed, so that all ranks skip together.
    _step_supports_amp_scaling = True

    _runtime: Runtime

    @shows_settings
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = 3e-4,
        **settings: Unpack[MuonSettings],
    ) -> None:
        process_group = settings.get("process_group")
        with_others = process_group in (None, "world", "auto") or isinstance(process_group, dist.ProcessGroup)
        with announcing_failure(alone=not with_others):
            defaults, shared = read_settings(lr, settings)
            if isinstance(params, nn.Module):
                write = "Write muonmesh.from_model(model, lr=...)"
                raise TypeError(explain_error("params", "a module", "param groups", write))
            if isinstance(params, (set, frozenset)):  # parameters without names are known by their order
                needed = "ordered collections, the same order on every rank"
                raise TypeError(explain_error("params", "a set", needed, "Write a list"))
            requested = Requested(*(shared[name] for name in Requested._fields))
            # A copy of the layouts, so that later changes of the caller's mapping have no effect here.
            layouts = dict(shared["layouts"] or {})
            self._runtime = Runtime(Precision.of(shared), shared["process_group"], layouts, requested)
            source = ToOwners() if shared["gradients"] == "to_owners" else shared["gradients"]
            self._runtime.source = PARAMETER_GRAD if source is None else source
            if isinstance(params, ParamGroups):
                self._runtime.idle = IdleParameters(params.model, params.trained, params.frozen)
                self._runtime.watch = params.watch
            super().__init__(params, defaults)
        withdraw_failure()
        self._runtime.complete = True

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that hold plain matrices; you may set it before the first step."""
        return self._runtime.process_group

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        self._runtime.process_group = group

    @property
    def layouts(self) -> Mapping[str, Declared]:
        """Where plain local shards live, by name; you may set it before the first step."""
        return self._runtime.layouts

    @layouts.setter
    def layouts(self, layouts: Mapping[str, Declared]) -> None:
        self._runtime.layouts = layouts

    @property
    def gradients(self) -> GradientSource:
        """The source of gradients, names and process groups; all ranks may set another one before the same step."""
        return self._runtime.source

    @gradients.setter
    def gradients(self, source: GradientSource) -> None:
        check_source(source)
        self._runtime.source = source

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its keys.

        Raises:
            ValueError: a vector in a Muon group, a parameter twice, a name twice, or a setting out of range.
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                explain_error("param_group", f"{type(param_group)}", "a dict", 'Write {"params": [...], ...}')
            )
        group = dict(param_group)
        if self._runtime.complete and "algorithm" not in group and "use_muon" not in group:
            problem = 'no "algorithm" in a group that is added later'
            needed = '"muon" or "adamw", since an embedding is a matrix too and its module is not known here'
            write = 'Write add_param_group({..., "algorithm": "adamw"}), or add the groups that '
            write += "muonmesh.split_params(module) returns"
            raise ValueError(explain_error("group", problem, needed, write))
        members = group["params"]
        pairs = [members] if isinstance(members, Tensor) else members if isinstance(members, set) else list(members)
        group["params"] = pairs
        group["algorithm"] = algorithm_of(group)
        if group["algorithm"] == "adamw":
            group = own_names(f"group {group.get('name')!r}", group)
        group.setdefault("name", f"group{len(self.param_groups)}")
        if any(other.get("name") == group["name"] for other in self.param_groups):
            problem = f"{group['name']!r} twice"
            raise ValueError(explain_error("group name", problem, "unique names", "Rename one of the groups"))
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in pairs]
        if len({id(p) for p in tensors}) != len(tensors):
            subject = f"group {group['name']!r}"
            raise ValueError(explain_error(subject, "a parameter twice", "each once", "Remove one of them"))
        if not any(isinstance(entry, tuple) for entry in pairs):
            group.setdefault("param_names", [f"{group['name']}.{i}" for i in range(len(tensors))])
        names = [e[0] for e in pairs] if any(isinstance(e, tuple) for e in pairs) else group["param_names"]
        keep_gradients_of_views(list(zip(names, tensors, strict=False)), self._runtime.layouts)
        super().add_param_group(group)
        try:
            runtime, groups = self._runtime, self.param_groups
            check_members(groups[-1], groups, runtime.layouts, runtime.source, runtime.precision.master)
        except Exception:
            self.param_groups.pop()
            raise
        keep_rates_apart(self.param_groups, self._runtime.replaced)

    # ---------------------------------------------------------------- the step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the result of clipping that the next step would read."""
        self._runtime.clip = UNCLIPPED
        super().zero_grad(set_to_none)
        if self._runtime.source is not PARAMETER_GRAD:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._runtime.source.write(parameter, None)

    # Whole matrices, flags and collectives form no graph; compiled elementwise operations would round differently.
    @_disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scaler: torch.amp.grad_scaler.GradScaler | None = None,
    ) -> Any:
        """Take one step; all ranks that share parameters call it.

        With a GradScaler, all ranks skip the step if one of them overflowed. Gradients are divided by the loss scale in
        fp32 before they enter the momentum, unless ``scaler.unscale_(optimizer)`` has done so.

        Args:
            closure: Evaluates the model and returns the loss, with gradients enabled.
            scaler: The GradScaler, passed by ``scaler.step(optimizer, scaler=scaler)``. It then learns of overflows on
                other ranks, so that loss scales stay equal. DDP and FSDP2 do not need this argument.

        Returns:
            The closure's loss, or None.

        Raises:
            LayoutError, PlanError: on every rank, before anything is written. On CUDA with other ranks, a step that
                finds an error in gradients, state or settings writes nothing, and the next step raises it. At learning
                rate 0 it is raised immediately, and so is an error that prevents a plan.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with alone(), plain_modes():
            self._take_step(scaler)
        return loss

    def _take_step(self, scaler: torch.amp.grad_scaler.GradScaler | None) -> None:
        """Agree with all ranks, and let the exchange do the rest, bucket by bucket.

        That is: fold gradients into the momentum, gather matrices at their owners, orthogonalize, scatter, update.
        """
        try:
            agreed = self._agree()
            if agreed is not None and not self._note(agreed, scaler):
                self._run(agreed)
        finally:
            planned = self._runtime.connected
            if planned is not None and planned.collected is not None:  # the user may free them
                planned.collected.gradients[:] = [None] * len(planned.collected.entries)

    def _agree(self) -> _Agreed | None:
        """Agree with all ranks on a step before anything is written; None if this rank can only stand aside."""
        runtime = self._runtime
        on_device = runtime.planned is not None and runtime.planned.device.type == "cuda"
        if on_device and torch.cuda.is_current_stream_capturing():
            needed = "it outside of one, since a replay would repeat its learning rate"
            write = "Capture forward and backward only"
            raise RuntimeError(explain_error("step()", "in a CUDA graph capture", needed, write))
        (clip, runtime.clip), stages = (runtime.clip, UNCLIPPED), runtime.driver.stages
        try:
            agreed = self._preflight(clip)
        except Exception:
            runtime.clip = clip._replace(error=None)  # the next step takes these gradients, which may be scaled
            if stages is not None:
                stages(raises=True)
            raise
        if agreed is None or stages is None or (met := stages(raises=False)) is None:
            return agreed
        agreed.flags.skip = agreed.flags.skip or bool(met.skip)
        return agreed._replace(clip=met)

    def _meet(self, work: Callable[[StepPlan, Muon | None, Exception | None], T | None]) -> T:
        """Return the result of clipping or metrics; if it is None, all ranks plan again, and repeat it.

        Args:
            work: A function of the plan that all ranks follow, of this optimizer, and of the error of its settings.
                None stands for the optimizer if this rank can no longer follow the plan, and only takes part.
        """
        runtime, groups = self._runtime, self.param_groups
        while True:
            settings = runtime.last.settings = read_groups(groups, runtime.replaced, runtime.last.settings)
            before, optimizer = outdated(groups, runtime, settings), None
            if before is None:
                before, optimizer = runtime.connected or connect(groups, runtime), self
            if (result := work(before, optimizer, settings.error)) is not None:
                return result
            forget(runtime)

    def _preflight(self, clip: Clip) -> _Agreed | None:
        """Read the settings, make a plan if needed, read the gradients, and agree with all ranks.

        Errors that the device has found since the last step are raised first. Return None if this rank could not follow
        the plan and the CPU does not wait for the flags: see `stand_aside`.
        """
        runtime, groups = self._runtime, self.param_groups
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if runtime.pending or runtime.interrupted is not None:
            runtime.hear()
        runtime.last.counted = []
        runtime.last.scale = None if scale is None else scale.clone()  # ``scaler.update()`` writes it
        settings = runtime.last.settings = read_groups(groups, runtime.replaced, runtime.last.settings)
        collected = steady(self, runtime, settings, scale)
        if collected is None and (before := outdated(groups, runtime, settings)) is not None:
            if stand_aside(before, settings, runtime):
                return None
            forget(runtime)
        error = None if found_inf is None else runtime.source.scaler_error()
        overflow = None if found_inf is None else found_inf != 0
        while True:
            planned = runtime.connected or connect(groups, runtime)
            collected = collected or collect(planned, self, runtime, scale)
            idle = (
                runtime.idle.error(collected.missing, any_gradient=collected.any_gradient)
                if collected.missing
                else None
            )
            # Equal replicas stay equal. Only a new plan, or loaded state, may have made them differ.
            look = runtime.loaded or runtime.ranks.compared is not planned
            replicas = fingerprints(planned, self.state) if look else {}
            wrong = clip.error or error or idle
            watch = None if settings.at_rest else runtime.watch  # such a step may only create state before a forward
            if wrong is None and watch is not None and watch.facts is not None:
                entire = len(planned.plan.ranks) == world_size()
                wrong = watch.compare(groups, collected.missing, entire=entire, warns=runtime.ranks.warns)
                runtime.watch = None if wrong is None else watch
            flags = preflight(
                planned, collected, settings, runtime, replicas, error=wrong, skip=clip.skip, overflow=overflow
            )
            runtime.ranks.compared, runtime.loaded = planned, False
            if not flags.replan:
                return _Agreed(planned, settings, collected, flags, clip)
            forget(runtime)  # another rank's parameters have changed, so all plan again
            collected = None

    def _note(self, agreed: _Agreed, scaler: torch.amp.grad_scaler.GradScaler | None) -> bool:
        """Note the step that all ranks have agreed on, and return whether it changes nothing."""
        runtime, (planned, settings, collected, flags, clip) = self._runtime, agreed
        for number in settings.counting:  # steps that raise count on no rank
            group, steps_taken = self.param_groups[number], settings.rules[number].steps_taken
            group["steps_taken"] = steps_taken + (not settings.at_rest)
            if not settings.at_rest:
                runtime.last.counted.append(group)
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            self._tell_scaler(scaler, flags, found_inf)
        idle = runtime.idle
        idle.steps += 1
        if collected.snapshot is None or idle.counts or idle.steps % PATIENCE == 1:  # else nothing is missing
            idle.count(collected.missing, self.param_groups, any_gradient=collected.any_gradient)
        runtime.last.stopped = flags.skip if flags.stop is None else flags.stop
        if clip.means is not None and clip.skip is not None:  # a step that clipping skips counts, unlike others
            before, lost = means_of(self.param_groups, clip.means.device), ~clip.skip & runtime.last.stopped
            keep_means(self.param_groups, torch.where(lost, before, clip.means))
        if flags.skip and runtime.last.squares is not None:  # a device, which finds out later, applies updates of zero
            zero = torch.zeros((), dtype=torch.float64, device=planned.device)
            runtime.last.squares = {entry.member.group: [zero] for entry in collected.entries}
        return flags.skip

    def _run(self, agreed: _Agreed) -> None:
        """Run the exchange with the work of this rank, and end the step."""
        runtime, (planned, settings, collected, flags, _) = self._runtime, agreed
        exchange, precision, offload = planned.exchange, runtime.precision, None
        squares = runtime.last.squares = None if runtime.last.squares is None else {}
        work: MuonStep | None = collected.work
        if work is None:
            if precision.leaves(planned.device):
                offload = Offload(planned.device, elements=planned.plan.budget.elements_on_device)
            work = MuonStep(planned, ReadyParameters(planned, collected.muon, precision), offload)
        elementwise = []
        for entries in collected.adamw:
            rule = settings.rules[entries[0].member.group]
            elementwise.append(partial(step_elementwise, rule, entries, precision, flags, squares, offload))
        watched = torch.autograd.profiler._is_profiler_enabled
        runtime.interrupted = f"a step (number {exchange.communicator.steps} of this plan)"
        try:
            work.ready.begin(
                exchange.communicator, settings.rules, flags, squares, collected.snapshot and collected.snapshot.version
            )
            work.begin(elementwise)
            exchange.run(cast(MuonStep, Profiled(work)) if watched else work)
            work.ready.finish()
        except BaseException as error:
            abandon_scratch()
            if isinstance(error, Exception):
                runtime.explain_interruption(error)
            raise
        runtime.last.blocks = planned.blocks if precision.int8 else None
        runtime.last.brought_back = None if offload is None else offload.last
        runtime.interrupted = None
        if collected is not planned.collected:
            remember(planned, collected, self.state, work)
        if work.summands.unsuited:
            warn_of_unsuited(planned, settings.rules, work.summands.unsuited, runtime.warned, runtime.tell)

    def finish(self) -> None:
        """Wait until state in CPU memory (``state_device="cpu"``) has been copied back after a step.

        The running means of ``clip_grad_norm_(skip_above="4x")`` in the groups become plain numbers. ``state_dict()``
        and all other methods that read state wait by themselves. Call this method before you read ``optimizer.state``
        yourself. It starts no collective, so a single rank may call it.
        """
        if self._runtime.last.brought_back is not None:
            self._runtime.last.brought_back.synchronize()
        bring_to_host(self.param_groups)

    def _tell_scaler(self, scaler: torch.amp.grad_scaler.GradScaler | None, flags: Flags, found_inf: Tensor) -> None:
        """Tell the GradScaler whether any rank overflowed; warn if its scale will differ."""
        assert flags.overflow is not None
        if scaler is not None:
            per_device: dict[Any, Any] = scaler._found_inf_per_device(self)
            if not per_device:  # the scaler saw no gradient, and ``scaler.update()`` needs an entry
                per_device[flags.overflow.device] = torch.zeros((), dtype=torch.float32, device=flags.overflow.device)
            for overflows in per_device.values():
                overflows.copy_(flags.overflow)
        elif flags.overflow.device.type == "cpu" and bool(flags.overflow) and not bool(found_inf):
            warn(
                "GradScaler: found an overflow on another rank only; all ranks skip, but their loss scales differ from "
                "now on. Write scaler.step(optimizer, scaler=scaler)"
            )

    @_disable_dynamo
    @plain_modes()
    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        policy: ClipPolicy = "adamw_only",
        skip_above: float | str = math.inf,
        norms: bool = True,
        norm_type: float = 2.0,
        process_group: ProcessGroup = None,
    ) -> GradNorms:
        """Clip the gradients by their norm over all ranks; all ranks call it, before ``step``.

        The size of Muon's update does not depend on the size of its gradients. Clipping them would only change the
        weight of this step in the momentum. So by default Muon's gradients are measured and not clipped (Megatron-LM
        pull request 5395).

        Args:
            max_norm: Largest norm; inf only measures.
            policy: "adamw_only": AdamW's gradients by their own norm. Groups whose rule is not `scale_invariant` count
                as AdamW's. "all": all gradients by the total norm, as ``torch.nn.utils.clip_grad_norm_``. "separate":
                Muon's gradients and AdamW's, each by their own norm.
            skip_above: The next step changes nothing, on any rank, if a norm by which the policy clips is above this,
                or if anything measured is not finite. The CPU does not wait for this decision. Weights, momentum and
                step counters stay as they are, bit for bit. "4x" is 4 times the running mean of the same norm, over
                about twenty norms. Each step counts the norms of the last call before it. The first ten norms skip
                nothing, later ones count as at most twice the mean (see `muonmesh.clip.norm_means`).
            norms: False leaves out the norms that the policy does not need. A non-finite gradient of Muon is then seen
                only by policies that measure it, or with ``skip_above``.
            norm_type: Must be 2: only Euclidean norms are computed. It is here because torch's function has it.
            process_group: Ranks of optimizers that share no parameter, such as pipeline stages, to be clipped by a
                common norm: "world", or a group that holds this rank and at least one of each other stage. "local" and
                None: no others.

        Returns:
            The norms before clipping, and whether the next step is skipped.

        Raises:
            ValueError: an argument is out of range or unknown.
            LayoutError, TypeError: a gradient lives elsewhere than its parameter, or is sparse. On CUDA it is raised
                by ``step``.
            PlanError: another rank raised, or ranks were given different arguments.
        """
        check_process_group(process_group, ("world", "local"))
        runtime, ranks = self._runtime, group_for(process_group)
        limits = Limits(max_norm, policy, skip_above, norms, norm_type)
        result, runtime.clip = self._meet(partial(clip_gradients, limits=limits, runtime=runtime, process_group=ranks))
        return result

    # ---------------------------------------------------------------- state

    @plain_modes()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings; the momentum keeps ``state_dtype``, whatever the parameter's dtype.

        Raises:
            StateError: layout, algorithm or splitting of the state differ from this optimizer's parameters. Nothing has
                been loaded.
        """
        self.finish()
        runtime = self._runtime
        # Frameworks load an empty state before they replace the parameters.
        filled = isinstance(state_dict, Mapping) and state_dict.get("state")
        planned = plan(self.param_groups, runtime) if filled else None
        if runtime.connected is not None:  # it holds the old state, for which there may be no memory beside the new one
            runtime.connected.forget_steps()
        frozen = runtime.idle.frozen
        restore_state(self, state_dict, runtime.precision, planned, frozen, super().load_state_dict)
        keep_rates_apart(self.param_groups, runtime.replaced)
        runtime.interrupted, runtime.loaded = None, planned is not None and bool(planned.members)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as torch does. Of the per-parameter lists of a group, only the names are saved.

        Raises:
            StateError: a step was interrupted while it wrote; or torch's checkpoint functions ask for flat shards, or
                for state that only the owners of matrices hold.
        """
        # This method looks at its caller, so it has no decorator.
        refuse_torn(sys._getframe(1).f_globals.get("__name__", ""), self.param_groups, self._runtime.layouts)
        with plain_modes():
            self.finish()
            self._runtime.refuse_if_interrupted()
            if self._runtime.precision.int8:
                widen_state(self.state, plan(self.param_groups, self._runtime), self._runtime.last.blocks)
            state_dict = super().state_dict()
            state_dict["param_groups"] = [SavedGroup.of(group) for group in state_dict["param_groups"]]
            return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer's attributes without plan and ProcessGroup. The latter cannot be pickled."""
        self.finish()
        runtime = self._runtime
        lost = isinstance(runtime.process_group, dist.ProcessGroup)
        fresh = Runtime(
            replace(runtime.precision, kernels=runtime.requested.kernels),
            LOST_GROUP if lost else runtime.process_group,
            LOST_LAYOUTS if runtime.layouts else {},
            runtime.requested,
            runtime.source,
            complete=runtime.complete,
            interrupted=runtime.interrupted,
            warned=runtime.warned,
        )
        return {**super().__getstate__(), "_runtime": fresh}

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Return a copy with parameters and state of its own, and with the same ProcessGroup."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        if not isinstance(self.gradients, ToOwners):
            memo[id(self.gradients)] = self.gradients  # it may hold parameters or groups, which cannot be copied
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.process_group, twin.layouts = self.process_group, self.layouts
        return twin

    # ---------------------------------------------------------------- reporting

    def __repr__(self) -> str:
        """Return a line for each group, with its settings other than defaults; ``param_groups`` has the names too."""
        lines = [f"    {line}\n" for line in summary(self.param_groups).splitlines()]
        return f"{type(self).__name__} (\n{''.join(lines)})"

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing on any rank, because of an overflow or of clipping; waits for a device.

        The value is the same on all ranks that share parameters, so schedules that depend on it stay equal.
        """
        return bool(self._runtime.last.stopped)

    @property
    def stopped(self) -> bool | Tensor:
        """The value of `skipped` without waiting: a 0-d bool tensor if only the device knows the value."""
        return self._runtime.last.stopped

    @property
    def counts(self) -> Counts:
        """Counts of the last step on this rank: orthogonalized matrices, collectives, and bytes.

        `explain` predicts these numbers.
        """
        connected = self._runtime.connected
        return Counts() if connected is None else connected.exchange.communicator.counts

    def explain(self) -> Explanation:
        """Return what updates each parameter and why, its owner, and the cost of a step; ``str()`` gives a table.

        No communication.

        Raises:
            LayoutError, ValueError, TypeError: a step with the current groups is not possible.
        """
        self.finish()
        if (error := read_groups(self.param_groups, self._runtime.replaced).error) is not None:
            raise error
        return explain(self.param_groups, plan(self.param_groups, self._runtime), self._runtime.precision)

    @plain_modes()
    def metrics(self) -> dict[str, float]:
        """Return figures of the last step for any logger, by group; all ranks call it, since shards are summed.

        ``<group>/gradient_rms``, ``<group>/momentum_rms`` (the first moment of AdamW), ``<group>/update_rms`` (without
        decay) and ``<group>/update_to_weight`` (ratio of norms). Call it after ``step`` and before ``zero_grad``. The
        update is recorded from the first call on, so the last two appear after the following step.

        On a CPU the figures are floats. On a device they are 0-d fp64 tensors, and the CPU does not wait for them.
        Reading a tensor (``float(x)``, ``format``) does wait, so log it late. On a device a rank returns the figures of
        groups of which it stores a part. They are NaN if another rank had an error, which the next step raises.
        """
        runtime = self._runtime
        figures = self._meet(partial(measure, runtime=runtime))
        runtime.last.squares = runtime.last.squares or {}
        return figures
