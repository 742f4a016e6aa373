"""Stack: matrices of one shape that this rank alone holds, worked on by one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from muonmesh.comm.work import Local
from muonmesh.layout import Matrix
from muonmesh.numerics.rules import Rule, parts
from muonmesh.step.blocks import Momentum
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.ready import ReadyParameters

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a matrix beside others; this is cheaper than a few more calls
(measured)."""


@dataclass
class Stack:
    """Matrices of one shape and group with their state; each is stored as it is assembled, or transposed.

    On a CPU, small matrices are copied side by side unless they are adjacent already. Per-element operations on all of
    them then take as many calls as on a single matrix. On a device, one kernel reads all of them where they are stored.

    Attributes:
        matrices: Their numbers in the plan.
        rule: The rule of their group.
        columns: Contiguous tensors by name and key: one tensor for each matrix as it is stored, or one for several
            adjacent matrices. "gradient" is read. The others are written: "momenta" and "beside" are the state that
            the rule keeps as "momentum" and as "weights". "weights" has the master weights if there are any. "rounded"
            has the weights to which master weights are rounded.
    """

    matrices: Sequence[int]
    rule: Rule
    columns: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(ready: ReadyParameters, batch: Sequence[Local], *, apart: bool | None = None) -> Stack | None:
        """Return a batch of matrices of one shape, all of whose parameters are ready.

        Args:
            ready: The parameters of the step.
            batch: The matrices.
            apart: Whether each matrix has tensors of its own; None: only if the matrices are not all adjacent.

        Returns:
            The stack. None if a matrix is stored in pieces, has no gradient or state, or is stored differently from the
            others. Also None if the rule rounds stochastically or needs sums, since these rules take single matrices.
        """
        adjacents = _adjacent(ready, batch)
        apart = len(adjacents) > 1 if apart is None else apart
        group = adjacents[0].entry.member.group
        rule = ready.rules[group]
        assert rule is not None
        found = Stack([local.assignment for local in batch], rule)
        for adjacent in adjacents:
            other = adjacent.stored == "in pieces" or adjacent.entry.member.group != group
            if other or not found._add(adjacent, apart):
                return None
        columns = found.columns.values()
        full = {len(some) for some in columns} == {len(found.columns["weights", ""])}
        if not full or any(len({tensor.dtype for tensor in some}) > 1 for some in columns):
            return None
        return None if rule.stochastic_rounding is not None or rule.asks_for_sums() else found

    def _add(self, adjacent: _AdjacentMatrices, apart: bool) -> bool:
        """Add adjacent matrices of a parameter; return False if they have no gradient, no state, or int8 momentum."""
        entry = adjacent.entry
        gradient, momenta, weights, master = entry.gradient, entry.momenta, entry.weights, entry.master
        if gradient is None or momenta is None:
            return False
        held = {("gradient", ""): gradient, ("weights", ""): weights if master is None else master}
        if master is not None:
            held["rounded", ""] = weights
        for key, kept in momenta.items():
            if isinstance(kept, Momentum):
                return False
            held["momenta", key] = kept
        for key, beside in entry.beside.items():
            held["beside", key] = beside
        for name, storage in held.items():
            # The common case: a parameter that is one matrix needs no other view.
            whole = storage.shape == adjacent.shape
            self.columns.setdefault(name, []).extend((storage,) if whole else adjacent.of(storage, apart=apart))
        return True

    def fold(self, into: Tensor) -> None:
        """Fold the gradients into the momenta, and write the directions into a batch of matrices as they are stored."""
        found = self._together("gradient", "momenta")
        parts.fold(self.rule, found["gradient"][""], found["momenta"], into=into)
        self._give_back({"momenta": found["momenta"]})

    def apply(self, matrix: Matrix, updates: Tensor) -> None:
        """Decay and update the weights by a batch of results as they are stored; all matrices are like ``matrix``."""
        found, scale = self._together("weights", "beside", "rounded"), self.rule.scale(matrix.rows, matrix.cols)
        weights, beside, rounded = found["weights"][""], found["beside"], found["rounded"].get("")
        parts.apply(self.rule, weights, updates, beside, scale=scale, rounded=rounded)
        self._give_back(found)

    def _together(self, *names: str) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for (name, key), some in self.columns.items():
            if name in found:
                found[name][key] = some[0] if len(some) == 1 else parts.side_by_side(f"{name} {key}", some)
        return found

    def _give_back(self, together: Mapping[str, Mapping[str, Tensor]]) -> None:
        for (name, key), some in self.columns.items():
            if name in together and len(some) > 1:
                parts.give_back(together[name][key], some)


@dataclass(slots=True)
class _AdjacentMatrices:
    """Matrices of a batch that are adjacent in the storage of a parameter.

    Attributes:
        entry: The parameter.
        stored: How they are stored; see `Local.stored`.
        shape: The shape of each matrix, as it is stored.
        start: The place of their first element.
        count: The number of these matrices.
    """

    entry: ParameterStep
    stored: str
    shape: tuple[int, int]
    start: int
    count: int

    def of(self, storage: Tensor, *, apart: bool) -> Sequence[Tensor]:
        """Return views of the matrices in a contiguous storage: one view for all or, if ``apart``, one for each."""
        rows, cols = self.shape
        some = storage.view(-1)[self.start : self.start + self.count * rows * cols].view(self.count, rows, cols)
        return some.unbind() if apart else (some,)


def _adjacent(ready: ReadyParameters, batch: Sequence[Local]) -> list[_AdjacentMatrices]:
    found: list[_AdjacentMatrices] = []
    assignments, entries = ready.plan.assignments, ready.entries
    rows, cols = assignments[batch[0].assignment].matrix.shape
    for local in batch:
        entry, adjacent = entries[assignments[local.assignment].parameter], found[-1] if found else None
        assert entry is not None
        if (
            adjacent is not None
            and adjacent.entry is entry
            and adjacent.stored == local.stored
            and local.start == adjacent.start + adjacent.count * rows * cols
        ):
            adjacent.count += 1
        else:
            shape = (cols, rows) if local.stored == "transposed" else (rows, cols)
            found.append(_AdjacentMatrices(entry, local.stored, shape, local.start, 1))
    return found
