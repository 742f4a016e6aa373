"""Judge: finds which computation on a known gradient gives the step that was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from muonmesh.layout import Layout, MatrixSpec
from muonmesh.layout.matrix import Matrix, split_matrices
from muonmesh.layout.region import Block
from muonmesh.numerics.scale import ScaleMode, update_scale
from muonmesh.tools.auditing.probe import RANK

Verdict = Literal[
    "orthogonalized", "as one matrix", "in blocks", "each shard alone", "elementwise", "follows the gradient",
    "twice", "only decays", "does not move", "not in the optimizer", "replicas differ", "not finite", "unreadable",
    "raises", "unknown",
]  # fmt: skip
"""What happens to a weight: see `muonmesh.audit`."""

SURE = 0.97
"""The cosine similarity at which the search for a computation ends."""

AS_STORED = ", rows and columns as stored"
"""The suffix of a scale mode that uses the last two dims of the stored weight as rows and columns. They differ from
the matrix's rows and columns for weights stored in × out, and for convolutions."""

FEW_ROWS = 1024
"""The largest smaller side of a matrix for which an SVD takes about a second at most."""

ALIKE = 0.85
"""The cosine similarity above which a step counts as the result of a computation. Five Newton–Schulz steps in bf16 have
more than 0.9 with U Vᵀ."""


Change = Callable[[Tensor], Tensor]
"""What a rule does to a matrix before it orthogonalizes it."""

BALANCES: tuple[Change, ...] = (
    partial(normalize, dim=-1),
    partial(normalize, dim=-2),
    lambda matrix: normalize(matrix, dim=-1) / matrix.norm(dim=-2, keepdim=True).clamp(min=1e-30),
)
"""The changes of MuonEq: rows, columns, or both are normalized."""


@dataclass(frozen=True)
class Judgement:
    """What a step did to one weight.

    Attributes:
        verdict: What happened to the weight.
        matrices: The number of matrices that were orthogonalized; 0 if none.
        like: Cosine similarity between the step and the step that the verdict describes.
        sizes: By scale mode, the size of the step divided by the mode's size; empty if nothing was orthogonalized.
        rms: Root mean square of the step at a learning rate of 1.
    """

    verdict: Verdict
    matrices: int = 0
    like: float = math.nan
    sizes: dict[str, float] = field(default_factory=dict)
    rms: float = math.nan


