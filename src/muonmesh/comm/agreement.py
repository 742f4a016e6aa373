"""Agreement: named questions that ranks answer together, in one vector of flags that a single collective reduces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.pinned_copies import pinned

Said = bool | Sequence[int] | Tensor | None
"""What a rank says to the questions of one name: numbers that the CPU knows, or a tensor, for which the CPU does not
wait. Each is 0, 1 or `SILENT`. None: nothing."""

SILENT = 2
"""The answer of a rank that has nothing to say to a question of kind "equal"."""

_IS = bytes([1, 0] + [0] * 254), bytes([0, 1] + [0] * 254)
"""Tables for `bytes.translate`: where an answer is 0, and where it is 1."""


class Field(NamedTuple):
    """Questions of one name.

    Attributes:
        name: The name.
        width: The number of questions, such as one for each matrix.
        kind: "any": a rank says yes or nothing, and all learn whether any rank says yes. "equal": a rank says 0, 1 or
            nothing (`SILENT`), and all learn whether ranks that say something say the same.
    """

    name: str
    width: int = 1
    kind: Literal["any", "equal"] = "any"


STANDING = (Field("error"), Field("replan"), Field("follows"))
"""How a rank stands to the plan: it found an error; its parameters have changed, so all must plan again; it follows the
plan. If only some ranks have changed, "replan" and "follows" are both true after the reduction."""


def standing(error: Exception | None, *, follows: bool) -> dict[str, bool]:
    """Return a rank's answers to the questions of `STANDING`."""
    return {"error": error is not None, "replan": error is None and not follows, "follows": follows}


def bits(number: int) -> bytes:
    """Return a number below 2⁶⁴ as answers to 64 questions of kind "equal"."""
    return bytes(map(int, f"{number:064b}"))


def bits_of(text: str) -> bytes:
    """Return a hash of a text as answers to 64 questions of kind "equal"."""
    return bits(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))


class Agreement:
    """The place of each question in a vector of flags, the same on all ranks that reduce it.

    The vector has a flag for each question of kind "any". Then it has two flags for each question of kind "equal":
    whether a rank says 0, and whether a rank says 1. After the reduction a flag is not zero if any rank has set it,
    whether the reduction is a maximum or a sum, and whatever the dtype. Ranks differ where both flags are set.

    Attributes:
        zeros, ones: The place of the flags that say 0, by name, and of the flags that say yes, or 1. Only names of kind
            "equal" are in ``zeros``.
        single: The number of flags of kind "any". After them come all flags that say 0, and then all that say 1.
        pairs: The number of questions of kind "equal".
    """

    def __init__(self, *fields: Field) -> None:
        self.single, self.pairs = (sum(f.width for f in fields if f.kind == kind) for kind in ("any", "equal"))
        self.zeros, self.ones = dict[str, slice](), dict[str, slice]()
        ends = {"any": 0, "equal": self.single}
        for name, width, kind in fields:
            first, after = ends[kind], ends[kind] + width
            self.ones[name] = slice(first, after)
            if kind == "equal":
                self.zeros[name], self.ones[name] = slice(first, after), slice(first + self.pairs, after + self.pairs)
            ends[kind] = after

    def silence(self, name: str) -> bytearray:
        """Return the answers of a rank that has nothing to say to the questions of a name."""
        return bytearray([SILENT if name in self.zeros else 0]) * int(self.ones[name].stop - self.ones[name].start)

    def vector(self, answers_by_name: Mapping[str, Said], device: torch.device) -> Tensor:
        """Return the flags of this rank, uint8.

        Args:
            answers_by_name: What this rank says, by name; nothing to other questions.
            device: The device of the result.
        """
        host = memoryview(bytearray(self.single + 2 * self.pairs))
        later: list[tuple[slice, Tensor]] = []
        for name, answers in answers_by_name.items():
            for answer, places in enumerate((self.zeros, self.ones)):
                if answers is None or name not in places:
                    continue
                if isinstance(answers, Tensor):
                    later.append((places[name], answers == answer))
                else:
                    codes = bytes([answers] if isinstance(answers, bool) else answers)
                    host[places[name]] = codes.translate(_IS[answer])
        # As torch.tensor does, which reads one Python number at a time. A copy: no collective keeps Python's memory.
        lifted = torch.ops.aten.lift_fresh(torch.frombuffer(host, dtype=torch.uint8))
        vector = pinned(lifted.to("cpu", copy=True), device)
        for span, flags in later:
            vector[span] = flags
        return vector

    def ask(
        self, answers: Mapping[str, Said], values: Tensor, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Agreed]:
        """Reduce other values and the flags of this rank in one vector; return both, reduced.

        Args:
            answers: As for `vector`.
            values: The other values; may be empty.
            reduce: Reduces a vector over all ranks, by a sum or a maximum.
        """
        reduced = reduce(torch.cat([values.reshape(-1), self.vector(answers, values.device)]))
        return reduced[: values.numel()].view(values.shape), Agreed(self, reduced[values.numel() :])


@dataclass(frozen=True, eq=False)
class Agreed:
    """The reduced flags of an `Agreement`. Answers are bool tensors on the device, for which the CPU does not wait.

    It waits for the answers of `on_host` and `says`, which are to questions of kind "any". All of these are read once.
    """

    agreement: Agreement
    flags: Tensor

    @cached_property
    def _on_host(self) -> list[Any]:
        numbers: list[Any] = self.flags[: self.agreement.single].tolist()
        return numbers

    def on_host(self, name: str) -> list[bool]:
        """Return for each question of a name whether any rank says yes."""
        return [number != 0 for number in self._on_host[self.agreement.ones[name]]]

    def says(self, *names: str) -> bool:
        """Return whether any rank says yes to any question of these names."""
        return any([any(self._on_host[self.agreement.ones[name]]) for name in names])

    def answers(self, name: str) -> Tensor:
        """Return for each question of a name whether any rank says yes, or 1."""
        return self.flags[self.agreement.ones[name]] != 0

    def any(self, *names: str) -> Tensor:
        """Return whether any rank says yes to any question of these names, 0-d."""
        return torch.cat([self.flags[self.agreement.ones[name]] for name in names]).ne(0).any()

    def differs(self, name: str | None = None) -> Tensor:
        """Return for each question of a name, or for all of kind "equal", whether ranks say different things."""
        first, pairs = self.agreement.single, self.agreement.pairs
        zeros = slice(first, first + pairs) if name is None else self.agreement.zeros[name]
        return self.flags[zeros] * self.flags[zeros.start + pairs : zeros.stop + pairs] != 0

    def plan_again(self, *, waits: bool, follows: bool) -> bool:
        """Return whether all ranks must plan again.

        Args:
            waits: Whether the CPUs wait for the answer. If not, only a rank that has changed reads it. Ranks that
                follow the plan go on, so this rank plans again only if no rank follows it.
            follows: Whether this rank follows the plan.
        """
        if waits:
            return self.says("replan")
        return not follows and not bool(self.any("follows", "error"))
