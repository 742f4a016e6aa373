"""Forecast: the cost of a step of Muon on a cluster, computed from names, shapes and layouts only.

The plan is the real plan, made by `make_plan` as on every rank before its first step. Figures that follow from the plan
are counted: owners, FLOPs, bytes on the wire, collectives, and memory of weights, gradients and state. Launches,
elementwise bytes and further memory of a step are modelled from the counts, by the constants below. The constants were
fitted to dry runs of the real step (`tests/device/dry_run.py`); `tests/tools/test_forecast.py` compares the two.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from muonmesh.comm.communicator import Counts
from muonmesh.comm.gradients import PARAMETER_GRAD, GradientSource
from muonmesh.comm.storage import Storage, local_of
from muonmesh.comm.to_owners import ToOwners
from muonmesh.errors import explain_error
from muonmesh.layout import (
    Budget,
    Elementwise,
    Layout,
    MatrixSpec,
    Parameter,
    Plan,
    make_plan,
    split_matrices,
)
from muonmesh.layout.factored_state import size_of
from muonmesh.numerics.kernels.product_table import SMALL_COLS, SMALL_ROWS, TORCH_FROM
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import RULES, MuonRule, Rule, by_defaults, is_known, is_matrix_rule
from muonmesh.numerics.working_memory import Needs
from muonmesh.report.explain import imbalance
from muonmesh.report.traffic import Traffic, traffic
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.planning import flops_of
from muonmesh.step.state_placement import state_layouts_of
from muonmesh.tools.forecasts.device_rates import DeviceRates, Timed
from muonmesh.tools.forecasts.step_memory import step_memory

WIRE = 2  # bytes: directions travel and are orthogonalized in bf16
STATE = 4  # bytes: Muon's momentum is fp32 whatever the weights are

# Launches of operators of torch, counted by dry runs: for a step, extra if anything travels, for each batch of matrices
# then, and with replicas; and of our own kernels: for a step, for a bucket that travels, for orthogonalizing a batch,
# and for each shape in it.
LAUNCHES_OF_A_STEP, LAUNCHES_OF_TRAVEL, LAUNCHES_OF_A_BATCH, LAUNCHES_OF_REPLICAS = 6, 10, 2, 4
KERNELS_OF_A_STEP, KERNELS_OF_A_BUCKET = 3, 3
KERNELS_OF_A_BATCH = {"gram": 14, "standard": 5, "deflated": 22}
KERNELS_OF_A_SHAPE = {"gram": 7, "standard": 13, "deflated": 11}
# Of a shape; large ones are torch's, one launch for each matrix.
PLAIN_PRODUCTS = {"gram": 1, "standard": 4, "deflated": 0}
VIEWS_OF_A_STEP, VIEWS_OF_A_BATCH, VIEWS_OF_A_MATRIX = 90, 20, (0, 9)  # that stays, that travels
VIEWS_OF_A_PLAIN_PRODUCT = 4  # of torch's
OPERATIONS_OF_DEFLATION, VIEWS_OF_DEFLATION = 16, 50  # of torch's, for a batch
VIEWS_IN_ONE_MEMORY = 45, 7  # more: of a batch that shares a memory with its results; of torch's products then
STEPPED_AT_ONCE = 320 * 2**16  # elements that one launch of AdamW's multi-tensor operation steps
# Bytes read and written by everything except products, for each element that a rank orthogonalizes, counted by dry
# runs.
BYTES_OF_AN_OWNED_ELEMENT = 1
BYTES_OF_AN_ASSEMBLED_ELEMENT = 8  # on top of it, where it arrives from other ranks and leaves for them
ADAMW_PASSES = 7  # numbers that AdamW moves for each element: four reads (weight, gradient, moments), three writes
NCCL_OF_A_PEER = 3_280_000_000 // 7  # bytes; seven peers of a machine with eight H100 (NVIDIA/nccl#1685)
# torch.optim.Muon, counted by dry runs: launches and views of a matrix; it multiplies all of every square, by cuBLAS.
LAUNCHES_OF_TORCH, VIEWS_OF_TORCH, STEPS_OF_TORCH = 33, 12, 5
MUON = by_defaults(MuonRule)


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    Attributes:
        name: Canonical name.
        layout: The layout of the parameter.
        matrices: How the parameter splits into matrices; None if AdamW updates it.
    """

    name: str
    layout: Layout
    matrices: MatrixSpec | None


