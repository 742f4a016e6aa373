"""Example: runs one forward of a model, which leaves it as it was, and reads autograd's graph of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from muonmesh.errors import called, explain_error
from muonmesh.groups.graph import Seen, seen_by
from muonmesh.groups.sites import unwrapped
from muonmesh.numerics.kernels.threads import plain_modes

Example = tuple[Any, ...] | Mapping[str, Any] | Tensor | Callable[[], Any]
"""What `split_params` can run: the arguments of a model's forward, or a function that returns its loss."""

_MEANT = "the arguments of the model's forward as a tuple, its keyword arguments as a dict, or a function that calls it"


def seen_in(model: nn.Module, example: Any) -> dict[int, Seen]:
    """Return what one forward shows of each parameter, by its id; parameters that it does not use are missing.

    Arguments run on a copy of the model on the meta device, where nothing is computed and no rank waits for another. If
    this is not possible, as for a function, the model itself runs. Its buffers, modes, gradients and torch's random
    numbers stay as they were. Hooks of the model run too. A model that cannot run, since it is sharded or on the meta
    device, runs there with numbers that are made up: a check of a mask is told yes.

    Raises:
        TypeError: ``example`` is of another type.
        ValueError: a wrapper flattened the weights; or the forward raises; or it returns nothing that depends on a
            parameter; or ``example`` is a function and the model is sharded.
    """
    model = unwrapped(model)
    if any(nn.parameter.is_lazy(each) for each in model.parameters()):
        return {}  # `split_params` refuses the model
    sharded = _sharded(model)
    if callable(example) and not isinstance(example, Mapping | Tensor | nn.Module):
        if sharded is not None:
            found = f"example= as a function, and {sharded}, which is sharded: a forward reads other tensors than it"
            write = "Write example=(inputs,), which runs on a copy"
            raise ValueError(explain_error(called("split_params"), found, "arguments of the forward", write))
        return _read(model, model, example)
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    elif isinstance(example, Tensor | tuple):
        args, kwargs = (example,) if isinstance(example, Tensor) else example, {}
    else:
        found = f"example= of type {type(example).__name__}"
        raise TypeError(explain_error(called("split_params"), found, _MEANT, "Write example=(inputs,)"))
    fixed = sharded is not None or any(parameter.is_meta for parameter in model.parameters())
    for bf16 in (False, True):  # some kernels take one dtype alone on meta, as those for experts
        with contextlib.suppress(Exception):  # a forward may need numbers, or tensors of another device
            return _read_on_meta(model, args, kwargs, contextlib.nullcontext(), bf16=bf16)
    if not fixed:
        return _read(model, model, lambda: model(*args, **kwargs))
    with contextlib.suppress(Exception):
        return _read_on_meta(model, args, kwargs, _MadeUp(), bf16=True)  # type: ignore[no-untyped-call]
    return _read_on_meta(model, args, kwargs, _MadeUp(), bf16=False)  # type: ignore[no-untyped-call]


def _sharded(model: nn.Module) -> str | None:
    """Return the name of a parameter of which this process has a shard; None if it has all of each."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_is_flat_param", False):
            found = f"{name}, which a wrapper has flattened, so that a forward reads other tensors than this parameter"
            write = "Call split_params(model, example=...) before the wrapper, or shard with fully_shard"
            raise ValueError(explain_error(called("split_params"), found, "weights with their own shapes", write))
        if isinstance(parameter, DTensor) or hasattr(parameter, "ds_shape"):
            return name
    return None


class _MadeUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors on meta have numbers: true, or one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


def _read_on_meta(model: nn.Module, args: Any, kwargs: Any, mode: Any, *, bf16: bool) -> dict[int, Seen]:
    """Run a forward of a copy of a model on the meta device, in its dtype or in bf16; return what it shows."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("meta", torch.bfloat16 if bf16 and value.is_floating_point() else None)

    with plain_modes():
        twin = _on_meta(model)
        twin = twin.bfloat16() if bf16 else twin
        inputs = tree_map(moved, (args, kwargs))
    with torch.device("meta"), mode:
        return _read(model, twin, lambda: twin(*inputs[0], **inputs[1]))


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, without a copy of its numbers, and not sharded by `fully_shard`.

    Weights that are sharded by tensor parallelism stay so, because hooks of their modules may expect it.
    """
    memo: dict[int, Any] = {}
    sharders = [module for module in model.modules() if isinstance(module, FSDPModule)]
    by_fsdp = {id(tensor): dims for module in sharders for tensor, dims in _dims_of_fsdp(module)}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(_empty(value, by_fsdp.get(id(value), ())), value.requires_grad)
            elif isinstance(value, Tensor):
                memo[id(value)] = _empty(value, ())
    for module in sharders:  # they refuse to be copied
        memo[id(module)] = object.__new__(type(module).__bases__[1])
    for module in sharders:
        vars(memo[id(module)]).update(copy.deepcopy(_without_sharding(module), memo))
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        vars(module).update(_without_sharding(module))
    return twin


def _without_sharding(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds, but for hooks that gather its shards, and their state."""
    held = {name: value for name, value in vars(module).items() if not name.startswith("__composable_api")}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        of = {key: str(getattr(hook, "__module__", "")) for key, hook in held[name].items()}
        theirs = {key for key, where in of.items() if where.startswith(("torch.distributed.fsdp", "deepspeed"))}
        held[name] = type(held[name])((key, hook) for key, hook in held[name].items() if key not in theirs)
    return held


