"""Folder: named tensors and settings as a folder that is whole or not there, and back. Nothing in it can execute.

What is in it::

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

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from muonmesh.checkpoint.entries import CheckpointReader
from muonmesh.checkpoint.manifest import REMEDY, Entry, check_entries, entry_of, read_manifest, write_manifest
from muonmesh.checkpoint.metadata import METADATA_FILE, read_metadata
from muonmesh.checkpoint.place import Claim, forget_older, found_at, put, writing_at
from muonmesh.checkpoint.ranks import on_first_rank, rank_in, ranks_in, together
from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError, explain_error
from muonmesh.files import cannot_write, kind_of, onto_disk, read_json, reason, replace_text, writing

SETTINGS_FILE = "settings.json"
AGAIN = "save again"


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    settings: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    keep: int | None = None,
    settings_file: str = SETTINGS_FILE,
    beside: str = "",
    again: str = AGAIN,
) -> None:
    """Write a checkpoint beside its place, onto the disk, and rename it. Called on all ranks.

    Whenever the process, the machine or the disk gives up, `read` finds either what was at ``path`` before or all of
    what is written now. Nothing else is left there when this function returns, or raises.

    Args:
        path: The folder, on a file system that all ranks share. A checkpoint that is there is replaced.
        tensors: By name, as `torch.distributed.checkpoint` takes them: plain ones (the first rank's are written),
            DTensors, or objects with its protocol; mappings of them too.
        settings: What JSON can say; the first rank's are written.
        group: The ranks that call; None for all.
        keep: Of the checkpoints called as this one but for the number at the end of the name, how many stay, this one
            included: the newest whole ones by their numbers. None: all.
        settings_file: What the settings are called in the folder.
        beside: What else is kept, as an error about a full disk tells it.
        again: What to do once there is room, as that error tells it.

    Raises:
        FileError: on every rank: it could not be written, something else is there, or another process writes there.
        TypeError: the settings are not JSON.
        ValueError: ``keep`` is less than one.
    """
    place = Path(path)
    if keep is not None and keep < 1:
        raise ValueError(explain_error("keep", str(keep), "at least 1, or None to keep all"))
    if not place.name or place.name == "..":
        raise FileError(explain_error(str(path), "no name of a folder", "one", "Save under a name"))
    text = json.dumps(settings)
    claims: list[Claim] = []

    def claim() -> None:
        with writing(place, beside=beside, again=again):
            claims.append(Claim(place, settings_file=settings_file))

    on_first_rank(claim, group)
    try:
        entries = _write_tensors(place, dict(tensors), group, beside=beside, again=again)

        def finish() -> None:
            with writing(place, beside=beside, again=again):
                scratch = claims[0].scratch
                _check_shared(scratch, entries)
                replace_text(scratch / settings_file, text)
                everything = {**entries, **{name: entry_of(scratch / name) for name in (METADATA_FILE, settings_file)}}
                write_manifest(scratch, everything)
                onto_disk(scratch)
                put(scratch, place)

        on_first_rank(finish, group)
        if claims and keep is not None:
            forget_older(place, keep, settings_file=settings_file)
    except BaseException:
        for held in claims:
            held.drop()
        raise
    for held in claims:
        held.release()


class Contents:
    """A checkpoint that `look` has looked at: its files are what the manifest says. None of its tensors is loaded yet.

    Attributes:
        path: Where it is.
        settings: What was saved beside the tensors, with the types of JSON.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], reader: CheckpointReader, group: dist.ProcessGroup | None
    ) -> None:
        self.path, self.settings, self._reader, self._group = path, settings, reader, group

    @property
    def held(self) -> dict[str, Any]:
        """What is held, by name: torch's records, with a ``size`` and ``properties.dtype`` each."""
        return dict(self._reader.metadata.state_dict_metadata)

    def read(
        self,
        tensors: dict[str, Any],
        *,
        wrong: Callable[[str, Tensor], str] = lambda name, tensor: "",
        partly: bool = False,
    ) -> None:
        """Load into tensors, in place. Called on all ranks.

        The pieces in the files are read twice. First each is read by one rank, which looks at it. Only when all of them
        are right does every rank read what it needs into its tensors.

        Args:
            tensors: By name, as `write` takes them; not mappings.
            wrong: Returns what is wrong with a piece of a tensor, in words; empty if nothing is.
            partly: Whether these may be fewer than all that the checkpoint holds.

        Raises:
            FileError: on every rank, naming the first tensor that is missing, that nobody asked for, that has another
                shape or dtype, or that could not be read.
        """
        names = {name for each in tell_all(sorted(tensors), group=self._group) for name in each}
        names.update(self.held if partly else ())
        together(lambda: self._reader.check_names(tensors, names), self._group)
        rank, ranks = rank_in(self._group), ranks_in(self._group)
        together(lambda: self._reader.check_tensors(share=rank, of=ranks, wrong=wrong), self._group)
        try:
            with _quietly():
                torch_load(tensors, storage_reader=self._reader, process_group=self._group)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise FileError(f"{self.path}: could not be loaded: {reason(first)}. {REMEDY}") from error


