"""Saves a model and its optimizer as a checkpoint that any layout can read, and loads it.

`save` gets a ParameterRecord of each parameter from the optimizer, and writes the LocalBoxes of each tensor in the
records with `folder.write`. `load` checks the folder with `folder.open_checkpoint`, finds with `load_plan.plan_load`
where each tensor goes, reads into new memory, and only then writes to the model and the optimizer.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from muonmesh.checkpoint.folder import write
from muonmesh.checkpoint.load_plan import check_saved_settings, group_settings, merged_settings, plan_load
from muonmesh.checkpoint.manifest import SETTINGS_FILE
from muonmesh.checkpoint.reader import open_checkpoint
from muonmesh.checkpoint.record import STATE, CheckpointedOptimizer, LocalBoxes, ParameterRecord, recorded_in
from muonmesh.comm.gather_objects import first_difference, gather_objects, on_every_rank, results_of_all_ranks, settled
from muonmesh.comm.placing import refuse_flattened, storage_of
from muonmesh.comm.storage import PLAIN, local_of, this_rank
from muonmesh.errors import StateError, about, explain_error, warn
from muonmesh.names import canonical_name
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.replicas import sum_of_bits
from muonmesh.step.state_layout import wrong_numbers


def refuse_extra_state(model: nn.Module) -> None:
    """Raise StateError if a module has extra state, which could be an object that executes when it is loaded.

    None and an empty tensor count as no extra state; modules of Transformer Engine return them if they do not compute
    in FP8.
    """
    for path, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state and "get_extra_state" not in vars(module):
            continue
        extra = module.get_extra_state()
        if extra is not None and not (isinstance(extra, Tensor) and not extra.numel()):
            subject, fault = f"{canonical_name(path) or 'the model'}.get_extra_state()", f"a {type(extra).__name__}"
            needed = "None or an empty tensor: extra state may be what executes when it is loaded"
            write = "Keep numbers in a buffer (register_buffer), save other things apart, and write "
            write += "module.get_extra_state = lambda: None"
            raise StateError(explain_error(subject, fault, needed, write))


@plain_modes()
def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> None:
    """Save a model and its optimizer, in any layout, so that `load` can read them into any other layout.

    All ranks call it. Each rank writes its shards; of several replicas only one rank writes. The checkpoint has
    parameters, buffers, frozen weights, momentum, AdamW's moments, state of rules by row, column or matrix, the
    settings of the groups, and the running means of ``clip_grad_norm_(skip_above="4x")``. Where a weight has an fp32
    master weight, the master weight is saved. Of a buffer, the first rank's is saved, which is also the one that DDP
    sends to all ranks. Parameters have their canonical names, so DDP, torch.compile and activation checkpointing leave
    no trace.

    The checkpoint has no learning-rate scheduler, loss scale, random numbers or place in the data. With an engine of
    DeepSpeed, it has no counts of the engine. Save these in a file next to the folder, and load them after `load`::

        torch.save({"scheduler": engine.lr_scheduler.state_dict()}, f"{path}.rest.pt")  # on rank 0

    Args:
        path: The folder, on a file system that all ranks share.
        model: The model in any layout: DDP, FSDP, DTensors, declared shards, or an engine of DeepSpeed.
        optimizer: A `Muon`, a wrapper of one, or an engine of DeepSpeed.

    Raises:
        StateError: on every rank: a step was interrupted while it wrote, ranks hold different tensors under one name,
            two tensors have one canonical name, a setting is not plain data, or a module has extra state.
        FileError: the folder could not be written.
        TypeError: the optimizer is of another kind.

    Warns:
        UserWarning: on rank 0: replicas of a weight have drifted apart, or optimizer state is not finite, so that
            `load` will refuse the checkpoint.
    """
    host = settled(lambda: checkpointed(optimizer))
    settled(host.refuse_if_interrupted)
    reshard(model)
    with host.whole(model, write=False):
        records = settled(lambda: _records(host, model))
        trained = [record for record in records if record.group]

        def facts() -> tuple[dict[str, str], Any, dict[tuple[str, tuple[int, ...]], int]]:
            return {record.name: _digest(record) for record in records}, group_settings(trained), _sums(records)

        digests, settings, sums = zip(*results_of_all_ranks(facts, kind=StateError), strict=True)
        settled(lambda: _check_alike(digests, trained))
        _warn_of_drift(sums)
        tensors = settled(lambda: _shares(records, digests))
        _warn_of_divergence(path, tensors)
        write(path, tensors, merged_settings(settings))


@plain_modes()
def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Any, *, strict: bool = True) -> None:
    """Load a checkpoint of `save` into any layout: weights, optimizer state and settings continue where they were.

    Training continues as if it had never stopped if you also load what `save` leaves out, such as the learning-rate
    scheduler. A scheduler that was not loaded starts its schedule again.

    All ranks call it; their number may have changed. Everything is first read into new memory and checked. If anything
    is wrong, every rank raises, and nothing has changed. If a rank fails while it writes, every rank raises, and no
    rank can step or save before it has loaded a checkpoint. Weights are never rounded to a lower precision than they
    were saved in; momentum takes this optimizer's ``state_dtype``.

    Afterwards each group has the settings with which its parameters were saved, the learning rate included, as with
    torch's ``load_state_dict``. They replace the settings of this optimizer, also those of ``overrides``. Set other
    values after loading. Parameters may be in other groups than at the save, if all parameters of a group had equal
    settings. If the saved run had an override, write the same override here.

    A parameter may be split into other matrices than at the save, unless its rule keeps state by row, column or matrix.

    Args:
        path: The folder.
        model: The model as for `save`, in any layout.
        optimizer: The optimizer as for `save`.
        strict: Whether it is an error if only the checkpoint or only this run has an entry. If False, a parameter that
            the checkpoint lacks keeps its weights and its state, a parameter of which it has only the weights starts
            with new state, and other entries of the checkpoint are ignored. An entry of another shape, a dtype that
            would be rounded, and state of another rule are errors in any case.

    Raises:
        StateError: on every rank: an entry of the checkpoint does not fit; the message names the entry and the nearest
            name.
        FileError: on every rank: there is no complete checkpoint.
        TypeError: `save` does not take such an optimizer.
    """
    host = settled(lambda: checkpointed(optimizer))
    reshard(model)
    contents = open_checkpoint(path)
    check_saved_settings(contents.folder / SETTINGS_FILE, contents.settings)
    with host.whole(model, write=True):
        records = settled(lambda: _records(host, model))
        trained = dict[str, bool]()
        for names_of_rank in gather_objects({record.name: bool(record.group) for record in records}):
            trained |= {name: is_trained or trained.get(name, False) for name, is_trained in names_of_rank.items()}
        plan = settled(lambda: plan_load(path, contents.tensors, contents.settings, records, trained, strict=strict))
        on_every_rank(lambda: contents.read(plan.boxes))
        on_every_rank(contents.check_unchanged)
        settled(plan.check)
        host.checkpoint_changing()
        settled(plan.write)
    host.checkpoint_restored()


def checkpointed(optimizer: Any) -> CheckpointedOptimizer:
    """Return the optimizer of muonmesh inside wrappers, such as Accelerate's, Lightning's and DeepSpeed's.

    Raises:
        TypeError: there is no optimizer of muonmesh in the wrappers.
    """
    if (inner := recorded_in(optimizer)) is not None:
        return inner
    fault = f"a {type(optimizer).__name__}"
    needed = "a muonmesh.Muon, what wraps one, or an engine of muonmesh.integrations.deepspeed.initialize"
    write = "Pass one, or load the weights alone by torch.distributed.checkpoint"
    raise TypeError(explain_error("optimizer", fault, needed, write))


def _records(host: CheckpointedOptimizer, model: nn.Module) -> list[ParameterRecord]:
    """Return records of the tensors that the optimizer steps, then of frozen parameters and the persistent buffers.

    Raises:
        LayoutError: FSDP1 has flattened one of the other tensors.
        StateError: two tensors of the model have the same canonical name.
    """
    refuse_extra_state(model)
    records, renamed = host.checkpoint_records(), host.renamed(model)

    def saved_as(name: str) -> str:
        name = canonical_name(name)
        return renamed.get(name, name)

    names = {record.name for record in records}
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    # A tied parameter has several names, and an optimizer may step a copy in another precision.
    known_ids = {id(record.parameter.tensor) for record in records}
    known_ids |= {id(tensor) for name, tensor in tensors if saved_as(name) in names}
    modules = model.named_modules(remove_duplicate=False)
    passing = {f"{path}.{key}".lstrip(".") for path, module in modules for key in module._non_persistent_buffers_set}
    tensors += [entry for entry in model.named_buffers(remove_duplicate=False) if entry[0] not in passing]
    untrained, by_name = {}, dict[str, tuple[str, Tensor]]()
    for path, tensor in tensors:
        name = saved_as(path)
        other, same = by_name.setdefault(name, (path, tensor))
        if same is not tensor:
            fault, needed = f"two tensors of this name, {other} and {path}", "one, or only one of them would be saved"
            write = "Rename a module: checkpoints leave out wrappers' names"
            raise StateError(explain_error(name, fault, needed, write))
        if id(tensor) not in known_ids and name not in names:
            known_ids.add(id(tensor))
            refuse_flattened(name, tensor)
            untrained[name] = tensor
    for name, tensor in untrained.items():
        storage = storage_of(name, tensor, None)
        records.append(ParameterRecord(OptimizedParameter(name, tensor, storage, storage)))
    return records


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered for a forward pass, since they would keep the old weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _digest(record: ParameterRecord) -> str:
    """Return a hash of shape, dtype and layout, which must be equal on all ranks that have a tensor."""
    storage = record.parameter.storage
    layout, text = storage.layout, f"{tuple(storage.shape)} {record.parameter.tensor.dtype}"
    if layout is not None:
        text += f" {layout.describe()}" + (f" {layout.ranks}" if record.group else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sums(records: Iterable[ParameterRecord]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return a checksum of each weight of which several ranks hold whole copies, by its name and these ranks.

    All ranks that have a plain frozen weight hold a copy of it, whichever these are. Frozen weights that are
    subclasses of tensors, such as quantized ones, may refuse what a checksum needs, and are left out.
    """
    weights = [
        record.parameter
        for record in records
        if record.group or (not _is_buffer(record) and type(local_of(record.parameter.tensor)) in PLAIN)
    ]
    whole = {(p.name, p.ranks): p for p in weights if p.storage.replicated}
    whole |= {(p.name, ()): p for p in weights if p.storage.layout is None and not p.algorithm}
    return {key: int(sum_of_bits(p.storage, p.tensor, p.tensor.device)) for key, p in whole.items()}


