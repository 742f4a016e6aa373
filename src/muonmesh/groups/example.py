"""Example: runs one forward of a model, which leaves it as it was, and reads autograd's graph of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from muonmesh.errors import called, explain_error
from muonmesh.groups.facts import Facts, facts_of_graph
from muonmesh.groups.parameter_sites import unwrapped
from muonmesh.numerics.kernels.threads import plain_modes

Example = tuple[Any, ...] | Mapping[str, Any] | Tensor | Callable[[], Any]
"""What `split_params` can run: the arguments of a model's forward, or a function that returns its loss."""

_MEANT = "the arguments of the model's forward as a tuple, its keyword arguments as a dict, or a function that calls it"

_SHARDED = "Write groups = split_params(model, example=...) before the model is sharded, when it may still be on meta, "
_SHARDED += "and Muon(groups.held_by(model)) after it"


def facts_of_example(model: nn.Module, example: Any, *, sharded: str = _SHARDED) -> dict[int, Facts]:
    """Return what one forward shows of each parameter, by its id; parameters that it does not use are missing.

    Arguments run on a copy of the model on the meta device, where nothing is computed. If this is not possible, as for
    a function, the model itself runs. Its buffers, modes, gradients and torch's random numbers stay as they were. Hooks
    of the model run too. Where the forward of a model on the meta device reads a number, it gets True or 1.

    A model must not be sharded; ``sharded`` is what the error then says to write.

    Raises:
        TypeError: ``example`` is of another type.
        ValueError: the model is sharded; or the forward raises; or it returns nothing that depends on a parameter.
    """
    model = unwrapped(model)
    for name, weight in model.named_parameters():
        if nn.parameter.is_lazy(weight) or getattr(weight, "_is_flat_param", False):
            return {}  # `role` refuses the parameter
        if isinstance(weight, DTensor) or hasattr(weight, "ds_shape") or hasattr(weight, "_st_info"):
            problem = f"example= for a model that is sharded: this process has a part of {name}"
            raise ValueError(explain_error(called("split_params"), problem, "whole weights", sharded))
    if callable(example) and not isinstance(example, Mapping | Tensor | nn.Module):
        return _read(model, model, example)
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    elif isinstance(example, Tensor | tuple):
        args, kwargs = (example,) if isinstance(example, Tensor) else example, {}
    else:
        problem = f"example= of type {type(example).__name__}"
        raise TypeError(explain_error(called("split_params"), problem, _MEANT, "Write example=(inputs,)"))
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    # Some kernels take bf16 alone on meta, as those for experts.
    for bf16 in (False, True):
        with contextlib.suppress(Exception):  # a forward may need numbers, or tensors of another device
            return _read_on_meta(model, args, kwargs, bf16=bf16, made_up=on_meta)
    if on_meta:  # whose error then names the cause
        return _read_on_meta(model, args, kwargs, bf16=False, made_up=True)
    return _read(model, model, lambda: model(*args, **kwargs))


class _MadeUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors on meta have numbers: true, or one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


