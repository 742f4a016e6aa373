"""Entries: checks each tensor in a checkpoint's files before any of them is loaded."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.utils import _ReaderView

from muonmesh.checkpoint.archive import read_undamaged
from muonmesh.checkpoint.manifest import MANIFEST_FILE, REMEDY, unreadable
from muonmesh.checkpoint.ranks import together
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import FileError
from muonmesh.numerics.rules import never_negative
from muonmesh.step.state_layout import COUNT, RUNNING


class CheckpointReader(FileSystemReader):
    """Reads what `muonmesh.checkpoint.metadata.read_metadata` has accepted.

    Torch's own reader would unpickle the metadata. It reads tensors with ``torch.load(weights_only=True)``, and entries
    of other kinds without that; but metadata with such entries are not accepted.

    Attributes:
        folder: Where the checkpoint is.
        metadata: Which tensors it holds, and where.
        settings: What was saved beside the tensors, with the types of JSON.
    """

    def __init__(self, folder: Path, metadata: Metadata, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.folder, self.metadata, self.settings = folder, metadata, settings or {}

    @property
    def held(self) -> dict[str, Any]:
        """What is held, by name: torch's records, with a ``size`` and ``properties.dtype`` each."""
        return dict(self.metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that this reader was made with: torch asks for it, and must not unpickle the file."""
        return self.metadata

    def read(self, tensors: dict[str, Any], *, wrong: Callable[[str, Tensor], str]) -> None:
        """Load into tensors, in place. Called on all ranks. The checkpoint may hold others besides.

        The pieces in the files are read twice. First each is read by one rank, which looks at it. Only when all of them
        are right does every rank read what it needs into its tensors.

        Args:
            tensors: By name, as `folder.write` takes them; not mappings.
            wrong: Returns what is wrong with a piece of a tensor, in words; empty if nothing is.

        Raises:
            FileError: on every rank: one is missing, has another shape, or could not be read.
        """
        together(lambda: self.check_tensors(share=this_rank(), of=world_size(), wrong=wrong))
        try:
            with quietly():
                torch_load(tensors, storage_reader=self)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise unreadable(f"{self.folder}:", first) from error

    def check_known(self, names: Collection[str]) -> None:
        """Make sure that every file with tensors is one of ``names``, those of the manifest.

        Raises:
            FileError: naming the first that is not.
        """
        for place in self.metadata.storage_data.values():
            if place.relative_path not in names:
                path = self.folder / place.relative_path
                raise FileError(f"{path}: {MANIFEST_FILE} does not tell of it. {REMEDY}")

    def check_tensors(self, *, share: int, of: int, wrong: Callable[[str, Tensor], str]) -> None:
        """Read every ``of``-th piece of a tensor, beginning with number ``share``, and look at it.

        Args:
            share: Of the pieces in their order, the first to read.
            of: How many share them.
            wrong: Says what is wrong with the numbers in a piece, or nothing.

        Raises:
            FileError: naming the file and the tensor: not one, of another shape or dtype, or wrong.
        """
        pieces = [(name, entry, chunk) for name, entry in self.held.items() for chunk in entry.chunks]
        pieces = [piece for piece in pieces if math.prod(piece[2].sizes)]
        for name, entry, chunk in pieces[share::of]:
            place = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            path = self.folder / place.relative_path
            try:
                with path.open("rb") as file:
                    tensor = read_undamaged(_Piece(file, place.offset, place.length))
            except Exception as error:  # what damaged bytes make of the reader
                raise unreadable(f"{path}: {name}", error) from error
            expected = _told(chunk.sizes, entry.properties.dtype)
            is_tensor = type(tensor) is Tensor and tensor.layout is torch.strided
            told = _told(tensor.shape, tensor.dtype) if is_tensor else f"a {type(tensor).__name__}"
            if told != expected:
                raise FileError(f"{path}: found {told} for {name}; needed a tensor, {expected}. {REMEDY}")
            if found := wrong(name, tensor):
                raise FileError(f"{path}: found {found} in {name}; needed finite numbers. {REMEDY}")


class _Piece(_ReaderView):
    """A part of a file that can be read as a file. Unlike torch's own class, it seeks from its end, and not beyond."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.len}[whence]
        return super().seek(min(self.len, max(0, base + offset))) - self.offset


def wrong_numbers(name: str, tensor: Tensor) -> str:
    """What no training makes of a tensor of that name, in words: not finite, or negative where a square is meant."""
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        return "infinity or NaN"
    key = name.rpartition(".")[2]
    never = key in (COUNT, *RUNNING) or key in never_negative()
    return "a negative number" if never and bool((tensor < 0).any()) else ""


def _told(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warning that there is one process, which whoever has one knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
