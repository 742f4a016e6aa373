"""App: the commands of ``muonmesh``; the fields of `Settings` and `PlanRequest` become options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args

import typer

from muonmesh.files import reason
from muonmesh.tools.cli.audit_command import audit
from muonmesh.tools.cli.doctor import doctor
from muonmesh.tools.cli.plan_command import PlanRequest, plan
from muonmesh.tools.cli.run_settings import OUTPUT, Settings, declared, option
from muonmesh.tools.cli.terminal import complain, examples

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("muonmesh plan --model llama-3.1-8b --mesh fsdp=64", "muonmesh train --model nano --steps 100"),
)


@app.callback()
def commands() -> None:
    """Plan, train and inspect runs of Muon, an optimizer for PyTorch that gives the same update in every layout.

    muonmesh --version prints the versions of muonmesh and torch.

    Exit code 0: done. 1: failed or damaged. 2: wrong usage. 130: stopped by Ctrl-C.
    """


def train(
    context: typer.Context,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue the run in this directory with its settings. Only --ranks, --parallel and --timeout may "
            "change. auto: continue the run in --out if there is one, else start it there.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    **values: Any,
) -> None:
    """Train a language model with Muon, with AdamW, or with both from the same start, and compare them.

    Without options: a small Llama learns the sources of the Python standard library.

    Two ranks (or every GPU) under FSDP2 train it with Muon, then again with AdamW.

    The directory of the run gets report.html, and report.json with the same figures.

    Ctrl-C stops after the current step and leaves a checkpoint.
    """
    from muonmesh.tools.cli.run import settings_from_options, train_run

    typed = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    settings, resuming = settings_from_options(values, resume, typed)
    raise SystemExit(train_run(settings, resuming=resuming))


def parameters_of(kind: type) -> Iterator[inspect.Parameter]:
    """Yield a function parameter for each field of a class, in the form that typer reads."""
    for name, (plain, facts) in declared(kind).items():
        shown_type = plain if facts.typed is None else facts.typed
        left_out = getattr(kind, name, inspect.Parameter.empty)
        default = left_out if facts.typed is None else "auto" if "auto" in get_args(shown_type) else None
        names = (option(name),) if plain is bool else ()  # without a second option --no-...
        about = typer.Option(*names, help=facts.help, rich_help_panel=facts.panel, show_default=default is not None)
        annotation = Annotated[shown_type, about]  # type: ignore[valid-type]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def taking(kind: type, function: Callable[..., None]) -> Callable[..., None]:
    """Replace the ``**values`` of a function by an option for each field of a class, and return the function."""
    *leading, _ = inspect.signature(function, eval_str=True).parameters.values()
    function.__signature__ = inspect.Signature([*leading, *parameters_of(kind)])  # type: ignore[attr-defined]
    return function


def complaining(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints an error about its options as one sentence, and exits with 2."""

    @functools.wraps(command)
    def run(*arguments: Any, **values: Any) -> None:
        try:
            return command(*arguments, **values)
        except ValueError as error:
            message = str(error)
        except OSError as error:
            message = f"{error.filename}: {reason(error)}" if error.filename else reason(error)
        raise SystemExit(complain(command.__name__, message, code=2))

    return run


COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    taking(PlanRequest, plan): (
        "muonmesh plan --model llama-3.1-8b --mesh hsdp=2x8,tp=4",
        "muonmesh plan --model path/to/config.json --mesh fsdp=64 --json > plan.json",
        "muonmesh plan --model deepseek-v3 --mesh fsdp=32,tp=8 --experts ep=32,fsdp=8",
    ),
    audit: (
        "muonmesh audit train.py",
        "muonmesh audit -m package.train",
        "torchrun --nproc-per-node 2 -m muonmesh audit train.py",
        "muonmesh audit --json train.py > report.json",
    ),
    doctor: ("muonmesh doctor", "muonmesh doctor runs/night", "muonmesh doctor model.pt --json > found.json"),
    taking(Settings, train): (
        "muonmesh train",
        "muonmesh train --model nano --steps 100 --optimizer muon --out runs/first",
        "muonmesh train --resume runs/first --ranks 4",
        "muonmesh train --data 'texts/*.md' --lr 0.003",
    ),
}
"""The commands, each with examples at the end of its help text."""

for command, lines in COMMANDS.items():
    to_script = {"allow_interspersed_args": False} if command is audit else {}  # options after it are the script's
    app.command(epilog=examples(*lines), context_settings=to_script)(complaining(command))