def polar(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return U and Vᵀ of a matrix U S Vᵀ; if its rank is at most `RANK`, by a small SVD in a basis of its columns."""
    rank = min(RANK + 8, *matrix.shape)
    tall = matrix.double() if matrix.numel() < 1 << 22 else matrix
    seeded = torch.Generator().manual_seed(0)
    mixing = torch.randn(tall.shape[1], rank, generator=seeded, dtype=torch.float32, device="cpu")
    basis, _ = torch.linalg.qr(tall @ mixing.to(tall))
    if float((tall - basis @ (basis.mT @ tall)).norm()) > 1e-3 * float(tall.norm()):  # its rank is larger
        basis = torch.eye(len(tall), dtype=tall.dtype, device=tall.device)
    left_vectors, values, right = torch.linalg.svd(basis.mT @ tall, full_matrices=False)
    count = int((values > 1e-6 * values[0]).sum()) if float(values[0]) else 0
    return (basis @ left_vectors[:, :count]).to(matrix), right[:count].to(matrix)


def of_matrices(matrices: Sequence[Matrix], stacked: Tensor, change: Change) -> Tensor:
    """Return the polar factors of a gradient's matrices, and a step without what it does in their null spaces.

    In the null space of a matrix its polar factor is not defined, and an SVD returns arbitrary vectors there.

    Args:
        matrices: The matrices of the weight.
        stacked: The gradient and the step, (2, *shape).
        change: What a rule does to a matrix before it orthogonalizes it.
    """
    result = torch.empty_like(stacked)
    for matrix in matrices:
        assembled = stacked.new_empty((2, *matrix.shape))
        _copy(stacked, assembled, matrix.blocks, back=False)
        gradient, step = assembled
        left_factor, right = polar(change(gradient))
        outside = step - left_factor @ (left_factor.mT @ step)
        projected = torch.stack([left_factor @ right, step - outside + (outside @ right.mT) @ right])
        _copy(result, projected, matrix.blocks, back=True)
    return result


def of_a_shard(shape: Sequence[int]) -> MatrixSpec:
    """Return how an optimizer that knows nothing of fused weights splits a shard."""
    return "whole" if len(shape) == 2 else "stack"


def of_shards(layout: Layout, stacked: Tensor, change: Change) -> Tensor:
    """Return what `of_matrices` returns if each rank's shard is orthogonalized alone."""
    result = torch.zeros_like(stacked)
    for rank in layout.replica(layout.ranks[0]):
        shape = layout.local_shape(rank)
        if math.prod(shape):
            local = stacked.new_empty((2, *shape))
            _copy(stacked, local, layout.blocks(rank), back=False)
            shard_result = of_matrices(split_matrices("", shape, of_a_shard(shape)), local, change)
            _copy(result, shard_result, layout.blocks(rank), back=True)
    return result


def _copy(whole: Tensor, memory: Tensor, blocks: Sequence[Block], *, back: bool) -> None:
    for block in blocks:
        region = block.region
        sides = zip(region.offset, region.shape, region.step, strict=True)
        box = whole[:, *(slice(low, low + size * step, step) for low, size, step in sides)]
        stored = memory.as_strided((2, *region.shape), (memory[0].numel(), *block.strides), block.start)
        (box if back else stored).copy_(stored if back else box)


Transform = Callable[[Tensor, Change], Tensor]
Candidate = tuple[Verdict, Sequence[Matrix], Transform]
"""A possible orthogonalization: verdict, matrices, and what returns the same as `of_matrices`."""


def candidates_of(shape: tuple[int, ...], layout: Layout | None, spec: MatrixSpec) -> list[Candidate]:
    """Return possible orthogonalizations, the right one first; none for what is no matrix."""
    if len(shape) < 2 or 1 in (shape[0], math.prod(shape[1:])):
        return []
    spec = ("whole" if len(shape) == 2 else "flatten") if spec is None else spec
    right = split_matrices("", shape, spec)
    tries: list[Candidate] = [("orthogonalized", right, partial(of_matrices, right))]
    if layout is not None and len(layout.replica(layout.ranks[0])) > 1:
        tries.append(("each shard alone", split_matrices("", shape, of_a_shard(shape)), partial(of_shards, layout)))
    listed = {tuple(matrix.blocks for matrix in right)}
    others: list[tuple[Verdict, MatrixSpec]] = [("as one matrix", "whole" if len(shape) == 2 else "flatten")]
    others += [("in blocks", "stack")] if len(shape) > 2 else []
    counts = [2, 3, 4, 6, 8, 12, 16, 24, 32, 64] if len(shape) == 2 else []
    sides = [(k, dim) for dim in (0, 1) for k in counts if shape[dim] % k == 0 and shape[dim] > k]
    others += [("in blocks", ("heads", k, dim)) for k, dim in sides]
    for verdict, other in others:
        matrices = split_matrices("", shape, other)
        blocks = tuple(matrix.blocks for matrix in matrices)
        if blocks not in listed and min(matrices[0].shape) > 1:
            listed.add(blocks)
            tries.append((verdict, matrices, partial(of_matrices, matrices)))
    return tries


def judge(step: Tensor, gradient: Tensor, weight: Tensor, layout: Layout | None, spec: MatrixSpec) -> Judgement:
    """Return what a step did to a weight, with new state and a learning rate of 1.

    Args:
        step: The new weight minus the old weight, whole, fp32.
        gradient: The probing gradient, whole, fp32.
        weight: The old weight, whole, fp32. Weight decay is a multiple of it, and is subtracted from the step.
        layout: Where the weight lives; None if every rank holds all of it.
        spec: How the weight splits into matrices, from `muonmesh.split_params`; None if it gives no split.
    """
    if not bool(step.isfinite().all()):
        return Judgement("not finite")
    size = float(step.norm())
    if not size:
        return Judgement("does not move", rms=0.0)

    def without_decay(move: Tensor) -> Tensor:
        squared = float(weight.square().sum())
        return move - weight * (float((move * weight).sum()) / squared) if squared and weight.numel() >= 8 else move

    down = without_decay(-step)
    rms = float(down.square().mean().sqrt())
    if float(down.norm()) < 1e-3 * size:
        return Judgement("only decays", rms=rms)

    def cosine(other: Tensor, down: Tensor = down) -> float:
        other = without_decay(other)
        return float((down * other).sum() / (down.norm() * other.norm()).clamp(min=1e-30))

    signs = gradient.sign()
    comparisons = [
        (cosine(signs), Judgement("elementwise", rms=rms)),
        (cosine(gradient), Judgement("follows the gradient", rms=rms)),
    ]
    filled: list[tuple[float, Judgement]] = []  # the same, where the polar factors are defined

    def compare(verdict: Verdict, matrices: Sequence[Matrix], transform: Transform, change: Change) -> Tensor:
        factors, defined = transform(torch.stack([gradient, down]), change).unbind()
        sizes = _sizes(down, factors, matrices)
        filled.append((cosine(factors, defined), Judgement(verdict, len(matrices), 0.0, sizes, rms)))
        return factors

    right: Tensor | None = None
    candidates = candidates_of(tuple(gradient.shape), layout, spec)
    tried: list[tuple[Candidate, Change]] = [(candidate, torch.clone) for candidate in candidates]
    if candidates and max(matrix.shape[0] for matrix in candidates[0][1]) <= FEW_ROWS:
        tried.insert(1, (candidates[0], torch.sign))  # AdaMuon takes signs first, which have full rank
    for candidate, change in tried:
        if max(like for like, _ in comparisons) >= SURE:
            break
        factors = compare(*candidate, change)
        right = factors if right is None else right
        # NorMuon and other rules normalize the rows or the elements of the result. These candidates get 0.01 less, so
        # that the plain factors win a tie.
        forms = factors, normalize(factors, dim=-1), normalize(factors, dim=-2), factors.sign()
        for number, normalized in enumerate(forms):
            judgement = replace(filled[-1][1], sizes={}) if number else filled[-1][1]
            comparisons.append((cosine(normalized) - 0.01 * bool(number), judgement))
    like, best = max(comparisons, key=lambda pair: pair[0])
    if like < ALIKE and right is not None:
        directions = torch.stack([without_decay(vector).flatten() for vector in (right, signs)], 1).double()
        shares = torch.linalg.lstsq(directions, down.flatten().double()[:, None]).solution
        explained = float((directions @ shares).norm() / down.norm())
        if explained > 0.95:
            return Judgement("twice", best.matrices, explained, {}, rms)
        for candidate in candidates:
            for change in BALANCES if candidate[0] != "in blocks" else ():
                compare(*candidate, change)
        like, best = max(comparisons + filled, key=lambda pair: pair[0])
    if like < ALIKE:
        return Judgement("unknown", 0, like, {}, rms)
    return Judgement(best.verdict, best.matrices, like, best.sizes, rms)


def _sizes(down: Tensor, factors: Tensor, matrices: Sequence[Matrix]) -> dict[str, float]:
    """Return by scale mode the size of the step, divided by the mode's size for the first matrix."""
    measured = float((down * factors).sum() / factors.square().sum())
    first = matrices[0]
    modes: list[ScaleMode] = [mode for mode in get_args(ScaleMode) if mode != "shape_scaling"]
    shapes = {"": (first.rows, first.cols), AS_STORED: (down.shape[-2], down.shape[-1])}
    return {f"{mode}{how}": measured / update_scale(*shape, mode) for how, shape in shapes.items() for mode in modes}
