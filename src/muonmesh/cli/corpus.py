"""Corpus: files become two token arrays, one to learn from and one held out, the same on every machine.

Nothing depends on where files lie or in which order a file system lists them: a file is known by the hash of its
content. Hosts that were given the same text therefore agree on the split, the tokenizer and the order of tokens,
and :attr:`Corpus.digest` lets the ranks prove it before they train.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from muonmesh.cli.failure import RunError
from muonmesh.cli.files import check_fields, kind_of, onto_disk, read_json, reason, write_text, writing
from muonmesh.cli.tokenizer import END_OF_TEXT_ID, train_tokenizer

HELD_OUT_SHARE = 0.05
FILES_FOR_A_SPLIT = 40  # with fewer files than this, the end of each file is held out instead of whole files
FORMAT = 1  # part of the digest: raise it when the same text would give other tokens
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
DESCRIPTION_FILE = "corpus.json"
DIGESTED_AT_ONCE = 1 << 22  # tokens
REMADE = "it is made again from the text"


@dataclass(frozen=True)
class Corpus:
    """A prepared text: where its tokens are, and how much there is of it."""

    directory: str
    digest: str
    source: str
    files: int
    characters: int
    vocab: int
    train_tokens: int
    validation_tokens: int

    def train(self) -> np.ndarray:
        """Tokens to learn from, one-dimensional, mapped from disk; a RunError where they are not there."""
        return _mapped(Path(self.directory) / "train.npy", self.train_tokens)

    def validation(self) -> np.ndarray:
        """Held-out tokens, one-dimensional, mapped from disk; a RunError where they are not there."""
        return _mapped(Path(self.directory) / "validation.npy", self.validation_tokens)

    def measured_digest(self) -> str:
        """The digest of the tokens as they are now."""
        digest = hashlib.sha256()
        for tokens in (self.train(), self.validation()):
            for first in range(0, len(tokens), DIGESTED_AT_ONCE):
                digest.update(tokens[first : first + DIGESTED_AT_ONCE].tobytes())
        return digest.hexdigest()


class Windows:
    """Sequences of ``length + 1`` tokens cut from a token array; input and target are the same window, one apart.

    The order is a function of the seed alone. Position 0, 1, 2, ... runs through one random permutation of the
    windows after another, so a run that stops and resumes reads exactly what it would have read.
    """

    def __init__(self, tokens: np.ndarray, *, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.count = (len(tokens) - 1) // length
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def shuffled(self, positions: Iterable[int]) -> np.ndarray:
        """Windows at these positions of the endless shuffled order, (len(positions), length + 1) int64."""
        return self._cut([self._window_at(position) for position in positions])

    def spread(self, count: int) -> np.ndarray:
        """``count`` windows at equal distances over the whole text, the same ones each time."""
        return self._cut([i * self.count // count for i in range(count)])

    def _window_at(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return int(self._order[place])

    def _cut(self, windows: Sequence[int]) -> np.ndarray:
        starts = [window * self.length for window in windows]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)


def standard_library() -> list[Path]:
    """The running Python's standard library in source, tests left out: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in _walk(root, skip=NOT_LIBRARY) if path.suffix == ".py"]


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
        files = [
            file for path in matches for file in (_walk(path) if path.is_dir() else [path]) if os.path.isfile(file)
        ]
        if not files:
            raise ValueError(
                f"--data {pattern!r}: found no file; needed a file, a folder or a glob such as 'src/**/*.py'."
            )
        found.extend(files)
    return found


def prepare_corpus(patterns: Sequence[str], *, vocab: int, cache: Path) -> Corpus:
    """Read, split, tokenise, and keep the result under ``cache`` by digest; a second call finds it there.

    Without patterns the text is :func:`standard_library`. Files that are not UTF-8 text are passed over.

    Raises:
        ValueError: a pattern finds nothing, or nothing that was found is text; a file cannot be read, or ``cache`` not
            be written; or what lies there has changed since it was written.
    """
    files = find_files(patterns) if patterns else standard_library()
    source = " ".join(patterns) if patterns else "the Python standard library"
    texts = dict(_read(files))  # by content hash: a copy of a file cannot end up on both sides
    if not texts:
        raise ValueError(f"--data {source}: found {len(files)} files, none of them UTF-8 text with anything in it.")
    ordered = sorted(texts)
    key = hashlib.sha256(json.dumps([FORMAT, HELD_OUT_SHARE, vocab, ordered]).encode()).hexdigest()[:16]
    directory = cache / key
    if not (directory / DESCRIPTION_FILE).is_file():
        train, validation = split_texts([(name, texts[name]) for name in ordered])
        tokenizer = train_tokenizer(train, vocab=vocab)
        _write(directory, tokenizer, train, validation, source=source, files=len(texts))
    corpus = load_corpus(directory)
    if corpus.measured_digest() != corpus.digest:
        raise RunError(f"{directory}: its tokens have changed since they were written. Remove the folder: {REMADE}")
    return corpus


