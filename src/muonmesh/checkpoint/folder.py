"""Folder: named tensors and settings as a folder, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from muonmesh.checkpoint.entries import CheckpointReader
from muonmesh.checkpoint.metadata import read_metadata
from muonmesh.checkpoint.together import on_first_rank

SETTINGS_FILE = "settings.json"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write a checkpoint. Called on all ranks."""
    save(dict(tensors), storage_writer=FileSystemWriter(Path(path)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        (Path(path) / SETTINGS_FILE).write_text(json.dumps(settings))
    if dist.is_initialized():
        on_first_rank(lambda: None)


class Contents:
    """A checkpoint that `look` has looked at."""

    def __init__(self, path: Path, settings: dict[str, Any], reader: CheckpointReader) -> None:
        self.path, self.settings, self._reader = path, settings, reader

    @property
    def held(self) -> dict[str, Any]:
        """What is held, by name: torch's records, with a ``size`` and ``properties.dtype`` each."""
        return dict(self._reader.metadata.state_dict_metadata)

    def read(self, tensors: dict[str, Any]) -> None:
        """Load into tensors, in place. Called on all ranks."""
        load(tensors, storage_reader=self._reader)


def look(path: str | os.PathLike[str]) -> Contents:
    """Look at a checkpoint without loading it."""
    folder = Path(path)
    reader = CheckpointReader(folder, read_metadata(folder))
    return Contents(folder, json.loads((folder / SETTINGS_FILE).read_text()), reader)
