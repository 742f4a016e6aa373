"""Manifest: records the sizes and hashes of a checkpoint's files, and finds files that have changed since."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from muonmesh.errors import FileError
from muonmesh.files import check_fields, read_json, reason, replace_text

MANIFEST_FILE = "manifest.json"
SETTINGS_FILE = "settings.json"
FORMAT = 1
REMEDY = "Remove the folder, or bring an undamaged copy"

Entry = tuple[int, str]  # bytes, SHA-256


def entry_of(path: Path) -> Entry:
    """Return the size and the SHA-256 of a file; an OSError where it cannot be read."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    """Write down what the files of a checkpoint are; an OSError where it cannot be written."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(entries.items())}
    replace_text(folder / MANIFEST_FILE, json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Read what the files of a checkpoint were; None for a checkpoint older than manifests.

    Raises:
        FileError: it is not what `write_manifest` wrote.
    """
    path = folder / MANIFEST_FILE
    if not path.exists() and not path.is_symlink():
        return None
    content = read_json(path, needed="what a training wrote there")
    check_fields(path, content, {"format": "a whole number of at least 0", "files": "an object"})
    if content["format"] != FORMAT:
        raise FileError(f"{path}: found format {content['format']}; needed {FORMAT}: another version wrote it")
    entries: dict[str, Entry] = {}
    for name, entry in content["files"].items():
        if not isinstance(entry, dict) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise FileError(f"{path}: found {name!r}; needed the name of a file in this folder, with its size and hash")
        check_fields(path, entry, {"bytes": "a whole number of at least 0", "sha256": "a string"})
        entries[name] = entry["bytes"], entry["sha256"]
    return entries


def is_whole(folder: Path) -> bool:
    """Whether every file that the manifest tells of is there in its full size; contents are not read.

    One older than manifests was renamed when it was whole, so it counts as whole if there is anything in it.
    """
    try:
        entries = read_manifest(folder)
        if entries is None:
            return bool(os.listdir(folder))
        found = {name: os.stat(folder / name, follow_symlinks=False) for name in entries}
    except (OSError, FileError):
        return False
    return all(stat.S_ISREG(one.st_mode) and one.st_size == entries[name][0] for name, one in found.items())


def check_entries(folder: Path, entries: dict[str, Entry], names: Iterable[str]) -> None:
    """Make sure that files are what the manifest says.

    Raises:
        FileError: naming the first that is missing or has changed.
    """
    for name in names:
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise FileError(f"{path}: not there, or not a file; {MANIFEST_FILE} tells of it. {REMEDY}")
            size, digest = entry_of(path)
        except OSError as error:
            raise FileError(f"{path}: could not be read: {reason(error)}. {REMEDY}") from error
        expected_size, expected_digest = entries[name]
        if size != expected_size:
            raise FileError(f"{path}: found {size} bytes; needed {expected_size}, as {MANIFEST_FILE} says. {REMEDY}")
        if digest != expected_digest:
            raise FileError(f"{path}: its content has changed since it was written ({MANIFEST_FILE}). {REMEDY}")
