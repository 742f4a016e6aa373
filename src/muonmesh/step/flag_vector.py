"""FlagVector: the flags by which the ranks of a connected set agree before any rank writes. Flags: the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from muonmesh.comm.gradients import partial_axes
from muonmesh.layout import Elementwise, Parameter, Plan
from muonmesh.numerics.kernels.memory import pinned, upload

TAIL = ("skip", "overflow", "moves", "error", "replan", "stays")
"""Flags of a rank rather than of a parameter.

"skip": this step shall change nothing. "overflow": the rank's GradScaler has found an overflow. "moves": every learning
rate is 0, and a gradient of AdamW's parameters is not zero, so this is not the step that only creates state. "error":
the rank found an error. "replan": the rank's parameters have changed since they were planned. "stays": they have not
changed. If only some ranks have changed, both flags are set after the reduction."""

DIGEST = 16
"""Bytes by which ranks compare their settings: 8 of values that the CPU knows, 8 of values that only the device
knows."""


class HasGradient(Protocol):
    """Any object with the gradient of one parameter, or None, as a `ParameterStep` has."""

    gradient: Tensor | None


class Constants(NamedTuple):
    """Numbers of a `FlagVector` that never change, kept as tensors on a device.

    Attributes:
        replicated: `FlagVector.replicated`, uint8.
        owners: `FlagVector.owners`, int64.
        axes: For each byte that says how a gradient is placed, the number of its parameter, int64.
        stored: For each byte of the digests, whether this rank belongs to the digest's set of ranks, uint8.
    """

    replicated: Tensor
    owners: Tensor
    axes: Tensor
    stored: Tensor


@dataclass(frozen=True)
class FlagVector:
    """The place of each flag in the vector that ranks with shared parameters reduce by maximum.

    The parts of the vector have the same length on every rank. "nonzero" is a flag for each Matrix. "present" and
    "missing" say for each parameter whether a rank has its gradient or lacks it; with replicas, there is one pair of
    flags for each shard. "said" has bytes that must be equal on all ranks that set them, and "inverse" has 255 minus
    each byte, so that the two maxima add up to 255 only if all these ranks agree. The flags of `TAIL` come last. The
    bytes of "said" are: for each axis of a mesh with replicas, how the gradient is placed (1: whole; more: 1 + its
    index in `REDUCTIONS`), and then `DIGEST` bytes of settings for each set of ranks that share parameters.

    Attributes:
        matrices: Number of Matrices of the plan.
        mine: For each parameter, Muon's first and then AdamW's, the flags in "present" that this rank sets.
        replicated: For each flag in "present" whether all replicas must have the same value.
        owners: For each flag in "present" the number of its parameter.
        axes: Parameters whose gradient may be partial: each with its number, its first byte in "said", and how many
            bytes it has there, one for each axis of its mesh.
        shared: For each set of ranks that share parameters the numbers of those parameters.
        stored: For each of these sets whether this rank belongs to it.
    """

    matrices: int
    mine: tuple[tuple[int, ...], ...]
    replicated: tuple[bool, ...]
    owners: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]
    shared: tuple[tuple[int, ...], ...]
    stored: tuple[bool, ...]
    _constants: dict[torch.device, Constants] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(plan: Plan, rank: int) -> FlagVector:
        """Lay out the flags of a plan; only ``mine`` and ``stored`` differ between the ranks of the connected set."""
        parameters: list[Parameter | Elementwise] = [*plan.parameters, *plan.elementwise]
        mine, owners, replicated = list[tuple[int, ...]](), list[int](), list[bool]()
        shared: dict[tuple[int, ...], list[int]] = {}
        axes, width = list[tuple[int, int, int]](), 0
        for number, parameter in enumerate(parameters):
            target = parameter.target
            several = target.copies() > 1
            first, count = len(replicated), target.part_count() if several else 1
            parts = target.parts(rank) if several and rank in target.ranks else (0,)
            mine.append(tuple(first + part for part in parts))
            owners += [number] * count
            replicated += [several] * count
            if several and len(target.ranks) > 1:
                mesh = getattr(target, "mesh", ())
                axes.append((number, width, len(mesh)))
                width += len(mesh)
            ranks = tuple(target.ranks)
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(number)
        return FlagVector(
            len(plan.assignments),
            tuple(mine),
            tuple(replicated),
            tuple(owners),
            tuple(axes),
            tuple(map(tuple, shared.values())),
            tuple(rank in ranks for ranks in shared),
        )

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The place of each part of the vector, by name."""
        lengths = {
            "nonzero": self.matrices,
            **dict.fromkeys(("present", "missing"), len(self.replicated)),
            **dict.fromkeys(("said", "inverse"), self.width + DIGEST * len(self.shared)),
            **dict.fromkeys(TAIL, 1),
        }
        places, start = dict[str, slice](), 0
        for name, length in lengths.items():
            places[name] = slice(start, start + length)
            start += length
        return places

    @property
    def width(self) -> int:
        """The number of bytes that say how gradients are placed."""
        return sum(count for _, _, count in self.axes)

    def counted(self, entries: Sequence[HasGradient | None]) -> tuple[list[int], list[int]]:
        """Return this rank's "present" and "missing", one after the other, and its bytes of placements."""
        present, missing = [0] * len(self.replicated), [0] * len(self.replicated)
        for places, entry in zip(self.mine, entries, strict=True):
            if entry is not None:
                found = missing if entry.gradient is None else present
                for place in places:
                    found[place] = 1
        placed = [0] * self.width
        for number, first, count in self.axes:
            entry = entries[number]
            if entry is not None and entry.gradient is not None:
                over = partial_axes(entry.gradient)
                over = (0,) * (count - len(over)) + over  # replicas outside a DTensor's mesh stand in front
                placed[first : first + count] = [1 + op for op in over]
        return present + missing, placed

    def vector(
        self,
        nonzero: Tensor,
        entries: Sequence[HasGradient | None],
        settings: Tensor,
        tail: Mapping[str, bool | Tensor | None],
    ) -> Tensor:
        """Return this rank's flags, uint8 on the device of ``nonzero``.

        Args:
            nonzero: uint8, for each Matrix whether this rank has a non-zero gradient in it.
            entries: The parameters with their gradients, as the plan numbers them.
            settings: uint8, `DIGEST` bytes for each shared set. The bytes of sets without this rank do not count.
            tail: The flags of `TAIL` that may be set. The CPU does not wait for tensors on the device.
        """
        device, on_host = nonzero.device, settings.device.type == "cpu"
        counted, placed = self.counted(entries)
        told = placed + (settings.tolist() if on_host else [0] * len(settings))
        says = [byte > 0 for byte in placed] + [flag and on_host for flag in self.stored for _ in range(DIGEST)]
        said = [flag * byte for flag, byte in zip(says, told, strict=True)]
        inverse = [flag * (255 - byte) for flag, byte in zip(says, told, strict=True)]
        known = [int(tail.get(name) is True) for name in TAIL]
        host = [0] * self.matrices + counted + said + inverse + known
        flags = torch.tensor(host, dtype=torch.uint8, device="cpu")
        if device.type != "cpu":
            flags = pinned(flags, device)  # in one copy
        flags[: self.matrices] = nonzero
        if not on_host:
            mask = self.constants(device).stored
            for name, digests in (("said", settings), ("inverse", 255 - settings)):
                flags[self.slices[name]][self.width :] = digests * mask
        for name, flag in tail.items():
            if isinstance(flag, Tensor):
                flags[self.slices[name]] = flag
        return flags

    def only(self, flag: str, device: torch.device) -> Tensor:
        """Return the flags of a rank that sets a single flag of `TAIL` and nothing else."""
        flags = torch.zeros(self.slices[TAIL[-1]].stop, dtype=torch.uint8, device=device)
        flags[self.slices[flag]] = 1
        return flags

    def constants(self, device: torch.device) -> Constants:
        """Return the constants of this vector on a device; they are uploaded once for each device."""
        if device not in self._constants:
            numbers = [number for number, _, count in self.axes for _ in range(count)]
            self._constants[device] = Constants(
                upload(self.replicated, dtype=torch.uint8, device=device),
                upload(self.owners, dtype=torch.int64, device=device),
                upload(numbers, dtype=torch.int64, device=device),
                upload([flag for flag in self.stored for _ in range(DIGEST)], dtype=torch.uint8, device=device),
            )
        return self._constants[device]


