"""The command ``muonmesh plan``: the cost of an optimizer step on a cluster, without the cluster, as tables or JSON."""

from __future__ import annotations

import math
import textwrap
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.filesize import decimal

from muonmesh.errors import FileError
from muonmesh.table import aligned
from muonmesh.tools.cli.run_settings import Settings, check_fields_of, setting
from muonmesh.tools.cli.terminal import say, say_json

if TYPE_CHECKING:
    from muonmesh.tools.cli.planning import Cluster
    from muonmesh.tools.forecasts.forecast import Weight

WHAT = "What to plan"
WHERE = "Where it would run"


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of ``muonmesh plan``: the model, and the cluster to plan for."""

    model: str = setting(
        MISSING,
        WHAT,
        "A transformers config.json or a folder with one, a known model (deepseek-v3, llama-3-8b, -70b, "
        "llama-3.1-8b, -70b, -405b, llama-3.2-1b), a preset of muonmesh train, or a model type (gpt2).",
    )
    mesh: str = setting(MISSING, WHERE, "Mesh axes, the outermost first: ddp=N, fsdp=N, hsdp=REPLICASxSHARDS, tp=N.")
    experts: str | None = setting(
        None,
        WHERE,
        "Mesh axes of the same ranks for expert weights, such as ddp=8,ep=32,fsdp=8. Default: the axes of --mesh; "
        "tensor parallelism then splits each expert.",
    )
    weights: Literal["fp32", "bf16"] = setting("fp32", WHAT, "Dtype of weights and gradients.")
    to_owners: bool = setting(
        False,
        WHAT,
        'Plan for gradients="to_owners": replicas add gradients up at the owner, which orthogonalizes the matrix.',
    )
    rule: str = setting(
        "muon",
        WHAT,
        "The rule that updates matrices, with its default settings: of muonmesh or of an installed package.",
    )
    rank: int | None = setting(None, WHERE, "The rank to report. Default: the rank with the most work.", least=0)
    machine: int = setting(
        8, WHERE, "Ranks per machine. If replicas are on several machines, ranks pass results on inside each."
    )
    rates: Path | None = setting(
        None,
        WHERE,
        "A JSON file with the rates of a device: flops, published, bytes, wire (per second), kernel, operation, view, "
        "matrix, collective, message (seconds), memory (bytes). Default for each: one H100.",
    )
    memory_budget_mb: float | None = setting(
        None,
        WHAT,
        "MiB that a step may use in addition to weights, gradients and state. Default: as in the optimizer.",
        most=math.inf,
    )
    json: bool = setting(False, None, "Print every figure, and the owner of every matrix, as JSON.")

    def __post_init__(self) -> None:
        check_fields_of(self)


def plan(**values: Any) -> None:
    """Show what one optimizer step would cost on a cluster, without the cluster.

    The command computes the plan that every rank would compute. FLOPs, bytes sent and stored memory are exact.

    Kernel launches, the memory of a step and its time come from a model. Nothing is downloaded or run.
    """
    print_plan(planned(PlanRequest(**values)), as_json=values["json"])


def planned(request: PlanRequest) -> dict[str, Any]:
    """Return the figures of a model on a mesh; see `muonmesh.tools.cli.planning.figures_of`.

    Raises:
        ValueError: an option is wrong.
    """
    from muonmesh.tools.cli.planning import EXPERTS, figures_of, load_rates, parse_cluster
    from muonmesh.tools.forecasts.forecast import forecast

    mesh, experts, rank = request.mesh, request.experts, request.rank
    cluster = parse_cluster(mesh, experts)
    if rank is not None and rank >= len(cluster.ranks):
        raise FileError(f"--rank {rank}: needed a rank of --mesh {mesh}, below {len(cluster.ranks)}. Write: --rank 0")
    rates = None if request.rates is None else load_rates(request.rates)
    placed = weights_of(request.model, cluster)
    if experts is not None and not any(EXPERTS.search(weight.name) for weight in placed):
        raise FileError(
            f"--experts {experts}: found no experts in {request.model}; needed a mixture of experts. Leave it out"
        )
    itemsize = 4 if request.weights == "fp32" else 2
    cost = forecast(
        placed,
        rank=rank,
        rates=rates,
        itemsize=itemsize,
        memory_budget_mb=request.memory_budget_mb,
        to_owners=request.to_owners,
        rule=request.rule,
        machine=request.machine,
    )
    request_data = {name: getattr(request, name) for name in ("model", "mesh", "experts", "weights", "rule", "machine")}
    return {**request_data, "to owners": request.to_owners, **figures_of(placed, cost)}


def weights_of(model: str, cluster: Cluster) -> list[Weight]:
    """Return the parameters of a model with their layouts on a cluster, and the splits of `muonmesh.split_params`.

    `transformers` builds the model on the meta device, without memory.

    Raises:
        ValueError: there is no such model, or it is no causal language model.
    """
    import torch

    from muonmesh.build import split_params
    from muonmesh.tools.cli.model import build_model, configuration
    from muonmesh.tools.forecasts.forecast import Weight

    weights = []
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="cpu")
    with torch.device("meta"):
        built = build_model(configuration(model, vocab=Settings.vocab, seq=Settings.seq))
    for group in split_params(built, example=(tokens,)):
        splits = group["matrices"] if group["algorithm"] == "muon" else [None] * len(group["params"])
        for name, parameter, split in zip(group["param_names"], group["params"], splits, strict=True):
            weights.append(Weight(name, cluster.layout(name, tuple(parameter.shape), split), split))
    return weights


def print_plan(result: dict[str, Any], *, as_json: bool = False) -> None:
    """Print the kinds of parameters, and the figures of the cluster and of one rank; or all figures as JSON."""
    if as_json:
        say_json(result)
        return
    title = f"Cluster: {result['model']} on {result['mesh']} (ranks: {result['ranks']:,}), rule {result['rule']}"
    say(title, "", style="bold")
    headings = ("parameters", "shape", "matrices", "owners", "TFLOP", f"{result['rank']} sends")
    say(*aligned([headings, *rows_of(result)], right=range(1, 6), ruled=True))
    for title, figures in tables_of(result).items():
        say("", *aligned([(title, ""), *figures.items()], right=(1,), ruled=True))
    needed, memory = result["modelled"]["bytes in total"], int(result["rates"]["memory"])
    if needed > memory:
        say(
            f"Rank {result['rank']} needs {decimal(needed)} even without activations, more than the {decimal(memory)} "
            "of its device (memory in --rates). Shard over more ranks: --mesh fsdp=N, hsdp=REPLICASxSHARDS or tp=N"
        )
    if result["weights"] == "bf16":
        say("", *textwrap.wrap(BF16_NOTE, 80))
    say("", *textwrap.wrap(sentence_of(result), 80))


def sentence_of(result: dict[str, Any]) -> str:
    """Return the result in a sentence: what a step adds to forward and backward, here and with torch.optim.Muon."""
    modelled = result["modelled"]
    muonmesh_time, torch_time = (_shown("seconds", modelled[f"seconds{of}"]) for of in ("", OF_TORCH))
    return (
        f"A step adds {muonmesh_time} to forward and backward on rank {result['rank']}, limited by the "
        f"{modelled['limited by']}; torch.optim.Muon would add {torch_time}."
    )


BF16_NOTE = (
    "With bf16 weights, momentum is fp32 and AdamW's two moments are bf16, so both take 4 bytes for each element of a "
    "matrix. Write state_dtype=torch.bfloat16 in Muon to halve momentum."
)
OF_TORCH = " of torch.optim.Muon, without communication"


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Return a row for each kind of matrices, for the whole cluster, except the last cell: what one rank sends."""
    return [
        [
            _shortened(kind["name"].removeprefix("model.").removesuffix(".weight")),
            "×".join(map(str, kind["shape"])),
            f"{kind['matrices']:,}",
            f"{kind['owners']:,}",
            f"{kind['flops'] / 1e12:{',.0f' if kind['flops'] > 1e15 else '.4g'}}",
            decimal(kind["bytes sent"]) if kind["bytes sent"] else "",
        ]
        for kind in result["kinds"]
        if kind["algorithm"] == "muon"
    ]


