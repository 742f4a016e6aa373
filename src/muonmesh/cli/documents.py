"""Documents: what ``--data`` names, one text after the other, without holding more than one file of text in memory.

A text file is one document. In JSON lines (``.jsonl``) and Parquet (``.parquet``) each record is one, and the field
``--text-field`` holds its text.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muonmesh.errors import FileError
from muonmesh.files import kind_of, named, reason

RECORDS_AT_ONCE = 1024
RECORDS = (".jsonl", ".parquet")


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
        with _reading(self.file):
            if self.file.suffix not in RECORDS:
                with contextlib.suppress(UnicodeDecodeError):
                    text = self.file.read_bytes().decode("utf-8")
                    if text.strip() and "\0" not in text:
                        yield self.digest, text
                return
            for text in self._lines() if self.file.suffix == ".jsonl" else self._parquet():
                if text.strip():
                    yield hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), text

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
        try:
            from pyarrow import parquet
        except ImportError as error:
            write = "Write: pip install 'muonmesh[data]'"
            raise FileError(f"--data {self.file}: needs pyarrow, which is not installed. {write}") from error
        try:
            with parquet.ParquetFile(self.file) as file:
                if self.field not in file.schema_arrow.names:
                    raise self._lacks(file.schema_arrow.names, "it")
                for batch in file.iter_batches(batch_size=RECORDS_AT_ONCE, columns=[self.field]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str):
                            needed = "needed text in each row. Name another with --text-field"
                            raise FileError(
                                f"--data {self.file}: found {named(text)} in the column {self.field!r}; {needed}"
                            )
                        yield text
        except FileError:
            raise
        except ValueError as error:  # pyarrow's own errors are among them
            raise FileError(f"--data {self.file}: could not be read ({reason(error)}); needed a whole file") from error

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
        with _reading(file), file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found.setdefault(digest, Source(file, digest, field))
    return [found[digest] for digest in sorted(found)]


def documents_of(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Yield the documents of all sources, as `Source.documents` does."""
    return itertools.chain.from_iterable(source.documents() for source in sources)


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files named by ``--data``: files, folders (everything below, hidden ones left out) and globs.

    What is no file is passed over in folders and globs: named pipes, which would be waited for, sockets, devices, and
    links to nothing.

    Raises:
        ValueError: a pattern that finds nothing, or that names something that is no file.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if os.path.lexists(pattern) and not path.is_dir() and not path.is_file():
            raise ValueError(f"--data {pattern!r}: found {kind_of(path)}; needed a file, a folder or a glob.")
        matches = [path] if os.path.lexists(pattern) else map(Path, glob.glob(pattern, recursive=True))
        files = [file for path in matches for file in (walk(path) if path.is_dir() else [path]) if os.path.isfile(file)]
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


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"--data: {file} could not be read: {reason(error)}; needed a file that can be") from error
