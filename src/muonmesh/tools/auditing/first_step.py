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

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from muonmesh.errors import FileError
from muonmesh.files import kind_of
from muonmesh.tools.auditing.audit import Audit, audit
from muonmesh.tools.auditing.probe import nested


class _Audited(BaseException):
    """Ends the script; not an Exception, which a training loop may catch."""

    def __init__(self, report: Audit) -> None:
        self.report = report


def audit_script(script: Path, arguments: Sequence[str]) -> Audit:
    """Run a script until an optimizer is about to take its first step, audit there, and end the script.

    What the script prints goes to stderr. On several ranks, every rank runs the script.

    Args:
        script: The file, run as Python runs it.
        arguments: The arguments of the script.

    Raises:
        FileError: there is no script, or no optimizer of torch has stepped when it ends, or no module holds the
            optimizer's parameters.
    """

    def watch(optimizer: Optimizer, *_: Any) -> NoReturn:
        handle.remove()
        model = _model_of(optimizer)
        raise _Audited(audit(_optimizers_of(model, optimizer), model))

    if not script.is_file():
        raise FileError(f"{script}: found {kind_of(script)}; needed a training script. Write muonmesh audit train.py")
    handle = register_optimizer_step_pre_hook(watch)
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))  # as Python does for a script
    ended = "the script ended"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(os.fspath(script), run_name="__main__")
    except _Audited as audited:
        return audited.report
    except SystemExit as error:
        ended = f"the script called sys.exit({error.code!r})"
    finally:
        handle.remove()
    raise FileError(f"{script}: {ended} before a torch.optim.Optimizer stepped. {CALL}")


CALL = "Write print(muonmesh.audit(optimizer, model)) in the script, after backward"


def _model_of(optimizer: Optimizer) -> nn.Module:
    """Return the outermost module that holds most of an optimizer's parameters."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inner]
    counts = [sum(id(parameter) in ids for parameter in module.parameters()) for module in outer]
    if not any(counts):
        raise FileError(
            f"{type(optimizer).__qualname__}: no torch.nn.Module holds its parameters, and the audit names weights by "
            f"their module. {CALL}"
        )
    return outer[counts.index(max(counts))]


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
