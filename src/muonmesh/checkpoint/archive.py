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
    """Load a file of `torch.save` on the CPU, with ``weights_only=True``.

    `torch.save` writes a checksum for each record, which `torch.load` ignores. This function checks them, so it detects
    damaged bytes. Checksums do not protect against intended changes, but code in such a file does not run either.

    Args:
        path: The file.
        needed: For the error message: what the file should contain.
        remedy: For the error message: what the user can do.

    Raises:
        FileError: the file is missing, contains other objects than plain values and tensors, or has changed since it
            was written.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(explain_error(str(file), kind_of(file), needed, "Correct the path"))
    try:
        with file.open("rb") as stream:
            return read_undamaged(stream)
    except FileError as error:
        raise FileError(explain_error(str(file), str(error), NEEDED, REMEDY)) from None
    except Exception as error:  # damaged bytes can raise any error in the reader
        what = "more than data" if isinstance(error, pickle.UnpicklingError) else "something else"
        raise FileError(explain_error(str(file), f"{what}: {reason(error)}", needed, remedy)) from error


def read_undamaged(stream: Any) -> Any:
    """Load an archive after checking that its records have the form in which torch writes them.

    Without this check, torch would unpack compressed records of any size.

    Raises:
        FileError: torch did not write the archive in this form; the message names only what was found.
        Exception: damaged bytes can raise any error in the reader.
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
