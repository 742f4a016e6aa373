"""The command ``muonmesh transfer``: which settings carry over from a small model to a wider one, and what to set."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

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
    from muonmesh.tools.cli.terminal import complain, say, say_json
    from muonmesh.tools.forecasts.transfer import transfer as compare

    settings = {"lr": lr, "weight_decay": weight_decay, "scale_mode": scale_mode}
    try:
        found = compare(*(_optimizer(target, settings) for target in (small, large)))
    except (ValueError, TypeError) as error:
        raise SystemExit(complain("transfer", str(error), code=2)) from error
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
    from muonmesh.tools.cli.audit_command import made_at
    from muonmesh.tools.cli.model import meta_model
    from muonmesh.tools.cli.run_settings import Settings

    made = made_at(target) if ":" in target else meta_model(target, vocab=Settings.vocab, seq=Settings.seq)
    return made[-1] if isinstance(made, tuple) else from_model(made, **settings)
