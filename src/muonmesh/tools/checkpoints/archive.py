"""Archive: reads a file of `torch.save` without running code from it, and only if the file is undamaged."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, reason

NEEDED = "what torch.save wrote, unchanged"
REMEDY = "Bring an undamaged copy"


class MoreThanData(FileError):
    """An undamaged file of `torch.save` has other objects than plain values and tensors, which could run code."""


def read_archive(path: str | os.PathLike[str], *, needed: str = NEEDED, remedy: str = REMEDY) -> Any:
    """Load a file of `torch.save` on the CPU, with ``weights_only=True``.

    `torch.save` writes a checksum for each record, which `torch.load` ignores. This function checks them, so it detects
    damaged bytes. Checksums do not protect against intended changes, but code in such a file does not run either.

    Args:
        path: The file.
        needed: For the message of `MoreThanData`: what the file should contain.
        remedy: For the message of `MoreThanData`: what the user can do.

    Raises:
        MoreThanData: the file is undamaged, and contains other objects than plain values and tensors.
        FileError: the file is missing, or has changed since it was written.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(explain_error(str(file), kind_of(file), needed, "Correct the path"))
    try:
        with file.open("rb") as stream:
            fault = _fault(stream)
            stream.seek(0)
            content = None if fault else torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message has several lines, and advises to run the code
        first = re.search(r"GLOBAL ([\w.]+)", str(error))
        problem = f"more than data ({first[1] if first else 'operations that data do not need'})"
        raise MoreThanData(explain_error(str(file), problem, needed, remedy)) from error
    except Exception as error:  # damaged bytes can raise any error in the reader
        raise FileError(explain_error(str(file), f"something else: {reason(error)}", NEEDED, REMEDY)) from error
    if fault:
        raise FileError(explain_error(str(file), fault, NEEDED, REMEDY))
    return content


def _fault(stream: IO[bytes]) -> str:
    """Return what an archive has that torch does not write, in words; empty if its records are as torch writes them.

    Without this check, torch would unpack compressed records of any size.
    """
    size = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        names = {record.filename for record in records}
        if len(names) < len(records) or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            return "records that torch.save does not write"
        if sum(record.file_size for record in records) > size:
            return "records that lie in each other"
        changed = archive.testzip()
        return f"another checksum of {changed}" if changed else ""
