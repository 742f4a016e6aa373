"""Folders: a checkpoint's folder, written from tensors of a test's own, read into them, and forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muonmesh.checkpoint import folder
from muonmesh.checkpoint.manifest import MANIFEST_FILE, digest_of, entry_of
from muonmesh.checkpoint.reader import open_checkpoint
from muonmesh.checkpoint.record import _written, fill, new_boxes
from muonmesh.comm.gather_objects import on_every_rank
from muonmesh.comm.placing import storage_of
from muonmesh.comm.storage import local_of
from muonmesh.errors import FileError


def write(path: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write plain tensors and DTensors as a checkpoint."""
    parts = {name: (local_of(tensor), storage_of(name, tensor, None)) for name, tensor in tensors.items()}
    folder.write(path, {name: _written(*part) for name, part in parts.items()}, settings)


def forge(path: Path, change: Callable[[Any], object] = lambda content: None) -> None:
    """Change the manifest, and let it tell of the files as they are, as whoever can write one of them can."""
    content = json.loads((path / MANIFEST_FILE).read_text())
    others = {file.name: entry_of(file) for file in path.iterdir() if file.is_file() and file.name != MANIFEST_FILE}
    content["files"] = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in others.items()}
    change(content)
    (path / MANIFEST_FILE).write_text(json.dumps({**content, "sha256": digest_of(content)}))


def read(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into tensors, in place, and return its settings."""
    contents = open_checkpoint(path)
    shares, storages = {}, {}
    for name, tensor in tensors.items():
        saved, storage = contents.tensors.get(name), storage_of(name, tensor, None)
        if saved is None or saved.shape != tuple(storage.shape):
            raise FileError(f"{path}: {name} is not there, or of another shape")
        storages[name] = storage
        shares[name] = new_boxes(storage, saved.dtype, local_of(tensor).device)
    on_every_rank(lambda: contents.read(shares))
    for name, tensor in tensors.items():
        fill(local_of(tensor), storages[name], shares[name])
    return contents.settings
