"""ByKernel: folds and applies all pieces of a table by one kernel launch, for rules and dtypes that have kernels.

So are gradients of zero found (`mark_nonzero`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.views import Elements
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row
from muonmesh.numerics.kernels import fused
from muonmesh.numerics.kernels.pinned_copies import rewrite, upload
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.rows import SEARCHED, PieceRows, Place, in_three_dims
from muonmesh.numerics.kernels.toolchain import DTYPES, is_usable
from muonmesh.numerics.kernels.triton_launch import is_watched
from muonmesh.numerics.rules import Rule
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.parameters import ReadyParameters, Snapshot


class _Launch(NamedTuple):
    """Rows of a table that one launch takes.

    Attributes:
        group: The number of their param group.
        buffered: Whether they are in a buffer.
        parameters: The places of their parameters in the table.
        rows: The rows.
        pieces: What the kernel reads of them.
    """

    group: int
    buffered: bool
    parameters: Sequence[int]
    rows: Sequence[Row]
    pieces: PieceRows


_Launches = tuple[list[tuple[_Launch, list[ParameterStep], list[Tensor]]], Sequence[Row]]
"""The launches of a table, each with its parameters and one tensor of each; and the rows that no launch takes."""


_Form = tuple[Any, ...]
"""The number of a param group, and the dtypes of a tensor of a parameter and of what is beside it."""

_NONZERO = "nonzero"


class Repeatable(NamedTuple):
    """Launches that fold and apply a batch, as they are started until something moves.

    Attributes:
        beside: The tensors that they read, besides buffers: `ByKernel.active` and others that are small.
        facts: What else they depend on.
        written: The tensors that they write.
    """

    beside: Sequence[Tensor]
    facts: tuple[object, ...]
    written: Sequence[Tensor]


@dataclass
class _Search:
    """The launches that find gradients other than zero, for one stream.

    Attributes:
        forms: `Snapshot.forms` of the gradients; None: that was unknown.
        launches: The launches.
        remaining: The rows that no launch takes.
        recordings: See `run_again`.
        version: `Snapshot.version` of the gradients.
        beside: The tensors on the device that the launches read, besides gradients, when this was their version.
        programs: The number of programs of each launch.
    """

    forms: object
    launches: list[_Launch]
    remaining: Sequence[Row]
    recordings: dict[Hashable, Any] = field(default_factory=dict)
    version: object = None
    beside: Sequence[Tensor] = ()
    programs: tuple[int, ...] = ()


def vectors_of_stream(vectors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return `StepPlan.vectors` as the current stream has written them: emptied if another stream was the last."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if vectors.get("where", ()) != stream:
        vectors.clear()
        vectors["where"] = stream
    return vectors


def mark_nonzero(
    table: PieceTable,
    gradients: Sequence[Tensor | None],
    vectors: dict[str, Any],
    nonzero: Tensor,
    snapshot: Snapshot | None,
) -> Sequence[Row]:
    """Mark matrices whose gradient is not zero by one launch for each dtype; return the rows that no kernel takes.

    Args:
        table: The pieces of all gradients on this rank.
        gradients: The gradients, as the table numbers them.
        vectors: See `vectors_of_stream`.
        nonzero: bool (matrices,), written.
        snapshot: The snapshot that has found the gradients in their forms; None if the step is not steady.
    """
    if not is_usable(nonzero.device):
        return table.rows

    def gradients_of(launch: _Launch) -> list[Tensor]:
        numbers = [*table.parameters]  # without those of which this rank stores no element
        in_order = [gradients[numbers[index]] for index in launch.parameters]
        return [gradient for gradient in in_order if gradient is not None]

    def run(nonzero: Tensor) -> None:
        for launch in launches:
            fused.mark_nonzero(launch.pieces, gradients_of(launch), nonzero)

    search: _Search | None = vectors.get(_NONZERO)
    version = snapshot and snapshot.version
    if search is None or snapshot is None or search.forms is not snapshot.forms:
        gradients_here = [gradients[number] for number in table.parameters]
        forms = tuple([None if gradient is None else (0, gradient.dtype) for gradient in gradients_here])
        launches, remaining = _divided(table, _NONZERO, forms, (), SEARCHED)
        search = vectors[_NONZERO] = _Search(snapshot and snapshot.forms, launches, remaining)
    launches = search.launches
    if version is None or search.version is not version:
        for launch in launches:
            launch.pieces.version = version
    if version is None or is_watched(nonzero):
        run(nonzero)
        return search.remaining
    if search.version is not version:
        located = [launch.pieces.of(gradients_of(launch)) for launch in launches]
        search.version, search.programs = version, tuple([place.programs for place in located])
        search.beside = [tensor for place in located for tensor in (place.table, place.bases)]
    run_again(search.recordings, run, [nonzero], search.programs, search.beside)
    return search.remaining


def _divided(
    table: PieceTable, kernel: str, forms: tuple[_Form | None, ...], buffers: tuple[torch.dtype, ...], *blocks: int
) -> tuple[list[_Launch], list[Row]]:
    """Return the launches for a table, and the rows that no launch takes; worked out once for tensors of these forms.

    Args:
        table: The table.
        kernel: The kernel.
        forms: The form of each parameter of the table; None: no kernel takes it. Rows of one form have a launch.
        buffers: The dtype of the buffers, if there are any.
        blocks: The number of blocks of one program, if it is not the usual one.
    """

    def make() -> tuple[list[_Launch], list[Row]]:
        rows_by_form: dict[tuple[_Form, bool], list[Row]] = {}
        remaining, launches = list[Row](), list[_Launch]()
        for row in table.rows:
            form, buffered = forms[table.parameters[row.parameter]], row.buffer != NOWHERE
            fits = in_three_dims(row.piece.shape, row.piece.storage_strides, row.strides) is not None
            if form is None or not fits or not {*form[1:], *(buffers if buffered else ())} <= {None, *DTYPES}:
                remaining.append(row)
            else:
                rows_by_form.setdefault((form, buffered), []).append(row)
        for ((group, *_), buffered), rows in rows_by_form.items():
            places, numbers = table.numbered(rows)
            pieces = PieceRows([_place_of(row, number) for row, number in zip(rows, numbers, strict=True)], *blocks)
            if len(pieces):
                launches.append(_Launch(group, buffered, places, rows, pieces))
        return launches, remaining

    result: tuple[list[_Launch], list[Row]] = table.once((kernel, buffers, forms), make)
    return result


class ByKernel:
    """Folds and applies pieces by one launch for each group and set of dtypes, and tells which rows it leaves.

    The launches of a table are worked out once. A step reads which tensors its parameters have now, unless all of them
    last from the step before.

    Args:
        ready: The parameters of the step.

    Attributes:
        kinds_of_rules: What launches depend on in the rules of the groups, besides the numbers in `factors`.
    """

    kinds_of_rules: list[tuple[object, ...]]

    def __init__(self, ready: ReadyParameters) -> None:
        self._ready, self._launches_by_table = ready, dict[object, _Launches]()
        self._lasting = object()  # as long as all tensors but gradients are where they were
        self._rules: Sequence[Rule | None] = []
        self.begin()

    @staticmethod
    def where_usable(ready: ReadyParameters) -> ByKernel | None:
        """Return an object for parameters whose device has kernels; None for other devices."""
        return ByKernel(ready) if is_usable(ready.device) else None

    def begin(self) -> None:
        """Begin a step of parameters that are ready."""
        rules = self._ready.rules
        if rules is not self._rules:
            self._rules, self._folding, self._adding = rules, [*map(_folds_as_muon, rules)], [*map(_adds, rules)]
            numbers = [(rule.momentum, rule.nesterov) if isinstance(rule, MuonRule) else () for rule in rules]
            self.kinds_of_rules = [*zip(map(type, rules), self._folding, self._adding, numbers, strict=True)]
        self._vectors = vectors_of_stream(self._ready.vectors, self._ready.device)
        for name in ("active", "factors"):  # of the step before
            self.__dict__.pop(name, None)
        if self._ready.version is None:
            self._launches_by_table.clear()

    def fold(self, elements: Elements) -> Sequence[Row]:
        """Fold gradients into momenta and write directions; return the rows that are left."""
        launches, remaining = self._launches("fold", elements, self._momentum)
        for launch, entries, momenta in launches:
            rule, buffers = self._muon(launch), elements.buffers if launch.buffered else ()
            operands = launch.pieces, _gradients(entries), momenta, buffers, self.active
            fused.fold(*operands, momentum=rule.momentum, nesterov=rule.nesterov)
        return remaining

    def apply(self, elements: Elements) -> Sequence[Row]:
        """Decay and update weights, and return the rows that are left."""
        launches, remaining = self._launches("apply", elements, self._weights)
        for launch, entries, weights in launches:
            keep, size = self.factors
            if self._ready.squares is not None:
                self._measure(elements, launch, size, self._ready.squares)
            fused.apply(launch.pieces, weights, _masters(entries), elements.buffers, self.active, keep=keep, size=size)
        return remaining

    def located(self, reads: Elements, writes: Elements) -> Repeatable | None:
        """Bring the addresses up to date that the launches for two tables read; None if they may do more or else."""
        folds, unfolded = self._launches("fold", reads, self._momentum)
        applies, remaining = self._launches("apply", writes, self._weights)
        if unfolded or remaining or not all([launch.buffered for launch, *_ in folds]):
            return None
        beside, facts, written = [self.active, *self.factors], list[object](), list[Tensor]()
        for launch, entries, momenta in folds:
            rule, located = self._muon(launch), launch.pieces.of(_gradients(entries), momenta, buffers=reads.buffers)
            beside += located.table, located.bases
            facts += located.programs, rule.momentum, rule.nesterov
            written += momenta
        for launch, entries, weights in applies:
            masters = _masters(entries)
            located = launch.pieces.of(weights, masters or weights, buffers=writes.buffers)
            beside += located.table, located.bases
            facts.append(located.programs)
            written += *weights, *masters
        return Repeatable(beside, tuple(facts), written)

    def _muon(self, launch: _Launch) -> MuonRule:
        rule = self._ready.rules[launch.group]
        assert isinstance(rule, MuonRule)
        return rule

    def _momentum(self, entry: ParameterStep) -> tuple[Tensor, Tensor | None] | None:
        """Return the momentum of a parameter that the kernel takes, and its gradient."""
        if entry.momenta is None or not self._folding[entry.member.group]:
            return None
        momentum = entry.momenta["momentum_buffer"]
        return (momentum, entry.gradient) if isinstance(momentum, Tensor) else None

    def _weights(self, entry: ParameterStep) -> tuple[Tensor, Tensor | None] | None:
        """Return the weights of a parameter that the kernel takes, and its master weights."""
        return (entry.weights, entry.master) if self._adding[entry.member.group] and entry.created else None

    def _launches(
        self,
        kernel: str,
        elements: Elements,
        column: Callable[[ParameterStep], tuple[Tensor, Tensor | None] | None],
    ) -> _Launches:
        """Return the launches for a table, and the rows that no launch takes.

        While every parameter lasts from step to step, so do its tensors, except for gradients.

        Args:
            kernel: The kernel.
            elements: The rows with their buffers.
            column: Returns a tensor of a parameter, and one beside it; None: no kernel takes it.
        """
        ready, table = self._ready, elements.table
        # A rule may have changed since the last step, so that the kernel no longer does what it does.
        key = kernel, table, *(self._folding if kernel == "fold" else self._adding)
        result = self._launches_by_table.get(key)
        if result is None:
            entries = [ready.entries[number] for number in table.parameters]
            pairs = [None if entry is None else column(entry) for entry in entries]
            matches = [(e, pair) if e and pair else None for e, pair in zip(entries, pairs, strict=True)]
            forms = tuple([None if m is None else (m[0].member.group, *map(_dtype, m[1])) for m in matches])
            launches, remaining = _divided(table, kernel, forms, tuple({buffer.dtype for buffer in elements.buffers}))
            result = [], remaining
            for launch in launches:
                matched = [match for index in launch.parameters if (match := matches[index])]
                result[0].append((launch, [entry for entry, _ in matched], [pair[0] for _, pair in matched]))
            if ready.codec is None:  # else these tensors last no longer than their matrices need them
                self._launches_by_table[key] = result
        for launch, *_ in result[0]:  # while all of these last, only gradients move
            launch.pieces.version = ready.version and (ready.version if kernel == "fold" else self._lasting)
        return result

    @cached_property
    def active(self) -> Tensor:
        """For each matrix whether anything is written, bool (n,), on the device; the same memory in every step."""
        nonzero, vectors = self._ready.nonzero, self._vectors
        if "active" not in vectors:
            vectors["active"] = torch.empty(len(nonzero), dtype=torch.bool, device=self._ready.device)
        active: Tensor = vectors["active"]
        if nonzero is not active:
            rewrite(
                active,
                nonzero if isinstance(nonzero, Tensor) else torch.tensor(nonzero, dtype=torch.bool, device="cpu"),
            )
        return active

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """For each matrix the factors of weights and of updates, fp32 (n,) each; in the same memory in every step."""
        ready, vectors = self._ready, self._vectors
        if "factors" not in vectors:
            kinds: dict[tuple[int | None, int, int], int] = {}  # most matrices are of few groups and shapes
            places = []
            for assignment in ready.plan.assignments:
                entry, matrix = ready.entries[assignment.parameter], assignment.matrix
                kind = None if entry is None else entry.member.group, matrix.rows, matrix.cols
                places.append(kinds.setdefault(kind, len(kinds)))
            factors = torch.empty(2, len(places), dtype=torch.float32, device=ready.device)
            vectors.update(factors=factors, keep=factors[0], size=factors[1], kinds=list(kinds))
            vectors["places"] = upload(places, dtype=torch.int64, device=ready.device)
        if vectors.get("rules") is not ready.rules:
            numbers: tuple[list[float], list[float]] = [], []
            for group, rows, cols in vectors["kinds"]:
                rule, keep, size = ready.rules[group] if group is not None and self._adding[group] else None, 1.0, 0.0
                if rule is not None:
                    keep = 1 - float(rule.lr) * rule.weight_decay
                    size = float(rule.lr) * rule.scale(rows, cols)  # a rule may have a scale of its own
                numbers[0].append(keep)
                numbers[1].append(size)
            uploaded = upload(numbers, dtype=torch.float64, device=ready.device)
            vectors["factors"].copy_(uploaded[:, vectors["places"]])
            vectors["rules"] = ready.rules
        return vectors["keep"], vectors["size"]

    def _measure(self, elements: Elements, launch: _Launch, size: Tensor, squares: dict[int, list[Tensor]]) -> None:
        """Add up the squares of the steps of a launch, without decay, each element counted once among its copies."""
        device, numbers = self._ready.device, [row.assignment for row in launch.rows]
        views = [view for row in launch.rows if (view := elements.view(row)) is not None]
        norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
        places = upload(numbers, dtype=torch.int64, device=device)
        copies = [self._ready.of(number).entry.member.storage.copies for number in numbers]
        steps = torch.where(self.active[places], size[places] * norms, 0.0)  # also where a skipped step is not finite
        steps = steps.square() / upload(copies, dtype=torch.float64, device=device)
        squares.setdefault(launch.group, []).append(steps.sum())


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _gradients(entries: Sequence[ParameterStep]) -> list[Tensor]:
    return [gradient for entry in entries if (gradient := entry.gradients[entry.number]) is not None]


def _masters(entries: Sequence[ParameterStep]) -> list[Tensor]:
    return [master for entry in entries if (master := entry.master) is not None]


def _place_of(row: Row, tensor: int) -> Place:
    in_storage, in_buffer = (row.piece.storage_start, row.piece.storage_strides), (row.start, row.strides)
    buffer = max(row.buffer, 0)
    if row.buffer == NOWHERE:
        in_buffer = in_storage
    return Place(tensor, buffer, row.assignment, row.piece.shape, *in_storage, *in_buffer)


def _folds_as_muon(rule: Any) -> bool:
    """Whether the kernel folds as a rule does."""
    return isinstance(rule, MuonRule) and (type(rule).fold, type(rule).direction) == (MuonRule.fold, MuonRule.direction)


def _adds(rule: Any) -> bool:
    """Whether a rule only decays weights in full and subtracts a multiple of the update, as the kernel does."""
    if not isinstance(rule, Rule) or rule.overrides("apply", "decay", "summands"):
        return False
    return rule.decay_mode == "full" and rule.stochastic_rounding is None
