"""Reader: checks the files of a checkpoint, reads tensors from them, and notices if another process replaces them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from muonmesh.checkpoint.folder import folder_at
from muonmesh.checkpoint.manifest import (
    BESIDE,
    MANIFEST_FILE,
    REMEDY,
    SETTINGS_FILE,
    Manifest,
    SavedTensor,
    read_manifest,
    unreadable,
)
from muonmesh.checkpoint.record import STATE, Boxes
from muonmesh.comm.gather_objects import gather_objects, on_every_rank
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, read_json
from muonmesh.layout.region import Block, Region, overlap
from muonmesh.step.state_layout import wrong_numbers

Stamp: TypeAlias = tuple[int, ...] | None


def stamp_of(path: Path) -> Stamp:
    """Return a file's device, number, size and times, which change when it is written or replaced; None without a file.

    The file is opened, since NFS asks its server only then; a pipe would wait for a writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def replacement_noticed(folder: Path, stamp: Stamp) -> Iterator[None]:
    """Turn an error about a checkpoint into one that says that it was replaced, if its manifest has another stamp."""
    try:
        yield
    except (FileError, OSError) as error:
        if stamp_of(folder / MANIFEST_FILE) == stamp:
            raise
        found, needed = "a checkpoint that another process replaced or removed meanwhile", "one that stays"
        raise FileError(explain_error(str(folder), found, needed, "Load again")) from error


class CheckpointReader(NamedTuple):
    """Reads a checkpoint of `muonmesh.checkpoint.save` whose manifest and settings have been read.

    Attributes:
        folder: The folder of the checkpoint.
        manifest: Its manifest.
        settings: The settings that were saved beside the tensors, as JSON types.
        stamps: Of the files that this rank checks, what tells whether they have been written since then.
    """

    folder: Path
    manifest: Manifest
    settings: dict[str, Any]
    stamps: Mapping[str, Stamp]

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors of the checkpoint by name."""
        return self.manifest.tensors

    def check_unchanged(self) -> None:
        """Check that the files are still those that were checked when the checkpoint was opened.

        Files are opened by their names, so a save under the same name, or a copy into the folder, may have put other
        files there between the check and the reading. Called on every rank after all ranks have read: each rank looks
        at the files that it has checked.

        Raises:
            FileError: a file has changed.
        """
        with replacement_noticed(self.folder, self.stamps[MANIFEST_FILE]):
            changed = [name for name, stamp in self.stamps.items() if stamp_of(self.folder / name) != stamp]
            if MANIFEST_FILE in changed and read_manifest(self.folder) != self.manifest:
                raise FileError(f"{self.folder / MANIFEST_FILE}: another one than when the load began")
            self.manifest.check_files(self.folder, [name for name in changed if name != MANIFEST_FILE])

    def read(self, boxes_by_name: Mapping[str, Boxes]) -> None:
        """Load tensors from the checkpoint into boxes.

        Args:
            boxes_by_name: This rank's boxes, by the names of tensors in the checkpoint and with their dtypes.

        Raises:
            FileError: a tensor could not be read, or state has numbers that no step leaves. Weights may have
                any numbers.
        """
        with replacement_noticed(self.folder, self.stamps[MANIFEST_FILE]):
            self._read(boxes_by_name)

    def _read(self, boxes_by_name: Mapping[str, Boxes]) -> None:
        for name, targets in boxes_by_name.items():
            boxes = [
                (box, Block(Region.box(at, tuple(box.shape)), int(box.storage_offset()), box.stride()))
                for at, box in targets.items()
                if box.numel()
            ]
            for piece in self.tensors[name].pieces:
                pairs = [(box, common) for box, block in boxes if (common := overlap(block, piece.block)) is not None]
                elements = self.tensors[name].read(self.folder, piece) if pairs else None
                for box, common in pairs:
                    assert elements is not None
                    target = box.as_strided(common.shape, common.storage_strides, common.storage_start)
                    target.copy_(elements.as_strided(common.shape, common.matrix_strides, common.matrix_start))
            faults = (wrong_numbers(name, box) for box in targets.values() if name.startswith(f"{STATE}."))
            if fault := next(filter(None, faults), ""):
                raise FileError(f"{self.folder}: found {fault} in {name}; needed finite numbers. {REMEDY}")


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Check a checkpoint without loading it, and return its reader. Called on all ranks, which share the work.

    Args:
        path: The folder that `write` has written, possibly on another number of ranks.

    Raises:
        FileError: on every rank: a file is missing, has changed since it was written, or contains other data than
            tensors. The message names the file and the fault.
    """
    requested = Path(path)

    def inspect() -> CheckpointReader:
        try:
            return read_folder(folder_at(requested))
        except OSError as error:
            raise unreadable(f"{requested}:", error) from error

    def read_folder(folder: Path) -> CheckpointReader:
        if folder.is_symlink() or not folder.is_dir():
            kind = kind_of(folder, follow=False)
            raise FileError(explain_error(str(requested), kind, "the folder of a checkpoint"))
        stamps = {MANIFEST_FILE: stamp_of(folder / MANIFEST_FILE)}
        with replacement_noticed(folder, stamps[MANIFEST_FILE]):
            manifest = read_manifest(folder)
            names = [*BESIDE, *sorted(manifest.files)[this_rank() :: world_size()]]
            stamps |= {name: stamp_of(folder / name) for name in names}
            manifest.check_files(folder, names)
            settings = read_json(folder / SETTINGS_FILE, needed=f"what save wrote there. {REMEDY}")
        return CheckpointReader(folder, manifest, settings, stamps)

    reader = on_every_rank(inspect)
    everyone = gather_objects(reader.manifest.digest)
    if other := next((rank for rank, digest in enumerate(everyone) if digest != everyone[0]), 0):
        found, needed = f"another checkpoint on rank {other} than on rank 0", "one checkpoint that all ranks read"
        write = "Pass the same path on every rank. If another process saves there, load again"
        raise FileError(explain_error(str(requested), found, needed, write))
    return reader
