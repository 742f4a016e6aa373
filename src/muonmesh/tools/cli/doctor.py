"""Doctor: the command ``muonmesh doctor``, which checks a checkpoint, a run, or this machine and installation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from muonmesh.tools.cli.diagnosis import Diagnosis

WHOLE, DAMAGED, NO_CHECKPOINT = 0, 1, 2


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A run of muonmesh train, a folder of muonmesh.checkpoint.save, or a file of torch.save. Without a "
            "path: this machine and this installation.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print everything as JSON, each tensor by name. The key faults lists all damages."),
    ] = False,
) -> None:
    """Show what a checkpoint contains and whether it is complete. Without a path, check this machine.

    The command changes nothing and executes nothing from the checkpoint, so the checkpoint may be untrusted.

    Exit code 0: complete, or nothing to do. 1: damaged, or something to do. 2: nothing that it can check.
    """
    from muonmesh.tools.cli.diagnosis import diagnose
    from muonmesh.tools.cli.terminal import say, say_json

    if path is None:
        from muonmesh.tools.cli.installation import lines_of, look_around

        findings = look_around()
        if as_json:
            say_json([asdict(one) for one in findings])
        else:
            say(*lines_of(findings))
        raise SystemExit(DAMAGED if any(one.do for one in findings) else WHOLE)
    found = diagnose(path)
    if as_json:
        say_json(found.as_json())
    else:
        print_diagnosis(found)
    raise SystemExit(NO_CHECKPOINT if not found.kind else WHOLE if found.whole else DAMAGED)


def print_diagnosis(found: Diagnosis) -> None:
    """Print a diagnosis as text, and its tensors as a table."""
    from muonmesh.tools.cli.terminal import say

    if not found.kind:
        say(found.faults[0])
        return
    say(f"{found.path}: {found.kind}, {_state(found)}", style="bold")
    for title, lines in (("damaged", found.faults), ("note", found.notes)):
        for line in lines:
            say(f"  {title}: {line}", style="red" if title == "damaged" else "")
    for line in _settings(found.settings):
        say(f"  {line}")
    if found.tensors:
        say(*_table(found))
    for part in found.parts:
        print_diagnosis(part)


def _state(found: Diagnosis) -> str:
    damaged = [part for part in found.parts if not part.whole]
    if damaged:
        return f"{len(damaged)} of its {len(found.parts)} checkpoints damaged"
    return "whole" if found.whole else "damaged" if found.faults else "not whole"


def _settings(settings: dict[str, Any]) -> list[str]:
    """Return lines that describe settings: one for a run, and one for each group of an optimizer."""
    names = ("model", "optimizer", "steps", "parallel", "ranks", "checkpoint_every")
    run = ", ".join(f"{name} {settings[name]}" for name in names if name in settings)
    lines = [run] if run else []
    for group in settings.get("groups", ()):
        rate = group["settings"].get("lr")
        lr = "" if rate is None else f", lr {rate:.4g}" if isinstance(rate, float) else f", lr {rate}"
        lines.append(f"group {group['name']}: {group['algorithm']}{lr}")
    return lines


def _role(name: str) -> str:
    """Return the role of a tensor, by its name: weights, or a kind of optimizer state."""
    before, state, after = name.partition("state.")
    if state and (not before or before.endswith(".")):
        return f"state: {after.rsplit('.', 1)[-1]}"
    return name.partition(".")[0] if name.startswith(("model.", "optimizer.")) else "weights"


def _table(found: Diagnosis) -> list[str]:
    from muonmesh.table import aligned
    from muonmesh.tools.cli.diagnosis import dtype_of

    roles: dict[str, list[Tensor]] = {}
    for name, tensor in found.tensors.items():
        roles.setdefault(_role(name), []).append(tensor)
    rows = [("", "tensors", "numbers", "dtypes", "MB")]
    for role, held in roles.items():
        numbers = sum(one.numel() for one in held)
        dtypes = ", ".join(sorted({dtype_of(one) for one in held}))
        rows.append((role, f"{len(held):,}", f"{numbers:,}", dtypes, f"{sum(one.nbytes for one in held) / 1e6:,.2f}"))
    return aligned(rows, right=(1, 2, 4), ruled=True)
