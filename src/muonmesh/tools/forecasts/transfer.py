"""Transfer: what carries over from a small model to a wider one by the spectral condition, and what to set there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from muonmesh.errors import escaped, explain_error
from muonmesh.layout.matrix import split_matrices
from muonmesh.names import starred
from muonmesh.numerics.rules import is_matrix_rule, rule_of
from muonmesh.numerics.scale import StepSize
from muonmesh.step.connection import placed_members
from muonmesh.table import aligned

_HEAD = (
    "parameter",
    "rule",
    "shape",
    "step RMS",
    "spectral",
    "decay per step",
    "initial RMS",
    "set for the large model",
)
_END = """\
With the settings of the last column, one step changes what a layer computes as much as in the small model.
This does not cover depth, batch size and number of steps. Keep the size of an attention head."""


@dataclass(frozen=True)
class Size:
    """The size of one step on one parameter, and the settings that give it.

    Attributes:
        shape: Shape of the whole parameter.
        algorithm: "muon", "adamw", or the rule of its group.
        rms: Root mean square of one step; for AdamW an upper bound.
        spectral: Spectral norm of one step, the largest over its matrices; for AdamW an upper bound, where a vector or
            an embedding counts by its elements; NaN if the rule does not know it.
        lr: Learning rate before a scheduler changed it.
        weight_decay: Weight decay.
        decay: The fraction by which one step shrinks the weights: lr × weight_decay.
        initial: Root mean square of the current weights; NaN on the meta device and for flat shards.
        relative: The step at learning rate 1, divided by the size that the spectral condition asks for, up to a
            constant.
        condition: The standard deviation of initial weights that the spectral condition asks for, up to a constant.
        shared: Whether several layers share the parameter, as with tied embeddings.
    """

    shape: tuple[int, ...]
    algorithm: str
    rms: float
    spectral: float
    lr: float
    weight_decay: float
    decay: float
    initial: float
    relative: float
    condition: float
    shared: bool


@dataclass(frozen=True)
class TransferRow:
    """One kind of parameter of the large model, with the settings that carry over from the small model.

    Attributes:
        parameter: The canonical name of these parameters, with "*" for the numbers of layers.
        names: The names of all these parameters.
        small: The `Size` of a step on their counterpart in the small model, with the settings there.
        large: The `Size` of a step on the first of these parameters, with the current settings.
        lr: The learning rate that carries over.
        weight_decay: The weight decay with which a step shrinks the weights as in the small model.
        init: The standard deviation of initial weights, divided by the standard deviation in the small model.
        note: A remark; empty if there is none.
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
        """The settings to change for these parameters; empty if the current settings carry over."""
        found = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {key: new for key, new in found.items() if not math.isclose(new, getattr(self.large, key), rel_tol=1e-6)}


@dataclass(frozen=True)
class Transfer:
    """What carries over from a small model to a large one; ``str()`` is a table.

    Attributes:
        rows: One `TransferRow` for each kind of parameter of the large model.
        new: Names of the large model's parameters that have no counterpart in the small model.
    """

    rows: tuple[TransferRow, ...]
    new: tuple[str, ...] = ()

    @property
    def overrides(self) -> dict[str, dict[str, float]]:
        """The settings for the large model by parameter name, for ``overrides`` of `from_model`."""
        return {name: row.settings for row in self.rows for name in row.names if row.settings}

    def __str__(self) -> str:
        """Return a table, and notes on what it leaves out."""
        new = [escaped(f"not in the small model, so nothing is known: {', '.join(self.new)}")] if self.new else []
        return "\n".join([*aligned([_HEAD, *map(_cells, self.rows)], ruled=True), *new, _END])


