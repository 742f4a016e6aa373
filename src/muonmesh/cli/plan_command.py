"""The command ``muonmesh plan``: what a step would cost on a cluster that is not here, as a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.filesize import decimal

if TYPE_CHECKING:
    from muonmesh.cli.blueprint import ModelParameter

WHAT = "What to plan"
WHERE = "Where it would run"
OUTPUT = "What to write"


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A transformers config.json or a folder with one, a model that is known by name (deepseek-v3, "
            "llama-3.1-8b, -70b, -405b), a preset of muonmesh train, or a model type (gpt2).",
            rich_help_panel=WHAT,
        ),
    ],
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes of the ranks, the outermost first: ddp=N, fsdp=N, hsdp=REPLICASxSHARDS, tp=N.",
            rich_help_panel=WHERE,
        ),
    ],
    experts: Annotated[
        str | None,
        typer.Option(
            help="The same ranks as expert stacks lie on them, such as ddp=8,ep=32,fsdp=8. Default: as all else, and "
            "tensor parallelism cuts each expert.",
            rich_help_panel=WHERE,
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Dtype of weights and gradients.", rich_help_panel=WHAT)
    ] = "fp32",
    to_owners: Annotated[
        bool,
        typer.Option(
            "--to-owners",
            help='Replicas add gradients up at owners, as gradients="to_owners" does.',
            rich_help_panel=WHAT,
        ),
    ] = False,
    rule: Annotated[
        str, typer.Option(help="How matrices are stepped, with the defaults of the rule.", rich_help_panel=WHAT)
    ] = "muon",
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Whom to tell of. Default: the busiest.", rich_help_panel=WHERE, show_default=False),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            help="JSON of a device's rates: flops, bytes, wire (a second), launch, collective (seconds). Default: one "
            "H100.",
            rich_help_panel=WHERE,
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every figure, and every owner.", rich_help_panel=OUTPUT, show_default=False),
    ] = None,
) -> None:
    """Say what one step of Muon would cost on a cluster, before anybody has it.

    Who orthogonalises what, FLOPs, bytes and stored memory are counted from the plan that every rank would make.
    Launches, the memory of a step and its time are modelled, and say so. Nothing is downloaded, built or run.
    """
    from muonmesh.cli.terminal import complain
    from muonmesh.files import write_text

    try:
        asked: dict[str, Any] = {"experts": experts, "weights": weights, "to_owners": to_owners, "rule": rule}
        found = planned(model, mesh=mesh, rank=rank, rates=rates, **asked)
        print_plan(found)
        if json_file is not None:
            write_text(json_file, json.dumps(found, indent=1) + "\n")
    except ValueError as error:
        raise SystemExit(complain("plan", str(error), code=2)) from error


def planned(
    model: str,
    *,
    mesh: str,
    experts: str | None = None,
    weights: Literal["fp32", "bf16"] = "fp32",
    to_owners: bool = False,
    rule: str = "muon",
    rank: int | None = None,
    rates: Path | None = None,
    parts: Sequence[ModelParameter] | None = None,
) -> dict[str, Any]:
    """Return the figures of a model on a mesh; see `muonmesh.cli.figures.figures_of`.

    Args:
        model, mesh, experts, weights, to_owners, rule, rank, rates: As the options say.
        parts: The parameters, where they are known already; ``model`` is their name then.

    Raises:
        ValueError: an option is wrong.
    """
    from muonmesh.cli.blueprint import blueprint
    from muonmesh.cli.cluster import EXPERTS, parse_cluster
    from muonmesh.cli.figures import figures_of, load_rates
    from muonmesh.cli.run_settings import Settings
    from muonmesh.errors import FileError
    from muonmesh.report.forecast import Weight, forecast

    cluster = parse_cluster(mesh, experts)
    if rank is not None and rank >= len(cluster.ranks):
        raise FileError(f"--rank {rank}: found {len(cluster.ranks)} ranks in --mesh {mesh}. Write: --rank 0")
    speed = None if rates is None else load_rates(rates)
    parts = parts or blueprint(model, vocab=Settings.vocab, seq=Settings.seq)
    if experts is not None and not any(EXPERTS.search(part.name) for part in parts):
        raise FileError(f"--experts {experts}: found no experts in {model}; needed a mixture of experts. Leave it out")
    placed = [Weight(p.name, cluster.layout(p.name, p.shape, p.matrices), p.matrices) for p in parts]
    itemsize = 4 if weights == "fp32" else 2
    found = forecast(placed, rank=rank, rates=speed, itemsize=itemsize, to_owners=to_owners, rule=rule)
    asked = {"model": model, "mesh": mesh, "experts": experts, "weights": weights, "to owners": to_owners, "rule": rule}
    return {**asked, **figures_of(placed, found)}


def print_plan(found: dict[str, Any]) -> None:
    """Print the kinds of parameters, and what the rank does."""
    from muonmesh.cli.terminal import make_console, table_of

    console = make_console()
    console.print(f"{found['model']} on {found['ranks']:,} ranks, with {found['rule']}", markup=False)
    console.print(table_of(HEADINGS, rows_of(found)))
    for title, line in lines_of(found):
        console.print(f"[bold]{title}[/bold]: {line}", soft_wrap=True)


HEADINGS = ("parameters", "shape", "matrices", "owners", "TFLOP", "MB sent")


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row for the matrices of all layers that are alike; bytes are those of the rank that is told of."""
    rows = []
    for kind in found["kinds"]:
        if kind["algorithm"] == "muon":
            shape = "×".join(map(str, kind["shape"]))
            rows.append(
                [
                    kind["name"].removeprefix("model.").removesuffix(".weight"),
                    shape if kind["count"] == 1 else f"{kind['count']} of {shape}",
                    f"{kind['matrices']:,}",
                    f"{kind['owners']:,}",
                    f"{kind['flops'] / 1e12:,.4g}",
                    f"{kind['bytes sent'] / 1e6:,.3f}" if kind["bytes sent"] else "",
                ]
            )
    return rows


