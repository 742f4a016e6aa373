"""Configuration: the `transformers` configuration that ``--model`` names, with checked sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from muonmesh.errors import FileError
from muonmesh.files import read_json
from muonmesh.tools.cli.tokenizer import END_OF_TEXT_ID


def _llama(width: int, layers: int, heads: int, key_value_heads: int, middle: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": middle}
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "num_key_value_heads": key_value_heads}


# Widths and layers of Llama architectures. The gated MLP has 8/3 of the width. Heads have size 64, or less if there
# would be fewer than four heads.
PRESETS = {"nano": (64, 2), "small": (128, 4), "medium": (512, 8), "large": (768, 12), "xl": (2048, 16)}
HEAD_SIZE = 64
LEAST_HEADS = 4
KNOWN: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"vocab_size": 128256, **_llama(4096, 32, 32, 8, 14336)},
    "llama-3.1-70b": {"vocab_size": 128256, **_llama(8192, 80, 64, 8, 28672)},
    "llama-3.1-405b": {"vocab_size": 128256, **_llama(16384, 126, 128, 8, 53248)},
    "deepseek-v3": {"model_type": "deepseek_v3"},  # its sizes are the defaults of transformers
}
MOST_LAYERS = 10_000  # transformers creates an object for each layer before sizes can be checked


def model_config(model: str, *, vocab: int, seq: int) -> Any:
    """Return the `transformers` configuration that ``--model`` names, with the run's vocabulary and sequence length.

    Args:
        model: The value of ``--model``.
        vocab: The vocabulary size of the tokenizer, which replaces the configuration's.
        seq: Tokens per sequence.

    Raises:
        ValueError: as `configuration`, or the model cannot read ``seq`` tokens.
    """
    config = configuration(model, vocab=vocab, seq=seq)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < seq:
        raise FileError(f"--model {model}: reads at most {longest} tokens; --seq is {seq}. Write: --seq {longest}")
    text.vocab_size = vocab
    text.bos_token_id = text.eos_token_id = END_OF_TEXT_ID  # the configuration's may be outside this vocabulary
    text.pad_token_id = None  # nothing is padded, and a padding row of the embedding would never learn
    return config


def configuration(model: str, *, vocab: int, seq: int) -> Any:
    """Return the `transformers` configuration that ``--model`` names, unchanged.

    Args:
        model: The value of ``--model``.
        vocab: The vocabulary size of a preset.
        seq: The number of positions of a preset.

    Raises:
        ValueError: the file is missing or no configuration, the model type is unknown, or a field has an impossible
            value.
    """
    from transformers import AutoConfig

    fields = _fields(model, vocab=vocab, seq=seq)
    kind = fields.pop("model_type")
    try:
        config: Any = AutoConfig.for_model(kind, **fields)
    except OSError:  # from an import
        raise
    except Exception as error:  # about four hundred classes, each with its own errors
        raise FileError(
            f"--model {model}: {sentence(error)}. Needed a preset ({', '.join(PRESETS)}), a known "
            f"model ({', '.join(KNOWN)}), the path of a "
            "transformers config.json, or a model type such as gpt2."
        ) from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise FileError(f"--model {model}: found num_hidden_layers {layers}; needed 1 to {MOST_LAYERS}")
    return config


def _fields(model: str, *, vocab: int, seq: int) -> dict[str, Any]:
    """Return the fields of a configuration: of a known model, a preset, a JSON file, a folder with one, or a type.

    Raises:
        FileError: the file is missing, or has no "model_type".
    """
    if model in KNOWN:
        return dict(KNOWN[model])
    if model in PRESETS:
        width, layers = PRESETS[model]
        heads = max(LEAST_HEADS, width // HEAD_SIZE)
        middle = round(width * 8 / 3 / HEAD_SIZE) * HEAD_SIZE
        return {"vocab_size": vocab, "max_position_embeddings": seq, **_llama(width, layers, heads, heads, middle)}
    path = Path(model)
    if not (path.exists() or model.endswith(".json")):
        return {"model_type": model}
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = read_json(path, needed="a transformers config.json")
    except FileError as error:
        raise FileError(f"--model {error}") from error
    if not isinstance(fields.get("model_type"), str):
        raise FileError(f'--model {path}: found no "model_type"; needed a transformers config.json.')
    return fields


def sentence(error: Exception) -> str:
    """Return the first sentence of an error; after it, transformers lists every known model."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field ...:", then the error itself
        lines = [re.sub(r"^\w+(Error|Exception): ", "", lines[1])]
    first = lines[0].split(". ")[0].rstrip(".") if lines else ""
    return first if isinstance(error, ValueError | TypeError) and first else f"{type(error).__name__}: {first}"
