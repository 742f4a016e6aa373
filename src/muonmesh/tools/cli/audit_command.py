"""The command ``muonmesh audit``: reports what a step of a script's optimizer does to the script's model."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from muonmesh.errors import FileError, LayoutError

OK, TO_MEND, NO_AUDIT = 0, 1, 2


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION or MODULE:FUNCTION. The function returns (model, optimizer), wrapped and sharded as "
            "in training. optimizer may be a list. If the function calls backward, the gradients are checked too.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, each weight by its name.")] = False,
) -> None:
    """Watch one step of any optimizer on your model, and say for each weight what really happens to it.

    On several ranks, start the command with torchrun. The function must then call init_process_group().

    Exit code 0: nothing to mend. 1: something to mend. 2: the audit could not run.
    """
    import torch.distributed as dist

    from muonmesh.tools.auditing.audit import audit as watch
    from muonmesh.tools.cli.terminal import complain, say, say_json

    try:
        made = made_at(target)
        if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[0], "named_parameters"):
            raise FileError(f"{target}: found {type(made).__name__} returned. {NEEDED}")
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1 and not dist.is_initialized():
            raise FileError(
                f"{target}: found no process group on {ranks} ranks; needed the one that it trains with. Call "
                "torch.distributed.init_process_group() in it"
            )
        report = watch(made[1], made[0])
    except (FileError, LayoutError) as error:
        raise SystemExit(complain("audit", str(error), code=NO_AUDIT)) from error
    except Exception as error:  # from the script; with Python's own exit code 1, it would look like a result
        traceback.print_exc()
        raise SystemExit(NO_AUDIT) from error
    if not dist.is_initialized() or dist.get_rank() == 0:
        if as_json:
            say_json(report.to_dict())
        else:
            say(*str(report).split("\n"))
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(OK if report.ok else TO_MEND)


NEEDED = "Write FILE.py:FUNCTION, such as train.py:make, where make() returns (model, optimizer)"


def made_at(target: str) -> Any:
    """Import a script, call its function, and return the function's result.

    Raises:
        FileError: there is no such script or function, or the function calls ``sys.exit``, whose exit code would look
            like a result of the audit.
    """
    try:
        return function_at(target)()
    except SystemExit as error:
        raise FileError(f"{target}: found sys.exit({error.code!r}); needed a function that returns. {NEEDED}") from None


def function_at(target: str) -> Callable[[], Any]:
    """Import a script, and return one of its functions.

    Raises:
        FileError: there is no such script or function.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise FileError(f"{target}: found no function behind a colon. {NEEDED}")
    path = Path(place)
    script = path.suffix == ".py"
    sys.path.insert(0, str(path.resolve().parent) if script else os.getcwd())  # as Python does for a script
    module = path.stem if script else place
    try:
        missing = importlib.util.find_spec(module) is None or (script and not path.is_file())
    except (ImportError, ValueError):  # a name with dots: Python imports its first parts
        missing = True
    if missing:
        raise FileError(f"{place}: found no such {'file' if script else 'module'}. {NEEDED}")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise FileError(f"{target}: found no function {name!r} there. {NEEDED}")
    found: Callable[[], Any] = function
    return found