def lines_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said below the table, by title; a line of modelled figures says so."""
    from muonmesh.report.device_rates import DeviceRates

    balance = found["balance"]
    device = "one H100" if found["rates"] == asdict(DeviceRates()) else "the rates given"
    return [
        (
            "Model",
            f"{amount(found['elements'])} parameters, {found['matrices']:,} matrices in {found['buckets']} buckets"
            f"; {sum(k['count'] for k in found['kinds'] if k['algorithm'] == 'adamw'):,} other parameters are AdamW's",
        ),
        (
            "Balance",
            f"busiest over mean {balance['busiest over mean']:.3f}, of {balance['least that any plan could have']:.3f} "
            f"that any plan must have; {balance['share of matrices at home']:.0%} of the matrices are orthogonalised "
            "where they lie whole",
        ),
        (f"Rank {found['rank']}, counted", _counted(found["counted"])),
        (f"Rank {found['rank']}, modelled for {device}", _modelled(found["modelled"])),
    ]


def _counted(figures: dict[str, Any]) -> str:
    kept = {"weights": "weights", "gradients": "gradients", "momentum": "state of matrices", "AdamW's moments": ""}
    stored = ", ".join(f"{said or what} {decimal(figures[f'bytes of {what}'])}" for what, said in kept.items())
    if figures["collectives of gradients"]:
        stored = (
            f"before that, gradients to owners: {decimal(figures['bytes of gradients sent'])} sent and "
            f"{decimal(figures['bytes of gradients received'])} received in {figures['collectives of gradients']} "
            f"collectives; {stored}"
        )
    return (
        f"orthogonalises {figures['matrices']:,}, {figures['flops'] / 1e12:,.3g} TFLOP; "
        f"{figures['bytes sent'] / 1e6:,.4g} MB sent and {figures['bytes received'] / 1e6:,.4g} MB received in "
        f"{figures['collectives']} collectives; {stored}"
    )


def _modelled(figures: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {figures[f'seconds of the {part}'] * 1e3:,.3g}" for part in ("host", "device", "network")
    )
    return (
        f"{figures['launches']:,} launches; {decimal(figures['bytes of the exchange'])} beside what is stored, "
        f"{decimal(figures['bytes together'])} together, without activations; {figures['seconds'] * 1e3:,.3g} ms a "
        f"step, the slowest of {parts} ms"
    )


def amount(count: int) -> str:
    """Return a large count in short: 671B, 1.28M."""
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{count / factor:,.4g}{unit}"
    return f"{count:,}"
