"""Plans for clusters that are not here: what one rank of thousands computes before its first step.

    python -m benchmarks.studies.plan
    python -m benchmarks.studies.plan --cases llama --json plan.json

A plan is plain data and needs neither the machines nor the weights: models are built on the meta device, layouts are
those that FSDP2, tensor and expert parallelism give. Seconds are those of one rank, from names, shapes and layouts to
the plan with its proof of cover, its digest, and this rank's routes and holdings. MB is the peak of what Python
allocated meanwhile (tracemalloc, in a second fresh process, since it slows everything down). Imbalance is FLOPs of the
busiest rank over the mean; beside it the least that any plan could have. "At home": matrices whose owner holds them
whole, which need no gathering.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarks.contenders import Entries
from benchmarks.report import write_json
from torch import nn

import muonmesh as mm
from muonmesh.layout import MeshLayout, Parameter, Piece, Plan, make_plan
from muonmesh.layout.piece_table import pieces
from muonmesh.layout.plan import Routes
from muonmesh.report.explain import imbalance
from muonmesh.tools.cli.planning import Cluster, at_home, least_imbalance
from muonmesh.tools.forecasts.forecast import muon_parameter

BUCKET_ELEMENTS = 1 << 23  # 16 MiB in bf16, as a budget of 128 MiB gives where matrices are gathered

MODELS = ("transformers.models.llama.modeling_llama", "transformers.models.deepseek_v3.modeling_deepseek_v3")
"""Imported once, not for every figure."""

SECONDS, MEGABYTES = 5.0, 500.0  # of one rank, at most


def deepseek(**changes: Any) -> nn.Module:
    """DeepSeek-V3 671B unless changed, without weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(**changes))
    return model


