"""Whether an update is what a Muon must make: the whole matrix orthogonalized, not a piece of it.

Speed figures for Muon have been published and withdrawn because the matrices had not been orthogonalized at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmarks.contenders import LEARNING_RATE, WEIGHT_DECAY, Contender
from benchmarks.report import Result
from benchmarks.workload import Workload, full
from torch.optim import Optimizer

WIDEST = 3.0  # of the 95 % over the 5 % quantile; 1.7 for Jordan's coefficients, over 13 for two halves of a square


def judged(contender: Contender, optimizer: Optimizer, milliseconds: Sequence[float], workload: Workload) -> Result:
    """The figures of a contender, or why it gets none; all ranks call it."""
    if not contender.is_muon:
        return Result(contender.name, milliseconds)
    low, high = singular_values(optimizer, workload)
    if not 0.0 < high <= WIDEST * low:
        return Result(contender.name, (), (low, high), "the update is not orthogonal")
    return Result(contender.name, milliseconds, (low, high))


def singular_values(optimizer: Optimizer, workload: Workload) -> tuple[float, float]:
    """The 5 % and 95 % quantile of one update's singular values over their mean, of the matrix where they are
    furthest apart.
    """
    before = [full(parameter) for parameter in workload.parameters]
    workload.refresh_gradients()
    optimizer.step()
    spreads = []
    for old, parameter in zip(before, workload.parameters, strict=True):
        update = (old * (1 - LEARNING_RATE * WEIGHT_DECAY) - full(parameter)).double()
        wide = update if update.shape[0] <= update.shape[1] else update.T
        values = torch.linalg.eigvalsh(wide @ wide.T).clamp(min=0).sqrt().cpu()
        low, high = torch.quantile(values, torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
        mean = values.mean().item() or 1.0
        spreads.append((low / mean, high / mean))
    return max(spreads, key=lambda spread: spread[1] / max(spread[0], 1e-9))
