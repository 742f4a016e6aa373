"""What gradients and a step send under Muon of several packages, on clusters that are not here.

    python -m benchmarks.step_traffic --json benchmarks/results/step_traffic.json

Figures of muonmesh are those of its planner, for the rank with the most work. Figures of other packages are means over
the ranks, derived from their sources: `SOURCES` names the lines. Weights, gradients and what travels are bf16, and ring
collectives send (R - 1)/R of their elements. What FSDP2 gathers for the forward and the backward pass is left out
everywhere, and so is DMuon's broadcast in its place. Modelled is the network alone: bytes over 50 GB/s, and 30 µs for
each message. Operations that a package coalesces into one launch count as one message each.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contenders import Entries
from benchmarks.report import print_rows, write_json

from muonmesh.comm.schedule import stages_of
from muonmesh.comm.step_callbacks import Batching
from muonmesh.layout import FlatShards, Interval, MeshLayout, Replicate, split_matrices
from muonmesh.tools.cli.plan_command import weights_of
from muonmesh.tools.cli.planning import EXPERTS, parse_cluster
from muonmesh.tools.forecasts.device_rates import DeviceRates
from muonmesh.tools.forecasts.forecast import Weight, forecast

ITEM, ITERATIONS, MACHINE = 2, 5, 8
DDP_BUCKET = 25 * 2**20  # bytes: torch's default
EMERGING = "emerging_optimizers 0.3, orthogonalized_optimizers/muon_utils.py"
SOURCES = {
    "dion": "microsoft/dion 0a059a4, dion/megabatch_base.py: all-gather of results 849, all-to-alls 793 and 816, one "
    "axis of a mesh 46 to 51 and 410",
    "Megatron layer-wise": "NVIDIA/Megatron-LM d98e8a64dd, megatron/core/optimizer/layer_wise_optimizer.py: shards of "
    "whole matrices 197, buffers of the distributed optimizer 551 to 558; megatron/core/distributed/"
    f"param_and_grad_buffer.py: reduce-scatter 718; duplicated over tensor parallelism: {EMERGING} 274",
    "Megatron distributed": f"as layer-wise, and {EMERGING}: one all-reduce of the Gram matrix for each iteration 317",
    "DMuon": "X-Square-Robot/dmuon f002f24, dmuon/_backends/ddp/group.py: reduce 257, broadcast 592; "
    "dmuon/_backends/fsdp2/group.py: reduce 1102, over replicas 1232, broadcast 1755, gather 1484 and scatter 1622 "
    "over tensor parallelism",
}
CASES = {
    "Llama 8B, DDP 8": ("llama-3.1-8b", "ddp=8", None),
    "Llama 8B, DDP 64": ("llama-3.1-8b", "ddp=64", None),
    "Llama 8B, FSDP2 64": ("llama-3.1-8b", "fsdp=64", None),
    "Llama 405B, HSDP 16×32 × TP 8": ("llama-3.1-405b", "hsdp=16x32,tp=8", None),
    "DeepSeek-V3, 2,048 ranks": ("deepseek-v3", "hsdp=8x32,tp=8", "ddp=8,ep=32,fsdp=8"),
}
LAYER = re.compile(r"\.layers\.\d+\.")
BUFFERS: dict[str, Callable[[Weight], object]] = {
    "ZeRO-1 and 2": lambda weight: weight.matrices is None,  # a buffer for each param group
    "FSDP1": lambda weight: LAYER.findall(weight.name),  # and for each wrapped block
}
FLAT = {f"Llama 8B, {kind} {ranks}": ("llama-3.1-8b", kind, ranks) for kind in BUFFERS for ranks in (8, 64)}


@dataclass(frozen=True)
class Row:
    """What one rank sends in a step; ``device`` is the modelled time of the products where a plan tells it."""

    case: str
    method: str
    bytes: int
    messages: int
    device: float | None = None

    @property
    def network(self) -> float:
        """Modelled seconds of the network."""
        rates = DeviceRates()
        return self.bytes / rates.wire + self.messages * rates.collective


@dataclass(frozen=True)
class Held:
    """How one weight lies: elements on a rank, and over how many ranks which axes cut or copy it."""

    weight: Weight
    local: int
    replicas: int
    shards: int
    tensor: int

    @staticmethod
    def of(weight: Weight, kinds: list[str]) -> Held:
        """Read it off the layout; the axes of experts cut whole experts, which counts as no axis of FSDP's or TP's."""
        layout = weight.layout
        assert isinstance(layout, MeshLayout)
        sizes = {"ddp": 1, "fsdp": 1, "tp": 1}
        for kind, size, placement in zip(kinds, layout.mesh, layout.placements, strict=True):
            if kind in sizes and (kind == "ddp") == isinstance(placement, Replicate):
                sizes[kind] = size
        return Held(weight, math.prod(layout.local_shape(0)), sizes["ddp"], sizes["fsdp"], sizes["tp"])

    @property
    def gradient(self) -> float:
        """Elements that AdamW's reduction sends: a reduce-scatter over shards, an all-reduce over replicas."""
        return self.local * ((self.shards - 1) + 2 * (self.replicas - 1) / self.replicas)


