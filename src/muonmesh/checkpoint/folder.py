"""Folder: writes named tensors and settings into a folder, whole or not at all, and reads them without running code.

The folder contains::

    __0_0.distcp ...   the tensors, in the files of `torch.distributed.checkpoint`, one for each rank
    index.json         the place of each piece of each tensor, see `index`
    .metadata          the same for torch.distributed.checkpoint, a pickle; muonmesh writes it and never reads it
    settings.json      all other saved data, as JSON
    manifest.json      the size and the SHA-256 of all other files, written last

It is written under a temporary name next to its path, and then renamed. Next to a checkpoint ``NAME``, two hidden
folders may exist::

    .NAME.writing   a checkpoint that is being written, or the rest of an interrupted save
    .NAME.before    the old checkpoint NAME, between the two renames that replace it

The hashes detect damage, not intended changes: a program that can write into the folder can also write a new manifest.
Even then no code can run, and names, shapes, dtypes and places are checked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from muonmesh.checkpoint.index import (
    BESIDE,
    DATA_FILE,
    MANIFEST_FILE,
    REMEDY,
    SETTINGS_FILE,
    Entry,
    SavedTensor,
    Starts,
    check_entries,
    entry_of,
    read_index,
    read_manifest,
    starts_of,
    write_index,
    write_manifest,
)
from muonmesh.checkpoint.ranks import on_first_rank, together
from muonmesh.checkpoint.record import STATE, Share
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError, explain_error
from muonmesh.files import cannot_write, kind_of, onto_disk, read_json, replace_text, writing
from muonmesh.layout.region import Block, Region, overlap
from muonmesh.step.state_layout import wrong_numbers

# Errors of file systems that cannot lock a folder, such as NFS. There, a second writer is not detected.
CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


def writing_at(path: Path) -> Path:
    """Return the temporary path where a checkpoint is written."""
    return path.with_name(f".{path.name}.writing")


def before_at(path: Path) -> Path:
    """Return the temporary path of the old checkpoint while it is being replaced."""
    return path.with_name(f".{path.name}.before")


def found_at(path: Path) -> Path:
    """Return the path where a checkpoint is: ``path``, or the temporary path if a replacement was interrupted."""
    if os.path.lexists(path) or not path.name:  # "." and "/" have no name, so nothing can be beside them
        return path
    before = before_at(path)
    return before if before.is_dir() else path


@contextlib.contextmanager
def writing_alone(path: Path) -> Iterator[Path]:
    """Return a context with an empty, locked folder for writing a checkpoint; if an error is raised, remove the folder.

    The operating system frees the lock when the process ends, so no lock file remains. Files that cannot be removed
    stay until the next save.

    Raises:
        FileError: another process holds the lock, or ``path`` exists and is no checkpoint.
        OSError: the folder could not be made.
    """
    check_replaceable(path)
    missing = [folder for folder in path.parents if not folder.is_dir()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        onto_disk(folder.parent)
    scratch = writing_at(path)
    held = lock_folder(scratch, make=True)
    if held is None:
        needed, write = "one writer at a time", "Wait for its end, or save under another name"
        raise FileError(explain_error(str(path), "another process that is writing it", needed, write))
    try:
        _empty(scratch)
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(held)


def check_replaceable(path: Path) -> None:
    """Check that a path is free, or has only a checkpoint, which may be replaced; likewise both temporary paths.

    Raises:
        FileError: one of the paths has something else, which the message names.
    """
    for place in (path, writing_at(path), before_at(path)):
        if found := foreign_at(place):
            needed, write = "nothing there, or a checkpoint to replace", "Save under another name"
            if place != path:
                needed, write = "nothing there, or the rest of an interrupted save", f"Move it away, or {write.lower()}"
            raise FileError(explain_error(str(place), found, needed, write))


def put(scratch: Path, path: Path) -> None:
    """Rename a written checkpoint to its path, and then remove the old checkpoint.

    Raises:
        OSError: the rename failed; the old checkpoint is still at its path.
    """
    before = before_at(path)
    replacing = os.path.lexists(path)
    if replacing:
        remove_folder(before)
        path.rename(before)
    try:
        scratch.rename(path)
        onto_disk(path.parent)
    except BaseException:
        if not os.path.lexists(scratch):
            path.rename(scratch)
        if replacing:
            before.rename(path)
        raise
    with contextlib.suppress(OSError):  # the old checkpoint is not read while the new one exists
        remove_folder(before)


def foreign_at(path: Path) -> str:
    """Return what a path has besides the files of a checkpoint, finished or not; empty if there is nothing else."""
    if path.is_symlink() or not path.is_dir():
        return kind_of(path, follow=False) if os.path.lexists(path) else ""
    others = sorted(name for name in os.listdir(path) if not _is_own(name))
    return f"{others[0]!r} in it, which is not part of a checkpoint" if others else ""


def _is_own(name: str) -> bool:
    """Return whether this is the name of a file of a checkpoint, finished or not; NFS renames what is still open."""
    inner = name.removeprefix(".").removesuffix(".writing") if name.endswith(".writing") else name.removesuffix(".tmp")
    return inner in (MANIFEST_FILE, *BESIDE) or DATA_FILE.fullmatch(inner) is not None or name.startswith(".nfs")


def remove_folder(path: Path) -> None:
    """Remove a folder, if it exists.

    An interrupted removal leaves no valid checkpoint, since the manifest then names missing files or is missing itself.
    """
    if os.path.lexists(path):
        shutil.rmtree(path)


def lock_folder(folder: Path, *, make: bool) -> int | None:
    """Open and lock a folder, and return its file descriptor; None if another process holds the lock."""
    import fcntl  # there is none on Windows, where the rest of the package can be imported

    while True:
        if make:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            return None
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                os.close(held)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), folder.lstat()):
                return held
        os.close(held)  # another process renamed the folder after we opened it


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class CheckpointReader:
    """Reads a checkpoint of `muonmesh.checkpoint.save` whose index and settings have been read.

    Attributes:
        folder: The folder of the checkpoint.
        held: Its tensors by name.
        settings: The settings that were saved beside the tensors, as JSON types.
    """

    folder: Path
    held: Mapping[str, SavedTensor]
    settings: dict[str, Any]

    def read(self, shares: Mapping[str, Share]) -> None:
        """Load tensors from the checkpoint into the memory of shares.

        Args:
            shares: This rank's boxes, by the names of tensors in the checkpoint and with their dtypes.

        Raises:
            FileError: a tensor could not be read, or state has numbers that no step leaves. Weights may
                have any numbers.
        """
        for name, share in shares.items():
            boxes = [
                (box, Block(Region.box(at, tuple(box.shape)), int(box.storage_offset()), box.stride()))
                for at, box in share.boxes.items()
                if box.numel()
            ]
            for piece in self.held[name].pieces:
                both = [(box, common) for box, block in boxes if (common := overlap(block, piece.block)) is not None]
                elements = self.held[name].read(self.folder, piece) if both else None
                for box, common in both:
                    assert elements is not None
                    target = box.as_strided(common.shape, common.storage_strides, common.storage_start)
                    target.copy_(elements.as_strided(common.shape, common.matrix_strides, common.matrix_start))
            faults = (wrong_numbers(name, box) for box in share.boxes.values() if name.startswith(f"{STATE}."))
            if fault := next(filter(None, faults), ""):
                raise FileError(f"{self.folder}: found {fault} in {name}; needed finite numbers. {REMEDY}")


AGAIN = "save again"


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
            write_manifest(scratch, entries | {name: entry_of(scratch / name) for name in BESIDE})
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
            found = kind_of(folder, follow=False)
            raise FileError(explain_error(str(place), found, "the folder of a checkpoint"))
        entries = read_manifest(folder)
        check_entries(folder, entries, [*BESIDE, *sorted(entries)[this_rank() :: world_size()]])
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
