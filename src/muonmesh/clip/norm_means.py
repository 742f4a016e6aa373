"""Norm means: running means of gradient norms, with which ``skip_above="4x"`` compares the same norms.

Every group has the means under `NORM_MEANS`, equal in all groups and on all ranks, so every kind of checkpoint has
them. They follow from reduced norms alone, so a rank also has the means of gradients that only other ranks hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.layout.matrix import as_tuples
from muonmesh.numerics.kernels.pinned_copies import upload
from muonmesh.settings import FRESH_MEANS, NORM_MEANS

DECAY = 0.95
"""Decay of a mean, so that it remembers about twenty norms. The first 1 / (1 − DECAY) norms count equally."""

WARM_UP = 10
"""The number of first norms that are only counted: no step is skipped by them."""

SPIKE = 2.0
"""After the warm-up, a norm counts as at most SPIKE times the mean. Else one spike would hide the next ones. Norms that
stay large, so that their steps are skipped, still raise the mean by 5 % a step, until steps are taken again."""


def means_of(groups: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
    """Return the means of the norms "total", "muon" and "adamw", and how many norms each counts: fp64 (2, 3).

    Args:
        groups: The param groups. They have the means as a tensor after a step, and as numbers after a load. A group
            that was added since then has fresh means, which do not count. If groups were loaded from stages that were
            clipped apart, none of their means is right here, and all begin anew.
        device: The device of the result; the CPU waits only if the means are elsewhere.
    """
    stored: list[Any] = [group.get(NORM_MEANS, FRESH_MEANS) for group in groups]
    if (live := next((means for means in stored if isinstance(means, Tensor)), None)) is not None:
        return live.to(device)
    loaded = {*map(as_tuples, stored)} - {FRESH_MEANS}
    return upload(loaded.pop() if len(loaded) == 1 else FRESH_MEANS, dtype=torch.float64, device=device)


def limits_from(means: Tensor, multiple: float) -> Tensor:
    """Return the largest norms of a step that is not skipped, fp64 (3,): inf during the warm-up."""
    mean, count = means
    return torch.where(count >= WARM_UP, multiple * mean, torch.inf)


def counted(means: Tensor, norms: Tensor) -> Tensor:
    """Return the means with one more norm in each; a norm of exactly zero, or that is not finite, does not count."""
    mean, count = means
    capped = torch.where(count >= WARM_UP, torch.minimum(norms, SPIKE * mean), norms)
    rate = (1 / (count + 1)).clamp(min=1 - DECAY)
    return torch.where((norms > 0) & norms.isfinite(), torch.stack([mean + rate * (capped - mean), count + 1]), means)


def keep_means(groups: Sequence[dict[str, Any]], means: object) -> None:
    """Write means to all groups."""
    for group in groups:
        group[NORM_MEANS] = means


def bring_to_host(groups: Sequence[dict[str, Any]]) -> None:
    """Make the means of the groups plain numbers, as checkpoints keep them. The CPU waits for the device."""
    if any(isinstance(group.get(NORM_MEANS), Tensor) for group in groups):
        keep_means(groups, as_tuples(means_of(groups, torch.device("cpu")).tolist()))
