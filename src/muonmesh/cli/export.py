"""Export: what other programs read of a trained model, a folder for `from_pretrained`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonmesh.checkpoint.manifest import entry_of, write_manifest
from muonmesh.checkpoint.place import put, writing_at
from muonmesh.cli.model import build_model
from muonmesh.cli.run_settings import Optimizer
from muonmesh.cli.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from muonmesh.files import onto_disk, writing


def export_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run writes the model of one of its trainings."""
    return run / "export" / optimizer


def export(folder: Path, config: Any, weights: dict[str, Tensor], *, tokenizer: Path, init: str | None) -> None:
    """Write the folder beside its place, a manifest last, then rename. Called on rank 0 alone.

    Args:
        folder: What `from_pretrained` will be given.
        config: The `transformers` configuration of the model.
        weights: Whole, by parameter name.
        tokenizer: Folder of the prepared text, with its tokenizer.json.
        init: Folder that the training began from, whose tokenizer_config.json is kept.

    Raises:
        FileError: it could not be written.
    """
    from transformers import PreTrainedTokenizerFast

    scratch = writing_at(folder)
    with writing(folder, raised=Exception):
        shutil.rmtree(scratch, ignore_errors=True)
        with torch.device("meta"):
            model: Any = build_model(config)
        model.save_pretrained(scratch, state_dict={**weights})  # which it empties
        ready = load_tokenizer(str(tokenizer))
        mark = ready.itself.id_to_token(config.get_text_config().eos_token_id)
        PreTrainedTokenizerFast(tokenizer_object=ready.itself, eos_token=mark, bos_token=mark).save_pretrained(scratch)
        shutil.copy(tokenizer / TOKENIZER_FILE, scratch / TOKENIZER_FILE)
        before = None if init is None else Path(init) / TOKENIZER_CONFIG_FILE
        if before is not None and before.is_file():
            shutil.copy(before, scratch / TOKENIZER_CONFIG_FILE)
        files = sorted(scratch.iterdir())
        for file in files:
            onto_disk(file)
        write_manifest(scratch, {file.name: entry_of(file) for file in files})
        onto_disk(scratch)
        put(scratch, folder)