def _is_buffer(record: ParameterRecord) -> bool:
    return not record.group and not isinstance(record.parameter.tensor, nn.Parameter)


def _shares(records: Iterable[ParameterRecord], names_by_rank: Sequence[Collection[str]]) -> dict[str, LocalBoxes]:
    """Return what this rank writes of each tensor, by the tensor's name in the checkpoint.

    Replicas share the work, each with some of the tensors. But buffers may differ between ranks, as BatchNorm's do
    under DDP. Those of several ranks would not belong together, so the first rank that has a buffer writes it; of a
    DTensor, the ranks of the first replica, each its shard.

    Args:
        records: The records of this rank.
        names_by_rank: The names of the records of each rank.
    """
    shares = dict[str, LocalBoxes]()
    for record in records:
        elsewhere = _is_buffer(record) and not _is_of_first_replica(record, names_by_rank)
        for name, share in record.shares():
            shares[name] = share._replace(boxes={}) if elsewhere else share
    return shares


def _is_of_first_replica(record: ParameterRecord, names_by_rank: Sequence[Collection[str]]) -> bool:
    """Return whether no rank before this one, or before those that share the tensor with it, has a whole copy."""
    first = next(rank for rank, names in enumerate(names_by_rank) if record.name in names)
    layout = record.parameter.storage.layout
    if layout is None:
        return first == this_rank()
    return first in layout.ranks and layout.replica_number(this_rank()) == layout.replica_number(first)


