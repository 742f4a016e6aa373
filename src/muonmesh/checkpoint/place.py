"""Place: the path of a checkpoint, and the temporary path where it is written.

A checkpoint is written under a temporary name next to its path, and then renamed. Next to a checkpoint ``NAME``, two
hidden folders may exist::

    .NAME.writing   a checkpoint that is being written, or the rest of an interrupted save
    .NAME.before    the old checkpoint NAME, between the two renames that replace it
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from muonmesh.checkpoint.manifest import DATA_FILE, INDEX_FILE, MANIFEST_FILE, METADATA_FILE, SETTINGS_FILE
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, onto_disk

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
        return "a link" if path.is_symlink() else kind_of(path) if os.path.lexists(path) else ""
    others = sorted(name for name in os.listdir(path) if not _is_own(name))
    return f"{others[0]!r} in it, which is not part of a checkpoint" if others else ""


def _is_own(name: str) -> bool:
    """Return whether this is the name of a file of a checkpoint, finished or not; NFS renames what is still open."""
    inner = name.removeprefix(".").removesuffix(".writing") if name.endswith(".writing") else name.removesuffix(".tmp")
    known = {MANIFEST_FILE, METADATA_FILE, INDEX_FILE, SETTINGS_FILE}
    return inner in known or DATA_FILE.fullmatch(inner) is not None or name.startswith(".nfs")


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
