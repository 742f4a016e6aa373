"""Diagnosis: finds what is at a path and whether it is complete. Nothing at the path is executed or changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves_with_path

from muonmesh.checkpoint.folder import folder_at
from muonmesh.checkpoint.load_plan import check_saved_settings
from muonmesh.checkpoint.manifest import MANIFEST_FILE, REMEDY, SETTINGS_FILE, SavedTensor, read_manifest
from muonmesh.checkpoint.reader import stamp_of
from muonmesh.checkpoint.record import STATE
from muonmesh.comm.storage import local_of
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, read_json, reason
from muonmesh.step.state_layout import wrong_numbers
from muonmesh.tools.checkpoints.archive import MoreThanData, read_archive
from muonmesh.tools.cli.checkpoints import checkpoints_of, is_complete, numbered, without_checkpoint
from muonmesh.tools.cli.report import METRICS_FILE
from muonmesh.tools.cli.run_files import LOCK_FILE
from muonmesh.tools.cli.run_settings import CONFIG_FILE, load_config, load_settings
from muonmesh.tools.cli.terminal import shell_line

ARCHIVE = b"PK\x03\x04"
A_RUN = "a run of muonmesh train"
OURS = "a checkpoint of muonmesh.checkpoint.save"
SAVED = "a file of torch.save"
CHECKED = f"{A_RUN}, {OURS}, or {SAVED} with plain values and tensors alone"


@dataclass
class Diagnosis:
    """The result of `diagnose`: kind, faults and content of a checkpoint, a run or a file.

    Attributes:
        path: The path.
        kind: The kind of the content, in words; empty if it is no checkpoint.
        faults: The damages, one message each; if it is no checkpoint, one message that says why.
        notes: Other information, one sentence each.
        tensors: The tensors by name, on the meta device.
        settings: The settings that were saved beside the tensors.
        shards: The number of tensors of which the file of one rank has only a shard.
        parts: For a run: the diagnoses of its checkpoints, the newest first.
    """

    path: str
    kind: str = ""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    shards: int = 0
    parts: list[Diagnosis] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged or missing, parts included."""
        return not self.faults and not self.shards and all(part.whole for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """Return all attributes and ``whole`` as plain data for `json.dumps`. ``faults`` has those of all parts."""
        tensors = {
            name: {"shape": list(tensor.shape), "dtype": dtype_of(tensor), "size": tensor.nbytes}
            for name, tensor in self.tensors.items()
        }
        parts = [part.as_json() for part in self.parts]
        faults = [*self.faults, *(fault for part in parts for fault in part["faults"])]
        return {**vars(self), "whole": self.whole, "faults": faults, "tensors": tensors, "parts": parts}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that turns a FileError into a fault, unless a fault says the same of the same file."""
        try:
            yield
        except FileError as error:
            beginning = str(error).partition("; needed")[0]
            if not any(fault.startswith(beginning) for fault in self.faults):
                self.faults.append(str(error))


def dtype_of(tensor: Tensor) -> str:
    """Return a dtype without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def diagnose(path: Path) -> Diagnosis:
    """Return the diagnosis of a run, a checkpoint or a file of `torch.save`."""
    try:
        if _is_run(path):
            return _run(path)
        if folder_at(path).is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
        problem = kind_of(path)
    except OSError as error:  # too long a name, or a folder that may not be listed
        problem = reason(error)
    return Diagnosis(str(path), faults=[f"{path}: {problem}; needed a folder or a file"])


def _is_run(path: Path) -> bool:
    begun = all(os.path.exists(path / name) for name in (LOCK_FILE, CONFIG_FILE))  # False where nobody may look
    return begun or any(os.path.exists(path / name) for name in ("checkpoints", METRICS_FILE))


def _run(run: Path) -> Diagnosis:
    result = Diagnosis(str(run), A_RUN)
    with result.noting():
        load_settings(run)
        result.settings = load_config(run)
        result.notes += without_checkpoint(run)
    stuck = False
    for name in ("muon", "adamw"):
        directory = checkpoints_of(run, name)
        parts = {step: _folder(path) for step, path in numbered(directory)}
        # A run may remove old ones meanwhile.
        parts = {step: part for step, part in parts.items() if folder_at(Path(part.path)).exists()}
        result.parts += parts.values()
        loaded = next((part for part in parts.values() if is_complete(folder_at(Path(part.path)))), None)
        if parts and not (loaded and loaded.whole):  # a resume reads only this one
            stuck = True
            older = next((step for step, part in parts.items() if part.whole), None)
            goes_on = "train it from the start" if older is None else f"go on from step {older}"
            write = f"Bring an undamaged copy, or remove the damaged checkpoints to {goes_on}"
            result.notes.append(f"a resume cannot load the last checkpoint of {name}. {write}")
        leftovers = directory.glob(".*.writing")
        result.notes += [f"{path}: left by a save that was cut off; the next one removes it" for path in leftovers]
    if not result.faults and not stuck:
        begins = "goes on" if result.parts else "no checkpoint is there. The run begins again"
        result.notes.append(f"{begins} with: {shell_line('train', '--resume', run)}")
    return result


READINGS = 3  # of a checkpoint that other processes replace meanwhile, of which parts of two may look damaged


def _folder(path: Path) -> Diagnosis:
    """Return the diagnosis of a folder, which may be a checkpoint that another process replaces meanwhile."""
    for _ in range(READINGS):
        folder = folder_at(path)
        stamp = stamp_of(folder / MANIFEST_FILE)
        result = _folder_as_it_is(path, folder)
        if folder_at(path) == folder and stamp_of(folder / MANIFEST_FILE) == stamp:
            return result
    found, needed = "a checkpoint that another process replaces again and again", "one that stays while it is read"
    return Diagnosis(str(path), OURS, [explain_error(str(path), found, needed, "Copy it, or try later")])


def _folder_as_it_is(path: Path, folder: Path) -> Diagnosis:
    result = Diagnosis(str(path))
    names = sorted(os.listdir(folder), key=lambda name: (name.startswith("."), name))
    if MANIFEST_FILE not in names and SETTINGS_FILE not in names:
        content = f"{names[0]!r} in it" if names else "nothing in it"
        run = next((folder / name for name in names if _is_run(folder / name)), None)
        write = None if run is None else f"For a run in it, write: {shell_line('doctor', run)}"
        result.faults = [explain_error(str(path), content, CHECKED, write)]
        return result
    result.kind = OURS
    with result.noting():
        settings = read_json(folder / SETTINGS_FILE, needed=f"what save wrote there. {REMEDY}")
        check_saved_settings(folder / SETTINGS_FILE, settings)
        result.settings = settings
    if folder != path:
        result.notes.append(f"lies at {folder}: the one that was to replace it never came. It loads from {path}")
    with result.noting():
        manifest = read_manifest(folder)
        for name in manifest.files:
            with result.noting():
                manifest.check_files(folder, [name])
        for name, tensor in manifest.tensors.items():
            result.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        wrong = {} if result.faults else _wrong_numbers(folder, manifest.tensors.values())
        for name, fault in wrong.items():
            (result.faults if name.startswith(f"{STATE}.") else result.notes).append(f"{name}: found {fault}")
    return result


def _wrong_numbers(folder: Path, tensors: Iterable[SavedTensor]) -> dict[str, str]:
    """Return for tensors with numbers that no step leaves which they have, in words."""
    pieces = ((tensor, tensor.read(folder, piece)) for tensor in tensors for piece in tensor.pieces)
    return {tensor.name: wrong for tensor, elements in pieces if (wrong := wrong_numbers(tensor.name, elements))}


def _file(path: Path) -> Diagnosis:
    result = Diagnosis(str(path))
    try:
        with path.open("rb") as file:
            begin = file.read(len(ARCHIVE))
    except OSError as error:
        result.faults.append(f"{path}: could not be read: {reason(error)}")
        return result
    if begin == ARCHIVE:
        result.kind = SAVED
        remedy = "Its checksums are right. Its content was not read, since that could run code"
        try:
            content = read_archive(path, needed=CHECKED, remedy=remedy)
            for keys, value in tree_leaves_with_path(content):
                if isinstance(value, Tensor):
                    name = ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)
                    result.tensors[name] = local_of(value).to("meta")
                    result.shards += isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)
            if result.shards:
                result.notes.append(
                    f"one rank's shards of {result.shards} tensors (DTensors); the files of the other ranks have "
                    "the rest. To save whole tensors, write muonmesh.checkpoint.save(path, model, optimizer)"
                )
        except FileError as error:
            result.kind, result.faults = "" if isinstance(error, MoreThanData) else SAVED, [str(error)]
    else:
        result.faults.append(
            f"{path}: found what torch.save does not write; needed a checkpoint. If torch before 1.6 "
            "wrote it, it is a program, and is not opened"
        )
    return result
