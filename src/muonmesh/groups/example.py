"""Example: runs one forward of a model, which leaves it as it was, and reads autograd's graph of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from muonmesh.errors import called, explain_error
from muonmesh.groups.graph import Seen, seen_by
from muonmesh.groups.sites import unwrapped
from muonmesh.numerics.precision import plain_modes

Example = tuple[Any, ...] | Mapping[str, Any] | Tensor | Callable[[], Any]
"""What `split_params` can run: the arguments of a model's forward, or a function that returns its loss."""

_MEANT = "the arguments of the model's forward as a tuple, its keyword arguments as a dict, or a function that calls it"


def seen_in(model: nn.Module, example: Any) -> dict[int, Seen]:
    """Return what one forward shows of each parameter, by its id; parameters that it does not use are missing.

    Arguments run on a copy of the model on the meta device, where nothing is computed. If this is not possible, as for
    a function, the model itself runs. Its buffers, modes, gradients and torch's random numbers stay as they were.
    Hooks of the model run too.

    Raises:
        TypeError: ``example`` is of another type.
        ValueError: the model is sharded, so its weights in a forward are other tensors; or the forward raises; or it
            returns nothing that depends on a parameter.
    """
    model = unwrapped(model)
    if any(nn.parameter.is_lazy(each) for each in model.parameters()):
        return {}  # `split_params` refuses the model
    _refuse_sharded(model)
    if callable(example) and not isinstance(example, Mapping | Tensor | nn.Module):
        return _read(model, model, example)
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    elif isinstance(example, Tensor | tuple):
        args, kwargs = (example,) if isinstance(example, Tensor) else example, {}
    else:
        found = f"example= of type {type(example).__name__}"
        raise TypeError(explain_error(called("split_params"), found, _MEANT, "Write example=(inputs,)"))
    with contextlib.suppress(Exception):  # a forward may need numbers, or tensors of another device
        twin = _on_meta(model)
        inputs = tree_map(lambda v: v.detach().to("meta") if isinstance(v, Tensor) else v, (args, kwargs))
        with torch.device("meta"):
            if seen := _read(model, twin, lambda: twin(*inputs[0], **inputs[1])):
                return seen
    return _read(model, model, lambda: model(*args, **kwargs))


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements") or getattr(parameter, "_is_flat_param", False):
            found = f"{name}, which is sharded, so that a forward reads other tensors than this parameter"
            needed = "example= with the model from before it was sharded"
            write = "Write split_params(plain, example=...).held_by(model), where `plain` is the same model before it "
            write += "was sharded, also on the meta device"
            raise ValueError(explain_error(called("split_params"), found, needed, write))


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, without a copy of its numbers."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
            elif isinstance(value, Tensor):
                memo[id(value)] = value.detach().to("meta")
    return copy.deepcopy(model, memo)


def _read(model: nn.Module, runs: nn.Module, forward: Callable[[], Any]) -> dict[int, Seen]:
    """Run a forward of ``runs``, which is ``model`` or a copy of it, and return what it shows of its parameters."""
    named = list(runs.named_parameters())
    own = dict(model.named_parameters())
    with _kept(runs), plain_modes(), torch.enable_grad():
        for _, parameter in named:  # what frozen layers make is no input
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_()
        inputs: list[Tensor] = []
        handle = runs.register_forward_pre_hook(partial(_ask_for_gradients, inputs), with_kwargs=True)
        try:
            outputs = list(tensors_in(forward()))
        except Exception as error:
            if isinstance(error, ValueError | TypeError) or runs is model:
                what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                found = f"example=, with which the model's forward raises {what}"
                write = "Write an example with which the forward runs, or leave it out"
                raise ValueError(explain_error(called("split_params"), found, _MEANT, write)) from error
            raise
        finally:
            handle.remove()
        seen = seen_by(outputs, named, inputs)
    if not seen and runs is model:
        found = "example=, with which the model returns no tensor that depends on a weight"
        needed = "its outputs or its loss, with their graph"
        write = "Return them without detach() and outside torch.no_grad(), or leave example= out"
        raise ValueError(explain_error(called("split_params"), found, needed, write))
    return {id(own[name]): facts for name, facts in seen.items()}


def _ask_for_gradients(inputs: list[Tensor], module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give a model inputs that require gradients, so that the graph shows where they are read; add them to a list."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs.append(value.detach().requires_grad_())
            return inputs[-1].clone()  # no leaf, which could not be written in place
        return value.clone() if isinstance(value, Tensor) else value

    found: tuple[Any, Any] = tree_map(leaf, (args, kwargs))
    return found


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Return a context that puts back modes, buffers, gradients, what requires them, and torch's random numbers."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    required = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    held = [dict(module._buffers) for module in modules]
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    for parameter, *_ in required:
        parameter.grad = None  # a function may call backward
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        try:
            yield
        finally:
            for module, training, buffers in zip(modules, modes, held, strict=True):
                module.training = training
                module._buffers.clear()
                module._buffers.update(buffers)
            for parameter, requires_grad, gradient in required:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            for buffer, value in saved:
                _put_back(buffer, value)


def _put_back(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer the value that it had before; a forward may also have changed its shape or memory."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.shape == value.shape and torch.equal(buffer, value):
            return
        try:
            buffer.copy_(value)
        except RuntimeError:  # of another shape now, or several elements have one place
            buffer.data = value


def tensors_in(value: Any, known: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in what a model returned; ``known`` are the objects that have been looked at."""
    known = set() if known is None else known
    parts: list[Any] = []
    if isinstance(value, Tensor):
        yield value
    elif id(value) in known:
        return
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, each.name) for each in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        parts = [part for part in vars(value).values() if not callable(part)]
    known.add(id(value))
    for part in parts:
        yield from tensors_in(part, known)