def llama(**changes: Any) -> nn.Module:
    """Llama 3.1 405B unless changed, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    return model


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
        title: What the table calls it.
        model: Builds it on the meta device.
        mesh: Size of the axes (replicate, FSDP shard, tensor parallel); ranks are numbered row by row.
        experts: The same ranks as (replicate, expert parallel, FSDP shard) for expert stacks, which are cut into
            whole experts over the second axis and within each expert over the third.
    """

    title: str
    model: Callable[[], nn.Module]
    mesh: tuple[int, int, int]
    experts: tuple[int, int, int] = (1, 1, 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        replicate, shard, tensor = self.mesh
        return replicate * shard * tensor

    def layout(self, name: str, shape: tuple[int, ...], spec: Any) -> MeshLayout:
        """Return where a weight lives."""
        (replicate, shard, tensor), (copies, expert, within) = self.mesh, self.experts
        mesh = (("ddp", replicate), ("fsdp", shard), ("tp", tensor))
        experts = (("ddp", copies), ("ep", expert), ("fsdp", within))
        return Cluster(mesh, experts).layout(name, shape, spec)

    def weights(self) -> list[tuple[str, tuple[int, ...], Any]]:
        """Name, shape and split of every weight that Muon takes."""
        muon = [group for group in mm.split_params(self.model()) if group["algorithm"] == "muon"]
        return [
            (name, tuple(parameter.shape), spec)
            for group in muon
            for name, parameter, spec in zip(group["param_names"], group["params"], group["matrices"], strict=True)
        ]


CASES = {
    "deepseek": Case("DeepSeek-V3 671B, 32 EP × 8 FSDP", deepseek, (8, 32, 8), (8, 32, 8)),
    "deepseek-1024": Case("DeepSeek-V3 671B, half the ranks", deepseek, (4, 32, 8), (4, 32, 8)),
    "deepseek-ep256": Case("DeepSeek-V3 671B, 256 EP", deepseek, (8, 32, 8), (8, 256, 1)),
    "llama": Case("Llama 405B", llama, (16, 32, 8)),
}


def read(case: Case, weights: Sequence[tuple[str, tuple[int, ...], Any]]) -> list[Parameter]:
    """What a rank knows of its parameters."""
    return [muon_parameter(name, case.layout(name, shape, spec), spec) for name, shape, spec in weights]


def moves(plan: Plan, rank: int) -> tuple[list[Routes], list[tuple[Piece, ...]]]:
    """What a rank derives for itself: its routes there and back, bucket by bucket, and what it holds of each matrix."""
    routes = [
        plan.routes(bucket, rank, gather=gather) for bucket in range(len(plan.buckets)) for gather in (True, False)
    ]
    for bucket in range(len(plan.buckets)):
        plan.gathers(bucket)
        plan.scatters(bucket)
    holdings = [tuple(pieces(plan.parameters[a.parameter].target, rank, a.matrix)) for a in plan.assignments]
    return routes, holdings


def busiest(plan: Plan) -> int:
    """The rank that owns the most blocks of matrices, and so has about the most to derive."""
    blocks: Counter[int] = Counter()
    for assignment in plan.assignments:
        blocks[assignment.owner] += len(assignment.matrix.blocks)
    return blocks.most_common(1)[0][0]


@dataclass(frozen=True)
class Figures:
    """One line of the table.

    Attributes:
        seconds: Of one rank.
        megabytes: Peak of its Python objects (10⁶ bytes).
        rank: For which routes and holdings were derived.
        pieces: Pieces that this rank sends, receives or keeps, there and back.
        matrices, per_rank, buckets: Of the whole plan; matrices per rank are the mean.
        imbalance, least_imbalance, at_home: See the functions of these names.
    """

    seconds: float
    megabytes: float
    rank: int
    pieces: int
    ranks: int
    matrices: int
    per_rank: float
    buckets: int
    imbalance: float
    least_imbalance: float
    at_home: float

    @property
    def problems(self) -> list[str]:
        """The targets that were missed: 5 % of balance where there is enough to share, 1 % of the best elsewhere."""
        enough = self.per_rank >= 8 and self.imbalance <= 1.05
        return [
            *([] if self.seconds < SECONDS else [f"{self.seconds:.1f} s, not under {SECONDS:.0f}"]),
            *([] if self.megabytes < MEGABYTES else [f"{self.megabytes:.0f} MB, not under {MEGABYTES:.0f}"]),
            *([] if enough or self.imbalance <= 1.01 * self.least_imbalance else [f"imbalance {self.imbalance:.3f}"]),
        ]


def measure(name: str, rank: int | None, traced: bool) -> Figures:
    """Plan one case; to be called in a fresh process, whose caches are empty."""
    torch.set_num_threads(1)
    case = CASES[name]
    weights = case.weights()
    if traced:
        tracemalloc.start()
    started = time.perf_counter()
    parameters = read(case, weights)
    plan = make_plan(parameters, bucket_elements=BUCKET_ELEMENTS)
    assert plan.digest
    seconds = time.perf_counter() - started
    rank = busiest(plan) if rank is None else rank
    started = time.perf_counter()
    routes, _holdings = moves(plan, rank)
    seconds += time.perf_counter() - started
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6 if traced else 0.0
    tracemalloc.stop()
    return Figures(
        seconds,
        megabytes,
        rank,
        sum(len(rows) for route in routes for peers in (route.stored, route.assembled) for rows in peers.values()),
        len(plan.ranks),
        len(plan.assignments),
        len(plan.assignments) / len(plan.ranks),
        len(plan.buckets),
        imbalance(plan.loads),
        least_imbalance(plan),
        at_home(plan),
    )


def figures(name: str, rank: int | None) -> Figures:
    """Measure time and memory of a case, each in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), max_tasks_per_child=1) as pool:
        timed = pool.submit(measure, name, rank, False).result()
        traced = pool.submit(measure, name, rank, True).result()
    return Figures(**(asdict(timed) | {"megabytes": traced.megabytes}))


def print_table(results: dict[str, Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One rank's planning", title_justify="left")
    table.add_column("", no_wrap=True)
    header = (
        "ranks",
        "seconds",
        "MB",
        "matrices",
        "per rank",
        "buckets",
        "imbalance",
        "best possible",
        "at home",
    )
    for column in header:
        table.add_column(column, justify="right")
    for name, figures in results.items():
        table.add_row(
            CASES[name].title,
            f"{figures.ranks:,}",
            f"{figures.seconds:.2f}",
            f"{figures.megabytes:.0f}",
            f"{figures.matrices:,}",
            f"{figures.per_rank:.1f}",
            str(figures.buckets),
            f"{figures.imbalance:.3f}",
            f"{figures.least_imbalance:.3f}",
            f"{figures.at_home:.0%}",
        )
    Console().print(table)


def main() -> None:
    """Measure, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--rank", type=int, help="whose routes; by default one that owns the most blocks of matrices")
    parser.add_argument("--json", default="benchmarks/results/plan.json", help="where to write (default %(default)s)")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"The machine is busy (load {load:.1f}): the seconds may not hold.")
    multiprocessing.set_forkserver_preload(["__main__", *MODELS])
    results = {name: figures(name, chosen.rank) for name in chosen.cases}
    print_table(results)
    tables = {
        name: {"title": CASES[name].title, "mesh": CASES[name].mesh, "experts": CASES[name].experts, **asdict(measured)}
        for name, measured in results.items()
    }
    facts = {
        "load_before": round(load, 2),
        "targets": {"seconds": SECONDS, "megabytes": MEGABYTES},
        "bucket_elements": BUCKET_ELEMENTS,
    }
    write_json(chosen.json, "benchmarks/studies/plan.py", Entries((), (), {}), tables, facts)
    wrong = [f"{CASES[name].title}: {problem}" for name, measured in results.items() for problem in measured.problems]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
