"""Folders: a checkpoint's folder read into tensors of a test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muonmesh.checkpoint.folder import look
from muonmesh.checkpoint.ranks import together
from muonmesh.checkpoint.record import fill, wanted
from muonmesh.comm.placing import storage_of
from muonmesh.comm.storage import local_of
from muonmesh.errors import FileError


def read(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into tensors, in place, and return its settings."""
    contents = look(path)
    shares, storages = {}, {}
    for name, tensor in tensors.items():
        saved, storage = contents.held.get(name), storage_of(name, tensor, None)
        if saved is None or saved.shape != tuple(storage.shape):
            raise FileError(f"{path}: {name} is not there, or of another shape")
        storages[name] = storage
        shares[name] = wanted(storage, saved.dtype, local_of(tensor).device)
    together(lambda: contents.read(shares))
    for name, tensor in tensors.items():
        fill(local_of(tensor), storages[name], shares[name])
    return contents.settings
