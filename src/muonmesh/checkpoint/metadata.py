"""Metadata: reads which tensors a checkpoint holds, without running code from the checkpoint.

`torch.distributed.checkpoint` pickles its metadata, and a pickle is a program. This module turns the pickled classes
into objects without behavior, and refuses all other names. From these objects it builds torch's own, field by field.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from muonmesh.checkpoint.form import SIZE, TEXT, Fields, Form, Kind, misfit
from muonmesh.checkpoint.manifest import METADATA_FILE, REMEDY, check_file
from muonmesh.errors import FileError, explain_error
from muonmesh.files import reason

DATA_FILE = re.compile(r"__\d+_\d+\.distcp")  # in the folder itself: no path leads out of it
_Box: TypeAlias = tuple[tuple[int, int], ...]  # begin and length in each dim
# Modules whose classes torch's metadata name, for one rank, DDP, FSDP2 and ZeRO. All classes become `Fields`.
_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization",
    "pathlib",
    "pathlib._local",
}


# The pickle operations in torch's metadata. Other operations can take memory, call or import; checkpoints need none.
_OPERATIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


_SIZE = Kind("a torch.Size", lambda value: isinstance(value, torch.Size) and min(value, default=0) >= 0)
_TENSOR = {
    "properties": {
        "state": Kind("a dtype and others", lambda its: isinstance(its, tuple) and isinstance(its[0], torch.dtype))
    },
    "size": _SIZE,
    "chunks": [{"offsets": _SIZE, "sizes": _SIZE}],
}
_INDEX = {"fqn": TEXT, "offset": (_SIZE, None)}
_PLACE = {
    "relative_path": TEXT,
    "offset": SIZE,
    "length": SIZE,
    "transform_descriptors": Kind("none: what is compressed or encrypted is no training's", operator.not_),
}
_FORM: Form = {
    "state_dict_metadata": {TEXT: (_TENSOR, Kind("no tensor", lambda entry: entry == {}))},
    "storage_data": {Kind("a MetadataIndex", lambda key: misfit("it", key, _INDEX) is None): _PLACE},
}
"""The fields of torch's metadata, with the forms of their values. An entry without fields is an object that torch
pickles."""


_DEPTH = 64
"""How many marks may be open; torch's metadata open fewer than ten. Each mark costs Python a list, and a file of
marks alone would take a minute."""


class _Operations(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"found the operation {code:#04x}, which no checkpoint of a training needs")


# The unpickler in Python, not in C: seven bytes can make the C unpickler allocate 64 GB, for a large memo index.
class _Unpickler(pickle._Unpickler):
    """Unpickles into `Fields`."""

    def load_mark(self) -> None:
        if len(self.metastack) >= _DEPTH:  # type: ignore[attr-defined]
            raise pickle.UnpicklingError(f"it nests deeper than {_DEPTH} levels")
        super().load_mark()  # type: ignore[misc]

    dispatch = _Operations({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPERATIONS})
    dispatch[pickle.MARK[0]] = load_mark

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module not in _MODULES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of a training needs")
        return Fields


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint, which must have only plain tensors in files of ``folder``.

    Raises:
        FileError: there are no metadata, they have other entries than tensors, or they are inconsistent or do not fit
            the files.
    """
    metadata, others = survey(folder)
    if others:
        raise _not_ours(folder / METADATA_FILE, f"{others[0]} is not a tensor")
    return metadata


def survey(folder: Path) -> tuple[Metadata, tuple[str, ...]]:
    """Return the metadata of tensors in any program's checkpoint, and the names of entries that torch would unpickle.

    Raises:
        FileError: there are no metadata, or they are inconsistent or do not fit the files.
    """
    path = folder / METADATA_FILE
    try:
        check_file(path, "what a training writes")
        top = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if fault := misfit("it", top, _FORM):
            raise ValueError(explain_error(*fault))
        metadata, others = _metadata(top)
        _check_files(folder, metadata)
    except FileError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise _not_ours(path, reason(error)) from error
    return metadata, others


def _not_ours(path: Path, why: str) -> FileError:
    return FileError(f"{path}: not what a training writes: {why}; needed the file as it was written. {REMEDY}")


def _metadata(top: Any) -> tuple[Metadata, tuple[str, ...]]:
    """Return torch's own metadata, built from checked fields, and the names of entries that are no tensors.

    Raises:
        ValueError: the entries are inconsistent.
    """
    entries = top["state_dict_metadata"]
    others = {name: None for name, entry in entries.items() if not entry}
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        if entry:
            chunks = [ChunkStorageMetadata(chunk["offsets"], chunk["sizes"]) for chunk in entry["chunks"]]
            properties = TensorProperties(dtype=entry["properties"]["state"][0])
            tensors[name] = TensorStorageMetadata(properties, entry["size"], chunks)
    places = {
        MetadataIndex(index["fqn"], index["offset"]): _StorageInfo(
            info["relative_path"], info["offset"], info["length"]
        )
        for index, info in top["storage_data"].items()
        if index["fqn"] not in others
    }
    for name, tensor in tensors.items():
        _check_cover(name, tensor)
        for chunk in tensor.chunks:
            if math.prod(chunk.sizes) and MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"nothing says where {name} is from {tuple(chunk.offsets)} on")
    return Metadata(tensors, planner_data=None, storage_data=places), tuple(others)


def _check_cover(name: str, tensor: TensorStorageMetadata) -> None:
    """Raise ValueError unless the pieces of a tensor lie inside it, do not overlap, and cover it completely.

    Without this check, loading would leave elements of a missing piece unchanged.
    """
    for chunk in tensor.chunks:
        box = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in box):
            raise ValueError(f"a piece of {name} lies outside of it")
    filled = [chunk for chunk in tensor.chunks if chunk.sizes.numel()]
    boxes: Counter[_Box] = Counter(tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in filled)
    held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
    if tensor.size.numel():
        boxes[tuple((0, size) for size in tensor.size)] -= 1
    if not _add_up_to_nothing(boxes):
        what = "a piece of {} is missing" if held < tensor.size.numel() else "two pieces of {} overlap"
        raise ValueError(what.format(name))


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


def _check_files(folder: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        if DATA_FILE.fullmatch(place.relative_path) is None:
            raise ValueError(f"it names the file {place.relative_path!r}")
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        check_file(path, f"the {end} bytes that {METADATA_FILE} tells of")
        if (size := path.stat().st_size) < end:
            raise FileError(explain_error(str(path), f"{size} bytes", f"{end}", REMEDY))
