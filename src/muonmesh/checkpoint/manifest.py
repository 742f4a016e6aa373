"""Manifest: which files a checkpoint has, which tensors, and where in the files the bytes of each piece are, as JSON.

It has the size and the hash of each file, and a hash of itself, so that what has changed since is found. It also has
the tensors. `torch_metadata` describes the same tensors for `torch.distributed.checkpoint`, as a pickle, which muonmesh
never reads. Each piece is a file of `torch.save` inside a larger file. Such a file stores the elements uncompressed in
row-major order, so the manifest names the place of the first byte, and nothing around the elements is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from muonmesh.checkpoint.form import SIZE, TEXT, ValueKind, check_form, one_of, only
from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, lacks_memory, read_json, reason, replace_text
from muonmesh.layout.matrix import as_tuples
from muonmesh.layout.region import Block, Region, row_major

METADATA_FILE = ".metadata"
MANIFEST_FILE = "manifest.json"
SETTINGS_FILE = "settings.json"
DATA_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")  # in the folder itself: no path leads out of it
REMEDY = "Load another checkpoint, or bring an undamaged copy"
AS_SAVED = "Nothing was saved: give this tensor another name, or another dtype, and save again"

BESIDE = (METADATA_FILE, SETTINGS_FILE)  # the files with tensors

Entry: TypeAlias = tuple[int, str]  # bytes, SHA-256
Sizes: TypeAlias = tuple[int, ...]
_Box: TypeAlias = tuple[tuple[int, int], ...]  # begin and length in each dim

_FORMAT = 3
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not name.startswith(("q", "bits"))}  # these need a scale
_DATA_FILE_NAME = ValueKind(
    "the name of a file with tensors", lambda name: isinstance(name, str) and bool(DATA_FILE.fullmatch(name))
)
_FILE_NAME = ValueKind("the name of a file of a checkpoint", lambda name: name in BESIDE or _DATA_FILE_NAME.holds(name))
_SHAPE = ValueKind(
    "a list of at most 16 whole numbers of at least 0",
    lambda value: isinstance(value, list) and len(value) <= 16 and all(map(SIZE.holds, value)),
)
_ENTRY = only({"bytes": SIZE, "sha256": TEXT})
_TENSOR = only(
    {
        "dtype": ValueKind("a dtype", lambda name: isinstance(name, str) and name in _DTYPES),
        "shape": _SHAPE,
        "pieces": [only({"offset": _SHAPE, "shape": _SHAPE, "file": _DATA_FILE_NAME, "start": SIZE, "record": _SHAPE})],
    }
)
_MANIFEST = only(
    {
        "format": one_of([_FORMAT], ": another version wrote it"),
        "files": {_FILE_NAME: _ENTRY, **dict.fromkeys(BESIDE, _ENTRY)},
        "byteorder": one_of([sys.byteorder], ", as on this machine"),
        "tensors": {ValueKind("a name of at most 1,000 characters", lambda name: len(name) <= 1000): _TENSOR},
        "sha256": TEXT,
    }
)


class SavedPiece(NamedTuple):
    """A box of a saved tensor, which is never empty.

    Attributes:
        offset, shape: The box.
        file: The name of its file.
        start: The place of its first byte in the file.
        record: The place and the length of what `torch.save` has written around it, for torch alone.
    """

    offset: Sizes
    shape: Sizes
    file: str
    start: int
    record: tuple[int, int]

    @property
    def block(self) -> Block:
        """The box, and the places of its elements in the memory that `SavedTensor.read` returns."""
        return Block(Region.box(self.offset, self.shape), 0, row_major(self.shape))


class SavedTensor(NamedTuple):
    """A tensor in a checkpoint: its name, its dtype, its whole shape, and the pieces that it is cut into."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    pieces: tuple[SavedPiece, ...]

    def bytes_of(self, piece: SavedPiece) -> int:
        """Return the size of a piece in bytes."""
        return math.prod(piece.shape) * self.dtype.itemsize

    def read(self, folder: Path, piece: SavedPiece) -> Tensor:
        """Return the elements of a piece as a contiguous tensor on the CPU.

        Raises:
            FileError: the file could not be read, or a bool is neither 0 nor 1.
        """
        path, data = folder / piece.file, bytearray()
        try:
            with path.open("rb") as file:
                file.seek(piece.start)
                data = bytearray(self.bytes_of(piece))
                if file.readinto(data) < len(data):
                    raise EOFError("it ends too early")
        except (OSError, MemoryError, EOFError) as error:
            raise unreadable(f"{path}: {self.name}", error) from error
        if self.dtype is torch.bool and max(data) > 1:
            raise FileError(explain_error(str(path), f"a byte {max(data)} in {self.name}", "0 and 1 in a bool", REMEDY))
        return torch.frombuffer(data, dtype=self.dtype).view(piece.shape)


