"""Archive: a file of `torch.save`, read without running it and only if it is as it was written."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from muonmesh.errors import FileError, explain_error
from muonmesh.files import kind_of, reason

NEEDED = "what torch.save wrote, unchanged"
REMEDY = "Bring an undamaged copy"


def read_archive(path: str | os.PathLike[str]) -> Any:
    """Load it on the CPU, with ``weights_only=True``.

    Torch writes a checksum beside each record and never looks at it again; here they are looked at, so bytes that have
    changed are noticed. Against somebody who changes them on purpose there are no checksums; what he wrote still does
    not run.

    Raises:
        FileError: it is none, holds other things than plain values and tensors, or has changed.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(explain_error(str(file), kind_of(file), NEEDED))
    try:
        _check_records(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except Exception as error:  # what damaged bytes make of the reader
        raise FileError(explain_error(str(file), reason(error), NEEDED, REMEDY)) from error


def _check_records(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        names = [record.filename for record in records]
        if len(set(names)) < len(names) or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise FileError(explain_error(str(file), "records that torch.save does not write", NEEDED, REMEDY))
        if sum(record.file_size for record in records) > file.stat().st_size:
            raise FileError(explain_error(str(file), "records that lie in each other", NEEDED, REMEDY))
        changed = archive.testzip()
        if changed is not None:
            raise FileError(explain_error(str(file), f"another checksum of {changed}", NEEDED, REMEDY))
