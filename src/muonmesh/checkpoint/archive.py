"""Archive: reads a file of `torch.save` without running code from it, and only if the file is undamaged."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, reason

NEEDED = "what torch.save wrote, unchanged"
REMEDY = "Bring an undamaged copy"


def read_archive(path: str | os.PathLike[str], *, needed: str = NEEDED, remedy: str = REMEDY) -> Any:
    """Load it on the CPU, with ``weights_only=True``.

    Torch writes a checksum beside each record and never looks at it again; here they are looked at, so bytes that have
    changed are noticed. Against somebody who changes them on purpose there are no checksums; what he wrote still does
    not run.

    Args:
        path: The file.
        needed: What should be there, to be said where something else is.
        remedy: What to do then.

    Raises:
        FileError: it is none, holds other things than plain values and tensors, or has changed.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(explain_error(str(file), kind_of(file), needed, "Correct the path"))
    try:
        with file.open("rb") as stream:
            return read_undamaged(stream)
    except FileError as error:
        raise FileError(explain_error(str(file), str(error), NEEDED, REMEDY)) from None
    except Exception as error:  # what damaged bytes make of the reader
        what = "more than data" if isinstance(error, pickle.UnpicklingError) else "something else"
        raise FileError(explain_error(str(file), f"{what}: {reason(error)}", needed, remedy)) from error


def read_undamaged(stream: Any) -> Any:
    """Load an archive, once it is known that torch has written all of it so.

    Torch would unpack compressed records, whatever their size.

    Raises:
        FileError: torch did not; the message is what was found.
        Exception: what damaged bytes make of the reader.
    """
    size = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        names = [record.filename for record in records]
        if len(set(names)) < len(names) or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise FileError("records that torch.save does not write")
        if sum(record.file_size for record in records) > size:
            raise FileError("records that lie in each other")
        if changed := archive.testzip():
            raise FileError(f"another checksum of {changed}")
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)