class Manifest(NamedTuple):
    """The files of a checkpoint, each with its size and hash, and the tensors in them, by name.

    ``digest`` is the hash that a manifest on a disk has of itself.
    """

    files: Mapping[str, Entry]
    tensors: Mapping[str, SavedTensor]
    digest: str = ""

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Check the sizes and hashes of some files of a checkpoint.

        Raises:
            FileError: a file is missing or has changed; the message names the first.
        """
        for name in names:
            path = folder / name
            if path.is_symlink() or not path.is_file():
                needed = f"the file that {MANIFEST_FILE} tells of"
                raise FileError(explain_error(str(path), kind_of(path, follow=False), needed, REMEDY))
            try:
                size, digest = entry_of(path)
            except OSError as error:
                raise unreadable(f"{path}:", error) from error
            wanted_size, wanted_digest = self.files[name]
            if size != wanted_size:
                raise FileError(f"{path}: found {size} bytes; needed {wanted_size}, as {MANIFEST_FILE} says. {REMEDY}")
            if digest != wanted_digest:
                raise FileError(f"{path}: its content has changed since it was written ({MANIFEST_FILE}). {REMEDY}")


def entry_of(path: Path) -> Entry:
    """Return the size and the SHA-256 of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def unreadable(subject: str, error: BaseException) -> FileError:
    """Return the error for a file that could not be read; without permission or memory, the file is not damaged."""
    remedy = "Let the user of this process read it" if isinstance(error, PermissionError) else REMEDY
    if lacks_memory(error):
        remedy = "Free some memory and load again"
    return FileError(f"{subject} could not be read: {reason(error)}. {remedy}")


