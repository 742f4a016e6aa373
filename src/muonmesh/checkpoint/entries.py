"""Entries: checks all tensors in a checkpoint's files before loading any of them."""

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
from muonmesh.numerics.dtypes import real_of
from muonmesh.numerics.rules import never_negative
from muonmesh.step.state_layout import COUNT


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint whose metadata `muonmesh.checkpoint.metadata.read_metadata` has accepted.

    torch's FileSystemReader would unpickle the metadata. It reads tensors with ``torch.load(weights_only=True)``, but
    other entries without ``weights_only``; `read_metadata` refuses metadata with such entries.

    Attributes:
        folder: The folder of the checkpoint.
        metadata: The names, shapes and places of its tensors.
        settings: The settings that were saved beside the tensors, as JSON types.
    """

    def __init__(self, folder: Path, metadata: Metadata, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.folder, self.metadata, self.settings = folder, metadata, settings or {}

    @property
    def held(self) -> dict[str, Any]:
        """The tensors of the checkpoint, by name: torch's records, each with ``size`` and ``properties.dtype``."""
        return dict(self.metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of this reader. torch calls this method, which here does not unpickle the file."""
        return self.metadata

    def read(self, tensors: dict[str, Any], *, wrong: Callable[[str, Tensor], str]) -> None:
        """Load tensors from the checkpoint, in place. Called on all ranks.

        Each piece in the files is read twice. First, one rank reads and checks the piece. If all pieces are right,
        every rank reads the pieces that it needs.

        Args:
            tensors: The tensors to fill, by name, as for `folder.write`; no mappings. The checkpoint may have others.
            wrong: A function of name and piece that returns the fault of a piece in words; empty if it has none.

        Raises:
            FileError: on every rank: a tensor is missing, has another shape, or could not be read.
        """
        together(lambda: self.check_tensors(share=this_rank(), of=world_size(), wrong=wrong))
        try:
            with quietly():
                torch_load(tensors, storage_reader=self)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise unreadable(f"{self.folder}:", first) from error

    def check_known(self, names: Collection[str]) -> None:
        """Raise FileError unless every file with tensors is one of ``names``, the files of the manifest."""
        for place in self.metadata.storage_data.values():
            if place.relative_path not in names:
                path = self.folder / place.relative_path
                raise FileError(f"{path}: {MANIFEST_FILE} does not tell of it. {REMEDY}")

    def check_tensors(self, *, share: int, of: int, wrong: Callable[[str, Tensor], str]) -> None:
        """Read and check this rank's share of all pieces: every ``of``-th piece, from piece ``share`` on.

        Args:
            share: The index of the first piece to read.
            of: The number of ranks that share the pieces.
            wrong: A function of name and piece that returns the fault of a piece in words; empty if it has none.

        Raises:
            FileError: a piece is no tensor, has another shape or dtype, or is faulty; the message names the tensor.
        """
        pieces = [(name, entry, chunk) for name, entry in self.held.items() for chunk in entry.chunks]
        pieces = [piece for piece in pieces if math.prod(piece[2].sizes)]
        for name, entry, chunk in pieces[share::of]:
            place = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            path = self.folder / place.relative_path
            try:
                with path.open("rb") as file:
                    tensor = read_undamaged(_Piece(file, place.offset, place.length))
            except Exception as error:  # damaged bytes can raise any error in the reader
                raise unreadable(f"{path}: {name}", error) from error
            expected = _told(chunk.sizes, entry.properties.dtype)
            is_tensor = type(tensor) is Tensor and tensor.layout is torch.strided
            told = _told(tensor.shape, tensor.dtype) if is_tensor else f"a {type(tensor).__name__}"
            if told != expected:
                raise FileError(f"{path}: found {told} for {name}; needed a tensor, {expected}. {REMEDY}")
            if found := wrong(name, tensor):
                raise FileError(f"{path}: found {found} in {name}; needed finite numbers. {REMEDY}")


class _Piece(_ReaderView):
    """A part of a file that can be read like a file.

    Unlike torch's own class, it can seek from its end, and never seeks beyond its end.
    """

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.len}[whence]
        return super().seek(min(self.len, max(0, base + offset))) - self.offset


def wrong_numbers(name: str, tensor: Tensor) -> str:
    """Return, in words, which wrong numbers a state tensor has: infinity, NaN, or negative squares; empty if none."""
    if (tensor.is_floating_point() or tensor.is_complex()) and not bool(tensor.isfinite().all()):
        return "infinity or NaN"
    key = name.rpartition(".")[2]
    never = key == COUNT or key in never_negative()
    return "a negative number" if never and bool((real_of(tensor) < 0).any()) else ""


def _told(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Return a context without torch's warning that torch.distributed is disabled in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
