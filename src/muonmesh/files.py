"""Files: reads and writes the files of a run; each error is one sentence with the file's name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muonmesh.errors import FileError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TOO_MANY_OPEN = {errno.EMFILE, errno.ENFILE}
# Messages of torch's writer and of numpy if the system wrote fewer bytes than requested.
TOOK_LESS = re.compile(r"unexpected pos|PytorchStreamWriter failed|requested and \d+ written")
AGAIN = "start again or go on with --resume"  # the default is for `muonmesh train`
NEARLY_NOTHING = 64 * 1024  # bytes; libraries do not always say why they could not write


@contextlib.contextmanager
def writing(path: Path, *, raised: type[Exception] = OSError, again: str = AGAIN) -> Iterator[None]:
    """Turn the error of a library that cannot write ``path`` into a FileError of one sentence.

    Args:
        path: The file or folder that is written.
        raised: The class of errors to turn; the tokenizers library raises errors of its own class.
        again: The advice for the time when ``path`` can be written again.

    Raises:
        FileError: ``path`` could not be written.
    """
    try:
        yield
    except FileError:
        raise
    except raised as error:
        raise FileError(cannot_write(path, error, again=again)) from error


def cannot_write(path: Path, error: BaseException, *, again: str = AGAIN) -> str:
    """Return the sentence about a file that could not be written: its path, the cause, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    memory = lacks_memory(error)
    if number is None and not memory and (_room_at(path) < NEARLY_NOTHING or TOOK_LESS.search(str(error))):
        # Space may be free again because another rank removed its unfinished file. A limit on file sizes stays.
        number = errno.EFBIG if _sizes_are_limited() and _room_at(path) >= NEARLY_NOTHING else errno.ENOSPC
    full = number in FULL
    why = reason(error) if number is None or not full else os.strerror(number)
    remedy = "Free some memory" if memory else "Choose a place that can be written"
    remedy = "Free some space there" if full else remedy
    remedy = "Allow more open files (ulimit -n)" if number in TOO_MANY_OPEN else remedy
    return f"{path}: could not be written: {why}. {remedy}, then {again}"


def _sizes_are_limited() -> bool:
    """Whether this process may not write files of any size (``ulimit -f``)."""
    try:
        import resource
    except ImportError:  # there are no such limits on Windows
        return False
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def reason(error: BaseException) -> str:
    """Return the cause of an error: the system's message without number and path, or the first line of the message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was missing: Python's, numpy's, or that of a tensor, for which torch raises a RuntimeError."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error) or "out of memory" in str(error)


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or leave the old file unchanged.

    The text is written to a second file and flushed to disk; this file then replaces the old one.

    Raises:
        FileError: the file could not be written. The old file is unchanged.
    """
    with writing(path):
        replace_text(path, text)


def scratch_of(name: str) -> str:
    """Return the name of the file that `replace_text` writes first, and leaves if the process is killed meanwhile."""
    return f".{name}.writing"


def replace_text(path: Path, text: str) -> None:
    """Write a whole file as `write_text` does, but raise the OSError itself if this fails."""
    scratch = path.with_name(scratch_of(path.name))
    try:
        scratch.unlink(missing_ok=True)  # the rest of an interrupted write; or a link, which would lead elsewhere
        with scratch.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def onto_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path, *, needed: str) -> str:
    """Read a regular file of UTF-8 text.

    Raises:
        FileError: there is no such file, or it cannot be read. The message says what is ``needed``.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise FileError(f"{path}: found {kind_of(path)}; needed {needed}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not text in UTF-8 ({error.reason}); needed {needed}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: could not be read: {reason(error)}; needed {needed}") from error


def read_json(path: Path, *, needed: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileError: the file is no JSON object, or a name occurs twice in an object.
    """
    text = read_text(path, needed=needed)
    try:
        content = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON ({reason(error)}); needed {needed}") from error
    if not isinstance(content, dict):
        raise FileError(f"{path}: found {json_type(content)}; needed a JSON object, {needed}")
    return content


def is_integer(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a finite number."""
    number = is_integer(value) or isinstance(value, float)
    return number and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]


def json_type(value: object) -> str:
    """Return the JSON name of a value's type, with an article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def kind_of(path: Path, *, follow: bool = True) -> str:
    """Return the kind of a path in words, such as "a folder", without opening it; links are followed if ``follow``."""
    if path.is_symlink() and not follow:
        return "a link"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return "a link to nothing" if path.is_symlink() else "nothing there"
        return reason(error)
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        double = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{double!r} is there twice")
    return content


def _room_at(path: Path) -> int:
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return NEARLY_NOTHING
