"""Tokenizer: a byte-level BPE trained on the text of the run itself, or one from a local folder; never a download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from muonmesh.errors import FileError
from muonmesh.files import read_json, read_text, reason

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
TRAINING_CHARACTERS = 50_000_000  # merges settle long before; more only takes longer


def train_tokenizer(texts: Iterable[str], *, vocab: int) -> Tokenizer:
    """A byte-level BPE with at most ``vocab`` entries; the same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


@dataclass(frozen=True)
class ReadyTokenizer:
    """A tokenizer, with what a training has to know of it.

    Attributes:
        itself: Turns text into tokens.
        end_of_text: The token between two documents.
        digest: Of the file that it was read from; empty for one that was trained here.
    """

    itself: Tokenizer
    end_of_text: int
    digest: str

    @property
    def size(self) -> int:
        """Entries of its vocabulary, added ones too."""
        return int(self.itself.get_vocab_size())


def load_tokenizer(folder: str) -> ReadyTokenizer:
    """Read a tokenizer.json from a local folder, and its end-of-text token from the tokenizer_config.json beside it.

    Raises:
        FileError: there is none, it cannot be read, or nothing says which token ends a text.
    """
    path = Path(folder) / TOKENIZER_FILE
    text = read_text(path, needed="the tokenizer that `save_pretrained` writes. Write: --tokenizer FOLDER with one")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no class of its own for it
        raise FileError(
            f"{path}: is no tokenizer ({reason(error)}); needed one that `save_pretrained` wrote"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = Path(folder) / TOKENIZER_CONFIG_FILE
    mark = read_json(config, needed="a tokenizer_config.json").get("eos_token") if config.is_file() else None
    mark = mark.get("content") if isinstance(mark, dict) else mark
    end = tokenizer.token_to_id(mark if isinstance(mark, str) else END_OF_TEXT)
    if end is None:
        raise FileError(
            f"{config}: found eos_token {mark!r}, which the tokenizer lacks; needed the token that ends a text. "
            'Write it there: "eos_token": "..."'
        )
    return ReadyTokenizer(tokenizer, end, hashlib.sha256(text.encode() + str(end).encode()).hexdigest())
