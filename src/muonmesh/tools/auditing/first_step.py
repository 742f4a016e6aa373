"""First step: runs a training script as it is, and audits its optimizers where the first of them is about to step."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from muonmesh.errors import FileError
from muonmesh.files import kind_of
from muonmesh.tools.auditing.audit import Audit, audit
from muonmesh.tools.auditing.probe import nested


class _EndOfScript(BaseException):
    """Ends the script; not an Exception, which a training loop may catch."""


def audit_script(script: str, arguments: Sequence[str], *, module: bool = False) -> tuple[Audit, int]:
    """Run a script until an optimizer is about to take its first step, audit there, and end the script.

    What the script prints goes to stderr. On several ranks, every rank runs the script. A script that catches what ends
    it, or ends otherwise after it, changes nothing in the report; each further step ends it again.

    Args:
        script: The file, or the name of a module or package, run as Python runs it.
        arguments: The arguments of the script.
        module: Whether ``script`` is the name of a module, as in ``python -m``.

    Returns:
        The report, and the rank of this process at that step.

    Raises:
        FileError: there is no script, or no optimizer of torch has stepped when it ends, or no module holds the
            optimizer's parameters.
    """
    outcomes: list[tuple[Audit, int] | Exception] = []  # kept here, since the script may catch what a hook raises

    def watch(optimizer: Optimizer, *_: Any) -> NoReturn:
        if not outcomes:
            handles.pop().remove()  # the audit steps too
            try:
                model = _model_of(optimizer)
                report = audit(_optimizers_of(model, optimizer), model)
                outcomes.append((report, dist.get_rank() if dist.is_initialized() else 0))
            except Exception as error:
                outcomes.append(error)
            handles.append(register_optimizer_step_pre_hook(hook))
        raise _EndOfScript(f"muonmesh audit has seen the first step of {type(optimizer).__qualname__}")

    path = Path(script)
    if not (module or path.is_file()):
        raise FileError(f"{script}: found {kind_of(path)}; needed a training script. Write muonmesh audit train.py")
    # A script may compile its step, with the hook in it.
    hook = torch.compiler.disable(watch)  # type: ignore[no-untyped-call]
    handles = [register_optimizer_step_pre_hook(hook)]
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(path.resolve().parent))  # as Python does
    ended = "the script ended"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        ended = f"the script called sys.exit({error.code!r})"
    except BaseException:
        if not outcomes:
            raise
    finally:
        handles.pop().remove()
    if not outcomes:
        raise FileError(f"{script}: {ended} before a torch.optim.Optimizer stepped. {CALL}")
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    return outcomes[0]


CALL = "Write print(muonmesh.audit(optimizer, model)) in the script, after backward"


def _model_of(optimizer: Optimizer) -> nn.Module:
    """Return the outermost module that holds an optimizer's parameters; several of them as one, by their classes."""
    every = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    places = {key: place for place, key in enumerate(every)}  # of those that no chosen module holds
    modules: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [(module, {*map(id, module.parameters())}) for module in modules if id(module) not in inner]
    models: dict[str, nn.Module] = {}
    while outer:
        held, module = max(  # on every rank the same: the garbage collector's order may differ
            ((sorted(places[key] for key in ids & places.keys()), module) for module, ids in outer),
            key=lambda pair: (len(pair[0]), [-place for place in pair[0]]),
        )
        if not held:
            break
        taken = set(held)
        places = {key: place for key, place in places.items() if place not in taken}
        name = type(module).__name__
        models[name if name not in models else f"{name}_{len(models)}"] = module
    if not models:
        raise FileError(
            f"{type(optimizer).__qualname__}: no torch.nn.Module holds its parameters, and the audit names weights by "
            f"their module. {CALL}"
        )
    return nn.ModuleDict(models) if len(models) > 1 else next(iter(models.values()))


def _optimizers_of(model: nn.Module, first: Optimizer) -> list[Optimizer]:
    """Return the optimizers that hold weights of a model, without wrappers of each other."""
    ids = {id(parameter) for parameter in model.parameters()}
    chosen = [first]
    for other in gc.get_objects():
        if issubclass(type(other), Optimizer) and any(
            id(parameter) in ids for group in other.param_groups for parameter in group["params"]
        ):
            inside = {id(inner) for inner in nested(chosen)}
            if not any(id(inner) in inside for inner in nested([other])):
                chosen.append(other)
    return chosen