def transfer(small: torch.optim.Optimizer, large: torch.optim.Optimizer) -> Transfer:
    """Compare one step on a small model with one on a wider model, and return what to set for the wider one.

    By the spectral condition (arXiv 2310.17813), a step changes the output of a layer by the same amount at every width
    if its spectral norm grows as √(rows/cols). `transfer` chooses each learning rate so that its step grows like this.
    AdamW's step of a matrix has a spectral norm of up to lr·√(rows·cols), so its rate falls as 1/cols. An embedding or
    a vector keeps its rate, as in μP (arXiv 2203.03466). The product ``lr × weight_decay`` stays the same. Initial
    weights should have a standard deviation ∝ min(1, √(rows/cols))/√cols.

    Args:
        small: The `Muon` of the small model, whose settings are known to be good.
        large: A `Muon` of the large model, with any settings. Both models may be on the meta device. Parameters are
            matched by name, and layers that only the large model has by their kind.

    Raises:
        TypeError: an argument is no `Muon`.
        LayoutError, ValueError: a step with the current groups is not possible, or the models share no parameter.
    """
    known = _sizes("small", small)
    known |= {starred(name): size for name, size in known.items()}
    rows: dict[object, TransferRow] = {}
    new = []
    for name, size in _sizes("large", large).items():
        before = known.get(name) or known.get(starred(name))
        if before is None or len(before.shape) != len(size.shape):
            new.append(name)
            continue
        factor, note = size.relative / before.relative, ""
        if math.isnan(factor):
            factor, note = 1.0, "the size of its step is not known"
        if size.shared and before.shape[-1] != size.shape[-1]:
            note = f"also the output layer: multiply the logits by {before.shape[-1] / size.shape[-1]:.4g}"
        lr, decay, init = before.lr / factor, before.weight_decay * factor, size.condition / before.condition
        row = TransferRow(starred(name), (name,), before, size, lr, decay, init, note)
        key = row.parameter, before.shape, size.shape, lr, decay, size.lr, size.weight_decay
        rows[key] = replace(rows[key], names=(*rows[key].names, name)) if key in rows else row
    if not rows:
        found = f"no parameter of the large model, such as {new[0]}, in the small model"
        needed, write = "models whose parameters have the same names", "Build both with the same classes"
        raise ValueError(explain_error("transfer", found, needed, write))
    return Transfer(tuple(rows.values()), tuple(new))


def _sizes(where: str, optimizer: torch.optim.Optimizer) -> dict[str, Size]:
    if not hasattr(optimizer, "_runtime"):
        write = "Write transfer(from_model(small, lr=...), from_model(large, lr=...))"
        raise TypeError(explain_error(where, f"a {type(optimizer).__name__}", "a muonmesh.Muon", write))
    found, groups, members = {}, optimizer.param_groups, placed_members(optimizer)
    reasons = {of: why for g in groups for of, why in zip(g["param_names"], g.get("reasons", ()), strict=False)}
    for member in members:
        name, group, layout = member.name, groups[member.group], member.storage.layout
        lr = float(group.get("initial_lr", group["lr"]))
        shape = tuple(member.tensor.shape if layout is None else layout.shape)
        pairs, sizes = [(1, 1)], [StepSize(1.0, 1.0)]  # at rate 1: of a vector, and a table whose rows are looked up
        if is_matrix_rule(group["algorithm"]):
            pairs = [(matrix.rows, matrix.cols) for matrix in split_matrices(name, shape, member.spec)]
            sizes = [rule_of({**group, "lr": 1.0}).step_size(*pair) for pair in pairs]
        elif group["name"].startswith(("adamw.head", "adamw.matrices")) and len(shape) > 1:
            pairs = [(shape[0], math.prod(shape[1:]))]
            sizes = [StepSize(1.0, math.sqrt(math.prod(shape)))]
        asked = [math.sqrt(rows / cols) for rows, cols in pairs]
        relative = geometric_mean(size.spectral / by for size, by in zip(sizes, asked, strict=True))
        condition = geometric_mean(min(1.0, by) / math.sqrt(cols) for by, (_, cols) in zip(asked, pairs, strict=True))
        rms, spectral = (lr * max(of) for of in zip(*sizes, strict=True))
        found[name] = Size(
            shape, group["algorithm"], rms, spectral, lr, group["weight_decay"], lr * group["weight_decay"],
            _rms(member.tensor, shape), relative, condition, "; shared with" in reasons.get(name, ""),
        )  # fmt: skip
    return found


def _rms(tensor: Tensor, shape: tuple[int, ...]) -> float:
    if tensor.is_meta or tuple(tensor.shape) != shape:
        return math.nan
    norm: Any = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
    return float(getattr(norm, "full_tensor", lambda: norm)()) / math.sqrt(max(1, math.prod(shape)))


def _cells(row: TransferRow) -> tuple[str, ...]:
    count = f" ({len(row.names)})" if len(row.names) > 1 else ""
    init = "" if math.isclose(row.init, 1) else f"× {row.init:.3g}"
    told = [f"{key}={value:.4g}" for key, value in row.settings.items()] or ["no change"]
    return (
        row.parameter + count,
        row.large.algorithm,
        " → ".join(dict.fromkeys("×".join(map(str, size.shape)) for size in (row.small, row.large))),
        *(_both(getattr(row.small, name), getattr(row.large, name)) for name in ("rms", "spectral", "decay")),
        " ".join(filter(None, (_both(row.small.initial, row.large.initial), init))),
        ", ".join([*told, *([row.note] if row.note else [])]),
    )


def _both(small: float, large: float) -> str:
    """Return two figures as text: one if they are equal, and nothing for NaN."""
    return " → ".join(dict.fromkeys(f"{value:.2g}" for value in (small, large) if not math.isnan(value)))