def load_corpus(directory: Path) -> Corpus:
    """A corpus that :func:`prepare_corpus` wrote, wherever its folder lies now.

    Raises:
        RunError: there is none, or it is damaged.
    """
    return replace(_described(directory / DESCRIPTION_FILE), directory=str(directory))


def save_corpus_of(run: Path, corpus: Corpus) -> None:
    """Note in a run's directory which corpus it reads; a RunError where that cannot be written."""
    write_text(run / DESCRIPTION_FILE, json.dumps(asdict(corpus), indent=2) + "\n")


def load_corpus_of(run: Path) -> Corpus:
    """The corpus that a run reads.

    Raises:
        RunError: the description is missing, or damaged.
    """
    return _described(run / DESCRIPTION_FILE)


def split_texts(texts: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Divide (content hash, text) pairs into texts to learn from and texts held out.

    Whole files are held out, chosen by their hash. Where there are too few files for that, the end of each file is.
    """
    if len(texts) >= FILES_FOR_A_SPLIT:
        held_out = [int(key[:8], 16) < HELD_OUT_SHARE * 16**8 for key, _ in texts]
        if any(held_out) and not all(held_out):
            train = [text for (_, text), out in zip(texts, held_out, strict=True) if not out]
            validation = [text for (_, text), out in zip(texts, held_out, strict=True) if out]
            return train, validation
    cuts = [max(1, round(len(text) * (1 - HELD_OUT_SHARE))) for _, text in texts]
    train = [text[:cut] for (_, text), cut in zip(texts, cuts, strict=True)]
    return train, [text[cut:] for (_, text), cut in zip(texts, cuts, strict=True) if cut < len(text)]


def _walk(root: Path, *, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _read(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise RunError(f"--data: {file} could not be read: {reason(error)}; needed a file that can be") from error
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "\0" not in text:
            yield hashlib.sha256(content).hexdigest(), text


def _described(path: Path) -> Corpus:
    content = read_json(path, needed="the description of a prepared text")
    kinds = {"str": "a string", "int": "a whole number of at least 0"}
    check_fields(path, content, {field.name: kinds[str(field.type)] for field in fields(Corpus)})
    return Corpus(**content)


def _write(
    directory: Path,
    tokenizer: Tokenizer,
    train: Sequence[str],
    validation: Sequence[str],
    *,
    source: str,
    files: int,
) -> None:
    """Write next to ``directory`` and move into place, so that a half-written corpus is never found.

    Raises:
        RunError: it could not be written.
    """
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="preparing-", dir=directory.parent))
    try:
        arrays = {"train": _tokens(tokenizer, train), "validation": _tokens(tokenizer, validation)}
        digest = hashlib.sha256()
        for name, tokens in arrays.items():
            with writing(directory):
                np.save(scratch / f"{name}.npy", tokens)
            digest.update(tokens.tobytes())
        with writing(directory, raised=Exception):
            tokenizer.save(str(scratch / "tokenizer.json"))
        corpus = Corpus(
            directory=str(directory),
            digest=digest.hexdigest(),
            source=source,
            files=files,
            characters=sum(map(len, train)) + sum(map(len, validation)),
            vocab=tokenizer.get_vocab_size(),
            train_tokens=len(arrays["train"]),
            validation_tokens=len(arrays["validation"]),
        )
        write_text(scratch / DESCRIPTION_FILE, json.dumps(asdict(corpus), indent=2) + "\n")
        with writing(directory):
            for file in scratch.iterdir():
                onto_disk(file)
            try:
                scratch.rename(directory)
            except OSError:  # another run prepared the same text meanwhile
                if not (directory / DESCRIPTION_FILE).is_file():
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _mapped(path: Path, count: int) -> np.ndarray:
    needed = f"needed the {count} tokens that {DESCRIPTION_FILE} tells of. Remove its folder: {REMADE}"
    try:
        if not path.is_file():
            raise ValueError(f"found {kind_of(path)}")
        tokens: np.ndarray = np.load(path, mmap_mode="r")  # which refuses pickled objects
        if tokens.shape != (count,) or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"found {tokens.dtype} of shape {tokens.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise RunError(f"{path}: {reason(error)}; {needed}") from error
    return tokens


def _tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    encodings = tokenizer.encode_batch_fast(list(texts))
    pieces = [np.array([*encoding.ids, END_OF_TEXT_ID], dtype=dtype) for encoding in encodings]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
