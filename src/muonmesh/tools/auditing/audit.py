"""Audit: watches one step of an optimizer on a model, and reports for each weight what the step does to it."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from muonmesh.comm.gather_objects import gather_objects, settled
from muonmesh.comm.placing import storage_of
from muonmesh.comm.ranks import device_without_parameters
from muonmesh.comm.storage import Storage, local_of, world_size
from muonmesh.errors import LayoutError, escaped, explain_error
from muonmesh.groups import split_params
from muonmesh.layout import Layout
from muonmesh.names import canonical_name, names_matching, patterns, starred
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.table import aligned
from muonmesh.tools.auditing.judge import AS_STORED, Judgement, Verdict, judge
from muonmesh.tools.auditing.probe import gathered, give_gradient, probing_gradient, restored, step_all


@dataclass(frozen=True)
class AuditRow:
    """What one step does to one weight.

    Attributes:
        weight: Canonical name.
        shape: Shape of the whole weight.
        layout: How the weight is sharded; empty if every rank holds all of it.
        verdict: What happens to the weight, see `muonmesh.audit`.
        matrices: How many matrices are orthogonalized; 0 if none.
        like: Cosine similarity between the step and the step that ``verdict`` describes; 1 is exact.
        size: The size of the step divided by the size that the optimizer's scale mode asks for; NaN if the step
            is no multiple of orthogonalized matrices.
        rms: Root mean square of the step at a learning rate of 1.
        gradient: Norm of the gradient that the weight had before the audit; 0 if it had none, NaN if no weight had a
            gradient.
        strength: The size of the step for a gradient of this norm, divided by the size for a gradient of norm 1.
        mend: What is wrong, and the line to write; empty if nothing is wrong.
    """

    weight: str
    shape: tuple[int, ...]
    layout: str
    verdict: Verdict
    matrices: int
    like: float
    size: float
    rms: float
    gradient: float
    strength: float
    mend: str


@dataclass(frozen=True)
class Audit:
    """The report of `muonmesh.audit`; ``print`` shows a table.

    Attributes:
        optimizer: The class of the audited optimizer.
        ranks: The number of ranks that took part.
        scale: The scale mode that fits the sizes of the steps best.
        fit: The median of the steps' sizes, divided by the sizes that ``scale`` asks for.
        raised: The error that the step raised; empty if it raised none.
        rows: One `AuditRow` per trainable weight.
        guesses: Names of weights that the audit judges by a guess of `muonmesh.split_params`.
    """

    optimizer: str
    ranks: int
    scale: str
    fit: float
    raised: str
    rows: tuple[AuditRow, ...]
    guesses: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the step raised no error and no weight needs a change, provided that the guesses are right."""
        return not self.raised and not any(row.mend for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for `json.dumps`; NaN and infinity become None."""
        plain = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {**plain, "ok": self.ok}

    def __str__(self) -> str:
        """Return a table with whole names, and a line for each fault. Equal layers share one row."""
        mends = Counter(row.mend for row in self.rows if row.mend)
        of = {row.weight: row for row in self.rows}
        cells = {name: (row.shape, row.verdict, row.matrices, row.mend) for name, row in of.items()}
        table: list[tuple[str, ...]] = [("weight", "shape", "what happens to it", "like", "size")]
        for name, (shape, verdict, matrices, mend) in patterns(cells, cells).items():
            rows = [of[weight] for weight in names_matching(name, cells)]
            note = f" [{[*mends].index(mend) + 1}]" if mend else ""
            count = f"{len(rows)}x " if len(rows) > 1 else ""
            many = f", {matrices} matrices" if matrices > 1 else ""
            figures = min(row.like for row in rows), statistics.median(row.size for row in rows)
            shown = (f"{figure:.2f}".replace("nan", "") for figure in figures)
            table.append((name, count + "x".join(map(str, shape)), verdict + many + note, *shown))
        lines = [escaped(f"{self.optimizer}, {self.ranks} rank{'' if self.ranks == 1 else 's'}")]
        lines += [textwrap.fill(escaped(f"step raises {self.raised}"), 80)] if self.raised else []
        lines += aligned(table, right=(1, 3, 4), ruled=True)
        if self.scale:
            lines.append(f"size 1.00 is scale {self.scale!r} times {self.fit:{'.2f' if _usual(self.fit) else '.2g'}}")
        elif any(row.verdict == "orthogonalized" for row in self.rows):
            lines.append("The sizes of the steps fit no scale mode that muonmesh knows.")
        if not _usual(self.fit):
            line = "If you set no such factor, something scales the update after orthogonalization."
            lines.append(textwrap.fill(line, 80))
        if self.rows and math.isnan(self.rows[0].gradient):
            lines.append("No gradients were there. To see whether they arrive, call backward first.")
        for number, (mend, times) in enumerate(mends.items(), 1):
            line = f"[{number}] {times} of {len(self.rows)} weights: {mend}."
            lines.append(textwrap.fill(line, 80, subsequent_indent="    ", break_on_hyphens=False))
        if self.guesses:
            names = [*dict.fromkeys(map(starred, self.guesses))]
            line = f"Judged by a guess: {escaped(', '.join(names[:3]))}{' and others' * (len(names) > 3)}. Write "
            line += "muonmesh.audit(optimizer, model, groups=muonmesh.split_params(model, example=(inputs,))) after "
            line += "backward, and a forward shows what they are."
            lines.append(textwrap.fill(line, 80, break_on_hyphens=False))
        if unknown := sum(row.verdict == "unknown" for row in self.rows):
            lines.append(f"The audit does not know the steps of {unknown} of {len(self.rows)} weights.")
        lines += [f"Nothing to mend{' if the guesses are right' * bool(self.guesses)}."] if self.ok else []
        return "\n".join(lines)


@plain_modes()
def audit(
    optimizer: Any,
    model: nn.Module,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    layouts: Mapping[str, Any] | None = None,
) -> Audit:
    """Watch one step of any optimizer on a model, and report for each weight what the step does to it.

    The optimizer takes one step on gradients of known structure, without state and at a learning rate of 1. The whole
    update is gathered and compared with the update of each verdict below. Class names do not matter. Afterwards
    weights, gradients, optimizer state, groups and random numbers are as before, bit for bit. Call this function on
    every rank.

    If the weights have gradients, a second step uses gradients of the same norms. It shows whether the optimizer reads
    the gradients, and whether they are too small for a full step, for example after clipping.

    The verdicts:
        "orthogonalized": each whole matrix is orthogonalized alone, as it should be.
        "as one matrix": fused matrices (q, k and v), or a stack of experts, are orthogonalized as one matrix.
        "in blocks": each piece of a matrix is orthogonalized alone.
        "each shard alone": each rank orthogonalizes only the shard that it stores.
        "elementwise": the step is the sign of the gradient, as in the first step of AdamW.
        "follows the gradient": the step is proportional to the gradient and not orthogonalized.
        "twice": the step is a sum of an orthogonalized and an elementwise step, or two optimizers hold the weight.
        "only decays", "does not move", "not in the optimizer", "replicas differ", "not finite", "raises": as named.
        "unreadable": ranks hold different shapes under one name, or no rank holds a part of the weight; ``layouts`` may
            help.
        "unknown": none of these.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or a sequence of the optimizers that train the model together.
        model: The model, wrapped and sharded as it is trained.
        groups: How the weights should be treated, as param groups of muonmesh. Default: what you told a `Muon` or a
            forward showed it; otherwise ``split_params(model)``.
        layouts: Where plain local shards live, as for `Muon`.

    Raises:
        ValueError: weights lie on the meta device (LayoutError), or no weight is trained.
        LayoutError: another rank found one of these errors.
    """
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    watch = settled(lambda: _Watch(optimizers, model, groups, layouts or {}), kind=LayoutError)
    return watch.report()


@dataclass(frozen=True)
class _WeightFacts:
    """What the ranks exchange about a weight: shape (None if ranks have different shapes), layout, the number of
    optimizers that hold it (``holders``), whether Muon should step it, and its matrices (``spec``).
    """

    shape: tuple[int, ...] | None
    layout: Layout | None
    holders: int
    muon: bool
    spec: Any


class _Watch:
    """The weights of this rank, how each should be treated, and a method that steps and reports.

    Creating it finds the weights, and what the optimizers and the groups say about each; no communication.

    Raises:
        ValueError: weights lie on the meta device, or no weight is trained.
    """

    def __init__(
        self, optimizers: list[Any], model: nn.Module, groups: Sequence[Mapping[str, Any]] | None, layouts: Any
    ) -> None:
        own_groups = [] if groups is not None else [group for owner in optimizers for group in _groups_of(owner)]
        groups = split_params(model) if groups is None else groups
        self.optimizers = optimizers
        self.weights: dict[str, Tensor] = {}
        self.storages: dict[str, Storage] = {}
        self.facts: dict[str, _WeightFacts] = {}
        for full_name, parameter in model.named_parameters():
            name = canonical_name(full_name)
            if parameter.is_meta:
                write = "Write model.to_empty(device=...) and load weights first"
                raise LayoutError(explain_error(name, "a weight on the meta device", "one with numbers", write))
            if parameter.requires_grad:
                self.weights[name] = parameter
                self.storages[name] = storage_of(name, parameter, None, layouts.get(name))
        if not self.weights:
            raise ValueError(explain_error("audit", "no weight that is trained", "at least one"))
        self.guesses = tuple(getattr(groups, "guesses", ()))
        right: dict[str, tuple[bool, Any]] = {}  # whether Muon steps it, and its matrices
        for group in groups:
            muon = group["algorithm"] != "adamw"
            specs = group["matrices"] if muon and "matrices" in group else [None] * len(group["params"])
            right |= {name: (muon, spec) for name, spec in zip(group["param_names"], specs, strict=True)}
        for group in own_groups:  # by the user or by a forward, which is no guess
            specs = group.get("matrices", [None] * len(group["params"]))
            for name, parameter, reason, spec in zip(*(group[key] for key in _OF_EACH), specs, strict=True):
                if self.weights.get(name) is parameter and not reason.endswith("; a guess"):
                    right[name] = is_matrix_rule(group["algorithm"]), spec
                    self.guesses = tuple(guess for guess in self.guesses if guess != name)
        id_sets = [{id(p) for group in owner.param_groups for p in group["params"]} for owner in self.optimizers]
        for name, storage in self.storages.items():
            holders = sum(id(self.weights[name]) in ids for ids in id_sets)
            self.facts[name] = _WeightFacts(storage.shape, storage.layout, holders, *right.get(name, (False, None)))

    def report(self) -> Audit:
        """Step, and return the report. All ranks call it."""
        facts: dict[str, _WeightFacts] = {}
        for facts_of_rank in gather_objects(self.facts):
            for name, weight in facts_of_rank.items():
                same = name not in facts or facts[name].shape == weight.shape
                facts[name] = facts.get(name, weight) if same else replace(weight, shape=None)
        norms = self._norms()
        raised, steps = self._step(dict.fromkeys(self.weights, 1.0))
        strengths: dict[str, float] = {}
        if not raised and norms:
            raised, weaker = self._step(norms)
            dots = _summed({name: float((weaker[name] * step).sum()) for name, step in steps.items()})
            squares = _summed({name: float(step.square().sum()) for name, step in steps.items()})
            strengths = {name: dots[name] / square for name, square in squares.items() if square}
        judgements = {
            name: Judgement("raises") if raised else self._judged(name, weight, steps.get(name))
            for name, weight in facts.items()
        }
        scale, fit = best_scale(list(judgements.values()))
        rows = []
        for name, weight in facts.items():
            judgement, shape = judgements[name], weight.shape or ()
            size = judgement.sizes.get(scale.removesuffix(AS_STORED), math.nan) / fit
            gradient, strength = norms.get(name, 0.0) if norms else math.nan, strengths.get(name, math.nan)
            mend = mend_of(judgement.verdict, weight.muon, gradient, strength, size)
            layout = "" if weight.layout is None or world_size() == 1 else weight.layout.describe()
            numbers = judgement.matrices, judgement.like, size, judgement.rms, gradient, strength
            rows.append(AuditRow(name, shape, layout, judgement.verdict, *numbers, mend))
        names = " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, self.optimizers))
        return Audit(names, world_size(), scale, fit, raised, tuple(rows), self.guesses)

    def _norms(self) -> dict[str, float]:
        """Return the norms of the existing gradients, over whole weights; empty if no rank has a gradient."""
        squares = {}
        for name, parameter in self.weights.items():
            if (gradient := parameter.grad) is not None:
                local = local_of(gradient).detach()
                dense = local.coalesce().values() if local.is_sparse else local
                copies = world_size() if self.storages[name].layout is None else self.storages[name].copies
                squares[name] = float(dense.double().square().sum()) / copies
        return {name: math.sqrt(square) for name, square in _summed(squares).items()}

    def _step(self, norms: Mapping[str, float]) -> tuple[str, dict[str, Tensor]]:
        """Step on probing gradients of these norms; return the raised error ("" if none), and the local updates."""
        with restored(self.optimizers, self.weights) as before:
            for name, parameter in self.weights.items():
                if name in norms:
                    storage = self.storages[name]
                    probe = probing_gradient(name, storage.shape, parameter.device) * norms[name]
                    give_gradient(parameter, storage, probe)
                else:
                    parameter.grad = None
            raised = step_all(self.optimizers)
            after = {name: local_of(weight).detach().float() for name, weight in self.weights.items()}
            return raised, {name: stepped - before[name].float() for name, stepped in after.items()}

    def _judged(self, name: str, facts: _WeightFacts, step: Tensor | None) -> Judgement:
        """Return what the step did to one weight. All ranks call it, also ranks without this weight."""
        if facts.shape is None:
            return Judgement("unreadable")
        parameter, storage, shape = self.weights.get(name), self.storages.get(name), facts.shape
        device = device_without_parameters() if parameter is None else parameter.device
        most, least = gathered(step, storage, shape, device)
        weight, _ = gathered(None if parameter is None else local_of(parameter).detach(), storage, shape, device)
        if bool((weight == -torch.inf).any()):
            return Judgement("unreadable")
        if bool(most.isfinite().all()) and not torch.equal(most, least):
            return Judgement("replicas differ", rms=float((most - least).square().mean().sqrt()))
        result = judge(most, probing_gradient(name, shape, device), weight, facts.layout, facts.spec)
        if facts.holders == 0 and result.verdict == "does not move":
            return replace(result, verdict="not in the optimizer")
        return replace(result, verdict="twice") if facts.holders > 1 and result.verdict != "does not move" else result


_OF_EACH = ("param_names", "params", "reasons")


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups of a `Muon` that `muonmesh.split_params` has made; none of other optimizers.

    Groups whose lists of parameters were changed since then no longer say what is which.
    """
    made = [group for group in optimizer.param_groups if group.keys() >= {"algorithm", *_OF_EACH}]
    keys = (*_OF_EACH, "matrices")
    return [group for group in made if len({len(group[key]) for key in keys if key in group}) == 1]


def _summed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of numbers over all ranks, by name. All ranks call it."""
    everyone = gather_objects(numbers)
    return {name: sum(of_rank.get(name, 0.0) for of_rank in everyone) for of_rank in everyone for name in of_rank}


def best_scale(judgements: Sequence[Judgement]) -> tuple[str, float]:
    """Return the scale mode that fits the steps best, and the median of the steps' sizes divided by its sizes.

    Return "" and 1.0 if no mode fits.
    """
    sizes = [entry.sizes for entry in judgements if entry.sizes]
    if not sizes:
        return "", 1.0

    def misfit(mode: str) -> float:
        """Return how unequal the ratios are, plus, with less weight, how far they are from 1."""
        logs = [math.log(max(entry[mode], 1e-30)) for entry in sizes]
        middle = statistics.median(logs)
        return statistics.fmean(abs(entry - middle) for entry in logs) + 0.3 * abs(middle)

    best = min(sizes[0], key=misfit)
    fit = statistics.median(entry[best] for entry in sizes)
    alike = fit > 0 and all(0.6 < entry[best] / fit < 1.6 for entry in sizes)
    return (best, fit) if alike or _usual(fit) else ("", 1.0)


def _usual(fit: float) -> bool:
    return 0.7 < fit < 1.4  # five Newton-Schulz steps leave singular values of 0.7 to 1.2


FROM_MODEL = "Write optimizer = muonmesh.from_model(model, **muonmesh.convert_settings(...))"


def mend_of(verdict: Verdict, muon: bool, gradient: float, strength: float, size: float) -> str:
    """Return what is wrong with a weight, and the line to write; "" if nothing is wrong."""
    if gradient == 0.0:
        return "no gradient arrives. Use the weight in the loss, or write weight.requires_grad_(False)"
    wrong = {
        "as one matrix": f"fused matrices are orthogonalized as one. {FROM_MODEL}: it splits them",
        "in blocks": f"a matrix is orthogonalized in blocks. {FROM_MODEL}",
        "each shard alone": f"each rank orthogonalizes its shard. {FROM_MODEL} after sharding: it gathers",
        "twice": "two rules step it. Give the weight to one optimizer, or write group['params'] without it",
        "only decays": "it only decays: its gradient is not used. Look for the parameter that the optimizer holds",
        "does not move": "the step leaves it. Make the optimizer after the model is sharded and wrapped",
        "not in the optimizer": "no optimizer holds it. Make the optimizer after the model is sharded and wrapped",
        "replicas differ": "ranks end with different weights. Write process_group='world' in muonmesh.from_model",
        "not finite": "the step is not finite at a gradient of norm 1. Do not train with it",
        "unreadable": "ranks hold different shapes of it. Write muonmesh.audit(..., layouts={name: (mesh, [...])})",
        "raises": f"the step raises. {FROM_MODEL}",
    }
    if muon:
        wrong |= {
            "elementwise": f"a matrix that AdamW, or a rule like it, steps. {FROM_MODEL}",
            "follows the gradient": f"a matrix that is not orthogonalized. {FROM_MODEL}",
        }
    elif verdict in ("in blocks", "each shard alone", "as one matrix", "orthogonalized"):
        return "an embedding or another weight that AdamW should have. Write muonmesh.split_params(model)"
    if verdict in wrong:
        return wrong[verdict]
    if strength < 0.5 and verdict in ("orthogonalized", "elementwise"):
        return (
            "crushed: with a gradient of this norm, the step has less than half of its size. Clip less if you clip, or "
            "choose a smaller epsilon"
        )
    if not 0.6 < size < 1.6 and not math.isnan(size):
        return (
            "its step has another size than the scale says. If it is stored in x out or is a convolution, the scale "
            f"was computed from other rows and columns. {FROM_MODEL}, or check its group's settings"
        )
    return ""
