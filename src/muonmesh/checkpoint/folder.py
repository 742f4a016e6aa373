"""Folder: writes named tensors and settings into a folder, whole or not at all, and reads them without running code.

The folder contains::

    __0_0.distcp ...   the tensors, in the files of `torch.distributed.checkpoint`, one for each rank
    index.json         the place of each piece of each tensor, see `index`
    .metadata          the same for torch.distributed.checkpoint, a pickle; muonmesh writes it and never reads it
    settings.json      all other saved data, as JSON
    manifest.json      the size and the SHA-256 of all other files, written last

The hashes detect damage, not intended changes: a program that can write into the folder can also write a new manifest.
Even then no code can run, and names, shapes, dtypes and places are checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from muonmesh.checkpoint.entries import CheckpointReader
from muonmesh.checkpoint.index import Starts, read_index, starts_of, write_index
from muonmesh.checkpoint.manifest import (
    INDEX_FILE,
    METADATA_FILE,
    REMEDY,
    SETTINGS_FILE,
    Entry,
    check_entries,
    entry_of,
    read_manifest,
    write_manifest,
)
from muonmesh.checkpoint.place import found_at, put, writing_alone, writing_at
from muonmesh.checkpoint.ranks import on_first_rank, together
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError, explain_error
from muonmesh.files import cannot_write, kind_of, onto_disk, read_json, replace_text, writing

AGAIN = "save again"
_BESIDE = (INDEX_FILE, METADATA_FILE, SETTINGS_FILE)


class _RowMajor(DefaultSavePlanner):
    """Lets torch write the elements of all tensors in row-major order, as the index says."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.resolve_conj().resolve_neg().contiguous() if isinstance(data, Tensor) else data


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write a checkpoint to disk under a temporary name next to ``path``, and then rename it. Called on all ranks.

    If the process, the machine or the disk fails at any time, `look` finds either the old checkpoint or the complete
    new one. When this function returns or raises, it leaves no temporary files.

    Args:
        path: The folder, on a file system that all ranks share. An existing checkpoint is replaced.
        tensors: The tensors by name, as for `torch.distributed.checkpoint`: plain tensors (the first rank's are
            written), DTensors, objects with torch's protocol, or mappings of these.
        settings: Data that JSON can represent; the first rank's are written.

    Raises:
        FileError: on every rank: the checkpoint could not be written, ``path`` has something else than a checkpoint, or
            another process is writing there.
        TypeError: the settings are not JSON.
    """
    place = Path(path)
    if not place.name or place.name == "..":
        raise FileError(explain_error(str(path), "no name of a folder", "one", "Save under a name"))
    text = json.dumps(settings)

    def lock() -> None:
        with writing(place, again=AGAIN):
            stack.enter_context(writing_alone(place))

    def finish() -> None:
        with writing(place, again=AGAIN):
            scratch = writing_at(place)
            for name in entries:
                if not (scratch / name).is_file():
                    found, needed = f"no {name} here, which another rank wrote", "a folder that all ranks share"
                    raise FileError(explain_error(str(place), found, needed, "Pass the same path on every rank"))
            write_index(scratch, metadata, starts, entries)
            replace_text(scratch / SETTINGS_FILE, text)
            write_manifest(scratch, entries | {name: entry_of(scratch / name) for name in _BESIDE})
            onto_disk(scratch)
            put(scratch, place)

    with contextlib.ExitStack() as stack:
        on_first_rank(lock)
        metadata, entries, starts = _write_tensors(place, dict(tensors))
        on_first_rank(finish)


def look(path: str | os.PathLike[str]) -> CheckpointReader:
    """Check a checkpoint without loading it, and return its reader. Called on all ranks, which share the work.

    Args:
        path: The folder that `write` has written, possibly on another number of ranks.

    Raises:
        FileError: on every rank: a file is missing, has changed since it was written, or contains other data than
            tensors. The message names the file and the fault.
    """
    place = Path(path)

    def inspect() -> CheckpointReader:
        folder = found_at(place)
        if folder.is_symlink() or not folder.is_dir():
            what = "a link" if folder.is_symlink() else kind_of(folder)
            raise FileError(explain_error(str(place), what, "the folder of a checkpoint"))
        entries = read_manifest(folder)
        for name in _BESIDE:
            if name not in entries:
                raise FileError(f"{folder}: its manifest does not tell of {name}. {REMEDY}")
        check_entries(folder, entries, [*_BESIDE, *sorted(entries)[this_rank() :: world_size()]])
        settings = read_json(folder / SETTINGS_FILE, needed=f"what save wrote there. {REMEDY}")
        return CheckpointReader(folder, read_index(folder, entries), settings)

    return together(inspect)


def _write_tensors(place: Path, tensors: dict[str, Any]) -> tuple[Metadata, dict[str, Entry], Starts]:
    """Write the tensors into the locked folder.

    Returns:
        torch's metadata, and of all ranks' files the size and hash by name, and the places of all pieces.

    Raises:
        FileError: on every rank: a file could not be written.
    """
    scratch = writing_at(place)
    metadata: Metadata | None = None
    failures: dict[int, BaseException] = {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in a single process
            metadata = torch_save(tensors, storage_writer=FileSystemWriter(scratch), planner=_RowMajor())
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}

    def read_own() -> tuple[dict[str, Entry], Starts]:
        # The rank that failed says why, since only that rank knows its limits.
        if this_rank() in failures:
            raise FileError(cannot_write(place, failures[this_rank()], again=AGAIN))
        if metadata is None:
            return {}, Starts()
        with writing(place, again=AGAIN):
            own = {file.name: entry_of(file) for file in scratch.glob(f"__{this_rank()}_*.distcp")}
            return own, starts_of(scratch, metadata, own)

    entries, starts = dict[str, Entry](), Starts()
    for some, begin in tell_all(together(read_own)):
        entries |= some
        starts |= begin
    assert metadata is not None, failures
    return metadata, entries, starts
