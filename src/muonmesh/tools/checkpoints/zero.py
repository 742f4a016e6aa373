"""Zero: assembles the optimizer state of a DeepSpeed checkpoint from the files of all ranks.

ZeRO keeps state in flat tensors. At stages 1 and 2, a rank has an interval of AdamW's moments. Of Muon's momentum, the
rank has the whole momentum of every parameter of which it holds elements, one after the other. At stage 3, a rank has
an equal slice of every parameter; the last slices are padded. The checkpoint records where each parameter lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from muonmesh.checkpoint.form import SIZE, STATE_DICT, TEXT, Form, check_form
from muonmesh.errors import FileError, StateError, explain_error
from muonmesh.files import kind_of, read_text
from muonmesh.tools.checkpoints.archive import Fields, read_archive

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SHAPES = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_READ = "0.19.8"
_WRITE = f"Save it by DeepSpeed {_READ}, without elastic_checkpoint"

# The classes that DeepSpeed pickles besides tensors and plain values, in checkpoints of 0.19.8 at stages 1 to 3.
_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


_PIECE = {"start": SIZE, "numel": SIZE}


class _Flat(NamedTuple):
    """One flat tensor on each rank.

    Attributes:
        group: The settings of its group.
        shapes: The shapes of its parameters, by name.
        kept: The state of the flat tensor on each rank.
        starts: For each rank, by parameter name: begin and length of the parameter's interval in the flat tensor.
        momentum_is_whole: Whether ranks keep the momentum of whole parameters, as at stages 1 and 2.
    """

    group: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    kept: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, tuple[int, int]]]
    momentum_is_whole: bool


def read_zero(folder: Path) -> dict[str, Any]:
    """Return the optimizer's state dict from a DeepSpeed checkpoint of ZeRO-1, 2 or 3, on the CPU, by parameter name.

    Files are read with ``weights_only=True``. Objects of DeepSpeed's classes become records without behavior, so no
    code from the files runs, and DeepSpeed need not be installed.

    Args:
        folder: The folder that ``save_checkpoint`` got, whose newest checkpoint is read; or the folder of one
            checkpoint in it.

    Raises:
        FileError: the files of a rank are missing, cannot be read, or contain more than data.
        StateError: the files do not fit together.
    """
    folder = _newest(folder)
    paths = _files(folder)
    shapes = _shapes(folder)
    states = [_rank_state(path) for path in paths]
    counts = states[0]["partition_count"]
    needed = max(counts) if isinstance(counts, list | tuple) and counts else counts
    if needed != len(states):
        found = f"the optimizer files of {len(states)} of {needed} ranks"
        write = "Bring the files of the other ranks there too"
        raise FileError(explain_error(str(folder), found, "all of them", write))
    groups: list[Mapping[str, Any]] = []
    state: dict[Any, Mapping[str, Any]] = {}
    for flat in _flats(paths[0], states, shapes):
        names = list(flat.shapes)
        groups.append({**flat.group, "params": names, "param_names": names})
        for name in names:
            if name in state:
                _refuse(folder, f"{name} in two groups")
            state[name] = _entry(folder, name, flat)
    return {"param_groups": groups, "state": state}


def _newest(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    tag = read_text(latest, needed="the name of a checkpoint").strip()
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        needed = "the name of a folder beside it"
        raise FileError(explain_error(str(latest), f"{tag!r}", needed, "Name that folder itself"))
    return folder / tag


def _files(folder: Path) -> list[Path]:
    """Return the optimizer file of each rank, in the order of the ranks.

    Raises:
        FileError: a file is missing, or the checkpoint has tensor parallelism.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STATES.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            needed, write = "a checkpoint without tensor parallelism", "Save it without, or convert on ranks"
            raise FileError(explain_error(str(path), "a shard of a model", needed, write))
        found[int(match[1])] = path
    if not found or sorted(found) != list(range(len(found))):
        some = f"the optimizer files of ranks {sorted(found)}"
        told = some if found else f"{kind_of(folder)} without optimizer files"
        write = "Name the folder that save_checkpoint was given, with the files of all ranks in it"
        raise FileError(explain_error(str(folder), told, "zero_pp_rank_0_mp_rank_00_optim_states.pt and so on", write))
    return [found[rank] for rank in range(len(found))]


def load_inert(path: Path) -> Mapping[str, Any]:
    """Return the content of a DeepSpeed file, read with ``weights_only=True``; no code of DeepSpeed's classes runs.

    Raises:
        FileError: the file has objects of other classes, or has changed since it was written.
    """
    needed = f"tensors, plain values and what DeepSpeed {_READ} writes beside them"
    with torch.serialization.safe_globals([(Fields, name) for name in _CLASSES]):
        loaded = read_archive(path, needed=needed, remedy="Save it by that version, or bring an undamaged copy")
    held: Mapping[str, Any] = check_form(str(path), loaded, {}, _WRITE)
    return held


