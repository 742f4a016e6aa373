"""Parameter: the facts about a parameter that a plan needs, and the text by which ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.layout.factored_state import FactoredState
from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix


@dataclass(frozen=True, slots=True)
class Parameter:
    """The facts about a parameter that the planner needs.

    Attributes:
        name: Canonical name, unique.
        momentum_storage: Layout of the momentum, which is gathered.
        target: Layout of the parameter, to which results are scattered.
        matrices: The matrices of the parameter; they cover it exactly.
        flops: Cost of each of the matrices in FLOPs, in order.
        settings: Text of all settings that determine the result of an orthogonalization. Only matrices with equal texts
            are batched, and ranks compare the texts.
        factored_states: State of the rule by row, column or matrix, which travels to the owners and back; or with two
            sizes, which is kept at the owners.
        sums: The number of sums over each matrix that the rule needs before the weights are written.
        scale_invariant: Whether the rule ignores the scale of gradients, so that clipping need not scale them
            (`Rule.scale_invariant`).
    """

    name: str
    momentum_storage: Layout
    target: Layout
    matrices: tuple[Matrix, ...]
    flops: tuple[int, ...]
    settings: str
    factored_states: tuple[FactoredState, ...] = ()
    sums: int = 0
    scale_invariant: bool = True


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A parameter of an elementwise rule, such as AdamW's. It needs no transfer, but ranks compare its settings."""

    name: str
    target: Layout


def describe(parameter: Parameter | Elementwise) -> str:
    """Return a line of text with all facts about a parameter that must be equal on its ranks."""
    target = parameter.target
    line = f"{parameter.name}: shape {target.shape}, {target.describe()} {text_of_ranks(target.ranks)}"
    if isinstance(parameter, Elementwise):
        return f"{line}, not orthogonalized"
    sizes = [(m.rows, m.cols) for m in parameter.matrices[:8]]
    momentum = parameter.momentum_storage.describe()
    states = "".join(f", {factored.describe()}" for factored in parameter.factored_states)
    if parameter.sums:
        states += f", {parameter.sums} summed"
    if not parameter.scale_invariant:
        states += ", clipped"
    return f"{line}, state {momentum}{states}, {parameter.settings}, {sizes} ×{len(parameter.matrices)}"


def text_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text; more than 8 ranks as their number and a hash."""
    return f"on {ranks}" if len(ranks) <= 8 else f"on {len(ranks)} ranks ({hash(tuple(ranks)) & 0xFFFFFFFF:08x})"
