"""Runs the parts of a rule: elementwise ones in parts of the cache's size, whole matrices in one memory order.

A part writes its state in place. It gets a read-only mapping, since an entry that it assigns would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from muonmesh.numerics.kernels.threads import run_on_one_thread, scratch
from muonmesh.numerics.rules.rule import Rule, State, check_result

_CACHED = 1 << 19
"""Number of elements that a CPU works on at a time, so that the operations of a rule find them in the cache. With fewer
elements, threads wait for each other's Python code: with 1 << 16, two threads take 2.7 times as long (measured)."""

_AT_ONCE_ON_A_DEVICE = 1 << 24
"""Number of elements that a device works on at a time, in several copies of 64 MiB, or 128 MiB in fp64. Copies of a
whole large matrix would need most of the memory of a step."""


def fold(
    rule: Rule,
    gradient: Tensor,
    state: State,
    *,
    active: Tensor | None = None,
    into: Tensor | None = None,
    folds: bool = True,
) -> None:
    """Fold a gradient into the state of kind "momentum", in place, and write the direction.

    Args:
        rule: The rule with `Rule.fold` and `Rule.direction`.
        gradient: Any shape, any real dtype, read only.
        state: The state, each tensor of the same shape; written if the gradient is folded.
        active: 0-d bool tensor; if it is false, nothing is folded. None means true.
        into: The tensor for the direction, which is orthogonalized later: the same shape, any real dtype and strides.
            The direction is rounded to its dtype. None: it is not written.
        folds: Whether the gradient is folded. If False, only the direction is written.
    """
    flat = into
    if into is not None and not into.is_contiguous() and into.device.type == "cpu":
        # The cast comes before the transpose: on a CPU, torch transposes fast only within one dtype.
        flat = scratch("direction", into.shape, dtype=into.dtype, device=into.device)
    for g, *views in in_cache(gradient, *state.values(), *(() if flat is None else (flat,))):
        momenta = dict(zip(state, views, strict=False))  # without what the direction goes to
        if folds:
            fresh = momenta if active is None else {key: value.clone() for key, value in momenta.items()}
            rule.fold(g, MappingProxyType(fresh))
            if active is not None:
                for key, value in momenta.items():
                    torch.where(active, fresh[key], value, out=value)
        if flat is not None:
            direction = rule.direction(g, MappingProxyType(momenta))
            check_result(rule.direction, direction, g.shape)
            views[-1].copy_(direction)
    if into is not None and flat is not None and flat is not into:
        if into.ndim == 2:  # torch transposes fast only into contiguous memory
            into, flat = into.mT, flat.mT
        into.copy_(flat)


def change_whole(
    part: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    matrix: Tensor,
    state: State,
    *,
    rows: int,
    cols: int,
    direction: Tensor | None = None,
) -> None:
    """Run a rule's part on one whole matrix, in place.

    The part gets the matrix in fp32 or wider, contiguous in the orientation rows × cols and at an aligned address, and
    runs on one thread on a CPU, because the rounding of sums depends on memory order and number of threads.

    Args:
        part: `Rule.whole` or `Rule.balance` of a rule.
        matrix: The orthogonalized matrix, or the direction, in its wide orientation, contiguous, written.
        state: The state for the part, contiguous, written; the part computes in its widest dtype.
        rows, cols: Size of the matrix, out × in.
        direction: The direction before orthogonalization, in the form of ``matrix``, read only; for a rule with
            `Rule.sees_direction`.

    Raises:
        ValueError: the part returned another shape, which torch would broadcast.
    """
    exact = torch.promote_types(matrix.dtype, torch.float32)
    for value in state.values():
        exact = torch.promote_types(exact, value.dtype)

    def oriented(stored: Tensor) -> Tensor:
        return stored.view(rows, cols) if rows <= cols else stored.view(cols, rows).mT

    def copied(role: str, stored: Tensor) -> Tensor:
        copy = scratch(role, (1, rows, cols), dtype=exact, device=stored.device)
        copy[0].copy_(oriented(stored))
        return copy

    def change() -> None:
        extra = {} if direction is None else {"direction": copied("direction", direction)}
        changed = part(copied("whole", matrix), MappingProxyType({**state, **extra}))
        check_result(part, changed, (1, rows, cols), "its matrix")
        # Cast before transposing: torch transposes fast only within one dtype.
        oriented(matrix).copy_(changed[0].to(matrix.dtype))

    run_on_one_thread(change, device=matrix.device)