def rows_of(case: str, *, owners: bool = True) -> list[Row]:
    """Return a row for each method; ``owners``: muonmesh's gradients to owners too."""
    model, mesh, experts = CASES[case]
    cluster = parse_cluster(mesh, experts)
    weights = weights_of(model, cluster)
    entries = []
    for weight in weights:
        axes = cluster.mesh
        if cluster.experts and EXPERTS.search(weight.name) and len(weight.layout.shape) > 1:
            axes = cluster.experts
        entries.append(Held.of(weight, [kind for kind, _ in axes]))
    matrices = [entry for entry in entries if entry.weight.matrices is not None]
    others = [entry for entry in entries if entry.weight.matrices is None]
    sharded = any(entry.shards > 1 for entry in entries)
    layers = len({name.split(".")[2] for name in (w.name for w in weights) if ".layers." in name}) + 1
    gradients = round(sum(entry.gradient for entry in entries) * ITEM)
    groups = layers * (1 + any(entry.replicas > 1 for entry in entries)) if sharded else 0
    messages = groups or -(-sum(entry.local for entry in entries) * ITEM // DDP_BUCKET)
    rows = [Row(case, "AdamW", gradients, messages)]

    for method, to_owners in (("muonmesh", False), ("muonmesh to owners", True)):
        if to_owners and not owners:
            continue
        if to_owners and all(entry.replicas == 1 for entry in entries):
            continue
        prediction = forecast(weights, itemsize=ITEM, to_owners=to_owners, machine=MACHINE)
        first, begun = gradients, messages
        if to_owners:  # FSDP2's reduce-scatter stays; the rest goes to owners
            first = (
                round(sum(entry.local * (entry.shards - 1) for entry in entries) * ITEM)
                + prediction.gradients.bytes_sent
            )
            begun = (layers if sharded else 0) + prediction.gradients.collectives
        sent = first + prediction.bytes_sent
        rows.append(Row(case, method, sent, begun + prediction.collectives, prediction.parts()["device"]))

    several = any(sum(size > 1 for size in (entry.shards, entry.tensor)) > 1 for entry in matrices)
    if not several and experts is None:
        shapes = len({weight.layout.shape for weight in (entry.weight for entry in matrices)})
        back = sum(entry.local * ((entry.replicas - 1) / entry.replicas if not sharded else 0) for entry in matrices)
        gathered = sum(2 * entry.local * (entry.shards - 1) / entry.shards for entry in matrices)
        rows.append(Row(case, "dion", gradients + round((back + gathered) * ITEM), messages + shapes * (1 + sharded)))

    # Megatron has no FSDP here: all ranks but tensor and expert parallelism are data-parallel.
    megatron, buckets, duplicated, distributed, shared = 0.0, 0.0, 0.0, 0.0, 0.0
    for entry in entries:
        data = entry.replicas * entry.shards
        megatron += 2 * (data - 1) / data * entry.local * entry.shards
        buckets += 2 * entry.local * entry.shards / max(40e6, 1e6 * data)
        if entry.weight.matrices is not None and entry.tensor > 1:
            matrices_of_weight = split_matrices(entry.weight.name, entry.weight.layout.shape, entry.weight.matrices)
            cut = next(p.dim for p in reversed(entry.weight.layout.placements) if not isinstance(p, Replicate))  # type: ignore[attr-defined]
            for matrix in matrices_of_weight:
                side = matrix.cols if cut == 0 else matrix.rows
                duplicated += (entry.tensor - 1) / entry.tensor * matrix.numel / data * 2  # fp32
                distributed += ITERATIONS * 2 * (entry.tensor - 1) / entry.tensor * side**2 / data
                shared += 1 / data
    rows.append(Row(case, "Megatron layer-wise", round((megatron + duplicated) * ITEM), math.ceil(buckets + shared)))
    if shared:
        gram = round((megatron + distributed) * ITEM)
        rows.append(Row(case, "Megatron distributed", gram, math.ceil(buckets + ITERATIONS * shared)))

    if experts is None:
        owned, count = sum(entry.gradient for entry in others), 0.0
        for entry in matrices:
            whole = entry.local * entry.shards  # DMuon does not cut it over data-parallel ranks
            owned += whole * (entry.shards - 1) / entry.shards
            owned += 2 * entry.local * (entry.replicas - 1) / entry.replicas  # among the ranks of the owner's column
            owned += 2 * (entry.tensor - 1) / entry.tensor * entry.local / entry.replicas  # the gather and the scatter
            count += (
                (entry.shards > 1)
                + 2 * (entry.replicas > 1) / entry.shards
                + 2 * (entry.tensor > 1) / entry.shards / entry.replicas
            )
        rest = layers if sharded else -(-sum(entry.local for entry in others) * ITEM // DDP_BUCKET)
        rows.append(Row(case, "DMuon", round(owned * ITEM), math.ceil(count + rest)))
    return rows


def flat_rows_of(case: str) -> list[Row]:
    """Return rows for flat buffers that are cut evenly: means over the ranks.

    Ranks reduce a gradient to whoever holds its elements, or to the owner of its matrix, with equal bytes. In the
    second case no direction has to go to the owner, and results still go back.
    """
    model, kind, ranks = FLAT[case]
    weights = weights_of(model, parse_cluster(f"ddp={ranks}", None))
    buffers: dict[object, list[Weight]] = {}
    for weight in weights:
        buffers.setdefault(str(BUFFERS[kind](weight)), []).append(weight)
    flat = {}
    for in_buffer in buffers.values():
        sizes = [math.prod(weight.layout.shape) for weight in in_buffer]
        size = -(-sum(sizes) // ranks) * ranks
        for weight, count, end in zip(in_buffer, sizes, itertools.accumulate(sizes), strict=True):
            within = MeshLayout.replicated(weight.layout.shape, tuple(range(ranks)))
            layout = FlatShards.in_buffer(within, [0], Interval(0, count, end - count), size)
            flat[weight.name] = Weight(weight.name, layout, weight.matrices)
    plan = forecast([flat[weight.name] for weight in weights], itemsize=ITEM).plan
    sent_to_owners, sent_back, messages = 0, 0, 0
    for rank in plan.ranks:
        stages, _ = stages_of(plan, rank, plan.ranks, Batching())
        sent_to_owners += sum(row.piece.numel for stage in stages for row in stage.to_owners.leaving)
        sent_back += sum(row.piece.numel for stage in stages for packed in stage.back for row in packed.leaving)
        messages = max(messages, sum(stage.gathers + len(stage.back) for stage in stages))
    elements = sum(math.prod(weight.layout.shape) for weight in weights)
    gradients = round(elements * (ranks - 1) / ranks * ITEM)
    begun = len(buffers)
    directions, results = round(sent_to_owners / ranks * ITEM), round(sent_back / ranks * ITEM)
    return [
        Row(case, "AdamW", gradients, begun),
        Row(case, "muonmesh", gradients + directions + results, begun + messages),
        Row(case, "muonmesh to owners, at best", gradients + results, begun + messages // 2),
    ]


def main() -> None:
    """Derive, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*CASES, *FLAT], default=list(CASES))
    parser.add_argument(
        "--no-owners",
        action="store_true",
        help="leave gradients to owners out: minutes where thousands of ranks cut them",
    )
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    tables: dict[str, Any] = {}
    for case in options.only:
        rows = flat_rows_of(case) if case in FLAT else rows_of(case, owners=not options.no_owners)
        base = rows[0].bytes
        tables[case] = {row.method: {**asdict(row), "network": row.network} for row in rows}
        print_rows(
            case,
            ["", "GB sent", "over AdamW", "messages", "network ms", "products ms"],
            [
                [
                    row.method,
                    f"{row.bytes / 1e9:.2f}",
                    f"{row.bytes / base:.2f}",
                    f"{row.messages:,}",
                    f"{row.network * 1e3:,.0f}",
                    "" if row.device is None else f"{row.device * 1e3:,.0f}",
                ]
                for row in rows
            ],
        )
    if options.json:
        write_json(options.json, "benchmarks/step_traffic.py", Entries((), (), {}), tables, {"sources": SOURCES})


if __name__ == "__main__":
    main()
