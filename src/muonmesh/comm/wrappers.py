"""Wrappers: finds the DistributedDataParallel that holds a parameter, and so the ranks of its replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from muonmesh.errors import LayoutError, about, explain_error

Living = TypeVar("Living")

_averaging_sources: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.WeakSet[Any]]
_averaging_sources = weakref.WeakKeyDictionary()
"""For each wrapper, the gradient sources that average in its place."""


def group_of_wrapper(model: nn.Module) -> Literal["world"] | dist.ProcessGroup | None:
    """Return the process group of a model that is a DistributedDataParallel, compiled or not; None for others."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        return None
    group: dist.ProcessGroup = inner.process_group
    return "world" if group is dist.group.WORLD else group  # "world" can be pickled


def average_instead(source: object, model: nn.Module) -> None:
    """Switch off the averaging of a DistributedDataParallel while ``source`` lives, as in ``no_sync()``.

    It averages again once this source, and all others that average in its place, are gone. Other models stay unchanged.

    Raises:
        ValueError: the wrapper has ``static_graph=True``. Torch would fail in its first backward pass.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        if inner.static_graph:
            text = "The model is in a DistributedDataParallel with static_graph=True, which cannot leave gradients "
            raise ValueError(about("gradients='to_owners'", text + "to muonmesh. Leave out static_graph"))
        inner.require_backward_grad_sync = False
        sources = _averaging_sources.setdefault(inner, weakref.WeakSet())
        if source not in sources:
            sources.add(source)
            weakref.finalize(source, _resume, weakref.ref(inner)).atexit = False


def _resume(wrapper: weakref.ref[DistributedDataParallel]) -> None:
    if (inner := wrapper()) is not None:
        inner.require_backward_grad_sync = not any(True for _ in _averaging_sources[inner])


def average_for_wrappers(
    source: object, wrappers: Iterable[weakref.ref[DistributedDataParallel]], trained: Collection[Tensor]
) -> None:
    """Average with a source in place of all wrappers that hold its parameters.

    A framework wraps a model after the optimizer was made. Gradients would count twice: as the source has sent them,
    before the wrapper averages, and as the wrapper leaves them afterwards.

    Args:
        source: The source of the gradients, see `average_instead`.
        wrappers: See `wrappers_of`.
        trained: The parameters of the optimizer.

    Raises:
        LayoutError: a wrapper also averages gradients of other parameters, which nothing would average then.
        ValueError: as `average_instead`.
    """
    identities = set(map(id, trained))
    for wrapper in wrappers:
        if (inner := wrapper()) is None:
            continue
        left_out = inner.parameters_to_ignore
        for name, parameter in inner.module.named_parameters():
            if parameter.requires_grad and name not in left_out and id(parameter) not in identities:
                text = "With gradients='to_owners' the optimizer averages in place of DistributedDataParallel, and "
                text += "nothing would average the gradient of this one, which another optimizer trains. Leave out "
                raise LayoutError(about(name, text + "gradients='to_owners', or freeze it with requires_grad_(False)"))
        average_instead(source, inner)


def living(kind: type[Living]) -> list[Living]:
    """Return the existing objects of a class in this process.

    The search goes through all objects that Python can collect; a million objects take about 0.1 s. Objects from before
    a ``gc.freeze()`` are not found.
    """
    # Not isinstance: it reads the __class__ of some objects, and deprecated objects then give a warning.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


def wrappers_of(tensors: Collection[Tensor]) -> tuple[weakref.ref[DistributedDataParallel], ...]:
    """Return the existing DistributedDataParallel wrappers that hold some of these parameters; see `living`."""
    identities = set(map(id, tensors))
    wrappers = living(DistributedDataParallel)
    holding = [w for w in wrappers if any(id(p) in identities for p in w.module.parameters())]
    return tuple(map(weakref.ref, holding))


def refuse_join(wrappers: Iterable[weakref.ref[DistributedDataParallel]]) -> None:
    """Raise an error if a wrapper is in torch's `Join`: a rank that has no more data would not take part in steps.

    Such a rank repeats the collectives of its wrappers, and would meet those of a step in them. Torch's optimizers have
    no collectives. Every rank raises this error by itself, since a collective could meet those of `Join`.

    Raises:
        LayoutError: a wrapper is in `Join`, which goes on when a rank has no more data.
    """
    for wrapper in wrappers:
        config = getattr(wrapper(), "_join_config", None)
        if config is not None and config.enable and not config.throw_on_early_termination:
            problem = "torch.distributed.algorithms.join.Join, in which ranks without data take no steps"
            write = "Write Join([model], throw_on_early_termination=True), or give every rank as many batches"
            needed = "all ranks in every step, because each owns some of the matrices"
            raise LayoutError(explain_error("DistributedDataParallel", problem, needed, write))


def layers_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and, if it is a wrapper or an engine, each inner optimizer in turn."""
    layers: list[Any] = []
    while optimizer is not None and not any(optimizer is other for other in layers):
        yield optimizer
        layers.append(optimizer)
        names = ("basic_optimizer", "optimizer", "_optimizer", "init_optimizer")
        optimizer = next((getattr(optimizer, key) for key in names if getattr(optimizer, key, None) is not None), None)


def group_that_averages(tensors: Mapping[str, Tensor]) -> dist.ProcessGroup | None:
    """Return the process group in which existing DistributedDataParallel wrappers average gradients of parameters.

    A framework wraps the model itself, often after the optimizer was made, and may keep the wrapper anywhere. So this
    function searches all existing wrappers for the parameters, once for each plan.

    Args:
        tensors: Parameters by name.

    Returns:
        The group; None if no wrapper holds any of the parameters.

    Raises:
        LayoutError: wrappers hold some of the parameters but not all plain tensors among them, or the wrappers of two
            parameters have groups of different ranks.
    """
    group_of: dict[int, dist.ProcessGroup] = {}
    for wrapper in living(DistributedDataParallel):
        left_out = wrapper.parameters_to_ignore
        averaged = (p for name, p in wrapper.module.named_parameters() if name not in left_out)
        group_of |= {id(parameter): wrapper.process_group for parameter in averaged}
    averaging = {name: group_of[id(tensor)] for name, tensor in tensors.items() if id(tensor) in group_of}
    if not averaging:
        return None
    first, group = next(iter(averaging.items()))
    ranks = dist.get_process_group_ranks(group)
    for name, tensor in tensors.items():
        if name not in averaging:
            if isinstance(tensor, DTensor):
                continue
            text = f"No DistributedDataParallel averages this plain tensor, while one averages {first}. If your loop "
            text += 'averages its gradient over all ranks, write Muon(..., process_group="world"). Otherwise leave it '
            text += "out of the param groups"
            raise LayoutError(about(name, text))
        other = dist.get_process_group_ranks(averaging[name])
        if other != ranks:
            found_ranks = f"a DistributedDataParallel of ranks {other}, while that of {first} has ranks {ranks}"
            write = "Give each its own optimizer, or pass gradients= with a GradientSource whose group() returns them"
            raise LayoutError(explain_error(name, found_ranks, "one group for all parameters", write))
    return group
