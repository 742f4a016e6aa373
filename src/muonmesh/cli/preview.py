"""Preview: ``--dry-run``: who would own what, memory and expected time of a run, without starting a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

import muonmesh as mm
from muonmesh.cli.blueprint import parts_of
from muonmesh.cli.configuration import model_config
from muonmesh.cli.launch import usable_cores
from muonmesh.cli.model import build_model
from muonmesh.cli.plan import planned, print_plan
from muonmesh.cli.settings import PAIR, REPLICAS, Settings
from muonmesh.cli.terminal import make_console
from muonmesh.report.forecast import flops_of

MEASURED = 256  # rows and columns of the matrices that tell how fast this machine is
SECONDS = 0.2  # for which each is repeated
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 6  # FLOPs a parameter and token: two forward, four backward


def preview(settings: Settings, parameters: int) -> None:
    """Print the plan of a run's optimizer, and what its trainings would take.

    Args:
        settings: Of the run.
        parameters: Number of the model's parameters.
    """
    with torch.device("meta"):
        config = model_config(settings.model, vocab=settings.vocab, seq=settings.seq, init=settings.init is not None)
        model = build_model(config)
    found = planned(settings.model, mesh=mesh_of(settings), parts=parts_of(model))
    print_plan(found)
    x = torch.randn(MEASURED, MEASURED, dtype=DTYPES[settings.dtype], device=settings.device)
    forward = measured_rate(settings, lambda: torch.mm(x, x), 2 * MEASURED**3)
    muon = measured_rate(settings, lambda: mm.orthogonalize(x), flops_of(MEASURED, MEASURED))
    # Each rank has sequences of its own, or its part of the work on them.
    learning = PASSES * parameters * settings.tokens_per_step / forward / settings.ranks
    update = max(found["flops_by_rank"]) / muon
    seconds = settings.steps * (learning + update)
    lines = [
        f"{settings.steps} steps of {settings.tokens_per_step:,} tokens take at least {_spoken(seconds)} with Muon, "
        f"{update / (learning + update):.0%} of it orthogonalising, {_spoken(settings.steps * learning)} with AdamW",
        f"from what one rank computes here, measured now: {settings.dtype} products at {forward / 1e9:,.3g} GFLOP/s, "
        f"orthogonalisations at {muon / 1e9:,.3g}; attention, communication and validation are not in it",
    ]
    make_console().print(f"[bold]Time, modelled[/bold]: {'; '.join(lines)}", soft_wrap=True)
    if settings.zero:
        make_console().print(f"ZeRO {settings.zero} is planned like FSDP2; its flat shards have other borders.")


def mesh_of(settings: Settings) -> str:
    """Return the mesh of a run as ``muonmesh plan`` writes it."""
    ranks = settings.ranks
    match settings.parallel:
        case "ddp":
            return f"ddp={ranks}"
        case "hsdp":
            return f"hsdp={REPLICAS}x{ranks // REPLICAS}"
        case "tp":
            return f"tp={ranks}"
        case "fsdp+tp":
            return f"fsdp={ranks // PAIR},tp={PAIR}"
        case _:
            return f"fsdp={ranks}"


def measured_rate(settings: Settings, work: Callable[[], object], flops: int) -> float:
    """Return the FLOP/s of some work of so many FLOPs on one rank: its share of this machine's cores, or its GPU."""
    before = torch.get_num_threads()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else max(1, usable_cores() // settings.ranks))
    try:
        count, began = -1, 0.0  # the first time is not counted: it takes memory, and loads what computes
        while count < 1 or time.perf_counter() - began < SECONDS:
            work()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            count += 1
            began = began if count else time.perf_counter()
        return count * flops / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)


def _spoken(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
