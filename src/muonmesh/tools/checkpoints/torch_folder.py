"""TorchFolder: checks a folder of `torch.distributed.checkpoint` without running code from it.

`torch.distributed.checkpoint` pickles its metadata, and a pickle is a program. This module turns the pickled classes
into objects without behavior, and refuses all other names. From these objects it builds torch's own, field by field.
"""

from __future__ import annotations

import io
import math
import operator
import os
import pickle
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.utils import _ReaderView

from muonmesh.checkpoint.entries import Wrong
from muonmesh.checkpoint.form import SIZE, TEXT, Form, Kind, misfit
from muonmesh.checkpoint.index import check_cover
from muonmesh.checkpoint.manifest import DATA_FILE, METADATA_FILE, REMEDY, check_file, unreadable
from muonmesh.errors import FileError, explain_error
from muonmesh.files import reason
from muonmesh.tools.checkpoints.archive import Fields, read_undamaged

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
        check_cover(name, tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
        for chunk in tensor.chunks:
            if math.prod(chunk.sizes) and MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"nothing says where {name} is from {tuple(chunk.offsets)} on")
    return Metadata(tensors, planner_data=None, storage_data=places), tuple(others)


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


def check_tensors(folder: Path, metadata: Metadata, *, wrong: Wrong) -> None:
    """Read and check all tensors of a folder.

    Raises:
        FileError: a piece is no tensor, has another shape or dtype, or is faulty; the message names the tensor.
    """
    held: dict[str, Any] = dict(metadata.state_dict_metadata)
    for name, entry in held.items():
        for chunk in entry.chunks:
            if not math.prod(chunk.sizes):
                continue
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            path = folder / place.relative_path
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


def _told(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
