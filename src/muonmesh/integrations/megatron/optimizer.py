"""MegatronOptimizer: the optimizer that Megatron's training loop steps, logs, schedules and saves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer as Base
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from torch import Tensor, nn

from muonmesh.checkpoint.record import CheckpointedOptimizer, ParameterRecord
from muonmesh.clip.clipping import clip_gradients
from muonmesh.clip.limits import ClipPolicy, GradNorms, Limits
from muonmesh.clip.squares import AGREEMENT, SCALE_SENSITIVE, reduce_beyond, zeros_for
from muonmesh.comm.gather_objects import settled
from muonmesh.comm.ranks import device_without_parameters
from muonmesh.comm.storage import local_of
from muonmesh.errors import LayoutError, PlanError, StateError, about, explain_error
from muonmesh.integrations.megatron import checkpoint
from muonmesh.integrations.megatron.param_groups import SCHEDULED
from muonmesh.integrations.megatron.refusals import is_fsdp, script_argument
from muonmesh.integrations.megatron.sharded_master import ShardedMaster
from muonmesh.names import canonical_name
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.step.connection import connect, placed_members
from muonmesh.step.runtime import Clip, Driver


class Holding(NamedTuple):
    """One tensor of this rank that the optimizer steps: a parameter, or a part of one.

    Attributes:
        name: Its name in the whole model.
        saved: Its name in checkpoints. The last stage's copy of a tied embedding has the name of the embedding.
        copy: The number of this copy; only the last stage's copy of a tied embedding has 1, all others 0.
        parameter: Megatron's parameter.
        tensor: The tensor to step: the parameter, or a view of the elements that this rank keeps.
        low: The index of the tensor's first element in the flattened parameter.
        resizes: Whether a checkpoint may have another number of rows, see `SavedBox`.
    """

    name: str
    saved: str
    copy: int
    parameter: Tensor
    tensor: Tensor
    low: int
    resizes: bool


class MegatronOptimizer(Base, CheckpointedOptimizer):  # type: ignore[misc]
    """One Megatron optimizer for Muon's and AdamW's parameters, dense weights and experts.

    Megatron calls `step` once in each iteration, after it has reduced the gradients into ``main_grad``. `step` unscales
    the gradients, measures their norm over all ranks (a tied embedding counts once), clips them by ``policy``, and
    updates the parameters. With the distributed optimizer, it then gathers the parameters. It reads gradients in place.

    Attributes:
        optimizer: The `muonmesh.Muon` that takes the steps.
        chained_optimizers: A list of this object alone, for Megatron's loops over chained optimizers.
        is_stub_optimizer: False.
        grad_norms_by_group: The last step's norms of gradients that Megatron measures apart, by the parameters'
            ``grad_norm_group`` ("mtp"). The total norm does not include these gradients.
    """

    optimizer: Muon

    def __init__(
        self,
        optimizer: Muon,
        config: Any,
        chunks: list[Any],
        holdings: Sequence[Holding],
        groups: Any,
        policy: ClipPolicy,
        skip_above: float | str,
    ) -> None:
        Base.__init__(self, optimizer, config)
        CheckpointedOptimizer.__init__(self, optimizer)
        self.runtime = optimizer._runtime
        self.model_chunks = chunks
        self.is_stub_optimizer = False
        self.chained_optimizers = [self]
        self.grad_norms_by_group: dict[str, Tensor] = {}
        self._holdings = tuple(holdings)
        self._saved = {holding.name: (holding.saved, holding.copy, holding.resizes) for holding in holdings}
        self._stages, self._tensor_parallel = groups.pp.size(), groups.tp.size()
        self._fsdp = any(is_fsdp(chunk) for chunk in chunks)
        self._flat = config.use_distributed_optimizer and not self._fsdp
        self._policy, self._skip_above = policy, skip_above
        tensors = (*(h.parameter for h in holdings), *(p for chunk in chunks for p in chunk.parameters()))
        self._device = next((tensor.device for tensor in tensors), None) or device_without_parameters()
        self._scale_of_one = torch.ones(1, dtype=torch.float32, device=self._device)
        self._clips = True  # whether the policy clips a parameter of any rank; `meet` finds out
        self.grad_scaler: Any = None
        if config.loss_scale:
            self.grad_scaler = ConstantGradScaler(config.loss_scale)
        elif config.fp16:
            self.grad_scaler = DynamicGradScaler(
                initial_scale=config.initial_loss_scale,
                min_scale=config.min_loss_scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=config.loss_scale_window,
                hysteresis=config.hysteresis,
            )

    def meet(self, everyone: Sequence[tuple[Limits, Collection[int]]]) -> None:
        """Compare limits and plans of all ranks. All ranks call it once.

        Args:
            everyone: For each rank: its limits, and whether clipping counts its groups as AdamW's (SCALE_SENSITIVE), as
                Muon's or as both.

        Raises:
            LayoutError, PlanError: on every rank, if ranks that share parameters have different plans for them.
            ValueError: on every rank, if ``clip_grad`` or ``policy`` differs between ranks.
        """
        limits = everyone[0][0]
        for rank, (other, _) in enumerate(everyone):
            if other != limits:
                problem, needed = f"{limits} on rank 0 and {other} on rank {rank}", "the same on all ranks"
                write = "Pass the same clip_grad and policy= everywhere"
                raise ValueError(explain_error("get_megatron_optimizer", problem, needed, write))
        self._clips = limits.policy != "adamw_only" or any(SCALE_SENSITIVE in halves for _, halves in everyone)

        # For each set of ranks. Nothing has averaged gradients yet, and Megatron may not even have written them.
        settled(lambda: connect(self.optimizer.param_groups, self.runtime, gradients=False), kind=PlanError)

    @property
    def limits(self) -> Limits:
        """How the next step clips. Like Megatron's optimizers, it reads ``config.clip_grad`` in every step."""
        largest = self.config.clip_grad or 0.0
        return Limits(largest if largest > 0 else math.inf, self._policy, self._skip_above)

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Divide the gradients by the loss scale, in place; return whether any rank has a non-finite gradient."""
        if self.grad_scaler is None:
            return False
        gradients: list[Tensor] = []
        with suppress(LayoutError):  # a parameter without main_grad, for which the step raises on every rank
            read = [self.optimizer.gradients.gradient(holding.tensor) for holding in self._holdings]
            gradients = [local_of(gradient) for gradient in read if gradient is not None and local_of(gradient).numel()]
        overflow = torch.zeros(1, dtype=torch.float32, device=self._device)
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self.grad_scaler.inv_scale)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        overflowed = bool(overflow)
        self.grad_scaler.update(overflowed)
        return overflowed

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Take one step. All ranks of the world call it.

        Returns:
            Whether the step changed the parameters; the norm of all gradients before clipping (None if clipping needs
            no norm); and the number of gradient elements that are zero (None unless ``log_num_zeros_in_grad``).

        Raises:
            LayoutError, PlanError, ValueError: on every rank, before the step writes anything.
        """
        if self.prepare_grads():
            return False, None, None
        limits = self.limits
        norm = self._step(clips=self._clips and (limits.max_norm < math.inf or limits.skips_large))
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        self._publish()
        return not self.optimizer.skipped, norm, zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step without unscaling and clipping, for training loops that have done both."""
        self._step(clips=False)
        self._publish()
        return True

    def _step(self, *, clips: bool) -> float | None:
        """Clip if ``clips``, and step; return the norm, or None.

        With several pipeline stages, one sum over all ranks measures the gradients and tells every rank of an error on
        any rank. If one stage raised alone, the others would wait for its activations without end. So every stage
        first reads and checks all inputs of a step, takes part in the sum, and only then writes.
        """
        self._settle()
        norms = list[GradNorms]()
        if self._stages > 1:
            # The CPUs of all stages wait for the flags, and then meet.
            self.runtime.driver = Driver(waits=True, stages=partial(self._meet_stages, norms, clips=clips))
        elif clips:
            norms.append(self.optimizer.clip_grad_norm_(**asdict(self.limits), process_group="world"))
        try:
            self.optimizer.step()
        finally:
            self.runtime.driver = Driver()
        if not norms:
            return None
        self.grad_norms_by_group = dict(norms[0].apart)
        return float(norms[0])

    def _meet_stages(self, norms: list[GradNorms], *, clips: bool, raises: bool) -> Clip | None:
        """Measure the gradients and exchange errors over all pipeline stages, in one all-reduce over the world.

        `Muon.step` calls it as `Driver.stages`.

        Args:
            norms: Receives the norms.
            clips: Whether to measure and clip.
            raises: Whether this rank has found an error and will raise it.

        Returns:
            The result of clipping; None without clipping, or if this rank raises.

        Raises:
            LayoutError, TypeError: a gradient of this rank cannot be measured.
            PlanError: another rank found an error, and this rank did not.
        """
        muon, runtime = self.optimizer, self.runtime
        if clips and not raises:
            assert runtime.connected is not None
            met = clip_gradients(runtime.connected, muon, None, self.limits, runtime, dist.group.WORLD)
            assert met is not None  # the step has just agreed on the plan
            norms.append(met[0])
            return met[1]
        none = zeros_for(muon.gradients.norms_apart, self._device)  # what `clip_gradients` adds up on other stages
        _, agreed = AGREEMENT.ask({"error": raises}, none, partial(reduce_beyond, group=dist.group.WORLD))
        if not raises and bool(agreed.any("error")):
            message = "Another rank found an error, so every rank stops. Read the message of that rank"
            raise PlanError(about("step", message))
        return None

    def _settle(self) -> None:
        """Round the master weights that Megatron has written into their weights."""
        for holding in self._holdings:
            master = getattr(holding.parameter, "main_param", None)
            if isinstance(master, ShardedMaster) and master.written:
                holding.tensor.detach().copy_(master.as_subclass(Tensor).view_as(holding.tensor))
                master.written = False

    def _publish(self) -> None:
        """Make the modules compute with the updated parameters."""
        clips = any(chunk.config.qk_clip for chunk in self.model_chunks)
        if clips:
            self.optimizer.finish()  # Megatron then reads master weights, which may be in CPU memory
        for holding in self._holdings:
            master = self.optimizer.state[holding.tensor].get("master")
            # Megatron's log of the parameters' norm reads main_param. For master weights on the CPU, it reads the
            # parameter instead.
            if master is not None and (clips or local_of(master).device == holding.tensor.device):
                published = local_of(master)
                published = ShardedMaster.of(published, holding.parameter, holding.low) if clips else published
                holding.parameter.main_param = published  # type: ignore[attr-defined]
                holding.parameter.main_param_sharded = self._flat  # type: ignore[attr-defined]
        for chunk in self.model_chunks:
            if self._fsdp:
                chunk.module.install_optimized_model_weights()
                chunk.start_param_sync()
            elif self._flat and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()  # with overlap, the next forward pass gathers them

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set ``grad`` to None, and discard the last decision of clipping.

        ``main_grad`` does not change, as with Megatron's own optimizers: ``zero_grad_buffer`` of each chunk zeroes it.
        """
        for holding in self._holdings:
            holding.parameter.grad = None
        self.optimizer.zero_grad()

    # ---------------------------------------------------------------- methods that Megatron's loops call

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the norm of all gradients over all ranks; a tied embedding counts once. All ranks call it."""
        return float(self.optimizer.clip_grad_norm_(float("inf"), process_group="world"))

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip by ``policy`` to the largest norm ``clip_grad``; return the norm of all gradients. All ranks call it."""
        return float(self.optimizer.clip_grad_norm_(clip_grad, policy=self._policy, process_group="world"))

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return the number of gradient elements that are zero over all ranks, each counted once. All ranks call it."""
        source = self.optimizer.gradients
        zeros = torch.zeros((), dtype=torch.float64, device=self._device)
        for member in placed_members(self.optimizer):
            gradient = source.gradient(member.tensor)
            if gradient is not None and source.counted(member.tensor):
                local = local_of(gradient)
                zeros += (local.numel() - local.count_nonzero()) / member.storage.copies
        dist.all_reduce(zeros)
        return round(float(zeros))

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale, a tensor of shape (1,)."""
        scale: Tensor = self._scale_of_one if self.grad_scaler is None else self.grad_scaler.scale
        return scale

    def get_parameters(self) -> list[Tensor]:
        """Return the parameters of Megatron's modules, each once."""
        return list(dict.fromkeys(holding.parameter for holding in self._holdings))

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy the model's parameters to the fp32 master weights. A step does this by itself, for changed elements.

        Raises:
            StateError: ``state_dict`` is not None. The optimizer's own state has the master weights.
        """
        if state_dict is not None:
            problem, write = "a state dict to take masters from", "Load the optimizer's state, which has them"
            raise StateError(explain_error("reload_model_params", problem, "None", write))
        self.optimizer.finish()
        for holding in self._holdings:
            master = self.optimizer.state[holding.tensor].get("master")
            if master is not None:
                local_of(master).copy_(holding.tensor)

    def explain(self) -> Explanation:
        """Return an explanation of the plan: each parameter's rule, owner and reason. No communication.

        ``str()`` of the result is a table. The owner of a matrix is the rank that orthogonalizes it.
        """
        return self.optimizer.explain()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state and groups, to load on the same rank of a run with the same layout."""
        self._settle()
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for Megatron's dist_checkpointing, by the parameters' names in the whole model.

        A checkpoint loads with other sizes of tensor, pipeline, data and expert parallelism, with and without the
        distributed optimizer. State that no step has created yet is created here. With ``overlap_param_gather``,
        this gathers the parameters, so save the model's state only after this call.

        Args:
            model_sharded_state_dict: Ignored.
            is_loading: Whether a checkpoint will be loaded into the result.
            metadata: Ignored, since there is only one format.
        """
        self.refuse_if_interrupted()
        if not is_loading:
            self._gather_late()  # ``model_sharded_state_dict`` refers to the parameters, and saving will read them
        if self._fsdp:
            needed = "a model that Megatron's sharded state dict describes"
            write = "Write muonmesh.checkpoint.save(path, model_chunks[0], optimizer), and load in the same way"
            raise StateError(explain_error("sharded_state_dict", "a model in Megatron-FSDP", needed, write))
        self._settle()
        state = checkpoint.sharded(self.optimizer, self._saved, is_loading=is_loading)
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    # ---------------------------------------------------------------- muonmesh.checkpoint

    def checkpoint_records(self) -> list[ParameterRecord]:
        """Return a `ParameterRecord` of every parameter of this rank with its state, for `muonmesh.checkpoint`.

        The ranks communicate only if owners keep state of their matrices and no plan is agreed on. (An owner is the
        rank that orthogonalizes a matrix.)

        Raises:
            StateError: there are several pipeline stages, chunks or expert-parallel ranks, whose modules number layers
                or experts differently than the whole model.
        """
        named = [item for chunk in self.model_chunks for item in chunk.named_parameters()]
        model_names = {canonical_name(name) for name, parameter in named if parameter.requires_grad}
        wholes = {holding.name for holding in self._holdings}
        if self._stages > 1 or len(self.model_chunks) > 1 or model_names != wholes:
            fault = f"{self._stages} pipeline stages of {len(self.model_chunks)} chunks, or experts on several ranks, "
            fault += "which are numbered apart"
            needed = "one stage, one chunk and all experts, whose parameters are called as in the whole model"
            write = "Save with megatron.core.dist_checkpointing and optimizer.sharded_state_dict(...)"
            raise StateError(explain_error("muonmesh.checkpoint of Megatron", fault, needed, write))
        return super().checkpoint_records()

    def checkpoint_restored(self) -> None:
        """Mark weights, state and settings as loaded, and make the modules compute with the loaded weights."""
        super().checkpoint_restored()
        self._publish()
        self._gather_late()

    def _gather_late(self) -> None:
        """Gather the parameters of the distributed optimizer that otherwise the next forward pass gathers."""
        for chunk in self.model_chunks:
            if self._flat and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which frozen parameters are whole. They must be whole already.

        Raises:
            StateError: a frozen parameter is a tensor-parallel shard; a checkpoint would have only one rank's shard.
        """
        for name, parameter in model.named_parameters() if self._tensor_parallel > 1 else ():
            if not parameter.requires_grad and getattr(parameter, "tensor_model_parallel", False):
                fault, needed = "a frozen tensor-parallel shard", "the whole of it on every rank, or that it is trained"
                remedy = "Save with megatron.core.dist_checkpointing and optimizer.sharded_state_dict(...)"
                raise StateError(explain_error(name, fault, needed, remedy))
        yield

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or the state that dist_checkpointing has loaded for `sharded_state_dict`.

        With ``--override-opt-param-scheduler`` of Megatron-LM's scripts, the groups keep the rates and decays of this
        run between which the scheduler moves. Otherwise they get those of the checkpoint.

        Raises:
            StateError: the state is neither of both, or does not fit this optimizer.
        """
        inner = state_dict.get("optimizer", state_dict) if isinstance(state_dict, Mapping) else {}
        groups = inner.get("param_groups", [{}])
        if not isinstance(groups, Mapping) and not all("algorithm" in group for group in groups):
            problem = "the state of another optimizer"
            raise StateError(explain_error("load_state_dict", problem, "that of this one", checkpoint.ANOTHERS))
        overrides = script_argument("override_opt_param_scheduler")
        schedules = [{key: group[key] for key in SCHEDULED if key in group} for group in self.param_groups]
        if "optimizer" in state_dict:
            self.optimizer.load_state_dict(inner)
        else:
            checkpoint.restore(self.optimizer, self._saved, state_dict)
        for group, before in zip(self.param_groups, schedules, strict=True) if overrides else ():
            for key in SCHEDULED:
                group.pop(key, None)
            group.update(before)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
