"""Manifest: records the sizes and hashes of a checkpoint's files, and finds files that have changed since."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from muonmesh.checkpoint.form import SIZE, TEXT, Kind, check_form, one_of, only
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, read_json, reason, replace_text

MANIFEST_FILE = "manifest.json"
SETTINGS_FILE = "settings.json"
REMEDY = "Remove the folder, or bring an undamaged copy"

_FORMAT = 1
_NAME = Kind("the name of a file in this folder", lambda name: name not in ("", ".", "..") and not {*name} & {*"/\\"})
_FORM = only(
    {
        "format": one_of([_FORMAT], ": another version wrote it"),
        "files": {_NAME: only({"bytes": SIZE, "sha256": TEXT})},
    }
)

Entry = tuple[int, str]  # bytes, SHA-256


def entry_of(path: Path) -> Entry:
    """Return the size and the SHA-256 of a file; an OSError where it cannot be read."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def unreadable(what: str, error: BaseException) -> FileError:
    """Return the error for what could not be read. What another user may read is not damaged, so it stays."""
    remedy = "Let the user of this process read it" if isinstance(error, PermissionError) else REMEDY
    return FileError(f"{what} could not be read: {reason(error)}. {remedy}")


def write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    """Write down what the files of a checkpoint are; an OSError where it cannot be written."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(entries.items())}
    replace_text(folder / MANIFEST_FILE, json.dumps({"format": _FORMAT, "files": files}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Read what the files of a checkpoint were.

    Raises:
        FileError: it is not what `write_manifest` wrote.
    """
    path = folder / MANIFEST_FILE
    content = check_form(
        str(path), read_json(path, needed="what a training wrote there"), _FORM, REMEDY, kind=FileError
    )
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}


def is_whole(folder: Path) -> bool:
    """Whether every file that the manifest tells of is there in its full size; contents are not read."""
    try:
        entries = read_manifest(folder)
        found = {name: os.stat(folder / name, follow_symlinks=False) for name in entries}
    except (OSError, FileError):
        return False
    return all(stat.S_ISREG(one.st_mode) and one.st_size == entries[name][0] for name, one in found.items())


def check_file(path: Path, needed: str) -> None:
    """Make sure that a file is there which can be read, and no link to one elsewhere; a FileError where it is not."""
    if path.is_symlink() or not path.is_file():
        found = "a link" if path.is_symlink() else kind_of(path)
        raise FileError(explain_error(str(path), found, needed, REMEDY))


def check_entries(folder: Path, entries: dict[str, Entry], names: Iterable[str]) -> None:
    """Make sure that files are what the manifest says.

    Raises:
        FileError: naming the first that is missing or has changed.
    """
    for name in names:
        path = folder / name
        check_file(path, f"the file that {MANIFEST_FILE} tells of")
        try:
            size, digest = entry_of(path)
        except OSError as error:
            raise unreadable(f"{path}:", error) from error
        expected_size, expected_digest = entries[name]
        if size != expected_size:
            raise FileError(f"{path}: found {size} bytes; needed {expected_size}, as {MANIFEST_FILE} says. {REMEDY}")
        if digest != expected_digest:
            raise FileError(f"{path}: its content has changed since it was written ({MANIFEST_FILE}). {REMEDY}")
