"""Muon: the optimizer. Validate, plan once, run the exchange."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from muonmesh.adamw import adamw_step
from muonmesh.checkpoint import Place, restore_state
from muonmesh.clip import Clip, ClipPolicy, GradNorms, Limits, clip_gradients
from muonmesh.comm.agreement import View, compare, connected, group_of, insist
from muonmesh.comm.exchange import Counts, Exchange
from muonmesh.comm.gradients import gradient_of, partial_axes, unscaled
from muonmesh.comm.storage import Declared, local_of, mesh_groups
from muonmesh.errors import LayoutError
from muonmesh.explain import Explanation, explain, step_size
from muonmesh.flags import Flags
from muonmesh.groups import split_params
from muonmesh.layout import split_matrices
from muonmesh.metrics import measure
from muonmesh.names import canonical_name
from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.newton_schulz import Method
from muonmesh.numerics.rules import AdamWRule, MuonRule
from muonmesh.numerics.scale import ScaleMode
from muonmesh.planning import (
    Member,
    Planned,
    group_for,
    members_of,
    method_of,
    plan_members,
    replicas_of,
    signature_of,
    widened,
)
from muonmesh.preflight import Pending, preflight
from muonmesh.settings import (
    LOST_GROUP,
    LOST_LAYOUTS,
    ExchangeMode,
    ProcessGroup,
    algorithm_of,
    check_dtype,
    check_group,
    check_optimizer,
    check_process_group,
)
from muonmesh.slots import RUNNING, Precision, Slot
from muonmesh.step import MuonStep, Sums


class Muon(torch.optim.Optimizer):
    """Muon on matrices and AdamW on the rest, the same update whatever holds a matrix.

    Muon replaces a matrix's momentum M = UΣVᵀ by about UVᵀ, a whole-matrix operation (K. Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon). Sharded parameters (DTensor) are gathered to one owner each,
    orthogonalised there and scattered back, so that sharding never changes the algorithm: on CPU parameters
    and state are bit for bit those of one process.

    One step: all ranks check their gradients and agree; each updates the momentum it stores; pieces travel to
    the owners, which orthogonalise whole matrices; every rank applies decay and update to what it stores.
    Nothing is written before all ranks agree. A matrix whose gradient is exactly zero on every rank, or missing,
    is left alone: momentum, decay and weights.

    Args:
        params: Param groups, best from `split_params`; or parameters, or (name, parameter) pairs, all of them
            matrices. Keys of a group besides torch's: ``algorithm`` ("muon", the default, or "adamw";
            ``use_muon`` is accepted for it), ``matrices`` (how each parameter splits, see `split_matrices`),
            ``name``, and any of the hyperparameters below.
        lr: Learning rate of both halves. For a Muon matrix, lr × scale is the spectral norm of one step.
        momentum: μ of ``m ← lerp(m, g, 1 − μ)``.
        nesterov: Orthogonalise ``lerp(g, m, μ)`` instead of m.
        weight_decay: Decoupled, for both halves: ``p ← p·(1 − lr·weight_decay)``.
        scale_mode: See `update_scale`. "match_rms_adamw" lets one learning rate serve both halves (Moonlight).
        extra_scale_factor: Multiplies the scale.
        ns_coefficients: Newton–Schulz coefficient set, see `orthogonalize`.
        ns_steps: Newton–Schulz steps.
        ns_method: "auto", "standard" or "gram", see `orthogonalize`.
        adamw_betas: AdamW's decay rates of the moments.
        adamw_eps: AdamW's ε.
        compute_dtype: Dtype of orthogonalisation and wire.
        state_dtype: Dtype of the momentum, kept through ``load_state_dict``.
        master_dtype: ``torch.float32`` keeps fp32 copies of lower-precision parameters in the state.
        process_group: Who holds plain (not DTensor) matrices: "world" or a ProcessGroup under DDP, "local" if
            every rank trains a copy of its own. Required when several ranks run and a Muon group holds one.
        layouts: Where plain local shards live, by name: ``(mesh, placements)`` in DTensor's vocabulary, with the
            global shape as a third entry where shards are uneven; a `FlatShards`; or a list of `FlatParameter` for a
            flat buffer of several parameters. A DTensor needs no entry.
        shard_state: Whether momentum of replicated parameters (DDP, HSDP's replicate axis) is stored sharded over the
            replicas, as DTensors: less memory, the same bits.
        exchange: "owner": whole matrices move to one owner each, which keeps every bit of one process. "gram": for a
            matrix that is cut along its long dim only, the ranks sum the small X Xᵀ instead and each applies the
            result where the matrix lies, in fp32; sums round otherwise then. "auto", or the `Rates` of the machine:
            whichever takes less time.
        bucket_cap_mb: MiB of matrices that one owner computes at a time while the next ones travel.

    Raises:
        ValueError, TypeError: a setting or a group is wrong; the message says what to write.
    """

    # GradScaler then calls `step` whether or not this rank overflowed, so that all ranks skip together.
    _step_supports_amp_scaling = True

    process_group: ProcessGroup
    layouts: dict[str, Declared]
    _planned: Planned | None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = 3e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale_mode: ScaleMode = "match_rms_adamw",
        extra_scale_factor: float = 1.0,
        ns_coefficients: Coefficients = "polar_express",
        ns_steps: int = 5,
        ns_method: Method = "auto",
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        compute_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype | None = None,
        process_group: ProcessGroup = None,
        layouts: Mapping[str, Declared] | None = None,
        shard_state: bool = False,
        exchange: ExchangeMode = "owner",
        bucket_cap_mb: float = 16.0,
    ) -> None:
        check_optimizer(
            compute_dtype=compute_dtype,
            state_dtype=state_dtype,
            master_dtype=master_dtype,
            process_group=process_group,
            layouts=layouts,
            shard_state=shard_state,
            exchange=exchange,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.process_group = process_group
        self.layouts = dict(layouts or {})
        self._shard_state = bool(shard_state)
        self._exchange_mode = exchange
        self._precision = Precision(compute_dtype, state_dtype, master_dtype)
        self._bucket_cap_mb = float(bucket_cap_mb)
        self._reset()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale_mode": scale_mode,
            "extra_scale_factor": extra_scale_factor,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        check_group("Muon", defaults)
        if isinstance(params, nn.Module):
            raise TypeError("params: found a module; needed param groups. Write muonmesh.from_model(model, lr=...)")
        if isinstance(params, (set, frozenset)):  # parameters without names are known by their order
            raise TypeError(
                "params: found a set; needed ordered collections, the same order on every rank. Write a list"
            )
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its keys.

        Raises:
            ValueError: a vector in a Muon group, a parameter twice, a name twice, or a setting out of range.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = dict(param_group)
        held = group["params"]
        pairs = [held] if isinstance(held, Tensor) else held if isinstance(held, set) else list(held)
        group["params"] = pairs
        group["algorithm"] = algorithm_of(group)
        group.setdefault("name", f"group{len(self.param_groups)}")
        if any(other["name"] == group["name"] for other in self.param_groups):
            raise ValueError(
                f"group name: found {group['name']!r} twice; needed unique names. Rename one of the groups"
            )
        seen = [entry[1] if isinstance(entry, tuple) else entry for entry in pairs]
        if len({id(p) for p in seen}) != len(seen):
            raise ValueError(f"group {group['name']!r}: found a parameter twice; needed each once. Remove one of them")
        if not any(isinstance(entry, tuple) for entry in pairs):
            group.setdefault("param_names", [f"{group['name']}.{i}" for i in range(len(seen))])
        super().add_param_group(group)
        try:
            self._validate(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _validate(self, group: dict[str, Any]) -> None:
        group["param_names"] = [canonical_name(name) for name in group["param_names"]]
        names, tensors = group["param_names"], group["params"]
        if len(names) != len(tensors):
            raise ValueError(
                f"group {group['name']!r}: found {len(names)} param_names for {len(tensors)} parameters; needed one "
                "each. Leave param_names out or give all of them"
            )
        check_group(f"group {group['name']!r}", group)
        for name, tensor in zip(names, tensors, strict=True):
            check_dtype(name, tensor.dtype, self._precision.master, group)
        if group["algorithm"] == "adamw":
            return
        specs = group.setdefault("matrices", [None] * len(tensors))
        if not isinstance(specs, (list, tuple)) or len(specs) != len(tensors):
            raise ValueError(
                f"group {group['name']!r}: found matrices={specs!r} for {len(tensors)} parameters; needed a list with "
                'one entry per parameter. Write "matrices": ["whole", ("rows", 768, 768, 768), ...]'
            )
        for name, tensor, spec in zip(names, tensors, specs, strict=True):
            if name in self.layouts:
                continue  # shards: the shape that counts is known with the ranks, at the first step
            matrices = split_matrices(name, tuple(tensor.shape), spec)
            method_of(group, matrices[0].rows, matrices[0].cols, self._precision.compute)

    # ---------------------------------------------------------------- planning

    def _plan(self) -> Planned:
        """Read the layouts and make the plan, if that has not been done for these very parameters; local."""
        planned, _, error = self._read()
        if error is not None:
            raise error
        assert planned is not None
        return planned

    @property
    def members(self) -> list[Member]:
        """All parameters of this rank with where they live; no communication."""
        return self._plan().members

    def _read(self) -> tuple[Planned | None, list[tuple[int, ...]], Exception | None]:
        """Return the plan, the sets of ranks that share a parameter, and what is wrong with them, if anything."""
        replicas = replicas_of(self.process_group)
        signature = signature_of(self.param_groups, self.process_group, self.layouts)
        if self._planned is not None and self._planned.signature == signature:
            return self._planned, [], None
        members, sets, error = members_of(
            self.param_groups, replicas, self.layouts, group_for(self.process_group), shard_state=self._shard_state
        )
        if error is None:
            try:
                self._planned = plan_members(
                    self.param_groups, members, signature, self._precision, self._bucket_cap_mb, self._exchange_mode
                )
            except (LayoutError, ValueError) as found:
                error = found
        return None if error is not None else self._planned, sets, error

    def _connect(self) -> tuple[Planned, Exchange]:
        """Plan, and on first use meet the ranks that share parameters, compare plans and make the exchange.

        A rank that cannot make a plan still takes part in the comparison, so that every rank raises.
        """
        planned, sets, error = self._read()
        if planned is not None and planned.exchange is not None:
            return planned, planned.exchange
        if planned is not None:
            sets = [p.target.ranks for p in planned.plan.parameters] + [o.target.ranks for o in planned.plan.others]
        ranks = connected(sets)
        candidates = mesh_groups([m.storage for m in planned.members]) if planned is not None else []
        if isinstance(self.process_group, dist.ProcessGroup):
            candidates.insert(0, self.process_group)
        group = group_of(ranks, candidates)
        views = compare(group, planned.plan if planned is not None else None, error)
        assert planned is not None
        if views is not None or ranks != planned.plan.ranks:
            views = views or [View(planned.plan.parameters, planned.plan.others)] * len(ranks)
            planned = self._planned = widened(
                planned, views, ranks, self._precision, self._bucket_cap_mb, self._exchange_mode
            )
            insist(group, planned.plan)
        planned.exchange = Exchange(planned.plan, group=group, dtype=self._precision.compute, device=planned.device)
        self._warn_about_rounding(planned)
        return planned, planned.exchange

    def _reset(self) -> None:
        self._planned = None
        self._sums: Sums | None = None
        self._pending: Pending | None = None
        self._clip = Clip()
        self._warned = False
        self._waits: bool | None = None  # whether the host waits for the flags; None: on CPU only

    # ---------------------------------------------------------------- the step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what clipping decided about them."""
        self._clip = Clip()
        super().zero_grad(set_to_none)

    # Whole matrices, flags and collectives are no graph; compiled elementwise operations would round otherwise.
    @_disable_dynamo
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scaler: torch.amp.grad_scaler.GradScaler | None = None
    ) -> Any:
        """Take one step; all ranks that share parameters call it.

        Under a GradScaler all ranks skip if one of them overflowed, and its scale is taken out of the gradients before
        momentum sees them, in fp32, unless ``scaler.unscale_(optimizer)`` has done that.

        Args:
            closure: Evaluates the model and returns the loss, with gradients enabled.
            scaler: The scaler that calls this, ``scaler.step(optimizer, scaler=scaler)``: it is told what the other
                ranks found, so that scales stay equal. DDP and FSDP2 see to that themselves.

        Returns:
            The closure's loss, or None.

        Raises:
            LayoutError, PlanError: on every rank, before anything is written. On CUDA an error that only another
                rank can see is raised at the beginning of the next step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        planned, exchange = self._connect()
        exchange.counts = Counts()
        pending, self._pending = self._pending, None
        clip, self._clip = self._clip, Clip()
        if pending is not None:
            pending.raise_errors(exchange)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        muon, others, adamw, error = self._collect(planned, getattr(self, "grad_scale", None))
        rates = [group["lr"] for group in self.param_groups]
        flags, self._pending = preflight(
            planned,
            exchange,
            muon,
            others,
            error=error or clip.error,
            skip=clip.skip,
            overflow=None if found_inf is None else found_inf != 0,
            at_rest=all(not (isinstance(lr, Tensor) and lr.is_cuda) and float(lr) == 0 for lr in rates),
            waits=self._host_waits(planned),
        )
        if found_inf is not None:
            self._tell(scaler, found_inf, flags.overflow)
        if flags.skip:
            return loss
        if self._sums is not None:
            self._sums = Sums()
        work = MuonStep(
            planned.plan,
            planned.state_holdings,
            muon,
            [None if slot is None else MuonRule.of(self.param_groups[slot.group]) for slot in muon],
            flags,
            self._precision,
            device=planned.device,
            meanwhile=lambda: self._step_adamw(adamw, flags),
            sums=self._sums,
        )
        exchange.run(work)
        work.finish()
        for tensor, fresh in clip.running:
            for key, value in zip(RUNNING, fresh, strict=True):
                kept = self.state[tensor].get(key)
                if kept is not None:  # else no rank has ever had a gradient
                    value = value.view_as(kept)
                    kept.copy_(value if flags.stop is None else torch.where(flags.stop, kept, value))
        return loss

    def _host_waits(self, planned: Planned) -> bool:
        return planned.device.type == "cpu" if self._waits is None else self._waits

    def _tell(self, scaler: torch.amp.grad_scaler.GradScaler | None, found_inf: Tensor, overflow: Tensor) -> None:
        """Tell the scaler whether any rank overflowed; warn if it cannot be told and its scale will differ."""
        if scaler is not None:
            for found in scaler._found_inf_per_device(self).values():
                found.copy_(overflow)
        elif overflow.device.type == "cpu" and bool(overflow) and not bool(found_inf):
            warnings.warn(
                "GradScaler: found an overflow on another rank only; all ranks skip, but their loss scales differ from "
                "now on. Write scaler.step(optimizer, scaler=scaler)",
                stacklevel=4,
            )

    def _collect(
        self, planned: Planned, scale: Tensor | None
    ) -> tuple[list[Slot | None], list[Slot | None], list[list[Slot]], Exception | None]:
        """Read every gradient: of the Muon half, of AdamW's that other ranks know of, and of each AdamW group.

        An error is kept, so that this rank takes part in what others wait for.
        """
        error: Exception | None = None
        slots: dict[int, Slot] = {}

        def slot(member: Member | None) -> Slot | None:
            nonlocal error
            if member is None:
                return None
            gradient = None
            try:
                gradient = gradient_of(member.name, member.tensor)
            except (LayoutError, TypeError) as found:
                error = error or found
            if gradient is not None and scale is not None:
                gradient = unscaled(gradient, scale)
            if gradient is not None and not any(partial_axes(gradient)):
                gradient = gradient.contiguous()
            slots[id(member)] = Slot(
                member.name,
                member.tensor,
                self.state[member.tensor],
                gradient,
                member.group,
                member.storage,
                member.state,
                len(planned.matrices_of.get(member.tensor, ())),
            )
            return slots[id(member)]

        muon, others = [slot(member) for member in planned.muon], [slot(member) for member in planned.others]
        adamw: list[list[Slot]] = []
        for members in planned.adamw:
            tensors = {id(member.tensor): member for member in members}  # a flat buffer is stepped once
            adamw.append([slots.get(id(m)) or slot(m) for m in tensors.values()])  # type: ignore[misc]
        return muon, others, adamw, error

    def _step_adamw(self, adamw: Sequence[Sequence[Slot]], flags: Flags) -> None:
        for slots in adamw:
            if not slots:
                continue
            group = self.param_groups[slots[0].group]
            before = [local_of(slot.tensor).double() for slot in slots] if self._sums is not None else []
            adamw_step(slots, AdamWRule.of(group), self._precision, flags)
            for slot, old in zip(slots, before, strict=False):
                assert self._sums is not None
                moved = local_of(slot.tensor).double() - old * (1 - group["lr"] * group["weight_decay"])
                self._sums.add(slot.group, moved.square().sum() / slot.storage.copies)

    def _warn_about_rounding(self, planned: Planned) -> None:
        """Warn once if low-precision weights without masters would swallow typical steps."""
        if self._warned or self._precision.master is not None:
            return
        self._warned = True
        for member, parameter in zip(planned.muon, planned.plan.parameters, strict=True):
            if member is None:
                continue
            local = local_of(member.tensor).detach()
            if local.dtype not in (torch.bfloat16, torch.float16) or not local.numel():
                continue
            size = step_size(self.param_groups[member.group], parameter.matrices[0].rows, parameter.matrices[0].cols)
            moved = (local.float() + size.rms).to(local.dtype) != local
            share = 1 - float(moved.float().mean())
            warnings.warn(
                f"{member.name} and perhaps others are {local.dtype} without masters: a typical step of RMS "
                f"{size.rms:.1e} leaves {share:.0%} of its entries unchanged by rounding. Write "
                "Muon(..., master_dtype=torch.float32) to keep fp32 copies in the optimizer state",
                stacklevel=3,
            )
            return

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        policy: ClipPolicy = "adamw_only",
        skip_above: float = math.inf,
        norms: bool = True,
        norm_type: float = 2.0,
        process_group: ProcessGroup = None,
    ) -> GradNorms:
        """Clip the gradients by their norm over all ranks; all ranks call it, before ``step``.

        Muon's direction has no magnitude, so a factor on its gradients only changes the weight of this step inside
        the momentum; by default they are measured and left alone (Megatron-LM pull request 5395).

        Args:
            max_norm: Largest norm; inf only measures.
            policy: "adamw_only": the AdamW groups, by their own norm. "all": everything by the total norm, as
                ``torch.nn.utils.clip_grad_norm_``. "separate": each half by its own norm. "per_matrix": AdamW's half
                as in "adamw_only", and the gradient of each of Muon's matrices is limited to ``max_norm`` times its
                own running norm, a mean over about twenty gradients that is kept in the state; the first ten
                gradients of a matrix are only measured (see `muonmesh.clip`).
            skip_above: The next step changes nothing, on any rank, if a norm by which the policy clips is above this,
                or if anything measured is not finite. The host need not wait for that: weights, momentum and step
                counters stay as they are bit for bit.
            norms: False leaves out the norms that the policy does not need; a non-finite gradient of Muon's half is
                then seen only by policies that measure it, or with ``skip_above``.
            norm_type: 2, the only one there is.
            process_group: Ranks of optimizers that share no parameter, such as pipeline stages, to be clipped by a
                common norm: "world", or a group that holds this rank and at least one of each other stage. "local" and
                None: no others.

        Returns:
            The norms before clipping, and whether the next step is skipped.

        Raises:
            ValueError: an argument is out of range or unknown.
            LayoutError, TypeError: a gradient lives elsewhere than its parameter, or is sparse. On CUDA it is raised
                by ``step``.
            PlanError: on the other ranks then.
        """
        check_process_group(process_group)
        planned, exchange = self._connect()
        limits = Limits(max_norm, policy, skip_above, norms, norm_type)
        waits = self._host_waits(planned)
        found, self._clip = clip_gradients(
            planned,
            self.param_groups,
            self.state,
            exchange,
            limits,
            process_group=group_for(process_group),
            waits=waits,
        )
        return found

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings; the momentum keeps ``state_dtype``, whatever the parameter's dtype.

        Raises:
            StateError: the state is of another layout, algorithm or splitting than this optimizer's parameters;
                nothing has been loaded.
        """
        planned = self._plan()
        places = {
            member.tensor: Place(member.storage, member.state, len(planned.matrices_of.get(member.tensor, ())))
            for member in planned.members
        }
        restore_state(self, state_dict, self._precision, places, super().load_state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is read off the parameters again; a ProcessGroup cannot be pickled."""
        group = self.process_group
        return {
            **super().__getstate__(),
            "process_group": LOST_GROUP if isinstance(group, dist.ProcessGroup) else group,
            "layouts": LOST_LAYOUTS if self.layouts else {},
            "_shard_state": self._shard_state,
            "_exchange_mode": self._exchange_mode,
            "_precision": self._precision,
            "_bucket_cap_mb": self._bucket_cap_mb,
            "_warned": self._warned,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_precision" in state:  # unpickled, not `load_state_dict`
            self._reset()
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """A copy with parameters and state of its own, and the same ProcessGroup."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.process_group, twin.layouts = self.process_group, self.layouts
        return twin

    # ---------------------------------------------------------------- telling

    @property
    def communication_seconds(self) -> float:
        """Host seconds that the last step spent waiting for other ranks; on CUDA streams wait, not the host."""
        return self.counts.seconds_waiting

    @property
    def counts(self) -> Counts:
        """What the last step did on this rank; `explain` says what it should be."""
        exchange = self._planned.exchange if self._planned is not None else None
        return exchange.counts if exchange is not None else Counts()

    def explain(self) -> Explanation:
        """Return who goes where and why, with the size of a step; ``str()`` of it is a table. No communication."""
        planned = self._plan()
        return explain(self.param_groups, planned, self._precision.compute.itemsize)

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step for any logger, by group; all ranks call it, since shards are summed.

        ``<group>/gradient_rms``, ``<group>/momentum_rms`` (the first moment of AdamW), ``<group>/update_rms`` (without
        decay) and ``<group>/update_to_weight`` (ratio of norms). Call it after ``step`` and before ``zero_grad``. The
        update is recorded from the first call on, so the last two appear after the following step.
        """
        planned, exchange = self._connect()
        sums, self._sums = self._sums, self._sums or Sums()
        return measure(planned.members, self.param_groups, self.state, sums, exchange, planned.device)


def from_model(model: nn.Module, lr: float | Tensor = 3e-4, **settings: Any) -> Muon:
    """Return ``Muon(split_params(model), lr=lr, ...)``: the line that replaces ``AdamW(model.parameters(), lr=lr)``.

    Args:
        model: Any module, sharded or not.
        lr: Learning rate of both halves.
        settings: Further arguments of `Muon`.
    """
    return Muon(split_params(model), lr, **settings)
