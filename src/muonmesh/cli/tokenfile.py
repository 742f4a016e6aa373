"""Token file: tokens written into an .npy file as they come, which is then mapped instead of read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from muonmesh.cli.tokenizer import ReadyTokenizer

CHARACTERS_AT_ONCE = 1 << 24  # tokenised together, so that all cores have something to do
HEADER = 128  # bytes; room for any count


class TokenFile:
    """One array of tokens, the end-of-text mark after each document.

    Attributes:
        count: Tokens so far.
        characters: Of the texts so far.
    """

    def __init__(self, path: Path, tokenizer: ReadyTokenizer) -> None:
        self._tokenizer, self._dtype = tokenizer, np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
        self._waiting: list[str] = []
        self._waiting_characters = 0
        self.count = self.characters = 0
        self._file = path.open("w+b")
        self._file.write(b"\0" * HEADER)

    def add(self, texts: Sequence[str]) -> None:
        """Append texts; they are tokenised when there are enough of them, or at the end."""
        self._waiting += texts
        self._waiting_characters += sum(map(len, texts))
        if self._waiting_characters >= CHARACTERS_AT_ONCE:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the header with the number of tokens."""
        self._flush()
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        text = repr(header).encode("latin1")
        prefix = npy.magic(1, 0) + (HEADER - 10).to_bytes(2, "little")
        self._file.seek(0)
        self._file.write(prefix + text.ljust(HEADER - 11) + b"\n")
        self._file.close()

    def _flush(self) -> None:
        for encoding in self._tokenizer.itself.encode_batch_fast(self._waiting, add_special_tokens=False):
            tokens = np.array([*encoding.ids, self._tokenizer.end_of_text], dtype=self._dtype)
            self._file.write(tokens.tobytes())
            self.count += len(tokens)
        self.characters += self._waiting_characters
        self._waiting, self._waiting_characters = [], 0
