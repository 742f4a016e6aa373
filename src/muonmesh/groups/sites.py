"""Sites: where a model holds its parameters, and the role that each is given there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from muonmesh.groups.fused_projections import Matrices, class_names, global_shape
from muonmesh.names import WRAPPERS

MuonOrAdamW = Literal["muon", "adamw"]
Kind = Literal["matrices", "embeddings", "head", "vectors"]

# Classes whose child "module" stands for them (a model may well have a child of that name), by name, since Megatron,
# DeepSpeed and apex have such classes too.
_HOLDS_MODULE = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AveragedModel", "Float16Module"}


@dataclass(frozen=True)
class Site:
    """One place where a parameter is registered.

    `name` is canonical, `key` its last part. `owners` are the modules it is in, the innermost first, each with its
    name in the next; wrappers are left out.
    """

    name: str
    key: str
    parameter: nn.Parameter
    owners: tuple[tuple[str, nn.Module], ...]

    @property
    def module(self) -> nn.Module:
        """The module that holds it."""
        return self.owners[0][1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape before sharding."""
        return global_shape(self.parameter)

    @property
    def keys(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that it is in, the innermost first, each with the parameter's name there."""
        key = self.key
        for name, module in self.owners:
            yield module, key
            key = f"{name}.{key}"


@dataclass(frozen=True)
class Role:
    """Who updates a parameter and why.

    `matrices` is how it splits into matrices, also if AdamW updates it; None: not known. `guess`: only the shape says
    that it is one matrix.
    """

    algorithm: MuonOrAdamW
    kind: Kind
    reason: str
    matrices: Matrices | None
    guess: bool = False


def sites(
    module: nn.Module, path: tuple[str, ...] = (), owners: tuple[tuple[str, nn.Module], ...] = ()
) -> Iterator[Site]:
    """Every place where a model holds a parameter, in registration order; a shared parameter comes several times.

    Args:
        module: The model, or a module in it.
        path: The names that lead to it.
        owners: The modules that it is in, see `Site`.
    """
    if (inner := _wrapped(module)) is not None:
        yield from sites(inner, path, owners)
        return
    owners = ((path[-1] if path else "", module), *owners)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Site(".".join((*path, key)), key, parameter, owners)
    for name, child in module._modules.items():
        if child is not None:
            yield from sites(child, (*path, name), owners)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """What `module` wraps, if it is a wrapper that leaves no trace in canonical names."""
    for name in WRAPPERS:
        if module._modules.get(name) is not None:
            return module._modules[name]
    if not _HOLDS_MODULE.isdisjoint(class_names(module)):
        return module._modules.get("module")
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """What `module` is without wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def class_of(module: nn.Module) -> str:
    """The class as its author named it: `fully_shard` puts one of its own in front."""
    names = class_names(module)
    return names[1] if type(module).__mro__[1].__name__ == "FSDPModule" else names[0]
