"""Runs the elementwise parts of rules on a device: all pieces of a bucket with few launches and few bytes.

On a CPU, `parts` takes one piece after the other, in parts of the cache's size. A device differs in three ways. Each
operation costs a launch, so a single kernel takes all pieces if there is one. Each operation reads and writes memory,
so there are few operations. The CPU does not wait, so it does not know which matrices stay unchanged; flags on the
device mask all writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels import fused
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.kernels.rows import in_three_dims
from muonmesh.numerics.rules import parts
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import Rule
from muonmesh.numerics.stochastic import Rounding


class Folded(NamedTuple):
    """A piece of a gradient.

    Attributes:
        gradient: Any shape, any real dtype, read only.
        state: The state of kind "momentum", each tensor of the same shape; written if ``folds``.
        matrix: Number of its matrix in the plan, for `Factors`.
        folds: Whether the gradient is folded into the state; if not, only the direction is written.
        into: The tensor for the direction, of the same shape, any strides and real dtype; None: it is not written.
    """

    gradient: Tensor
    state: Mapping[str, Tensor]
    matrix: int
    folds: bool
    into: Tensor | None


class Updated(NamedTuple):
    """A piece of weights.

    Attributes:
        weights: Any shape, written: the master weights if there are any.
        update: The same shape, any real dtype and strides, read only; already multiplied by its step if
            `Factors.arrives`.
        state: The state of kind "weights", each tensor of the same shape, written.
        matrix: Number of its matrix in the plan.
        scale: Update scale of the whole matrix.
        rounded: Weights of lower precision to which master weights are rounded; None if there are no master weights.
        sums: The sums of the rule's summands over the whole matrix, 0-d fp64 each; empty if the rule needs none.
        told: The state of kind "matrix", 0-d fp64 each, if there are sums.
        copies: The number of ranks that store these elements.
        rounding: The stochastic rounding of weights in bf16; None: they are rounded to nearest.
    """

    weights: Tensor
    update: Tensor
    state: Mapping[str, Tensor]
    matrix: int
    scale: float
    rounded: Tensor | None
    sums: tuple[Tensor, ...]
    told: Mapping[str, Tensor]
    copies: int
    rounding: Rounding | None = None

    def widened(self) -> Updated:
        """Return the piece with an fp32 copy of weights, if `round` rounds them stochastically."""
        return self if self.rounding is None else self._replace(weights=self.weights.float())

    def round(self, widened: Updated) -> None:
        """Round the weights that were stepped in fp32."""
        if self.rounding is not None:
            self.rounding.write(widened.weights, self.weights)

    def apply(self, rule: Rule, active: Tensor | None, *, measured: bool) -> list[Tensor]:
        """Step the weights by `parts.apply`; return the squares of the step if ``measured``."""
        squares: list[Tensor] | None = [] if measured else None
        parts.apply(
            *(rule, self.weights, self.update, self.state),
            scale=self.scale,
            active=active,
            sums=self.sums,
            told=self.told,
            squares=squares,
            rounded=self.rounded,
        )
        return squares or []


class Factors:
    """The factors of gradients, weights and updates in one step, computed for all matrices at once.

    Attributes:
        rule: The rule of the param group.
        active: For each matrix whether anything is written, bool (n,).
        scales: The update scale of each matrix, fp64 (n,), on the same device.
        only_zeros: Whether a gradient is left out only if it is exactly zero, so that a left-out gradient is never NaN.
    """

    def __init__(self, rule: Rule, active: Tensor, scales: Tensor, *, only_zeros: bool = False) -> None:
        """Keep the arguments. Each factor is computed when it is first read."""
        self.rule, self.active, self.scales, self.only_zeros = rule, active, scales, only_zeros
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @cached_property
    def arrives(self) -> bool:
        """Whether owners multiply updates by their step, before they send them.

        The last product of the orthogonalization is multiplied by 1/ν anyway. The step is multiplied into this number,
        so it costs nothing. The weights are then read and written once: they are decayed, and the received update is
        added. This is possible only if the rule needs the update for nothing else. All ranks get the same answer,
        because it depends only on the settings of the group.
        """
        return self.adds and not self.rule.changes_matrices()

    @cached_property
    def adds(self) -> bool:
        """Whether the rule only decays weights in full and adds a multiple of the update (`Rule.apply`, `decay`)."""
        kind = type(self.rule)
        own = (kind.apply, kind.decay) != (Rule.apply, Rule.decay) or kind.asks_for_sums()
        return self.rule.decay_mode == "full" and not own

    @cached_property
    def fuses(self) -> bool:
        """Whether there are kernels for both elementwise parts of the rule."""
        return self.adds and _folds_as_muon(self.rule)

    @cached_property
    def step(self) -> Tensor:
        """The factor of the result of each matrix before it is sent, fp64 (n,)."""
        return self.change if self.arrives else torch.ones_like(self.scales)

    @cached_property
    def inactive(self) -> Tensor:
        """For each matrix whether nothing is written, bool (n,)."""
        return ~self.active

    @cached_property
    def folding(self) -> Tensor:
        """The factor of a gradient in the momentum, fp32 (n,): 0 for a matrix that stays unchanged."""
        assert isinstance(self.rule, MuonRule)
        return self.active.to(torch.float32) * (1 - self.rule.momentum)

    @cached_property
    def change(self) -> Tensor:
        """The factor of the update before it is added, fp64 (n,): 0 for a matrix that stays unchanged."""
        return torch.where(self.active, self.scales * -self.rule.lr, 0.0)

    @cached_property
    def size(self) -> Tensor:
        """The factor of the update before it is subtracted, fp32 (n,)."""
        keep, change = self.applied(torch.float32)
        return torch.full_like(keep, -1.0) if self.arrives else -change

    def applied(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, each (n,), rounded to a dtype: 1 and 0 for unchanged matrices."""
        if dtype not in self._rounded:
            keep = torch.where(self.active, 1 - self.rule.lr * self.rule.weight_decay, torch.ones_like(self.scales))
            self._rounded[dtype] = keep.to(dtype), self.change.to(dtype)
        return self._rounded[dtype]