@dataclass(frozen=True)
class ReducedFlags:
    """A `FlagVector` after its reduction: a flag is set if any rank has set it. Only `told` waits for the device."""

    flag_vector: FlagVector
    flags: Tensor

    def of(self, name: str) -> Tensor:
        """Return a part of the vector; one of `TAIL` as a 0-d tensor."""
        part = self.flags[self.flag_vector.slices[name]]
        return part[0] if name in TAIL else part

    def told(self) -> dict[str, list[int]]:
        """Return all parts of the vector by name, as numbers. The CPU waits for the device."""
        numbers = self.flags.tolist()
        return {name: numbers[part] for name, part in self.flag_vector.slices.items()}

    def somebody(self, name: str) -> Tensor:
        """Return whether any rank set a flag of `TAIL`, 0-d bool tensor."""
        return self.of(name) != 0

    def present(self) -> Tensor:
        """Return for each parameter of the plan whether any rank has a gradient, bool."""
        counts = torch.zeros(len(self.flag_vector.mine), dtype=torch.int64, device=self.flags.device)
        owners = self.flag_vector.constants(self.flags.device).owners
        return counts.index_add_(0, owners, self.of("present").long()) != 0

    def half_missing(self) -> Tensor:
        """Return for each flag "present" whether some replicas have the gradient and others lack it.

        Gradients that are partial on a rank do not count: a missing summand is zero.
        """
        replicated, owners, axes, _ = self.flag_vector.constants(self.flags.device)
        both = self.of("present") * self.of("missing") * replicated
        if len(axes):
            summed = torch.zeros(len(self.flag_vector.mine), dtype=torch.int64, device=self.flags.device)
            summed.index_add_(0, axes, (self.of("said")[: self.flag_vector.width] > 1).long())
            both = both * (summed[owners] == 0)
        return both != 0

    def mixed(self) -> Tensor:
        """Return for each byte of placements whether the gradient is placed differently on different ranks."""
        return self._differing()[: self.flag_vector.width]

    def _differing(self) -> Tensor:
        """Return for each byte of placements, and then of the digests, whether its value differs between ranks."""
        total = self.of("said").short() + self.of("inverse")
        return (total != 255) & (total != 0)

    def stops(self) -> Tensor:
        """Return whether the step ends in an error on every rank, 0-d bool tensor; `preflight` finds the error."""
        return self.somebody("error") | self.half_missing().any() | self._differing().any()


@dataclass
class Flags:
    """The flags that all ranks agreed on before any rank wrote.

    Attributes:
        nonzero: For each Matrix whether any rank has a non-zero gradient in it: booleans. If the CPU does not wait for
            the flags (CUDA), a bool tensor (n,), whose entries are false too if ``stop`` is true.
        skip: Whether any rank wants this step to change nothing.
        overflow: Whether any rank's GradScaler has found an overflow: a 0-d bool tensor. None: this rank shares no
            parameter with other ranks and has no GradScaler.
        only_creates_state: Whether this is the step by which torch's checkpoint code creates state: learning
            rate 0 and every gradient exactly zero.
        stop: 0-d bool tensor, true if any rank found an error or skips the step; the CPU does not know it yet. None if
            the CPU knows: for parameters on a CPU, at learning rate 0, and if a rank is alone and nothing can stop it.
        replan: Whether the parameters of any rank have changed since the plan was made. Then no other flag counts.
    """

    nonzero: list[bool] | Tensor
    overflow: Tensor | None
    skip: bool = False
    only_creates_state: bool = False
    stop: Tensor | None = None
    replan: bool = False
