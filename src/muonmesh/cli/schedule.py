"""Schedule: the learning rate of a step as a share of its peak. A function of the step alone, so it has no state."""

from __future__ import annotations

import math

from muonmesh.cli.settings import ScheduleName

WSD_DECAY_SHARE = 0.2  # warmup-stable-decay (arXiv 2404.06395): the last fifth goes down to zero


def learning_rate_factor(step: int, *, name: ScheduleName, steps: int, warmup: int) -> float:
    """Share of the peak learning rate at ``step`` (1-based) of ``steps``, after ``warmup`` linear steps.

    ``cosine`` and ``linear`` fall to zero at the end, ``wsd`` is constant until its last fifth, ``constant`` stays.
    The last step still moves: zero is what the step after it would get.
    """
    if step <= warmup:
        return step / warmup
    done = (step - 1 - warmup) / (steps - warmup)  # 0 at the first step after warmup, below 1 at the last
    match name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "linear":
            return 1.0 - done
        case "wsd":
            return min(1.0, (1.0 - done) / WSD_DECAY_SHARE)
        case "constant":
            return 1.0