@dataclass(frozen=True)
class Forecast(Timed):
    """The cost of one step on one rank, and the balance of the work over ranks.

    Attributes:
        plan: The plan with the owner of each matrix; the same on every rank.
        rank: The rank that this forecast describes.
        owned: Numbers of the assignments that this rank orthogonalizes.
        traffic: The matrices that this rank sends and receives, and state by row, column or matrix, in fp32; counted.
        stored: Bytes that this rank stores from step to step, by their kind; "momentum" is the state of the rule.
            Counted.
        exchange: Peak memory of a step in addition to ``stored``, in bytes; modelled.
        nccl: Bytes that NCCL allocates for the first all-to-all; modelled.
        launches: Number of kernel launches; modelled.
        kernels: Number of launches of muonmesh's own kernels among them; modelled.
        views: Number of operations that start no kernel; modelled.
        matrices: Number of Muon's parameters.
        slow_flops: FLOPs weighted by the lower speed of small products, see `DeviceRates.weight_of`.
        elementwise_bytes: Bytes read and written by everything except matrix products; modelled.
        rates: The rates of the model of time.
        gradients: The traffic that moves gradients to owners, if they do so; counted.
    """

    plan: Plan
    rank: int
    owned: tuple[int, ...]
    traffic: Traffic
    stored: dict[str, int]
    exchange: int
    nccl: int
    launches: int
    kernels: int
    views: int
    matrices: int
    slow_flops: float
    elementwise_bytes: int
    rates: DeviceRates
    gradients: Counts

    @property
    def flops(self) -> int:
        """FLOPs of the orthogonalizations of this rank."""
        return self.plan.loads[self.rank]

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank divided by the mean of all ranks; 1 is perfect."""
        return imbalance(self.plan.loads)

    @property
    def collectives(self) -> int:
        """Number of collectives in which this rank takes part, including the flags before a step."""
        return self.traffic.collectives + self.traffic.carried.collectives + (len(self.plan.ranks) > 1)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a step; flags are not counted."""
        return self.traffic.sent.total() * WIRE + self.traffic.carried.sent * STATE

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank receives in a step; flags are not counted."""
        return self.traffic.received * WIRE + self.traffic.carried.received * STATE

    @property
    def messages(self) -> int:
        """Number of ranks that this rank's all-to-alls reach, summed over the all-to-alls."""
        return self.traffic.messages

    def seconds_of_torch(self, *, published: bool = True) -> float:
        """Modelled seconds of torch.optim.Muon without communication; every rank computes every matrix."""
        shapes = [assignment.matrix.shape for assignment in self.plan.assignments]
        flops = [STEPS_OF_TORCH * 2 * rows * rows * (2 * cols + rows) for rows, cols in shapes]
        weights = [self.rates.weight_of(rows * rows, by_triton=False) for rows, _ in shapes]
        products = sum(map(operator.mul, flops, weights)) / self.rates.published
        seconds_each = LAUNCHES_OF_TORCH * self.rates.operation + VIEWS_OF_TORCH * self.rates.view
        return max(products if published else sum(flops) / self.rates.flops, len(shapes) * seconds_each)

    def seconds_of_adamw(self) -> float:
        """Modelled seconds of fused torch.optim.AdamW for all parameters."""
        return ADAMW_PASSES * self.stored["weights"] / self.rates.bytes


