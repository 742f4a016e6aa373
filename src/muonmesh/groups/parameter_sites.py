"""Parameter sites: the places where a model holds its parameters, and the role of a parameter at such a place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from muonmesh.names import WRAPPERS, canonical_name

# Plain data, nested: "whole", ("rows", 768, 768, 768), ("stack", ("transposed", "whole")), …; see docs/groups.md.
Matrices = str | tuple[Any, ...]

MuonOrAdamW = Literal["muon", "adamw"]
Kind = Literal["matrices", "embeddings", "head", "vectors"]

# Wrapper classes with the wrapped model in the child "module" (other modules may have a child of this name too). They
# are listed by name, because Megatron, DeepSpeed and apex have such classes too.
_HOLDS_MODULE = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AveragedModel", "Float16Module"}
_HOLDS_MODULE |= {"FullyShardedDataParallel", "MegatronFSDP"}  # of Megatron; torch's first names its child otherwise


@dataclass(frozen=True)
class Site:
    """One place where a parameter is registered.

    `name` is the canonical name, and `key` its last part. `owners` are the modules around the parameter, the innermost
    first, each with its name in the next module; wrappers are left out.
    """

    name: str
    key: str
    parameter: nn.Parameter
    owners: tuple[tuple[str, nn.Module], ...]

    @property
    def module(self) -> nn.Module:
        """The module in which the parameter is registered."""
        return self.owners[0][1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter before sharding."""
        return global_shape(self.parameter)

    @property
    def layer(self) -> tuple[str, nn.Module]:
        """The layer whose weight or bias it is: its name in the module around it, and this module.

        A parameter that a module holds under another name counts as a layer of this module.
        """
        if len(self.owners) < 2 or not re.fullmatch(r"(weight|bias)\d*", self.key):  # experts' have numbers
            return self.key, self.module
        return self.owners[0][0], self.owners[1][1]

    @property
    def keys(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules around the parameter, the innermost first, each with the parameter's name in this module."""
        key = self.key
        for name, module in self.owners:
            yield module, key
            key = f"{name}.{key}"


@dataclass(frozen=True)
class Role:
    """The algorithm that updates a parameter, the kind of its group, and the reason.

    `matrices` is the parameter's split into matrices, even if AdamW updates it; None if unknown. `guess` is true if
    a forward of the model could show another role, and has not been read.
    """

    algorithm: MuonOrAdamW
    kind: Kind
    reason: str
    matrices: Matrices | None
    guess: bool = False


def parameter_sites(
    module: nn.Module, path: tuple[str, ...] = (), owners: tuple[tuple[str, nn.Module], ...] = ()
) -> Iterator[Site]:
    """Yield every place where a model holds a parameter, in registration order; shared parameters occur several times.

    Args:
        module: The model, or a module in it.
        path: The names that lead from the model to this module.
        owners: The modules around this module, see `Site`.
    """
    if (inner := _wrapped(module)) is not None:
        yield from parameter_sites(inner, path, owners)
        return
    owners = ((path[-1] if path else "", module), *owners)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Site(".".join((*path, key)), key, parameter, owners)
    for name, child in module._modules.items():
        if child is not None:
            yield from parameter_sites(child, (*path, name), owners)


def shared_sites(model: nn.Module) -> list[list[Site]]:
    """Return the places of each parameter of a model, in the order of the first ones."""
    shared: dict[int, list[Site]] = {}
    for site in parameter_sites(model):
        shared.setdefault(id(site.parameter), []).append(site)
    return list(shared.values())


def tensor_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules hold as plain attributes, neither parameters nor buffers, by canonical name."""
    return {
        canonical_name(f"{prefix}.{key}" if prefix else key): value
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside `module`, if this is a wrapper that canonical names leave out; else None."""
    for name in WRAPPERS:
        if (inner := dict(module._modules.items()).get(name)) is not None:
            return inner
    if not _HOLDS_MODULE.isdisjoint(class_names(module)):
        return module._modules.get("module")
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without its wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter before sharding.

    A DTensor knows it. ZeRO-3 keeps it in `ds_shape`, and DDP over tensor parallelism in `_st_info`.
    """
    whole: Any = getattr(parameter, "_st_info", parameter)
    return tuple(getattr(whole, "ds_shape", whole.shape))


def class_chain(module: nn.Module) -> list[type]:
    """Return the classes of a module, most derived first, without mixins that are no modules."""
    return [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]


def class_names(module: nn.Module, library: str = "") -> list[str]:
    """Return the names of a module's classes, most derived first (`fully_shard` adds a class of its own in front).

    If `library` is given, classes outside this package are left out.
    """
    kinds = class_chain(module)
    return [kind.__name__ for kind in kinds if not library or kind.__module__.split(".")[0] == library]


def answer_of(module: nn.Module, method: str) -> Any:
    """Return what a module's method without arguments returns; None if it has none, or something else of this name.

    None too if the method looks for a part of the model that is missing. Any other error in it is the user's to see.
    """
    function: Any = getattr(module, method, None)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # none, or another function
        return None
    try:
        return function()
    except NotImplementedError:  # a class that leaves the method to those derived from it
        return None
    except AttributeError as error:  # of a pipeline stage without the head
        if error.name is None or not isinstance(error.obj, nn.Module | None):
            raise
        return None


def is_traced(module: nn.Module) -> bool:
    """Whether a module has lost its class: by torch.export, also in a traced pipeline, or by torch.jit."""
    return not {"InterpreterModule", "ScriptModule"}.isdisjoint(class_names(module))


def class_of(module: nn.Module) -> str:
    """Return the name of a module's class; the class that `fully_shard` adds in front is skipped."""
    names = class_names(module)
    return names[1] if type(module).__mro__[1].__name__ == "FSDPModule" else names[0]