def _rank_state(path: Path) -> Any:
    """Return the saved state of one rank's optimizer.

    Raises:
        FileError, StateError: the file cannot be read, or has another form.
    """
    state = check_form(str(path), load_inert(path), {"optimizer_state_dict": {}}, _WRITE)["optimizer_state_dict"]
    form: dict[str, Form] = {"base_optimizer_state": STATE_DICT, "param_slice_mappings": [{TEXT: _PIECE}]}
    if "fp32_flat_groups" in state:
        form = {"optimizer_state_dict": STATE_DICT}
    return check_form(str(path), state, {"partition_count": (SIZE, [SIZE]), **form}, _WRITE)


def _shapes(folder: Path) -> Sequence[Mapping[str, tuple[int, ...]]]:
    """Return the shapes of the parameters of each flat tensor, in the order in which they lie in it."""
    for path in sorted(folder.iterdir()):
        if _SHAPES.fullmatch(path.name):
            held = check_form(str(path), load_inert(path), {"param_shapes": [{TEXT: [SIZE]}]}, _WRITE)
            return [{name: tuple(shape) for name, shape in group.items()} for group in held["param_shapes"]]
    write = "Name the folder that save_checkpoint was given, with its model files in it"
    raise FileError(explain_error(str(folder), "no mp_rank_00_model_states.pt", "it, for names and shapes", write))


def _flats(
    path: Path, states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[_Flat]:
    """Yield the flat tensors of the checkpoint, with the state that each rank keeps of them."""
    third = "fp32_flat_groups" in states[0]
    kept = [state["optimizer_state_dict" if third else "base_optimizer_state"] for state in states]
    owners = [(group, key) for group in kept[0]["param_groups"] for key in group["params"]]
    pieces = [] if third else [state["param_slice_mappings"] for state in states]
    if {len(shapes)} != {len(owners), *map(len, pieces)}:
        _refuse(path, f"{len(owners)} flat tensors for {len(shapes)} lists of parameters")
    for number, (group, key) in enumerate(owners):
        held = [{name: (p["start"], p["numel"]) for name, p in rank[number].items()} for rank in pieces]
        if third:
            equal, start = dict[str, tuple[int, int]](), 0
            for name, shape in shapes[number].items():
                equal[name] = start, -(-prod(shape) // len(states))
                start += equal[name][1]
            held = [equal] * len(states)
        if not all(each.keys() <= shapes[number].keys() for each in held):
            _refuse(path, "intervals of parameters that have no shape")
        yield _Flat(group, shapes[number], [each["state"].get(key) or {} for each in kept], held, not third)


def _entry(folder: Path, name: str, flat: _Flat) -> dict[str, Any]:
    """Return the state of one parameter: whole tensors, and counts unchanged.

    Raises:
        StateError: the files of all ranks have too few elements, or other values than flat tensors.
    """
    entry: dict[str, Any] = {}
    for key in dict.fromkeys(key for kept in flat.kept for key in kept):
        values = [kept.get(key) for kept in flat.kept]
        first = next((value for value in values if value is not None), None)
        if not isinstance(first, Tensor) or first.ndim == 0:
            entry[key] = first
            continue
        flats = [value for value in values if value is not None]
        if not all(isinstance(value, Tensor) and (value.ndim, value.dtype) == (1, first.dtype) for value in flats):
            _refuse(folder, f"{name}'s {key} as something else than flat tensors of one dtype on some rank")
        whole = flat.momentum_is_whole and key == "momentum_buffer"
        pieces: list[Tensor] = []
        for held, value in zip(flat.starts, values, strict=True):
            if value is not None and held.get(name, (0, 0))[1] and not (whole and pieces):
                start, length = (_end_to_end(folder, held, value, flat.shapes) if whole else held)[name]
                pieces.append(value[start : start + length])
        joined = torch.cat(pieces) if pieces else first.new_empty(0)
        if joined.numel() < prod(flat.shapes[name]):
            _refuse(folder, f"{joined.numel()} elements of {name}'s {key} in the files of all ranks")
        entry[key] = joined[: prod(flat.shapes[name])].view(flat.shapes[name]).clone()
    return entry


def _end_to_end(
    folder: Path, held: Mapping[str, tuple[int, int]], value: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, tuple[int, int]]:
    """Return begin and length of each parameter in a rank's momentum, which contains whole parameters end to end."""
    names = sorted(held, key=lambda name: held[name][0])
    sizes = [prod(shapes[name]) for name in names]
    if value.numel() != sum(sizes):
        _refuse(folder, f"a momentum of {value.numel()} elements for parameters of {sum(sizes)}")
    return dict(zip(names, zip(accumulate(sizes, initial=0), sizes, strict=False), strict=True))


def _refuse(where: Path, found: str) -> NoReturn:
    needed = f"a checkpoint of ZeRO-1, 2 or 3 as DeepSpeed {_READ} writes it"
    raise StateError(explain_error(str(where), found, needed, _WRITE))
