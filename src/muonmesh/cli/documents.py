"""Documents: what ``--data`` names, one text after the other, without holding more than one file of text in memory.

A text file is one document. In JSON lines (``.jsonl``), Parquet (``.parquet``) and Arrow files (``.arrow``, of which
a folder saved by `datasets` consists) each record is one, and the field ``--text-field`` holds its text.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonmesh.errors import FileError
from muonmesh.files import kind_of, named, read_json, reason

HASHED_AT_ONCE = 1 << 20  # bytes
RECORDS_AT_ONCE = 1024
DATASET_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"  # what `datasets` writes beside its Arrow files
RECORDS = (".jsonl", ".parquet", ".arrow")


@dataclass(frozen=True)
class Source:
    """One file, known by the hash of its content: a copy of it elsewhere is the same source.

    Attributes:
        file: Where it lies.
        digest: SHA-256 of its bytes.
        field: Of its records that holds the text; unused for a text file.
    """

    file: Path
    digest: str
    field: str

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (SHA-256 of the document, its text); nothing for a file that is no text.

        Raises:
            FileError: the file cannot be read, or a record has no text in the field.
        """
        if self.file.suffix not in RECORDS:
            yield from self._text()
            return
        for text in self._records():
            if text.strip():
                yield hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), text

    def _text(self) -> Iterator[tuple[str, str]]:
        try:
            text = self.file.read_bytes().decode("utf-8")
        except OSError as error:
            raise _unreadable(self.file, error) from error
        except UnicodeDecodeError:
            return
        if text.strip() and "\0" not in text:
            yield self.digest, text

    def _records(self) -> Iterator[str]:
        try:
            if self.file.suffix == ".jsonl":
                yield from self._lines()
            elif self.file.suffix == ".parquet":
                yield from self._parquet()
            else:
                yield from self._arrow()
        except OSError as error:
            raise _unreadable(self.file, error) from error

    def _lines(self) -> Iterator[str]:
        with self.file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise FileError(
                        f"--data {self.file}: line {number} is not JSON ({reason(error)}); needed an object"
                    ) from error
                if not isinstance(record, dict):
                    raise FileError(f"--data {self.file}: line {number} is {named(record)}; needed an object")
                text = record.get(self.field)
                if not isinstance(text, str):
                    raise self._lacks(sorted(map(str, record)), f"line {number}")
                yield text

    def _parquet(self) -> Iterator[str]:
        parquet = _pyarrow(self.file, "pyarrow.parquet")
        try:
            with parquet.ParquetFile(self.file) as file:
                self._check_columns(file.schema_arrow)
                for batch in file.iter_batches(batch_size=RECORDS_AT_ONCE, columns=[self.field]):
                    yield from self._column(batch)
        except ValueError as error:  # pyarrow's own errors are among them
            raise _damaged(self.file, error) from error

    def _arrow(self) -> Iterator[str]:
        arrow = _pyarrow(self.file, "pyarrow")
        try:
            with arrow.memory_map(str(self.file)) as stream, arrow.ipc.open_stream(stream) as reader:
                self._check_columns(reader.schema)
                for batch in reader:
                    yield from self._column(batch)
        except ValueError as error:
            raise _damaged(self.file, error) from error

    def _check_columns(self, schema: Any) -> None:
        if self.field not in schema.names:
            raise self._lacks(schema.names, "it")
        if str(schema.field(self.field).type) not in ("string", "large_string", "string_view"):
            raise FileError(
                f"--data {self.file}: found {schema.field(self.field).type} in the column {self.field!r}; needed text. "
                "Name another with --text-field"
            )

    def _column(self, batch: Any) -> Iterator[str]:
        for text in batch.column(self.field).to_pylist():
            if text is None:
                raise FileError(
                    f"--data {self.file}: found a null in the column {self.field!r}; needed text in each row"
                )
            yield text

    def _lacks(self, names: Sequence[str], where: str) -> FileError:
        return FileError(
            f"--data {self.file}: found no text {self.field!r} in {where}, but {', '.join(names[:8]) or 'nothing'}. "
            "Name the field with --text-field"
        )


def sources_of(files: Sequence[Path], *, field: str) -> list[Source]:
    """Return the sources of files, each content once, in an order that does not depend on where they lie.

    Raises:
        FileError: a file cannot be read.
    """
    found: dict[str, Source] = {}
    for file in files:
        digest = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(HASHED_AT_ONCE):
                    digest.update(chunk)
        except OSError as error:
            raise _unreadable(file, error) from error
        found.setdefault(digest.hexdigest(), Source(file, digest.hexdigest(), field))
    return [found[digest] for digest in sorted(found)]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files named by ``--data``: files, folders (everything below, hidden ones left out) and globs.

    Of a folder that `datasets` saved its Arrow files alone. What is no file is passed over in folders and globs: named
    pipes, which would be waited for, sockets, devices, and links to nothing.

    Raises:
        ValueError: a pattern that finds nothing, or that names something that is no file, or a folder of splits.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if os.path.lexists(pattern) and not path.is_dir() and not path.is_file():
            raise ValueError(f"--data {pattern!r}: found {kind_of(path)}; needed a file, a folder or a glob.")
        matches = [path] if os.path.lexists(pattern) else map(Path, glob.glob(pattern, recursive=True))
        files = [
            file for path in matches for file in (_below(path) if path.is_dir() else [path]) if os.path.isfile(file)
        ]
        if not files:
            raise ValueError(
                f"--data {pattern!r}: found no file; needed a file, a folder or a glob such as 'src/**/*.py'."
            )
        found.extend(files)
    return found


def walk(root: Path, *, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones, and without those in folders of the names ``skip``."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _below(folder: Path) -> Iterator[Path]:
    if (folder / SPLITS_FILE).is_file():
        splits = [path.name for path in sorted(folder.iterdir()) if (path / DATASET_FILE).is_file()]
        example = folder / (splits[0] if splits else "train")
        raise FileError(
            f"--data {folder}: found the splits {', '.join(splits)}; needed one of them. Write: --data {example}"
        )
    if (folder / DATASET_FILE).is_file() and (folder / "dataset_info.json").is_file():
        state = read_json(folder / DATASET_FILE, needed="what datasets writes beside its files")
        try:
            yield from (folder / entry["filename"] for entry in state["_data_files"])
        except (KeyError, TypeError) as error:
            raise FileError(
                f"--data {folder / DATASET_FILE}: found no list of files; needed what datasets wrote"
            ) from error
        return
    yield from walk(folder)


def _pyarrow(file: Path, module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FileError(
            f"--data {file}: needs pyarrow, which is not installed. Write: pip install 'muonmesh[data]'"
        ) from error


def _unreadable(file: Path, error: OSError) -> FileError:
    return FileError(f"--data: {file} could not be read: {reason(error)}; needed a file that can be")


def _damaged(file: Path, error: Exception) -> FileError:
    if isinstance(error, FileError):
        return error
    return FileError(f"--data {file}: could not be read ({reason(error)}); needed a whole {file.suffix} file")
