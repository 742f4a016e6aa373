"""Tokenizer: a byte-level BPE that is trained on the text of the run; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
TRAINING_CHARACTERS = 50_000_000  # more text hardly changes the merges, and takes longer
LONGEST_WORD = 1000  # bytes; the time to learn from a word grows with its square, and a file may be a single word


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
