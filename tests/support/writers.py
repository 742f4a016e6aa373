"""Other code that writes weights between steps, by what people do it for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

Saved = dict[str, Tensor]


def copied(model: nn.Module) -> Saved:
    """Return a copy of the model's state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _whole(saved: Saved) -> Saved:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in saved.items()}


def clamp(model: nn.Module, _: Saved) -> None:
    """As a Wasserstein GAN does after each step."""
    for weight in model.parameters():
        weight.clamp_(-0.5, 0.5)


def normalize(model: nn.Module, _: Saved) -> None:
    """As nGPT does after each step. The largest number is taken, since it has the same bits in every layout."""
    for weight in model.parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weight.div_(whole.float().abs().max().log2().ceil().exp2())


def swap_in_average(model: nn.Module, first: Saved) -> None:
    """As an average of weights is swapped in: a copy in the dtype of the weights."""
    for name, weight in model.named_parameters():
        weight.copy_((weight.float() * 0.75 + first[name].float() * 0.25).to(weight.dtype))


def prune(model: nn.Module, _: Saved) -> None:
    """Some elements become 0, or -0.0; most stay as they are."""
    for weight in model.parameters():
        weight.mul_((weight.abs() > 0.25).to(weight.dtype))


def swap_and_swap_back(model: nn.Module, first: Saved) -> None:
    """Evaluate other weights, and go on with the same bits: nothing has changed."""
    original = copied(model)
    model.load_state_dict(first)
    model.load_state_dict(original)


WRITERS: dict[str, Callable[[nn.Module, Saved], object]] = {
    "load_state_dict": lambda model, first: model.load_state_dict(first),
    "set_model_state_dict": lambda model, first: set_model_state_dict(
        model, _whole(first), options=StateDictOptions(full_state_dict=True)
    ),
    "clamp": clamp,
    "normalize": normalize,
    "average": swap_in_average,
    "prune": prune,
    "the same again": swap_and_swap_back,
}


@torch.no_grad()
def write(how: str, model: nn.Module, first: Saved) -> None:
    """Write the model's weights; ``first`` are weights that it had before, from `copied`."""
    WRITERS[how](model, first)