def _dims_of_fsdp(module: Any) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the parameters that `fully_shard` has sharded, each with the dims of its mesh that are FSDP's own."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        names = group.mesh_info.mesh.mesh_dim_names or ()
        for sharded in group.fsdp_params:
            mesh = sharded.sharded_param.device_mesh
            dims = list(range(mesh.ndim))
            if mesh.ndim > group.mesh_info.mesh.ndim:
                dims = [dim for dim in dims if mesh.mesh_dim_names[dim] in names]
            yield sharded.sharded_param, tuple(dims)


def _empty(tensor: Any, gathered: tuple[int, ...]) -> Tensor:
    """Return a tensor on meta of the same shape, whole in some dims of its mesh."""
    whole: Tensor = tensor.detach()
    if not isinstance(tensor, DTensor) and not hasattr(tensor, "ds_shape"):
        return whole.to("meta")
    whole = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
    mesh = getattr(tensor, "device_mesh", None)
    kept = [] if mesh is None else [dim for dim in range(mesh.ndim) if dim not in gathered]
    if mesh is None or not kept:
        return whole
    mesh = mesh[tuple(mesh.mesh_dim_names[dim] for dim in kept)] if gathered else mesh
    placements, local = [tensor.placements[dim] for dim in kept], whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shards, rank = local.chunk(mesh.size(dim), placement.dim), mesh.get_local_rank(dim)
            local = shards[rank] if rank < len(shards) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _read(model: nn.Module, runs: nn.Module, forward: Callable[[], Any]) -> dict[int, Seen]:
    """Run a forward of ``runs``, which is ``model`` or a copy of it, and return what it shows of its parameters."""
    named = list(runs.named_parameters())
    own = dict(model.named_parameters())
    eager = torch.compiler.set_stance("force_eager")  # a compiled function is one node, which hides its products
    with _kept(runs), plain_modes(), torch.enable_grad(), eager:
        for _, parameter in named:  # what frozen layers make is no input
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_()
        inputs = _Inputs()
        handle = runs.register_forward_pre_hook(inputs.ask, with_kwargs=True)
        try:
            with inputs:
                outputs = list(tensors_in(forward()))
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            found = f"example=, with which the model's forward raises {what}"
            write = "Write an example with which the forward runs, or leave it out"
            raise ValueError(explain_error(called("split_params"), found, _MEANT, write)) from error
        finally:
            handle.remove()
        seen = seen_by(outputs, named, inputs.tensors)
    if not seen:
        found = "example=, with which the model returns no tensor that depends on a weight"
        needed = "its outputs or its loss, with their graph"
        write = "Return them without detach() and outside torch.no_grad(), or leave example= out"
        raise ValueError(explain_error(called("split_params"), found, needed, write))
    return {id(own[name]): facts for name, facts in seen.items()}


class _Inputs(TorchFunctionMode):
    """A mode in which a model's inputs require gradients, so that the graph shows where they are read.

    Integers cannot require them. What is made of time steps, which are integer inputs of at most one dim, counts as an
    input where it becomes floating point. Tokens, positions and masks have more dims.

    Attributes:
        tensors: The tensors that require gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._steps: dict[int, Tensor] = {}  # by id; held, so that no other tensor gets the same

    def ask(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of a module, as a hook before its forward."""
        asked: tuple[Any, Any] = tree_map(self._asked, (args, kwargs))
        return asked

    def _asked(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone()
        if value.is_floating_point():
            return self._leaf(value)
        if value.dim() < 2 and value.dtype in (torch.int64, torch.int32):
            self._steps[id(value)] = value
        return value

    def _leaf(self, value: Tensor) -> Tensor:
        self.tensors.append(value.detach().requires_grad_())
        return self.tensors[-1].clone()  # no leaf, which could not be written in place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not any(id(value) in self._steps for value in args):
            return result
        if result.dtype in (torch.int64, torch.int32):
            self._steps[id(result)] = result
        elif result.is_floating_point() and not result.requires_grad:
            return self._leaf(result)
        return result


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