def apply(
    rule: Rule,
    weights: Tensor,
    update: Tensor,
    state: State,
    *,
    scale: float,
    active: Tensor | None = None,
    sums: tuple[Tensor, ...] = (),
    matrix_state: Mapping[str, Tensor] | None = None,
    squares: list[Tensor] | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Decay and update weights in place, computed in fp32 or wider and rounded once.

    Args:
        rule: The rule with `Rule.apply`.
        weights: Any shape, written: the master weights if there are any.
        update: Same shape, any real dtype, read only.
        state: The state of kind "weights", each tensor of the same shape, written.
        scale: Update scale of the *whole* matrix that the update is a part of.
        active: 0-d bool tensor; if it is false, nothing changes. None means true.
        sums: The sums of the `Rule.summands` over the whole matrix, 0-d fp64 each.
        matrix_state: The state of kind "matrix", 0-d fp64 each, if there are sums.
        squares: If given, sums of squares of the step without decay are appended, 0-d fp64; 0 if nothing changes.
        rounded: The weights of lower precision, of the same shape, which master weights follow (`follow`) and are then
            rounded to; None if there are no master weights.
    """
    size = rule.lr * scale
    dtype = weights.dtype if weights.dtype == torch.float32 else torch.promote_types(weights.dtype, torch.float32)
    stored = () if rounded is None else (rounded,)
    update = update if update.is_contiguous() else _contiguous(update)
    for p, u, *views in in_cache(weights, update, *state.values(), *stored):
        low = views.pop() if stored else None
        if low is not None:
            follow(p, low)
        wide = spare(u, dtype).copy_(u)
        fresh = p if active is None and p.dtype == dtype else p.to(dtype, copy=True)
        updated = dict(zip(state, views if active is None else [value.clone() for value in views], strict=True))
        with_numbers = {**updated, **matrix_state} if matrix_state else updated
        rule.apply(fresh, wide, size, MappingProxyType(with_numbers), sums)
        if squares is not None:
            taken = wide.double().square_().sum()
            squares.append(taken if active is None else torch.where(active, taken, 0.0))
        if active is not None:
            torch.where(active, fresh.to(p.dtype), p, out=p)
            for old, new in zip(views, updated.values(), strict=True):
                torch.where(active, new, old, out=old)
        elif fresh is not p:
            p.copy_(fresh)
        if low is not None:
            low.copy_(p)


def follow(masters: Tensor, weights: Tensor, *, keep: Tensor | None = None) -> None:
    """Set master weights to their weights where these are not the rounded master weights, in place.

    Such an element was written by other code after it was rounded, such as ``load_state_dict`` or ``clamp_``. All other
    elements keep their precision. Each element is compared alone, so every sharding gives the same result, and a device
    needs no flag that the CPU waits for.

    Args:
        masters: Any shape, a dtype that holds all values of the weights exactly, written.
        weights: The same shape, on any device, read only.
        keep: Whether the master weights stay as they are, 0-d bool tensor; None means False.
    """
    for master, weight in in_cache(masters, weights.detach().to(masters.device)):
        if weight.device.type == "cpu":  # which reads faster than it writes, and can wait
            rounded = scratch("rounded", weight.shape, dtype=weight.dtype, device=weight.device).copy_(master)
            if torch.equal(*_in_words(rounded, weight)):
                continue
        else:
            rounded = master.to(weight.dtype)
        same = rounded == weight
        master.copy_(torch.where(same if keep is None else same | keep, master, weight))


def _in_words(*tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors as int64, several elements in each, which a CPU compares faster; or as they are."""
    if any(not t.is_contiguous() or t.nbytes % 8 or t.data_ptr() % 8 for t in tensors):
        return tensors
    return [t.view(-1).view(torch.int64) for t in tensors]


def summands(rule: Rule, weights: Tensor, update: Tensor, state: State, *, scale: float) -> Iterator[list[Tensor]]:
    """Yield the summands of a rule in fp64, of some elements at a time, to be added up by `numerics.exact`.

    Args:
        rule: The rule with `Rule.summands`.
        weights: Any shape, read only.
        update: Same shape, any real dtype, read only.
        state: The state of kind "weights", each tensor of the same shape, read only.
        scale: Update scale of the whole matrix.
    """
    size = rule.lr * scale
    dtype = torch.promote_types(weights.dtype, torch.float32)
    for p, u, *views in in_cache(weights, _contiguous(update), *state.values()):  # sums are exact, whatever the parts
        wide = spare(u, dtype).copy_(u)
        terms = rule.summands(p.to(dtype), wide, size, MappingProxyType(dict(zip(state, views, strict=True))))
        yield [term.double() for term in terms]


def side_by_side(role: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape and dtype as one, (n, *shape), in the thread's own memory."""
    first = tensors[0]
    shape = len(tensors), *first.shape
    stacked = scratch(f"side by side, {role}", shape, dtype=first.dtype, device=first.device)
    return torch.stack(list(tensors), out=stacked)


def give_back(stacked: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a `side_by_side` tensor back to their tensors, rounded to their dtype."""
    if stacked.dtype == tensors[0].dtype:
        torch.unbind_copy(stacked, out=tensors)
    else:
        torch._foreach_copy_(tensors, list(stacked.unbind()))


def spare(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory of a tensor's shape; if small, the thread's own, so that it costs no page faults."""
    if like.numel() > _CACHED:
        return torch.empty_like(like, dtype=dtype)
    return scratch("rule", like.shape, dtype=dtype, device=like.device)


def _contiguous(update: Tensor) -> Tensor:
    if update.is_contiguous() or update.device.type != "cpu":
        return update
    return scratch("update", update.shape, dtype=update.dtype, device=update.device).copy_(update)


def in_cache(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return the tensors in parts: of the cache's size on a CPU, where memory is the limit, larger ones on a device."""
    numel = tensors[0].numel()
    if numel <= _CACHED:
        return (tensors,)
    on_cpu = tensors[0].device.type == "cpu"
    size = _CACHED if on_cpu else _AT_ONCE_ON_A_DEVICE
    if numel > size and all(t.is_contiguous() for t in tensors):
        return zip(*(torch.split(t.view(-1), size) for t in tensors), strict=True)
    if numel <= size or on_cpu:
        return (tensors,)
    rows = max(1, size // (numel // len(tensors[0])))
    return zip(*(torch.split(t, rows) for t in tensors), strict=True)
