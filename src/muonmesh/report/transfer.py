"""Transfer: what carries over from a small model to a wider one by the spectral condition, and what to set there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.layout.matrix import split_matrices
from muonmesh.numerics.rules import is_matrix_rule, rule_of
from muonmesh.step.connection import placed_members

_HEAD = ("parameter", "by", "shape", "step RMS", "spectral", "decay a step", "initial RMS", "set for the large model")
_END = """\
With the settings of the last column, one step changes what a layer computes as much as in the small model.
Not carried over: depth, batch size, number of steps, and the size of an attention head, which should stay."""


@dataclass(frozen=True)
class Size:
    """What the settings of an optimizer mean for one parameter.

    Attributes:
        shape: Of the whole parameter.
        algorithm: "muon", "adamw", or the rule of its group.
        rms: Root mean square of one step; of AdamW at most.
        spectral: Spectral norm of one step, the largest of its matrices; nan for AdamW, and where a rule does not know.
        lr: Learning rate, as it was before a scheduler changed it.
        decay: By which fraction one step shrinks the weights: lr × weight_decay.
        initial: Root mean square of the weights as they are; nan on the meta device, and of flat shards.
        relative: The step over the size that the spectral condition asks for, up to a constant.
        condition: The standard deviation of initial weights that it asks for, up to a constant.
    """

    shape: tuple[int, ...]
    algorithm: str
    rms: float
    spectral: float
    lr: float
    decay: float
    initial: float
    relative: float
    condition: float


@dataclass(frozen=True)
class TransferRow:
    """Parameters of the large model that are alike.

    Attributes:
        parameter: Their canonical name, with "*" for the numbers of layers.
        names: Their names.
        small: What the settings mean for their counterpart in the small model.
        large: What the settings mean for the first of them, as they are.
        lr: The learning rate that carries over.
        weight_decay: The weight decay with which a step shrinks the weights as in the small model.
        init: The standard deviation of initial weights over that in the small model.
        note: What else to know.
    """

    parameter: str
    names: tuple[str, ...]
    small: Size
    large: Size
    lr: float
    weight_decay: float
    init: float
    note: str = ""

    @property
    def settings(self) -> dict[str, float]:
        """What has to be set anew for them; empty if the settings carry over."""
        found = {"lr": (self.lr, self.large.lr), "weight_decay": (self.weight_decay, self.large.decay / self.large.lr)}
        return {key: new for key, (new, old) in found.items() if not math.isclose(new, old, rel_tol=1e-6)}


@dataclass(frozen=True)
class Transfer:
    """What carries over from a small model to a large one; ``str()`` is a table.

    Attributes:
        rows: One for all parameters of the large model that are alike.
        new: Names of its parameters that have no counterpart in the small model.
    """

    rows: tuple[TransferRow, ...]
    new: tuple[str, ...] = ()

    @property
    def overrides(self) -> dict[str, dict[str, float]]:
        """What to set for the large model: ``overrides`` of `from_model`, by name."""
        return {name: row.settings for row in self.rows for name in row.names if row.settings}

    def __str__(self) -> str:
        """Return a table, and what it does not say."""
        lines = [_HEAD] + [_cells(row) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        table.insert(1, "  ".join("─" * width for width in widths))
        table += [f"not in the small model, so nothing is known: {', '.join(self.new)}"] if self.new else []
        return "\n".join([*table, _END])


def transfer(small: torch.optim.Optimizer, large: torch.optim.Optimizer) -> Transfer:
    """Compare one step on a small model with one on a wider model, and return what to set for the wider one.

    By the spectral condition (arXiv 2310.17813) a step changes what a layer computes as much at every width if its
    spectral norm grows as √(rows/cols). So learning rates are multiplied by what the step lacks of that. AdamW's step
    of a matrix has a spectral norm of up to lr·√(rows·cols), hence its rate falls as 1/cols; a table of embeddings or a
    vector keeps its rate, as in μP (arXiv 2203.03466). ``lr × weight_decay`` stays. Initial weights should have a
    standard deviation ∝ min(1, √(rows/cols))/√cols.

    Args:
        small: The `Muon` of the small model, whose settings are known to be good.
        large: A `Muon` of the large model, with any settings. Both models may be on the meta device. Parameters are
            matched by name; layers beyond those of the small model by their kind.

    Raises:
        ValueError: a learning rate is 0, so that it can't be multiplied.
        LayoutError, TypeError: no step could be taken with the groups as they are.
    """
    known: dict[str, Size] = {}
    for name, (size, _) in _sizes(small).items():
        known[name] = size
        known.setdefault(_kind(name), size)
    rows: dict[object, TransferRow] = {}
    new = []
    for name, (size, shared) in _sizes(large).items():
        before = known.get(name) or known.get(_kind(name))
        if before is None or len(before.shape) != len(size.shape):
            new.append(name)
            continue
        lr = size.lr if math.isnan(size.relative) else size.lr * before.relative / size.relative
        key = _kind(name), before.shape, size.shape, lr, before.decay, size.lr, size.decay
        first = rows.get(key)
        names = (name,) if first is None else (*first.names, name)
        note = "the size of its step is not known" if math.isnan(size.relative) else ""
        if shared and before.shape[-1] != size.shape[-1]:
            note = f"also the output layer: multiply the logits by {before.shape[-1] / size.shape[-1]:.4g}"
        both = (before, size) if first is None else (first.small, first.large)
        rows[key] = TransferRow(
            _kind(name), names, *both, lr, before.decay / lr, size.condition / before.condition, note
        )
    return Transfer(tuple(rows.values()), tuple(new))


def _sizes(optimizer: torch.optim.Optimizer) -> dict[str, tuple[Size, bool]]:
    """Return for each parameter its size, and whether a layer that is not its first holds it too."""
    found = {}
    for member in placed_members(optimizer):
        group = optimizer.param_groups[member.group]
        lr = float(group.get("initial_lr", group["lr"]))
        if lr == 0:
            raise ValueError(explain_error(member.name, "a learning rate of 0", "another", "Write lr=3e-4"))
        layout = member.storage.layout
        shape = tuple(member.tensor.shape) if layout is None else tuple(layout.shape)
        rms, spectral, steps, conditions = lr, math.nan, [lr], [1.0]
        if is_matrix_rule(group["algorithm"]):
            rule, matrices = rule_of({**group, "lr": lr}), split_matrices(member.name, shape, member.spec)
            sizes = [rule.step_size(matrix.rows, matrix.cols) for matrix in matrices]
            rms, spectral = (max(of) for of in zip(*sizes, strict=True))
            pairs = zip(sizes, matrices, strict=True)
            steps = [size.spectral / math.sqrt(matrix.rows / matrix.cols) for size, matrix in pairs]
            conditions = [_condition(matrix.rows, matrix.cols) for matrix in matrices]
        elif group["name"].startswith(("adamw.head", "adamw.matrices")) and len(shape) > 1:
            steps = [lr * math.prod(shape[1:])]
            conditions = [_condition(shape[0], math.prod(shape[1:]))]
        reason = dict(zip(group["param_names"], group.get("reasons", ()), strict=False)).get(member.name, "")
        size = Size(
            shape, group["algorithm"], rms, spectral, lr, lr * group["weight_decay"], _rms(member.tensor, shape),
            _mean(steps), _mean(conditions),
        )  # fmt: skip
        found[member.name] = size, "; shared with" in reason
    return found


def _condition(rows: int, cols: int) -> float:
    return min(1.0, math.sqrt(rows / cols)) / math.sqrt(cols)


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _rms(tensor: Tensor, shape: tuple[int, ...]) -> float:
    if tensor.is_meta or tuple(tensor.shape) != shape:
        return math.nan
    norm: Any = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
    return float(getattr(norm, "full_tensor", lambda: norm)()) / math.sqrt(max(1, math.prod(shape)))


def _kind(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _cells(row: TransferRow) -> tuple[str, ...]:
    count = f" ({len(row.names)})" if len(row.names) > 1 else ""
    shapes = ["×".join(map(str, size.shape)) for size in (row.small, row.large)]
    init = "" if math.isclose(row.init, 1) else f"× {row.init:.3g}"
    told = [f"{key}={value:.4g}" for key, value in row.settings.items()] or ["carries over"]
    return (
        row.parameter + count,
        row.large.algorithm,
        " → ".join(dict.fromkeys(shapes)),
        *(_both(getattr(row.small, name), getattr(row.large, name)) for name in ("rms", "spectral", "decay")),
        " ".join(filter(None, (_both(row.small.initial, row.large.initial), init))),
        ", ".join([*told, *([row.note] if row.note else [])]),
    )


def _both(small: float, large: float) -> str:
    """Return two figures, or one where they are equal, and nothing of what is not known."""
    return " → ".join(dict.fromkeys(f"{value:.2g}" for value in (small, large) if not math.isnan(value)))
