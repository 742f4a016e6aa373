"""App: the commands of ``muonmesh``, and what ``muonmesh train`` takes from the declarations of its settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer

from muonmesh.cli.audit_command import audit
from muonmesh.cli.doctor import doctor
from muonmesh.cli.plan_command import plan
from muonmesh.cli.run_settings import Request, Settings, declared, option
from muonmesh.cli.terminal import complain

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Muon for PyTorch that computes the same update whatever holds the matrix.",
)


app.command()(plan)
app.command()(audit)
app.command()(doctor)


def train(context: typer.Context, **values: Any) -> None:
    """Train a language model with Muon, with AdamW, or with both from the same start, and compare them.

    Without options: a small Llama learns the sources of the Python standard library.

    Two ranks (or every GPU) under FSDP2 train it with Muon, then again with AdamW.

    Ctrl-C stops after the current step and leaves a checkpoint.
    """
    from muonmesh.cli.asked import settings_of
    from muonmesh.cli.run import check, preview, train_run
    from muonmesh.cli.sweep import train_sweep

    given = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    try:
        request = Request(**{name: values.pop(name) for name in declared(Request)})
        settings, resuming = settings_of(values, request, given)
        if request.sweep is not None or request.seeds is not None:
            raise SystemExit(train_sweep(settings, request))
        if not request.dry_run:
            raise SystemExit(train_run(settings, resuming=resuming))
        check(settings, resuming=resuming)
        preview(settings)
    except ValueError as error:
        raise SystemExit(complain("train", str(error), code=2)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise SystemExit(complain("train", f"{where}{error.strerror or error}", code=2)) from error


def parameters_of(kind: type) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field that a class declares, as typer reads parameters off a function."""
    for name, (plain, said) in declared(kind).items():
        asked = plain if said.asked is None else said.asked
        default = getattr(kind, name, None) if said.asked is None else "auto" if "auto" in get_args(asked) else None
        shown = default is not None
        names = (option(name),) if plain is bool else ()  # which has no --no-... beside it
        about = typer.Option(*names, help=said.help, rich_help_panel=said.panel, show_default=shown)
        annotation = Annotated[asked, about]  # type: ignore[valid-type]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [context, *parameters_of(Settings), *parameters_of(Request)]
)
app.command()(train)
