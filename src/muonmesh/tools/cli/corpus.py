"""Corpus: turns files into a tokenizer and two token arrays, one to train on and one held out, with nothing downloaded.

Each text file is one document, and at most one is in memory.

The result does not depend on the place of files, or on the order in which a file system lists them: a file is
identified by the hash of its content. So machines with the same text get the same split, tokenizer and order of tokens.
The ranks compare :attr:`Corpus.digest` before they train.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from muonmesh.checkpoint.form import SIZE, TEXT, check_form, only
from muonmesh.errors import FileError
from muonmesh.files import kind_of, onto_disk, read_json, read_text, reason, write_text, writing
from muonmesh.tools.cli.terminal import note

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
TRAINING_CHARACTERS = 50_000_000  # more text hardly changes the merges, and takes longer
LONGEST_WORD = 1000  # bytes; the time to learn from a word grows with its square, and a file may be a single word
JSON_LINES = frozenset({".jsonl", ".ndjson"})


def train_tokenizer(texts: Iterable[str], *, vocab: int) -> Tokenizer:
    """Return a byte-level BPE with at most ``vocab`` entries; equal texts in equal order give an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    tokenizer.pre_tokenizer = words  # to encode, the time grows with the length alone
    return tokenizer


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def texts_of(files: Iterable[Path]) -> dict[str, Path]:
    """Return the files by the SHA-256 of their content, each content once, in the order of the hashes.

    Raises:
        FileError: a file cannot be read.
    """
    files_by_hash: dict[str, Path] = {}
    for file in files:
        with _reading(file), file.open("rb") as stream:
            files_by_hash.setdefault(hashlib.file_digest(stream, "sha256").hexdigest(), file)
    return dict(sorted(files_by_hash.items()))