def fold(pieces: Sequence[Folded], factors: Factors) -> None:
    """Fold gradients into the state of kind "momentum", in place, and write directions.

    Args:
        pieces: The pieces, on one device.
        factors: The factors of their rule. If the rule folds like Muon, a kernel or, for momentum in fp32,
            `_fold_as_muon` replaces `Rule.fold` and `Rule.direction`. The direction of an unchanged matrix is written
            too, from its momentum and a gradient of zeros.
    """
    rule, active = factors.rule, factors.active
    rest = list(pieces)
    if _folds_as_muon(rule):
        in_one, by_torch, rest, known = list[Folded](), list[Folded](), list[Folded](), dict[object, bool]()
        for piece in pieces:
            if piece.folds and _can_fuse(known, piece.gradient, _momentum(piece), piece.into):
                in_one.append(piece)
            elif _momentum(piece).dtype == torch.float32:
                by_torch.append(piece)
            else:
                rest.append(piece)
        _fold_fused(in_one, factors)
        _fold_as_muon(by_torch, factors)
    for piece in rest:
        # A left-out gradient may be NaN, and a direction may depend on the gradient.
        g = piece.gradient if factors.only_zeros else piece.gradient.masked_fill(factors.inactive[piece.matrix], 0)
        parts.fold(rule, g, piece.state, active=active[piece.matrix], into=piece.into, folds=piece.folds)


def apply(pieces: Sequence[Updated], factors: Factors, *, measured: bool = False) -> Tensor | None:
    """Decay and update weights in place, computed in fp32 or wider and rounded once.

    Args:
        pieces: The pieces, on one device.
        factors: The factors of their rule. With `Factors.adds`, a kernel or `_apply_plain` replaces `Rule.apply`; else
            `Rule.apply` runs, or `Rule.apply_with` if there are sums.
        measured: Whether to return the squares of the steps without decay.

    Returns:
        With ``measured``, the sum of the squares, each element counted once among its copies, 0-d fp64; else None.
    """
    if not pieces:
        return None
    rule, squares = factors.rule, list[Tensor]()
    given = pieces if rule.stochastic_rounding is not None else ()
    pieces = widened = [piece.widened() for piece in given] or pieces
    if factors.adds:
        if measured:
            squares.append(_squares(pieces, factors))
        in_one, rest, known = list[Updated](), list[Updated](), dict[object, bool]()
        for piece in pieces:
            (in_one if _can_fuse(known, piece.weights, piece.rounded, piece.update) else rest).append(piece)
        _apply_fused(in_one, factors)
        _apply_plain(rest, factors)
    else:
        for piece in pieces:
            own = piece.apply(rule, factors.active[piece.matrix], measured=measured)
            squares += [square / piece.copies for square in own]
    for piece, wide in zip(given, widened, strict=False):
        piece.round(wide)
    return torch.stack(squares).sum() if squares else None


# ------------------------------------------------------------------ Muon's own parts


def _folds_as_muon(rule: Rule) -> bool:
    return isinstance(rule, MuonRule) and (type(rule).fold, type(rule).direction) == (MuonRule.fold, MuonRule.direction)


def _momentum(piece: Folded) -> Tensor:
    return piece.state["momentum_buffer"]


def _fold_as_muon(pieces: Sequence[Folded], factors: Factors) -> None:
    """Do `MuonRule.fold` and `direction` with less memory traffic than by masking their results.

    A left-out gradient is folded in with weight 0, which changes no bit of the momentum. If it may be NaN, it is first
    replaced by zeros. Denormals stay, because a device computes with them as fast as with other numbers.
    """
    rule = factors.rule
    assert isinstance(rule, MuonRule)
    for piece in pieces:
        tensors = [piece.gradient, _momentum(piece)] + ([] if piece.into is None else [piece.into])
        for gradient, momentum, *into in parts.in_cache(*tensors):
            g = gradient.to(momentum.dtype)
            if not factors.only_zeros:
                g = g.masked_fill(factors.inactive[piece.matrix], 0)
            if piece.folds:
                momentum.lerp_(g, factors.folding[piece.matrix])
            if into and rule.nesterov:
                torch.lerp(g, momentum, rule.momentum, out=into[0])  # rounded as it is written
            elif into:
                into[0].copy_(momentum)


