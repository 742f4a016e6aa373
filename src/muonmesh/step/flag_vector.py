"""FlagVector: the vector of flags by which the ranks of a connected set agree before any of them writes; and Flags."""

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
rate is 0, and a gradient of AdamW's half is not zero, so this is not the step that only creates state. "error": the
rank found an error. "replan": its parameters are others than those that were planned. "stays": they are the same. Where
only some ranks have changed, both flags arrive."""

DIGEST = 16
"""Bytes by which ranks compare what they have set: 8 of what the host knows, 8 of what only the device does."""


class HasGradient(Protocol):
    """Anything that has the gradient of one parameter, or None; a `ParameterStep` does."""

    gradient: Tensor | None


class Constants(NamedTuple):
    """Numbers of a `FlagVector` that never change, kept as tensors on a device.

    Attributes:
        replicated: `FlagVector.replicated`, uint8.
        owners: `FlagVector.owners`, int64.
        axes: For each byte "placed" the number of its parameter, int64.
        stored: For each byte of the digests whether this rank belongs to its set, uint8.
    """

    replicated: Tensor
    owners: Tensor
    axes: Tensor
    stored: Tensor


@dataclass(frozen=True)
class FlagVector:
    """Where each flag stands in the vector that the ranks which share parameters reduce by maximum.

    The vector holds, each as long on every rank: "nonzero", a flag for each Matrix; "present" and "missing", for each
    parameter whether a rank has its gradient or lacks it (one pair of flags for each shard where there are replicas);
    "said" and "inverse", bytes that must be equal on all ranks that set them, and 255 minus each byte, so that the two
    maxima add up to 255 only if they are; and the flags of `TAIL`. The bytes are: for each axis of a mesh with
    replicas, how the gradient is placed (1: whole; more: 1 + its index in `REDUCTIONS`), and then `DIGEST` bytes of
    settings for each set of ranks that share parameters.

    Attributes:
        matrices: How many Matrices the plan has.
        mine: For each parameter, Muon's first and then AdamW's, which of its flags in "present" this rank sets.
        replicated: For each flag in "present" whether all replicas must have the same.
        owners: For each flag in "present" the number of its parameter.
        axes: Parameters whose gradient may be partial: each with its number, its first byte in "said", and how many
            bytes it has there, one for each axis of its mesh.
        shared: For each set of ranks that share parameters the numbers of those parameters.
        stored: Which of these sets this rank belongs to.
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
        """How many bytes say how gradients are placed."""
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
            settings: uint8, `DIGEST` bytes for each shared set; those of sets that this rank is not in do not count.
            tail: Those flags of `TAIL` that may be set; tensors on the device are not waited for.
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
        """Return the flags of a rank that says nothing else than one of `TAIL`."""
        flags = torch.zeros(self.slices[TAIL[-1]].stop, dtype=torch.uint8, device=device)
        flags[self.slices[flag]] = 1
        return flags

    def constants(self, device: torch.device) -> Constants:
        """Return what the answers are compared with, on a device, where it stays."""
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
    """A `FlagVector` after its reduction: a flag is set if any rank has set it. Nothing here waits for the device."""

    flag_vector: FlagVector
    flags: Tensor

    def of(self, name: str) -> Tensor:
        """Return a part of the vector; one of `TAIL` as a 0-d tensor."""
        part = self.flags[self.flag_vector.slices[name]]
        return part[0] if name in TAIL else part

    def told(self) -> dict[str, list[int]]:
        """Return all parts of the vector by name, for a host that waits."""
        numbers = self.flags.tolist()
        return {name: numbers[part] for name, part in self.flag_vector.slices.items()}

    def somebody(self, name: str) -> Tensor:
        """Return whether some rank set a flag of `TAIL`, 0-d bool."""
        return self.of(name) != 0

    def half_missing(self) -> Tensor:
        """Return for each flag "present" whether some replicas have the gradient and others lack it.

        A gradient that is reduced over ranks is left out: where it is missing it counts as zero.
        """
        replicated, owners, axes, _ = self.flag_vector.constants(self.flags.device)
        both = self.of("present") * self.of("missing") * replicated
        if len(axes):
            summed = torch.zeros(len(self.flag_vector.mine), dtype=torch.int64, device=self.flags.device)
            summed.index_add_(0, axes, (self.of("said")[: self.flag_vector.width] > 1).long())
            both = both * (summed[owners] == 0)
        return both != 0

    def mixed(self) -> Tensor:
        """Return for each byte of placements whether ranks have the gradient in different ways."""
        return self._differing()[: self.flag_vector.width]

    def _differing(self) -> Tensor:
        """Return for each byte of placements, and then of the digests, whether ranks have different ones."""
        total = self.of("said").short() + self.of("inverse")
        return (total != 255) & (total != 0)

    def stops(self) -> Tensor:
        """Return whether the step ends in an error on every rank, 0-d bool; `preflight` says which."""
        return self.somebody("error") | self.half_missing().any() | self._differing().any()


@dataclass
class Flags:
    """What all ranks agreed on before anything was written.

    Attributes:
        nonzero: For each Matrix whether any rank has a non-zero gradient in it: booleans. Where the host does not wait
            for them (CUDA), a bool tensor (n,), whose entries are false too if ``stop`` is true.
        present: For each Muon parameter whether any rank has a gradient. Where the host does not wait it knows of this
            rank alone, so there it is whether this rank has one.
        skip: Whether some rank says that this step changes nothing.
        overflow: Whether some rank's GradScaler has found an overflow: a 0-d bool tensor. None: this rank has no
            GradScaler, and it is alone.
        only_creates_state: Whether this is the step by which torch's checkpoint code creates state: learning
            rate 0 and every gradient exactly zero.
        stop: 0-d bool tensor, true if some rank found an error or skips, which the host does not know yet. None where
            it knows: on a CPU, anywhere at learning rate 0, and where a rank is alone that has nothing to stop it.
        replan: Whether some rank has other parameters than planned; nothing else counts then.
    """

    nonzero: list[bool] | Tensor
    present: list[bool]
    overflow: Tensor | None
    skip: bool = False
    only_creates_state: bool = False
    stop: Tensor | None = None
    replan: bool = False
