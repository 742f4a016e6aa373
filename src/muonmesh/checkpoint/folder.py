"""Folder: writes named tensors and settings into a folder, whole or not at all, and reads them without running code.

The folder holds::

    __0_0.distcp ...   the tensors, in the files of `torch.distributed.checkpoint`, one a rank
    .metadata          where each piece of each tensor is; torch pickles it, and it is read without running it
    settings.json      whatever else was saved, as JSON
    manifest.json      the size and the SHA-256 of all of these, written last

Hashes find damage, not intent: who can write into the folder can write the manifest anew. Then still nothing runs, and
names, shapes, dtypes and files are checked as before.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from muonmesh.checkpoint.entries import CheckpointReader
from muonmesh.checkpoint.manifest import (
    REMEDY,
    SETTINGS_FILE,
    Entry,
    check_entries,
    entry_of,
    read_manifest,
    write_manifest,
)
from muonmesh.checkpoint.metadata import METADATA_FILE, read_metadata
from muonmesh.checkpoint.place import found_at, put, writing_alone, writing_at
from muonmesh.checkpoint.ranks import on_first_rank, together
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError, explain_error
from muonmesh.files import cannot_write, kind_of, onto_disk, read_json, reason, replace_text, writing

AGAIN = "save again"


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write a checkpoint beside its place, onto the disk, and rename it. Called on all ranks.

    Whenever the process, the machine or the disk gives up, `read` finds either what was at ``path`` before or all of
    what is written now. Nothing else is left there when this function returns, or raises.

    Args:
        path: The folder, on a file system that all ranks share. A checkpoint that is there is replaced.
        tensors: By name, as `torch.distributed.checkpoint` takes them: plain ones (the first rank's are written),
            DTensors, or objects with its protocol; mappings of them too.
        settings: What JSON can say; the first rank's are written.

    Raises:
        FileError: on every rank: it could not be written, something else is there, or another process writes there.
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
            _check_shared(scratch, entries)
            replace_text(scratch / SETTINGS_FILE, text)
            everything = {**entries, **{name: entry_of(scratch / name) for name in (METADATA_FILE, SETTINGS_FILE)}}
            write_manifest(scratch, everything)
            onto_disk(scratch)
            put(scratch, place)

    with contextlib.ExitStack() as stack:
        on_first_rank(lock)
        entries = _write_tensors(place, dict(tensors))
        on_first_rank(finish)


class Contents:
    """A checkpoint whose files `look` has compared with the manifest. None of its tensors is loaded yet.

    Attributes:
        path: Where it is.
        settings: What was saved beside the tensors, with the types of JSON.
    """

    def __init__(self, path: Path, settings: dict[str, Any], reader: CheckpointReader) -> None:
        self.path, self.settings, self._reader = path, settings, reader

    @property
    def held(self) -> dict[str, Any]:
        """What is held, by name: torch's records, with a ``size`` and ``properties.dtype`` each."""
        return dict(self._reader.metadata.state_dict_metadata)

    def read(self, tensors: dict[str, Any], *, wrong: Callable[[str, Tensor], str]) -> None:
        """Load into tensors, in place. Called on all ranks. The checkpoint may hold others besides.

        The pieces in the files are read twice. First each is read by one rank, which looks at it. Only when all of them
        are right does every rank read what it needs into its tensors.

        Args:
            tensors: By name, as `write` takes them; not mappings.
            wrong: Returns what is wrong with a piece of a tensor, in words; empty if nothing is.

        Raises:
            FileError: on every rank: one is missing, has another shape, or could not be read.
        """
        together(lambda: self._reader.check_tensors(share=this_rank(), of=world_size(), wrong=wrong))
        try:
            with _quietly():
                torch_load(tensors, storage_reader=self._reader)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise FileError(f"{self.path}: could not be loaded: {reason(first)}. {REMEDY}") from error


def look(path: str | os.PathLike[str]) -> Contents:
    """Look at a checkpoint without loading it. Called on all ranks, which share the work.

    Args:
        path: What was given to `write`, by other ranks and another number of them perhaps.

    Raises:
        FileError: on every rank, naming the file and what is wrong with it: there is none, it has changed since it was
            written, or it holds something else than tensors.
    """
    place = Path(path)

    def inspect() -> Contents:
        folder = found_at(place)
        if folder.is_symlink() or not folder.is_dir():
            what = "a link" if folder.is_symlink() else kind_of(folder)
            raise FileError(explain_error(str(place), what, "the folder of a checkpoint"))
        entries = read_manifest(folder)
        if entries is not None:
            for name in (METADATA_FILE, SETTINGS_FILE):
                if name not in entries:
                    raise FileError(f"{folder}: its manifest does not tell of {name}. {REMEDY}")
            check_entries(
                folder, entries, [METADATA_FILE, SETTINGS_FILE, *sorted(entries)[this_rank() :: world_size()]]
            )
        settings = read_json(folder / SETTINGS_FILE, needed="what was written there")
        reader = CheckpointReader(folder, read_metadata(folder))
        if entries is not None:
            reader.check_known(entries)
        return Contents(folder, settings, reader)

    return together(inspect)


def _write_tensors(place: Path, tensors: dict[str, Any]) -> dict[str, Entry]:
    """Write them into the claimed folder and return what all ranks' files are."""
    scratch = writing_at(place)
    failed: str | None = None
    try:
        with _quietly():
            torch_save(tensors, storage_writer=FileSystemWriter(scratch))
    except CheckpointException as error:
        failed = cannot_write(place, next(iter(error.failures.values()))[0], again=AGAIN)

    def hash_own() -> dict[str, Entry]:
        if failed is not None:
            raise FileError(failed)
        with writing(place, again=AGAIN):
            return {file.name: entry_of(file) for file in scratch.glob(f"__{this_rank()}_*.distcp")}

    return {name: entry for each in tell_all(together(hash_own)) for name, entry in each.items()}


def _check_shared(scratch: Path, entries: Mapping[str, Entry]) -> None:
    for name in entries:
        if not (scratch / name).is_file():
            found, needed = f"no {name} here, which another rank wrote", "a folder that all ranks share"
            raise FileError(explain_error(str(scratch.parent), found, needed, "Save into one"))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that there is one process, which whoever has one knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
