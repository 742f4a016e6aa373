"""Members: the parameters of all groups, each with the layout of the parameter and of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.gradients import GradientSource
from muonmesh.comm.placing import nobody_said, ranks_of, refuse_flattened, shape_if_known, storage_of
from muonmesh.comm.sharing import sharded_over_replicas
from muonmesh.comm.storage import Storage, local_of, this_rank, world_size
from muonmesh.comm.undeclared_replicas import Copies
from muonmesh.errors import LayoutError, about, explain_error
from muonmesh.layout import Declared, FlatParameter, FlatShards, MeshLayout, split_matrices
from muonmesh.layout.matrix import MatrixSpec
from muonmesh.names import canonical_name
from muonmesh.numerics.dtypes import COMPLEX_DTYPES, HELD_DTYPES, NEEDED_HELD, master_for
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.numerics.rules.parts import follow
from muonmesh.settings import LOST_GROUP, LOST_LAYOUTS, ProcessGroup
from muonmesh.settings.checks import check_group, check_structure
from muonmesh.step.state_layout import COUNTED, Precision, StateForm, StateLayout

E = TypeVar("E", bound=Exception)

Holders = Literal["known", "open", "unknown"]
"""Whether muonmesh knows which ranks hold a parameter; `OptimizedParameter.holders` explains the values."""


@dataclass(frozen=True)
class OptimizedParameter:
    """The facts about one parameter, which plan, step and checkpoint read; several may share one flat tensor.

    Attributes:
        name: Canonical name.
        tensor: The tensor in the param groups.
        storage: The storage (layout and shapes) of the parameter.
        momentum_storage: The storage of its momentum: the same, or shared among the replicas.
        spec: How the parameter splits into matrices.
        group: Number of its param group.
        algorithm: The name of the rule that steps it; empty for a tensor that no optimizer steps.
        state_layouts: The layout of each tensor of its state, by key.
        holders: Whether muonmesh knows which ranks hold the parameter. "open": the ranks of its storage hold it, and
            other ranks may hold copies. "unknown": the parameter is a plain tensor without information about ranks; its
            storage is that of this rank alone, or has no layout.
        at_momentum: Whether its gradient has the layout of its momentum (`GradientSource.at_momentum`).
    """

    name: str
    tensor: Tensor
    storage: Storage
    momentum_storage: Storage
    spec: MatrixSpec = None
    group: int = 0
    algorithm: str = ""
    state_layouts: Mapping[str, StateLayout] = field(default_factory=dict)
    holders: Holders = "known"
    at_momentum: bool = False

    @cached_property
    def is_matrix(self) -> bool:
        """Whether a rule for matrices steps the parameter, and not an elementwise one such as AdamW's."""
        return is_matrix_rule(self.algorithm)

    def weights(self, state: Mapping[str, Any]) -> Tensor:
        """Return the weights that this rank stores, in the precision in which they are trained: the master weight, if
        there is one, after it has followed the parameter.
        """
        local = local_of(self.tensor).detach()
        if (master := state.get("master")) is None:
            return local
        follow(local_of(master), local)
        return local_of(master).detach()

    def forms(self, precision: Precision, *, master: bool = False) -> tuple[StateForm, ...]:
        """Return the forms of all state that a step uses of the parameter.

        Args:
            precision: The dtypes of state.
            master: Whether there is a master weight, although the precision asks for none.
        """
        local = local_of(self.tensor)
        layouts = {**self.state_layouts, **({} if self.is_matrix else COUNTED)}
        if master or master_for(local.dtype, precision.master) is not None:
            layouts["master"] = StateLayout("weights", self.storage, dtype=local.dtype)
        return tuple(layout.form(key, self.storage, local, precision) for key, layout in layouts.items())

    @cached_property
    def gradient_storage(self) -> Storage:
        """The storage (layout and shapes) of the parameter's gradient."""
        return self.momentum_storage if self.at_momentum else self.storage

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold the parameter, as far as muonmesh knows."""
        return (this_rank(),) if self.storage.layout is None else self.storage.layout.ranks

    def may_have_copies(self, ranks: Sequence[int]) -> bool:
        """Whether other ranks of a connected set may hold copies of this parameter that muonmesh does not know of."""
        return self.holders != "known" and not set(self.ranks) >= set(ranks)

    def copied(self, copies: Copies) -> OptimizedParameter:
        """Return this member with the copies that ranks have found. The copies do not share its momentum."""
        copied_ranks = copies.get((self.name, self.ranks))
        if copied_ranks is None:
            return self
        storage, state = self.storage.copied(copied_ranks), self.momentum_storage.copied(copied_ranks)
        state = storage if self.momentum_storage is self.storage else state
        return replace(self, storage=storage, momentum_storage=state, holders="known")


def check_members(
    group: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layouts: Mapping[str, Declared],
    source: GradientSource,
    master: torch.dtype | None,
) -> None:
    """Check a group and its parameters as far as one rank can, and make the parameters' names canonical.

    Raises:
        ValueError, TypeError: the message says what was found and what to write.
    """
    subject = f"group {group.get('name')!r}"
    check_structure(subject, group)
    check_group(subject, group)
    tensors = group["params"]
    names = [
        canonical_name(source.name(tensor) or name) for name, tensor in zip(group["param_names"], tensors, strict=True)
    ]
    if names != group["param_names"]:
        group["param_names"] = names
    used = {name for other in groups if other is not group for name in other["param_names"]}
    for name, tensor in zip(names, tensors, strict=True):
        if name in used and world_size() == 1:  # with several ranks, the ranks of a parameter are part of its identity
            raise named_alike(ValueError, name, "two parameters of this name")
        used.add(name)
        shared: object = source.group(tensor)
        if shared is not None and not isinstance(shared, dist.ProcessGroup):  # what `new_group` gives the other ranks
            problem = f"{shared!r} from group() of {type(source).__name__}, as gradients="
            needed, write = "None or a ProcessGroup with this rank in it", "Return the group that this rank is in"
            raise ValueError(explain_error(name, problem, needed, write))
        _check_dtype(name, tensor.dtype, master, group)
        if name not in layouts:
            refuse_flattened(name, tensor)
    if not is_matrix_rule(group["algorithm"]):
        return
    specs = group.get("matrices")
    if specs is None:
        specs = group["matrices"] = [None] * len(tensors)
    for name, tensor, spec in zip(names, tensors, specs, strict=True):
        # Of declared shards the whole shape is known at the first step, together with the ranks.
        if name not in layouts and (shape := shape_if_known(name, tensor)) is not None:
            split_matrices(name, shape, spec)


def _check_dtype(name: str, dtype: torch.dtype, master: torch.dtype | None, group: Mapping[str, Any]) -> None:
    """Check the dtype of a parameter.

    Raises:
        TypeError: muonmesh cannot compute with parameters of this dtype.
        ValueError: a master weight could not hold all values of this dtype; stochastic rounding is set together with
            master weights or fp16; or AdamW's ε would be 0 in the dtype of the moments.
    """
    if dtype in COMPLEX_DTYPES and not is_matrix_rule(group["algorithm"]):  # stepped by their parts
        dtype = dtype.to_real()
    if dtype.is_complex:
        needed = "a real matrix: one of torch.complex64 and torch.complex128 is AdamW's, by its parts"
        write = f'Write overrides={{{name!r}: "adamw"}}, or keep the weight as torch.view_as_real(weight) and write '
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, write + "torch.view_as_complex where it is used"))
    if dtype not in HELD_DTYPES:
        needed = f"a floating-point parameter, {NEEDED_HELD}"
        write = "Call requires_grad_(False), or keep it in torch.bfloat16"
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, f"{write} and cast it where it is used"))
    if master is not None and torch.promote_types(dtype, master) != master:
        wide = torch.promote_types(torch.promote_types(dtype, master), torch.float32)
        problem, needed = f"dtype {dtype} and master_dtype={master}", "a master that holds all of its parameter"
        raise ValueError(explain_error(name, problem, needed, f"Write master_dtype={wide}"))
    if group["stochastic_rounding"] is not None and (master is not None or dtype == torch.float16):
        problem = f"stochastic_rounding with {'masters' if master is not None else dtype}"
        needed, write = "weights in bf16 without masters, or wider ones", "Leave out stochastic_rounding"
        raise ValueError(explain_error(name, problem, needed, f"{write} or master_dtype, and keep weights in bf16"))
    eps, moments = float(group["adamw_eps"]), master or dtype
    if group["algorithm"] == "adamw" and eps > 0 and torch.tensor(eps, dtype=moments, device="cpu") == 0:
        problem = f"adamw_eps={eps} for moments in {moments}, where it is 0, so that small gradients divide by 0"
        needed = "an ε above 0"
        raise ValueError(explain_error(name, problem, needed, "Write master_dtype=torch.float32, or adamw_eps=1e-4"))


def members_of(
    groups: Sequence[Mapping[str, Any]],
    process_group: ProcessGroup,
    layouts: Mapping[str, Declared],
    source: GradientSource,
    copies: Copies,
    *,
    shard_state: bool,
) -> tuple[list[OptimizedParameter], list[tuple[int, ...]], Exception | None]:
    """Return the parameters of all groups in order, with their layouts and with the copies that ranks have found.

    Returns:
        The members; the sets of ranks that share a member; and the first error. The error is returned and not raised,
        because a rank with an error must still meet the other ranks. The errors: the layout of a parameter is unknown
        or not as declared, or an entry of ``layouts`` fits no name.
    """
    if layouts == LOST_LAYOUTS:
        text = "This optimizer was unpickled, and its layouts are lost, because meshes cannot be pickled. Write "
        raise ValueError(about("layouts", text + "optimizer.layouts = layouts before the first step"))
    members: list[OptimizedParameter] = []
    sets: list[tuple[int, ...]] = []
    error: Exception | None = None
    unknown = dict(layouts)
    names = Counter[tuple[str, tuple[int, ...]]]()
    ranks_by_group: dict[int, tuple[int, ...] | None] = {}  # one tuple for all parameters of a group
    for number, settings in enumerate(groups):
        muon = is_matrix_rule(settings["algorithm"])
        specs = settings.get("matrices") or [None] * len(settings["params"])
        for name, tensor, spec in zip(settings["param_names"], settings["params"], specs, strict=True):
            declared = unknown.pop(name, None)
            source_group = source.group(tensor)
            shared = process_group if source_group is None else source_group
            if id(shared) not in ranks_by_group:
                ranks_by_group[id(shared)] = replicas_of(shared)
            replicas = ranks_by_group[id(shared)]
            for part, layout, split in _contents(name, declared, spec):
                try:
                    storage = storage_of(part, tensor, replicas, layout)
                except LayoutError as found:
                    error = error or found
                    sets.append(ranks_of(part, tensor, replicas, layout))
                    continue
                is_declared = layout is not None or source_group is not None or process_group == "local"
                holders: Holders = "unknown" if storage.layout is None else "known" if is_declared else "open"
                if storage.layout is None and muon:
                    storage = Storage(MeshLayout.replicated(storage.shape, (this_rank(),)), storage.shape)
                state = storage
                if shard_state and muon:
                    state = sharded_over_replicas(storage, group_for(shared), tensor.device.type)
                algorithm = settings["algorithm"]
                member = OptimizedParameter(part, tensor, storage, state, split, number, algorithm, holders=holders)
                members.append(member.copied(copies))
                storage = members[-1].storage
                names[part, () if storage.layout is None else tuple(storage.layout.ranks)] += 1
                if storage.layout is not None:
                    sets.append(storage.layout.ranks)
    for (alike, _), count in names.items():
        if count > 1:
            error = error or named_alike(LayoutError, alike, f"{count} parameters of this name")
    try:
        members = _with_momentum_placed(members, source)
    except LayoutError as found:
        error = error or found
    flat = (layout for entry in unknown.values() for layout in flat_layouts(entry))
    sets += [layout.ranks for layout in flat if this_rank() in layout.ranks]  # these ranks get the error below
    if not any(len(ranks) > 1 for ranks in sets):  # no other rank can know more
        error = error or unknown_matrix(members)
    if unknown:
        write = (
            "Correct the names, which have no prefixes such as module. or _orig_mod. Of a flat parameter of which this "
        )
        write += "rank holds nothing, list an empty tensor"
        needed = "names of parameters in the groups of this rank"
        error = error or LayoutError(explain_error("layouts", f"{sorted(unknown)}", needed, write))
    return members, sets, error


def named_alike(kind: type[E], name: str, problem: str) -> E:
    """Return the error that says that several parameters have the same name."""
    needed = "a unique name for each, because ranks and checkpoints know parameters by name"
    write = 'Give "param_names" with a prefix that tells them apart, such as "encoder." and "decoder."'
    return kind(explain_error(name, problem, needed, write))


def _with_momentum_placed(members: Sequence[OptimizedParameter], source: GradientSource) -> list[OptimizedParameter]:
    """Return the members with the momentum of matrices placed as the gradient source wants."""
    matrices = [number for number, member in enumerate(members) if member.is_matrix]
    places = source.momentum_storages(
        [(members[n].name, members[n].tensor, members[n].momentum_storage) for n in matrices]
    )
    placed = list(members)
    for number, storage in zip(matrices, places, strict=True):
        if storage is not members[number].momentum_storage:
            at_momentum = source.at_momentum(members[number].tensor)
            placed[number] = replace(members[number], momentum_storage=storage, at_momentum=at_momentum)
    return placed


def unknown_matrix(members: Sequence[OptimizedParameter]) -> Exception | None:
    """Return the error for the first matrix whose ranks are unknown; None if there is no such matrix."""
    unknown = (member for member in members if member.holders == "unknown" and member.storage.layout is not None)
    return next((nobody_said(member.name) for member in unknown), None)


def flat_layouts(entry: Declared) -> list[FlatShards]:
    """Return the flat layouts of an entry of ``layouts``; an empty list if the entry is of another kind."""
    entries = entry if isinstance(entry, (tuple, list)) else (entry,)
    candidates = [flat.layout if isinstance(flat, FlatParameter) else flat for flat in entries]
    return candidates if all(isinstance(layout, FlatShards) for layout in candidates) else []


def keep_gradients_of_views(named: Sequence[tuple[object, object]], layouts: Mapping[str, Declared]) -> None:
    """Make torch accept flat shards that are views of parameters, as Megatron lists fp32 weights.

    An optimizer of torch accepts a tensor that is not a leaf only if autograd retains its gradient.
    """
    for name, tensor in named:
        if isinstance(tensor, Tensor) and isinstance(name, str) and isinstance(layouts.get(name), FlatShards):
            base = tensor._base
            if not tensor.is_leaf and base is not None and base.is_leaf:
                tensor.retain_grad()


def likely_sets(
    groups: Sequence[Mapping[str, Any]],
    process_group: ProcessGroup,
    layouts: Mapping[str, Declared],
    source: GradientSource,
) -> list[tuple[int, ...]]:
    """Return the sets of ranks that probably share parameters, for groups with an error; all of them learn of it."""
    sets: list[tuple[int, ...]] = []
    for group in groups:
        names = group.get("param_names")
        for number, tensor in enumerate(group.get("params") or ()):
            if isinstance(tensor, Tensor):
                name = str(names[number]) if isinstance(names, list) and number < len(names) else ""
                source_group = source.group(tensor)
                replicas = replicas_of(process_group if source_group is None else source_group)
                sets.append(ranks_of(name, tensor, replicas, layouts.get(name)))
    return sets


def _contents(name: str, declared: Any, spec: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, declared layout, matrices) of each parameter that a tensor holds."""
    if isinstance(declared, (tuple, list)) and declared and all(isinstance(d, FlatParameter) for d in declared):
        return [(flat.name, flat.layout, flat.matrices) for flat in declared]
    if isinstance(declared, FlatParameter):
        return [(declared.name, declared.layout, declared.matrices if declared.matrices is not None else spec)]
    return [(name, declared, spec)]


def names_in(name: str, layouts: Mapping[str, Declared]) -> list[str]:
    """Return the names of the parameters that a tensor holds: several if it is declared as flat, else its own."""
    return [contained for contained, _, _ in _contents(name, layouts.get(name), None)]


def group_for(process_group: ProcessGroup) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold plain tensors whole; None for one rank or if it is unknown."""
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    return dist.group.WORLD if process_group == "world" and world_size() > 1 else None


def replicas_of(process_group: ProcessGroup) -> tuple[int, ...] | None:
    """Return the ranks that hold plain tensors whole, or None if they are unknown.

    Raises:
        ValueError: the process group was lost in pickling.
    """
    if process_group == LOST_GROUP:
        text = "This optimizer was unpickled, and its ProcessGroup is lost, because process groups cannot be pickled. "
        raise ValueError(about("process_group", text + "Write optimizer.process_group = group before the first step"))
    if process_group == "local" or (process_group is not None and world_size() == 1):
        return (this_rank(),)
    if process_group == "world":
        return tuple(range(world_size()))
    if isinstance(process_group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(process_group))
    return None