def documents_of(files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield (hash, text) for each file that is UTF-8 text with content. A copy of a file is the same document.

    Raises:
        FileError: a file cannot be read, or has another hash, under which its text would be stored.
    """
    for digest, file in files.items():
        with _reading(file), contextlib.suppress(UnicodeDecodeError):
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise FileError(f"--data: {file} has changed while it was read; needed files that stay. Start again")
            text = content.decode("utf-8")
            if text.strip() and "\0" not in text:
                yield digest, text


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that the values of ``--data`` name: files, folders (without hidden files) and globs.

    In folders and globs, entries that are no files are ignored: named pipes, sockets, devices, and broken links.

    Raises:
        ValueError: a pattern finds no file or a file of JSON lines, or names something else than a file or a folder.
    """
    chosen: list[Path] = []
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
        if lines := next((file for file in files if file.suffix.lower() in JSON_LINES), None):
            write = "Write the text of its lines into .txt files, or leave it out."
            raise ValueError(f"--data {str(lines)!r}: found JSON lines; needed plain text. {write}")
        chosen.extend(files)
    return chosen


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


CHARACTERS_AT_ONCE = 1 << 24  # tokenized together, so that all cores have work
HELD_OUT_SHARE = 0.05
FILES_FOR_A_SPLIT = 40  # with fewer files than this, the end of each file is held out instead of whole files
FORMAT = 4  # part of a folder's name: raise it if the same text gives other files
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
DESCRIPTION_FILE = "corpus.json"
TOKENIZER_FILE = "tokenizer.json"
REMADE = "it is made again from the text"


@dataclass(frozen=True)
class Corpus:
    """A prepared text: the folder of its tokens, and the numbers of files and tokens."""

    directory: str
    digest: str
    source: str
    files: int
    vocab: int
    train_tokens: int
    validation_tokens: int

    def train(self) -> np.ndarray:
        """Return the training tokens, one-dimensional, mapped from disk.

        Raises:
            FileError: the file is missing or has another size.
        """
        return self._mapped("train.bin", self.train_tokens)

    def validation(self) -> np.ndarray:
        """Return the held-out tokens, one-dimensional, mapped from disk.

        Raises:
            FileError: the file is missing or has another size.
        """
        return self._mapped("validation.bin", self.validation_tokens)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens.

        Raises:
            FileError: the file is missing or damaged, or has another number of tokens.
        """
        path = Path(self.directory) / TOKENIZER_FILE
        needed = f"the tokenizer of the {self.vocab} tokens beside it. Remove its folder: {REMADE}"
        try:
            tokenizer = Tokenizer.from_str(read_text(path, needed=needed))
        except FileError:
            raise
        except Exception as error:  # the library has no class of its own for its errors
            raise FileError(f"{path}: found no tokenizer ({reason(error)}); needed {needed}") from error
        if tokenizer.get_vocab_size() != self.vocab:
            raise FileError(f"{path}: found {tokenizer.get_vocab_size()} tokens; needed {needed}")
        return tokenizer

    def measured_digest(self) -> str:
        """Return the digest of the tokens that are on disk now."""
        digest = hashlib.sha256()
        for tokens in (self.train(), self.validation()):
            digest.update(tokens.data)
        return digest.hexdigest()

    def _mapped(self, name: str, count: int) -> np.ndarray:
        path, dtype = Path(self.directory) / name, dtype_of(self.vocab)
        present = kind_of(path) if not path.is_file() else f"{path.stat().st_size} bytes"
        if present != f"{count * dtype.itemsize} bytes":
            raise FileError(
                f"{path}: found {present}; needed the {count} tokens that {DESCRIPTION_FILE} tells of. Remove its "
                f"folder: {REMADE}"
            )
        return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)


def dtype_of(vocab: int) -> np.dtype:
    """Return the dtype of the tokens of a vocabulary: uint16, or uint32 if it has more than 65,536 entries."""
    return np.dtype(np.uint16 if vocab <= 2**16 else np.uint32)


class Windows:
    """Windows of ``length + 1`` tokens, cut from a token array; input and target are the same window, shifted by one.

    The order depends only on the seed. Positions 0, 1, 2, ... go through one random permutation of the windows after
    another. So a run that stops and resumes reads the same sequences as an uninterrupted run.
    """

    def __init__(self, tokens: np.ndarray, *, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.count = (len(tokens) - 1) // length
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def shuffled(self, positions: Iterable[int]) -> np.ndarray:
        """Return the windows at some positions of the endless shuffled order, int64 (len(positions), length + 1)."""
        return self._cut([self._window_at(position) for position in positions])

    def spread(self, count: int) -> np.ndarray:
        """Return ``count`` windows at equal distances over the whole text, the same in every call."""
        return self._cut([i * self.count // count for i in range(count)])

    def _window_at(self, position: int) -> int:
        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return int(self._order[index])

    def _cut(self, windows: Sequence[int]) -> np.ndarray:
        starts = [window * self.length for window in windows]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)


def standard_library() -> list[Path]:
    """Return the source files of the running Python's standard library, without tests: text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in walk(root, skip=NOT_LIBRARY) if path.suffix == ".py"]


def prepare_corpus(patterns: Sequence[str], *, vocab: int, cache: Path) -> Corpus:
    """Read, split and tokenize text, and store the result in ``cache`` by digest, where a second call finds it.

    Without patterns, the text is :func:`standard_library`. Files that are no UTF-8 text are ignored, and named on
    stderr, since the number of files includes them. The text is read twice, one document at a time, and tokens are
    written at once. So the text may be larger than the memory.

    Args:
        patterns: The values of ``--data``.
        vocab: The vocabulary size of the tokenizer that is trained.
        cache: The folder of prepared texts.

    Raises:
        ValueError: a pattern finds no file, or JSON lines, or no file is text; a file cannot be read, or ``cache``
            cannot be written; or the stored tokens have changed since they were written.
    """
    files = find_files(patterns) if patterns else standard_library()
    source = " ".join(patterns) if patterns else "the Python standard library"
    texts = texts_of(files)
    held_out = {name: _is_held_out(name) for name, _ in documents_of(texts)}
    if not held_out:
        raise ValueError(f"--data {source}: found {len(files)} files, none of which is UTF-8 text with content.")
    _tell_ignored([file for name, file in texts.items() if name not in held_out])
    parts = [FORMAT, HELD_OUT_SHARE, vocab, [*texts]]
    directory = cache / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    if not (directory / DESCRIPTION_FILE).is_file():
        # Whole documents are held out, chosen by their hash. With too few documents, the end of each is held out.
        whole = len(held_out) >= FILES_FOR_A_SPLIT and 0 < sum(held_out.values()) < len(held_out)
        learnt = (divide(name, text, whole=whole)[0] for name, text in documents_of(texts))
        _write(directory, train_tokenizer(learnt, vocab=vocab), texts, whole=whole, source=source)
    # The folder may have moved, and may have been made for the same text in another place.
    corpus = replace(load_corpus_of(directory), directory=str(directory), source=source)
    if corpus.measured_digest() != corpus.digest:
        raise FileError(f"{directory}: its tokens have changed since they were written. Remove the folder: {REMADE}")
    return corpus


def _tell_ignored(files: Sequence[Path]) -> None:
    """Name the files whose text nobody learns on stderr: those with bytes other than white space."""
    named = []
    for file in files:
        with _reading(file):
            if file.read_bytes().strip():
                named.append(str(file))
    if named:
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        needed = "needed UTF-8 text without zero bytes. Convert them if their text is to be learnt, as with iconv"
        note(f"--data: ignored {len(named)} of the files, {', '.join(sorted(named)[:3])}{more}; {needed}")


def save_corpus_of(folder: Path, corpus: Corpus) -> None:
    """Write the description of a corpus into a folder, such as a run's.

    Raises:
        FileError: the file cannot be written.
    """
    write_text(folder / DESCRIPTION_FILE, json.dumps(asdict(corpus), indent=2) + "\n")


def load_corpus_of(folder: Path) -> Corpus:
    """Return the corpus that a folder describes: a run's folder, or a folder that :func:`prepare_corpus` wrote.

    Raises:
        FileError: the description is missing or damaged.
    """
    path = folder / DESCRIPTION_FILE
    content = read_json(path, needed="the description of a prepared text")
    form = only({field.name: {"str": TEXT, "int": SIZE}[str(field.type)] for field in fields(Corpus)})
    check_form(str(path), content, form, f"Remove the folder: {REMADE}", kind=FileError)
    return Corpus(**content)


def divide(name: str, text: str, *, whole: bool) -> tuple[str, str]:
    """Return what is learnt of a document, and what is held out; one of both may be empty.

    Args:
        name: The hash of the document.
        text: The text of the document.
        whole: Whether whole documents are held out; else the end of each document is held out.
    """
    cut = max(1, round(len(text) * (1 - HELD_OUT_SHARE)))
    if whole:
        cut = 0 if _is_held_out(name) else len(text)
    return text[:cut], text[cut:]


def _is_held_out(name: str) -> bool:
    return int(name[:8], 16) < HELD_OUT_SHARE * 16**8


def _batches(files: Mapping[str, Path], *, whole: bool) -> Iterator[list[tuple[int, str]]]:
    """Yield batches of (part, text); part is 0 for training and 1 for held out. A batch gives work to all cores."""
    batch, characters = list[tuple[int, str]](), 0
    for name, document in documents_of(files):
        batch += [(part, text) for part, text in enumerate(divide(name, document, whole=whole)) if text]
        characters += len(document)
        if characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    yield batch


def _write(directory: Path, tokenizer: Tokenizer, files: Mapping[str, Path], *, whole: bool, source: str) -> None:
    """Write a corpus to a temporary folder, and rename it, so that ``directory`` never has a half-written corpus.

    Raises:
        FileError: the corpus could not be written.
    """
    counts, size = [0, 0], tokenizer.get_vocab_size()
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="preparing-", dir=directory.parent, ignore_cleanup_errors=True)
    with temporary as above, writing(directory):
        scratch = Path(above) / "text"
        scratch.mkdir()
        with (scratch / "train.bin").open("wb") as first, (scratch / "validation.bin").open("wb") as second:
            for batch in _batches(files, whole=whole):
                texts = [text for _, text in batch]
                encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                for (part, _), encoding in zip(batch, encodings, strict=True):
                    tokens = np.array([*encoding.ids, END_OF_TEXT_ID], dtype=dtype_of(size))
                    (first, second)[part].write(tokens.tobytes())
                    counts[part] += len(tokens)
        with writing(directory, raised=Exception):
            tokenizer.save(str(scratch / TOKENIZER_FILE))
        corpus = Corpus(str(scratch), "", source, len(files), size, *counts)
        save_corpus_of(scratch, replace(corpus, directory=str(directory), digest=corpus.measured_digest()))
        for file in scratch.iterdir():
            onto_disk(file)
        try:
            scratch.rename(directory)
        except OSError:  # another run has prepared the same text
            if not (directory / DESCRIPTION_FILE).is_file():
                raise
