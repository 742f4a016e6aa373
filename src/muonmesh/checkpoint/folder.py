"""Folder: writes named tensors and settings into a folder, whole or not at all, and reads them without running code.

The folder contains::

    __0_0.distcp ...   the tensors, as `torch.distributed.checkpoint` reads them, one file for each rank
    .metadata          the place of each piece of each tensor, a pickle for torch; muonmesh never reads it
    settings.json      all other saved data, as JSON
    manifest.json      the same places, and the size and the SHA-256 of all other files, written last; see `manifest`

It is written under a temporary name next to its path, and then renamed. Next to a checkpoint ``NAME``, two hidden
folders may exist::

    .NAME.writing   a checkpoint that is being written, or the rest of an interrupted save
    .NAME.before    the old checkpoint NAME, between the two renames that replace it

The hashes detect damage, not intended changes: a program that can write into the folder can also write a new manifest.
Even then no code can run, and names, shapes, dtypes and places are checked.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.utils import _create_file_view

from muonmesh.checkpoint.manifest import (
    BESIDE,
    DATA_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    SETTINGS_FILE,
    Manifest,
    SavedPiece,
    SavedTensor,
    Sizes,
    entry_of,
    merged_manifests,
    torch_metadata,
    write_manifest,
)
from muonmesh.checkpoint.record import LocalBoxes
from muonmesh.comm.gather_objects import gather_objects, on_every_rank, on_first_rank
from muonmesh.comm.storage import this_rank
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, onto_disk, reason, replace_text, writing

# Errors of file systems that cannot lock a folder, such as NFS. There, a second writer is not detected.
CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


def scratch_at(path: Path) -> Path:
    """Return the temporary path where a checkpoint is written."""
    return path.with_name(f".{path.name}.writing")


def previous_at(path: Path) -> Path:
    """Return the temporary path of the old checkpoint while it is being replaced."""
    return path.with_name(f".{path.name}.before")


def folder_at(path: Path) -> Path:
    """Return the path where a checkpoint is: ``path``, or the temporary path if a replacement was interrupted."""
    if os.path.lexists(path) or not path.name:  # "." and "/" have no name, so nothing can be beside them
        return path
    before = previous_at(path)
    return before if before.is_dir() else path


@contextlib.contextmanager
def locked_scratch(path: Path) -> Iterator[Path]:
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
    scratch = scratch_at(path)
    lock = lock_folder(scratch, make=True)
    if lock is None:
        needed, write = "one writer at a time", "Wait for its end, or save under another name"
        raise FileError(explain_error(str(path), "another process that is writing it", needed, write))
    try:
        _empty(scratch)
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_replaceable(path: Path) -> None:
    """Check that a path is free, or has only a checkpoint, which may be replaced; likewise both temporary paths.

    Raises:
        FileError: one of the paths has something else, which the message names.
    """
    for candidate in (path, scratch_at(path), previous_at(path)):
        if foreign := foreign_in(candidate):
            needed, write = "nothing there, or a checkpoint to replace", "Save under another name"
            if candidate != path:
                needed, write = "nothing there, or the rest of an interrupted save", f"Move it away, or {write.lower()}"
            raise FileError(explain_error(str(candidate), foreign, needed, write))


def move_into_place(scratch: Path, path: Path) -> None:
    """Rename a written checkpoint to its path, and then remove the old checkpoint.

    Raises:
        FileError: an earlier save has left an old checkpoint that cannot be removed.
        OSError: the rename failed; the old checkpoint is still at its path.
    """
    before = previous_at(path)
    replacing = os.path.lexists(path)
    if replacing:
        try:
            remove_folder(before)
        except OSError as error:  # it may belong to another user
            raise FileError(f"{before}: could not be removed: {reason(error)}. Remove it, then {AGAIN}") from error
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


def foreign_in(path: Path) -> str:
    """Return what a path has besides the files of a checkpoint, finished or not; empty if there is nothing else."""
    if path.is_symlink() or not path.is_dir():
        return kind_of(path, follow=False) if os.path.lexists(path) else ""
    others = sorted(name for name in os.listdir(path) if not _is_own(name) or (path / name).is_dir())
    return f"{others[0]!r} in it, which is not part of a checkpoint" if others else ""


def _is_own(name: str) -> bool:
    """Return whether this is the name of a file of a checkpoint, finished or not; NFS renames what is still open."""
    inner = name.removeprefix(".").removesuffix(".writing") if name.endswith(".writing") else name
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
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                os.close(descriptor)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.lstat()):
                return descriptor
        os.close(descriptor)  # another process renamed the folder after we opened it


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _Pickler(pickle.Pickler):
    """Writes properties of tensors with the five values that all torch reads; torch 2.15 adds one that 2.13 refuses."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorProperties):
            return copyreg.__newobj__, (type(value),), value.__getstate__()[:5]  # type: ignore[attr-defined, no-untyped-call]
        return NotImplemented


AGAIN = "save again"


