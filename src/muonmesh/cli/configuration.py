"""Configuration: the `transformers` configuration that ``--model`` names, with every size in it possible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muonmesh.cli.tokenizer import END_OF_TEXT_ID
from muonmesh.errors import FileError
from muonmesh.files import read_json

# Llama architectures: gated MLPs of 8/3 the width; heads of 64, or smaller ones where there would be fewer than four.
PRESETS: dict[str, dict[str, int]] = {
    "nano": {"hidden_size": 64, "num_hidden_layers": 2},
    "small": {"hidden_size": 128, "num_hidden_layers": 4},
    "medium": {"hidden_size": 512, "num_hidden_layers": 8},
    "large": {"hidden_size": 768, "num_hidden_layers": 12},
    "xl": {"hidden_size": 2048, "num_hidden_layers": 16},
}
HEAD_SIZE = 64
LEAST_HEADS = 4

MOST_LAYERS = 10_000  # as many objects would be made before anything could be checked


def model_config(model: str, *, vocab: int, seq: int) -> Any:
    """The `transformers` configuration that ``--model`` names, for a vocabulary and a length of its own.

    The vocabulary is the tokenizer's, whatever the configuration says.

    Raises:
        ValueError: as `configuration` does, or the model cannot read ``seq`` tokens.
    """
    config = configuration(model, fields_of(model, seq=seq))
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < seq:
        raise FileError(f"--model {model}: reads at most {longest} tokens; --seq is {seq}. Write: --seq {longest}")
    text.vocab_size = vocab
    text.bos_token_id = text.eos_token_id = END_OF_TEXT_ID  # those of another vocabulary may lie outside this one
    text.pad_token_id = None  # nothing is padded, and a padding row of the embedding would never learn
    return config


def fields_of(model: str, *, seq: int) -> dict[str, Any]:
    """The fields of the configuration that ``--model`` names: a preset, a JSON file, a folder with one, or a type.

    Raises:
        ValueError: there is no such file, or it is no configuration.
    """
    if model in PRESETS:
        return {"model_type": "llama", **_llama(**PRESETS[model]), "max_position_embeddings": seq}
    if Path(model).is_dir():
        return _read(Path(model) / "config.json")
    if model.endswith(".json") or Path(model).is_file():
        return _read(Path(model))
    return {"model_type": model}


def configuration(model: str, fields: Mapping[str, Any]) -> Any:
    """The `transformers` configuration of these fields, as they say; ``model`` names it in errors.

    Raises:
        ValueError: the type is none, or a field is impossible.
    """
    from transformers import AutoConfig

    given = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        config: Any = AutoConfig.for_model(fields["model_type"], **given)
    except OSError:  # of importing it
        raise
    except Exception as error:  # each of some four hundred classes looks at its fields in its own way
        raise FileError(
            f"--model {model}: {sentence(error)}. Needed a preset ({', '.join(PRESETS)}), the path of a "
            "transformers config.json, or a model type such as gpt2."
        ) from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise FileError(f"--model {model}: found num_hidden_layers {layers}; needed 1 to {MOST_LAYERS}")
    return config


def sentence(error: Exception) -> str:
    """The first sentence of an error; transformers goes on to list every model it knows."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field ...:", and then what it was
        lines = [re.sub(r"^\w+(Error|Exception): ", "", lines[1])]
    first = lines[0].split(". ")[0].rstrip(".") if lines else ""
    return first if isinstance(error, ValueError | TypeError) and first else f"{type(error).__name__}: {first}"


def _llama(*, hidden_size: int, num_hidden_layers: int) -> dict[str, int]:
    heads = max(LEAST_HEADS, hidden_size // HEAD_SIZE)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": round(hidden_size * 8 / 3 / HEAD_SIZE) * HEAD_SIZE,
    }


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"--model {path}: no such file; needed a transformers config.json.")
    try:
        fields = read_json(path, needed="a transformers config.json")
    except FileError as error:
        raise FileError(f"--model {error}") from error
    if not isinstance(fields.get("model_type"), str):
        raise FileError(f'--model {path}: found no "model_type"; needed a transformers config.json.')
    return fields
