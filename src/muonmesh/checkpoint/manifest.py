"""Manifest: records the sizes and hashes of a checkpoint's files, and finds files that have changed since."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from muonmesh.checkpoint.form import SIZE, TEXT, Kind, check_form, one_of, only
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, lacks_memory, read_json, reason, replace_text

METADATA_FILE = ".metadata"
INDEX_FILE = "index.json"
MANIFEST_FILE = "manifest.json"
SETTINGS_FILE = "settings.json"
DATA_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")  # in the folder itself: no path leads out of it
REMEDY = "Load another checkpoint, or bring an undamaged copy"

_FORMAT = 2
_OWN = (METADATA_FILE, INDEX_FILE, SETTINGS_FILE)
_NAME = Kind("the name of a file of a checkpoint", lambda name: name in _OWN or DATA_FILE.fullmatch(name) is not None)
_FORM = only(
    {
        "format": one_of([_FORMAT], ": another version wrote it"),
        "files": {_NAME: only({"bytes": SIZE, "sha256": TEXT})},
    }
)

Entry = tuple[int, str]  # bytes, SHA-256


def entry_of(path: Path) -> Entry:
    """Return the size and the SHA-256 of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def unreadable(what: str, error: BaseException) -> FileError:
    """Return the error for a file that could not be read; without permission or memory, the file is not damaged."""
    remedy = "Let the user of this process read it" if isinstance(error, PermissionError) else REMEDY
    if lacks_memory(error):
        remedy = "Free some memory and load again"
    return FileError(f"{what} could not be read: {reason(error)}. {remedy}")


def write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    """Write the manifest of a checkpoint: the size and the SHA-256 of each file.

    Raises:
        OSError: the manifest cannot be written.
    """
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(entries.items())}
    replace_text(folder / MANIFEST_FILE, json.dumps({"format": _FORMAT, "files": files}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return the size and the SHA-256 of each file of a checkpoint, from its manifest.

    Raises:
        FileError: the manifest is missing, or has another form than `write_manifest` writes.
    """
    path = folder / MANIFEST_FILE
    if (names := set(os.listdir(folder))).isdisjoint({MANIFEST_FILE, SETTINGS_FILE}):
        found, write = f"no {MANIFEST_FILE}", "Pass the folder that save was given"
        if METADATA_FILE in names:
            found = "a checkpoint of torch.distributed.checkpoint"
            write = 'Load it as torch does: state = dict(zip(("model", "optimizer"), get_state_dict(model, '
            write += "optimizer))), torch.distributed.checkpoint.load(state, checkpoint_id=path) with the keys that it "
            write += 'was saved with, then set_state_dict(model, optimizer, model_state_dict=state["model"], '
            write += 'optim_state_dict=state["optimizer"])'
        raise FileError(explain_error(str(folder), found, "a checkpoint of muonmesh.checkpoint.save", write))
    needed = f"the sizes and hashes that save wrote there last. {REMEDY}"
    content = check_form(str(path), read_json(path, needed=needed), _FORM, REMEDY, kind=FileError)
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}


def check_file(path: Path, needed: str) -> None:
    """Raise FileError unless a path is a file, and not a link."""
    if path.is_symlink() or not path.is_file():
        found = "a link" if path.is_symlink() else kind_of(path)
        raise FileError(explain_error(str(path), found, needed, REMEDY))


def check_entries(folder: Path, entries: dict[str, Entry], names: Iterable[str]) -> None:
    """Check the sizes and hashes of some files of a checkpoint.

    Args:
        folder: The folder of the checkpoint.
        entries: The size and the SHA-256 of each file, from the manifest.
        names: The files to check.

    Raises:
        FileError: a file is missing or has changed; the message names the first.
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
