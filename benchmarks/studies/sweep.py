"""A sweep of learning rates and weight decays that gives every rule the same budget, coarse to fine.

With the first seed each rule trains at every pair of the budget's rates and decays, then at three pairs around the best
of them, and then the best pairs of all with the other seeds. What is to be done next follows from what is done alone,
so a sweep can be cut at any time and goes on; it goes round the rules, so that a cut leaves them level.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WARMUP = 0.1  # of the steps; then to a tenth along a cosine
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "overrides": {"": "adamw"}},
    "muon": {"lr": 6e-3},
    "normuon": {"lr": 6e-3, "rule": "normuon"},
    "adamuon": {"lr": 6e-3, "rule": "adamuon"},
    "muoneq": {"lr": 6e-3, "rule": "muoneq"},
    "muon_plus": {"lr": 6e-3, "rule": "muon_plus"},
    "dynmuon": {"lr": 6e-3, "rule": "dynmuon"},
    "soap": {"lr": 6e-3, "rule": "soap"},
    "soap, every 10": {"lr": 6e-3, "rule": "soap", "muon": {"lr": 6e-3, "soap_every": 10}},
    "hyperball": {"lr": 6e-3, "rule": "hyperball", "muon": {"lr": 2e-2}},
    "cautious": {"lr": 6e-3, "decay_mode": "cautious"},
    "scion head": {"lr": 6e-3, "overrides": {"lm_head.weight": "scion_sign"}},
}
"""What `from_model` is told, with the learning rate that the multiples are of. AdamW's half has that of the rule, but
Hyperball's, whose rate is a length relative to the weights'."""

Run = Mapping[str, Any]
Pair = tuple[float, float]


@dataclass(frozen=True)
class Job:
    """One training: of which size and rule, at which multiple of the rule's rate, with which decay and seed."""

    size: str
    rule: str
    multiple: float
    decay: float
    seed: int

    @property
    def pair(self) -> Pair:
        """The multiple and the decay."""
        return self.multiple, self.decay


@dataclass(frozen=True)
class Budget:
    """What every rule may try: multiples by decays with one seed, and how many of the pairs with all seeds."""

    multiples: tuple[float, ...]
    decays: tuple[float, ...]
    keep: int

    def trainings(self, seeds: int) -> int:
        """Return how many trainings a rule gets at one size."""
        return len(self.multiples) * len(self.decays) + AROUND + self.keep * (seeds - 1)


AROUND = 3
BUDGETS = {
    "try": Budget((1.0,), (0.1,), 1),
    "brief": Budget((1.0, 2.0, 0.5), (0.1,), 1),
    "short": Budget((1.0, 2.0, 0.5), (0.1, 0.5), 1),
    "full": Budget((1.0, 2.0, 0.5, 4.0, 0.25), (0.1, 0.5), 3),
}


def around(best: Pair, multiples: Sequence[float], decays: Sequence[float]) -> list[Pair]:
    """Return three pairs around the best one: two rates, and a decay beyond those tried.

    The rates lie between the best and its neighbors, or beyond the best where it is the first or last of them.
    """
    multiple, decay = best
    if len(multiples) > 1 and multiple in (min(multiples), max(multiples)):
        factors = (2**0.5, 2.0) if multiple == max(multiples) else (0.5**0.5, 0.5)
    else:
        factors = (2**0.5, 0.5**0.5)
    further = 5 * decay if len(decays) == 1 else 3 * decay if decay == max(decays) else decay / 5
    return [*((round(multiple * factor, 4), decay) for factor in factors), (multiple, round(further, 4))]


def remaining_jobs(
    runs: Sequence[Run], sizes: Sequence[str], rules: Sequence[str], budget: Budget, seeds: int
) -> list[Job]:
    """Return the trainings that are left and can begin, in their order.

    Args:
        runs: What is done, or given up: the fields of a `Job`, and "validation".
        sizes: The first is done with all rules before the next begins.
        rules: They take turns.
        budget: Of each rule at each size.
        seeds: How many; the first is 0.
    """
    finals = {Job(*(run[name] for name in Job.__dataclass_fields__)): final(run) for run in runs}
    jobs: list[Job] = []
    for size in sizes:
        stages: list[list[list[Job]]] = [[], [], []]  # of each stage each rule's
        for rule in rules:
            for stage, stage_jobs in zip(stages, _stages(finals, size, rule, budget, seeds), strict=True):
                stage.append(stage_jobs)
        for stage in stages:
            longest = max((len(pairs) for pairs in stage), default=0)
            jobs += [pairs[position] for position in range(longest) for pairs in stage if position < len(pairs)]
    return [job for job in jobs if job not in finals]


def _stages(finals: Mapping[Job, float], size: str, rule: str, budget: Budget, seeds: int) -> list[list[Job]]:
    """Return a rule's trainings stage by stage; a stage is empty while those before it are not done."""
    coarse = [Job(size, rule, multiple, decay, 0) for decay in budget.decays for multiple in budget.multiples]
    if any(job not in finals for job in coarse):
        return [coarse, [], []]
    best = min(coarse, key=finals.__getitem__)
    fine = [Job(size, rule, *pair, 0) for pair in around(best.pair, budget.multiples, budget.decays)]
    if any(job not in finals for job in fine):
        return [coarse, fine, []]
    ranked = sorted(coarse + fine, key=finals.__getitem__)[: budget.keep]
    return [coarse, fine, [Job(size, rule, *job.pair, seed) for job in ranked for seed in range(1, seeds)]]


def chosen(runs: Sequence[Run], rule: str) -> list[Run]:
    """Return the trainings of a rule at its final pair, with all seeds; all runs are of one size.

    It is the pair of the lowest mean over seeds, among those that were trained with the most seeds.
    """
    pairs: dict[Pair, list[Run]] = {}
    for run in runs:
        if run["rule"] == rule:
            pairs.setdefault((run["multiple"], run["decay"]), []).append(run)
    most = max(map(len, pairs.values()))
    full = [sorted(same_pair, key=lambda run: run["seed"]) for same_pair in pairs.values() if len(same_pair) == most]
    return min(full, key=lambda same_pair: statistics.mean(map(final, same_pair)))


def final(run: Run) -> float:
    """The last validation loss; infinite where the training diverged."""
    value = float(run["validation"][-1][1]) if run["validation"] else math.inf
    return value if math.isfinite(value) else math.inf


def steps_to(run: Run, target: float) -> float:
    """Steps to a validation loss, interpolated; infinite if it is never reached."""
    before: tuple[int, float] = (0, math.inf)
    for step, value in run["validation"]:
        if value <= target:
            if not math.isfinite(before[1]):
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - value)
        before = step, value
    return math.inf


def middle(runs: Sequence[Run]) -> dict[str, Any]:
    """The mean of trainings with several seeds; as long as the shortest, if some diverged."""
    rows = zip(*(run["validation"] for run in runs), strict=False)
    return {"validation": [(row[0][0], statistics.mean(value for _, value in row)) for row in rows]}


def rate_at(step: int, steps: int) -> float:
    """The schedule: linear warmup, then a cosine down to a tenth."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def record(job: Job, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finished training as the line of a file."""
    return {"kind": "run", **asdict(job), **result}
