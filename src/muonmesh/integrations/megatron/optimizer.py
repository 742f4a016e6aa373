"""MegatronOptimizer: what Megatron's training loop steps, logs, schedules and saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer as Base
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from torch import Tensor, nn

from muonmesh.checkpoint.of_muon import OfMuon
from muonmesh.checkpoint.ranks import settled
from muonmesh.checkpoint.record import Record
from muonmesh.clip.clipping import PlanAgain, clip_gradients
from muonmesh.clip.limits import GradNorms, Limits
from muonmesh.clip.squares import ERRORS, Slots, matrices_from
from muonmesh.comm.storage import device_without_parameters, local_of
from muonmesh.comm.telling import tell_all
from muonmesh.errors import LayoutError, PlanError, StateError, about, explain_error
from muonmesh.integrations.megatron import checkpoint
from muonmesh.integrations.megatron.sharded_master import ShardedMaster
from muonmesh.names import canonical_name
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.step.connection import connect, placed_members
from muonmesh.step.runtime import Clip


class Holding(NamedTuple):
    """One parameter of this rank.

    Attributes:
        name: In the whole model.
        saved: By which checkpoints know it: of the last stage's copy of a tied embedding the embedding's.
        copy: Number of this copy of it, of those on several stages.
        parameter: Megatron's.
        tensor: What is stepped: the parameter, or what this rank keeps of it as a view of its memory.
        low: The first of the flattened parameter's elements that it is.
        only: Whether this is all that is stepped of the parameter here; False for an expert of a GroupedMLP.
        resizes: Whether a checkpoint may hold it with other many rows, as `SavedBox` has it.
    """

    name: str
    saved: str
    copy: int
    parameter: Tensor
    tensor: Tensor
    low: int
    only: bool
    resizes: bool


class MegatronOptimizer(Base, OfMuon):  # type: ignore[misc]
    """Muon and AdamW in one, of dense parameters and of experts.

    Megatron calls `step` once an iteration, after it has reduced the gradients into ``main_grad``: they are unscaled,
    measured over the world (a tied embedding once), clipped as ``policy`` says, and stepped; with the distributed
    optimizer the parameters are gathered then. Gradients are read where they are and never copied.

    Attributes:
        optimizer: The `muonmesh.Muon` behind it.
        chained_optimizers: This one alone: nothing is chained.
        is_stub_optimizer: False.
        grad_norms_by_group: The norms of the last step's gradients that have one of their own (``grad_norm_group`` of
            parameters, "mtp"), which the others leave out.
    """

    optimizer: Muon

    def __init__(
        self,
        optimizer: Muon,
        config: Any,
        chunks: list[Any],
        holdings: Sequence[Holding],
        groups: Any,
        limits: Limits,
    ) -> None:
        Base.__init__(self, optimizer, config)
        OfMuon.__init__(self, optimizer)
        self.model_chunks = chunks
        self.is_stub_optimizer = False
        self.chained_optimizers = [self]
        self.grad_norms_by_group: dict[str, Tensor] = {}
        self._holdings = tuple(holdings)
        self._groups, self.limits = groups, limits
        tensors = (*(h.parameter for h in holdings), *(p for chunk in chunks for p in chunk.parameters()))
        self._device = next((tensor.device for tensor in tensors), None) or device_without_parameters()
        self._one = torch.ones(1, dtype=torch.float32, device=self._device)
        self._measures = True  # whether a step asks for a norm; `meet` hears whether anything is clipped by one
        self._first_holder: dict[str, int] = {}
        self._slots: Slots | None = None  # where one sum over the world has the matrices of this stage
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

    def meet(self, everyone: Sequence[tuple[Limits, Sequence[tuple[str, str]]]]) -> None:
        """Compare plans; all ranks call it once.

        Args:
            everyone: Of each rank the limits, and of its groups with parameters the names and algorithms.

        Raises:
            LayoutError, PlanError: on every rank, where the ranks that share parameters do not see them alike.
            ValueError: on every rank, if some are to clip otherwise than others.
        """
        limits = everyone[0][0]
        for rank, (other, groups) in enumerate(everyone):
            if other != limits:
                found, needed = f"{limits} on rank 0 and {other} on rank {rank}", "the same on all ranks"
                write = "Pass the same clip_grad and policy= everywhere"
                raise ValueError(explain_error("get_megatron_optimizer", found, needed, write))
            for name, _ in groups:
                self._first_holder.setdefault(name, rank)
        clipped = limits.policy != "adamw_only" or any(kind == "adamw" for _, some in everyone for _, kind in some)
        self._measures = clipped and min(limits.max_norm, limits.skip_above) < math.inf

        settled(lambda: connect(self.optimizer.param_groups, self.runtime), kind=PlanError)  # each set of ranks
        if self._measures and limits.policy == "per_matrix" and self._groups.pp.size() > 1:
            self._place_matrices()

    def _place_matrices(self) -> None:
        """Hear how many matrices each set of ranks has, which its first rank names; all ranks of the world call it."""
        assert self.runtime.connected is not None
        planned, exchange = self.runtime.connected
        me = exchange.plan.ranks[0]
        counts = dict(tell_all((me, len(planned.plan.assignments))))
        self._slots = Slots(planned, sum(counts[rank] for rank in counts if rank < me), sum(counts.values()))

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Take the loss scale out of the gradients, in place; return whether any rank has overflowed."""
        if self.grad_scaler is None:
            return False
        gradients: list[Tensor] = []
        with suppress(LayoutError):  # a parameter without main_grad, for which the step raises on every rank
            held = [self.optimizer.gradients.gradient(holding.tensor) for holding in self._holdings]
            gradients = [gradient for gradient in held if gradient is not None and gradient.numel()]
        overflow = torch.zeros(1, dtype=torch.float32, device=self._device)
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self.grad_scaler.inv_scale)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        found = bool(overflow)
        self.grad_scaler.update(found)
        return found

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Take one step; all ranks of the world call it.

        Returns:
            Whether anything was changed, the norm of all gradients before clipping (None if nothing is clipped by one,
            and so none is measured), and how many elements of them are zero (None unless ``log_num_zeros_in_grad``).

        Raises:
            LayoutError, PlanError, ValueError: on every rank, before anything is written.
        """
        if self.prepare_grads():
            return False, None, None
        norm = self._step(clips=self._measures)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        self._publish()
        return not self.optimizer.skipped, norm, zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step without clipping, for loops that have done that themselves."""
        self._step(clips=False)
        self._publish()
        return True

    def _step(self, *, clips: bool) -> float | None:
        """Clip if asked for, and step; return the norm.

        Where there are several stages, one sum over the world measures and says whether a rank has found an error. A
        stage would wait for the activations of one that raises alone. So each stage reads and compares all that a step
        needs first, and writes after it.
        """
        norms = list[GradNorms]()
        if self._groups.pp.size() > 1:
            self.runtime.everywhere = lambda raises: self._meet_stages(norms, clips=clips, raises=raises)
        elif clips:
            norms.append(self.optimizer.clip_grad_norm_(**asdict(self.limits), process_group="world"))
        try:
            self.optimizer.step()
        finally:
            self.runtime.everywhere = None
        if not norms:
            return None
        self.grad_norms_by_group = dict(norms[0].apart)
        return float(norms[0])

    def _meet_stages(self, norms: list[GradNorms], *, clips: bool, raises: bool) -> Clip | None:
        """Be `Runtime.everywhere`, in one all-reduce over the world.

        Raises:
            LayoutError, TypeError: a gradient of this rank cannot be measured.
            PlanError: another rank found an error, and this one does not raise already.
        """
        muon, runtime = self.optimizer, self.runtime
        if clips and not raises:
            assert runtime.connected is not None
            try:
                world, slots = dist.group.WORLD, self._slots
                found, clip = clip_gradients(runtime.connected, muon, None, self.limits, runtime, world, slots)
            except PlanAgain:  # some stage has other matrices than it has told
                self._place_matrices()
                return self._meet_stages(norms, clips=clips, raises=raises)
            norms.append(found)
            return clip
        # As long as what `clip_gradients` adds up on other stages.
        length = matrices_from(muon.gradients) + (0 if self._slots is None else self._slots.total)
        told = torch.zeros(length, dtype=torch.float64, device=self._device)
        told[ERRORS] = raises
        dist.all_reduce(told)
        if not raises and float(told[ERRORS]):
            what = "Another rank found an error, so every rank stops. Read the message of that rank"
            raise PlanError(about("step", what))
        return None

    def _publish(self) -> None:
        """Let the modules compute with the parameters as they are now."""
        flat = self.config.use_distributed_optimizer
        clips = flat and any(chunk.config.qk_clip for chunk in self.model_chunks)
        for holding in self._holdings:
            master = self.optimizer.state[holding.tensor].get("master")
            # Megatron's log of the parameters' norm reads it there; of several experts in one parameter, and of masters
            # on the host, it reads the parameter.
            if master is not None and holding.only and (kept := local_of(master)).device == holding.tensor.device:
                kept = ShardedMaster.of(kept, holding.parameter, holding.low) if clips else kept
                holding.parameter.main_param = kept  # type: ignore[attr-defined]
                holding.parameter.main_param_sharded = flat  # type: ignore[attr-defined]
        if flat:
            for chunk in self.model_chunks:
                if not chunk.ddp_config.overlap_param_gather:  # else the next forward pass gathers them
                    chunk.start_param_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what autograd left in ``grad``, and what clipping decided.

        ``main_grad`` is left alone, as by Megatron's own optimizers: ``zero_grad_buffer`` of each chunk zeroes it.
        """
        for holding in self._holdings:
            holding.parameter.grad = None
        self.optimizer.zero_grad()

    # ---------------------------------------------------------------- what loops ask

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the norm of all gradients over the world, a tied embedding once; all ranks call it."""
        return float(self.optimizer.clip_grad_norm_(float("inf"), process_group="world"))

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip by another norm than ``config.clip_grad``, as the policy says; return the norm of all gradients."""
        return float(self.optimizer.clip_grad_norm_(clip_grad, policy=self.limits.policy, process_group="world"))

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return how many elements of the gradients are zero over the world, each counted once; all ranks call it."""
        source = self.optimizer.gradients
        zeros = torch.zeros((), dtype=torch.float64, device=self._device)
        for member in placed_members(self.optimizer):
            gradient = source.gradient(member.tensor)
            if gradient is not None and source.counted(member.tensor):
                zeros += (gradient.numel() - gradient.count_nonzero()) / member.storage.copies
        dist.all_reduce(zeros)
        return round(float(zeros))

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale, (1,)."""
        scale: Tensor = self._one if self.grad_scaler is None else self.grad_scaler.scale
        return scale

    def get_parameters(self) -> list[Tensor]:
        """Return the parameters, those of Megatron's modules."""
        return list(dict.fromkeys(holding.parameter for holding in self._holdings))

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Set the fp32 masters to the model's parameters, which something else than this optimizer has written.

        Raises:
            StateError: ``state_dict`` is given.
        """
        if state_dict is not None:
            found, write = "a state dict to take masters from", "Load the optimizer's state, which has them"
            raise StateError(explain_error("reload_model_params", found, "None", write))
        self.optimizer.finish()
        for holding in self._holdings:
            master = self.optimizer.state[holding.tensor].get("master")
            if master is not None:
                local_of(master).copy_(holding.tensor)

    def explain(self) -> Explanation:
        """Return who goes where and why; ``str()`` of it is a table. No communication."""
        return self.optimizer.explain()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds, for the same run on the same ranks."""
        found: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            found["grad_scaler"] = self.grad_scaler.state_dict()
        return found

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for Megatron's dist_checkpointing, by the parameters' names in the whole model.

        It is the same with DistributedDataParallel and with the distributed optimizer, whatever the sizes of tensor,
        pipeline, data and expert parallelism, so that a checkpoint loads under any others.

        Args:
            model_sharded_state_dict: The model's; not read.
            is_loading: Whether it is to be loaded into: then it holds the groups of this run alone. State that no
                step has created yet is made here either way.
            metadata: Megatron's; not read, since there is one format.
        """
        self.refuse_if_interrupted()
        found: dict[str, Any] = checkpoint.sharded(
            self.optimizer,
            {h.name: (h.saved, h.copy, h.resizes) for h in self._holdings},
            self._first_holder,
            is_loading=is_loading,
        )
        if self.grad_scaler is not None:
            found["grad_scaler"] = self.grad_scaler.state_dict()
        return found

    # ---------------------------------------------------------------- muonmesh.checkpoint

    def checkpoint_records(self) -> list[Record]:
        """Return every parameter of this rank with its state, for `muonmesh.checkpoint`; no communication.

        Raises:
            StateError: modules here number layers or experts otherwise than the whole model, as those of several
                pipeline stages, chunks, or expert-parallel ranks do.
        """
        named = [item for chunk in self.model_chunks for item in chunk.named_parameters()]
        here = {canonical_name(name) for name, parameter in named if parameter.requires_grad}
        wholes = {holding.name for holding in self._holdings}
        if self._groups.pp.size() > 1 or len(self.model_chunks) > 1 or here != wholes:
            stages, chunks = self._groups.pp.size(), len(self.model_chunks)
            found = (
                f"{stages} pipeline stages of {chunks} chunks, or experts on several ranks, which are numbered apart"
            )
            needed = "one stage, one chunk and all experts, whose parameters are called as in the whole model"
            write = "Save with megatron.core.dist_checkpointing and optimizer.sharded_state_dict(...)"
            raise StateError(explain_error("muonmesh.checkpoint of Megatron", found, needed, write))
        return super().checkpoint_records()

    def checkpoint_restored(self) -> None:
        """Take note that weights, state and settings were replaced, and let the modules compute with them."""
        super().checkpoint_restored()
        self._publish()
        if self.config.use_distributed_optimizer and self.model_chunks[0].ddp_config.overlap_param_gather:
            self.model_chunks[0].start_param_sync(force_sync=True)

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which parameters that nobody trains are whole, as far as tensor parallelism leaves them.

        Raises:
            StateError: a frozen parameter is a shard, of which only one rank's would be saved.
        """
        tensor = self._groups.tp.size()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and tensor > 1 and getattr(parameter, "tensor_model_parallel", False):
                found, needed = "a frozen tensor-parallel shard", "the whole of it on every rank, or that it is trained"
                remedy = "Save with megatron.core.dist_checkpointing and optimizer.sharded_state_dict(...)"
                raise StateError(explain_error(name, found, needed, remedy))
        yield

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, or what dist_checkpointing has loaded for `sharded_state_dict`.

        Raises:
            StateError: it is neither, or does not fit.
        """
        if "optimizer" in state_dict:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        else:
            checkpoint.restore(self.optimizer, state_dict)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
