"""Contenders take turns on one workload, A B C A B C, and are then judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from benchmarks.contenders import OURS, Contender
from benchmarks.judge import judged
from benchmarks.report import Result
from benchmarks.workload import Layout, Workload
from torch.optim import Optimizer


def contest(
    contenders: Sequence[Contender],
    workload: Workload,
    layout: Layout,
    timed_step: Callable[[Optimizer], float],
    *,
    rounds: int,
    warmup: int,
) -> list[Result]:
    """Measure `rounds` interleaved steps of each, after `warmup` steps that are not counted.

    A peer that fails has that as its result; ours raises.

    Args:
        contenders: Who takes part.
        workload: What is stepped.
        layout: Who holds it; every rank calls this.
        timed_step: Takes one step and returns the milliseconds it took, the same on every rank.
        rounds: At least 1.
        warmup: Creates state, plans and compiled code.
    """
    problems: dict[str, str] = {}
    optimizers: dict[str, Optimizer] = {}
    for contender in contenders:
        if layout.kind not in contender.layouts:
            problems[contender.name] = "does not support this layout"
            continue
        problem = ""
        try:
            optimizer = contender.build(workload.parameters, layout)
            for _ in range(warmup):
                timed_step(optimizer)
        except Exception as error:
            if contender.name.startswith(OURS):
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if problem := _any_rank(problem, layout):
            problems[contender.name] = problem
        else:
            optimizers[contender.name] = optimizer
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(timed_step(optimizer))
    return [
        judged(contender, optimizers[contender.name], times[contender.name], workload)
        if contender.name in optimizers
        else Result(contender.name, problem=problems[contender.name])
        for contender in contenders
    ]


def _any_rank(problem: str, layout: Layout) -> str:
    """The problem of this rank or else of another one."""
    if layout.kind == "one":
        return problem
    problems: list[str] = [""] * layout.ranks
    dist.all_gather_object(problems, problem)
    return problem or max(problems)
