"""Entries: checks all tensors in a checkpoint's files before loading any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muonmesh.checkpoint.index import SavedTensor
from muonmesh.checkpoint.manifest import REMEDY
from muonmesh.checkpoint.ranks import together
from muonmesh.checkpoint.share import Share
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import FileError
from muonmesh.layout.region import Block, Region, overlap

Wrong = Callable[[str, Tensor], str]
"""A function of a tensor's name and a piece of the tensor that returns the fault of the piece, empty if it has none."""


@dataclass(frozen=True)
class CheckpointReader:
    """Reads a checkpoint of `muonmesh.checkpoint.save` whose index and settings have been read.

    Attributes:
        folder: The folder of the checkpoint.
        held: Its tensors by name.
        settings: The settings that were saved beside the tensors, as JSON types.
    """

    folder: Path
    held: Mapping[str, SavedTensor]
    settings: dict[str, Any]

    def read(self, shares: Mapping[str, Share], *, wrong: Wrong) -> None:
        """Load tensors from the checkpoint into the memory of shares. Called on all ranks.

        Each piece in the files is read twice. First, one rank reads and checks the piece. If all pieces are right,
        every rank reads the pieces that it needs.

        Args:
            shares: This rank's boxes, by the names of tensors in the checkpoint and with their dtypes.
            wrong: Finds the fault of a piece.

        Raises:
            FileError: on every rank: a tensor is faulty or could not be read.
        """
        together(lambda: self.check(share=this_rank(), of=world_size(), wrong=wrong))
        together(lambda: self._fill(shares))

    def check(self, *, share: int, of: int, wrong: Wrong) -> None:
        """Read and check this rank's share of all pieces: every ``of``-th piece, from piece ``share`` on.

        Raises:
            FileError: a piece could not be read, or is faulty; the message names the tensor.
        """
        pieces = [(tensor, piece) for tensor in self.held.values() for piece in tensor.pieces]
        for tensor, piece in pieces[share::of]:
            if found := wrong(tensor.name, tensor.read(self.folder, piece)):
                path = self.folder / piece.file
                raise FileError(f"{path}: found {found} in {tensor.name}; needed finite numbers. {REMEDY}")

    def _fill(self, shares: Mapping[str, Share]) -> None:
        for name, share in shares.items():
            boxes = [
                (box, Block(Region.box(at, tuple(box.shape)), int(box.storage_offset()), box.stride()))
                for at, box in share.boxes.items()
                if box.numel()
            ]
            for piece in self.held[name].pieces:
                both = [(box, common) for box, block in boxes if (common := overlap(block, piece.block)) is not None]
                elements = self.held[name].read(self.folder, piece) if both else None
                for box, common in both:
                    assert elements is not None
                    target = box.as_strided(common.shape, common.storage_strides, common.storage_start)
                    target.copy_(elements.as_strided(common.shape, common.matrix_strides, common.matrix_start))