def _warn_of_drift(sums_by_rank: Iterable[dict[tuple[str, tuple[int, ...]], int]]) -> None:
    """Warn on rank 0 if replicas of a weight have different values; their checksums are those of each rank."""
    if this_rank() == 0 and (difference := first_difference(sums_by_rank)) is not None:
        (name, _), before, rank = difference
        text = f"The ranks {before} and {rank} hold replicas of this parameter, but their values differ. "
        text += "Only one replica is saved. Some steps had gradients that nothing averaged, or weights "
        text += "were changed on some ranks only. Loading this checkpoint makes the replicas equal"
        warn(about(name, text))


def _warn_of_divergence(path: str | os.PathLike[str], tensors: Mapping[str, LocalBoxes]) -> None:
    """Warn on rank 0 if state has numbers for which `load` refuses the checkpoint. All ranks call this."""

    def faults() -> list[tuple[str, str]]:
        boxes = ((name, box) for name, share in tensors.items() for box in share.boxes.values())
        return [
            (name, fault) for name, box in boxes if name.startswith(f"{STATE}.") and (fault := wrong_numbers(name, box))
        ]

    found = sorted(itertools.chain.from_iterable(results_of_all_ranks(faults, kind=StateError)))
    if found and this_rank() == 0:
        name, fault = found[0]
        text = f"{name} has {fault}, so load refuses this checkpoint. Keep an older one, find the step that diverged, "
        text += 'and skip such steps with optimizer.clip_grad_norm_(1.0, skip_above="4x")'
        warn(about(os.fspath(path), text))


def _check_alike(digests_by_rank: Sequence[dict[str, str]], records: Iterable[ParameterRecord]) -> None:
    """Check that a name means the same tensor on all ranks; of two tensors, only one would be saved.

    Raises:
        StateError: ranks hold different tensors under one name, or a rank that holds a part of a tensor does not pass
            the tensor to `save`.
    """
    if (difference := first_difference(digests_by_rank)) is not None:
        name, before, rank = difference
        text = (
            f"The ranks {before} and {rank} hold different tensors under this name: the shape, dtype or layout "
            "differs, or each rank trains its own. Every rank must use the same tensor for the same name. If "
            'the ranks hold replicas of it, or of its shards, write Muon(..., process_group="world") or pass '
            "the group of the replicas. If they hold plain shards, declare them with layouts="
        )
        raise StateError(about(name, text))
    for record in records:
        layout = record.parameter.storage.layout
        holders = [rank for rank, digests in enumerate(digests_by_rank) if record.name in digests]
        needs = layout.ranks if layout is not None else ()
        if not set(needs) <= set(holders):
            text = f"The ranks {tuple(needs)} hold this parameter, but only the ranks {tuple(holders)} pass it to save"
            raise StateError(about(record.name, f"{text}. Call save on all ranks, each with its own optimizer"))
