"""Runs the elementwise parts of rules on a device: all pieces of a bucket with few launches and few bytes.

On a CPU `parts` takes one piece after the other, in parts of the cache's size. A device is different in three ways: each
operation costs a launch, so pieces are taken together; memory is read and written at every operation, so there are few;
and the host does not know which matrices are left alone, since it does not wait, so whatever is written is masked by
flags on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.rules import parts
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import Rule

SMALL = 1 << 16
"""Elements of a piece up to which it is copied beside others of its size, to be taken with them by one operation."""

AT_ONCE = 1 << 24
"""Elements that an operation with a temporary result takes, so that this is at most 64 MiB."""


class Folded(NamedTuple):
    """A piece of a gradient.

    Attributes:
        gradient: Any shape, any real dtype, read only.
        state: What the rule keeps as "momentum", each of that shape; written if ``folds``.
        matrix: Which flag is its own.
        folds: Whether the gradient is folded into the state; if not, only the direction is written.
        into: Where the direction goes, of that shape, any strides and real dtype; None: nowhere.
    """

    gradient: Tensor
    state: Mapping[str, Tensor]
    matrix: int
    folds: bool
    into: Tensor | None


class Updated(NamedTuple):
    """A piece of weights.

    Attributes:
        weights: Any shape, written: masters where there are any.
        update: That shape, any real dtype, contiguous, read only.
        state: What the rule keeps as "weights", each of that shape, written.
        matrix: Which flag is its own.
        scale: Update scale of the whole matrix.
        rounded: Weights of lower precision that the master is rounded to; None where there is no master.
    """

    weights: Tensor
    update: Tensor
    state: Mapping[str, Tensor]
    matrix: int
    scale: float
    rounded: Tensor | None


def fold(rule: Rule, pieces: Sequence[Folded], active: Tensor) -> None:
    """Fold gradients into what a rule keeps as "momentum", in place, and write directions.

    Args:
        rule: Whose `Rule.fold` and `Rule.direction`.
        pieces: On one device.
        active: For each matrix whether anything is written, bool (n,), there. The direction of one that is left alone
            is written all the same, from what is kept.
    """
    if _folds_as_muon(rule):
        assert isinstance(rule, MuonRule)
        fp32 = [piece for piece in pieces if _momentum(piece).dtype == torch.float32]
        _fold_as_muon(rule, fp32, active)
        pieces = [piece for piece in pieces if _momentum(piece).dtype != torch.float32]
    for piece in pieces:
        if piece.folds:
            parts.fold(rule, piece.gradient, piece.state, active=active[piece.matrix], into=piece.into)
        elif piece.into is not None:
            parts.write_direction(rule, piece.gradient, piece.state, piece.into)


def apply(rule: Rule, pieces: Sequence[Updated], active: Tensor) -> None:
    """Decay and update weights in place, computed in fp32 or wider and rounded once.

    Args:
        rule: Whose `Rule.apply`.
        pieces: On one device.
        active: For each matrix whether anything is written, bool (n,), there.
    """
    if not pieces:
        return
    if type(rule).apply is Rule.apply and rule.decay_mode == "full":
        _apply_plain(rule, pieces, active)
    else:
        for weights, update, state, matrix, scale, _ in pieces:
            parts.apply(rule, weights, update, state, scale=scale, active=active[matrix])
    masters = [piece.weights for piece in pieces if piece.rounded is not None]
    if masters:
        torch._foreach_copy_([piece.rounded for piece in pieces if piece.rounded is not None], masters)


# ------------------------------------------------------------------ Muon's own parts


def _folds_as_muon(rule: Rule) -> bool:
    return isinstance(rule, MuonRule) and (type(rule).fold, type(rule).direction) == (MuonRule.fold, MuonRule.direction)


def _momentum(piece: Folded) -> Tensor:
    return piece.state["momentum_buffer"]


def _fold_as_muon(rule: MuonRule, pieces: Sequence[Folded], active: Tensor) -> None:
    """`MuonRule.fold` and `direction`, with 22 bytes an element less than by masking what they do.

    A gradient that is left out is replaced by zeros, since it may be NaN, and folded in with weight 0, which changes no
    bit of the momentum. The direction is ``m + (1 − μ)/μ · g``, 1/μ times the Nesterov direction: its magnitude does
    not count. Denormals are left as they are: a device computes with them as fast as with others.
    """
    if not pieces:
        return
    weight, inactive = active.to(torch.float32) * (1 - rule.momentum), ~active
    for some in _alike(pieces, [piece.gradient for piece in pieces]):
        numbers = [piece.matrix for piece in some]
        if len(some) == 1:
            off, by = inactive[numbers[0]], weight[numbers[0]]
            (piece,) = some
            tensors = [piece.gradient, _momentum(piece)] + ([] if piece.into is None else [piece.into])
            for g, m, *into in _split(tensors):
                _fold_one(rule, g, m, into[0] if into else None, off, by, folds=piece.folds)
        else:
            index = upload(numbers, dtype=torch.int64, device=active.device)
            momenta = [_momentum(piece) for piece in some]
            g, m = _stacked([piece.gradient for piece in some]), _stacked(momenta)
            into = [piece.into for piece in some if piece.into is not None]
            found = None if not into else torch.empty(m.shape, dtype=into[0].dtype, device=m.device)
            _fold_one(rule, g, m, found, inactive[index, None], weight[index, None], folds=some[0].folds)
            if some[0].folds:
                torch._foreach_copy_(momenta, _unstacked(m, momenta))
            if found is not None:
                torch._foreach_copy_(into, _unstacked(found, into))


def _fold_one(
    rule: MuonRule, gradient: Tensor, momentum: Tensor, into: Tensor | None, off: Tensor, by: Tensor, *, folds: bool
) -> None:
    g = gradient.to(momentum.dtype).masked_fill(off, 0)
    if folds:
        momentum.lerp_(g, by)
    if into is None:
        return
    if not rule.nesterov:
        into.copy_(momentum)
    elif rule.momentum == 0:
        into.copy_(g)
    else:
        torch.add(momentum, g, alpha=(1 - rule.momentum) / rule.momentum, out=into)


def _apply_plain(rule: Rule, pieces: Sequence[Updated], active: Tensor) -> None:
    """`Rule.apply` with full decay: weights that are left alone are multiplied by 1 and changed by 0 times the update.

    That changes none of their bits, since the update of a matrix that is left alone is finite: it comes from what is
    kept and not from the gradient.
    """
    numbers = [piece.matrix for piece in pieces]
    device = active.device
    scales = upload([piece.scale for piece in pieces], dtype=torch.float32, device=device)
    of_piece = active[upload(numbers, dtype=torch.int64, device=device)]
    keep = torch.where(of_piece, 1 - rule.lr * rule.weight_decay, torch.ones_like(scales))
    change = torch.where(of_piece, scales * -rule.lr, torch.zeros_like(scales))
    place = {id(piece): number for number, piece in enumerate(pieces)}
    for some in _alike(pieces, [piece.weights for piece in pieces]):
        if len(some) == 1:
            number = place[id(some[0])]
            for p, u in _split([some[0].weights, some[0].update]):
                _apply_one(p, u, keep[number], change[number])
        else:
            index = upload([place[id(piece)] for piece in some], dtype=torch.int64, device=device)
            weights = [piece.weights for piece in some]
            p = _stacked(weights)
            _apply_one(p, _stacked([piece.update for piece in some]), keep[index, None], change[index, None])
            torch._foreach_copy_(weights, _unstacked(p, weights))


def _apply_one(weights: Tensor, update: Tensor, keep: Tensor, change: Tensor) -> None:
    exact = torch.promote_types(weights.dtype, torch.float32)
    wide = weights.to(exact)
    wide.mul_(keep).addcmul_(update.to(wide.dtype) if wide.dtype == torch.float64 else update, change)
    if wide is not weights:
        weights.copy_(wide)


# ------------------------------------------------------------------ pieces together


def _alike(pieces: Sequence[Folded | Updated], of: Sequence[Tensor]) -> Iterator[list]:  # type: ignore[type-arg]
    """Yield large pieces alone, and small ones with others of their size, dtypes and kind, in a common order."""
    small: dict[object, list[Folded | Updated]] = {}
    for piece, tensor in zip(pieces, of, strict=True):
        if tensor.numel() > SMALL:
            yield [piece]
        else:
            kind = [(t.dtype, t.numel()) if isinstance(t, Tensor) else isinstance(t, bool) and t for t in piece]
            small.setdefault(tuple(kind), []).append(piece)
    for some in small.values():
        size = max(1, AT_ONCE // max(1, some[0][0].numel()))
        for start in range(0, len(some), size):
            yield some[start : start + size]


def _split(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of one piece along its first dim, so that temporary results stay small."""
    first = tensors[0]
    if first.numel() <= AT_ONCE or first.ndim == 0:
        yield tuple(tensors)
        return
    rows = max(1, AT_ONCE // (first.numel() // len(first)))
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.reshape(-1) for tensor in tensors])


def _unstacked(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [row.view(tensor.shape) for row, tensor in zip(together.unbind(), like, strict=True)]
