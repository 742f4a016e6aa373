"""The command ``muonmesh transfer``: what carries over from a small model to a wider one, and what to set there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

_MODEL = "as for muonmesh plan, or FILE.py:FUNCTION, which returns a model, or (model, optimizer) with a muonmesh.Muon."


def transfer(
    small: Annotated[str, typer.Argument(help=f"The model whose settings are good: {_MODEL}", show_default=False)],
    large: Annotated[str, typer.Argument(help="The wider model, likewise.", show_default=False)],
    lr: Annotated[float, typer.Option(help="Learning rate of both halves.")] = 3e-4,
    muon_lr: Annotated[float | None, typer.Option(help="That of matrices, if another.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of both halves.")] = 0.1,
    scale_mode: Annotated[str, typer.Option(help="How updates of matrices are scaled.")] = "match_rms_adamw",
    rule: Annotated[str, typer.Option(help="How matrices are stepped.")] = "muon",
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, with names.")] = False,
) -> None:
    """Say which settings carry over from a small model to a wider one, and what to set for the others.

    For each kind of parameters: step RMS, spectral norm, decay a step and initial RMS, small → large.
    """
    import muonmesh as mm
    from muonmesh.cli.terminal import complain, make_console

    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "scale_mode": scale_mode, "rule": rule}
    settings["muon"] = None if muon_lr is None else {"lr": muon_lr}
    try:
        found = mm.transfer(*(_optimizer(target, settings) for target in (small, large)))
    except ValueError as error:
        raise SystemExit(complain("transfer", str(error), code=2)) from error
    rows = [{**asdict(row), "set": row.settings} for row in found.rows]
    told = json.dumps({"rows": rows, "new": found.new}, indent=1) if as_json else str(found)
    make_console().print(told, soft_wrap=True, markup=False)


def _optimizer(target: str, settings: dict[str, Any]) -> Any:
    """Return the optimizer that a function makes, or one with these settings for the model that is named.

    Raises:
        ValueError: there is no such model or function, or a setting is wrong.
    """
    import muonmesh as mm
    from muonmesh.cli.audit_command import function_at
    from muonmesh.cli.blueprint import meta_model
    from muonmesh.cli.run_settings import Settings
    from muonmesh.errors import FileError

    model = function_at(target)() if ":" in target else meta_model(target, vocab=Settings.vocab, seq=Settings.seq)
    optimizer = model[1] if isinstance(model, tuple) and len(model) == 2 else None
    if hasattr(model, "named_parameters"):
        return mm.from_model(model, **settings)
    if not isinstance(optimizer, mm.Muon):
        needed = "a model, or (model, optimizer) with a muonmesh.Muon"
        raise FileError(f"{target}: found {type(model).__name__} returned; needed {needed}")
    return optimizer
