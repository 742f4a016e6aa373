"""The commands on a function of the user's script: ``muonmesh audit`` and ``muonmesh transfer``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
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
    from muonmesh.tools.cli.terminal import say, say_json

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
    except (FileError, LayoutError):
        raise
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


_MODEL = "a model as for muonmesh plan, or FILE.py:FUNCTION that returns a model or (model, muonmesh.Muon)."


def transfer(
    small: Annotated[str, typer.Argument(help=f"The model with good settings: {_MODEL}", show_default=False)],
    large: Annotated[str, typer.Argument(help="The wider model, named in the same way.", show_default=False)],
    lr: Annotated[float, typer.Option(help="Learning rate of a model without an optimizer.")] = 3e-4,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of a model without an optimizer.")] = 0.1,
    scale_mode: Annotated[str, typer.Option(help="Scale mode of a model without an optimizer.")] = "match_rms_adamw",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, with every name.")] = False,
) -> None:
    """Say which settings carry over from a small model to a wider one, and what to set for the others.

    The table shows for each kind of parameter, small → large: RMS and spectral norm of a step, decay per step and
    initial RMS.
    """
    from muonmesh.tools.cli.terminal import say, say_json
    from muonmesh.tools.forecasts.transfer import transfer as compare

    settings = {"lr": lr, "weight_decay": weight_decay, "scale_mode": scale_mode}
    try:
        found = compare(*(_optimizer(target, settings) for target in (small, large)))
    except TypeError as error:  # what a script returned is no model or optimizer
        raise ValueError(str(error)) from error
    if as_json:
        say_json(json.loads(json.dumps(asdict(found)), parse_constant=lambda _: None))  # JSON has no word for NaN
    else:
        say(*str(found).split("\n"))


def _optimizer(target: str, settings: dict[str, Any]) -> Any:
    """Return the optimizer of a target.

    Args:
        target: A model name, or FILE.py:FUNCTION that returns a model or (model, optimizer).
        settings: The settings of the optimizer, if the target gives only a model.

    Raises:
        ValueError, TypeError: there is no such model or function, or a setting is wrong.
    """
    from muonmesh.build import from_model
    from muonmesh.tools.cli.model import meta_model
    from muonmesh.tools.cli.run_settings import Settings

    made = made_at(target) if ":" in target else meta_model(target, vocab=Settings.vocab, seq=Settings.seq)
    return made[-1] if isinstance(made, tuple) else from_model(made, **settings)
