"""Export: a trained model as a folder that `from_pretrained` reads: configuration, weights whole, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.checkpoint.manifest import entry_of, write_manifest
from muonmesh.checkpoint.ranks import on_first_rank, rank_in
from muonmesh.cli.model import build_model
from muonmesh.cli.settings import Optimizer
from muonmesh.cli.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from muonmesh.files import onto_disk, write_text, writing


def export_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run writes the model of one of its trainings."""
    return run / "export" / optimizer


def export(folder: Path, config: Any, weights: Mapping[str, Tensor], *, tokenizer: Path, init: str | None) -> None:
    """Write the folder beside its place, a manifest last, then rename. Called on all ranks; rank 0 writes.

    Args:
        folder: What `from_pretrained` will be given.
        config: The `transformers` configuration of the model.
        weights: By parameter name, whole or as DTensors.
        tokenizer: Folder of the prepared text, with its tokenizer.json.
        init: Folder that the training began from, whose tokenizer_config.json is kept.

    Raises:
        RunError: on every rank: it could not be written.
    """
    whole = {}
    for name, weight in weights.items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if rank_in() == 0:
            whole[name] = full.detach().cpu().contiguous()

    def write() -> None:
        scratch = folder.with_name(f".{folder.name}.writing")
        with writing(folder, raised=Exception):
            shutil.rmtree(scratch, ignore_errors=True)
            with torch.device("meta"):
                model: Any = build_model(config)
            model.save_pretrained(scratch, state_dict=whole)
            shutil.copy(tokenizer / TOKENIZER_FILE, scratch / TOKENIZER_FILE)
            before = None if init is None else Path(init) / TOKENIZER_CONFIG_FILE
            if before is not None and before.is_file():
                shutil.copy(before, scratch / TOKENIZER_CONFIG_FILE)
            else:
                write_text(scratch / TOKENIZER_CONFIG_FILE, _tokenizer_config(config, tokenizer))
            files = sorted(scratch.iterdir())
            for file in files:
                onto_disk(file)
            write_manifest(scratch, {file.name: entry_of(file) for file in files})
            onto_disk(scratch)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
            onto_disk(folder.parent)

    on_first_rank(write)


def _tokenizer_config(config: Any, tokenizer: Path) -> str:
    end = config.get_text_config().eos_token_id
    mark = load_tokenizer(str(tokenizer)).itself.id_to_token(end)
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": mark, "bos_token": mark}) + "\n"
