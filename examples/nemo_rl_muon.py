"""NeMo-RL: name ``nemo_rl_muon.Muon`` as the class of a DTensor policy's optimizer; this file is on each PYTHONPATH.

    policy:
      dtensor_cfg: {enabled: true}
      optimizer:
        name: nemo_rl_muon.Muon
        kwargs: {lr: 3.0e-4, weight_decay: 0.1}   # arguments of muonmesh.from_model

NeMo-RL gives a class the model's parameters without names, from which nobody can tell an embedding from a projection.
What it gives is the generator of ``model.parameters()``, though, and that knows the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import muonmesh as mm


class Muon:
    """What NeMo-RL's DTensor policies call as an optimizer's class: it makes a `muonmesh.Muon`."""

    def __new__(cls, parameters: Iterable[nn.Parameter], **settings: Any) -> mm.Muon:  # type: ignore[misc]
        """Return the optimizer of the model whose parameters these are.

        Args:
            parameters: ``model.parameters()``, or a generator expression over it.
            settings: Arguments of `muonmesh.from_model`; a dtype may be a string, such as "torch.bfloat16".

        Raises:
            TypeError: the parameters do not come from a model.
        """
        for key, value in settings.items():
            if isinstance(value, str) and value.startswith("torch."):
                settings[key] = getattr(torch, value.removeprefix("torch."))
        return mm.from_model(_model_of(parameters), **settings)


def _model_of(parameters: Iterable[nn.Parameter]) -> nn.Module:
    """Return the model that yields these parameters."""
    iterator: Any = parameters
    while inspect.isgenerator(iterator):
        names = inspect.getgeneratorlocals(iterator)
        if isinstance(names.get("self"), nn.Module):
            return names["self"]
        iterator = names.get(".0")  # what a generator expression goes through
    raise TypeError(
        f"nemo_rl_muon.Muon: found {type(parameters).__name__}, needed model.parameters() itself, which knows the "
        "model. Write optimizer = muonmesh.from_model(model, ...) where the model is"
    )
