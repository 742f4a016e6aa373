"""Step memory: the modelled peak memory of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from muonmesh.comm.schedule import Stage
from muonmesh.layout import Plan
from muonmesh.layout.plan import NeededElements, Shapes
from muonmesh.report.traffic import Traffic


def step_memory(
    plan: Plan,
    moved: Traffic,
    needs_of: Callable[[int], NeededElements],
    joins: Callable[[int, tuple[int, int]], Hashable],
) -> int:
    """Return the modelled peak memory of a step in bytes: buffers of the exchange, as in `Budget`, and computation.

    Args:
        plan: The plan with its budget.
        moved: The traffic of the rank.
        needs_of: A function from an assignment to what a batch of such matrices needs.
        joins: See `Plan.batches`.
    """
    if plan.budget.host:
        return _host_elements(moved.stages) * plan.budget.itemsize
    computing_elements = partial(_computing, plan, needs_of, joins)
    peak = computing = computing_elements(moved.staying, lambda needs, shapes: needs(shapes, 1))
    results, under_way = 0, [(0, 0)]  # elements of results that are sent and received, by exchange
    for stage, after in itertools.zip_longest(moved.stages, moved.stages[1:]):
        assignments, elements = list(itertools.chain.from_iterable(stage.batches)), stage.numel
        coming = 0 if after is None else _gathering(after)
        in_squares = computing_elements(assignments, lambda needs, shapes: needs(shapes, 0))
        with_results = computing_elements(assignments, lambda needs, shapes: needs(shapes, 2))
        with_matrices = computing_elements(
            assignments, lambda needs, shapes: (needs(shapes, 0) + needs(shapes, 2)) // 2
        )
        if stage.gathers:
            arrived = max(_gathering(stage), 2 * elements + in_squares)
            peak = max(peak, arrived + coming + sum(under_way[0]))
        else:  # results of the previous bucket have arrived after the first portion
            peak = max(peak, max(with_results + sum(under_way[0]), with_matrices + elements) + coming)
        peak = max(peak, elements + coming + _passed_on(under_way, results))
        under_way = [(packed.sends, packed.receives) for packed in stage.back] or [(0, 0)]
        peak = max(peak, max(elements, computing) + sum(under_way[0]) + coming)
        if not stage.fits:  # all exchanges but the last one are over before the next bucket is computed
            peak = max(peak, _passed_on(under_way, elements) + coming)
            under_way = under_way[-1:]
        results = elements
    peak = max(peak, _passed_on(under_way, results))
    return peak * plan.budget.itemsize


def _gathering(stage: Stage) -> int:
    """Return the elements of the buffers to send, receive and assemble a bucket; 0 if nothing is gathered."""
    return stage.to_owners.sends + stage.to_owners.receives + stage.numel if stage.gathers else 0


def _passed_on(exchanges: Sequence[tuple[int, int]], elements: int) -> int:
    """Return the most elements in use by successive exchanges of results, each given as (sent, received).

    While one travels, the results of the previous exchange are written. The ``elements`` of the results are needed
    until nothing else is sent.
    """
    most, sizes = 0, [sent for sent, _ in exchanges]
    for number in range(1, len(exchanges)):
        results = elements if any(size != sizes[number - 1] for size in sizes[number:]) else 0
        most = max(most, exchanges[number - 1][1] + sum(exchanges[number]) + results)
    return most


def _computing(
    plan: Plan,
    needs_of: Callable[[int], NeededElements],
    joins: Callable[[int, tuple[int, int]], Hashable],
    numbers: Sequence[int],
    in_use: Callable[[NeededElements, Shapes], int],
) -> int:
    """Return the most elements in use at once by a batch; ``in_use`` says how many a batch uses."""
    size_of = lambda number, count: plan.batch_size(number, count, needs_of(number))  # noqa: E731
    fits = lambda number, shapes: plan.fits_together(number, shapes, needs_of(number))  # noqa: E731
    batches = plan.batches(numbers, size_of, joins, fits)
    return max((in_use(needs_of(batch[0]), plan.shapes(batch)) for batch in batches), default=0)


def _host_elements(stages: Sequence[Stage]) -> int:
    """Return the elements that a CPU keeps: two buffers of each kind, because buckets and exchanges take turns."""
    elements = 0
    for alternate in (stages[::2], stages[1::2]):
        elements += max(map(_gathering, alternate), default=0)
        elements += max((stage.numel for stage in alternate), default=0)
        backs = [stage.back for stage in alternate if stage.back]
        elements += max((max(p.sends for p in back) + max(p.receives for p in back) for back in backs), default=0)
    return elements
