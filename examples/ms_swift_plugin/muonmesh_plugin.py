"""ms-swift: a plugin with Muon. Copy this file, and write for `swift sft` and `swift pt`:

    swift sft --external_plugins muonmesh_plugin.py --optimizer muonmesh ...

Keep it in a folder of its own: ms-swift puts the plugin's folder in front of `sys.path`.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

import torch
from swift.optimizers import OptimizerCallback, optimizers_map
from torch import nn

from muonmesh.integrations.transformers import MuonFactory


class MuonmeshOptimizer(OptimizerCallback):
    """Creates the optimizer of ms-swift's trainers.

    ms-swift's arguments give the learning rate, weight decay, betas and ε. ``--optim_args`` gives further arguments of
    `muonmesh.from_model`, by name, such as ``--optim_args "momentum=0.9,scale_mode=spectral"``.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of the trainer's model.

        Raises:
            TypeError, ValueError: a setting of ``--optim_args`` is unknown or wrong.
        """
        arguments = copy.copy(self.args)
        arguments.optim_args = None  # read here
        trained = self.trainer.model if model is None else model
        return MuonFactory()(trained, args=arguments, **settings_of(self.args.optim_args))


def settings_of(text: str | None) -> dict[str, Any]:
    """Return the settings in a text such as ``momentum=0.9,scale_mode=spectral``.

    A value that is no Python literal is a string.

    Raises:
        ValueError: a part of the text has no form ``name=value``.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if not (name and value):
            raise ValueError(f'--optim_args: found {part!r}. Write --optim_args "momentum=0.9,scale_mode=spectral"')
        settings[name] = _literal(value)
    return settings


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


optimizers_map["muonmesh"] = MuonmeshOptimizer