def write(path: str | os.PathLike[str], tensors: Mapping[str, LocalBoxes], settings: Mapping[str, Any]) -> None:
    """Write a checkpoint to disk under a temporary name next to ``path``, and then rename it. Called on all ranks.

    If the process, the machine or the disk fails at any time, `open_checkpoint` finds either the old checkpoint or the
    complete new one. When this function returns or raises, it leaves no temporary files.

    Args:
        path: The folder, on a file system that all ranks share. An existing checkpoint is replaced.
        tensors: What this rank has of each tensor, by name. Of several ranks with the same box, one writes its own.
        settings: Data that JSON can represent; the first rank's are written.

    Raises:
        FileError: on every rank: the checkpoint could not be written, ``path`` has something else than a checkpoint, or
            another process is writing there.
        TypeError: the settings are not JSON.
    """
    target = Path(path)
    if not target.name or target.name == "..":
        raise FileError(explain_error(str(path), "no name of a folder", "one", "Save under a name"))
    text = json.dumps(settings)

    def lock() -> None:
        with writing(target, again=AGAIN):
            stack.enter_context(locked_scratch(target))

    def write_own() -> Manifest:
        with writing(target, raised=Exception, again=AGAIN):  # torch has errors of its own for a full disk
            return _write_boxes(scratch_at(target), tensors, assigned)

    def finish() -> None:
        with writing(target, again=AGAIN):
            scratch, manifest = scratch_at(target), merged_manifests(manifests)
            for name in manifest.files:
                if not (scratch / name).is_file():
                    fault, needed = f"no {name} here, which another rank wrote", "a folder that all ranks share"
                    raise FileError(explain_error(str(target), fault, needed, "Pass the same path on every rank"))
            with (scratch / METADATA_FILE).open("wb") as stream:
                _Pickler(stream).dump(torch_metadata(manifest.tensors.values()))
            onto_disk(scratch / METADATA_FILE)
            replace_text(scratch / SETTINGS_FILE, text)
            beside = {name: entry_of(scratch / name) for name in BESIDE}
            write_manifest(scratch, manifest._replace(files={**manifest.files, **beside}))
            onto_disk(scratch)
            move_into_place(scratch, target)

    with contextlib.ExitStack() as stack:
        on_first_rank(lock)
        assigned = _boxes_to_write(tensors)
        manifests = gather_objects(on_every_rank(write_own))
        on_first_rank(finish)


def _boxes_to_write(tensors: Mapping[str, LocalBoxes]) -> list[tuple[str, Sizes]]:
    """Return the boxes that this rank writes. Of the ranks with the same box, it is the one with the least to write."""
    local_sizes = {(name, at): box.nbytes for name, share in tensors.items() for at, box in share.boxes.items()}
    everyone = gather_objects(local_sizes)
    holders: dict[tuple[str, Sizes], list[int]] = {}
    for rank, sizes in enumerate(everyone):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    loads, assigned = [0] * len(everyone), []
    for key, ranks in holders.items():
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] += everyone[writer][key]
        if writer == this_rank() and everyone[writer][key]:
            assigned.append(key)
    return assigned


def _write_boxes(scratch: Path, tensors: Mapping[str, LocalBoxes], assigned: Sequence[tuple[str, Sizes]]) -> Manifest:
    """Write boxes of this rank into a file of the locked folder, each as a file of `torch.save`; return what is there.

    Raises:
        FileError: the folder is not there, so it is another one than the first rank's.
    """
    file, records = scratch / f"__{this_rank()}_0.distcp", dict[tuple[str, Sizes], tuple[int, int]]()
    pieces: dict[str, list[SavedPiece]] = {name: [] for name in tensors}
    if assigned:
        with contextlib.suppress(FileExistsError):
            scratch.mkdir(parents=True)  # it also asks a server whose answers are kept here
            scratch.rmdir()
            fault, write = f"no folder on rank {this_rank()} that rank 0 has made", "Pass the same path on every rank"
            raise FileError(explain_error(str(scratch), fault, "a folder that all ranks share", write))
        with file.open("wb") as stream:
            for name, at in assigned:
                box, begin = tensors[name].boxes[at].resolve_conj().resolve_neg().cpu(), stream.tell()
                torch.save(box.clone(memory_format=torch.contiguous_format), stream)  # else all of a larger memory
                records[name, at] = begin, stream.tell() - begin
        onto_disk(file)
        with file.open("rb") as stream:
            for (name, at), record in records.items():
                reader: Any = torch._C.PyTorchFileReader(_create_file_view(stream, *record))  # type: ignore[call-overload]
                start = record[0] + reader.get_record_offset("data/0")
                pieces[name].append(SavedPiece(at, tuple(tensors[name].boxes[at].shape), file.name, start, record))
    saved = {name: SavedTensor(name, dtype, shape, tuple(pieces[name])) for name, (shape, dtype, _) in tensors.items()}
    return Manifest({file.name: entry_of(file)} if assigned else {}, saved)
