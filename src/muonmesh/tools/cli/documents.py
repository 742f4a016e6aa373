"""Documents: reads the texts that ``--data`` names, one after the other, with at most one text file in memory.

A text file is one document. In a file of JSON lines (``.jsonl``), each record is one document, and its field
``--text-field`` contains the text.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muonmesh.errors import FileError
from muonmesh.files import kind_of, named, reason

RECORDS = ".jsonl"
HALF = re.compile("[\ud800-\udfff]")  # half of a character's escape in JSON, where its text was cut


@dataclass(frozen=True)
class Source:
    """One file, identified by the hash of its content, so a copy of the file is the same source.

    Attributes:
        file: The path.
        digest: SHA-256 of its bytes.
        field: The field of its records that contains the text; unused for a text file.
    """

    file: Path
    digest: str
    field: str

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (SHA-256 of the document, its text) for each document; yield nothing if the file is no text.

        Raises:
            FileError: the file cannot be read, or a line of a JSONL file is no record with text in ``field``.
        """
        with _reading(self.file):
            if self.file.suffix == RECORDS:
                for text in self._lines():
                    if text.strip():
                        yield hashlib.sha256(text.encode()).hexdigest(), text
                return
            with contextlib.suppress(UnicodeDecodeError):
                text = self.file.read_bytes().decode("utf-8")
                if text.strip() and "\0" not in text:
                    yield self.digest, text

    def _lines(self) -> Iterator[str]:
        with self.file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    found = f"fields {', '.join(sorted(record)[:8])}" if isinstance(record, dict) else named(record)
                except (ValueError, RecursionError):
                    record, found = None, "no JSON"
                text = record.get(self.field) if isinstance(record, dict) else None
                if isinstance(text, str) and HALF.search(text):
                    text, found = None, "half a character, such as \\ud83d alone,"
                if not isinstance(text, str):
                    raise FileError(
                        f"--data {self.file}: found {found} in line {number}; needed an object with text in "
                        f"{self.field!r}. Name another field with --text-field"
                    )
                yield text


def sources_of(files: Sequence[Path], *, field: str) -> list[Source]:
    """Return the sources of files, each content once, in the order of their hashes.

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
    """Return an iterator over the documents of all sources: (SHA-256 of the document, its text)."""
    return itertools.chain.from_iterable(source.documents() for source in sources)


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that the values of ``--data`` name: files, folders (without hidden files) and globs.

    In folders and globs, entries that are no files are ignored: named pipes, sockets, devices, and broken links.

    Raises:
        ValueError: a pattern finds no file, or names something else than a file or a folder.
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
    """Yield the files below a folder, without hidden files, and without files in folders named in ``skip``."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"--data: {file} could not be read: {reason(error)}; needed a file that can be") from error
