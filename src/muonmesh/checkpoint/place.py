"""Place: the path of a checkpoint, the path where it is written first, and the order of several checkpoints.

A checkpoint is written beside its place and then renamed. Names and the numbers in them decide; clocks never do.
For a checkpoint ``NAME`` there may be, beside it, as hidden folders::

    .NAME.writing   what is being written, or what a save that was cut off left behind
    .NAME.before    what NAME was, for the moment between two renames while another takes its place
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from muonmesh.checkpoint.manifest import MANIFEST_FILE, SETTINGS_FILE, is_whole, read_manifest
from muonmesh.checkpoint.metadata import DATA_FILE, METADATA_FILE
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, onto_disk

NUMBERED = re.compile(r"(?P<family>.*?)(?P<number>\d+)", re.DOTALL)
# What a file system says that has no locks, NFS among them for folders: there a second writer is not noticed.
CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


def writing_at(path: Path) -> Path:
    """Where it is written."""
    return path.with_name(f".{path.name}.writing")


def before_at(path: Path) -> Path:
    """Where the one is that it takes the place of."""
    return path.with_name(f".{path.name}.before")


def found_at(path: Path) -> Path:
    """Where a checkpoint is: at its place or, if the one that was to replace it never came, beside it."""
    if os.path.lexists(path) or not path.name:  # "." and "/" have no name, so nothing can be beside them
        return path
    before = before_at(path)
    return before if before.is_dir() else path


@contextlib.contextmanager
def writing_alone(path: Path) -> Iterator[Path]:
    """Lock the empty folder into which this process writes a checkpoint; remove what is written if that fails.

    The operating system frees the lock when the process ends, so nobody has to remove a file by hand. What cannot be
    removed stays for the next save.

    Raises:
        FileError: another process holds it, or something is at the place that is no checkpoint.
        OSError: it could not be made.
    """
    check_replaceable(path)
    missing = [folder for folder in path.parents if not folder.is_dir()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        onto_disk(folder.parent)
    scratch = writing_at(path)
    held = _locked(scratch, make=True)
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
    """Make sure that nothing would be lost at a place but an older checkpoint.

    Raises:
        FileError: naming what is there.
    """
    if not os.path.lexists(path):
        return
    found = "a link" if path.is_symlink() else "" if path.is_dir() else kind_of(path)
    if not found and (others := sorted(set(os.listdir(path)) - _own(path))):
        found = f"{others[0]!r} in it, which is not part of a checkpoint"
    if found:
        needed = "nothing there, or a checkpoint to replace"
        raise FileError(explain_error(str(path), found, needed, "Save under another name"))


def put(scratch: Path, path: Path) -> None:
    """Rename what has been written to its place; what was there goes once the new one is there.

    Raises:
        OSError: it could not; what was there is there.
    """
    before = before_at(path)
    replacing = os.path.lexists(path)
    if replacing:
        _remove(before)
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
    with contextlib.suppress(OSError):  # nobody reads it while there is something at the place
        _remove(before)


def numbered(directory: Path, family: str) -> list[tuple[int, Path]]:
    """The numbers of all that is called ``family`` and a number, cut off replacements included, the highest first."""
    found: dict[int, Path] = {}
    for name in os.listdir(directory) if directory.is_dir() else ():
        inner = name.removeprefix(".").removesuffix(".before") if name.endswith(".before") else name
        match = NUMBERED.fullmatch(inner)
        if match is not None and match["family"] == family:
            found[int(match["number"])] = directory / inner
    return sorted(found.items(), reverse=True)


def forget_older(path: Path, keep: int) -> None:
    """Of the checkpoints called as ``path`` is but for the number at the end, keep this one and the newest before it.

    Only whole ones count among those that are kept. Ones with a higher number are of a future that was given up. What
    cannot be removed, and what holds anything else, stays.

    Args:
        path: A checkpoint that has just been written; it stays whatever its number.
        keep: How many stay, this one included.
    """
    own = NUMBERED.fullmatch(path.name)
    if own is None:
        return
    kept = 1
    for number, other in numbered(path.parent, own["family"]):
        if other == path or found_at(other).is_symlink():
            continue
        if number < int(own["number"]) and kept < keep and is_whole(found_at(other)):
            kept += 1
            continue
        with contextlib.suppress(OSError, FileError):
            check_replaceable(other)
            for folder in (other, before_at(other)):
                _remove(folder)
    for scratch in sorted(path.parent.glob(f".{glob.escape(own['family'])}*.writing")):
        inner = NUMBERED.fullmatch(scratch.name.removeprefix(".").removesuffix(".writing"))
        if inner is not None and inner["family"] == own["family"]:
            with contextlib.suppress(OSError):
                if (held := _locked(scratch, make=False)) is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
                    os.close(held)


def _own(path: Path) -> set[str]:
    """The files in a folder that are a checkpoint's own."""
    known = {MANIFEST_FILE, METADATA_FILE, SETTINGS_FILE}
    with contextlib.suppress(FileError):
        known |= {*read_manifest(path)}
    return known | {name for name in os.listdir(path) if DATA_FILE.fullmatch(name)}


def _remove(path: Path) -> None:
    """Remove a folder; half of one is never taken for a checkpoint, since its manifest tells of more or is gone."""
    if os.path.lexists(path):
        shutil.rmtree(path)


def _locked(folder: Path, *, make: bool) -> int | None:
    """Open a folder and lock it; None where another process has."""
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
        os.close(held)  # its last holder has renamed it between our opening and our locking


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
