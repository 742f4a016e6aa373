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
"""Elements of a matrix up to which a CPU copies it beside others, which is cheaper than a few calls more (measured)."""


@dataclass
class Stack:
    """Matrices of one shape and group with their state; each is stored as it is assembled, or transposed.

    A CPU copies small ones side by side, unless they lie so, and what is done element by element takes as many calls as
    for one. A device hands them to one kernel as they lie.

    Attributes:
        matrices: Their numbers in the plan.
        rule: That of their group.
        columns: Contiguous tensors by name and key: one for each matrix, as it is stored, or for several that lie one
            after the other. "gradient" is read. These are written: "momenta" and "beside", the state that the rule
            keeps as "momentum" and as "weights"; "weights", the masters if there are any; and "rounded", the weights to
            which masters are rounded.
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
            apart: Whether each matrix has tensors of its own; None: unless all lie one after the other.

        Returns:
            None where a matrix is stored in pieces, has no gradient or state, or is not stored as the others are; or
            where the rule rounds stochastically or asks for sums, which takes the matrices one by one.
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
        """Add matrices that lie one after the other in a parameter; False if they lack something."""
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
            # The common case, of a parameter that is one matrix, needs no other view of it.
            whole = storage.shape == adjacent.shape
            self.columns.setdefault(name, []).extend((storage,) if whole else adjacent.of(storage, apart=apart))
        return True

    def fold(self, into: Tensor) -> None:
        """Fold the gradients into the momenta, and write the directions into a batch of the shape of what is stored."""
        found = self._together("gradient", "momenta")
        parts.fold(self.rule, found["gradient"][""], found["momenta"], into=into)
        self._give_back({"momenta": found["momenta"]})

    def apply(self, matrix: Matrix, updates: Tensor) -> None:
        """Decay and update the weights by a batch of results, in the shape of what is stored, of matrices like one."""
        found, scale = self._together("weights", "beside"), self.rule.scale(matrix.rows, matrix.cols)
        parts.apply(self.rule, found["weights"][""], updates, found["beside"], scale=scale)
        self._give_back({**found, "rounded": found["weights"]})

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
            elif name in together and together[name][key] is not some[0]:  # masters, which lie side by side
                some[0].copy_(together[name][key])


@dataclass(slots=True)
class _AdjacentMatrices:
    """Matrices of a batch that lie one after the other in the storage of a parameter.

    Attributes:
        entry: The parameter.
        stored: As `Local.stored` says.
        shape: Of each matrix, as it is stored.
        start: The place of their first element.
        count: How many there are.
    """

    entry: ParameterStep
    stored: str
    shape: tuple[int, int]
    start: int
    count: int

    def of(self, storage: Tensor, *, apart: bool) -> Sequence[Tensor]:
        """Return their elements in a contiguous storage: in one tensor or, ``apart``, one each, as they are stored."""
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
