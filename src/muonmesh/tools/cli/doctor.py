"""Doctor: the command ``muonmesh doctor``, which checks a checkpoint, a run, or this machine and installation."""

from __future__ import annotations

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
        from muonmesh.tools.cli.installation import check_installation, lines_of

        findings = check_installation()
        if as_json:
            say_json([finding._asdict() for finding in findings])
        else:
            say(*lines_of(findings))
        raise SystemExit(DAMAGED if any(finding.remedy for finding in findings) else WHOLE)
    diagnosis = diagnose(path)
    if as_json:
        say_json(diagnosis.as_json())
    else:
        print_diagnosis(diagnosis)
    raise SystemExit(NO_CHECKPOINT if not diagnosis.kind else WHOLE if diagnosis.whole else DAMAGED)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as text, and its tensors as a table."""
    from muonmesh.tools.cli.terminal import say

    if not diagnosis.kind:
        say(diagnosis.faults[0])
        return
    say(f"{diagnosis.path}: {diagnosis.kind}, {_state(diagnosis)}", style="bold")
    for title, lines in (("damaged", diagnosis.faults), ("note", diagnosis.notes)):
        for line in lines:
            say(f"  {title}: {line}", style="red" if title == "damaged" else "")
    for line in _settings(diagnosis.settings):
        say(f"  {line}")
    if diagnosis.tensors:
        say(*_table(diagnosis))
    for part in diagnosis.parts:
        print_diagnosis(part)


def _state(diagnosis: Diagnosis) -> str:
    damaged = [part for part in diagnosis.parts if not part.whole]
    if damaged:
        return f"{len(damaged)} of its {len(diagnosis.parts)} checkpoints damaged"
    return "whole" if diagnosis.whole else "damaged" if diagnosis.faults else "not whole"


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
    if name.startswith("model."):  # a module of the model may be named "state"
        return "model"
    before, state, after = name.partition("state.")
    if state and (not before or before.endswith(".")):
        return f"state: {after.rsplit('.', 1)[-1]}"
    return "optimizer" if name.startswith("optimizer.") else "weights"


def _table(diagnosis: Diagnosis) -> list[str]:
    from muonmesh.table import aligned
    from muonmesh.tools.cli.diagnosis import dtype_of

    roles: dict[str, list[Tensor]] = {}
    for name, tensor in diagnosis.tensors.items():
        roles.setdefault(_role(name), []).append(tensor)
    rows = [("", "tensors", "numbers", "dtypes", "MB")]
    for role, members in roles.items():
        numbers = sum(member.numel() for member in members)
        dtypes = ", ".join(sorted({dtype_of(member) for member in members}))
        megabytes = sum(member.nbytes for member in members) / 1e6
        rows.append((role, f"{len(members):,}", f"{numbers:,}", dtypes, f"{megabytes:,.2f}"))
    return aligned(rows, right=(1, 2, 4), ruled=True)