def _apply_plain(pieces: Sequence[Updated], factors: Factors) -> None:
    """Do `Rule.apply` with full decay; unchanged weights are multiplied by 1, and 0 times the update is added.

    This changes none of their bits, because the update of an unchanged matrix is finite: `fold` uses zeros in place of
    its gradient.
    """
    for piece in pieces:
        exact = torch.promote_types(piece.weights.dtype, torch.float32)
        keep, change = (factor[piece.matrix] for factor in factors.applied(exact))
        stored = () if piece.rounded is None else (piece.rounded,)
        for weights, update, *low in parts.in_cache(piece.weights, piece.update, *stored):
            for rounded in low:
                parts.follow(weights, rounded)
            wide = weights.to(exact)
            if factors.arrives:
                torch.addcmul(update, wide, keep, out=wide)
            else:
                wide.mul_(keep).addcmul_(update, change)
            if wide is not weights:
                weights.copy_(wide)
            for rounded in low:
                rounded.copy_(weights)


def _squares(pieces: Sequence[Updated], factors: Factors) -> Tensor:
    """Return the sum of squares of the steps, without decay, each element counted once among its copies."""
    norms = torch.stack(torch._foreach_norm([piece.update for piece in pieces], 2, dtype=torch.float64))
    shares = upload([piece.copies for piece in pieces], dtype=torch.float64, device=norms.device)
    if not factors.arrives:
        (change,) = of_each([piece.matrix for piece in pieces], factors.change)
        norms = norms * change[:, 0]
    return (norms.square() / shares).sum()


# ------------------------------------------------------------------ by one kernel


def _can_fuse(known: dict[object, bool], *tensors: Tensor | None) -> bool:
    """Whether one kernel takes these tensors of a piece; ``known`` caches the results for pieces of the same kind."""
    given = [tensor for tensor in tensors if tensor is not None]
    first, dtypes = given[0], [tensor.dtype for tensor in given]
    kind = (first.device, *dtypes)
    found = known.get(kind)
    if found is None:
        found = known[kind] = fused.can_fuse(first.device, dtypes)
    return found and in_three_dims(*given) is not None


def _fold_fused(pieces: Sequence[Folded], factors: Factors) -> None:
    for some in ([p for p in pieces if p.into is not None], [p for p in pieces if p.into is None]):
        into = [piece.into for piece in some if piece.into is not None]
        gradients, momenta = [piece.gradient for piece in some], [_momentum(piece) for piece in some]
        fold_in_one(gradients, momenta, into, [piece.matrix for piece in some], factors)


def _apply_fused(pieces: Sequence[Updated], factors: Factors) -> None:
    for some in ([p for p in pieces if p.rounded is not None], [p for p in pieces if p.rounded is None]):
        weights = [piece.weights if piece.rounded is None else piece.rounded for piece in some]
        masters = [piece.weights for piece in some if piece.rounded is not None]
        updates = [piece.update for piece in some]
        apply_in_one(weights, masters, updates, [piece.matrix for piece in some], factors)


def fold_in_one(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    into: Sequence[Tensor],
    matrices: Sequence[int],
    factors: Factors,
) -> None:
    """Do `fold` by one kernel, if `Factors.fuses`; each tensor has one matrix, or several adjacent matrices."""
    rule = factors.rule
    assert isinstance(rule, MuonRule)
    fused.fold(
        *(gradients, momenta, into, factors.active),
        momentum=rule.momentum,
        nesterov=rule.nesterov,
        entries=matrices,
    )


def apply_in_one(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    updates: Sequence[Tensor],
    matrices: Sequence[int],
    factors: Factors,
) -> None:
    """Do `apply` by one kernel, if `Factors.fuses`; ``masters`` is empty if there are no master weights."""
    fused.apply(
        *(weights, masters, updates, factors.active),
        keep=factors.applied(torch.float32)[0],
        size=factors.size,
        entries=matrices,
    )


def of_each(numbers: Sequence[int], *factors: Tensor) -> tuple[Tensor, ...]:
    """Return the factors (n,) of some matrices, each (pieces, 1): views where the numbers are evenly spaced."""
    first, spacing = numbers[0], 1 if len(numbers) == 1 else numbers[1] - numbers[0]
    if spacing > 0 and list(numbers) == list(range(first, first + spacing * len(numbers), spacing)):
        return tuple(factor[first : numbers[-1] + 1 : spacing, None] for factor in factors)
    index = upload(numbers, dtype=torch.int64, device=factors[0].device)
    return tuple(factor[index, None] for factor in factors)