def forecast(
    weights: Sequence[Weight],
    *,
    rank: int | None = None,
    rates: DeviceRates | None = None,
    itemsize: int = 4,
    memory_budget_mb: float | None = None,
    to_owners: bool = False,
    rule: str = "muon",
    machine: int = 0,
) -> Forecast:
    """Plan a model and return the cost of a step, with the default settings of Muon and of the rule for its matrices.

    Args:
        weights: All parameters, in an order that is the same on every rank.
        rank: The rank to report. Default: the rank with the most FLOPs.
        rates: The rates of the device. Default: one H100.
        itemsize: Bytes of one number of weights, gradients, and AdamW's moments.
        memory_budget_mb: The memory in MiB that a step may take; see `Muon`.
        to_owners: Whether replicas add up gradients at owners, as with ``gradients="to_owners"``.
        rule: The rule of matrices. Its FLOPs, state and traffic are counted; launches and bytes are those of Muon.
        machine: Number of ranks of each machine; 0: all ranks are on one machine.

    Raises:
        LayoutError: a layout, or the matrices of a weight, do not cover the weight exactly once.
        ValueError: ``matrices`` of a weight is no valid split, or does not fit its shape.
    """
    tensors = {
        w.name: torch.empty(0, dtype=torch.float32 if itemsize == 4 else torch.bfloat16, device="meta") for w in weights
    }
    source = ToOwners() if to_owners else PARAMETER_GRAD
    matrices = [w for w in weights if w.matrices is not None]
    places = source.momentum_storages([(w.name, tensors[w.name], Storage(w.layout, w.layout.shape)) for w in matrices])
    chosen = _rule(rule)
    parameters = [
        muon_parameter(w.name, w.layout, w.matrices, p.layout, chosen) for w, p in zip(matrices, places, strict=True)
    ]
    elementwise = [Elementwise(weight.name, weight.layout) for weight in weights if weight.matrices is None]
    ranks = sorted(set[int]().union(*{id(w.layout.ranks): w.layout.ranks for w in weights}.values()))
    budget = Budget.of(parameters, memory_budget_mb, itemsize=WIRE, host=False)
    plan = make_plan(parameters, ranks=ranks, budget=budget, elementwise=elementwise, machine=machine)
    if rank is None:
        rank = max(plan.ranks, key=lambda r: (plan.loads[r], -r))
    moved = traffic(plan, rank)
    stored = sum(math.prod(p.target.local_shape(rank)) for p in parameters)
    others = sum(math.prod(other.target.local_shape(rank)) for other in elementwise)
    owned = tuple(number for number, assignment in enumerate(plan.assignments) if assignment.owner == rank)
    batches = [[number for batch in stage.batches for number in batch] for stage in moved.stages]
    rounds, kernels, by_torch, more_views, slow_flops = _products(plan, chosen, [*batches, moved.staying])
    assembled = sum(stage.numel for stage in moved.stages)
    buckets = len(moved.stages) if any(batches) else 0
    kernels += KERNELS_OF_A_STEP + moved.collectives + KERNELS_OF_A_BUCKET * buckets
    views = VIEWS_OF_A_STEP + VIEWS_OF_A_BATCH * rounds + more_views
    views += len(parameters) * VIEWS_OF_A_MATRIX[moved.messages > 0]
    launches = by_torch + LAUNCHES_OF_A_STEP + -(-others // STEPPED_AT_ONCE)
    launches += (LAUNCHES_OF_TRAVEL + LAUNCHES_OF_A_BATCH * rounds) * (moved.messages > 0)
    launches += LAUNCHES_OF_REPLICAS * any(p.target.copies() > 1 for p in parameters)
    staying_elements = sum(plan.assignments[number].matrix.numel for number in moved.staying)
    weight_bytes = (stored + others) * itemsize
    momentum = _state_elements(chosen, plan, rank) * STATE
    stored_bytes = {"weights": weight_bytes, "gradients": weight_bytes, "momentum": momentum}
    stored_bytes["AdamW's moments"] = 2 * others * itemsize
    # Gradient, momentum read and written, direction; result, weight read and written.
    elementwise_bytes = BYTES_OF_AN_OWNED_ELEMENT * (assembled + staying_elements)
    elementwise_bytes += BYTES_OF_AN_ASSEMBLED_ELEMENT * assembled
    elementwise_bytes += stored * (2 * itemsize + 2 * STATE + itemsize + 2 * WIRE) + others * ADAMW_PASSES * itemsize
    return Forecast(
        plan,
        rank,
        owned,
        moved,
        stored_bytes,
        step_memory(plan, moved, partial(_needs, plan, chosen), _joins),
        NCCL_OF_A_PEER * min(7, len(plan.ranks) - 1) * (moved.messages > 0),
        launches + kernels,
        kernels,
        views,
        len(parameters),
        slow_flops,
        elementwise_bytes,
        rates or DeviceRates(),
        _gradients(source, weights, tensors, rank, budget.gradient_bytes),
    )


def _products(plan: Plan, rule: Rule, buckets: Sequence[Sequence[int]]) -> tuple[int, int, int, int, float]:
    """Return how many batches these matrices are, of the package's kernels, torch's products, views, weighted FLOPs."""
    rounds, kernels, by_torch, operations, views, slow_flops = 0, 0, 0, 0, 0, 0.0
    size_of = lambda number, count: plan.batch_size(number, count, _needs(plan, rule, number))  # noqa: E731
    fits = lambda number, shapes: plan.fits_together(number, shapes, _needs(plan, rule, number))  # noqa: E731
    for batch in (batch for numbers in buckets for batch in plan.batches(numbers, size_of, _joins, fits)):
        shapes = plan.shapes(batch)
        _, *shape = shapes[0]
        rounds += 1
        form = _form(*shape)
        method = "deflated" if form.deflated else form.method
        kernels += 1 if _is_small(*shape) else KERNELS_OF_A_BATCH[method] + KERNELS_OF_A_SHAPE[method] * len(shapes)
        if min(shape) >= TORCH_FROM[torch.float16]:
            kernels -= PLAIN_PRODUCTS[method] * len(shapes)
            by_torch += PLAIN_PRODUCTS[method] * len(batch)
            if plan.memories(batch[0]) == 1:  # the last product too
                kernels += len(batch) - len(shapes)
                views += VIEWS_IN_ONE_MEMORY[1] * PLAIN_PRODUCTS[method] * len(batch)
        views += VIEWS_IN_ONE_MEMORY[0] * (plan.memories(batch[0]) == 1) + VIEWS_OF_DEFLATION * (form.deflated > 0)
        operations += OPERATIONS_OF_DEFLATION * (form.deflated > 0)
        weight = DeviceRates.weight_of(len(batch) * shape[0] ** 2, by_triton=True)
        slow_flops += sum(plan.assignments[number].flops for number in batch) * weight
    views += VIEWS_OF_A_PLAIN_PRODUCT * by_torch
    return rounds, kernels, by_torch + operations, views, slow_flops


def _is_small(rows: int, cols: int) -> bool:
    """Whether one launch does all steps."""
    return rows <= SMALL_ROWS and cols <= SMALL_COLS


@cache
def _form(rows: int, cols: int) -> Orthogonalizer:
    """Return how a GPU orthogonalizes such a matrix by default, but for who multiplies, which needs the GPU."""
    defaults: Any = {"coefficients": "auto", "steps": None, "method": "auto", "kernels": "torch"}
    return Orthogonalizer.of(rows, cols, **defaults, dtype=torch.bfloat16, device=torch.device("cuda"))


def _needs(plan: Plan, rule: Rule, number: int) -> Needs:
    shape = plan.assignments[number].matrix.shape
    in_place = rule.orthogonalizes and not rule.sees_direction and _joins(number, shape) != shape
    return replace(_form(*shape).needs, in_place=in_place)


def _joins(number: int, shape: tuple[int, int]) -> Hashable:
    return shape if _is_small(*shape) else _form(*shape).joins or shape


def gradients_to_owners(
    owners: Mapping[Tensor, int], buckets: int, replicated: Collection[Tensor], *, copy: int, copies: int
) -> Counts:
    """Return the traffic of gradients for a step: of matrices to their owners, of AdamW's parameters to all.

    Args:
        owners: The owners of the matrices (`ToOwners.owners`).
        buckets: The number of buckets of matrices.
        replicated: All parameters with replicas.
        copy: The number of the replica for which to count.
        copies: The number of replicas.
    """
    if copies == 1:
        return Counts()
    shared = [local_of(tensor) for tensor in replicated if tensor not in owners]
    averaged = 2 * sum(local.nbytes for local in shared) * (copies - 1) // copies
    sizes = [0] * copies
    for tensor in replicated:
        if tensor in owners:
            sizes[owners[tensor]] += local_of(tensor).nbytes
    return Counts(
        collectives=buckets + 2 * len({(local.dtype, local.device) for local in shared}),
        bytes_sent=averaged + sum(sizes) - sizes[copy],
        bytes_received=averaged + (copies - 1) * sizes[copy],
    )


def _gradients(
    source: GradientSource, weights: Sequence[Weight], tensors: Mapping[str, Tensor], rank: int, bucket_bytes: int
) -> Counts:
    """Return the traffic that the source of gradients causes itself on one rank."""
    several = [weight for weight in weights if weight.layout.copies() > 1]
    replicated = {tensors[weight.name].resize_(weight.layout.local_shape(rank)): weight.name for weight in several}
    least = min((weight.layout for weight in several), key=lambda layout: layout.copies(), default=None)
    if least is None or not isinstance(source, ToOwners):
        return Counts()
    buckets = len(source.buckets_of(replicated, least.copies(), bucket_bytes))
    copy = least.replica_number(rank)
    return gradients_to_owners(source.owners, buckets, replicated, copy=copy, copies=least.copies())


def muon_parameter(
    name: str, layout: Layout, spec: MatrixSpec, momentum: Layout | None = None, rule: Rule = MUON
) -> Parameter:
    """Return a parameter for the planner, with the default settings of a rule.

    Args:
        name, layout, spec: The name, layout and split of the parameter.
        momentum: The layout of its momentum. Default: ``layout``.
        rule: The rule, with its default settings.
    """
    matrices = split_matrices(name, layout.shape, spec)
    costs = {size: flops_of(rule, *size, _form(*size)) for size in {matrix.shape for matrix in matrices}}
    work = tuple(costs[matrix.shape] for matrix in matrices)
    meta = torch.empty(0, dtype=torch.float32, device="meta")
    stored, state_stored = (Storage(placed, layout.shape) for placed in (layout, momentum or layout))
    (layouts,) = state_layouts_of(rule.keeps(), [OptimizedParameter(name, meta, stored, state_stored, spec)])
    beside = tuple(state.factored for state in layouts.values() if state.factored is not None)
    return Parameter(name, momentum or layout, layout, matrices, work, "by default", beside, rule.count_of_sums())


def _rule(name: str) -> Rule:
    """Return a rule with its default settings.

    Raises:
        ValueError: there is no rule of this name, or it is no rule of matrices.
    """
    if not (is_known(name) and is_matrix_rule(name)):
        needed = f"one of {', '.join(registered for registered in RULES if is_matrix_rule(registered))}"
        write = "For a rule of your own, install a package that declares it under the entry points muonmesh.rules"
        raise ValueError(explain_error("rule", repr(name), needed, write))
    return by_defaults(cast(type[Rule], RULES[name]))


def _state_elements(rule: Rule, plan: Plan, rank: int) -> int:
    """Return how many numbers of a rule's state a rank keeps."""
    kinds = list(rule.keeps().values())
    elements = 0
    for parameter in plan.parameters:
        places = {"momentum": parameter.momentum_storage, "weights": parameter.target}
        elements += sum(math.prod(places[kind].local_shape(rank)) for kind in kinds if kind in places)
        beside = (factored.layout for factored in parameter.factored_states if not factored.at_owner)
        elements += sum(math.prod(layout.local_shape(rank)) for layout in beside)
    owned = [assignment.matrix for assignment in plan.assignments if assignment.owner == rank]
    at_owner = [kind for kind in kinds if "×" in kind]
    return elements + sum(math.prod(size_of(kind, matrix.rows, matrix.cols)) for matrix in owned for kind in at_owner)
