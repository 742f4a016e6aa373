"""What one step of Muon would launch, move and hold on CUDA, for one rank of any cluster, on a machine without a GPU.

    python -m benchmarks.studies.dry_run
    python -m benchmarks.studies.dry_run --cases gpt2 llama-fsdp64 --json dry_run.json
    python -m benchmarks.studies.dry_run --cases gpt2-12 --budgets 0 40 300

The real step runs on fake tensors and torch's ``fake`` process group (`tests/device/dry_run.py`), beside those
of torch.optim's Muon and of its AdamW (foreach) where one process holds all. Nothing is measured: launches, bytes and
memory are counted, and the milliseconds are a model of one H100 from the rates of `DeviceRates`. Launches
count a multi-tensor operation as often as its kernel is started; "calls" counts it once. Bytes per element are those of
all but matrix products. Memory is what a step takes beside parameters, gradients and state, at most, and what it keeps
until the next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.contenders import Entries
from benchmarks.report import print_rows, write_json
from tests.device.dry_run import DryRun, dry_run
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import muonmesh as mm

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 3
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
LLAMA70 = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]
EXPERTS = [(192, 2816, 2048), (192, 2048, 1408)] * 26


@dataclass(frozen=True)
class Case:
    """Parameters on a cluster.

    Attributes:
        title: What the table calls it.
        shapes: Of the parameters.
        mesh: By the names of its dims; None for one process.
        placements: On that mesh.
    """

    title: str
    shapes: list[tuple[int, ...]]
    mesh: Mapping[str, int] | None = None
    placements: tuple[Any, ...] = ()

    def model(self) -> nn.Module:
        """The parameters on the meta device, fp32."""
        model = nn.Module()
        for number, shape in enumerate(self.shapes):
            model.register_parameter(f"weight{number}", nn.Parameter(torch.empty(shape, device="meta")))
        return model

    def run(self, optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> DryRun:
        """Take the step of rank 0."""
        world = 1
        for size in (self.mesh or {}).values():
            world *= size
        return dry_run(
            self.model(),
            optimizer,
            world=world,
            mesh=self.mesh,
            placements=(lambda name, parameter: self.placements) if self.mesh else None,
            **options,
        )


CASES = {
    "gpt2": Case("3 layers of GPT-2 small", GPT2),
    "gpt2-12": Case("GPT-2 small, one device", GPT2 * 4),
    "gpt2-12-fsdp8": Case("GPT-2 small, FSDP2 8", GPT2 * 4, {"shard": 8}, (Shard(0),)),
    "gpt2-12-ddp8": Case("GPT-2 small, DDP 8", GPT2 * 4, {"replicate": 8}, (Replicate(),)),
    "small": Case("1,000 of 64 × 64", [(64, 64)] * 1000),
    "llama": Case("Llama 8B, one device", LLAMA),
    "llama70-layer": Case("a layer of Llama 70B, one device", LLAMA70),
    "llama-fsdp8": Case("Llama 8B, FSDP2 8", LLAMA, {"shard": 8}, (Shard(0),)),
    "llama-fsdp64": Case("Llama 8B, FSDP2 64", LLAMA, {"shard": 64}, (Shard(0),)),
    "llama-fsdp2048": Case("Llama 8B, FSDP2 2,048", LLAMA, {"shard": 2048}, (Shard(0),)),
    "llama-fsdp8-tp8": Case("Llama 8B, FSDP2 8 × TP 8", LLAMA, {"shard": 8, "tp": 8}, (Shard(0), Shard(1))),
    "llama-hsdp8x8": Case("Llama 8B, HSDP 8 × 8", LLAMA, {"replicate": 8, "shard": 8}, (Replicate(), Shard(0))),
    "llama-hsdp32x64": Case("Llama 8B, HSDP 32 × 64", LLAMA, {"replicate": 32, "shard": 64}, (Replicate(), Shard(0))),
    "llama-ddp8": Case("Llama 8B, DDP 8", LLAMA, {"replicate": 8}, (Replicate(),)),
    "llama-ddp64": Case("Llama 8B, DDP 64", LLAMA, {"replicate": 64}, (Replicate(),)),
    "experts": Case("26 layers × 192 experts, EP 8", EXPERTS, {"experts": 8}, (Shard(0),)),
}


def muonmesh_optimizer(model: nn.Module, budget: float | None = None) -> torch.optim.Optimizer:
    """Muon with its defaults, but for its budget."""
    return mm.Muon(list(model.named_parameters()), lr=0.02, memory_budget_mb=budget)


def torch_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's Muon."""
    return torch.optim.Muon(list(model.parameters()), lr=0.02)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch.optim's AdamW, by multi-tensor operations."""
    return torch.optim.AdamW(list(model.parameters()), lr=0.02, foreach=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="Default: all.")
    parser.add_argument("--budgets", nargs="+", type=float, default=[None], help="memory_budget_mb. Default: Muon's.")
    parser.add_argument("--json", help="Where to write the figures.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    header = ["", "launches", "calls", "coll.", "B/elem.", "peak MiB", "kept", "ms"]
    rows, figures = list[list[str]](), list[dict[str, Any]]()
    for name in arguments.cases:
        case = CASES[name]
        contenders: dict[str, Any] = {
            "muonmesh" if budget is None else f"muonmesh {budget:g}": partial(muonmesh_optimizer, budget=budget)
            for budget in arguments.budgets
        }
        contenders |= {} if case.mesh else {"torch": torch_optimizer, "adamw": adamw}
        for title, optimizer in contenders.items():
            run = case.run(optimizer, steps=1)
            counts = [f"{count:,}" for count in (run.launches, run.operations, run.collectives)]
            memory = [f"{size / 2**20:,.0f}" for size in (run.peak_bytes, run.kept_bytes)]
            milliseconds = f"{run.best_seconds * 1e3:,.2f} to {run.seconds * 1e3:,.2f}"
            label = case.title if title == "muonmesh" else f"  {title}"
            rows.append([label, *counts, f"{run.bytes_per_element:.1f}", *memory, milliseconds])
            figures.append(
                {
                    "case": name,
                    "optimizer": title,
                    "seconds": run.seconds,
                    "best_seconds": run.best_seconds,
                    **asdict(run),
                }
            )
    print_rows("One step on CUDA, dry run; ms: modelled, one H100", header, rows)
    if arguments.json:
        write_json(arguments.json, "benchmarks/studies/dry_run.py", Entries((), (), {}), {"dry run": figures}, {})


if __name__ == "__main__":
    main()
