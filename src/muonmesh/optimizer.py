"""Muon: the optimizer. Validate, plan once, run the exchange."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonmesh.checkpoint import restore_state
from muonmesh.clip import ClipPolicy, GradNorms, clip_gradients
from muonmesh.comm.exchange import Counts, Exchange, compare, group_of
from muonmesh.comm.storage import (
    Signature,
    connected_ranks,
    copies_of,
    gradient_of,
    layout_of,
    local_of,
    mesh_groups,
    this_rank,
    world_size,
)
from muonmesh.errors import LayoutError, PlanError, explain_error
from muonmesh.explain import Explanation, explain, step_size
from muonmesh.groups import split_params
from muonmesh.layout import Parameter, Plan, cost, make_plan, split_matrices
from muonmesh.metrics import measure
from muonmesh.names import canonical_name
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.newton_schulz import resolve_method
from muonmesh.numerics.rules import Rule
from muonmesh.numerics.scale import update_scale
from muonmesh.step import (
    Flags,
    Holdings,
    MuonStep,
    Precision,
    Slot,
    Sums,
    adamw_step,
    holdings_of,
    nonzero_on_device,
    nonzero_on_host,
)

Algorithm = Literal["muon", "adamw"]
ProcessGroup = Literal["world", "local"] | dist.ProcessGroup | None

_COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
_LOST_GROUP = "a ProcessGroup that cannot be pickled"


@dataclass(frozen=True)
class _Member:
    """One parameter with what its group says of it."""

    name: str
    tensor: Tensor
    group: int
    spec: Any


@dataclass
class _Resolved:
    """What was read off the parameters at the first step, valid while their signatures stay the same."""

    signature: object
    muon: tuple[_Member, ...]
    adamw: tuple[tuple[_Member, ...], ...]
    plan: Plan
    rank: int
    holdings: Holdings
    device: torch.device
    exchange: Exchange | None = None


@dataclass
class _Pending:
    """Flags on their way to a host that does not wait for them."""

    flags: Tensor
    arrived: torch.cuda.Event | None
    error: Exception | None

    @staticmethod
    def start(flags: Tensor, error: Exception | None) -> _Pending:
        if not flags.is_cuda:
            return _Pending(flags.clone(), None, error)
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Pending(host, arrived, error)

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        flags: list[int] = self.flags.tolist()
        return flags


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
        layouts: Declared layouts of plain local shards; None in this version.
        shard_state: Momentum of replicated parameters sharded over the replicas; False in this version.
        exchange: "owner": whole matrices move to one owner each.
        bucket_cap_mb: MiB of matrices that one owner computes at a time while the next ones travel.

    Raises:
        ValueError, TypeError: a setting or a group is wrong; the message says what to write.
    """

    process_group: ProcessGroup
    _resolved: _Resolved | None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = 3e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale_mode: str = "match_rms_adamw",
        extra_scale_factor: float = 1.0,
        ns_coefficients: Any = "polar_express",
        ns_steps: int = 5,
        ns_method: str = "auto",
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        compute_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype | None = None,
        process_group: ProcessGroup = None,
        layouts: Mapping[str, Any] | None = None,
        shard_state: bool = False,
        exchange: Literal["owner"] = "owner",
        bucket_cap_mb: float = 16.0,
    ) -> None:
        if layouts is not None or shard_state or exchange != "owner":
            raise ValueError(
                f"found layouts={layouts!r}, shard_state={shard_state!r}, exchange={exchange!r}; needed None, False "
                'and "owner": this version supports one process, DDP and FSDP2. Leave these arguments out'
            )
        _check(compute_dtype in _COMPUTE_DTYPES, "compute_dtype", compute_dtype, "a float dtype such as torch.bfloat16")
        _check(_is_float(state_dtype), "state_dtype", state_dtype, "a float dtype such as torch.float32")
        _check(master_dtype is None or _is_float(master_dtype), "master_dtype", master_dtype, "None or torch.float32")
        _check(
            process_group in ("world", "local", None) or isinstance(process_group, dist.ProcessGroup),
            "process_group",
            process_group,
            '"world", "local", a ProcessGroup or None',
        )
        _check(_is_number(bucket_cap_mb) and bucket_cap_mb > 0, "bucket_cap_mb", bucket_cap_mb, "a positive number")
        self.process_group = process_group
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
        _check_settings("Muon", defaults)
        if isinstance(params, nn.Module):
            raise TypeError("params: found a module; needed param groups. Write muonmesh.from_model(model, lr=...)")
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its keys.

        Raises:
            ValueError: a vector in a Muon group, a parameter twice, a name twice, or a setting out of range.
        """
        group = dict(param_group)
        held = group["params"]
        pairs = [held] if isinstance(held, Tensor) else held if isinstance(held, set) else list(held)
        group["params"] = pairs
        group["algorithm"] = _algorithm(group)
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
        _check_settings(f"group {group['name']!r}", group)
        for name, tensor in zip(names, tensors, strict=True):
            if not tensor.is_floating_point():
                found = f"dtype {tensor.dtype}"
                raise TypeError(explain_error(name, found, "a real floating-point parameter", "Leave it out"))
        if group["algorithm"] == "adamw":
            return
        specs = group.setdefault("matrices", [None] * len(tensors))
        if not isinstance(specs, (list, tuple)) or len(specs) != len(tensors):
            raise ValueError(
                f"group {group['name']!r}: found matrices={specs!r} for {len(tensors)} parameters; needed a list with "
                'one entry per parameter. Write "matrices": ["whole", ("rows", 768, 768, 768), ...]'
            )
        for name, tensor, spec in zip(names, tensors, specs, strict=True):
            matrices = split_matrices(name, tuple(tensor.shape), spec)
            self._method(group, matrices[0].rows, matrices[0].cols)

    def _method(self, group: Mapping[str, Any], rows: int, cols: int) -> Literal["standard", "gram"]:
        return resolve_method(
            rows,
            cols,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            method=group["ns_method"],
            dtype=self._precision.compute,
        )

    def _members(self) -> list[_Member]:
        return [
            _Member(name, tensor, number, (group.get("matrices") or [None] * len(group["params"]))[i])
            for number, group in enumerate(self.param_groups)
            for i, (name, tensor) in enumerate(zip(group["param_names"], group["params"], strict=True))
        ]

    # ---------------------------------------------------------------- planning

    def _replicas(self) -> tuple[int, ...] | None:
        """Return the ranks that hold plain tensors whole, as ``process_group`` says."""
        group = self.process_group
        if group == _LOST_GROUP:
            raise ValueError(
                "process_group: found an optimizer that was unpickled without its ProcessGroup, which cannot be "
                "pickled; needed it again. Write optimizer.process_group = group before the first step"
            )
        if group == "local" or (group is not None and world_size() == 1):
            return (this_rank(),)
        if group == "world":
            return tuple(range(world_size()))
        if isinstance(group, dist.ProcessGroup):
            ranks = tuple(dist.get_process_group_ranks(group))
            if this_rank() not in ranks:
                raise ValueError(
                    f"process_group: found ranks {ranks}; needed a group that rank {this_rank()} belongs to"
                )
            return ranks
        return None

    def _resolve(self) -> _Resolved:
        """Read the layouts and make the plan, if that has not been done for these very parameters; local."""
        members = self._members()
        signature = (
            self.process_group,
            tuple((member.group, Signature.of(member.tensor)) for member in members),
            tuple(
                (str(group["ns_coefficients"]), group["ns_steps"], group["ns_method"], id(group.get("matrices")))
                for group in self.param_groups
            ),
        )
        if self._resolved is None or self._resolved.signature != signature:
            self._resolved = self._make_plan(members, signature)
        return self._resolved

    def _make_plan(self, members: Sequence[_Member], signature: object) -> _Resolved:
        replicas = self._replicas()
        muon = tuple(m for m in members if self.param_groups[m.group]["algorithm"] == "muon")
        devices = {member.tensor.device for member in muon}
        if len(devices) > 1:
            raise LayoutError(f"found Muon parameters on {sorted(map(str, devices))}; needed one device per process")
        parameters = []
        for member in muon:
            group = self.param_groups[member.group]
            layout = layout_of(member.name, member.tensor, replicas)
            matrices = split_matrices(member.name, tuple(member.tensor.shape), member.spec)
            degrees = [len(step) for step in coefficient_schedule(group["ns_coefficients"], group["ns_steps"])]
            flops = tuple(
                cost(m.rows, m.cols, degrees=degrees, gram=self._method(group, m.rows, m.cols) == "gram")
                for m in matrices
            )
            dtype = self._precision.compute
            settings = f"{group['ns_coefficients']}, {group['ns_steps']} steps, {group['ns_method']}, {dtype}"
            parameters.append(Parameter(member.name, layout, layout, matrices, flops, settings))
        plan = make_plan(
            parameters,
            ranks=connected_ranks([member.tensor for member in members], replicas),
            bucket_elements=max(1, int(self._bucket_cap_mb * 2**20 / self._precision.compute.itemsize)),
        )
        adamw: list[list[_Member]] = [[] for _ in self.param_groups]
        for member in members:
            if self.param_groups[member.group]["algorithm"] == "adamw":
                adamw[member.group].append(member)
        rank = this_rank()
        device = (muon[0] if muon else members[0]).tensor.device
        return _Resolved(signature, muon, tuple(map(tuple, adamw)), plan, rank, holdings_of(plan, rank), device)

    def _connect(self) -> _Resolved:
        """Resolve, and on first use compare the plan between the ranks and build the exchange.

        A rank that cannot make a plan still takes part in the comparison, so that every rank raises.
        """
        if self._resolved is not None and self._resolved.exchange is not None:
            with contextlib.suppress(LayoutError, ValueError):
                if self._resolve().exchange is not None:
                    return self._resolved
        tensors = [member.tensor for member in self._members()]
        candidates = [*mesh_groups(tensors)]
        if isinstance(self.process_group, dist.ProcessGroup):
            candidates.insert(0, self.process_group)
        group = group_of(connected_ranks(tensors, self._replicas()), candidates)
        try:
            resolved = self._resolve()
        except (LayoutError, ValueError) as error:
            if group is not None:
                with contextlib.suppress(PlanError):
                    compare(group, None, str(error))
            raise
        compare(group, resolved.plan, None)
        dtype, device = self._precision.compute, resolved.device
        resolved.exchange = Exchange(resolved.plan, group=group, dtype=dtype, device=device)
        self._warn_about_rounding(resolved)
        return resolved

    def _reset(self) -> None:
        self._resolved = None
        self._sums: Sums | None = None
        self._pending: _Pending | None = None
        self._warned = False
        self._wait_for_flags: bool | None = None  # None: wait on CPU only

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; all ranks that share parameters call it.

        Args:
            closure: Evaluates the model and returns the loss, with gradients enabled.

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
        resolved = self._connect()
        exchange = resolved.exchange
        assert exchange is not None
        exchange.counts = Counts()
        self._raise_pending(exchange)
        error, muon, adamw = self._collect(resolved)
        flags = self._preflight(resolved, exchange, error, muon, adamw)
        if self._sums is not None:
            self._sums = Sums()

        def step_adamw() -> None:
            for slots in adamw:
                if slots:
                    self._step_adamw(slots, flags)

        work = MuonStep(
            resolved.plan,
            resolved.holdings,
            muon,
            [self._rule(self.param_groups[slot.group]) for slot in muon],
            flags,
            self._precision,
            "auto",
            step_adamw,
            self._sums,
        )
        exchange.run(work)
        work.finish()
        return loss

    def _collect(self, resolved: _Resolved) -> tuple[Exception | None, list[Slot], list[list[Slot]]]:
        """Read every gradient; an error is kept, so that this rank takes part in what others wait for."""
        error: Exception | None = None

        def slot(member: _Member) -> Slot:
            nonlocal error
            gradient = None
            try:
                gradient = gradient_of(member.name, member.tensor)
            except (LayoutError, TypeError) as found:
                error = error or found
            if gradient is not None:
                gradient = gradient.contiguous()
            return Slot(member.name, member.tensor, self.state[member.tensor], gradient, member.group)

        muon = [slot(member) for member in resolved.muon]
        adamw = [[slot(member) for member in members] for members in resolved.adamw]
        return error, muon, adamw

    def _preflight(
        self,
        resolved: _Resolved,
        exchange: Exchange,
        error: Exception | None,
        muon: Sequence[Slot],
        adamw: Sequence[Sequence[Slot]],
    ) -> Flags:
        """Agree with all ranks on what has a gradient and whether anybody found an error."""
        plan, device = resolved.plan, resolved.device
        rates = [group["lr"] for group in self.param_groups]
        creating = all(not (isinstance(lr, Tensor) and lr.is_cuda) and float(lr) == 0 for lr in rates)
        waits = creating or (device.type == "cpu" if self._wait_for_flags is None else self._wait_for_flags)
        gradients = [slot.gradient for slots in adamw for slot in slots if slot.gradient is not None]
        tail = [
            *(int(slot.gradient is not None) for slot in muon),
            *(int(slot.gradient is None) for slot in muon),
            int(creating and any(bool(gradient.any()) for gradient in gradients)),
            int(error is not None),
        ]
        if waits:
            nonzero = torch.tensor(nonzero_on_host(plan, resolved.holdings, muon), dtype=torch.uint8, device=device)
        else:
            nonzero = nonzero_on_device(plan, resolved.holdings, muon, device)
        flags = torch.cat([nonzero, torch.tensor(tail, dtype=torch.uint8).to(device, non_blocking=True)])
        exchange.reduce_flags(flags)
        if waits:
            found = flags.tolist()
            self._check_flags(exchange, found, error)
            matrices = len(plan.assignments)
            present = [bool(flag) for flag in found[matrices : matrices + len(muon)]]
            return Flags([bool(flag) for flag in found[:matrices]], present, creating and not found[-2])
        stop = self._stop(plan, flags)
        active = (flags[: len(plan.assignments)] != 0) & ~stop
        self._pending = _Pending.start(flags, error)
        return Flags(list(active.unbind()), [slot.gradient is not None for slot in muon], stop=stop)

    def _stop(self, plan: Plan, flags: Tensor) -> Tensor:
        """Return on the device what `_check_flags` would raise for."""
        matrices, count = len(plan.assignments), len(plan.parameters)
        present, missing = flags[matrices : matrices + count], flags[matrices + count : matrices + 2 * count]
        copies = [parameter.target.copies() > 1 for parameter in plan.parameters]
        replicated = torch.tensor(copies, dtype=torch.uint8).to(flags.device, non_blocking=True)
        return (flags[-1] != 0) | (present & missing & replicated).any()

    def _check_flags(self, exchange: Exchange, flags: Sequence[int], error: Exception | None) -> None:
        """Raise on every rank if any rank found an error, or a replica lacks a gradient that others have."""
        plan = exchange.plan
        if flags[-1]:
            self._raise_everywhere(exchange, error)
        matrices, count = len(plan.assignments), len(plan.parameters)
        for number, parameter in enumerate(plan.parameters):
            if flags[matrices + number] and flags[matrices + count + number] and parameter.target.copies() > 1:
                raise PlanError(
                    explain_error(
                        parameter.name,
                        f"a gradient on some of the ranks {parameter.target.ranks} and none on others",
                        "one on every replica or on none, since replicas would drift apart",
                        "Let DDP handle parameters that some ranks do not use (find_unused_parameters=True)",
                    )
                )

    def _raise_pending(self, exchange: Exchange) -> None:
        """Raise what the last step's flags said, where the host did not wait for them."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._check_flags(exchange, pending.read(), pending.error)

    def _raise_everywhere(self, exchange: Exchange, error: Exception | None) -> None:
        """Raise on every rank: its own error where there is one, elsewhere a PlanError that names the rank."""
        try:
            compare(exchange.group, exchange.plan, None if error is None else str(error))
        except PlanError:
            if error is not None:
                raise error from None
            raise

    def _step_adamw(self, slots: Sequence[Slot], flags: Flags) -> None:
        group = self.param_groups[slots[0].group]
        before = None
        if self._sums is not None:
            before = [local_of(slot.tensor).double() for slot in slots]
        adamw_step(slots, group, self._precision, flags)
        if self._sums is not None and before is not None:
            for slot, old in zip(slots, before, strict=True):
                moved = local_of(slot.tensor).double() - old * (1 - group["lr"] * group["weight_decay"])
                self._sums.add(slot.group, moved.square().sum() / copies_of(slot.tensor, self._replicas()))

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return Rule(
            lr=group["lr"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            scale_mode=group["scale_mode"],
            extra_scale_factor=group["extra_scale_factor"],
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            method=group["ns_method"],
        )

    def _warn_about_rounding(self, resolved: _Resolved) -> None:
        """Warn once if low-precision weights without masters would swallow typical steps."""
        if self._warned or self._precision.master is not None:
            return
        self._warned = True
        for member, parameter in zip(resolved.muon, resolved.plan.parameters, strict=True):
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

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, policy: ClipPolicy = "adamw_only", norms: bool = True) -> GradNorms:
        """Clip the gradients by their norm over all ranks; all ranks call it, before ``step``.

        Muon's direction has no magnitude, so a factor on its gradients only changes the weight of this step inside
        the momentum; by default they are measured and left alone.

        Args:
            max_norm: Largest norm; inf only measures.
            policy: "adamw_only": the AdamW groups, by their own norm. "all": everything by the total norm, as
                ``torch.nn.utils.clip_grad_norm_``. "separate": each half by its own norm.
            norms: False leaves out the norms that the policy does not need.

        Raises:
            ValueError: max_norm is negative or NaN, or the policy is unknown.
        """
        resolved = self._connect()
        assert resolved.exchange is not None
        replicas = self._replicas()
        return clip_gradients(self.param_groups, replicas, resolved.exchange, max_norm, policy=policy, norms=norms)

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings; the momentum keeps ``state_dtype``, whatever the parameter's dtype.

        Raises:
            StateError: the state is of another layout, algorithm or splitting than this optimizer's parameters;
                nothing has been loaded.
        """
        restore_state(self, state_dict, self._precision, super().load_state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is read off the parameters again; a ProcessGroup cannot be pickled."""
        group = self.process_group
        return {
            **super().__getstate__(),
            "process_group": _LOST_GROUP if isinstance(group, dist.ProcessGroup) else group,
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
        twin.process_group = self.process_group
        return twin

    # ---------------------------------------------------------------- telling

    @property
    def communication_seconds(self) -> float:
        """Host seconds that the last step spent waiting for other ranks; on CUDA streams wait, not the host."""
        counts = self.counts
        return counts.seconds_waiting

    @property
    def counts(self) -> Counts:
        """What the last step did on this rank; `explain` says what it should be."""
        exchange = self._resolved.exchange if self._resolved is not None else None
        return exchange.counts if exchange is not None else Counts()

    def explain(self) -> Explanation:
        """Return who goes where and why, with the size of a step; ``str()`` of it is a table. No communication."""
        resolved = self._resolve()
        return explain(self.param_groups, resolved.plan, resolved.rank, self._precision.compute.itemsize)

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step for any logger, by group; all ranks call it, since shards are summed.

        ``<group>/gradient_rms``, ``<group>/momentum_rms`` (the first moment of AdamW), ``<group>/update_rms`` (without
        decay) and ``<group>/update_to_weight`` (ratio of norms). Call it after ``step`` and before ``zero_grad``. The
        update is recorded from the first call on, so the last two appear after the following step.
        """
        resolved = self._connect()
        assert resolved.exchange is not None
        sums, self._sums = self._sums, self._sums or Sums()
        return measure(self.param_groups, self.state, self._replicas(), sums, resolved.exchange)


def from_model(model: nn.Module, lr: float | Tensor = 3e-4, **settings: Any) -> Muon:
    """Return ``Muon(split_params(model), lr=lr, ...)``: the line that replaces ``AdamW(model.parameters(), lr=lr)``.

    Args:
        model: Any module, sharded or not.
        lr: Learning rate of both halves.
        settings: Further arguments of `Muon`.
    """
    return Muon(split_params(model), lr, **settings)


def _algorithm(group: Mapping[str, Any]) -> Algorithm:
    algorithm: Any = group.get("algorithm")
    if "use_muon" in group:
        alias = "muon" if group["use_muon"] else "adamw"
        if algorithm not in (None, alias):
            raise ValueError(
                f"group: found algorithm={algorithm!r} and use_muon={group['use_muon']!r}; needed one of them"
            )
        algorithm = alias
    algorithm = "muon" if algorithm is None else algorithm
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f'group: found algorithm={algorithm!r}; needed "muon" or "adamw"')
    return "muon" if algorithm == "muon" else "adamw"


def _check(holds: bool, name: str, found: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name}: found {found!r}; needed {needed}")


def _is_float(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_settings(where: str, group: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a group."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        _check(lr.numel() == 1, f"{where}: lr", lr, "a tensor of one element")
    else:
        _check(_is_number(lr) and lr >= 0, f"{where}: lr", lr, "a number of at least 0")
    for key in ("momentum",):
        _check(_is_number(group[key]) and 0 <= group[key] < 1, f"{where}: {key}", group[key], "a number in [0, 1)")
    _check(isinstance(group["nesterov"], bool), f"{where}: nesterov", group["nesterov"], "True or False")
    for key in ("weight_decay", "adamw_eps"):
        _check(_is_number(group[key]) and group[key] >= 0, f"{where}: {key}", group[key], "a number of at least 0")
    factor = group["extra_scale_factor"]
    _check(_is_number(factor) and factor > 0, f"{where}: extra_scale_factor", factor, "a positive number")
    betas = group["adamw_betas"]
    fits = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)
    _check(fits, f"{where}: adamw_betas", betas, "two numbers in [0, 1)")
    for key, ours in (("betas", "adamw_betas"), ("eps", "adamw_eps")):
        if key in group:
            raise ValueError(f"{where}: found the key {key!r}; needed {ours!r}. Rename it")
    update_scale(1, 1, group["scale_mode"])
    coefficient_schedule(group["ns_coefficients"], group["ns_steps"])
    _check(
        group["ns_method"] in ("auto", "standard", "gram"),
        f"{where}: ns_method",
        group["ns_method"],
        '"auto", "standard" or "gram"',
    )
