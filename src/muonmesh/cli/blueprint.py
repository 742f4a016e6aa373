"""Blueprint: the parameters of a model that nobody builds: their names, shapes and splits, from a configuration alone.

`transformers` builds the model on the meta device, without memory, and `muonmesh.split_params` says how it splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import muonmesh as mm
from muonmesh.cli.configuration import configuration
from muonmesh.cli.model import build_model
from muonmesh.layout import MatrixSpec


@dataclass(frozen=True)
class ModelParameter:
    """One parameter.

    Attributes:
        name: Canonical name.
        shape: Of the whole parameter.
        matrices: How it splits; None if AdamW updates it.
    """

    name: str
    shape: tuple[int, ...]
    matrices: MatrixSpec | None


def meta_model(model: str, *, vocab: int, seq: int) -> nn.Module:
    """Return the model that is named by a preset, a folder or file, or a model type, on the meta device.

    Args:
        model: As for ``muonmesh train``.
        vocab, seq: Of the presets of ``muonmesh train``, which leave them open.

    Raises:
        ValueError: there is no such model, or none of a causal language model.
    """
    with torch.device("meta"):
        return build_model(configuration(model, vocab=vocab, seq=seq))


def blueprint(model: str, *, vocab: int, seq: int) -> list[ModelParameter]:
    """Return the parameters of the model that ``--model`` names, with the splits of `muonmesh.split_params`.

    See `meta_model` for the arguments and for what it raises.
    """
    found = {}
    for group in mm.split_params(meta_model(model, vocab=vocab, seq=seq)):
        muon = group["algorithm"] == "muon"
        splits = group["matrices"] if muon else [None] * len(group["params"])
        for name, parameter, split in zip(group["param_names"], group["params"], splits, strict=True):
            found[name] = ModelParameter(name, tuple(parameter.shape), split)
    return list(found.values())