def _read_on_meta(model: nn.Module, args: Any, kwargs: Any, *, bf16: bool, made_up: bool) -> dict[int, Facts]:
    """Run a forward of a copy of a model on meta, in its dtype or in bf16, maybe with numbers; return what it shows."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("meta", torch.bfloat16 if bf16 and value.is_floating_point() else None)

    with plain_modes():
        memo: dict[int, Any] = {}  # without a copy of the numbers
        for module in model.modules():
            for value in tensors_in(vars(module)):  # also what a forward has left in it, which torch would not copy
                empty = value.detach().to("meta")
                parameter = isinstance(value, nn.Parameter)
                memo[id(value)] = nn.Parameter(empty, value.requires_grad) if parameter else empty
        twin = copy.deepcopy(model, memo)
        twin = twin.bfloat16() if bf16 else twin
        inputs = tree_map(moved, (args, kwargs))
    mode = _MadeUp() if made_up else contextlib.nullcontext()  # type: ignore[no-untyped-call]
    with torch.device("meta"), mode:
        return _read(model, twin, lambda: twin(*inputs[0], **inputs[1]))


def _read(model: nn.Module, runs: nn.Module, forward: Callable[[], Any]) -> dict[int, Facts]:
    """Run a forward of ``runs``, which is ``model`` or a copy of it, and return what it shows of its parameters."""
    named = list(runs.named_parameters())
    parameters = dict(model.named_parameters())
    eager = torch.compiler.set_stance("force_eager")  # a compiled function is one node, which hides its products
    with plain_modes(), _restored(runs), torch.enable_grad(), eager:
        for _, parameter in named:  # what frozen layers make is no input
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_()
        inputs = _Inputs()
        handle = runs.register_forward_pre_hook(inputs.ask, with_kwargs=True)
        try:
            with inputs:
                outputs = list(tensors_in(forward()))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            problem = f"example=, with which the model's forward raises {raised}"
            write = "Write an example with which the forward runs, or leave it out"
            raise ValueError(explain_error(called("split_params"), problem, _MEANT, write)) from error
        finally:
            handle.remove()
        facts, _ = facts_of_graph(outputs, named, inputs.tensors)
    if not facts:
        problem = "example=, with which the model returns no tensor that depends on a weight"
        needed = "its outputs or its loss, with their graph"
        write = "Return them without detach() and outside torch.no_grad(), or leave example= out"
        raise ValueError(explain_error(called("split_params"), problem, needed, write))
    return {id(parameters[name]): attributes for name, attributes in facts.items()}


_INTEGERS = (torch.int64, torch.int32, torch.uint8)


class _Inputs(TorchFunctionMode):
    """A mode in which a model's inputs require gradients, so that the graph shows where they are read.

    Integers cannot require them. What is made of time steps, coordinates and colors, which are integer inputs of other
    than two dims, or by `one_hot`, counts as an input where it becomes floating point. Tokens, positions and masks have
    two dims.

    Attributes:
        tensors: The tensors that require gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, Tensor] = {}  # by id; held, so that no other tensor gets the same

    def ask(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of a module, as a hook before its forward."""
        marked: tuple[Any, Any] = tree_map(self._marked, (args, kwargs))
        return marked

    def _marked(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone()
        if value.is_floating_point():
            return self._leaf(value)
        if value.dim() != 2 and value.dtype in _INTEGERS:
            self._numbers[id(value)] = value
        return value

    def _leaf(self, value: Tensor) -> Tensor:
        self.tensors.append(value.detach().requires_grad_())
        return self.tensors[-1].clone()  # no leaf, which could not be written in place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = func is torch.nn.functional.one_hot or any(id(value) in self._numbers for value in args)
        if not isinstance(result, Tensor) or not read:
            return result
        if result.dtype in _INTEGERS:
            self._numbers[id(result)] = result
        elif result.is_floating_point() and not result.requires_grad:
            return self._leaf(result)
        return result


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Return a context in which a model has copies of its buffers, and which puts back what a forward may change.

    These are the buffers, modes, gradients, what requires them, and torch's random numbers.
    """
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    required = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    for parameter, *_ in required:
        parameter.grad = None  # a function may call backward
    for module, _, buffers in modules:
        module._buffers.update((key, copies[id(buffer)]) for key, buffer in buffers.items() if buffer is not None)
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            for module, training, buffers in modules:
                module.training = training
                module._buffers.clear()
                module._buffers.update(buffers)
            for parameter, requires_grad, gradient in required:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model returned, in their order; attributes that are not set yet are left out."""
    todo, visited = [value], dict[int, Any]()
    while todo:
        value = todo.pop()
        parts: list[Any] = []
        if isinstance(value, Tensor):
            yield value
        elif id(value) in visited:
            continue
        elif isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set):
            parts = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, attribute.name, None) for attribute in dataclasses.fields(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            parts = [part for part in vars(value).values() if not callable(part)]
        visited[id(value)] = value
        todo += reversed(parts)