def _shortened(name: str, room: int = 28) -> str:
    """Return a name, or its end from a dot on, so that the table fits 80 columns."""
    least = len(name) + 1 - room
    return name if least <= 1 else f"…{name[max(least, name.find('.', least)) :]}"


def tables_of(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the tables below the table of parameters, by title; each has figures by name."""
    from muonmesh.tools.forecasts.device_rates import DeviceRates

    adamw = sum(kind["count"] for kind in result["kinds"] if kind["algorithm"] == "adamw")
    cluster = {name: result[name] for name in ("elements", "matrices", "buckets")}
    device = "one H100" if result["rates"] == asdict(DeviceRates()) else "the rates given"
    tables = {
        "Cluster": {**cluster, "parameters that AdamW updates": adamw, **result["balance"]},
        f"Rank {result['rank']}, counted": result["counted"],
        f"Rank {result['rank']}, modelled for {device}": result["modelled"],
    }
    return {
        title: {name.replace("seconds", "time"): _shown(name, value) for name, value in figures.items()}
        for title, figures in tables.items()
    }


def _shown(name: str, value: Any) -> str:
    """Return a figure in the unit that follows from its name; counts are abbreviated: 671B, 1.28M."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):  # seconds, with products at best and as published
        unit, in_a_second = ("s", 1) if min(value.values()) >= 10 else ("ms", 1000)
        times = (in_a_second * end for end in sorted(value.values()))
        return " to ".join(dict.fromkeys(f"{time:{',.0f' if time >= 1000 else '.3g'}}" for time in times)) + f" {unit}"
    if "bytes" in name:
        return decimal(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:,.4g}{unit}"
    return f"{value:,}"
