"""The command ``muonmesh audit``: runs the user's script until its first step, and prints what the step does."""

from __future__ import annotations

import os
import traceback
from typing import Annotated

import typer

from muonmesh.errors import FileError, LayoutError

OK, TO_MEND, NO_AUDIT = 0, 1, 2


def audit(
    script: Annotated[
        str, typer.Argument(help="A training script, which runs until its first step.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script: all that follows it, options too.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, each weight by its name.")] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as in python -m.")] = False,
) -> None:
    """Watch one step of any optimizer in your script, and say for each weight what really happens to it.

    On several ranks, start the command with torchrun. The script must then call init_process_group().

    Exit code 0: nothing to mend. 1: something to mend. 2: the audit could not run.
    """
    import torch.distributed as dist

    from muonmesh.tools.auditing.first_step import audit_script
    from muonmesh.tools.cli.terminal import say, say_json

    try:
        report, rank = audit_script(script, arguments or [], module=module)
    except (FileError, LayoutError):
        raise
    except Exception as error:  # from the script; with Python's own exit code 1, it would look like a result
        traceback.print_exc()
        raise SystemExit(NO_AUDIT) from error
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > report.ranks:
        raise FileError(
            f"{script}: found no process group on {ranks} ranks; needed the one that it trains with. Call "
            "torch.distributed.init_process_group() in it"
        )
    if rank == 0:  # as it was at the step: the script may have ended its process group
        if as_json:
            say_json(report.to_dict())
        else:
            say(*str(report).split("\n"))
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(OK if report.ok else TO_MEND)
