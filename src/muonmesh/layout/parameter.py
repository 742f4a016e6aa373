"""Parameter: what a plan has to know of a parameter, and the line in which the ranks compare it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.layout.companion import Companion
from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the planner sees it.

    Attributes:
        name: Canonical name, unique.
        momentum_storage: Where the momentum lives, which is gathered.
        target: Where the parameter lives, to which results are scattered.
        matrices: What it consists of; they cover it exactly.
        flops: Cost of each of the matrices, in their order.
        settings: Text of everything that decides what an orthogonalization computes. Matrices are batched
            only with equals, and the ranks compare it.
        companions: What its rule keeps by row, column or matrix, which travels to the owners and back, or in two sizes,
            which lives there.
        sums: How many sums over each of the matrices its rule asks for, before the weights are written.
        scale_invariant: Whether its rule is, so that clipping need not scale its gradients (`Rule.scale_invariant`).
    """

    name: str
    momentum_storage: Layout
    target: Layout
    matrices: tuple[Matrix, ...]
    flops: tuple[int, ...]
    settings: str
    companions: tuple[Companion, ...] = ()
    sums: int = 0
    scale_invariant: bool = True


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A parameter that needs no orthogonalization (AdamW's): nothing of it moves, but the ranks agree on it."""

    name: str
    target: Layout


def describe(parameter: Parameter | Elementwise) -> str:
    """Return a line that says all that the ranks must agree on about a parameter."""
    target = parameter.target
    line = f"{parameter.name}: shape {target.shape}, {target.describe()} {text_of_ranks(target.ranks)}"
    if isinstance(parameter, Elementwise):
        return f"{line}, not orthogonalized"
    sizes = [(m.rows, m.cols) for m in parameter.matrices[:8]]
    momentum = parameter.momentum_storage.describe()
    kept = "".join(f", {companion.describe()}" for companion in parameter.companions)
    if parameter.sums:
        kept += f", {parameter.sums} summed"
    if not parameter.scale_invariant:
        kept += ", clipped"
    return f"{line}, state {momentum}{kept}, {parameter.settings}, {sizes} ×{len(parameter.matrices)}"


def text_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, many of them as a number that is the same for the same ranks."""
    return f"on {ranks}" if len(ranks) <= 8 else f"on {len(ranks)} ranks ({hash(tuple(ranks)) & 0xFFFFFFFF:08x})"