def merged_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return the files and the tensors of all ranks together."""
    files, tensors = dict[str, Entry](), dict[str, SavedTensor]()
    for manifest in manifests:
        files |= manifest.files
        for name, tensor in manifest.tensors.items():
            before = tensors.get(name, tensor._replace(pieces=()))
            tensors[name] = tensor._replace(pieces=before.pieces + tensor.pieces) if tensor.pieces else before
    return Manifest(files, tensors)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint.

    Raises:
        OSError: the manifest cannot be written.
        FileError: `read_manifest` would refuse the manifest, and nobody could load the checkpoint.
    """
    content = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(manifest.files.items())},
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "pieces": [piece._asdict() for piece in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    text = json.dumps({**content, "sha256": digest_of(content)}, indent=1)
    _checked("what is saved", json.loads(text), AS_SAVED)
    replace_text(folder / MANIFEST_FILE, text)


def digest_of(content: Mapping[str, Any]) -> str:
    """Return a hash of the content of a manifest, without the hash that it has of itself."""
    hashed = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the files and the tensors of a checkpoint, from its manifest.

    Raises:
        FileError: the manifest is missing, has another form than `write_manifest` writes, or has changed; or its pieces
            do not fit the files, do not cover the tensors, or overlap.
    """
    path = folder / MANIFEST_FILE
    if (names := set(os.listdir(folder))).isdisjoint({MANIFEST_FILE, SETTINGS_FILE}):
        fault, write = f"no {MANIFEST_FILE}", "Pass the folder that save was given"
        if METADATA_FILE in names:
            fault = "a checkpoint of torch.distributed.checkpoint"
            write = "Load it by torch.distributed.checkpoint.load, with the keys that it was saved with, and "
            write += "torch.distributed.checkpoint.state_dict.set_state_dict"
        raise FileError(explain_error(str(folder), fault, "a checkpoint of muonmesh.checkpoint.save", write))
    return _checked(str(path), read_json(path, needed=f"the sizes and hashes that save wrote there last. {REMEDY}"))


def _checked(subject: str, content: Any, remedy: str = REMEDY) -> Manifest:
    check_form(subject, content, _MANIFEST, remedy, kind=FileError)
    if content["sha256"] != digest_of(content):
        raise FileError(f"{subject}: its content has changed since it was written. {remedy}")
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    tensors = {}
    for name, entry in content["tensors"].items():
        pieces = (SavedPiece(**{key: as_tuples(value) for key, value in box.items()}) for box in entry["pieces"])
        tensors[name] = SavedTensor(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), tuple(pieces))
    try:
        for tensor in tensors.values():
            check_cover(tensor.name, tensor.shape, [(piece.offset, piece.shape) for piece in tensor.pieces])
        _check_places(tensors.values(), files)
    except ValueError as error:
        raise FileError(explain_error(subject, str(error), "pieces as save wrote them", remedy)) from None
    return Manifest(files, tensors, content["sha256"])


def torch_metadata(tensors: Iterable[SavedTensor]) -> Metadata:
    """Return the description of tensors for `torch.distributed.checkpoint`."""
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, dtype, shape, pieces in tensors:
        chunks = [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in pieces]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for piece in pieces:
            places[MetadataIndex(name, piece.offset)] = _StorageInfo(piece.file, *piece.record)
    return Metadata(described, {name: (name,) for name in described}, places)


def _check_places(tensors: Iterable[SavedTensor], files: Mapping[str, Entry]) -> None:
    """Raise ValueError unless all pieces lie in their files, and none in another.

    So all tensors together are not larger than the files.
    """
    ends = {name: 0 for name in files}
    places = ((piece.file, piece.start, tensor, piece) for tensor in tensors for piece in tensor.pieces)
    for file, start, tensor, piece in sorted(places, key=lambda location: location[:2]):
        end = start + tensor.bytes_of(piece)
        if file not in files:
            raise ValueError(f"a piece of {tensor.name} in {file}, which the manifest does not tell of")
        if end > files[file][0]:
            raise ValueError(f"a piece of {tensor.name} up to byte {end} of {file}, which has {files[file][0]}")
        if start < ends[file]:
            raise ValueError(f"a piece of {tensor.name} in another piece, at byte {start} of {file}")
        ends[file] = end


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ValueError unless boxes of a tensor lie inside it, do not overlap, and cover it completely.

    Without this check, loading would leave elements of a missing piece unchanged.

    Args:
        name: The tensor's name, for messages.
        shape: Its shape.
        boxes: Offset and shape of each box.
    """
    for offset, sizes in boxes:
        if not len(offset) == len(sizes) == len(shape):
            raise ValueError(f"a piece of {name} with another number of dims")
        if any(at < 0 or size < 0 or at + size > whole for at, size, whole in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"a piece of {name} that lies outside of it")
    counted = Counter[_Box](tuple(zip(*box, strict=True)) for box in boxes if math.prod(box[1]))
    area, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if whole:
        counted[tuple((0, size) for size in shape)] -= 1
    if not _add_up_to_nothing(counted):
        raise ValueError(f"no piece of {name} for some elements" if area < whole else f"two pieces of {name} overlap")


def _add_up_to_nothing(boxes: Mapping[_Box, int]) -> bool:
    """Return whether, at every point, the weights of the boxes that contain it add up to 0.

    Along the first dim, the sum changes only where a box begins or ends. So the sum is 0 everywhere if every change is
    0, and a change is again a sum of boxes, with one dim less. If one box ends with the face with which its neighbor
    begins, both cancel at once. So for the shards of a mesh, the time grows only linearly with the number of pieces.
    """
    changes: dict[int, Counter[_Box]] = {}
    for box, weight in boxes.items():
        if not weight:
            continue
        if not box:
            return False
        (start, size), face = box[0], box[1:]
        changes.setdefault(start, Counter())[face] += weight
        changes.setdefault(start + size, Counter())[face] -= weight
    # All changes add up to 0, so the last change is 0 if the others are.
    return all(_add_up_to_nothing(changes[at]) for at in sorted(changes)[:-1])
