"""What a test sees of a Trainer, whichever class it is of."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from tests.hosts.replay import Given, weights


class Weights(TrainerCallback):
    """Keeps the weights before the first step and after each."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.weights.append(weights(model))

    on_step_end = on_train_begin


class Watch(Weights):
    """Keeps what each step was given too."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Given] = []

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.inputs.append(Given.to(optimizer))


def losses(logs: list[dict[str, float]]) -> list[float]:
    return [entry["loss"] for entry in logs if "loss" in entry]