def look(
    path: str | os.PathLike[str], group: dist.ProcessGroup | None = None, *, settings_file: str = SETTINGS_FILE
) -> Contents:
    """Look at a checkpoint without loading it. Called on all ranks, which share the work.

    Args:
        path: What was given to `write`.
        group: The ranks that call; None for all. Not those that wrote it, nor as many.
        settings_file: What the settings are called in the folder.

    Raises:
        FileError: on every rank, naming the file and what is wrong with it: there is none, it has changed since it was
            written, or it holds something else than tensors.
    """
    place = Path(path)
    found: list[Contents] = []
    rank, ranks = rank_in(group), ranks_in(group)

    def inspect() -> None:
        folder = found_at(place)
        if folder.is_symlink() or not folder.is_dir():
            what = "a link" if folder.is_symlink() else kind_of(folder)
            raise FileError(explain_error(str(place), what, "the folder of a checkpoint"))
        entries = read_manifest(folder)
        if entries is not None:
            for name in (METADATA_FILE, settings_file):
                if name not in entries:
                    raise FileError(f"{folder}: its manifest does not tell of {name}. {REMEDY}")
            check_entries(folder, entries, [METADATA_FILE, settings_file, *sorted(entries)[rank::ranks]])
        settings = read_json(folder / settings_file, needed="what was written there")
        reader = CheckpointReader(folder, read_metadata(folder))
        if entries is not None:
            reader.check_known(entries)
        found.append(Contents(folder, settings, reader, group))

    together(inspect, group)
    return found[0]


def read(
    path: str | os.PathLike[str], tensors: dict[str, Any], group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Load a checkpoint into tensors, in place, and return its settings: `look`, then `Contents.read`.

    Raises:
        FileError: on every rank, as those two do; no tensor has changed.
    """
    contents = look(path, group)
    contents.read(tensors)
    return contents.settings


def _write_tensors(
    place: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None, *, beside: str, again: str
) -> dict[str, Entry]:
    """Write them into the claimed folder and return what all ranks' files are."""
    scratch = writing_at(place)
    failed: str | None = None
    try:
        with _quietly():
            torch_save(tensors, storage_writer=FileSystemWriter(scratch), process_group=group)
    except CheckpointException as error:
        failed = cannot_write(place, next(iter(error.failures.values()))[0], beside=beside, again=again)
    own: dict[str, Entry] = {}

    def hash_own() -> None:
        if failed is not None:
            raise FileError(failed)
        with writing(place, beside=beside, again=again):
            own.update({file.name: entry_of(file) for file in scratch.glob(f"__{rank_in(group)}_*.distcp")})

    together(hash_own, group)
    return {name: entry for each in tell_all(own, group=group) for name, entry in each.items()}


def _check_shared(scratch: Path, entries: Mapping[str, Entry]) -> None:
    for name in entries:
        if not (scratch / name).is_file():
            raise FileError(
                explain_error(
                    str(scratch.parent),
                    f"no {name} here, which another rank wrote",
                    "a folder that all ranks share",
                    "Save into one",
                )
            )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that there is one process, which whoever has one knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
